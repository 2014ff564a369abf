"""Shared parts of zeroshard's HTML pages: each is one self-contained file, which works offline."""

from zeroshard.page.chart import (
    BYTES_FORMAT,
    Chart,
    JsonObject,
    bar_rows,
    bytes_axis,
    downsample,
    line_trace,
    memory_over_time,
    plot_axis,
    plot_layout,
    stacked_bars,
)
from zeroshard.page.render import render_page

__all__ = [
    "BYTES_FORMAT",
    "Chart",
    "JsonObject",
    "bar_rows",
    "bytes_axis",
    "downsample",
    "line_trace",
    "memory_over_time",
    "plot_axis",
    "plot_layout",
    "render_page",
    "stacked_bars",
]
