"""View: what people see of a run while it trains. Rank 0 opens one by `open_view`; the others take `View()`, silent.

rich is imported only by what needs it, so that plain lines work without it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from zeroshard.memory.report import size
from zeroshard.train.metrics import Metrics

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH = 4  # redraws a second; one takes some 3 ms of the interpreter
RECENT = 240  # losses in the sparkline
PACE = 50  # steps that the time left is reckoned from
WIDE = 116  # columns from which on memory stands beside the figures


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

    return LiveView(Console(file=stream, force_terminal=True), total_steps=total_steps, start_step=start_step)


@dataclass(frozen=True)
class State:
    """All that a view knows of the run. Frozen, so that the thread that draws sees all of a step or nothing."""

    total_steps: int
    start_step: int = 0
    metrics: Metrics | None = None
    """Of the last step."""
    losses: tuple[float, ...] = ()
    """The most recent."""
    pace: tuple[tuple[int, float], ...] = ()
    """(step, seconds) of the most recent steps."""
    held_out: tuple[int, float] | None = None
    """(step, loss) of the last evaluation."""
    held: Mapping[str, int] = field(default_factory=dict)
    plain: Mapping[str, int] = field(default_factory=dict)

    def after(self, metrics: Metrics) -> State:
        """The state when one more step is done."""
        losses = (*self.losses, metrics.loss)[-RECENT:]
        pace = (*self.pace, (metrics.step, metrics.seconds))[-PACE:]
        return replace(self, metrics=metrics, losses=losses, pace=pace)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.start_step if self.metrics is None else self.metrics.step

    @property
    def left(self) -> float | None:
        """Seconds until the last step, by the pace of the recent ones; None before two are known."""
        if len(self.pace) < 2:
            return None
        (first, began), (last, ended) = self.pace[0], self.pace[-1]
        return max(0, self.total_steps - last) * (ended - began) / max(1, last - first)


class PlainView(View):
    """Lines of fixed columns for log files: the first step, each `log_every`-th and the last."""

    def __init__(self, stream: TextIO, *, total_steps: int, start_step: int, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._state = State(total_steps, start_step)
        self._shown = start_step  # the last step that has a line

    def header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Write a line for each pair."""
        for label, value in _aligned(lines):
            self.note(label + value)

    def step(self, metrics: Metrics) -> None:
        """Write a line, if it is this step's turn."""
        self._state = self._state.after(metrics)
        first, last = metrics.step == self._state.start_step + 1, metrics.step == self._state.total_steps
        if first or last or metrics.step % self._log_every == 0:
            self._step_line()

    def evaluation(self, step: int, loss: float) -> None:
        """Write a line."""
        self.note(f"{self._place(step)}  held-out loss {_loss(loss)}")

    def memory(self, held: Mapping[str, int], plain: Mapping[str, int]) -> None:
        """Write a line for each kind, unless the last lines said the same."""
        if (held, plain) == (self._state.held, self._state.plain):
            return
        self._state = replace(self._state, held=dict(held), plain=dict(plain))
        for kind, ours, theirs in _memory(held, plain):
            self.note(f"memory  {kind:<17} {size(ours):>9} of {size(theirs):>9}")

    def note(self, text: str) -> None:
        """Write the text, with anything that would move a cursor made visible."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(_clean(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def sample(self, prompt: str, text: str) -> None:
        """Write the prompt on a line and the text beneath, each line behind a bar."""
        self.note("\n  | ".join([f"sample after {prompt!r}", *_clean(text).split("\n")]))

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
        norm = "-" if metrics.grad_norm is None else _loss(metrics.grad_norm, digits=2)
        columns = [
            self._place(metrics.step),
            f"loss {_loss(metrics.loss):<6}",
            f"lr {metrics.lr:.1e}",
            f"norm {norm:<5}",
            f"{_count(metrics.tokens_per_s):>5} tokens/s",
            f"comm {_share(metrics.communication):<4}",
        ]
        if metrics.tflops is not None:
            columns += [f"{metrics.tflops:>5.1f} TFLOPS", f"mfu {_share(metrics.mfu):<4}"]
        self.note("  ".join([*columns, f"eta {_duration(self._state.left)}"]))


class LiveView(View):
    """A bar and a panel that stay at the bottom of the terminal while messages scroll by above them.

    [Note: the cursor stays] rich hides the cursor while it draws and shows it again at the end. But a rank may end by a
    signal that runs no code of ours: torchrun terminates all ranks when one fails. So it is shown again at once.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int) -> None:
        from rich.live import Live

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
        for label, value in _aligned(lines):
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
        from rich.text import Text

        text = Text.assemble(*((_clean(part), style) for part, style in parts))
        self._console.print(text, soft_wrap=True)  # the terminal wraps, so that a path can be copied whole

    def _draw(self) -> RenderableType:
        columns = max(1, self._console.width - 2)  # two for the ^C that a terminal echoes: a wrap would leave a line
        return _panel(self._state, monotonic() - self._changed, columns)


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
    from rich.console import Console

    if not metrics:
        raise ValueError("metrics is empty, but a picture needs those of one step at least: give the run's metrics")
    state = State(total_steps or metrics[-1].step, held_out=evaluation, held=memory or {}, plain=plain or {})
    for one in metrics:
        state = state.after(one)
    console = Console(record=True, file=StringIO(), width=columns, force_terminal=True, color_system="truecolor")
    LiveView(console, total_steps=state.total_steps, start_step=0).header([*header, ("", "")])
    console.print(_panel(state, 0.0, columns))
    console.save_svg(str(path), title="zeroshard train", code_format=_SVG)


def _panel(state: State, waited: float, columns: int) -> RenderableType:
    """The progress bar, and the figures and the memory in a frame; `waited` seconds after the last step."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table

    elapsed = waited + (0.0 if state.metrics is None else state.metrics.seconds)
    left = None if state.left is None else max(0.0, state.left - waited)
    progress = Table.grid(padding=(0, 2, 0, 0), expand=True)
    progress.width = columns
    for ratio in (None, 1, None, None):
        progress.add_column(no_wrap=True, ratio=ratio)
    done = f"step {state.step}/{state.total_steps}"
    bar = _bar(state.step, state.total_steps)
    progress.add_row(done, bar, f"{_duration(elapsed)} elapsed", f"{_duration(left)} left")
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
    from rich.text import Text

    label, value = 18, 11  # columns; labels as wide as "optimizer states" and its gap in the table of memory
    healthy = "bold cyan" if math.isfinite(metrics.loss) else "bold red"
    spark = sparkline(state.losses, columns - label - value)
    rows = [("loss", _loss(metrics.loss), healthy, (spark, "cyan"))]
    if state.held_out is not None:
        rows.append(("held-out loss", _loss(state.held_out[1]), "bold", (f"at step {state.held_out[0]}", "dim")))
    lines = [
        Text.assemble((f"{name:<{label}}", "dim"), (f"{figure:<{value}}", style), beside)
        for name, figure, style, beside in rows
    ]
    facts = [
        ("learning rate", f"{metrics.lr:.1e}"),
        ("gradient norm", None if metrics.grad_norm is None else _loss(metrics.grad_norm, digits=2)),
        ("tokens/s", _count(metrics.tokens_per_s)),
        ("tokens", _count(metrics.tokens)),
        ("TFLOPS a device", None if metrics.tflops is None else f"{metrics.tflops:.1f}"),
        ("MFU", None if metrics.mfu is None else _share(metrics.mfu)),
        ("communication", None if metrics.communication is None else _share(metrics.communication)),
    ]
    known = [(name, figure) for name, figure in facts if figure is not None]
    for at in range(0, len(known), 2):
        cells = [((f"{name:<{label}}", "dim"), f"{figure:<{value}}") for name, figure in known[at : at + 2]]
        lines.append(Text.assemble(*(part for cell in cells for part in cell)))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _bars(state: State, columns: int) -> RenderableType:
    """Memory by kind: a bar as long as plain data parallelism's bytes, filled as far as this rank's."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    *kinds, (_, held, plain) = _memory(state.held, state.plain)
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
    from rich.progress_bar import ProgressBar

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


def _memory(held: Mapping[str, int], plain: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """(kind, bytes held, bytes of plain data parallelism), and the total last."""
    kinds = [(kind, held.get(kind, 0), plain.get(kind, 0)) for kind in {**held, **plain}]
    return [*kinds, ("total", sum(held.values()), sum(plain.values()))]


def _aligned(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs with labels made equally wide."""
    width = max((len(label) for label, _ in lines), default=0)
    return [(f"{label:<{width}}  ", value) for label, value in lines]


def _clean(text: str) -> str:
    """The text with control characters, which could move the cursor or clear the screen, written as escapes."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda match: ascii(match[0])[1:-1], text)


def _loss(value: float, digits: int = 3) -> str:
    fits = value == 0 or 0.1 <= abs(value) < 1000 or not math.isfinite(value)
    return f"{value:.{digits}f}" if fits else f"{value:.1e}"


def _count(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
