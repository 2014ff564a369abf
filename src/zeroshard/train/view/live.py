"""LiveView: a run on a terminal."""

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

from zeroshard.train.metrics import Metrics
from zeroshard.train.view.panel import panel
from zeroshard.train.view.state import State
from zeroshard.train.view.view import View
from zeroshard.train.view.words import aligned, clean

REFRESH = 4  # redraws a second; one takes some 3 ms of the interpreter


class LiveView(View):
    """A bar and a panel that stay at the bottom of the terminal while messages scroll by above them.

    [Note: the cursor stays] rich hides the cursor while it draws and shows it again at the end. But a rank may end by a
    signal that runs no code of ours: torchrun terminates all ranks when one fails. So it is shown again at once.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int) -> None:
        self._console = console
        self._state = State(total_steps, start_step)
        self._changed = monotonic()
        ours = console.file in (sys.stdout, sys.stderr)
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=REFRESH,
            vertical_overflow="crop",
            redirect_stdout=ours and sys.stdout.isatty(),  # so that print() lands above the panel, unless in a file
            redirect_stderr=ours and sys.stderr.isatty(),  # and warnings
        )
        self._over = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Print the pairs above the panel."""
        for label, value in aligned(lines):
            self._print((label, "dim"), (value, ""))

    def step(self, metrics: Metrics) -> None:
        """Take the figures into the panel; it is drawn when its time comes."""
        self._state = self._state.after(metrics)
        self._changed = monotonic()
        self._start()

    def evaluation(self, step: int, loss: float) -> None:
        """Take the loss into the panel."""
        self._state = replace(self._state, held_out=(step, loss))

    def memory(self, held: Mapping[str, int], plain: Mapping[str, int]) -> None:
        """Take the bytes into the panel."""
        self._state = replace(self._state, held=dict(held), plain=dict(plain))

    def note(self, text: str) -> None:
        """Print the text above the panel, as it is: no markup, no control characters."""
        self._print((text, ""))

    def sample(self, prompt: str, text: str) -> None:
        """Print the prompt, in colour, and what follows it above the panel."""
        self._print((f"sample at step {self._state.step}\n", "dim"), (prompt, "cyan"), (text, ""))

    def footer(self, lines: Sequence[tuple[str, str]]) -> None:
        """Leave the panel as it is and print the pairs beneath."""
        self.close()
        self.header(lines)

    def close(self) -> None:
        """Draw the last state and stop drawing."""
        self._over = True
        self._live.stop()

    def _start(self) -> None:
        if not self._over and not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # [Note: the cursor stays]

    def _print(self, *parts: tuple[str, str]) -> None:
        text = Text.assemble(*((clean(part), style) for part, style in parts))
        self._console.print(text, soft_wrap=True)  # the terminal wraps, so that a path can be copied whole

    def _draw(self) -> RenderableType:
        columns = max(1, self._console.width - 2)  # two for the ^C that a terminal echoes: a wrap would leave a line
        return panel(self._state, monotonic() - self._changed, columns)


def picture(
    metrics: Sequence[Metrics],
    *,
    path: Path,
    total_steps: int | None = None,
    header: Sequence[tuple[str, str]] = (),
    memory: Mapping[str, int] | None = None,
    plain: Mapping[str, int] | None = None,
    evaluation: tuple[int, float] | None = None,
    columns: int = 100,
) -> None:
    """Draw the live view as it stood after the last of `metrics`, as an SVG that refers to nothing outside itself."""
    if not metrics:
        raise ValueError("metrics is empty, but a picture needs those of one step at least: give the run's metrics")
    state = State(total_steps or metrics[-1].step, held_out=evaluation, held=memory or {}, plain=plain or {})
    for one in metrics:
        state = state.after(one)
    console = Console(record=True, file=StringIO(), width=columns, force_terminal=True, color_system="truecolor")
    LiveView(console, total_steps=state.total_steps, start_step=0).header([*header, ("", "")])
    console.print(panel(state, 0.0, columns))
    console.save_svg(str(path), title="zeroshard train", code_format=_SVG)


# What rich fills in to make an SVG; its own format loads a font from elsewhere.
_SVG = """\
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
