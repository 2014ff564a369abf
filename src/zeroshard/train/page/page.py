"""The report of a training run as one HTML file, which opens offline and loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zeroshard.checkpoint.whole import read_json
from zeroshard.memory.report import size
from zeroshard.page.sheet import render
from zeroshard.page.words import count, duration
from zeroshard.train.page import charts
from zeroshard.train.page.series import Record, number, series


class Metrics(NamedTuple):
    """What metrics.jsonl holds, in the order of the steps."""

    steps: list[Record]
    evaluations: list[tuple[int, float]]  # step and held-out loss


class Figure(NamedTuple):
    """One of the numbers at the head of the page."""

    name: str
    value: str
    note: str


def write_page(run: Path) -> Path:
    """Write `report.html` into the directory of a run, from its `run.json` and `metrics.jsonl`, and return its path.

    The run may still be going on or have ended early: where something was not recorded, the page says so.

    >>> import json, tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> _ = (run / "run.json").write_text(json.dumps({"name": "tiny", "outcome": "interrupted"}))
    >>> _ = (run / "metrics.jsonl").write_text('{"step": 1, "loss": 6.97}')
    >>> write_page(run).name
    'report.html'
    """
    run = Path(run)
    record, metrics = _record(run / "run.json"), read_metrics(run / "metrics.jsonl")
    text = render("zeroshard.train.page", "page.html.j2", "the report of a run", **_content(record, metrics))
    page = run / "report.html"
    page.write_bytes(text)
    return page


# ------------------------------------------------------------------------------------------------ reading


def _record(path: Path) -> Record:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: give the directory of a run, as `zeroshard train` made it")
    return read_json(path)


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`. Where the file goes back to an earlier step, the run was resumed there: what it held from
    that step on is forgotten. A line cut short is left out. A file that is not there is a run without steps."""
    steps: dict[int, Record] = {}
    evaluations: dict[int, float] = {}
    last = -math.inf
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        entry = _entry(line)
        if entry is None:
            continue
        step, loss = entry["step"], number(entry.get("validation_loss"))
        if "validation_loss" in entry:
            if loss is not None:
                evaluations[step] = loss
            continue
        if step <= last:
            steps = {at: kept for at, kept in steps.items() if at < step}
            evaluations = {at: kept for at, kept in evaluations.items() if at < step}
        steps[step], last = entry, step
    return Metrics([steps[at] for at in sorted(steps)], sorted(evaluations.items()))


def _entry(line: str) -> Record | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


# ------------------------------------------------------------------------------------------------ content


def _content(record: Record, metrics: Metrics) -> Record:
    """Gather what the template shows."""
    steps, memory, traffic = metrics.steps, record.get("memory") or [], record.get("traffic")
    drawn = (
        charts.loss(steps, metrics.evaluations),
        charts.curve(steps, "lr", "Learning rate", form="~g"),
        charts.curve(steps, "grad_norm", "Gradient norm", smoothed=True),
        charts.curve(steps, "tokens_per_s", "Tokens per second", smoothed=True, form="~s"),
        charts.curve(steps, "communication", "Time spent waiting", smoothed=True, form=".0%"),
        charts.states(memory, record.get("plain")),
        charts.working(memory),
        charts.timeline(record.get("timeline")),
        charts.communication(traffic or {}, record.get("paper_traffic")),
    )
    by_name = {chart.name: chart for chart in drawn if chart is not None}
    model = record.get("model") or {}
    return {
        "name": str(record.get("name") or "run"),
        "outcome": str(record.get("outcome") or "unknown"),
        "message": str(record.get("message") or ""),
        "facts": _facts(record, model),
        "stage": record.get("stage"),
        "ranks": record.get("ranks"),
        "headline": _headline(record, metrics),
        "charts": by_name,
        "lost": len(steps) - len(series(steps, "loss")[0]),
        "fullest": _fullest(memory),
        "traffic": traffic,
        "volume": _volume(traffic, record.get("paper_traffic")),
        "tensor": record.get("tensor") or 1,
        "sums": _sums(record.get("tensor_traffic")),
        "samples": [_sample(sample) for sample in record.get("samples") or []],
        "settings": {name: _setting(value) for name, value in (record.get("settings") or {}).items()},
        "versions": {name: str(value) for name, value in (record.get("versions") or {}).items()},
        "checkpoints": record.get("checkpoints") or [],
        "version": str((record.get("versions") or {}).get("zeroshard", "")),
    }


def _facts(record: Record, model: Record) -> list[str]:
    """Say in a few phrases what was trained, how and when."""
    facts = [str(model["description"])] if model.get("description") else []
    if number(model.get("parameters")) is not None:
        facts.append(f"{count(model['parameters'])} parameters")
    if record.get("stage") is not None:
        facts.append(f"ZeRO stage {record['stage']}")
    if record.get("ranks"):
        facts.append(f"{record['ranks']} rank{'s' if record['ranks'] != 1 else ''}")
    if (record.get("tensor") or 1) > 1:
        facts.append(f"each layer divided over {record['tensor']}")
    device = (record.get("versions") or {}).get("device")
    facts += [str(fact) for fact in (device, record.get("backend"), record.get("precision")) if fact]
    if record.get("started"):
        began = datetime.fromisoformat(record["started"])
        facts.append(f"{began.day} {began:%B %Y, %H:%M %Z}".strip())
    return facts


def _headline(record: Record, metrics: Metrics) -> list[Figure]:
    """Choose the numbers at the head of the page: those that were recorded."""
    figures = []
    at, losses = series(metrics.steps, "loss")
    if losses:
        note = f"at step {at[-1]:,}" + (f", from {losses[0]:.2f} at step {at[0]:,}" if len(at) > 1 else "")
        figures.append(Figure("Training loss", f"{losses[-1]:.2f}", note))
    if metrics.evaluations:
        first, (best_at, best) = metrics.evaluations[0][1], min(metrics.evaluations, key=lambda pair: pair[1])
        value = f"{first:.2f} → {best:.2f}" if len(metrics.evaluations) > 1 else f"{best:.2f}"
        note = f"best at step {best_at:,}, a perplexity of {math.exp(min(best, 700)):,.2f}"
        figures.append(Figure("Held-out loss", value, note))
    speeds = series(metrics.steps, "tokens_per_s")[1]
    if speeds:
        figures.append(Figure("Tokens per second", count(median(speeds)), _pace(metrics.steps)))
    memory, plain = record.get("memory") or [], record.get("plain")
    if memory:
        most = max(sum(charts.held(rank).values()) for rank in memory)
        figures.append(Figure("Memory per rank", size(most), _saving(most, sum(plain.values()) if plain else None)))
    seconds = number(record.get("seconds"))
    if seconds is not None:
        tokens = series(metrics.steps, "tokens")[1][-1:]  # so far, on all ranks
        note = ", ".join([f"{len(metrics.steps):,} steps", *(f"{count(sum)} tokens" for sum in tokens)])
        figures.append(Figure("Time", duration(seconds), note))
    return figures


def _pace(steps: Sequence[Record]) -> str:
    """Say what goes with the throughput: how far the device was used, where that is known."""
    notes = ["median of all steps"]
    tflops, used = (series(steps, key)[1] for key in ("tflops", "mfu"))
    if tflops:
        notes.append(f"{median(tflops):.3g} TFLOP/s")
    if used:
        notes.append(f"{median(used):.1%} of the device's peak")
    return ", ".join(notes)


def _saving(most: float, plain: float | None) -> str:
    """Compare a rank's model states with those of plain data parallelism."""
    if not plain or not most:
        return "of model states"
    ratio = plain / most
    if ratio < 1.05:
        return "of model states, as much as plain data parallelism"
    return f"of model states, {ratio:.1f} × less than plain data parallelism"


def _fullest(memory: Sequence[Record]) -> str:
    peaks = [rank["total"]["peak"] for rank in memory if rank.get("total")]
    return size(max(peaks)) if peaks else ""


def _volume(traffic: Record | None, paper: Record | None) -> Record | None:
    """Compare the bytes of one step with the paper's."""
    ours = sum(kind["bytes"] for kind in (traffic or {}).values())
    if not ours:
        return None
    volume = {"ours": size(ours), "formula": "", "paper": "", "ratio": ""}
    if paper and paper.get("bytes"):
        volume |= {"formula": str(paper["formula"]), "paper": size(paper["bytes"])}
        volume["ratio"] = f"{ours / paper['bytes']:.2f}"
    return volume


def _sums(traffic: Record | None) -> Record | None:
    """Compare the bytes that P_a gathers in one step with those of tensor parallelism itself."""
    if not traffic or not traffic["layers"]["bytes"]:
        return None
    ours, gathered = traffic["layers"]["bytes"], traffic["activations"]["bytes"]
    return {"ours": size(ours), "gathered": size(gathered), "share": f"1/{ours / gathered:.1f}" if gathered else ""}


def _sample(sample: Record) -> Record:
    prompt, text = str(sample.get("prompt") or ""), str(sample.get("text") or "")
    return {"step": sample.get("step"), "prompt": prompt, "text": text.removeprefix(prompt)}


def _setting(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
