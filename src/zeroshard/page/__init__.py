"""Shared parts of zeroshard's HTML pages: each is one self-contained file, which works offline."""

from zeroshard.page.chart import (
    Chart,
    JsonObject,
    bar_trace,
    bytes_axis,
    line_trace,
    phase_markers,
    plot_axis,
    plot_layout,
    stacked_bar_layout,
)
from zeroshard.page.render import render_page

__all__ = [
    "Chart",
    "JsonObject",
    "bar_trace",
    "bytes_axis",
    "line_trace",
    "phase_markers",
    "plot_axis",
    "plot_layout",
    "render_page",
    "stacked_bar_layout",
]
