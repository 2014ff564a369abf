"""Write the page of a plan: one HTML file that opens offline and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from zeroshard.cli import plan_charts
from zeroshard.cli.plan_text import (
    STATES_COLUMN,
    TableColumn,
    format_rate,
    format_seconds,
    short_label,
    sort_plans,
    summary_rows,
    table_cells,
)
from zeroshard.page import render_page
from zeroshard.planner import Machine, Plan, Plans
from zeroshard.utils.format import format_bytes, format_count
from zeroshard.utils.version import __version__, software_versions


class HeadlineFigure(NamedTuple):
    """One of the numbers at the top of the page."""

    name: str
    value: str
    note: str


def write_page(
    path: Path,
    plans: Plans,
    *,
    model: str | None = None,
    tokens: int | None = None,
    usage: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write plans as a page with charts, and return its path.

    ``model`` describes the planned model, ``tokens`` is the number of tokens per sample, and ``usage`` is what to
    type for the chosen plan, with labels. Some charts also show strategies that are not among the plans.

    >>> import tempfile, torch, zeroshard
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(64, 64)
    >>> plans = zeroshard.plan(layer, torch.empty(1, 64), devices=2, stage=3, micro_batch=4)
    >>> write_page(Path(tempfile.mkdtemp()) / "plan.html", plans).name
    'plan.html'
    """
    content = _template_context(plans, plans.model if model is None else model, tokens, usage)
    path.write_bytes(render_page("zeroshard.cli", "plan_page.html.j2", "the page of a plan", **content))
    return path


def _template_context(plans: Plans, model: str, tokens: int | None, usage: Sequence[tuple[str, str]]) -> dict[str, Any]:
    chosen, rows = plans.best_or_smallest, sort_plans(summary_rows(plans))
    charts = (
        plan_charts.stages_chart(chosen),
        plan_charts.timeline_chart(chosen),
        plan_charts.micro_batch_chart(chosen),
        plan_charts.step_time_chart(rows, chosen),
    )
    return {
        "model": model,
        "fits": plans.best is not None,
        "why": plans.reason,
        "facts": _facts(plans, tokens),
        "headline": _headline(chosen, tokens, plans.precision),
        "charts": {chart.name: chart for chart in charts if chart is not None},
        "chosen": chosen.strategy.description,
        "per_sample": plan_charts.needs_time_per_sample(rows),
        "how": usage,
        "table": _html_table(plans, rows, tokens),
        "whole": _html_table(plans, plans.best_per_strategy(), tokens),
        "machine": _describe_machine(plans.machine),
        "versions": software_versions(),
        "version": __version__,
    }


def _facts(plans: Plans, tokens: int | None) -> list[str]:
    machine, nodes = plans.machine, plans.machine.nodes(plans.devices)
    nodes_text = f" on {nodes} nodes" if nodes > 1 else ""
    facts = [f"{format_count(plans.parameters)} parameters", f"{plans.devices} × {machine.name}{nodes_text}"]
    facts += [f"{format_bytes(machine.memory)} a device", str(plans.precision)]
    return [*facts, f"{tokens:,} tokens a sample"] if tokens is not None else facts


def _headline(plan: Plan, tokens: int | None, precision: str | None) -> list[HeadlineFigure]:
    machine = plan.machine
    speed = plan.samples_per_second * (1 if tokens is None else tokens)
    peak = machine.peak_flops(precision or "fp32")
    return [
        HeadlineFigure(
            "Memory per device",
            format_bytes(plan.memory),
            f"{plan.memory / machine.memory:.0%} of {format_bytes(machine.memory)}",
        ),
        HeadlineFigure("Step", format_seconds(plan.step_time.step), f"{plan.batch:,} samples on all devices"),
        HeadlineFigure(
            "Tokens per second" if tokens is not None else "Samples per second", format_rate(speed), "on all devices"
        ),
        HeadlineFigure(
            "TFLOPS per device",
            f"{plan.flops_per_second / 1e12:.3g}",
            f"{plan.flops_per_second / peak:.0%} of its peak, recomputation not counted",
        ),
    ]


def _html_table(plans: Plans, rows: Sequence[Plan], tokens: int | None) -> dict[str, Any]:
    """Return the terminal's table for a narrow page: the strategy in one cell, then whether it fits and its speed."""
    columns, cells = table_cells(plans, rows, tokens)
    first_number = next(index for index, column in enumerate(columns) if column is STATES_COLUMN)
    *others, step, speed, flops, fits = range(first_number, len(columns))
    order = [fits, step, speed, flops, *others]
    return {
        "columns": ["", *(_column_title(columns[index]) for index in order)],
        "rows": [
            [short_label(plan.strategy), *(row[index] for index in order)]
            for plan, row in zip(sort_plans(rows), cells, strict=True)
        ],
    }


def _column_title(column: TableColumn) -> str:
    first, second = column.header
    return first.removesuffix("-") + second if first.endswith("-") else f"{first} {second}".strip()


def _describe_machine(machine: Machine) -> dict[str, str]:
    description = {}
    for name, value in asdict(machine).items():
        if isinstance(value, dict):
            description[name] = ", ".join(f"{key} {number:.3g}" for key, number in value.items())
        else:
            description[name] = (
                f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            )
    return description
