"""Write the report of a training run as one self-contained HTML file, which works offline."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zeroshard.page import JsonObject, render_page
from zeroshard.train.report import run_charts
from zeroshard.train.report.run_charts import extract_series, finite_or_none
from zeroshard.utils.atomic_file import read_json
from zeroshard.utils.format import format_bytes, format_count


class RunMetrics(NamedTuple):
    """The contents of metrics.jsonl, in the order of the steps."""

    steps: list[JsonObject]
    evaluations: list[tuple[int, float]]  # step and validation loss


def write_html_report(run: Path) -> Path:
    """Write `report.html` to the directory of a run, from its `run.json` and `metrics.jsonl`, and return its path.

    The run may be in progress or have ended early; the report says what was not recorded.

    >>> import json, tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> _ = (run / "run.json").write_text(json.dumps({"name": "tiny", "outcome": "interrupted"}))
    >>> _ = (run / "metrics.jsonl").write_text('{"step": 1, "loss": 6.97}')
    >>> write_html_report(run).name
    'report.html'
    """
    run = Path(run)
    record_path = run / "run.json"
    if not record_path.is_file():
        raise FileNotFoundError(f"{record_path} does not exist: pass the directory of a run of `zeroshard train`")
    context = _template_context(read_json(record_path), read_metrics(run / "metrics.jsonl"))
    report_path = run / "report.html"
    report_path.write_bytes(render_page("zeroshard.train.report", "page.html.j2", "the report of a run", **context))
    return report_path


# ------------------------------------------------------------------------------------------------ reading


def read_metrics(path: Path) -> RunMetrics:
    """Read `metrics.jsonl`. If a step repeats, the run was resumed there: earlier entries from that step on are
    dropped. Truncated lines are skipped. A missing file means a run without steps."""
    steps: dict[int, JsonObject] = {}
    evaluations: dict[int, float] = {}
    last = -math.inf
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        entry = _parse_line(line)
        if entry is None:
            continue
        step, loss = entry["step"], finite_or_none(entry.get("validation_loss"))
        if "validation_loss" in entry:
            if loss is not None:
                evaluations[step] = loss
            continue
        if step <= last:
            steps = {index: value for index, value in steps.items() if index < step}
            evaluations = {index: value for index, value in evaluations.items() if index < step}
        steps[step], last = entry, step
    return RunMetrics([steps[index] for index in sorted(steps)], sorted(evaluations.items()))


def _parse_line(line: str) -> JsonObject | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


# ------------------------------------------------------------------------------------------------ content


def _template_context(record: JsonObject, metrics: RunMetrics) -> JsonObject:
    """Return the variables of the template."""
    steps, memory, traffic = metrics.steps, record.get("memory") or [], record.get("traffic")
    charts = (
        run_charts.loss_chart(steps, metrics.evaluations),
        run_charts.metric_chart(steps, "lr", "Learning rate", tick_format="~g"),
        run_charts.metric_chart(steps, "grad_norm", "Gradient norm", smoothed=True),
        run_charts.metric_chart(steps, "tokens_per_s", "Tokens per second", smoothed=True, tick_format="~s"),
        run_charts.metric_chart(steps, "communication", "Time spent waiting", smoothed=True, tick_format=".0%"),
        run_charts.states_chart(memory, record.get("plain")),
        run_charts.buffers_chart(memory),
        run_charts.timeline_chart(record.get("timeline")),
        run_charts.communication_chart(traffic or {}, record.get("paper_traffic"), record.get("predicted_traffic")),
    )
    charts_by_name = {chart.name: chart for chart in charts if chart is not None}
    return {
        "name": str(record.get("name") or "run"),
        "outcome": str(record.get("outcome") or "unknown"),
        "message": str(record.get("message") or ""),
        "facts": _facts(record),
        "stage": record.get("stage"),
        "headline": _headline(record, metrics),
        "charts": charts_by_name,
        "nonfinite_steps": len(steps) - len(extract_series(steps, "loss")[0]),
        "peak": _format_peak(memory),
        "traffic": traffic,
        "traffic_comparison": _compare_traffic(record),
        "tensor": record.get("tensor") or 1,
        "tensor_traffic": _activation_vs_tensor_traffic(record.get("tensor_traffic")),
        "samples": [_sample_context(sample) for sample in record.get("samples") or []],
        "settings": {name: _format_setting(value) for name, value in (record.get("settings") or {}).items()},
        "versions": {name: str(value) for name, value in (record.get("versions") or {}).items()},
        "checkpoints": record.get("checkpoints") or [],
        "version": str((record.get("versions") or {}).get("zeroshard", "")),
    }


def _facts(record: JsonObject) -> list[str]:
    """Return short phrases: what was trained, how and when."""
    model = record.get("model") or {}
    facts = [str(model["description"])] if model.get("description") else []
    if finite_or_none(model.get("parameters")) is not None:
        facts.append(f"{format_count(model['parameters'])} parameters")
    if record.get("stage") is not None:
        facts.append(f"ZeRO stage {record['stage']}")
    if record.get("ranks"):
        facts.append(f"{record['ranks']} rank{'s' if record['ranks'] != 1 else ''}")
    if (record.get("tensor") or 1) > 1:
        facts.append(f"tensor parallel over {record['tensor']}")
    device = (record.get("versions") or {}).get("device")
    facts += [str(fact) for fact in (device, record.get("backend"), record.get("precision")) if fact]
    if record.get("started"):
        started = datetime.fromisoformat(record["started"])
        facts.append(f"{started.day} {started:%B %Y, %H:%M %Z}".strip())
    return facts


def _headline(record: JsonObject, metrics: RunMetrics) -> list[tuple[str, str, str]]:
    """Return name, value and note of the numbers at the top of the report, those that were recorded."""
    figures = []
    loss_steps, losses = extract_series(metrics.steps, "loss")
    if losses:
        note = f"at step {loss_steps[-1]:,}"
        note += f", from {losses[0]:.2f} at step {loss_steps[0]:,}" if len(loss_steps) > 1 else ""
        figures.append(("Training loss", f"{losses[-1]:.2f}", note))
    if metrics.evaluations:
        first, (best_step, best) = metrics.evaluations[0][1], min(metrics.evaluations, key=lambda pair: pair[1])
        value = f"{first:.2f} → {best:.2f}" if len(metrics.evaluations) > 1 else f"{best:.2f}"
        note = f"best at step {best_step:,}, perplexity {math.exp(min(best, 700)):,.2f}"
        figures.append(("Held-out loss", value, note))
    speeds = extract_series(metrics.steps, "tokens_per_s")[1]
    if speeds:
        figures.append(("Tokens per second", format_count(median(speeds)), _throughput_note(metrics.steps)))
    memory, ddp_bytes = record.get("memory") or [], record.get("plain")
    if memory:
        max_bytes = max(sum(run_charts.state_bytes(rank).values()) for rank in memory)
        note = _memory_note(max_bytes, sum(ddp_bytes.values()) if ddp_bytes else 0)
        figures.append(("Memory per rank", format_bytes(max_bytes), note))
    seconds = finite_or_none(record.get("seconds"))
    if seconds is not None:
        tokens = extract_series(metrics.steps, "tokens")[1][-1:]  # total so far, on all ranks
        note = ", ".join([f"{len(metrics.steps):,} steps", *(f"{format_count(sum)} tokens" for sum in tokens)])
        figures.append(("Time", format_duration(seconds), note))
    return figures


def _throughput_note(steps: Sequence[JsonObject]) -> str:
    """Return the note for the throughput: TFLOP/s and MFU, if known."""
    notes = ["median of all steps"]
    tflops, mfu = (extract_series(steps, key)[1] for key in ("tflops", "mfu"))
    if tflops:
        notes.append(f"{median(tflops):.3g} TFLOP/s")
    if mfu:
        notes.append(f"{median(mfu):.1%} of the device's peak")
    return ", ".join(notes)


def _memory_note(held: float, ddp: float) -> str:
    """Compare a rank's model states with those of DDP."""
    if not ddp or not held:
        return "of model states"
    if ddp < 1.05 * held:
        return "of model states, as much as plain data parallelism"
    return f"of model states, {ddp / held:.1f} × less than plain data parallelism"


def _format_peak(memory: Sequence[JsonObject]) -> str:
    peaks = [rank["total"]["peak"] for rank in memory if rank.get("total")]
    return format_bytes(max(peaks)) if peaks else ""


def _compare_traffic(record: JsonObject) -> JsonObject | None:
    """Compare the traffic of one step with what the run's options need, and with the paper's."""
    traffic, paper = record.get("traffic") or {}, record.get("paper_traffic")
    predicted = record.get("predicted_traffic")
    nbytes: int = sum(kind["bytes"] for kind in traffic.values())
    if not nbytes:
        return None
    names = ("predicted", "ratio", "formula", "paper", "paper_ratio", "average", "has_average")
    found = {"ours": format_bytes(nbytes), **dict.fromkeys(names, "")}
    if paper and paper.get("bytes"):
        found |= {"formula": str(paper["formula"]), "paper": format_bytes(paper["bytes"])}
        found["paper_ratio"] = f"{nbytes / paper['bytes']:.2f}"
    if predicted:
        expected = sum(run_charts.expected_traffic(predicted, traffic).values())
        found |= {"predicted": format_bytes(expected), "ratio": f"{nbytes / expected:.2f}" if expected else ""}
    if predicted and predicted["average"]:
        is_included = "replica average" in traffic
        found |= {"average": format_bytes(sum(predicted["average"].values())), "has_average": str(is_included or "")}
    return found


def _activation_vs_tensor_traffic(traffic: JsonObject | None) -> JsonObject | None:
    """Compare the bytes that P_a gathers in one step with the traffic of tensor parallelism itself."""
    if not traffic or not traffic["layers"]["bytes"]:
        return None
    tensor_bytes, activation_bytes = traffic["layers"]["bytes"], traffic["activations"]["bytes"]
    return {
        "ours": format_bytes(tensor_bytes),
        "gathered": format_bytes(activation_bytes),
        "share": f"1/{tensor_bytes / activation_bytes:.1f}" if activation_bytes else "",
    }


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units.

    >>> format_duration(0.4), format_duration(71.3), format_duration(7_500), format_duration(200_000)
    ('0.4 s', '1 min 11 s', '2 h 5 min', '2 d 7 h')
    """
    for name, unit, smaller_name, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} {seconds % unit // smaller:.0f} {smaller_name}"
    return f"{seconds:.3g} s"


def _sample_context(sample: JsonObject) -> JsonObject:
    prompt, text = str(sample.get("prompt") or ""), str(sample.get("text") or "")
    return {"step": sample.get("step"), "prompt": prompt, "text": text.removeprefix(prompt)}


def _format_setting(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
