"""PlainView: the output of a run as lines; open_view: the view for a stream.

rich is imported only for a terminal, so plain lines work without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from typing import TextIO

from zeroshard.train.metrics import StepMetrics
from zeroshard.train.run_view import (
    RunProgress,
    RunView,
    align_labels,
    escape_control_chars,
    format_clock,
    format_metric,
    format_percent,
)
from zeroshard.utils.format import format_bytes, format_count


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


def open_view(
    *, total_steps: int, start_step: int, stream: TextIO | None = None, plain: bool = False, log_every: int = 10
) -> RunView:
    """Return the view for `stream` (default: stdout): live on a terminal, otherwise, or if `plain`, lines.

    >>> view = open_view(total_steps=400, start_step=0)
    >>> metrics = StepMetrics(step=1, loss=5.812, lr=1e-3, grad_norm=1.02, tokens=4096, tokens_per_s=21300, seconds=1)
    >>> view.show_step(metrics)
    step    1/400  loss 5.812   lr 1.0e-03  norm 1.02   21.3k tokens/s  comm -     eta -:--
    """
    if log_every < 1:
        raise ValueError(f"log_every must be at least 1 (got {log_every})")
    stream = sys.stdout if stream is None else stream
    plain_view = PlainView(stream, total_steps=total_steps, start_step=start_step, log_every=log_every)
    is_unicode = (stream.encoding or "utf-8").lower().startswith("utf")
    if plain or not stream.isatty() or os.environ.get("TERM") == "dumb" or not is_unicode:
        return plain_view
    if importlib.util.find_spec("rich") is None:
        plain_view.show_message("the live view needs rich, which is not installed: pip install 'zeroshard[train]'")
        return plain_view
    from rich.console import Console

    from zeroshard.train.live_view import LiveView

    return LiveView(Console(file=stream, force_terminal=True), total_steps=total_steps, start_step=start_step)
