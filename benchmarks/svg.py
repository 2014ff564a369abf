"""SVG: bars and lines as small pictures: readable on a light and a dark screen, their text selectable, no script.

Colours are those of the library's HTML pages (`src/zeroshard/page/base.html.j2`). A picture has its own ground, for
what it is embedded in need not be light where the screen's setting is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760  # all lengths are pixels
EDGE = 20  # around everything
LETTER = 7.4  # a letter's width, a little more than the mean: no font is known here
LINE = 20  # a line of text
BAR = 14
APART = 14  # between groups
HEIGHT = 260  # of the plane that lines are drawn in
OURS = "zeroshard"  # what begins with it is drawn in the first colour, all others in grey
STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #1c2127; }
.title { font-weight: 620; font-size: 15px; } .name, .tick { fill: #5a646e; } .group { font-weight: 600; }
.ground { fill: #ffffff; stroke: #e2dfd8; } .grid { stroke: #eceae5; } .mark { stroke: #c2452d; stroke-dasharray: 4 3; }
.ours { fill: #2f6db5; } .others { fill: #a3abb4; } .beyond { opacity: 0.45; } .called { fill: #c2452d; }
.line { fill: none; stroke-width: 2; } .hue0 { --hue: #2f6db5; } .hue1 { --hue: #d9822b; } .hue2 { --hue: #1f8f76; }
.hue3 { --hue: #7d5299; } .hue4 { --hue: #c2452d; } .hue5 { --hue: #6c7a89; }
.line { stroke: var(--hue); } .point, .end { fill: var(--hue); }
@media (prefers-color-scheme: dark) {
text { fill: #e7e9eb; } .name, .tick { fill: #9ea8b3; } .ground { fill: #1a1e24; stroke: #2c323a; }
.grid { stroke: #282d35; } .mark { stroke: #ff8f70; } .called { fill: #ff8f70; } .ours { fill: #5b9be3; }
.others { fill: #69727c; } .hue0 { --hue: #5b9be3; } .hue1 { --hue: #e8994a; } .hue2 { --hue: #3fb597; }
.hue3 { --hue: #ab80c9; } .hue4 { --hue: #ff8f70; } .hue5 { --hue: #8795a4; } .point, .end { fill: var(--hue); }
}"""
HUES = 6


@dataclass(frozen=True)
class Bar:
    """One bar: a value, and perhaps a larger one that is drawn lighter beyond it."""

    group: str
    name: str
    values: Sequence[float | None]
    said: str
    """The words at its end."""


@dataclass(frozen=True)
class Line:
    """One line, through points whose x increases."""

    name: str
    points: Sequence[tuple[float, float]]


def bars(title: str, drawn: Sequence[Bar], parts: Sequence[str], mark: tuple[float, str] | None) -> str:
    """Bars, one under the other, under the names of their groups.

    ``parts`` names the values of a bar where there are two; ``mark`` is a value with its name, a line across all.
    """
    left = EDGE + LETTER * max(len(bar.name) for bar in drawn) + 10
    right = WIDTH - EDGE - LETTER * max(len(bar.said) for bar in drawn) - 8
    known = [value for bar in drawn for value in bar.values if value is not None]
    most = max([*known, mark[0] if mark else 0.0]) or 1.0
    each = (right - left) / most
    body, y = _legend(parts, left) if len(parts) > 1 else ([], 0.0)
    y += EDGE + 2 * LINE
    top, group = y, ""
    for bar in drawn:
        if bar.group != group:
            group = bar.group
            y += APART if y > top else 0
            body.append(_text(EDGE, y + 14, group, "group"))
            y += LINE
        body += _bar(bar, left, y, each)
        y += LINE
    if mark:
        at = left + each * mark[0]
        body.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{y:.1f}"/>')
        body.append(_text(at, y + 14, mark[1], "called", "middle"))
        y += LINE
    return _picture(title, y + EDGE / 2, body)


def _bar(bar: Bar, left: float, y: float, each: float) -> list[str]:
    kind = "ours" if bar.name.startswith(OURS) else "others"
    body, end = [_text(left - 10, y + 12, bar.name, "name", "end")], left
    for index, value in reversed(list(enumerate(bar.values))):
        if value is not None:
            shade = f"{kind} beyond" if index else kind
            place = f'x="{left:.1f}" y="{y + 1:.1f}" width="{each * value:.1f}" height="{BAR}"'
            body.append(f'<rect class="{shade}" {place} rx="2"/>')
            end = max(end, left + each * value)
    return [*body, _text(end + 8, y + 12, bar.said)]


def _legend(parts: Sequence[str], left: float) -> tuple[list[str], float]:
    """What the two shades of bars mean, and the height it takes."""
    body, x, y = [], left, EDGE + 2 * LINE
    for index, name in enumerate(parts):
        shade = "ours beyond" if index else "ours"
        body.append(f'<rect class="{shade}" x="{x:.1f}" y="{y - 10}" width="12" height="12" rx="2"/>')
        body.append(_text(x + 18, y + 1, name, "name"))
        x += 18 + LETTER * len(name) + 24
    return body, LINE


def lines(title: str, drawn: Sequence[Line], across: str, up: str, log: bool) -> str:
    """Lines over an axis that begins at 0 or, with ``log``, grows by factors."""
    right = WIDTH - EDGE - LETTER * max(len(line.name) for line in drawn) - 12
    xs = sorted({x for line in drawn for x, _ in line.points})
    steps = _ticks(max(y for line in drawn for _, y in line.points))
    left = EDGE + LETTER * max(len(_short(step)) for step in steps) + 8
    top, bottom = EDGE + 3 * LINE, EDGE + 3 * LINE + HEIGHT
    low, high = (math.log(xs[0]), math.log(xs[-1])) if log else (0.0, xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        share = ((math.log(x) if log else x) - low) / (high - low or 1.0)
        return left + share * (right - left), bottom - y / steps[-1] * HEIGHT

    body = [_text(EDGE, top - 14, up, "tick")]
    for step in steps:
        y = place(xs[0], step)[1]
        body.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(_text(left - 8, y + 4, _short(step), "tick", "end"))
    taken = -math.inf
    for x in xs:
        at, words = place(x, 0)[0], f"{x:,.12g}"
        if at - LETTER * len(words) / 2 > taken:
            body.append(_text(at, bottom + 18, words, "tick", "middle"))
            taken = at + LETTER * len(words) / 2 + 6
    body.append(_text((left + right) / 2, bottom + 38, across, "tick", "middle"))
    for index, line in enumerate(drawn):
        body += _line(index, line, [place(*point) for point in line.points])
    ends = _apart([place(*line.points[-1])[1] for line in drawn])
    body += [
        f'<g class="hue{index % HUES}">{_text(right + 10, y + 4, line.name, "end")}</g>'
        for index, (line, y) in enumerate(zip(drawn, ends, strict=True))
    ]
    return _picture(title, bottom + 38 + EDGE, body)


def _line(index: int, line: Line, places: Sequence[tuple[float, float]]) -> list[str]:
    called, path = escape(line.name), " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    points = [
        f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{called}: {_short(value)}</title></circle>'
        for (x, y), (_, value) in zip(places, line.points, strict=True)
    ]
    return [f'<g class="hue{index % HUES}"><polyline class="line" points="{path}"/>', *points, "</g>"]


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first that is no less than the largest value.

    >>> _ticks(47.0), _ticks(0.9)
    ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0], [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0])
    """
    rough = (most or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def _apart(heights: Sequence[float]) -> list[float]:
    """The same heights, moved so that a line of text fits between any two."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    found, above = list(heights), -math.inf
    for index in order:
        above = found[index] = max(heights[index], above + LINE - 4)
    return found


def _short(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    look = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{look}>{escape(words)}</text>'


def _picture(title: str, height: float, body: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    first = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="10"/>',
        _text(EDGE, EDGE + 14, title, "title"),
    ]
    return "\n".join([*first, *body, "</svg>"]) + "\n"
