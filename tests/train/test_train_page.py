"""The report of a run is one HTML file: whole, safe against what a run's strings hold, and drawn in a browser."""

from __future__ import annotations

import builtins
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the report needs plotly: pip install 'zeroshard[train]'")
pytest.importorskip("jinja2", reason="the report needs jinja2: pip install 'zeroshard[train]'")

from zeroshard.page.chart import MAX_POINTS, downsample
from zeroshard.train.report import run_charts
from zeroshard.train.report.html_report import read_metrics, write_html_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")

CHARTS = {"loss", "lr", "grad-norm", "tokens-per-s", "communication", "states", "working", "timeline", "traffic"}
HOSTILE = "</script><img src=x onerror=\"console.error('ran')\">&amp;{{ 7 * 7 }}"
PSI = 1_060_000  # parameters, 4 bytes each


def held(now: int, peak: int) -> dict[str, int]:
    return {"now": now, "peak": peak}


RANK = {
    "parameters": held(2 * PSI, 2 * PSI),
    "gathered": held(0, 1_600_000),
    "gradients": held(0, 2 * PSI),
    "autograd": held(0, 800_000),
    "optimizer states": held(4 * PSI, 4 * PSI),
    "total": held(6 * PSI, 10 * PSI),
}
RUN = {
    "name": "tiny",
    "outcome": "finished",
    "message": "",
    "started": "2026-11-15T05:20:00+00:00",
    "seconds": 71.3,
    "settings": {"lr": 0.001, "compile": False, "resume": None},
    "versions": {"zeroshard": "0.1.0", "torch": "2.13.0", "device": "cpu"},
    "model": {"parameters": PSI, "description": "GPT, 4 layers"},
    "stage": 3,
    "precision": "fp32",
    "ranks": 2,
    "backend": "gloo",
    "memory": [RANK, RANK],
    "plain": {"parameters": 4 * PSI, "gradients": 4 * PSI, "optimizer states": 8 * PSI},
    "timeline": {
        "seconds": [0.0, 0.01, 0.08, 0.15],
        "kinds": {"parameters": [2 * PSI] * 4, "gathered": [0, 9, 5, 0], "gradients": [0, 0, 7, 2 * PSI]},
        "allocated": [3 * PSI, 4 * PSI, 6 * PSI, 5 * PSI],
        "phases": [["forward", 0.0], ["backward", 0.08], ["step", 0.14]],
    },
    "traffic": {"all-gather": {"count": 14, "bytes": 8 * PSI}, "reduce-scatter": {"count": 7, "bytes": 4 * PSI}},
    "paper_traffic": {"formula": "3Ψ", "bytes": 12 * PSI},
    "predicted_traffic": {"step": {"all-gather": 8 * PSI, "reduce-scatter": 4 * PSI}, "average": {}},
    "samples": [{"step": 400, "prompt": "ROMEO:", "text": "ROMEO: I do."}],
    "checkpoints": ["step-000400"],
}


def training_step(step: int, **figures: object) -> dict[str, object]:
    line = {"step": step, "loss": 1 + 6 / step, "lr": 1e-3, "grad_norm": 1.2, "tokens": 2048 * step}
    line |= {"tokens_per_s": 21000.0, "seconds": 0.3 * step, "communication": 0.27, "tflops": None, "mfu": None}
    return line | figures


LINES = [{"step": 0, "validation_loss": 7.1}, *map(training_step, range(1, 41)), {"step": 40, "validation_loss": 1.5}]


def make_run(path: Path, record: object = RUN, lines: list[object] = LINES, tail: str = "") -> Path:
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

    def figures(self) -> dict[str, dict]:
        source = re.search(r'<script type="application/json" id="figures">(.*?)</script>', self.html, re.S)
        assert source is not None
        return json.loads(source[1])


def page_of(run: Path) -> Dom:
    return Dom(write_html_report(run).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Dom:
    return page_of(make_run(tmp_path_factory.mktemp("full")))


# ------------------------------------------------------------------------------------------------ the file


def test_the_page_is_written_into_the_run_and_nothing_else_is_touched(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = (run / "run.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    assert write_html_report(run) == run / "report.html"
    assert {file.name for file in run.iterdir()} == {"run.json", "metrics.jsonl", "report.html"}
    assert ((run / "run.json").read_bytes(), (run / "metrics.jsonl").read_bytes()) == before


def test_nothing_is_loaded_from_outside(full: Dom) -> None:
    for tag, attributes in full.elements:
        assert not attributes.keys() & {"src", "srcset", "href", "data", "action", "poster"}, tag
        assert "url(" not in attributes.get("style", "")
    assert not {"link", "iframe", "object", "embed", "base", "img"} & {tag for tag, _ in full.elements}
    style = "".join(data for tag, data in full.texts if tag == "style")
    assert "--parameters" in style
    assert not re.search(r"url\(|@import|https?:", style)
    policy = next(tag["content"] for tag in full.tags("meta") if "http-equiv" in tag)
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"https?:|\*|unsafe-eval|script-src[^;]*unsafe-inline|connect-src", policy)
    nonce = re.search(r"'nonce-([\w-]+)'", policy)
    assert nonce is not None
    assert {tag.get("nonce", tag.get("type")) for tag in full.tags("script")} == {nonce[1], "application/json"}


def test_the_page_says_what_it_is_and_its_headings_are_in_order(full: Dom) -> None:
    assert [tag["lang"] for tag in full.tags("html")] == ["en"]
    assert ("title", "tiny – zeroshard training report") in full.texts
    levels = [int(tag[1]) for tag, _ in full.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [tag["id"] for _, tag in full.elements if "id" in tag]
    assert len(ids) == len(set(ids))


def test_every_chart_has_a_place_a_label_and_its_numbers(full: Dom) -> None:
    places = {tag["id"]: tag for tag in full.tags("div") if tag.get("class") == "chart"}
    assert places.keys() == full.figures().keys() == CHARTS
    assert all(place["role"] == "img" and len(place["aria-label"]) > 20 for place in places.values())
    assert len(full.tags("details")) == len(CHARTS)


def test_the_figures_are_ones_that_plotly_knows(full: Dom) -> None:
    import plotly.graph_objects as go

    for figure in full.figures().values():
        go.Figure(figure)  # raises for an attribute that plotly has not


def test_every_colour_of_a_figure_is_one_of_the_stylesheet(full: Dom) -> None:
    style = "".join(data for tag, data in full.texts if tag == "style")
    named = set(re.findall(r"var\((--[a-z-]+)\)", json.dumps(full.figures())))
    assert {"--parameters", "--gathered", "--all-gather", "--held"} <= named
    kinds = {
        run_charts.color_variable(kind)[4:-1]
        for kind in (*run_charts.STATE_KINDS, *run_charts.BUFFER_KINDS, *run_charts.COLLECTIVE_KINDS)
    }
    for name in named | kinds | {"--other"}:
        assert f"{name}: " in style, name


# ------------------------------------------------------------------------------------------------ what it says


def test_the_head_tells_the_figures_of_the_run(full: Dom) -> None:
    text = full.text()
    assert "GPT, 4 layers 1.06M parameters ZeRO stage 3 2 ranks cpu gloo fp32 15 November 2026, 05:20 UTC" in text
    assert "Training loss 1.15 at step 40, from 7.00 at step 1" in text
    assert "Held-out loss 7.10 → 1.50 best at step 40, perplexity 4.48" in text
    assert "Tokens per second 21.0k" in text
    assert "Memory per rank 8.48 MB of model states, 2.0 × less than plain data parallelism" in text
    assert "Time 1 min 11 s 40 steps, 81.9k tokens" in text


def test_traffic_is_held_against_the_options_and_the_formula(full: Dom, tmp_path: Path) -> None:
    moved = "One step moved 12.72 MB through each rank, 1.00 × the "
    assert f"{moved}12.72 MB that the options of this run need, 1.00 × the 3Ψ (12.72 MB) of the" in full.text()
    older = {key: value for key, value in RUN.items() if key != "predicted_traffic"}
    text = page_of(make_run(tmp_path / "older", older)).text()
    assert f"{moved}3Ψ (12.72 MB) of the ZeRO paper" in text and "options of this run need" not in text


@pytest.mark.parametrize("is_averaged", [False, True])
def test_a_step_with_an_average_is_held_against_one(is_averaged: bool, tmp_path: Path) -> None:
    predicted = {"step": {"reduce-scatter": 4 * PSI}, "average": {"replica average": 8 * PSI}}
    traffic = {"reduce-scatter": {"count": 7, "bytes": 4 * PSI}}
    if is_averaged:
        traffic["replica average"] = {"count": 7, "bytes": 8 * PSI}
    page = page_of(make_run(tmp_path, RUN | {"traffic": traffic, "predicted_traffic": predicted}))
    assert f", 1.00 × the {'12.72' if is_averaged else '4.24'} MB that the options of this run need" in page.text()
    assert ("8.48 MB, which this step includes" in page.text()) == is_averaged
    names = {bar["name"] for bar in page.figures()["traffic"]["data"]}
    assert names == {"reduce-scatter", "paper"} | ({"replica average"} if is_averaged else set())


def test_a_rank_that_saves_nothing_is_not_said_to_save(tmp_path: Path) -> None:
    whole = {kind: held(nbytes, nbytes) for kind, nbytes in RUN["plain"].items()}
    text = page_of(make_run(tmp_path, RUN | {"stage": 0, "memory": [whole, whole]})).text()
    assert "of model states, as much as plain data parallelism" in text
    assert "× less" not in text


def test_states_and_working_buffers_are_apart(full: Dom) -> None:
    figures = full.figures()
    assert {bar["name"] for bar in figures["states"]["data"]} == {"parameters", "gradients", "optimizer states"}
    assert {bar["name"] for bar in figures["working"]["data"]} == {"gathered", "autograd"}
    gradients = next(bar for bar in figures["states"]["data"] if bar["name"] == "gradients")
    assert gradients["x"] == [4 * PSI, 2 * PSI, 2 * PSI]  # plain, then the ranks; freed at the end, so the peak
    assert "The peak of a rank is 10.60 MB" in full.text()


@pytest.mark.parametrize(("extra", "shown"), [(0, ["each of 64 ranks"]), (8, ["most, rank 5", "least, rank 0"])])
def test_many_ranks_are_not_drawn_one_by_one_but_listed(tmp_path: Path, extra: int, shown: list[str]) -> None:
    memory = [copy.deepcopy(RANK) for _ in range(64)]
    memory[5]["parameters"]["now"] += extra
    page = page_of(make_run(tmp_path, RUN | {"memory": memory}))
    assert page.figures()["states"]["data"][0]["y"] == ["plain data parallelism", *shown]
    assert "rank 63" in page.text()


def test_phases_are_marked_and_the_allocator_is_drawn_next_to_what_is_known(full: Dom) -> None:
    timeline = full.figures()["timeline"]
    assert [note["text"] for note in timeline["layout"]["annotations"]] == ["forward", "backward", "step"]
    assert [shape["x0"] for shape in timeline["layout"]["shapes"]] == [0, 80, 140]  # milliseconds
    assert timeline["data"][-1]["y"] == RUN["timeline"]["allocated"]


def test_a_prompt_repeated_by_the_sample_stands_there_once(full: Dom) -> None:
    assert "after step 400 ROMEO: I do." in full.text()


def test_settings_are_written_as_people_read_them(full: Dom) -> None:
    assert "Settings lr 0.001 compile no resume none" in full.text()


# ------------------------------------------------------------------------------------------------ what may be in it


def hostile_run() -> dict[str, object]:
    """A run whose every string tries to be more than a string."""
    run = copy.deepcopy(RUN)
    for key in ("name", "outcome", "message", "precision", "backend"):
        run[key] = HOSTILE
    run["settings"] = run["versions"] = {HOSTILE: HOSTILE}
    run["model"]["description"] = run["paper_traffic"]["formula"] = HOSTILE
    run["memory"] = [RANK | {HOSTILE: held(1, 1)}]
    run["timeline"]["kinds"][HOSTILE] = [1, 2, 3, 4]
    run["timeline"]["phases"] = [[HOSTILE, 0.0]]
    run["traffic"][HOSTILE] = {"count": 1, "bytes": 1}
    run["samples"] = [{"step": HOSTILE, "prompt": HOSTILE, "text": HOSTILE}]
    run["checkpoints"] = [HOSTILE]
    return run


def test_strings_of_a_run_stay_strings(full: Dom, tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, hostile_run()))
    assert len(page.tags("script")) == len(full.tags("script"))
    assert not page.tags("img")
    assert page.text().count(HOSTILE) >= 12
    assert "<img" not in page.html
    drawn = json.dumps(page.figures())
    assert "&lt;img" in drawn  # Plotly reads tags in its labels too
    assert "<img" not in drawn


def test_a_sample_that_is_invalid_unicode_is_written(tmp_path: Path) -> None:
    samples = [{"step": 1, "prompt": "", "text": "half \ud83d of a pair"}]
    assert "half ? of a pair" in page_of(make_run(tmp_path, RUN | {"samples": samples})).text()


def test_losses_that_are_no_numbers_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = [training_step(41, loss="nan"), training_step(42, loss=float("inf")), training_step(43, loss=None)]
    page = page_of(make_run(tmp_path, RUN, [*LINES, *bad, {"step": 43, "validation_loss": "nan"}]))
    assert "3 steps had a loss that is not a finite number" in page.text()
    assert page.figures()["loss"]["data"][0]["x"][-1] == 40
    assert "Held-out loss 7.10 → 1.50" in page.text()


# ------------------------------------------------------------------------------------------------ what may be missing


ABSENT = {
    "memory": "The memory of the ranks was not recorded",
    "timeline": "No step was profiled in this run",
    "traffic": "The communication of a step was not recorded",
    "samples": "No text was generated in this run",
}
DRAWN_FROM = {"memory": {"states", "working"}, "timeline": {"timeline"}, "traffic": {"traffic"}, "samples": set()}


@pytest.mark.parametrize("part", ABSENT)
@pytest.mark.parametrize("how", ["missing", "null"])
def test_a_missing_part_is_named_in_its_place(tmp_path: Path, full: Dom, part: str, how: str) -> None:
    run = {key: value for key, value in RUN.items() if key != part} | ({part: None} if how == "null" else {})
    page = page_of(make_run(tmp_path, run))
    assert ABSENT[part] in page.text()
    assert ABSENT[part] not in full.text()
    assert page.figures().keys() == CHARTS - DRAWN_FROM[part]


def test_parts_that_are_there_but_empty_are_named_too(tmp_path: Path) -> None:
    timeline = {"seconds": [], "kinds": {"parameters": []}, "allocated": None, "phases": []}
    page = page_of(
        make_run(tmp_path, RUN | {"timeline": timeline, "memory": [{"parameters": held(8, 8), "step": None}]})
    )
    assert page.figures().keys() == CHARTS - {"timeline", "working"}
    assert "No temporary buffers were recorded" in page.text()


def test_without_plain_the_states_are_drawn_alone(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, RUN | {"plain": None}))
    assert page.figures()["states"]["data"][0]["y"] == ["rank 0", "rank 1"]
    assert "Memory per rank 8.48 MB of model states Time" in page.text()


def test_one_rank_that_sends_nothing_is_said_to(tmp_path: Path) -> None:
    assert "Nothing was communicated" in page_of(make_run(tmp_path, RUN | {"traffic": {}})).text()


def test_a_run_stopped_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"name": "early", "outcome": "stopped", "message": "the data is empty"})
    (run / "metrics.jsonl").unlink()
    page = page_of(run)
    assert page.figures() == {}
    for words in ("early stopped the data is empty", "No step was finished", *ABSENT.values()):
        assert words in page.text()


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.json does not exist: pass the directory of a run"):
        write_html_report(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"), [('{"name": ', "is not JSON"), ("[]", "must contain a JSON object \\(got a list\\)")]
)
def test_a_broken_record_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        write_html_report(tmp_path)


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = builtins.__import__

    def importer(name: str, *args: object) -> object:
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", importer)
    with pytest.raises(ImportError, match=rf"needs {missing}, which is not .* pip install 'zeroshard\[train\]'"):
        write_html_report(make_run(tmp_path))


# ------------------------------------------------------------------------------------------------ metrics


def test_of_a_step_written_twice_the_later_line_counts(tmp_path: Path) -> None:
    lines = [*map(training_step, range(1, 5)), training_step(3, loss=0.5), training_step(4, loss=0.25)]
    steps = read_metrics(make_run(tmp_path, RUN, lines) / "metrics.jsonl").steps
    assert [(step["step"], step["loss"]) for step in steps] == [(1, 7.0), (2, 4.0), (3, 0.5), (4, 0.25)]


def test_what_a_resumed_run_has_not_reached_again_is_forgotten(tmp_path: Path) -> None:
    lines = [training_step(1), {"step": 1, "validation_loss": 3.0}, training_step(2), training_step(3)]
    lines += [{"step": 3, "validation_loss": 2.0}, training_step(2, loss=0.5)]
    metrics = read_metrics(make_run(tmp_path, RUN, lines) / "metrics.jsonl")
    assert [(step["step"], step["loss"]) for step in metrics.steps] == [(1, 7.0), (2, 0.5)]
    assert metrics.evaluations == [(1, 3.0)]


@pytest.mark.parametrize("tail", ['{"step": 41, "lo', '{"step": 41', "{", '{"step": 41, "loss": 1.0, "x": "Ψ'])
def test_a_last_line_cut_short_is_ignored(tmp_path: Path, tail: str) -> None:
    run = make_run(tmp_path, RUN, LINES, tail)
    assert read_metrics(run / "metrics.jsonl").steps[-1]["step"] == 40


def test_a_last_line_cut_within_a_character_is_ignored(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 41, "note": "Ψ'.encode()[:-1])
    assert read_metrics(run / "metrics.jsonl").steps[-1]["step"] == 40


@pytest.mark.slow
def test_a_long_run_is_thinned_and_keeps_its_shape(tmp_path: Path) -> None:
    lines = [training_step(step, loss=3.0 - step / 10_000) for step in range(1, 20_001)]
    lines[7777]["loss"], lines[12_345]["loss"] = 99.0, -5.0
    page = page_of(make_run(tmp_path, RUN, lines))
    raw, smoothed = page.figures()["loss"]["data"][:2]
    assert 1000 < len(raw["x"]) == len(smoothed["x"]) <= MAX_POINTS
    assert (raw["x"][0], raw["x"][-1]) == (1, 20_000)
    assert dict(zip(raw["x"], raw["y"], strict=True)).items() >= {7778: 99.0, 12_346: -5.0}.items()
    gaps = [after - before for before, after in pairwise(raw["x"])]
    assert min(gaps) > 0 and max(gaps) <= 2 * 20_000 / (MAX_POINTS / 2 - 1)
    assert len(page.html) < 6_000_000  # Plotly itself is 4.8 MB


def test_a_short_run_is_not_thinned() -> None:
    assert downsample([1.0] * MAX_POINTS) == list(range(MAX_POINTS))


# ------------------------------------------------------------------------------------------------ in a browser


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
@pytest.mark.slow
@in_browser
def test_every_chart_is_drawn_offline_whatever_the_strings(tmp_path: Path) -> None:
    run = hostile_run() | {"timeline": RUN["timeline"], "memory": [RANK | {HOSTILE: held(1, 1)}] * 2}
    page = write_html_report(make_run(tmp_path / "run", run))
    command = chromium(page, tmp_path / "profile", "virtual-time-budget=5000", "dump-dom")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)
    assert list(console_of(done.stderr.splitlines())) == []
    dom = Dom(done.stdout)
    assert {tag["id"] for tag in dom.tags("div") if "js-plotly-plot" in tag.get("class", "").split()} == CHARTS
    assert sum("main-svg" in tag.get("class", "") for tag in dom.tags("svg")) >= len(CHARTS)
    for words in ("loss (nats per token)", "milliseconds since the step began", "backward", "8.48 MB", "16.96 MB"):
        assert words in dom.text()
    assert not dom.tags("img")
    assert not any("modebar-btn" in tag.get("class", "") for tag in dom.tags("a"))


# A frame takes the preferred colours from the element that holds it, so setting them there changes them while the page
# is open. Chromium reports such a change when it draws, so this one runs in real time and not in virtual time.
FRAMES = """<!doctype html><meta charset="utf-8"><body style="margin: 0"></body><script>
const open = (src, width) => new Promise(done => {
  const frame = Object.assign(document.createElement("iframe"), { src, width, height: 240, onload: () => done(frame) });
  document.body.append(frame);
});
const look = frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const rights = [...page.querySelectorAll(".main-svg")].map(svg => svg.getBoundingClientRect().right);
  const drawn = [...page.querySelectorAll(".js-plotly-plot")].map(chart => chart.id);
  const bar = page.querySelector("#states .point path")?.style.fill;
  return { width: root.clientWidth, needed: Math.max(root.scrollWidth, ...rights), drawn, bar };
};
const until = async condition => {
  for (let tries = 0; tries < 400 && !condition(); tries++) await new Promise(done => setTimeout(done, 50));
};
(async () => {
  const pages = await Promise.all([360, 768, 1600].map(width => open("run/report.html", width)));
  const bare = await open("bare/report.html", 360);
  await until(() => pages.every(frame => look(frame).drawn.length === 9));
  const light = pages.map(look);
  for (const frame of pages) frame.style.colorScheme = "dark";
  await until(() => pages.every((frame, index) => look(frame).bar !== light[index].bar));
  console.log("found " + JSON.stringify({ light, dark: pages.map(look), bare: look(bare) }));
})();
</script>"""


def listen(command: list[str], word: str) -> list[str]:
    """Run Chromium until a line of its console holds ``word``, and give the lines up to that."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    deadline = threading.Timer(60, process.kill)  # seconds; stderr then ends
    deadline.start()
    heard = []
    try:
        assert process.stderr is not None
        for line in console_of(process.stderr):
            heard.append(line)
            if word in line:
                break
    finally:
        deadline.cancel()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return heard


@pytest.mark.browser
@pytest.mark.slow
@in_browser
def test_the_page_fits_any_width_and_follows_the_preferred_colours(tmp_path: Path) -> None:
    write_html_report(make_run(tmp_path / "run"))
    early = {"name": "early" * 20, "outcome": "interrupted", "message": "x" * 200}
    write_html_report(make_run(tmp_path / "bare", early, [training_step(1, grad_norm=None)]))
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    options = ("allow-file-access-from-files", "blink-settings=preferredColorScheme=1", "window-size=1640,1200")
    command = chromium(tmp_path / "frames.html", tmp_path / "profile", "remote-debugging-port=0", *options)
    console = listen(command, "found {")
    assert len(console) == 1, console  # no error before it
    found = json.loads(re.search(r"found (\{.*\})\"", console[0])[1])
    for frame in (*found["light"], *found["dark"], found["bare"]):
        assert frame["needed"] <= frame["width"] + 0.5, frame  # half a pixel of rounding
    assert [set(frame["drawn"]) for frame in found["light"]] == [CHARTS] * 3
    assert set(found["bare"]["drawn"]) == {"loss", "lr", "tokens-per-s", "communication"}
    style = re.findall(r"--parameters: #(\w\w)(\w\w)(\w\w)", (tmp_path / "run" / "report.html").read_text())
    light, dark = (f"rgb({', '.join(str(int(part, 16)) for part in parts)})" for parts in style)
    assert {frame["bar"] for frame in found["light"]} == {light}
    assert {frame["bar"] for frame in found["dark"]} == {dark}
