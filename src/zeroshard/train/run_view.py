"""RunView: the output of a run; RunProgress: the state that it shows; PlainView: the output as lines, without rich."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Self, TextIO

from zeroshard.train.metrics import StepMetrics
from zeroshard.utils.format import escape_control_chars, format_bytes, format_count

SPARKLINE_STEPS = 240  # losses in the sparkline
ETA_WINDOW_STEPS = 50  # steps used to estimate the remaining time


class RunView:
    """The output of a run. This base class shows nothing and serves ranks above 0; the other views derive from it.

    >>> with RunView() as view:
    ...     view.show_message("not shown")
    """

    def show_header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show the description of the run, as pairs of label and value."""

    def show_step(self, metrics: StepMetrics) -> None:
        """Show the metrics of a finished step."""

    def show_evaluation(self, step: int, loss: float) -> None:
        """Show the validation loss after `step` steps."""

    def show_memory(self, held_bytes: Mapping[str, int], ddp_bytes: Mapping[str, int]) -> None:
        """Show the bytes of states between steps by kind: those of this rank, and those of DDP."""

    def show_message(self, text: str) -> None:
        """Show a message."""

    def show_sample(self, prompt: str, text: str) -> None:
        """Show the `text` that the model generated after `prompt`."""

    def show_footer(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show the final state, then how the run ended, as pairs of label and value. No step follows."""
        self.close()
        self.show_header(lines)

    def close(self) -> None:
        """Show the final state and release the terminal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class RunProgress:
    """The state of a run that a view shows. Frozen, so the drawing thread never sees a partial update."""

    total_steps: int
    start_step: int = 0
    metrics: StepMetrics | None = None
    """Metrics of the last step."""
    losses: tuple[float, ...] = ()
    """The most recent losses."""
    recent_times: tuple[tuple[int, float], ...] = ()
    """(step, seconds) of the most recent steps."""
    communication: float | None = None
    """The fraction measured last; not every step is profiled."""
    last_evaluation: tuple[int, float] | None = None
    """(step, loss) of the last evaluation."""
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    ddp_bytes: Mapping[str, int] = field(default_factory=dict)

    def with_step(self, metrics: StepMetrics) -> RunProgress:
        """Return the state after one more step."""
        losses = (*self.losses, metrics.loss)[-SPARKLINE_STEPS:]
        recent_times = (*self.recent_times, (metrics.step, metrics.seconds))[-ETA_WINDOW_STEPS:]
        communication = self.communication if metrics.communication is None else metrics.communication
        return replace(self, metrics=metrics, losses=losses, recent_times=recent_times, communication=communication)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.start_step if self.metrics is None else self.metrics.step

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, estimated from recent steps; None until two are known."""
        if len(self.recent_times) < 2:
            return None
        (first, start_seconds), (last, end_seconds) = self.recent_times[0], self.recent_times[-1]
        return max(0, self.total_steps - last) * (end_seconds - start_seconds) / max(1, last - first)

    @property
    def memory_rows(self) -> list[tuple[str, int, int]]:
        """Rows (kind, bytes held, bytes of DDP), the total last."""
        held, ddp = self.held_bytes, self.ddp_bytes
        rows = [(kind, held.get(kind, 0), ddp.get(kind, 0)) for kind in {**held, **ddp}]
        return [*rows, ("total", sum(held.values()), sum(ddp.values()))]


class PlainView(RunView):
    """Lines with fixed columns for log files: the first step, every `log_every`-th step and the last."""

    def __init__(self, stream: TextIO, *, total_steps: int, start_step: int, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._progress = RunProgress(total_steps, start_step)
        self._last_step_shown = start_step

    def show_header(self, lines: Sequence[tuple[str, str]]) -> None:
        for label, value in align_labels(lines):
            self.show_message(label + value)

    def show_step(self, metrics: StepMetrics) -> None:
        """Write a line, if this step is due."""
        self._progress = self._progress.with_step(metrics)
        is_first, is_last = metrics.step == self._progress.start_step + 1, metrics.step == self._progress.total_steps
        if is_first or is_last or metrics.step % self._log_every == 0:
            self._write_step_line(metrics)

    def show_evaluation(self, step: int, loss: float) -> None:
        self.show_message(f"{self._step_label(step)}  held-out loss {format_metric(loss)}")

    def show_memory(self, held_bytes: Mapping[str, int], ddp_bytes: Mapping[str, int]) -> None:
        """Write one line per kind, unless nothing has changed."""
        previous = self._progress
        self._progress = replace(previous, held_bytes=held_bytes, ddp_bytes=ddp_bytes)
        if self._progress != previous:
            for kind, held, ddp in self._progress.memory_rows:
                self.show_message(f"memory  {kind:<17} {format_bytes(held):>9} of {format_bytes(ddp):>9}")

    def show_message(self, text: str) -> None:
        """Write the text with control characters escaped."""
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(escape_control_chars(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()
        except OSError:  # the reader has closed the pipe (`| head`): training continues
            if self._stream is sys.stdout:  # Python flushes stdout at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stream = StringIO()

    def show_sample(self, prompt: str, text: str) -> None:
        """Write the prompt on one line and the text below it, each line after a bar."""
        self.show_message("\n  | ".join([f"sample after {prompt!r}", *text.split("\n")]))

    def close(self) -> None:
        """Write the line of the last step, if the run ended early."""
        if self._progress.metrics is not None and self._progress.step != self._last_step_shown:
            self._write_step_line(self._progress.metrics)

    def _step_label(self, step: int) -> str:
        total = str(self._progress.total_steps)
        return f"step {step:>{max(4, len(total))}}/{total}"

    def _write_step_line(self, metrics: StepMetrics) -> None:
        self._last_step_shown = metrics.step
        norm = "-" if metrics.grad_norm is None else format_metric(metrics.grad_norm, digits=2)
        columns = [
            self._step_label(metrics.step),
            f"loss {format_metric(metrics.loss):<6}",
            f"lr {metrics.lr:.1e}",
            f"norm {norm:<5}",
            f"{format_count(metrics.tokens_per_s):>5} tokens/s",
            f"comm {format_percent(metrics.communication):<4}",
        ]
        if metrics.tflops is not None:
            columns += [f"{metrics.tflops:>5.1f} TFLOPS", f"mfu {format_percent(metrics.mfu):<4}"]
        self.show_message("  ".join([*columns, f"eta {format_clock(self._progress.seconds_left)}"]))


# ------------------------------------------------------------------------------------------------ text of both views


def align_labels(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs with labels padded to equal width."""
    width = max((len(label) for label, _ in lines), default=0)
    return [(f"{label:<{width}}  ", value) for label, value in lines]


def format_metric(value: float, digits: int = 3) -> str:
    """Format a loss or a norm.

    >>> format_metric(5.8124), format_metric(1234.5)
    ('5.812', '1.2e+03')
    """
    fits = value == 0 or 0.1 <= abs(value) < 1000 or not math.isfinite(value)
    return f"{value:.{digits}f}" if fits else f"{value:.1e}"


def format_percent(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return "-" if value is None else f"{100 * value:.0f}%"


def format_clock(seconds: float | None) -> str:
    """Format as minutes and seconds, with hours if there are any.

    >>> format_clock(75)
    '1:15'
    """
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
