"""The page of a plan is one HTML file: whole, of the plans' own figures, and drawn in a browser."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("plotly", reason="the page needs plotly: pip install 'zeroshard[train]'")
pytest.importorskip("jinja2", reason="the page needs jinja2: pip install 'zeroshard[train]'")

from test_train_page import HOSTILE, Dom, chromium, console_of, in_browser, listen

import zeroshard
from zeroshard.cli import plan_charts
from zeroshard.cli.main import main
from zeroshard.cli.open_model import open_model
from zeroshard.cli.plan_page import write_page
from zeroshard.cli.plan_text import summary_rows
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plans import Plan, Plans, evaluate_strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop

pytestmark = pytest.mark.usefixtures("traced_once")

CHARTS = {"stages", "timeline", "batches", "times"}
HOW = [("to train with this plan", "zeroshard train --model tiny"), ("in your own script", f"shard({HOSTILE})")]


def planned(memory: str, batch: int | None = 16) -> Plans:
    """Some plans of a small model on a machine with so little memory."""
    model, inputs, _ = open_model("tiny")
    machine = Machine.resolve("h100", context=0, workspace=0, memory=memory)
    given = {"batch": batch} if batch is not None else {"micro_batch": [1, 4], "offload": None}
    return zeroshard.plan(model, inputs, devices=4, machine=machine, tensor=1, **given)


@pytest.fixture(scope="module")
def made() -> Plans:
    return planned("18MB")


@pytest.fixture(scope="module")
def page(made: Plans, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    return write_page(path, made, model=f"GPT of {HOSTILE}", tokens=128, usage=HOW)


@pytest.fixture(scope="module")
def dom(page: Path) -> Dom:
    return Dom(page.read_text(encoding="utf-8"))


def chosen(plans: Plans) -> Plan:
    best = plans.best
    assert best is not None
    return best


# ------------------------------------------------------------------------------------------------ the file


@pytest.mark.slow
def test_nothing_is_loaded_from_outside(dom: Dom) -> None:
    for tag, attributes in dom.elements:
        assert not attributes.keys() & {"src", "srcset", "href", "data", "action", "poster"}, tag
    assert not {"link", "iframe", "object", "embed", "base", "img"} & {tag for tag, _ in dom.elements}
    style = "".join(data for tag, data in dom.texts if tag == "style")
    assert not re.search(r"url\(|@import|https?:", style)
    policy = next(tag["content"] for tag in dom.tags("meta") if "http-equiv" in tag)
    assert policy.startswith("default-src 'none'; ")


def test_the_page_says_what_was_chosen_and_why(dom: Dom, made: Plans) -> None:
    plans, text = made, dom.text()
    assert plans.reason in text
    assert f"GPT of {HOSTILE} fits" in text
    assert "1.07M parameters 4 × h100 18.00 MB a device bf16 128 tokens a sample" in text
    assert "in your own script shard(" in text and "to train with this plan zeroshard train --model tiny" in text
    levels = [int(tag[1]) for tag, _ in dom.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_table_has_the_rows_worth_a_look_and_all_others(dom: Dom, made: Plans) -> None:
    plans = made
    tables = re.findall(r'<table class="plans">(.*?)</table>', dom.html, re.S)
    counts = [table.count("<tr") - 1 for table in tables]
    assert counts == [len(summary_rows(plans)), len(plans.fastest_per_strategy())]
    assert [table.count('class="chosen"') for table in tables] == [1, 1]
    assert f"All {len(plans.fastest_per_strategy())} rows" in dom.text()


def test_every_chart_has_a_place_a_label_and_its_numbers(dom: Dom) -> None:
    places = {tag["id"]: tag for tag in dom.tags("div") if tag.get("class") == "chart"}
    assert places.keys() == dom.figures().keys() == CHARTS
    assert all(place["role"] == "img" and len(place["aria-label"]) > 20 for place in places.values())
    assert len(dom.tags("details")) == len(CHARTS) + 1


@pytest.mark.slow
def test_the_figures_are_ones_that_plotly_knows_in_colours_of_the_stylesheet(dom: Dom) -> None:
    import plotly.graph_objects as go

    for figure in dom.figures().values():
        go.Figure(figure)  # raises for an attribute that plotly has not
    style = "".join(data for tag, data in dom.texts if tag == "style")
    named = set(re.findall(r"var\((--[a-z-]+)\)", json.dumps(dom.figures())))
    hues = {
        *plan_charts.KIND_COLORS.values(),
        *(hue for _, hue in plan_charts.TIME_LABELS.values()),
        *(hue for _, hue in plan_charts.CHECKPOINT_LINES.values()),
    }
    for name in named | {f"--{hue}" for hue in hues}:
        assert f"{name}: " in style, name


# ------------------------------------------------------------------------------------------------ the pictures


def test_the_stages_add_up_to_what_a_device_needs(made: Plans) -> None:
    plans = made
    best, chart = chosen(plans), plan_charts.stages_chart(chosen(plans))
    totals = [sum(parts) for parts in zip(*(bar["x"] for bar in chart.figure["data"]), strict=True)]
    assert len(totals) == 4 and min(totals) == totals[3]
    same = {plan.strategy.stage: plan.memory for plan in plans.candidates if _as(plan, best)}
    assert totals[best.strategy.stage] == pytest.approx(best.memory)
    for stage, memory in same.items():
        assert totals[stage] == pytest.approx(memory)
    assert chart.figure["layout"]["shapes"][0]["x0"] == plans.machine.memory
    marked = [name for name in chart.figure["data"][0]["y"] if name.endswith(", chosen")]
    assert marked == [f"stage {best.strategy.stage}, chosen"]


def _as(plan: Plan, other: Plan) -> bool:
    mine, its = plan.strategy, other.strategy
    return (mine.checkpoint, mine.micro_batch, mine.offload) == (its.checkpoint, its.micro_batch, its.offload)


def test_over_a_step_the_highest_moment_is_the_peak(made: Plans) -> None:
    plans = made
    best = chosen(plans)
    figure = plan_charts.timeline_chart(best).figure
    totals = [sum(parts) for parts in zip(*(area["y"] for area in figure["data"]), strict=True)]
    assert max(totals) == pytest.approx(best.footprint.peak.total)
    at = figure["data"][0]["x"]
    assert at == sorted(at) and at[0] == 0
    begun = [note["text"] for note in figure["layout"]["annotations"]]
    assert begun == ["forward", "backward", "step"]
    marks = [shape["x0"] for shape in figure["layout"]["shapes"]]
    assert 0 == marks[0] < marks[1] < marks[2] < at[-1]


def test_a_parameter_that_rests_outside_is_drawn_in_stage_3_alone(made: Plans) -> None:
    plans = made
    far = next(plan for plan in plans.candidates if plan.strategy.offload_summary == "optimizer host, parameters host")
    bars = {bar["name"]: bar["x"] for bar in plan_charts.stages_chart(far).figure["data"]}
    assert "optimizer states" not in bars or not any(bars["optimizer states"])
    assert bars["parameters"][0] > 0 and bars["parameters"][3] == 0


def test_micro_batches_are_drawn_around_the_chosen_one(made: Plans) -> None:
    plans = made
    best = chosen(plans)
    chart = plan_charts.micro_batch_chart(best)
    lines = {line["name"]: dict(zip(line["x"], line["y"], strict=True)) for line in chart.figure["data"]}
    mine = lines[plan_charts.CHECKPOINT_LINES[best.strategy.checkpoint][0]]
    assert mine[best.strategy.micro_batch] == pytest.approx(best.memory)
    for points in lines.values():
        needs = list(points.values())
        assert 1 in points and needs == sorted(needs)
        assert max(points) > best.strategy.micro_batch
        assert all(
            nbytes <= plans.machine.memory
            for micro, nbytes in points.items()
            if best.strategy.micro_batch < micro < max(points)
        )
    assert all(lines["all activations kept"][micro] > lines["recomputed"][micro] for micro in (2, 4))


def test_times_add_up_to_a_step_or_a_sample(made: Plans) -> None:
    plans = made
    chart = plan_charts.step_time_chart(summary_rows(plans), chosen(plans))
    assert chart is not None
    fitting = [plan for plan in summary_rows(plans) if plan.fits]
    assert not plan_charts.needs_time_per_sample(fitting)
    totals = [sum(parts) for parts in zip(*(bar["x"] for bar in chart.figure["data"]), strict=True)]
    assert totals == pytest.approx([plan.step_time.step for plan in fitting[: plan_charts.MAX_BARS]], rel=0.01)
    mixed = planned("1GB", batch=None)
    fitting = [plan for plan in mixed.candidates if plan.strategy.checkpoint == "none"]
    assert plan_charts.needs_time_per_sample(fitting)
    chart = plan_charts.step_time_chart(fitting, fitting[0])
    assert chart is not None and chart.label.startswith("Time of a sample")
    totals = [sum(parts) for parts in zip(*(bar["x"] for bar in chart.figure["data"]), strict=True)]
    assert totals == pytest.approx([1 / plan.samples_per_second for plan in fitting[: plan_charts.MAX_BARS]], rel=0.005)


def test_time_that_has_no_name_is_drawn_too(made: Plans) -> None:
    best = chosen(made)
    slow = replace(best)
    vars(slow)["step_time"] = replace(best.step_time, step=2 * best.step_time.step)
    chart = plan_charts.step_time_chart([slow], slow)
    assert chart is not None and chart.legend[-1][0] == "everything else"
    assert sum(bar["x"][0] for bar in chart.figure["data"]) == pytest.approx(slow.step_time.step, rel=0.01)


def test_where_nothing_fits_the_page_shows_what_comes_nearest(tmp_path: Path) -> None:
    plans = planned("2MB")
    assert plans.best is None
    page = Dom(write_page(tmp_path / "plan.html", plans).read_text(encoding="utf-8"))
    assert page.figures().keys() == CHARTS - {"times"}
    text = page.text()
    assert plans.reason in text and "GPT nothing fits" in text and "No plan fits, so there is no time to show" in text
    assert f"in the smallest plan ({plans.best_or_smallest.strategy.description})" in text
    assert "chosen" not in " ".join(re.findall(r'<table class="plans">(.*?)</table>', page.html, re.S))


def test_a_model_without_blocks_on_one_device_has_a_page(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    plans = zeroshard.plan(model, torch.empty(1, 64), devices=1, machine="cpu", batch=4)
    subject = TracedModel(model, TrainingLoop(inputs=torch.empty(1, 64)), precision=plans.precision)
    page = Dom(write_page(tmp_path / "plan.html", plans).read_text(encoding="utf-8"))
    assert page.figures().keys() == CHARTS
    assert [line["name"] for line in page.figures()["batches"]["data"]] == ["all activations kept"]
    assert page.figures()["stages"]["data"][0]["y"] == ["stage 3, chosen"]
    assert evaluate_strategy(subject, chosen(plans).strategy, 1, plans.machine).memory == chosen(plans).memory


@pytest.mark.slow
def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    argv = "plan tiny --devices 2 --batch 4 --stage 3 --checkpoint none --offload none --html".split()
    assert main([*argv, str(file)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"page: {file}")
    text = Dom(file.read_text(encoding="utf-8")).text()
    assert "GPT, 4 layers, 4 heads, width 128 fits" in text and "zeroshard train --model tiny --ranks 2" in text


# ------------------------------------------------------------------------------------------------ in a browser


@pytest.mark.browser
@pytest.mark.slow
@in_browser
def test_every_chart_is_drawn_offline_whatever_the_strings(page: Path, tmp_path: Path) -> None:
    command = chromium(page, tmp_path / "profile", "virtual-time-budget=5000", "dump-dom")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)
    assert list(console_of(done.stderr.splitlines())) == []
    dom = Dom(done.stdout)
    assert {tag["id"] for tag in dom.tags("div") if "js-plotly-plot" in tag.get("class", "").split()} == CHARTS
    for words in ("milliseconds of computation", "bytes in use", "backward", "micro-batch", "stage 0"):
        assert words in dom.text()
    assert not dom.tags("img")


FRAMES = """<!doctype html><meta charset="utf-8"><body style="margin: 0"></body><script>
const open = (src, width) => new Promise(done => {
  const frame = Object.assign(document.createElement("iframe"), { src, width, height: 240, onload: () => done(frame) });
  document.body.append(frame);
});
const look = frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const rights = [...page.querySelectorAll(".main-svg")].map(svg => svg.getBoundingClientRect().right);
  const drawn = page.querySelectorAll(".js-plotly-plot").length;
  const bar = page.querySelector("#stages .point path")?.style.fill;
  return { width: root.clientWidth, needed: Math.max(root.scrollWidth, ...rights), drawn, bar };
};
const until = async condition => {
  for (let tries = 0; tries < 400 && !condition(); tries++) await new Promise(done => setTimeout(done, 50));
};
(async () => {
  const pages = await Promise.all([360, 1600].map(width => open("plan.html", width)));
  await until(() => pages.every(frame => look(frame).drawn === 4));
  const light = pages.map(look);
  for (const frame of pages) frame.style.colorScheme = "dark";
  await until(() => pages.every((frame, index) => look(frame).bar !== light[index].bar));
  console.log("found " + JSON.stringify({ light, dark: pages.map(look) }));
})();
</script>"""


@pytest.mark.browser
@pytest.mark.slow
@in_browser
def test_the_page_fits_any_width_and_follows_the_preferred_colours(page: Path, tmp_path: Path) -> None:
    (page.parent / "frames.html").write_text(FRAMES, encoding="utf-8")
    options = ("allow-file-access-from-files", "blink-settings=preferredColorScheme=1", "window-size=1640,1200")
    command = chromium(page.parent / "frames.html", tmp_path / "profile", "remote-debugging-port=0", *options)
    console = listen(command, "found {")
    assert len(console) == 1, console  # no error before it
    heard = re.search(r"found (\{.*\})\"", console[0])
    assert heard is not None
    found = json.loads(heard[1])
    for frame in (*found["light"], *found["dark"]):
        assert frame["drawn"] == len(CHARTS)
        assert frame["needed"] <= frame["width"] + 0.5, frame  # half a pixel of rounding
    assert {frame["bar"] for frame in found["light"]}.isdisjoint({frame["bar"] for frame in found["dark"]})
