"""LiveView: the live output of a run on a terminal, drawn by rich."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import monotonic
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from zeroshard.train.metrics import StepMetrics
from zeroshard.train.run_view import (
    RunProgress,
    RunView,
    align_labels,
    format_clock,
    format_metric,
    format_percent,
)
from zeroshard.utils.format import escape_control_chars, format_bytes, format_count

REFRESHES_PER_SECOND = 4  # a redraw takes about 3 ms of Python time
WIDE_LAYOUT_COLUMNS = 116  # from this width on, memory is shown to the right of the metrics
LABEL_COLUMNS, VALUE_COLUMNS = 16, 9  # widths in the panel; the longest label is "optimizer states"


class LiveView(RunView):
    """A progress bar and a panel at the bottom of the terminal; messages scroll above them.

    [Note: cursor position in the live view] rich hides the cursor while it draws and shows it at the end. But a rank
    may end by a signal that runs none of our code: torchrun terminates all ranks when one fails. So the cursor is shown
    immediately.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int) -> None:
        self._console = console
        self._progress = RunProgress(total_steps, start_step)
        self._last_update = monotonic()
        is_standard_stream = console.file in (sys.stdout, sys.stderr)
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
            # print() and warnings appear above the panel, unless they go to a file
            redirect_stdout=is_standard_stream and sys.stdout.isatty(),
            redirect_stderr=is_standard_stream and sys.stderr.isatty(),
        )
        self._is_closed = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def show_header(self, lines: Sequence[tuple[str, str]]) -> None:
        for label, value in align_labels(lines):
            self._print((label, "dim"), (value, ""))

    def show_step(self, metrics: StepMetrics) -> None:
        """Update the metrics in the panel, which is drawn at the next refresh."""
        self._progress = self._progress.with_step(metrics)
        self._last_update = monotonic()
        self._start()

    def show_evaluation(self, step: int, loss: float) -> None:
        self._progress = replace(self._progress, last_evaluation=(step, loss))

    def show_memory(self, held_bytes: Mapping[str, int], ddp_bytes: Mapping[str, int]) -> None:
        self._progress = replace(self._progress, held_bytes=held_bytes, ddp_bytes=ddp_bytes)

    def show_message(self, text: str) -> None:
        """Print the text above the panel literally: no markup, no control characters."""
        self._print((text, ""))

    def show_sample(self, prompt: str, text: str) -> None:
        """Print the prompt, in color, and the generated text above the panel."""
        self._print((f"sample at step {self._progress.step}\n", "dim"), (prompt, "cyan"), (text, ""))

    def close(self) -> None:
        """Draw the final state and stop."""
        self._is_closed = True
        self._live.stop()

    def _start(self) -> None:
        if not self._is_closed and not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # [Note: cursor position in the live view]

    def _print(self, *parts: tuple[str, str]) -> None:
        text = Text.assemble(*((escape_control_chars(part), style) for part, style in parts))
        self._console.print(text, soft_wrap=True)  # the terminal wraps lines, so that a path can be copied

    def _draw(self) -> RenderableType:
        columns = max(1, self._console.width - 2)  # two for the ^C that a terminal echoes: a wrapped line would remain
        return render_panel(self._progress, monotonic() - self._last_update, columns)


def render_panel(progress: RunProgress, seconds_since_step: float, columns: int) -> RenderableType:
    """Return the progress bar, and a panel of metrics and memory, `seconds_since_step` after the last step."""
    elapsed = seconds_since_step + (0.0 if progress.metrics is None else progress.metrics.seconds)
    left = None if progress.seconds_left is None else max(0.0, progress.seconds_left - seconds_since_step)
    bar = _grid(Column(), Column(ratio=1), Column(), Column())
    bar.expand, bar.width = True, columns
    bar.add_row(
        f"step {progress.step}/{progress.total_steps}",
        _bar(progress.step, progress.total_steps),
        f"{format_clock(elapsed)} elapsed",
        f"{format_clock(left)} left",
    )
    is_wide = columns >= WIDE_LAYOUT_COLUMNS
    inner_columns = (columns - 8) // 2 if is_wide else columns - 4  # without border, padding and the gap in the middle
    parts: list[RenderableType] = []
    if progress.metrics is not None:
        parts.append(_render_metrics(progress, progress.metrics, inner_columns))
    if progress.held_bytes:
        parts.append(_render_memory(progress, inner_columns))
    if not parts:
        return bar
    body = Table.grid(padding=(0, 4, 0, 0))
    if is_wide:
        body.add_row(*parts)
    else:
        for index, part in enumerate(parts):
            body.add_row(Group("", part) if index else part)
    return Group(bar, Panel(body, border_style="dim", width=columns))


def _render_metrics(progress: RunProgress, metrics: StepMetrics, columns: int) -> RenderableType:
    """Return the losses, with a sparkline, and the other metrics in two columns."""
    losses = _grid(_label(), Column(width=VALUE_COLUMNS), Column())
    loss_style = "bold cyan" if math.isfinite(metrics.loss) else "bold red"
    curve = sparkline(progress.losses, columns - LABEL_COLUMNS - VALUE_COLUMNS - 4)
    losses.add_row("loss", Text(format_metric(metrics.loss), loss_style), Text(curve, "cyan"))
    if progress.last_evaluation is not None:
        step, loss = progress.last_evaluation
        losses.add_row("held-out loss", Text(format_metric(loss), "bold"), Text(f"at step {step}", "dim"))
    facts = {
        "learning rate": f"{metrics.lr:.1e}",
        "gradient norm": None if metrics.grad_norm is None else format_metric(metrics.grad_norm, digits=2),
        "tokens/s": format_count(metrics.tokens_per_s),
        "tokens": format_count(metrics.tokens),
        "TFLOPS/device": None if metrics.tflops is None else f"{metrics.tflops:.1f}",
        "MFU": None if metrics.mfu is None else format_percent(metrics.mfu),
        "communication": None if progress.communication is None else format_percent(progress.communication),
    }
    cells = [cell for name, text in facts.items() if text is not None for cell in (name, text)]
    others = _grid(_label(), Column(width=VALUE_COLUMNS), _label(), Column(width=VALUE_COLUMNS))
    for start in range(0, len(cells), 4):
        others.add_row(*cells[start : start + 4])
    return Group(losses, others)


def _render_memory(progress: RunProgress, columns: int) -> RenderableType:
    """Return memory by kind: the length of a bar is DDP's bytes, the filled part is this rank's."""
    *kinds, (_, total_held, total_ddp) = progress.memory_rows
    title = f"memory {format_bytes(total_held)}, plain data parallelism {format_bytes(total_ddp)}"
    sizes = [f"{format_bytes(held):>9} of {format_bytes(ddp):>9}" for _, held, ddp in kinds]
    longest_bar = columns - LABEL_COLUMNS - 4 - len(sizes[0])
    most = max(max(held, ddp) for _, held, ddp in kinds) or 1
    table = _grid(_label(), Column(), Column())
    for (kind, held, ddp), size in zip(kinds, sizes, strict=True):
        total = max(held, ddp)
        table.add_row(kind, _bar(held, total, max(1, round(longest_bar * total / most))), size)
    return Group(Text(title, no_wrap=True, overflow="crop"), table)


def _grid(*columns: Column) -> Table:
    for column in columns:
        column.no_wrap = True
    return Table.grid(*columns, padding=(0, 2, 0, 0))


def _label() -> Column:
    return Column(width=LABEL_COLUMNS, style="dim")


def _bar(part: int, whole: int, width: int | None = None) -> ProgressBar:
    return ProgressBar(whole, part, width, style="grey42", complete_style="green", finished_style="green")


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
