"""Charts as SVG without any library: lines, stacked areas and stacked bars, inlined into a page or as files.

They are as wide as the page (positions are percentages), follow its light or dark colors, and need no script: the
values at the pointer are text that CSS shows.

A color is a CSS variable of ``STYLE``, named after what is drawn: ``color_of("optimizer states")``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from zeroshard.utils.format import format_bytes

Points = Sequence[tuple[float, float]]
Bars = Sequence[tuple[str, Mapping[str, float]]]  # name of each bar, and its values by kind
MAX_POINTS = 600  # of a drawn line: more than a screen can show
MAX_ROWS = 50  # of a line in the table, and positions of the pointer
BAR_HEIGHT = 52  # pixels, with the name above the bar
RIGHT, BOTTOM = 14, 44  # margins of a line chart in pixels
NUMBERED_COLORS = tuple(f"var(--line-{number})" for number in range(8))  # for lines whose names have no color
STYLE = """
:root {
  --page: #f7f6f3; --card: #ffffff; --text: #1c2127; --muted: #5a646e; --line: #e2dfd8; --grid: #eceae5;
  --training: #3d4f9f; --training-light: #a3aedd; --held-out: #c2452d; --other: #b9bfc6; --bad: #b3372a;
  --parameters: #2f6db5; --gradients: #d9822b; --optimizer-states: #1f8f76; --master-weights: #7d5299;
  --gathered: #93c0ea; --autograd: #f4c592; --buckets: #dfc544; --step: #cfa3c4; --staging: #a3abb4;
  --activations: #8fcfbb; --kept-inputs: #56a38c; --all-reduce: #6c7a89;
  --line-0: #1c2127; --line-1: #d9822b; --line-2: #56a0d8; --line-3: #1f8f76; --line-4: #2f55a5; --line-5: #b95f9a;
  --line-6: #c2452d; --line-7: #888f96;
  --outer-optimizer: var(--all-reduce); --gradients-of-autograd: var(--autograd);
  --activation-gather: var(--activations);
  --all-gather: var(--parameters); --outer-all-gather: var(--master-weights); --reduce-scatter: var(--gradients);
  --outer-reduce-scatter: var(--optimizer-states); --all-to-all: var(--buckets); --replica-average: var(--step);
  --computing: var(--training); --tensor-collectives: var(--held-out); --launching: var(--staging);
  --waiting-for-all-gathers: var(--parameters); --waiting-for-reductions: var(--gradients);
  --updating: var(--optimizer-states); --averaging-replicas: var(--master-weights);
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #121519; --card: #1a1e24; --text: #e7e9eb; --muted: #9ea8b3; --line: #2c323a; --grid: #282d35;
    --training: #a3b1f5; --training-light: #5a659c; --held-out: #ff8f70; --other: #535b64; --bad: #f08a7c;
    --parameters: #5b9be3; --gradients: #e8994a; --optimizer-states: #3fb597; --master-weights: #ab80c9;
    --gathered: #2f5f92; --autograd: #94602c; --buckets: #b59d2c; --step: #8c5f80; --staging: #69727c;
    --activations: #2c7a66; --kept-inputs: #6fc4ad; --all-reduce: #8795a4;
    --line-0: #e7e9eb; --line-4: #7f9cf0; --line-6: #ff8f70;
  }
}
svg text { font: 12px system-ui, sans-serif; fill: var(--muted); }
svg .strong { font-weight: 650; fill: var(--text); } svg .name { font-size: 13px; fill: var(--text); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; } svg { overflow: visible; }
svg .grid { stroke: var(--grid); } svg .mark { stroke: var(--muted); stroke-dasharray: 2 3; }
svg .limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 6 4; }
svg path { fill: none; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
svg .dotted { stroke-dasharray: 2 3; }
svg .area { stroke: none; } svg .bar { stroke: var(--card); stroke-width: 1.5; } svg .point { stroke: var(--card); }
svg .faded { opacity: 0.45; }
svg .tip { opacity: 0; } svg .tip:hover { opacity: 1; } svg .tip rect { fill: transparent; }
svg .tip line { stroke: var(--muted); } svg .tip text { fill: var(--text); }
"""


@dataclass(frozen=True)
class Line:
    """A line, an area on top of the areas before it, or single points."""

    name: str
    points: Points
    color: str
    look: Literal["line", "dotted", "area", "point"] = "line"
    width: float = 2.2


@dataclass(frozen=True)
class Chart:
    """A drawn chart, what its colors mean, and its numbers as a table whose first row are the names of the columns."""

    title: str
    svg: str
    height: int
    legend: Sequence[tuple[str, str]]
    table: Sequence[Sequence[str]]
    margins: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Pixels above, right, below and left, for the texts of the axes."""

    def as_html(self) -> str:
        """Return the chart with its legend and its numbers for a page that has ``STYLE``."""
        legend = "".join(f'<li><i style="background:{color}"></i>{escape(name)}</li>' for name, color in self.legend)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.table)
        top, right, bottom, left = self.margins
        style = f"width:calc(100% - {left + right}px);margin:{top}px {right}px {bottom}px {left}px"
        size = f'height="{self.height}" style="{style}"'
        return (
            f'<ul class="legend">{legend}</ul>\n'
            f'<svg role="img" aria-label="{escape(self.title)}" {size}>{self.svg}</svg>\n'
            f"<details><summary>The numbers</summary><table>{rows}</table></details>"
        )


def color_of(kind: str) -> str:
    """Return the color of a kind of memory, time or collective.

    >>> color_of("optimizer states")
    'var(--optimizer-states, var(--other))'
    """
    return f"var(--{re.sub('[^a-z]+', '-', kind)}, var(--other))"


def format_number(value: float) -> str:
    """Format a number for an axis or a table.

    >>> format_number(6.97123), format_number(0.00012), format_number(21034.7)
    ('6.971', '0.00012', '21,035')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_title: str,
    format_y: Callable[[float], str] = format_number,
    marks: Sequence[tuple[str, float]] = (),
    has_zero: bool = False,
    height: int = 320,
) -> Chart:
    """Draw lines over a common axis, with ``marks``: pairs of name and x.

    >>> chart = line_chart("Loss", [Line("training", [(1, 7.0), (2, 6.5)], color_of("training"))], x_title="step")
    >>> chart.table
    [['step', 'training'], ['1', '7'], ['2', '6.5']]
    """
    stacked = _stack(lines)
    xs = [x for line in lines for x, _ in line.points] or [0.0]
    ys = [y for line in stacked for _, y in line.points] or [0.0]
    ticks = _ticks(0.0 if has_zero else min(ys), max(ys))
    first = min(xs)
    width = max(xs) - first or 1.0
    left = 16 + 7 * max(len(format_y(tick)) for tick in ticks)
    top = 42 if marks else 24

    def across(x: float) -> float:
        return (x - first) / width

    def down(y: float) -> float:
        return (ticks[-1] - y) / (ticks[-1] - ticks[0])

    parts = []
    for tick in ticks:
        y = f"{down(tick):.2%}"
        parts.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="end" x="-8" y="{y}" dy="4">{escape(format_y(tick))}</text>')
    for tick in _ticks(first, max(xs)):
        if 0 <= across(tick) <= 1:
            at = f'x="{across(tick):.2%}" y="100%"'
            parts.append(f'<text class="middle" {at} dy="18">{format_number(tick)}</text>')
    parts.append(f'<text class="middle" x="50%" y="100%" dy="36">{escape(x_title)}</text>')
    parts.append('<svg viewBox="0 0 1000 1000" preserveAspectRatio="none">')
    circles = []
    for line in stacked:
        kept = [line.points[index] for index in downsample([y for _, y in line.points])]
        if line.look == "point" or len(kept) == 1:
            style = f'class="point" r="4.5" fill="{line.color}"'
            circles += [f'<circle {style} cx="{across(x):.2%}" cy="{down(y):.2%}"/>' for x, y in kept]
            continue
        placed = [(f"{1000 * across(x):.4g}", f"{1000 * down(y):.4g}") for x, y in kept]
        if line.look == "area":  # with steps: memory is allocated and freed at once
            paint = f"fill:{line.color}"
            path = f"M{placed[0][0]} 1000" + "".join(f"H{x}V{y}" for x, y in placed) + "V1000Z"
        else:
            paint = f"stroke:{line.color};stroke-width:{line.width}"
            path = "M" + "L".join(f"{x} {y}" for x, y in placed)
        parts.append(f'<path class="{line.look}" style="{paint}" d="{path}"/>')
    parts += ["</svg>", *circles]
    for name, x in marks:
        at = f"{across(x):.2%}"
        side = "end" if across(x) > 0.9 else "start"
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="-14" y2="100%"/>')
        parts.append(f'<text class="{side}" x="{at}" y="-18">{escape(name)}</text>')
    table = [[x_title, *(line.name for line in lines)]]
    known = [dict(line.points) for line in lines]
    positions = {x for values in known for x in (*list(values)[:: 1 + len(values) // MAX_ROWS], max(values))}
    for x in sorted(positions):
        row = [format_y(values[x]) if x in values else "" for values in known]
        table.append([format_number(x), *row])
        shown = [f"{line.name} {value}" for line, value in zip(lines, row, strict=True) if value]
        area = f'<rect x="{across(x) - 0.5 / len(positions):.2%}" width="{1 / len(positions):.2%}" height="100%"/>'
        cursor = f'<line x1="{across(x):.2%}" x2="{across(x):.2%}" y2="100%"/>'
        text = escape(f"{x_title} {format_number(x)}: {', '.join(shown)}")
        parts.append(f'<g class="tip">{area}{cursor}<text class="end" x="100%" y="{12 - top}">{text}</text></g>')
    legend = [(line.name, line.color) for line in lines] if len(lines) > 1 else []
    margins = (top, RIGHT, BOTTOM, left)
    return Chart(title, "\n".join(parts), height - top - BOTTOM, legend, table, margins)


def bar_chart(
    title: str,
    bars: Bars,
    *,
    format_value: Callable[[float], str] = format_bytes,
    limit: tuple[str, float] | None = None,
    faded: str = "",
) -> Chart:
    """Draw stacked bars, each with its name and total above it, and a ``limit``, a pair of name and value.

    Kinds are stacked in the order of their first use. The bar named ``faded`` is drawn lighter.

    >>> bar_chart("Memory", [("rank 0", {"parameters": 2000.0, "gradients": 1000.0})]).table
    [['', 'parameters', 'gradients', 'total'], ['rank 0', '2.00 kB', '1.00 kB', '3.00 kB']]
    """
    kinds = list(dict.fromkeys(kind for _, values in bars for kind, value in values.items() if value))
    legend = [(kind, color_of(kind)) for kind in kinds]
    end = max([sum(values.values()) for _, values in bars] + [1e-30])
    if limit is not None:
        end = max(end, 1.01 * limit[1])
        legend.append((f"{limit[0]}, {format_value(limit[1])}", "var(--bad)"))
    parts = []
    table = [["", *kinds, "total"]]
    for number, (name, values) in enumerate(bars):
        y = BAR_HEIGHT * number
        total = format_value(sum(values.values()))
        parts.append(f'<text class="name" y="{y + 18}">{escape(name)} <tspan class="strong">{total}</tspan></text>')
        start = 0.0
        for kind in kinds:
            value = values.get(kind, 0.0)
            tip = f"<title>{escape(f'{name}: {kind} {format_value(value)}')}</title>"
            at = f'x="{start / end:.3%}" width="{value / end:.3%}" y="{y + 26}" height="20"'
            parts.append(f'<rect class="bar{" faded" * (name == faded)}" {at} fill="{color_of(kind)}">{tip}</rect>')
            start += value
        table.append([name, *(format_value(values.get(kind, 0.0)) for kind in kinds), total])
    if limit is not None:
        parts.append(f'<line class="limit" x1="{limit[1] / end:.2%}" x2="{limit[1] / end:.2%}" y2="100%"/>')
    return Chart(title, "\n".join(parts), BAR_HEIGHT * len(bars), legend, table)


def as_svg(charts: Sequence[Chart], columns: int = 1, width: int = 920) -> str:
    """Return charts with their titles and legends as an SVG file."""
    parts = []
    bottom = 0
    cell = width // columns
    for index, chart in enumerate(charts):
        x = index % columns * cell + 16
        if index % columns == 0:
            top = bottom
        y = top + 30
        parts.append(f'<text class="name strong" x="{x}" y="{y}">{escape(chart.title)}</text>')
        left = x
        y += 22
        for name, color in chart.legend:
            name_width = 30 + 7 * len(name)
            if left + name_width > x + cell - 32:
                left = x
                y += 18
            parts.append(f'<rect x="{left}" y="{y - 9}" width="10" height="10" rx="2" fill="{color}"/>')
            parts.append(f'<text x="{left + 16}" y="{y}">{escape(name)}</text>')
            left += name_width
        y += 10
        above, right, below, beside = chart.margins
        size = f'width="{cell - 32 - beside - right}" height="{chart.height}"'
        parts.append(f'<svg x="{x + beside}" y="{y + above}" {size}>{chart.svg}</svg>')
        bottom = max(bottom, y + above + chart.height + below + 10)
    size = f'viewBox="0 0 {width} {bottom}" width="{width}" height="{bottom}"'
    background = '<rect width="100%" height="100%" fill="var(--card)"/>'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{background}\n{body}\n</svg>\n'


def downsample(values: Sequence[float]) -> list[int]:
    """Return at most ``MAX_POINTS`` indices that keep the shape: the ends, and the extremes of every interval.

    >>> downsample([5.0, 1.0, 3.0])
    [0, 1, 2]
    """
    count = len(values)
    if count <= MAX_POINTS:
        return list(range(count))
    kept = {0, count - 1}
    intervals = MAX_POINTS // 2 - 1
    for interval in range(intervals):
        indices = range(interval * count // intervals, (interval + 1) * count // intervals)
        kept |= {min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}
    return sorted(kept)


def _stack(lines: Sequence[Line]) -> list[Line]:
    """Return the lines in the order in which they are drawn: areas with the sum of those below them, highest first."""
    areas: list[Line] = []
    others = []
    for line in lines:
        if line.look != "area":
            others.append(line)
            continue
        if areas:
            below = dict(areas[0].points)
            line = replace(line, points=[(x, y + below[x]) for x, y in line.points])
        areas.insert(0, line)
    return areas + others


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers around a range, about five.

    >>> _ticks(0.3, 4.1)
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if high <= low:
        margin = max(1.0, abs(low) / 10)
        low -= margin
        high += margin
    rough = (high - low) / 4
    size: float = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= 0.999 * rough)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
