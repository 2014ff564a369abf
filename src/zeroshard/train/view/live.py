"""LiveView: the live output of a run on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from zeroshard.train.metrics import StepMetrics
from zeroshard.train.view.panel import render_panel
from zeroshard.train.view.progress import RunProgress
from zeroshard.train.view.view import RunView
from zeroshard.utils.format import align_labels, escape_control_chars

REFRESHES_PER_SECOND = 4  # a redraw takes about 3 ms of Python time


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
            redirect_stdout=is_standard_stream
            and sys.stdout.isatty(),  # so that print() appears above the panel, unless it goes to a file
            redirect_stderr=is_standard_stream and sys.stderr.isatty(),  # the same for warnings
        )
        self._is_closed = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def show_header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Print the pairs above the panel."""
        for label, value in align_labels(lines):
            self._print((label, "dim"), (value, ""))

    def show_step(self, metrics: StepMetrics) -> None:
        """Update the metrics in the panel, which is drawn at the next refresh."""
        self._progress = self._progress.with_step(metrics)
        self._last_update = monotonic()
        self._start()

    def show_evaluation(self, step: int, loss: float) -> None:
        """Update the validation loss in the panel."""
        self._progress = replace(self._progress, last_evaluation=(step, loss))

    def show_memory(self, held_bytes: Mapping[str, int], ddp_bytes: Mapping[str, int]) -> None:
        """Update the memory in the panel."""
        self._progress = replace(self._progress, held_bytes=dict(held_bytes), ddp_bytes=dict(ddp_bytes))

    def show_message(self, text: str) -> None:
        """Print the text above the panel literally: no markup, no control characters."""
        self._print((text, ""))

    def show_sample(self, prompt: str, text: str) -> None:
        """Print the prompt, in color, and the generated text above the panel."""
        self._print((f"sample at step {self._progress.step}\n", "dim"), (prompt, "cyan"), (text, ""))

    def show_footer(self, lines: Sequence[tuple[str, str]]) -> None:
        """Stop updating the panel and print the pairs below it."""
        self.close()
        self.show_header(lines)

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


def save_live_view_svg(
    metrics: Sequence[StepMetrics],
    *,
    path: Path,
    total_steps: int | None = None,
    header: Sequence[tuple[str, str]] = (),
    held_bytes: Mapping[str, int] | None = None,
    ddp_bytes: Mapping[str, int] | None = None,
    evaluation: tuple[int, float] | None = None,
    columns: int = 100,
) -> None:
    """Draw the live view after the last of `metrics`, as a self-contained SVG."""
    if not metrics:
        raise ValueError("metrics is empty, but a picture needs those of one step at least: give the run's metrics")
    progress = RunProgress(
        total_steps or metrics[-1].step,
        last_evaluation=evaluation,
        held_bytes=held_bytes or {},
        ddp_bytes=ddp_bytes or {},
    )
    for step_metrics in metrics:
        progress = progress.with_step(step_metrics)
    console = Console(record=True, file=StringIO(), width=columns, force_terminal=True, color_system="truecolor")
    LiveView(console, total_steps=progress.total_steps, start_step=0).show_header([*header, ("", "")])
    console.print(render_panel(progress, 0.0, columns))
    console.save_svg(str(path), title="zeroshard train", code_format=_SVG_TEMPLATE)


# Template for rich's SVG export; rich's own template loads an external font.
_SVG_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px Menlo, Consolas, "DejaVu Sans Mono", monospace }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g clip-path="url(#{unique_id}-clip-terminal)" transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
