"""View: what a run tells those who watch it. Rank 0 opens one by `open_view`; the others take `View()`, silent.

rich is imported only where there is a terminal, so that plain lines work without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from types import TracebackType
from typing import Self, TextIO

from zeroshard.memory.report import size
from zeroshard.train.metrics import Metrics
from zeroshard.train.view.state import State
from zeroshard.train.view.words import aligned, by_kind, clean, count, duration, figure, share


class View:
    """What a run tells those who watch it. This one, for ranks above 0, shows nothing; the others derive from it.

    >>> with View() as view:
    ...     view.note("nobody reads this")
    """

    def header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show what will be run, as pairs of label and value."""

    def step(self, metrics: Metrics) -> None:
        """Show that a step is done."""

    def evaluation(self, step: int, loss: float) -> None:
        """Show the held-out loss after `step` steps."""

    def memory(self, held: Mapping[str, int], plain: Mapping[str, int]) -> None:
        """Show the bytes of states at rest by kind: those this rank holds, those plain data parallelism would."""

    def note(self, text: str) -> None:
        """Show a message."""

    def sample(self, prompt: str, text: str) -> None:
        """Show what the model wrote (`text`) after `prompt`."""

    def footer(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show how the run ended, as pairs of label and value; no step follows."""

    def close(self) -> None:
        """Show the last state and give the terminal back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class PlainView(View):
    """Lines of fixed columns for log files: the first step, each `log_every`-th and the last."""

    def __init__(self, stream: TextIO, *, total_steps: int, start_step: int, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._state = State(total_steps, start_step)
        self._shown = start_step  # the last step that has a line

    def header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Write a line for each pair."""
        for label, value in aligned(lines):
            self.note(label + value)

    def step(self, metrics: Metrics) -> None:
        """Write a line, if it is this step's turn."""
        self._state = self._state.after(metrics)
        first, last = metrics.step == self._state.start_step + 1, metrics.step == self._state.total_steps
        if first or last or metrics.step % self._log_every == 0:
            self._step_line()

    def evaluation(self, step: int, loss: float) -> None:
        """Write a line."""
        self.note(f"{self._place(step)}  held-out loss {figure(loss)}")

    def memory(self, held: Mapping[str, int], plain: Mapping[str, int]) -> None:
        """Write a line for each kind, unless the last lines said the same."""
        if (held, plain) == (self._state.held, self._state.plain):
            return
        self._state = replace(self._state, held=dict(held), plain=dict(plain))
        for kind, ours, theirs in by_kind(held, plain):
            self.note(f"memory  {kind:<17} {size(ours):>9} of {size(theirs):>9}")

    def note(self, text: str) -> None:
        """Write the text, with anything that would move a cursor made visible."""
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(clean(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()
        except OSError:  # nobody reads any more (`| head`): no reason to stop training
            if self._stream is sys.stdout:  # which Python flushes at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._stream = StringIO()

    def sample(self, prompt: str, text: str) -> None:
        """Write the prompt on a line and the text beneath, each line behind a bar."""
        self.note("\n  | ".join([f"sample after {prompt!r}", *clean(text).split("\n")]))

    def footer(self, lines: Sequence[tuple[str, str]]) -> None:
        """Write the line of the last step, where the run ended early, and one for each pair."""
        self.close()
        self.header(lines)

    def close(self) -> None:
        """Write the line of the last step, where the run ended early."""
        if self._state.step != self._shown:
            self._step_line()

    def _place(self, step: int) -> str:
        total = str(self._state.total_steps)
        return f"step {step:>{max(4, len(total))}}/{total}"

    def _step_line(self) -> None:
        metrics = self._state.metrics
        if metrics is None:
            return
        self._shown = metrics.step
        norm = "-" if metrics.grad_norm is None else figure(metrics.grad_norm, digits=2)
        columns = [
            self._place(metrics.step),
            f"loss {figure(metrics.loss):<6}",
            f"lr {metrics.lr:.1e}",
            f"norm {norm:<5}",
            f"{count(metrics.tokens_per_s):>5} tokens/s",
            f"comm {share(metrics.communication):<4}",
        ]
        if metrics.tflops is not None:
            columns += [f"{metrics.tflops:>5.1f} TFLOPS", f"mfu {share(metrics.mfu):<4}"]
        self.note("  ".join([*columns, f"eta {duration(self._state.left)}"]))


def open_view(
    *, total_steps: int, start_step: int, stream: TextIO | None = None, plain: bool = False, log_every: int = 10
) -> View:
    """The view that suits `stream` (stdout by default): live on a terminal, otherwise, or if `plain`, lines.

    >>> view = open_view(total_steps=400, start_step=0)
    >>> view.step(Metrics(step=1, loss=5.812, lr=1e-3, grad_norm=1.02, tokens=4096, tokens_per_s=21300.0, seconds=0.2))
    step    1/400  loss 5.812   lr 1.0e-03  norm 1.02   21.3k tokens/s  comm -     eta -:--
    """
    if log_every < 1:
        raise ValueError(f"log_every is {log_every}, but must be at least 1, the number of steps from line to line")
    stream = sys.stdout if stream is None else stream
    lines = PlainView(stream, total_steps=total_steps, start_step=start_step, log_every=log_every)
    unicode = (stream.encoding or "utf-8").lower().startswith("utf")
    if plain or not stream.isatty() or os.environ.get("TERM") == "dumb" or not unicode:
        return lines
    if importlib.util.find_spec("rich") is None:
        lines.note("plain lines, because rich is missing, which draws the live view: pip install 'zeroshard[train]'")
        return lines
    from rich.console import Console

    from zeroshard.train.view.live import LiveView

    return LiveView(Console(file=stream, force_terminal=True), total_steps=total_steps, start_step=start_step)
