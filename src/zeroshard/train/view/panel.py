"""The terminal panel of a run: progress, metrics and memory, drawn by rich."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zeroshard.train.metrics import StepMetrics
from zeroshard.train.view.progress import RunProgress
from zeroshard.utils.format import (
    format_bytes,
    format_clock,
    format_compact_count,
    format_metric,
    format_percent,
    memory_rows,
)

WIDE_LAYOUT_COLUMNS = 116  # from this width on, memory is shown to the right of the metrics


def render_panel(run_progress: RunProgress, seconds_since_step: float, columns: int) -> RenderableType:
    """Return the progress bar, and a panel of metrics and memory, `seconds_since_step` after the last step."""

    elapsed = seconds_since_step + (0.0 if run_progress.metrics is None else run_progress.metrics.seconds)
    seconds_left = (
        None if run_progress.seconds_left is None else max(0.0, run_progress.seconds_left - seconds_since_step)
    )
    progress = Table.grid(padding=(0, 2, 0, 0), expand=True)
    progress.width = columns
    for ratio in (None, 1, None, None):
        progress.add_column(no_wrap=True, ratio=ratio)
    step_text = f"step {run_progress.step}/{run_progress.total_steps}"
    bar = _progress_bar(run_progress.step, run_progress.total_steps)
    progress.add_row(step_text, bar, f"{format_clock(elapsed)} elapsed", f"{format_clock(seconds_left)} left")
    is_wide = columns >= WIDE_LAYOUT_COLUMNS
    inner_columns = (
        (columns - 8) // 2 if is_wide else columns - 4
    )  # without the border, its padding, and four columns in the middle
    parts: list[RenderableType] = []
    if run_progress.metrics is not None:
        parts.append(_metrics_block(run_progress, run_progress.metrics, inner_columns))
    if run_progress.held_bytes:
        parts += [""] if parts and not is_wide else []
        parts.append(_memory_bars(run_progress, inner_columns - 42))  # without names and sizes
    if not parts:
        return progress
    body = Table.grid(padding=(0, 4, 0, 0))
    for row in [parts] if is_wide else [[part] for part in parts]:
        body.add_row(*row)
    return Group(progress, Panel(body, border_style="dim", width=columns))


def _metrics_block(run_progress: RunProgress, metrics: StepMetrics, columns: int) -> RenderableType:
    """Return the loss with its sparkline, and the other metrics in two columns."""

    label, value = 18, 11  # widths in columns; labels as wide as "optimizer states" and its gap in the memory table
    loss_style = "bold cyan" if math.isfinite(metrics.loss) else "bold red"
    loss_sparkline = sparkline(run_progress.losses, columns - label - value)
    rows = [("loss", format_metric(metrics.loss), loss_style, (loss_sparkline, "cyan"))]
    if run_progress.last_evaluation is not None:
        rows.append(
            (
                "held-out loss",
                format_metric(run_progress.last_evaluation[1]),
                "bold",
                (f"at step {run_progress.last_evaluation[0]}", "dim"),
            )
        )
    lines = [
        Text.assemble((f"{name:<{label}}", "dim"), (f"{text:<{value}}", style), note)
        for name, text, style, note in rows
    ]
    facts = [
        ("learning rate", f"{metrics.lr:.1e}"),
        ("gradient norm", None if metrics.grad_norm is None else format_metric(metrics.grad_norm, digits=2)),
        ("tokens/s", format_compact_count(metrics.tokens_per_s)),
        ("tokens", format_compact_count(metrics.tokens)),
        ("TFLOPS a device", None if metrics.tflops is None else f"{metrics.tflops:.1f}"),
        ("MFU", None if metrics.mfu is None else format_percent(metrics.mfu)),
        ("communication", None if run_progress.communication is None else format_percent(run_progress.communication)),
    ]
    known = [(name, text) for name, text in facts if text is not None]
    for start in range(0, len(known), 2):
        cells = [((f"{name:<{label}}", "dim"), f"{text:<{value}}") for name, text in known[start : start + 2]]
        lines.append(Text.assemble(*(part for cell in cells for part in cell)))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _memory_bars(run_progress: RunProgress, columns: int) -> RenderableType:
    """Return memory by kind: the length of a bar is DDP's bytes, the filled part is this rank's."""

    *kinds, (_, held, plain) = memory_rows(run_progress.held_bytes, run_progress.ddp_bytes)
    title = Text(
        f"memory {format_bytes(held)}, plain data parallelism {format_bytes(plain)}", no_wrap=True, overflow="crop"
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    longest = max(max(held, plain) for _, held, plain in kinds) or 1
    for kind, held, plain in kinds:
        total = max(held, plain)
        bar = _progress_bar(held, total, max(1, round(columns * total / longest)))
        table.add_row(Text(kind, "dim"), bar, f"{format_bytes(held):>9} of {format_bytes(plain):>9}")
    return Group(title, table)


def _progress_bar(part: int, whole: int, width: int | None = None) -> RenderableType:

    styles = ("grey42", "green", "green")  # remaining, complete, and complete at 100%
    return ProgressBar(whole, part, width, False, *styles)


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return the values as a line of at most `columns` blocks: neighbours are averaged, × is not a finite number.

    >>> sparkline([4.0, 3.0, 2.5, float("nan"), 1.0, 1.0], 10)
    '█▆▅×▁▁'
    >>> sparkline([4.0, 2.0, 1.0, 1.0], 2)
    '█▁'
    """
    count = min(len(values), columns)
    if count < 1:
        return ""
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) / span * 7)] if math.isfinite(mean) else "×" for mean in means)
