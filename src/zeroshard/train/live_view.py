"""LiveView: the live output of a run on a terminal, drawn by rich."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from zeroshard.train.metrics import StepMetrics
from zeroshard.train.run_view import RunProgress, RunView, format_clock, format_metric, format_percent
from zeroshard.utils.format import escape_control_chars, format_bytes, format_count

REFRESHES_PER_SECOND = 4  # a redraw takes about 3 ms of Python time
LABEL_COLUMNS = 16  # width in the panel; the longest label is "optimizer states"
VALUE_COLUMNS = 9


class LiveView(RunView):
    """A progress bar and a panel at the bottom of the terminal; messages scroll above them.

    [Note: cursor position in the live view] rich hides the cursor while it draws and shows it at the end. But a rank
    may end by a signal that runs none of our code: torchrun terminates all ranks when one fails. So the cursor is shown
    immediately.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int) -> None:
        super().__init__(total_steps=total_steps, start_step=start_step)
        self._console = console
        self._last_update = monotonic()
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
            # print() and warnings appear above the panel, unless they go to a file
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._live.start()
        self._console.show_cursor(True)  # [Note: cursor position in the live view]
        return self

    def show_step(self, metrics: StepMetrics) -> None:
        """Update the metrics in the panel, which is drawn at the next refresh."""
        self._progress = self._progress.with_step(metrics)
        self._last_update = monotonic()

    def show_evaluation(self, step: int, loss: float) -> None:
        """Update the held-out loss in the panel."""
        self._progress = replace(self._progress, last_evaluation=(step, loss))

    def show_memory(self, held_bytes: Mapping[str, int], ddp_bytes: Mapping[str, int]) -> None:
        """Update the memory in the panel."""
        self._progress = replace(self._progress, held_bytes=held_bytes, ddp_bytes=ddp_bytes)

    def show_message(self, text: str) -> None:
        """Print the text above the panel literally: no markup, no control characters."""
        # the terminal wraps lines, so that a path can be copied
        self._console.print(Text(escape_control_chars(text)), soft_wrap=True)

    def close(self) -> None:
        """Draw the final state and stop."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        columns = max(1, self._console.width - 2)  # two for the ^C that a terminal echoes: a wrapped line would remain
        return render_panel(self._progress, monotonic() - self._last_update, columns)


def render_panel(progress: RunProgress, seconds_since_step: float, columns: int) -> RenderableType:
    """Return the progress bar, and a panel of metrics and memory, `seconds_since_step` after the last step."""
    elapsed = seconds_since_step + (progress.recent[-1].seconds if progress.recent else 0.0)
    bar = _grid(Column(), Column(ratio=1), Column(), Column())
    bar.width = columns
    bar.add_row(
        f"step {progress.step}/{progress.total_steps}",
        _bar(progress.step, progress.total_steps),
        f"{format_clock(elapsed)} elapsed",
        f"{format_clock(max(progress.seconds_left - seconds_since_step, 0.0))} left",
    )
    if not progress.recent:
        return bar
    inner_columns = columns - 4  # without border and padding
    memory = _render_memory(progress, inner_columns) if progress.held_bytes else Text()
    body = Group(_render_metrics(progress, inner_columns), "", memory)
    return Group(bar, Panel(body, border_style="dim", width=columns))


def _render_metrics(progress: RunProgress, columns: int) -> RenderableType:
    """Return the losses, with a sparkline, and the other metrics in two columns."""
    metrics = progress.recent[-1]
    losses = _grid(_label(), Column(width=VALUE_COLUMNS), Column())
    loss_style = "bold cyan" if math.isfinite(metrics.loss) else "bold red"
    curve = sparkline([step.loss for step in progress.recent], columns - LABEL_COLUMNS - VALUE_COLUMNS - 4)
    losses.add_row("loss", Text(format_metric(metrics.loss), loss_style), Text(curve, "cyan"))
    if progress.last_evaluation is not None:
        step, loss = progress.last_evaluation
        losses.add_row("held-out loss", Text(format_metric(loss), "bold"), Text(f"at step {step}", "dim"))
    others = _grid(_label(), Column(width=VALUE_COLUMNS), _label(), Column(width=VALUE_COLUMNS))
    others.add_row("learning rate", f"{metrics.lr:.1e}", "gradient norm", format_metric(metrics.grad_norm, digits=2))
    others.add_row("tokens/s", format_count(metrics.tokens_per_s), "tokens", format_count(metrics.tokens))
    if metrics.tflops is not None:
        others.add_row("TFLOPS/device", f"{metrics.tflops:.1f}", "MFU", format_percent(metrics.mfu))
    others.add_row("communication", format_percent(progress.communication))
    return Group(losses, others)


def _render_memory(progress: RunProgress, columns: int) -> RenderableType:
    """Return memory by kind: the length of a bar is DDP's bytes, the filled part is this rank's."""
    *kinds, (_, total_held, total_ddp) = progress.memory_rows
    title = f"memory {format_bytes(total_held)}, plain data parallelism {format_bytes(total_ddp)}"
    longest_bar = columns - LABEL_COLUMNS - 26  # the width of "123.45 MB of 123.45 MB", and gaps
    most = max(max(held, ddp) for _, held, ddp in kinds) or 1
    table = _grid(_label(), Column(), Column())
    for kind, held, ddp in kinds:
        width = max(1, round(longest_bar * max(held, ddp) / most))
        table.add_row(kind, _bar(held, max(held, ddp), width), f"{format_bytes(held):>9} of {format_bytes(ddp):>9}")
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
    """Return the last values as a line of at most `columns` blocks; × is not a finite number.

    >>> sparkline([4.0, 3.0, 2.5, float("nan"), 1.0, 1.0], 10)
    '█▆▅×▁▁'
    """
    shown = values[-max(1, columns) :]
    finite = [value for value in shown if math.isfinite(value)] or [0.0]
    low = min(finite)
    span = max(finite) - low or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) / span * 7)] if math.isfinite(value) else "×" for value in shown)
