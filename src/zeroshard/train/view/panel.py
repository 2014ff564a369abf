"""Panel: a run's progress, figures and memory, drawn by rich for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zeroshard.memory.report import size
from zeroshard.train.metrics import Metrics
from zeroshard.train.view.state import State
from zeroshard.train.view.words import by_kind, count, duration, figure, share

WIDE = 116  # columns from which on memory stands beside the figures


def panel(state: State, waited: float, columns: int) -> RenderableType:
    """The progress bar, and the figures and the memory in a frame; `waited` seconds after the last step."""

    elapsed = waited + (0.0 if state.metrics is None else state.metrics.seconds)
    left = None if state.left is None else max(0.0, state.left - waited)
    progress = Table.grid(padding=(0, 2, 0, 0), expand=True)
    progress.width = columns
    for ratio in (None, 1, None, None):
        progress.add_column(no_wrap=True, ratio=ratio)
    done = f"step {state.step}/{state.total_steps}"
    bar = _bar(state.step, state.total_steps)
    progress.add_row(done, bar, f"{duration(elapsed)} elapsed", f"{duration(left)} left")
    wide = columns >= WIDE
    inside = (columns - 8) // 2 if wide else columns - 4  # beside a frame, a space at either side, four in the middle
    parts: list[RenderableType] = []
    if state.metrics is not None:
        parts.append(_figures(state, state.metrics, inside))
    if state.held:
        parts += [""] if parts and not wide else []
        parts.append(_bars(state, inside - 42))  # beside names and sizes
    if not parts:
        return progress
    body = Table.grid(padding=(0, 4, 0, 0))
    for row in [parts] if wide else [[part] for part in parts]:
        body.add_row(*row)
    return Group(progress, Panel(body, border_style="dim", width=columns))


def _figures(state: State, metrics: Metrics, columns: int) -> RenderableType:
    """Loss with its sparkline, and the other figures in two columns."""

    label, value = 18, 11  # columns; labels as wide as "optimizer states" and its gap in the table of memory
    healthy = "bold cyan" if math.isfinite(metrics.loss) else "bold red"
    spark = sparkline(state.losses, columns - label - value)
    rows = [("loss", figure(metrics.loss), healthy, (spark, "cyan"))]
    if state.held_out is not None:
        rows.append(("held-out loss", figure(state.held_out[1]), "bold", (f"at step {state.held_out[0]}", "dim")))
    lines = [
        Text.assemble((f"{name:<{label}}", "dim"), (f"{text:<{value}}", style), beside)
        for name, text, style, beside in rows
    ]
    facts = [
        ("learning rate", f"{metrics.lr:.1e}"),
        ("gradient norm", None if metrics.grad_norm is None else figure(metrics.grad_norm, digits=2)),
        ("tokens/s", count(metrics.tokens_per_s)),
        ("tokens", count(metrics.tokens)),
        ("TFLOPS a device", None if metrics.tflops is None else f"{metrics.tflops:.1f}"),
        ("MFU", None if metrics.mfu is None else share(metrics.mfu)),
        ("communication", None if state.communication is None else share(state.communication)),
    ]
    known = [(name, text) for name, text in facts if text is not None]
    for at in range(0, len(known), 2):
        cells = [((f"{name:<{label}}", "dim"), f"{text:<{value}}") for name, text in known[at : at + 2]]
        lines.append(Text.assemble(*(part for cell in cells for part in cell)))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _bars(state: State, columns: int) -> RenderableType:
    """Memory by kind: a bar as long as plain data parallelism's bytes, filled as far as this rank's."""

    *kinds, (_, held, plain) = by_kind(state.held, state.plain)
    title = Text(f"memory {size(held)}, plain data parallelism {size(plain)}", no_wrap=True, overflow="crop")
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    longest = max(max(held, plain) for _, held, plain in kinds) or 1
    for kind, held, plain in kinds:
        whole = max(held, plain)
        bar = _bar(held, whole, max(1, round(columns * whole / longest)))
        table.add_row(Text(kind, "dim"), bar, f"{size(held):>9} of {size(plain):>9}")
    return Group(title, table)


def _bar(part: int, whole: int, width: int | None = None) -> RenderableType:

    colours = ("grey42", "green", "green")  # what is missing, what is there, and that when nothing is missing
    return ProgressBar(whole, part, width, False, *colours)


def sparkline(values: Sequence[float], columns: int) -> str:
    """The values as a line of blocks, at most `columns` long: neighbours are averaged, × is not a finite number.

    >>> sparkline([4.0, 3.0, 2.5, float("nan"), 1.0, 1.0], 10)
    '█▆▅×▁▁'
    >>> sparkline([4.0, 2.0, 1.0, 1.0], 2)
    '█▁'
    """
    count = min(len(values), columns)
    if count < 1:
        return ""
    edges = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) / span * 7)] if math.isfinite(mean) else "×" for mean in means)
