"""What people see while a run trains: lines, the live view, its picture."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.picture import save_live_view_svg
from zeroshard.train import live_view
from zeroshard.train.live_view import LiveView
from zeroshard.train.metrics import StepMetrics
from zeroshard.train.run_view import RunView
from zeroshard.train.summary import open_view

HELD = {"parameters": 1_050_000, "gradients": 1_050_000, "optimizer states": 4_200_000}
PLAIN = {kind: 4 * nbytes for kind, nbytes in HELD.items()}
NASTY = "[bold]as is[/bold] [/] :smile: \x1b[2J\r\x07\x9b1m"
SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes after a step, so that elapsed and left are the same on any machine."""
    monkeypatch.setattr(live_view, "monotonic", lambda: 100.0)


def figures(step: int, loss: float = 5.812, **others: float | None) -> StepMetrics:
    known = {"lr": 1e-3, "grad_norm": 1.02, "tokens": 4096 * step, "tokens_per_s": 21_300.0, "seconds": 3.0 * step}
    return StepMetrics(step=step, loss=loss, **(known | others))


def plain_lines(use: Callable[[RunView], None], *, total: int = 400, start: int = 0, log_every: int = 10) -> list[str]:
    stream = io.StringIO()
    with open_view(total_steps=total, start_step=start, stream=stream, log_every=log_every) as view:
        use(view)
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    return text.splitlines()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def live_text(use: Callable[[RunView], None], *, columns: int = 80, total: int = 400, start: int = 0) -> str:
    from rich.console import Console

    console = Console(file=Terminal(), force_terminal=True, width=columns, height=40, color_system="truecolor")
    with LiveView(console, total_steps=total, start_step=start) as view:
        use(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def last_panel(text: str) -> list[str]:
    """The lines of the last drawing, without escape codes."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").splitlines()
    start = max(at for at, line in enumerate(lines) if line.startswith("step "))
    return lines[start:]


def test_plain_lines_have_fixed_columns() -> None:
    def use(view: RunView) -> None:
        view.show_step(figures(1, communication=0.27))
        view.show_step(figures(20, 10.8, grad_norm=None, tokens_per_s=1_020.0))
        view.show_step(figures(400, float("nan"), communication=1.0))

    assert plain_lines(use) == [
        "step    1/400  loss 5.812   lr 1.0e-03  norm 1.02   21.3k tokens/s  comm 27%   eta -:--",
        "step   20/400  loss 10.800  lr 1.0e-03  norm -      1.02k tokens/s  comm -     eta 19:00",
        "step  400/400  loss nan     lr 1.0e-03  norm 1.02   21.3k tokens/s  comm 100%  eta 0:00",
    ]


def test_plain_lines_of_a_gpu_tell_its_use() -> None:
    (line,) = plain_lines(lambda view: view.show_step(figures(1, tflops=412.14, mfu=0.417)))
    assert "  412.1 TFLOPS  mfu 42%   eta " in line


def test_plain_lines_come_at_the_first_each_tenth_and_the_last_step() -> None:
    def use(view: RunView) -> None:
        for step in range(13, 36):
            view.show_step(figures(step))

    assert [int(line[4:9]) for line in plain_lines(use, total=35, start=12)] == [13, 20, 30, 35]
    assert [int(line[4:9]) for line in plain_lines(use, total=90, start=12)] == [13, 20, 30, 35]  # ended early


def test_plain_lines_reach_the_file_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        view = open_view(total_steps=400, start_step=0, stream=stream)
        view.show_step(figures(1))
        assert (tmp_path / "log").read_text().startswith("step    1/400  loss 5.812")


def test_plain_lines_for_all_else() -> None:
    def use(view: RunView) -> None:
        view.show_header([("model", "GPT"), ("out directory", "runs/a")])
        view.show_memory(HELD, PLAIN)
        view.show_evaluation(20, 5.901)
        view.show_message("saved")
        view.show_sample("First:", "one\ntwo")
        view.show_footer([("best", "5.901")])

    assert plain_lines(use) == [
        "model          GPT",
        "out directory  runs/a",
        "memory  parameters          1.05 MB of   4.20 MB",
        "memory  gradients           1.05 MB of   4.20 MB",
        "memory  optimizer states    4.20 MB of  16.80 MB",
        "memory  total               6.30 MB of  25.20 MB",
        "step   20/400  held-out loss 5.901",
        "saved",
        "sample after 'First:'",
        "  | one",
        "  | two",
        "best  5.901",
    ]


def test_plain_lines_survive_a_stream_that_knows_only_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    open_view(total_steps=1, start_step=0, stream=stream).show_message("Ψ is \ud800")
    assert raw.getvalue() == b"\\u03a8 is \\ud800\n"


def nasty(view: RunView) -> None:
    view.show_header([("model", NASTY)])
    view.show_message(NASTY)
    view.show_sample(NASTY, NASTY)
    view.show_footer([("end", NASTY)])


def test_plain_text_from_outside_is_shown_not_obeyed() -> None:
    lines = plain_lines(nasty)  # which refuses control characters
    assert lines[1] == r"[bold]as is[/bold] [/] :smile: \x1b[2J\r\x07\x9b1m"


def test_live_text_from_outside_is_shown_not_obeyed() -> None:
    text = live_text(nasty)
    assert text.count(r"[bold]as is[/bold] [/] :smile: \x1b[2J\r\x07\x9b1m") == 5
    assert "\x1b[2J" not in text and "\x07" not in text and "\x9b" not in text


def watched(view: RunView) -> None:
    view.show_memory(HELD, PLAIN)
    for step in range(1, 21):
        view.show_step(figures(step, 6.0 - step / 10, communication=0.27, tflops=412.1, mfu=0.417))
    view.show_evaluation(20, 4.321)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_live_view_shows_the_run_without_wrapping(columns: int) -> None:
    lines = last_panel(live_text(watched, columns=columns))
    assert re.match(r"step 20/400 .* 1:00 elapsed +19:00 left$", lines[0].rstrip())
    screen = "\n".join(lines)
    for wanted in (
        r"loss +4\.000 +█.*▁",
        r"held-out loss +4\.321 +at step 20",
        r"learning rate +1\.0e-03",
        r"gradient norm +1\.02",
        r"tokens/s +21\.3k",
        r"TFLOPS/device +412\.1",
        r"MFU +42%",
        r"communication +27%",
        r"memory 6\.30 MB, plain data parallelism 25\.20 MB",
        r"parameters +[━╸].* 1\.05 MB of +4\.20 MB",
        r"optimizer states +━.* 4\.20 MB of +16\.80 MB",
    ):
        assert re.search(wanted, screen), f"{wanted} is not in\n{screen}"
    assert {len(line) for line in lines[1:] if line} == {columns - 2}  # the terminal echoes ^C there


@pytest.mark.parametrize("columns", [1, 20, 50])
def test_a_small_terminal_crops_and_wraps_nothing(columns: int) -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", live_text(watched, columns=columns))
    assert max(len(line) for line in text.splitlines()) <= columns


def test_before_the_first_step_there_is_a_bar_alone() -> None:
    lines = last_panel(live_text(lambda view: None, start=7))
    assert len(lines) == 1
    assert re.match(r"step 7/400 .* 0:00 elapsed +-:-- left", lines[0])


def test_losses_that_are_not_finite_are_drawn() -> None:
    def use(view: RunView) -> None:
        for step, loss in enumerate([3.0, float("nan"), float("inf")], start=1):
            view.show_step(figures(step, loss, grad_norm=float("nan")))

    assert re.search(r"loss +inf +▁××", "\n".join(last_panel(live_text(use))))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_cursor_is_never_left_hidden(error: type[BaseException]) -> None:
    from rich.console import Console

    console = Console(file=Terminal(), force_terminal=True, width=80)
    with pytest.raises(error), LiveView(console, total_steps=4, start_step=0) as view:
        view.show_step(figures(1))
        during = console.file.getvalue()  # type: ignore[attr-defined]
        raise error
    after = console.file.getvalue()  # type: ignore[attr-defined]
    assert HIDE in during  # so the next lines can fail
    assert during.rindex(SHOW) > during.rindex(HIDE)  # a killed process does not get to show it
    assert after.rindex(SHOW) > after.rindex(HIDE)


def test_messages_stand_above_and_the_footer_beneath_the_panel() -> None:
    def use(view: RunView) -> None:
        view.show_step(figures(1))
        view.show_message("saved")
        view.show_footer([("best", "5.901")])
        view.show_step(figures(2))  # too late to be shown, but no error

    text = live_text(use)
    assert text.index("saved") < text.rindex("elapsed") < text.index("best")


def test_print_lands_above_the_panel_and_stdout_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with open_view(total_steps=4, start_step=0) as view:
        view.show_step(figures(1))
        assert sys.stdout is not terminal
        print("from elsewhere")
    assert sys.stdout is terminal
    assert terminal.getvalue().index("from elsewhere") < terminal.getvalue().rindex("elapsed")


def test_the_view_suits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(stream: io.TextIOBase, plain: bool = False) -> type[RunView]:
        return type(open_view(total_steps=4, start_step=0, stream=stream, plain=plain))  # type: ignore[arg-type]

    monkeypatch.setenv("TERM", "xterm")
    assert opened(Terminal()) is LiveView
    assert opened(io.StringIO()) is RunView
    assert opened(Terminal(), plain=True) is RunView
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(latin, "isatty", lambda: True, raising=False)
    assert opened(latin) is RunView  # it has no blocks to draw bars with
    monkeypatch.setenv("TERM", "dumb")
    assert opened(Terminal()) is RunView


def test_ranks_above_0_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with RunView() as view:
        watched(view)
        nasty(view)
    assert capfd.readouterr() == ("", "")


def test_a_picture_is_the_panel_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    run = [figures(step, 6.0 - step / 10) for step in range(1, 21)]
    save_live_view_svg(
        run,
        path=path,
        total_steps=40,
        header=[("model", NASTY)],
        held_bytes=HELD,
        ddp_bytes=PLAIN,
        evaluation=(20, 4.321),
    )
    text = path.read_text()
    shown = " ".join("".join(ElementTree.fromstring(text).itertext()).replace("\xa0", " ").split())
    for wanted in ("[bold]as is[/bold]", "step 20/40", "1:00 left", "4.000", "4.321", "1.05 MB of 4.20 MB"):
        assert wanted in shown
    outside = re.findall(r"https?:[^\"')\s]*|@import|@font-face", text)
    assert outside == ["http://www.w3.org/2000/svg"]  # the name of the format, which nobody loads


def test_a_picture_of_no_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metrics is empty"):
        save_live_view_svg([], path=tmp_path / "run.svg")
