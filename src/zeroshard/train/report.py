"""Write the report of a run: one HTML page that works offline, and its pictures as SVG files."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from zeroshard.train.metrics import read_metrics
from zeroshard.train.run_record import STATE_KINDS, check_format, state_bytes
from zeroshard.train.run_view import format_clock
from zeroshard.utils.atomic_file import read_json
from zeroshard.utils.chart import STYLE, Chart, Line, Points, as_svg, bar_chart, color_of, line_chart
from zeroshard.utils.format import format_bytes, format_count

MAX_RANK_BARS = 8  # with more ranks, the fullest are drawn
ABSENT = '<p class="absent">Not recorded in this run.</p>'
METRICS = {  # small charts: key in metrics.jsonl, its title and how its axis is labelled
    "lr": ("Learning rate", "{:.4g}"),
    "grad_norm": ("Gradient norm", "{:.4g}"),
    "tokens_per_s": ("Tokens per second", "{:,.0f}"),
    "communication": ("Time spent waiting for communication", "{:.0%}"),
}
Entries = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def write_html_report(run: Path) -> Path:
    """Write `report.html` and `charts/*.svg` to the directory of a run, from its `run.json` and `metrics.jsonl`.

    The run may be in progress or have ended early. Returns the path of the page.

    >>> write_html_report(Path("runs/none"))
    Traceback (most recent call last):
    FileNotFoundError: runs/none/run.json does not exist: pass the directory of a run of `zeroshard train`
    """
    run = Path(run)
    record_path = run / "run.json"
    if not record_path.is_file():
        raise FileNotFoundError(f"{record_path} does not exist: pass the directory of a run of `zeroshard train`")
    record = read_json(record_path)
    check_format(record, record_path)
    entries = read_metrics(run / "metrics.jsonl")
    try:
        charts = draw_charts(record, entries)
        page = _render(record, entries, charts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{record_path} is damaged ({reason}): restore the file, or resume the run") from error
    directory = run / "charts"
    directory.mkdir(exist_ok=True)
    for name, chart in charts.items():
        (directory / f"{name}.svg").write_text(as_svg([chart]), encoding="utf-8", errors="replace")
    report_path = run / "report.html"
    report_path.write_text(page, encoding="utf-8", errors="replace")  # an unpaired surrogate would raise
    return report_path


# ------------------------------------------------------------------------------------------------ charts


def draw_charts(record: Mapping[str, Any], entries: Entries) -> dict[str, Chart]:
    """Return the charts of what was recorded, by name."""
    charts = {}
    loss = series(entries, "loss")
    lines = _smoothed(loss, "training, ")
    lines.append(Line("held-out", series(entries, "validation_loss"), color_of("held-out"), "point"))
    lines = [line for line in lines if line.points]
    if lines:
        charts["loss"] = line_chart("Loss", lines, x_title="step", height=380)
    for key, (title, pattern) in METRICS.items():
        if points := series(entries, key):
            lines = _smoothed(points)
            charts[key] = line_chart(title, lines, x_title="step", format_y=pattern.format, has_zero=True, height=230)
    if ranks := record["memory_by_rank"]:
        charts |= _memory_charts(ranks, record["ddp_state_bytes"])
    if over_step := record["memory_over_step"]:
        charts["memory"] = _memory_over_step(over_step)
    moved = {kind: traffic["bytes"] for kind, traffic in record["collectives_per_step"].items()}
    if moved:
        bars = [("this run", moved), ("what its options need", record["needed_bytes_per_step"])]
        charts["collectives"] = bar_chart("Communication of one step", bars)
    return charts


def series(entries: Entries, key: str) -> Points:
    """Return the steps and values of a metric where it is a finite number: a diverged run also has "nan" and "inf".

    >>> series([{"step": 1, "loss": 2}, {"step": 2, "loss": "nan"}, {"step": 2, "mfu": 0.4}], "loss")
    [(1, 2)]
    """
    pairs = [(entry["step"], entry.get(key)) for entry in entries]
    return [(step, value) for step, value in pairs if isinstance(value, int | float) and math.isfinite(value)]


def _smoothed(points: Points, name: str = "") -> list[Line]:
    """Return a light line of all values, and a strong one of their average over about a 25th of the run."""
    half_width = max(1, len(points) // 50)
    sums = [0.0, *accumulate(value for _, value in points)]
    averages = []
    for index, (step, _) in enumerate(points):
        width = min(index, half_width)  # not wider on the right than on the left: a steep start is not delayed
        end = min(len(points), index + width + 1)
        averages.append((step, (sums[end] - sums[index - width]) / (end - index + width)))
    return [
        Line(f"{name}each step", points, "var(--training-light)", width=1.2),
        Line(f"{name}smoothed", averages, "var(--training)"),
    ]


def _memory_charts(ranks: Sequence[Mapping[str, Any]], ddp_bytes: Mapping[str, int]) -> dict[str, Chart]:
    """Return the states of the ranks below those of DDP, and the largest of each temporary buffer."""
    bars = [(f"rank {number}", state_bytes(rank)) for number, rank in enumerate(ranks)]
    bars.sort(key=lambda bar: -sum(bar[1].values()))
    ddp = "plain data parallelism"
    buffers = Counter[str]()
    for rank in ranks:
        peaks = {kind: usage["peak_bytes"] for kind, usage in rank.items() if kind not in (*STATE_KINDS, "total")}
        buffers |= Counter(peaks)
    return {
        "states": bar_chart("Model states", [(ddp, ddp_bytes), *bars[:MAX_RANK_BARS]], faded=ddp),
        "buffers": bar_chart("Temporary buffers", [(kind, {kind: peak}) for kind, peak in buffers.items()]),
    }


def _memory_over_step(over_step: Mapping[str, Any]) -> Chart:
    moments = over_step["moments"]
    kinds = dict.fromkeys(STATE_KINDS) | dict.fromkeys(kind for moment in moments for kind in moment["bytes_by_kind"])
    lines = []
    for kind in kinds:
        points = [(1000 * moment["seconds"], moment["bytes_by_kind"].get(kind, 0)) for moment in moments]
        if any(nbytes for _, nbytes in points):
            lines.append(Line(kind, points, color_of(kind), "area"))
    allocated = [(1000 * moment["seconds"], moment["allocated_bytes"]) for moment in moments[1:]]
    if any(nbytes for _, nbytes in allocated):  # None without a GPU, and when the step begins
        lines.append(Line("allocated", allocated, "var(--text)", "dotted", width=1.5))
    return line_chart(
        "Memory over one step",
        lines,
        x_title="milliseconds since the step began",
        format_y=format_bytes,
        marks=[(phase["name"], 1000 * phase["start_seconds"]) for phase in over_step["phases"]],
        has_zero=True,
        height=380,
    )


# ------------------------------------------------------------------------------------------------ the page


def _render(record: Mapping[str, Any], entries: Entries, charts: Mapping[str, Chart]) -> str:
    model = record["model"]
    facts = [model["description"], f"{format_count(model['parameters'])} parameters", f"ZeRO stage {record['stage']}"]
    facts += [f"{record['ranks']} ranks", record["device"], record["backend"], record["precision"]]
    if record["tensor_parallel_ranks"] > 1:
        facts.append(f"tensor parallel over {record['tensor_parallel_ranks']}")
    facts.append(f"{datetime.fromisoformat(record['started']):%d %B %Y, %H:%M %Z}")
    samples = [
        f'<figure class="card sample"><figcaption>after step {sample["step"]}</figcaption><pre dir="auto">'
        f"<span>{escape(sample['prompt'])}</span>{escape(sample['text'].removeprefix(sample['prompt']))}</pre></figure>"
        for sample in record["samples"]
    ]
    return Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).substitute(
        defaultdict(lambda: ABSENT, {name: chart.as_html() for name, chart in charts.items()}),
        style=STYLE,
        name=escape(record["name"]),
        outcome=escape(record["outcome"]),
        message=escape(record["message"]),
        facts="".join(f"<li>{escape(fact)}</li>" for fact in facts),
        headline="".join(
            f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd>{note}</dd></div>'
            for name, value, note in _headline(record, entries)
        ),
        samples="".join(samples) or ABSENT,
        checkpoints=escape(", ".join(record["checkpoints"])),
        options=_table_rows(record["options"]),
        versions=_table_rows(record["versions"]),
    )


def _table_rows(values: Mapping[str, Any]) -> str:
    cells = ((escape(name), escape(json.dumps(value, ensure_ascii=False).strip('"'))) for name, value in values.items())
    return "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in cells)


def _headline(record: Mapping[str, Any], entries: Entries) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of the numbers at the top of the report, those that were recorded."""
    loss = series(entries, "loss")
    if loss:
        note = f"at step {loss[-1][0]:,}, from {loss[0][1]:.2f} at step {loss[0][0]:,}"
        yield "Training loss", f"{loss[-1][1]:.2f}", note
    evaluations = series(entries, "validation_loss")
    if evaluations:
        step, best = min(evaluations, key=lambda pair: pair[1])
        note = f"best at step {step:,}, perplexity {math.exp(min(best, 700)):,.2f}"
        yield "Held-out loss", f"{evaluations[0][1]:.2f} → {best:.2f}", note
    speeds = series(entries, "tokens_per_s")
    if speeds:
        notes = ["median of all steps"]
        for key, form in (("tflops", "{:.3g} TFLOP/s"), ("mfu", "{:.1%} of the device's peak")):
            values = [value for _, value in series(entries, key)]
            notes += [form.format(median(values))] if values else []
        yield "Tokens per second", format_count(median(value for _, value in speeds)), ", ".join(notes)
    if ranks := record["memory_by_rank"]:
        held = max(sum(state_bytes(rank).values()) for rank in ranks)
        ddp = sum(record["ddp_state_bytes"].values())
        note = f"of model states; plain data parallelism has {format_bytes(ddp)}, {ddp / held:.1f} × as much"
        yield "Memory per rank", format_bytes(held), note
    yield "Time", format_clock(record["seconds"]), f"{len(loss):,} steps"
