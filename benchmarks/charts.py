"""Bar charts as SVG: readable on a light and a dark page, with text that can be selected, and without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, EDGE, LINE, BAR = 760, 20, 20, 14  # pixels: the chart, its margin, the distance of two bars, a bar's height
LETTER = 7.4  # pixels of a letter, a little more than the average: the font is not known here
OURS = "zeroshard"  # bars whose name begins with it have the first colour; all others are grey
STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #1c2127; }
.title { font-weight: 620; font-size: 15px; } .name { fill: #5a646e; } .group { font-weight: 600; }
.ground { fill: #ffffff; stroke: #e2dfd8; } .mark { stroke: #c2452d; stroke-dasharray: 4 3; }
.at-mark { fill: #c2452d; } .ours { fill: #2f6db5; } .others { fill: #a3abb4; } .second { opacity: 0.45; }
@media (prefers-color-scheme: dark) {
text { fill: #e7e9eb; } .name { fill: #9ea8b3; } .ground { fill: #1a1e24; stroke: #2c323a; }
.mark { stroke: #ff8f70; } .at-mark { fill: #ff8f70; } .ours { fill: #5b9be3; } .others { fill: #69727c; }
}"""


@dataclass(frozen=True)
class Bar:
    """A value and, drawn lighter behind it, perhaps a second one; ``label`` is the text at its end."""

    group: str
    name: str
    values: Sequence[float]
    label: str


def draw_bars(title: str, bars: Sequence[Bar], legend: Sequence[str] = (), mark: str = "") -> str:
    """Draw bars under the names of their groups. ``legend`` names two values of a bar; ``mark`` names a line at 1."""
    left = EDGE + LETTER * max(len(bar.name) for bar in bars) + 10
    right = WIDTH - EDGE - LETTER * max(len(bar.label) for bar in bars) - 8
    scale = (right - left) / max(value for bar in bars for value in bar.values)
    body, x, y = [], left, EDGE + 2.0 * LINE
    for index, name in enumerate(legend):
        body += [_rect("ours second" if index else "ours", x, y - 10, 12, 12), _text(x + 18, y + 1, name, "name")]
        x += 18 + LETTER * len(name) + 24
    y += LINE if legend else 0
    top, group = y, ""
    for bar in bars:
        if bar.group != group:
            y += BAR if y > top else 0
            body.append(_text(EDGE, y + 14, bar.group, "group"))
            group, y = bar.group, y + LINE
        kind = "ours" if bar.name.startswith(OURS) else "others"
        for index in reversed(range(len(bar.values))):
            body.append(_rect(f"{kind} second" if index else kind, left, y + 1, scale * bar.values[index], BAR))
        body.append(_text(left - 10, y + 12, bar.name, "name", "end"))
        body.append(_text(left + scale * max(bar.values) + 8, y + 12, bar.label))
        y += LINE
    if mark:
        at = left + scale
        body.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{y:.1f}"/>')
        body.append(_text(at, y + 14, mark, "at-mark", "middle"))
        y += LINE
    height = y + EDGE / 2
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>\n{STYLE}\n</style>",
        _rect("ground", 0.5, 0.5, WIDTH - 1, height - 1, 10),
        _text(EDGE, EDGE + 14, title, "title"),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _rect(kind: str, x: float, y: float, width: float, height: float, radius: int = 2) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place} rx="{radius}"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    look = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{look}>{escape(words)}</text>'
