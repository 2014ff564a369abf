"""The page of a plan: one HTML file, which opens offline and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from zeroshard.memory.report import size
from zeroshard.page.sheet import render
from zeroshard.page.words import count
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.page import charts
from zeroshard.planner.plan import Plan, Plans
from zeroshard.planner.record import standing, versions
from zeroshard.planner.table import STATES, Column, grid, interesting, nearest, ordered, rate, seconds, shortly


class Figure(NamedTuple):
    """One of the numbers at the head of the page."""

    name: str
    value: str
    note: str


def write_page(
    path: Path,
    plans: Plans,
    *,
    model: str | None = None,
    tokens: int | None = None,
    how: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write plans as a page with pictures, and return its path.

    ``model`` describes what was planned, ``tokens`` are those of a sample, and ``how`` is what to type for the chosen
    plan, with its labels. Some pictures show what was not among the plans.

    >>> import tempfile, torch, zeroshard
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(64, 64)
    >>> plans = zeroshard.plan(layer, torch.empty(1, 64), devices=2, stage=3, micro_batch=4)
    >>> write_page(Path(tempfile.mkdtemp()) / "plan.html", plans).name
    'plan.html'
    """
    content = _content(plans, plans.model if model is None else model, tokens, how)
    path.write_bytes(render("zeroshard.planner.page", "page.html.j2", "the page of a plan", **content))
    return path


def _content(plans: Plans, model: str, tokens: int | None, how: Sequence[tuple[str, str]]) -> dict[str, Any]:
    subject, chosen, rows = plans.subject, nearest(plans), ordered(interesting(plans))
    drawn = (
        charts.stages(subject, chosen),
        charts.timeline(subject, chosen),
        charts.batches(subject, chosen),
        charts.times(rows, chosen),
    )
    machine = plans.machine
    return {
        "model": model,
        "fits": plans.best is not None,
        "why": plans.why,
        "facts": _facts(plans, tokens),
        "headline": _headline(chosen, tokens, plans.precision),
        "charts": {chart.name: chart for chart in drawn if chart is not None},
        "chosen": chosen.choice.words,
        "per_sample": charts.per_sample(rows),
        "how": how,
        "table": _table(plans, rows, tokens),
        "whole": _table(plans, standing(plans), tokens),
        "machine": _described(machine),
        "versions": versions(),
        "version": versions()["zeroshard"],
    }


def _facts(plans: Plans, tokens: int | None) -> list[str]:
    machine, nodes = plans.machine, -(-plans.devices // plans.machine.devices)
    where = f" on {nodes} nodes" if nodes > 1 else ""
    facts = [f"{count(plans.parameters)} parameters", f"{plans.devices} × {machine.name}{where}"]
    facts += [f"{size(machine.memory)} a device", str(plans.precision)]
    return [*facts, f"{tokens:,} tokens a sample"] if tokens is not None else facts


def _headline(plan: Plan, tokens: int | None, precision: str | None) -> list[Figure]:
    choice, machine = plan.choice, plan.machine
    batch = choice.micro_batch * choice.accumulate * (plan.devices // choice.tensor)
    speed = plan.samples * (1 if tokens is None else tokens)
    peak = machine.flops.get(precision or "fp32", max(machine.flops.values()))
    return [
        Figure("Memory a device", size(plan.memory), f"{plan.memory / machine.memory:.0%} of {size(machine.memory)}"),
        Figure("A step", seconds(plan.pace.step), f"{batch:,} samples on all devices"),
        Figure("Tokens a second" if tokens is not None else "Samples a second", rate(speed), "on all devices"),
        Figure(
            "TFLOPS a device",
            f"{plan.flops / 1e12:.3g}",
            f"{plan.flops / peak:.0%} of its peak, recomputation not counted",
        ),
    ]


def _table(plans: Plans, rows: Sequence[Plan], tokens: int | None) -> dict[str, Any]:
    """The terminal's table for a narrower place: the choice in one cell, then whether it fits and how fast it is."""
    columns, cells = grid(plans, rows, tokens)
    figures = next(at for at, column in enumerate(columns) if column is STATES)
    *rest, step, speed, flops, fits = range(figures, len(columns))
    order = [fits, step, speed, flops, *rest]
    return {
        "columns": ["", *(_title(columns[at]) for at in order)],
        "rows": [
            [shortly(plan.choice), *(row[at] for at in order)] for plan, row in zip(ordered(rows), cells, strict=True)
        ],
    }


def _title(column: Column) -> str:
    first, second = column.head
    return first.removesuffix("-") + second if first.endswith("-") else f"{first} {second}".strip()


def _described(machine: Machine) -> dict[str, str]:
    told = {}
    for name, value in asdict(machine).items():
        if isinstance(value, dict):
            told[name] = ", ".join(f"{key} {number:.3g}" for key, number in value.items())
        else:
            told[name] = (
                f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            )
    return told
