"""Chart: one Plotly figure with its legend and its data as a table, and helpers to build figures.

A color is the name of a CSS variable, such as `var(--gradients)`: the page's stylesheet defines the colors, light and
dark, and the page's script inserts them when it draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from zeroshard.utils.format import format_bytes

JsonObject = dict[str, Any]
Bars = Sequence[tuple[str, Mapping[str, float]]]  # name of each bar, and its values by kind
MAX_POINTS = 2000  # per line of a chart
BYTES_FORMAT = "%{y:.3~s}B"  # shown when the pointer is on a point


@dataclass(frozen=True)
class Chart:
    """A figure, its text for screen readers, and its data as a table."""

    name: str
    """Name, also the id of the HTML element."""
    label: str
    """The figure in one sentence, for screen readers."""
    figure: JsonObject
    """Plotly's `data` and `layout`."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[tuple[str, str]] = field(default=())
    """Pairs of name and color."""


def plot_axis(title: str, **options: Any) -> JsonObject:
    """Return an axis with Plotly's options."""
    return {
        "title": {"text": title, "standoff": 10},
        "gridcolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
        "ticklabelstandoff": 6,
        **options,
    }


def plot_layout(height: int, xaxis: JsonObject, yaxis: JsonObject, **options: Any) -> JsonObject:
    """Return a layout with Plotly's options."""
    return {
        "height": height,  # pixels; the page sets the width
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--muted)"},
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--text)"}},
        "showlegend": False,  # the page has its own legend, which wraps on a narrow screen
        "xaxis": xaxis,
        "yaxis": yaxis,
        **options,
    }


def bytes_axis(title: str) -> JsonObject:
    """Return an axis for bytes."""
    return plot_axis(title, tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=6)


def line_trace(
    x: Sequence[float], y: Sequence[float], name: str, color: str, width: float, hover: str = "%{y:.4~g}"
) -> JsonObject:
    """Return a line; a single point is drawn as a marker."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": color, "width": width},
        "marker": {"color": color},  # for a run with one step
        "hovertemplate": hover,
    }


def stacked_bars(
    bars: Bars,
    colors: Mapping[str, str],
    *,
    opacity: float | Sequence[float] = 1.0,
    format_value: Callable[[float], str] = format_bytes,
    unit: str = "B",
    min_axis_end: float = 0.0,
) -> JsonObject:
    """Return a figure of stacked bars as wide as the page, each with its name and total above it.

    ``colors`` names the kinds in stacking order; a kind without a color only counts in the total. ``opacity`` is one
    number, or one per bar. The axis ends at ``min_axis_end`` or at the largest total, whichever is larger.
    """
    names, totals = [name for name, _ in bars], [sum(values.values()) for _, values in bars]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(kind),
            "y": names,
            "x": [values.get(kind, 0) for _, values in bars],
            "marker": {"color": color, "opacity": opacity, "line": {"color": "var(--card)", "width": 1.5}},
            "hovertemplate": f"%{{y}}: {escape(kind)} %{{x:.3~s}}{unit}<extra></extra>",
        }
        for kind, color in colors.items()
    ]
    xaxis = plot_axis("", range=[0, max([min_axis_end, *totals])], visible=False, fixedrange=True)
    yaxis = plot_axis("", range=[len(names) - 0.55, -0.85], visible=False, fixedrange=True, type="category")
    layout = plot_layout(52 * len(names) + 8, xaxis, yaxis, barmode="stack", bargap=0.6, hovermode="closest")
    layout["margin"] = {"l": 0, "r": 0, "t": 0, "b": 0}
    position = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "y", "yanchor": "bottom", "yshift": 11}
    style = {"showarrow": False, "borderpad": 0, "font": {"size": 13, "color": "var(--text)"}}
    layout["annotations"] = [
        {**position, **style, "y": name, "text": f"{name} <b>{format_value(total)}</b>"}
        for name, total in zip(names, totals, strict=True)
    ]
    return {"data": data, "layout": layout}


def bar_rows(bars: Bars, kinds: Iterable[str], format_value: Callable[[float], str] = format_bytes) -> list[list[str]]:
    """Return bars as rows of a table: name, the value of each kind, total.

    >>> bar_rows([("rank 0", {"parameters": 2000, "gradients": 1000})], ["parameters", "gradients"])
    [['rank 0', '2.00 kB', '1.00 kB', '3.00 kB']]
    """
    return [
        [name, *(format_value(values.get(kind, 0)) for kind in kinds), format_value(sum(values.values()))]
        for name, values in bars
    ]


def memory_over_time(
    label: str,
    milliseconds: Sequence[float],
    memory: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    *,
    phases: Sequence[Sequence[Any]],
    time_title: str,
    allocated: Sequence[float] | None = None,
) -> Chart:
    """Draw memory over time, stacked by kind, with the starts of the phases marked: pairs of name and seconds.

    ``allocated`` is all memory, including activations and others that have no kind; it is a dotted line.
    """
    total = [sum(values) for values in zip(*memory.values(), strict=True)]
    peak, indices = total.index(max(total)), downsample(total)
    x = [milliseconds[i] for i in indices]
    data = []
    for kind, values in memory.items():
        area = line_trace(x, [values[i] for i in indices], escape(kind), colors[kind], 0, BYTES_FORMAT)
        area["line"]["shape"] = "hv"  # memory is allocated and freed in steps
        data.append(area | {"stackgroup": "held", "fillcolor": colors[kind]})
    legend = [(kind, colors[kind]) for kind in memory]
    if allocated:
        line = line_trace(x, [allocated[i] for i in indices], "total allocated", "var(--text)", 1.5, BYTES_FORMAT)
        line["line"]["dash"] = "dot"
        data.append(line)
        legend.append(("total allocated, including activations", "var(--text)"))
    xaxis = plot_axis(time_title, range=[x[0], x[-1]], unifiedhovertitle={"text": "%{x:.3~g} ms"})
    layout = plot_layout(380, xaxis, bytes_axis("bytes in use"), hovermode="x unified", **_phase_markers(phases, x[-1]))
    layout["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    rows = [
        [kind, *map(format_bytes, (values[0], max(values), values[peak]))]
        for kind, values in {**memory, "total": total}.items()
    ]
    columns = ["", "at the start", "at most", "at the peak of the total"]
    return Chart("timeline", label, {"data": data, "layout": layout}, columns, rows, legend)


def downsample(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Return at most ``limit`` indices that keep the shape: both ends, and the minimum and maximum of every interval.

    >>> downsample([0, 5, 1, 1, -3, 1, 1, 1, 0, 2], limit=6)
    [0, 1, 4, 8, 9]
    """
    count, num_intervals = len(values), (limit - 2) // 2
    if count <= limit:
        return list(range(count))
    kept = {0, count - 1}
    for interval in range(num_intervals):
        indices = range(interval * count // num_intervals, (interval + 1) * count // num_intervals)
        kept |= {min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}
    return sorted(kept)


def _phase_markers(starts: Sequence[Sequence[Any]], axis_end_ms: float) -> JsonObject:
    """Return markers for the start of each phase, with names above the plot, in a second row if they would collide."""
    shapes, annotations, row, previous = [], [], 0, -math.inf
    for name, seconds in starts:
        milliseconds = seconds * 1000
        row = 1 - row if milliseconds - previous < 0.3 * axis_end_ms else 0
        previous = milliseconds
        axes = {"xref": "x", "yref": "paper"}
        line = {"type": "line", "line": {"color": "var(--muted)", "width": 1, "dash": "dot"}}
        shapes.append({**axes, **line, "x0": milliseconds, "x1": milliseconds, "y0": 0, "y1": 1})
        text = {"text": escape(str(name)), "showarrow": False, "xanchor": "left", "yanchor": "bottom"}
        annotations.append({**axes, **text, "x": milliseconds, "y": 1, "yshift": 14 * row})
    if previous > 0.85 * axis_end_ms:
        annotations[-1] |= {"xanchor": "right"} if row else {"xanchor": "center"}
    return {"shapes": shapes, "annotations": annotations}
