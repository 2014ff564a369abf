"""RunView: the output of a run as lines; RunProgress: the state that a view shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self, TextIO

from zeroshard.train.metrics import StepMetrics
from zeroshard.utils.command_line import make_echo
from zeroshard.utils.format import format_bytes, format_count

RECENT_STEPS = 240  # losses in the sparkline
ETA_WINDOW_STEPS = 50  # steps used to estimate the remaining time


@dataclass(frozen=True)
class RunProgress:
    """The state of a run that a view shows. Frozen, so the drawing thread never sees a partial update."""

    total_steps: int
    step: int = 0
    """Steps done."""
    recent: tuple[StepMetrics, ...] = ()
    """Metrics of the most recent steps, the last one at the end."""
    communication: float | None = None
    """The fraction measured last; not every step is profiled."""
    last_evaluation: tuple[int, float] | None = None
    """(step, loss) of the last evaluation."""
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    ddp_bytes: Mapping[str, int] = field(default_factory=dict)

    def with_step(self, metrics: StepMetrics) -> RunProgress:
        """Return the state after one more step."""
        recent = (*self.recent, metrics)[-RECENT_STEPS:]
        communication = self.communication if metrics.communication is None else metrics.communication
        return replace(self, step=metrics.step, recent=recent, communication=communication)

    @property
    def seconds_left(self) -> float:
        """Seconds until the last step, estimated from recent steps; not a number until two are known."""
        if len(self.recent) < 2:
            return math.nan
        first, *_, last = self.recent[-ETA_WINDOW_STEPS:]
        return (self.total_steps - last.step) * (last.seconds - first.seconds) / (last.step - first.step)

    @property
    def memory_rows(self) -> list[tuple[str, int, int]]:
        """Rows (kind, bytes held, bytes of DDP), the total last."""
        held, ddp = self.held_bytes, self.ddp_bytes
        rows = [(kind, held.get(kind, 0), ddp.get(kind, 0)) for kind in {**held, **ddp}]
        return [*rows, ("total", sum(held.values()), sum(ddp.values()))]


class RunView:
    """Lines with fixed columns for log files: the first step, every `log_every`-th step and the last.

    Without a stream it shows nothing, for ranks above 0.

    >>> with RunView() as view:
    ...     view.show_message("not shown")
    """

    def __init__(
        self, stream: TextIO | None = None, *, total_steps: int = 0, start_step: int = 0, log_every: int = 10
    ) -> None:
        self._print = None if stream is None else make_echo(stream)
        self._log_every = log_every
        self._progress = RunProgress(total_steps, start_step)
        self._last_step_shown = start_step

    def show_header(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Show the description of the run, as pairs of label and value."""
        lines = list(pairs)
        width = max((len(label) for label, _ in lines), default=0)
        for label, value in lines:
            self.show_message(f"{label:<{width}}  {value}")

    def show_step(self, metrics: StepMetrics) -> None:
        """Show the metrics of a finished step, if its line is due."""
        is_first = not self._progress.recent
        self._progress = self._progress.with_step(metrics)
        if is_first or metrics.step % self._log_every == 0 or metrics.step == self._progress.total_steps:
            self._write_step_line()

    def show_evaluation(self, step: int, loss: float) -> None:
        """Show the validation loss after `step` steps."""
        self.show_message(f"{self._step_label(step)}  held-out loss {format_metric(loss)}")

    def show_memory(self, held_bytes: Mapping[str, int], ddp_bytes: Mapping[str, int]) -> None:
        """Show the bytes of states between steps by kind: those of this rank, and those of DDP."""
        self._progress = replace(self._progress, held_bytes=held_bytes, ddp_bytes=ddp_bytes)
        for kind, held, ddp in self._progress.memory_rows:
            self.show_message(f"memory  {kind:<17} {format_bytes(held):>9} of {format_bytes(ddp):>9}")

    def show_message(self, text: str) -> None:
        """Show a message, with control characters escaped."""
        if self._print is not None:
            with suppress(OSError):  # for example a full disk: training continues
                self._print(text)

    def show_sample(self, prompt: str, text: str) -> None:
        """Show the prompt, and below it the `text` that the model generated, each line after a bar."""
        self.show_message("\n  | ".join([f"sample after {prompt!r}", *text.split("\n")]))

    def show_footer(self, lines: Iterable[tuple[str, str]]) -> None:
        """Show the final state, then how the run ended, as pairs of label and value. No step follows."""
        self.close()
        self.show_header(lines)

    def close(self) -> None:
        """Write the line of the last step, if the run ended early; release the terminal."""
        if self._progress.recent and self._progress.step != self._last_step_shown:
            self._write_step_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step_label(self, step: int) -> str:
        total = self._progress.total_steps
        return f"step {step:>{max(4, len(str(total)))}}/{total}"

    def _write_step_line(self) -> None:
        metrics = self._progress.recent[-1]
        self._last_step_shown = metrics.step
        line = (
            f"{self._step_label(metrics.step)}  loss {format_metric(metrics.loss):<6}  lr {metrics.lr:.1e}  "
            f"norm {format_metric(metrics.grad_norm, digits=2):<5}  {format_count(metrics.tokens_per_s):>5} tokens/s  "
            f"comm {format_percent(metrics.communication):<4}"
        )
        if metrics.tflops is not None:
            line += f"  {metrics.tflops:>5.1f} TFLOPS  mfu {format_percent(metrics.mfu):<4}"
        self.show_message(f"{line}  eta {format_clock(self._progress.seconds_left)}")


def format_metric(value: float | None, digits: int = 3) -> str:
    """Format a loss or a norm.

    >>> format_metric(5.8124), format_metric(1234.5), format_metric(None)
    ('5.812', '1.2e+03', '-')
    """
    if value is None:
        return "-"
    fits = value == 0 or 0.1 <= abs(value) < 1000 or not math.isfinite(value)
    return f"{value:.{digits}f}" if fits else f"{value:.1e}"


def format_percent(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return "-" if value is None else f"{100 * value:.0f}%"


def format_clock(seconds: float) -> str:
    """Format as minutes and seconds, with hours if there are any.

    >>> format_clock(75), format_clock(math.nan)
    ('1:15', '-:--')
    """
    if not math.isfinite(seconds):
        return "-:--"
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
