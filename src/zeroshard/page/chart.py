"""Chart: one picture as Plotly's data, with its legend and its numbers as a table; and what figures are made of.

A colour here is the name of a CSS custom property, `var(--gradients)`: the page's stylesheet holds the colours, light
and dark, and the page's script puts them in when it draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from zeroshard.memory.report import format_bytes

JsonObject = dict[str, Any]  # an object of JSON


@dataclass(frozen=True)
class Chart:
    """A picture, what a screen reader says instead of it, and its numbers."""

    name: str
    """Also the id of its element."""
    label: str
    """The picture in one sentence."""
    figure: JsonObject
    """Plotly's `data` and `layout`."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[tuple[str, str]] = field(default=())
    """Pairs of name and colour."""


def plot_axis(title: str, **options: Any) -> JsonObject:
    """An axis; options are Plotly's."""
    return {
        "title": {"text": title, "standoff": 10},
        "gridcolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
        "ticklabelstandoff": 6,
        **options,
    }


def plot_layout(height: int, xaxis: JsonObject, yaxis: JsonObject, **options: Any) -> JsonObject:
    """A layout; options are Plotly's."""
    return {
        "height": height,  # pixels; the width is the page's
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--muted)"},
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--text)"}},
        "showlegend": False,  # the page has its own, which wraps on a narrow screen
        "xaxis": xaxis,
        "yaxis": yaxis,
        **options,
    }


def bytes_axis(title: str, **options: Any) -> JsonObject:
    """An axis of bytes."""
    return plot_axis(title, tickformat="~s", ticksuffix="B", rangemode="tozero", nticks=6, **options)


def line_trace(
    x: Sequence[float], y: Sequence[float], name: str, color: str, width: float, value_format: str = ".4~g"
) -> JsonObject:
    """A line; one point is a point."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": color, "width": width},
        "marker": {"color": color},  # of a run with one step
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
    """One kind's part of bars that are stacked."""
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
    """Lay out stacked bars as wide as the page lets them, each under its name and how much it is.

    The axis reaches ``most``, where that is more than any of them.
    """
    xaxis = plot_axis("", range=[0, max([min_axis_end, *totals])], visible=False, fixedrange=True)
    yaxis = plot_axis("", range=[len(names) - 0.55, -0.85], visible=False, fixedrange=True, type="category")
    drawn = plot_layout(52 * len(names) + 8, xaxis, yaxis, barmode="stack", bargap=0.6, hovermode="closest")
    drawn["margin"] = {"l": 0, "r": 0, "t": 0, "b": 0}
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "y", "yanchor": "bottom", "yshift": 11}
    look = {"showarrow": False, "borderpad": 0, "font": {"size": 13, "color": "var(--text)"}}
    drawn["annotations"] = [
        {**place, **look, "y": name, "text": f"{name} <b>{format_value(value)}</b>"}
        for name, value in zip(names, totals, strict=True)
    ]
    return drawn


def phase_markers(starts: Sequence[Sequence[Any]], axis_end_ms: float) -> JsonObject:
    """Mark where each phase begins, its name above the plot; names that would collide take a second row.

    ``begun`` are names with seconds, ``end`` of the axis is in milliseconds.
    """
    shapes, annotations, row, before = [], [], 0, -math.inf
    for name, seconds in starts:
        at = seconds * 1000
        row = 1 - row if at - before < 0.3 * axis_end_ms else 0
        before = at
        place = {"xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1}
        shapes.append({"type": "line", **place, "line": {"color": "var(--muted)", "width": 1, "dash": "dot"}})
        where = {"x": at, "y": 1, "xref": "x", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        annotations.append({**where, "text": escape(str(name)), "showarrow": False, "yshift": 14 * row})
    if before > 0.85 * axis_end_ms:
        annotations[-1] |= {"xanchor": "right"} if row else {"xanchor": "center"}
    return {"shapes": shapes, "annotations": annotations}
