"""Chart: one Plotly figure with its legend and its data as a table, and helpers to build figures.

A color is the name of a CSS variable, such as `var(--gradients)`: the page's stylesheet defines the colors, light and
dark, and the page's script inserts them when it draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from zeroshard.utils.format import format_bytes

JsonObject = dict[str, Any]  # a JSON object


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


def bytes_axis(title: str, **options: Any) -> JsonObject:
    """Return an axis for bytes."""
    return plot_axis(title, tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=6, **options)


def line_trace(
    x: Sequence[float], y: Sequence[float], name: str, color: str, width: float, value_format: str = ".4~g"
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
        "hovertemplate": f"%{{y:{value_format}}}",
    }


def bar_trace(
    names: Sequence[str],
    values: Sequence[float],
    kind: str,
    color: str,
    opacity: float | Sequence[float] = 1.0,
    unit: str = "B",
) -> JsonObject:
    """Return the part of one kind in stacked bars."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape(kind),
        "y": list(names),
        "x": list(values),
        "marker": {"color": color, "opacity": opacity, "line": {"color": "var(--card)", "width": 1.5}},
        "hovertemplate": f"%{{y}}: {escape(kind)} %{{x:.3~s}}{unit}<extra></extra>",
    }


def stacked_bar_layout(
    names: Sequence[str],
    totals: Sequence[float],
    format_value: Callable[[float], str] = format_bytes,
    min_axis_end: float = 0.0,
) -> JsonObject:
    """Return the layout of stacked bars as wide as the page, each with its name and total above it.

    The axis ends at ``min_axis_end`` or at the largest total, whichever is larger.
    """
    xaxis = plot_axis("", range=[0, max([min_axis_end, *totals])], visible=False, fixedrange=True)
    yaxis = plot_axis("", range=[len(names) - 0.55, -0.85], visible=False, fixedrange=True, type="category")
    layout = plot_layout(52 * len(names) + 8, xaxis, yaxis, barmode="stack", bargap=0.6, hovermode="closest")
    layout["margin"] = {"l": 0, "r": 0, "t": 0, "b": 0}
    position = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "y", "yanchor": "bottom", "yshift": 11}
    style = {"showarrow": False, "borderpad": 0, "font": {"size": 13, "color": "var(--text)"}}
    layout["annotations"] = [
        {**position, **style, "y": name, "text": f"{name} <b>{format_value(value)}</b>"}
        for name, value in zip(names, totals, strict=True)
    ]
    return layout


def phase_markers(starts: Sequence[Sequence[Any]], axis_end_ms: float) -> JsonObject:
    """Return markers for the start of each phase, with names above the plot; names that would collide use a second row.

    ``starts`` are pairs of name and seconds.
    """
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
