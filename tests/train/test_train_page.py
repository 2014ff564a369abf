"""The report of a run is one HTML page: whole, safe against what a run's strings hold, and readable in a browser."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from zeroshard.cli.main import main
from zeroshard.train.metrics import read_metrics
from zeroshard.train.report import METRICS, write_html_report
from zeroshard.train.run_record import FORMAT
from zeroshard.utils.chart import MAX_POINTS, STYLE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")

CHARTS = {"loss", *METRICS, "states", "buffers", "memory", "collectives"}
HOSTILE = "</script><img src=x onerror=\"console.error('ran')\">&amp;{{ 7 * 7 }} $style"
PSI = 1_060_000  # parameters, 4 bytes each


def held(now: int, peak: int) -> dict[str, int]:
    return {"now_bytes": now, "peak_bytes": peak}


RANK = {
    "parameters": held(2 * PSI, 2 * PSI),
    "gathered": held(0, 1_600_000),
    "gradients": held(0, 2 * PSI),
    "autograd": held(0, 800_000),
    "optimizer states": held(4 * PSI, 4 * PSI),
    "total": held(6 * PSI, 10 * PSI),
}
MOMENTS = [(0.0, {"parameters": 2 * PSI}), (0.01, {"parameters": 2 * PSI, "gathered": 9}), (0.15, {"gradients": PSI})]
RUN: dict[str, Any] = {
    **FORMAT,
    "name": "tiny",
    "outcome": "finished",
    "message": "",
    "started": "2026-11-15T05:20:00+00:00",
    "seconds": 71.3,
    "options": {"lr": 0.001, "compile": False, "resume": None},
    "versions": {"zeroshard": "0.1.0", "torch": "2.13.0"},
    "model": {"parameters": PSI, "description": "GPT, 4 layers"},
    "stage": 3,
    "precision": "fp32",
    "ranks": 2,
    "tensor_parallel_ranks": 1,
    "backend": "gloo",
    "device": "cpu",
    "memory_by_rank": [RANK, RANK],
    "ddp_state_bytes": {"parameters": 4 * PSI, "gradients": 4 * PSI, "optimizer states": 8 * PSI},
    "memory_over_step": {
        "moments": [  # as a GPU's profile: nothing has been counted when the step begins
            {"seconds": at, "bytes_by_kind": kinds, "allocated_bytes": 4 * PSI if at else None} for at, kinds in MOMENTS
        ],
        "phases": [{"name": "forward", "start_seconds": 0.0}, {"name": "step", "start_seconds": 0.14}],
    },
    "collectives_per_step": {"all-gather": {"count": 14, "bytes": 8 * PSI}, "all-reduce": {"count": 7, "bytes": PSI}},
    "needed_bytes_per_step": {"all-gather": 8 * PSI},
    "samples": [{"step": 400, "prompt": "ROMEO:", "text": "ROMEO: I do."}],
    "checkpoints": ["step-000400"],
}


def training_step(step: int, **figures: object) -> dict[str, object]:
    line = {"step": step, "loss": 1 + 6 / step, "lr": 1e-3, "grad_norm": 1.2, "tokens": 2048 * step}
    line |= {"tokens_per_s": 21000.0, "seconds": 0.3 * step, "communication": 0.27, "tflops": None, "mfu": None}
    return line | figures


LINES = [{"step": 0, "validation_loss": 7.1}, *map(training_step, range(1, 41)), {"step": 40, "validation_loss": 1.5}]


def make_run(path: Path, record: object = RUN, lines: list[Any] = LINES, tail: str = "") -> Path:
    """Write a run's two files, without `report.html`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, encoding="utf-8")
    return path


@dataclass
class Dom(HTMLParser):
    """The elements of a page with their attributes, and its text by the element it stands in."""

    html: str
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._tag = ""
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append((self._tag, data))

    def tags(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def text(self) -> str:
        """All that is to be read, scripts and styles left out."""
        return " ".join(" ".join(data for tag, data in self.texts if tag not in ("script", "style")).split())


def page_of(run: Path) -> Dom:
    return Dom(write_html_report(run).read_text(encoding="utf-8"))


def drawn(run: Path) -> set[str]:
    return {path.stem for path in (run / "charts").iterdir()}


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def full(full_run: Path) -> Dom:
    return page_of(full_run)


def test_nothing_is_loaded_from_outside_and_nothing_runs(full: Dom) -> None:
    for tag, attributes in full.elements:
        assert not attributes.keys() & {"src", "srcset", "href", "data", "action", "poster"}, tag
        assert "url(" not in attributes.get("style", "")
    assert not {"script", "link", "iframe", "object", "embed", "base", "img"} & {tag for tag, _ in full.elements}
    assert not re.search(r"url\(|@import|https?:", "".join(data for tag, data in full.texts if tag == "style"))
    policy = next(tag["content"] for tag in full.tags("meta") if "http-equiv" in tag)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert len(full.html) < 400_000


def test_the_page_says_what_it_is_and_its_headings_are_in_order(full: Dom) -> None:
    assert [tag["lang"] for tag in full.tags("html")] == ["en"]
    assert ("title", "tiny – zeroshard training report") in full.texts
    levels = [int(tag[1]) for tag, _ in full.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_chart_has_a_label_its_numbers_and_a_file(full: Dom, full_run: Path) -> None:
    labels = [tag["aria-label"] for tag in full.tags("svg") if tag.get("role") == "img"]
    assert len(labels) == len(set(labels)) == len(full.tags("details")) == len(CHARTS)
    assert drawn(full_run) == CHARTS
    for path in (full_run / "charts").iterdir():
        ElementTree.fromstring(path.read_text(encoding="utf-8"))
        for color in re.findall(r"var\(--([a-z-]+)", path.read_text(encoding="utf-8")):
            assert f"--{color}: " in STYLE, color


def test_the_page_tells_the_figures_of_the_run(full: Dom) -> None:
    text = full.text()
    assert "GPT, 4 layers 1.06M parameters ZeRO stage 3 2 ranks cpu gloo fp32 15 November 2026, 05:20 UTC" in text
    assert "Training loss 1.15 at step 40, from 7.00 at step 1" in text
    assert "Held-out loss 7.10 → 1.50 best at step 40, perplexity 4.48" in text
    assert "Tokens per second 21.0k" in text
    assert "Memory per rank 8.48 MB of model states; plain data parallelism has 16.96 MB, 2.0 × as much" in text
    assert "Time 1:11 40 steps" in text
    assert "this run 9.54 MB" in text and "what its options need 8.48 MB" in text
    assert "after step 400 ROMEO: I do." in text  # the prompt stands there once
    assert "Options lr 0.001 compile false resume null" in text


def test_what_the_gpu_has_allocated_is_drawn_beside_the_states(full_run: Path) -> None:
    assert "allocated" in (full_run / "charts" / "memory.svg").read_text()


def test_of_many_ranks_the_fullest_are_drawn(tmp_path: Path) -> None:
    memory = [copy.deepcopy(RANK) for _ in range(64)]
    memory[5]["parameters"]["now_bytes"] += 8
    text = page_of(make_run(tmp_path, RUN | {"memory_by_rank": memory})).text()
    assert "rank 6 8.48 MB" in text and "rank 8 " not in text and text.index("rank 5 ") < text.index("rank 0 ")


def hostile(value: Any) -> Any:
    """The same data, but every string and every key tries to be more than a string."""
    if isinstance(value, dict):
        known = RUN.keys() | RANK.keys() | set("description parameters moments phases bytes_by_kind".split())
        known |= {"seconds", "name", "start_seconds", "now_bytes", "peak_bytes", "allocated_bytes", "count", "bytes"}
        known |= set("step prompt text".split())
        return {key if key in known else HOSTILE: hostile(item) for key, item in value.items()}
    return (
        [hostile(item) for item in value] if isinstance(value, list) else HOSTILE if isinstance(value, str) else value
    )


def test_strings_of_a_run_stay_strings(full: Dom, tmp_path: Path) -> None:
    record = hostile(RUN) | FORMAT | {"started": RUN["started"]}
    record["memory_over_step"]["moments"][0]["bytes_by_kind"][HOSTILE] = 9
    run = make_run(tmp_path, record)
    page = page_of(run)
    assert not page.tags("img") and not page.tags("script")
    assert page.text().count(HOSTILE) >= 12
    assert "half ? of a pair" in page_of(make_run(tmp_path, RUN | {"message": "half \ud83d of a pair"})).text()


def test_losses_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    bad = [training_step(41, loss="nan"), training_step(42, loss=float("inf")), training_step(43, loss=None)]
    page = page_of(make_run(tmp_path, RUN, [*LINES, *bad, {"step": 43, "validation_loss": "nan"}]))
    assert "Training loss 1.15 at step 40" in page.text() and "Held-out loss 7.10 → 1.50" in page.text()


DRAWN_FROM = {
    "memory_by_rank": {"states", "buffers"},
    "memory_over_step": {"memory"},
    "collectives_per_step": {"collectives"},
}


@pytest.mark.parametrize("part", DRAWN_FROM)
def test_what_was_not_recorded_is_named_in_its_place(tmp_path: Path, full: Dom, part: str) -> None:
    page = page_of(make_run(tmp_path, RUN | {part: type(RUN[part])()}))
    assert page.text().count("Not recorded in this run") == len(DRAWN_FROM[part])
    assert "Not recorded" not in full.text()
    assert drawn(tmp_path) == CHARTS - DRAWN_FROM[part]


def test_a_run_stopped_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    empty = {part: type(RUN[part])() for part in DRAWN_FROM} | {
        "outcome": "stopped",
        "message": "the data is empty",
        "samples": [],
    }
    run = make_run(tmp_path, RUN | empty)
    (run / "metrics.jsonl").unlink()
    text = page_of(run).text()
    assert "tiny stopped the data is empty" in text and text.count("Not recorded in this run") == len(CHARTS) + 1


def damaged(value: Any) -> Iterator[Any]:
    """The data with one part replaced by another type, for every part."""
    yield from (None, "x", [None])
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for part in damaged(value[key]):
            copied = copy.copy(value)
            copied[key] = part
            yield copied


def test_a_damaged_record_is_one_line_and_never_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = RUN | {"memory_by_rank": [RANK], "checkpoints": []}
    small["memory_over_step"] = RUN["memory_over_step"] | {"moments": RUN["memory_over_step"]["moments"][:1]}
    refused = 0
    make_run(tmp_path, RUN, [])
    for record in damaged(small):
        (tmp_path / "run.json").write_text(json.dumps(record))
        status = main(["report", str(tmp_path)])
        errors = capsys.readouterr().err
        assert status in (0, 1) and errors.count("\n") == status, (record, errors)
        refused += status
    assert refused > 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": ', "is not JSON"),
        ("[]", "must contain a JSON object"),
        ('{"name": "tiny", "plain": {}}', "is not of format 'zeroshard run', version 1"),
        (json.dumps(RUN | {"version": 2}), "version 2"),
    ],
)
def test_a_record_that_is_not_ours_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.json does not exist: pass the directory of a run"):
        write_html_report(tmp_path)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        write_html_report(tmp_path)


@pytest.mark.parametrize(
    "tail", ['{"step": 41, "lo', "{", "[1]", '{"step": "41"}', '{"step": 41, "loss": 1.0, "x": "Ψ']
)
def test_a_last_line_cut_short_is_ignored(tmp_path: Path, tail: str) -> None:
    assert read_metrics(make_run(tmp_path, RUN, LINES, tail) / "metrics.jsonl")[-1]["step"] == 40


def test_a_long_run_is_thinned_and_keeps_its_shape(tmp_path: Path) -> None:
    lines = [training_step(step, loss=3.0 - step / 10_000) for step in range(1, 20_001)]
    lines[7777]["loss"] = 99.0
    page = page_of(make_run(tmp_path, RUN, lines))
    assert len(page.html) < 400_000
    raw = next(tag["d"] for tag in page.tags("path") if "--training-light" in tag["style"])
    points = [tuple(map(float, point.split())) for point in raw[1:].split("L")]
    assert 100 < len(points) <= MAX_POINTS and (points[0][0], points[-1][0]) == (0, 1000)
    assert min(y for _, y in points) < 100 < sorted(y for _, y in points)[1]  # the peak is there


def chromium(page: Path, profile: Path, *options: str) -> list[str]:
    """The command that opens ``page`` in headless Chromium, without any network and with its console on stderr."""
    assert CHROMIUM is not None
    quiet = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
    flags = [*quiet.split(), "disable-component-update", "disable-dev-shm-usage", "enable-logging=stderr", "v=0"]
    flags += [f"user-data-dir={profile}", "host-resolver-rules=MAP * ~NOTFOUND", *options]
    return [CHROMIUM, *(f"--{flag}" for flag in flags), page.as_uri()]


def console_of(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if ":CONSOLE" in line)


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize("width", [360, 1600])
def test_the_page_fits_any_width_in_a_browser(width: int, tmp_path: Path) -> None:
    make_run(tmp_path / "run", RUN | {"name": "tiny" * 50, "message": "x" * 500})
    measure = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    page = write_html_report(tmp_path / "run")
    html = page.read_text(encoding="utf-8")
    page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", html) + measure, encoding="utf-8")  # the policy allows none
    options = ("virtual-time-budget=3000", f"window-size={width},800", "dump-dom")
    command = chromium(page, tmp_path / "profile", *options)
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)
    assert list(console_of(done.stderr.splitlines())) == []
    needed, available = re.search(r"<title>(\d+) of (\d+)", done.stdout).groups()
    assert int(needed) <= int(available)
