"""Format plans as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.planner.footprint import usage_fractions
from zeroshard.planner.plan import Plan, Plans
from zeroshard.planner.plan_json import best_per_strategy, collective_traffic, data_parallel_traffic, psi_bytes
from zeroshard.planner.strategy import Strategy
from zeroshard.utils.format import format_bytes

CHECKPOINT_LABELS = {"none": "-", "recompute": "recompute", "host": "host"}
ACTIVATION_KINDS = ("activations", "kept inputs")
CHOSEN_MARK = "►"


@dataclass(frozen=True)
class TableColumn:
    """One column: its two header lines, and whether it contains numbers."""

    header: tuple[str, str]
    is_numeric: bool = True


SAMPLES_COLUMN, TOKENS_COLUMN = TableColumn(("samples", "a second")), TableColumn(("tokens", "a second"))
STATES_COLUMN = TableColumn(("", "states"))  # the first column that is not part of the strategy
COLUMNS = (
    TableColumn(("", "")),
    TableColumn(("", "stage")),
    TableColumn(("", "tensor")),
    TableColumn(("check-", "pointing"), is_numeric=False),
    TableColumn(("", "offload"), is_numeric=False),
    TableColumn(("micro-", "batch")),
    STATES_COLUMN,
    TableColumn(("activa-", "tions")),
    TableColumn(("", "working")),
    TableColumn(("device", "needs")),
    TableColumn(("host", "a node")),
    TableColumn(("traffic", "a step")),
    TableColumn(("", "sent")),
    TableColumn(("", "step")),
    SAMPLES_COLUMN,
    TableColumn(("", "TFLOPS")),
    TableColumn(("", ""), is_numeric=False),
)


def format_table(plans: Plans, *, show_all: bool = False, tokens: int | None = None) -> str:
    """Format the summary rows, or all rows with ``show_all``; plans that fit come first, fastest at the top.

    With ``tokens`` (per sample), speed is in tokens per second.
    """
    columns, cells = table_cells(plans, best_per_strategy(plans) if show_all else summary_rows(plans), tokens)
    lines = [[column.header[part] for column in columns] for part in (0, 1)] + cells
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    formatted = [
        "  ".join(
            f"{text:>{width}}" if column.is_numeric else f"{text:<{width}}"
            for column, width, text in zip(columns, widths, line, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(formatted)


def table_cells(
    plans: Plans, rows: Sequence[Plan], tokens: int | None = None
) -> tuple[list[TableColumn], list[list[str]]]:
    """Return the columns that are not empty, and the cells of the sorted rows."""
    best = plans.best
    cells = [_row_cells(plan, plans, plan is best, tokens) for plan in sort_plans(rows)]
    has_content = [any(row[index] not in ("", "-") for row in cells) for index in range(len(COLUMNS))]
    used = [index for index, is_used in enumerate(has_content) if is_used]
    columns = [
        COLUMNS[index] if COLUMNS[index] is not SAMPLES_COLUMN or tokens is None else TOKENS_COLUMN for index in used
    ]
    return columns, [[row[index] for index in used] for row in cells]


def summary_rows(plans: Plans) -> list[Plan]:
    """Return the most informative rows.

    For the chosen tensor degree, each stage has the best plan without offload or recomputation, the best without
    offload, and the best overall. The chosen stage also has the best plan of each checkpoint mode and offload. Other
    tensor degrees have their best plan.
    """
    rows, chosen = best_per_strategy(plans), best_or_smallest(plans)
    shown = [chosen]
    same_degree = [plan for plan in rows if plan.strategy.tensor == chosen.strategy.tensor]
    for stage in sorted({plan.strategy.stage for plan in same_degree}):
        same_stage = [plan for plan in same_degree if plan.strategy.stage == stage]
        on_device = [plan for plan in same_stage if plan.strategy.offload is None]
        plain = [plan for plan in on_device if plan.strategy.checkpoint == "none"]
        shown += [best_of(group) for group in (plain, on_device, same_stage) if group]
    chosen_stage = [plan for plan in same_degree if plan.strategy.stage == chosen.strategy.stage]
    for checkpoint in {plan.strategy.checkpoint: None for plan in chosen_stage}:
        shown.append(best_of([plan for plan in chosen_stage if plan.strategy.checkpoint == checkpoint]))
    for offload in {plan.strategy.offload_summary: None for plan in chosen_stage}:
        shown.append(best_of([plan for plan in chosen_stage if plan.strategy.offload_summary == offload]))
    for tensor in sorted({plan.strategy.tensor for plan in rows} - {chosen.strategy.tensor}):
        shown.append(best_of([plan for plan in rows if plan.strategy.tensor == tensor]))
    return list({id(plan): plan for plan in shown}.values())


def best_or_smallest(plans: Plans) -> Plan:
    """Return the chosen plan; if nothing fits, the one that needs the least device memory."""
    return plans.best or min(plans.candidates, key=lambda plan: plan.memory)


def best_of(plans: Sequence[Plan]) -> Plan:
    """Return the plan that fits with the best score; if none fits, the one that needs the least memory."""
    return max(plans, key=lambda plan: (plan.fits, plan.score if plan.fits else -plan.memory))


def sort_plans(rows: Sequence[Plan]) -> list[Plan]:
    """Sort plans that fit by speed, fastest first, then the others by memory, smallest first."""
    return sorted(rows, key=lambda plan: (not plan.fits, -plan.samples_per_second if plan.fits else plan.memory))


def fit_summary(plan: Plan) -> str:
    """Say in a few words whether a plan fits, or which memory is too small."""
    usage = usage_fractions(plan.footprint, plan.devices, plan.machine)
    if plan.fits:
        return "fits"
    if usage["device"] > 1:
        return f"needs {_format_ratio(usage['device'])} the device"
    if usage["host"] > 1:
        return f"needs {_format_ratio(usage['host'])} what the host gives"
    return f"needs {_format_ratio(usage['disk'])} the disk" if plan.machine.disk else "needs a disk"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"


def format_seconds(value: float) -> str:
    """Format a time with three significant digits.

    >>> format_seconds(0.01634), format_seconds(2.5), format_seconds(0.0000412)
    ('16.3 ms', '2.50 s', '41.2 µs')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            number = value * factor
            return f"{f'{number:#.3g}'.rstrip('.') if number < 999.5 else f'{number:,.0f}'} {unit}"
    raise AssertionError(value)


def format_rate(value: float) -> str:
    """Format a rate per second.

    >>> format_rate(1_003_000), format_rate(3021.4), format_rate(0.1234)
    ('1,003,000', '3,021', '0.123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def peak_breakdown(plan: Plan) -> tuple[float, float, float]:
    """Return the bytes of states, of activations, and of everything else at the peak."""
    by_kind = plan.footprint.peak.by_kind
    activations = sum(by_kind.get(kind, 0.0) for kind in ACTIVATION_KINDS)
    states = by_kind["states"] + by_kind["gradients"]
    return states, activations, plan.footprint.peak.total - states - activations


def short_label(strategy: Strategy) -> str:
    """Format a strategy as a short label; the line does not break before the micro-batch.

    >>> short_label(Strategy(stage=3, checkpoint="host", micro_batch=16))
    'stage 3, recompute (host), ×\\xa016'
    """
    parts = [f"stage {strategy.stage}"]
    parts += [f"tensor {strategy.tensor}"] if strategy.tensor > 1 else []
    parts += (
        ["recompute (host)" if strategy.checkpoint == "host" else "recompute"] if strategy.checkpoint != "none" else []
    )
    parts += [_short_offload(strategy)] if strategy.offload is not None else []
    times = f" × {strategy.accumulate}" if strategy.accumulate > 1 else ""
    return ", ".join([*parts, f"×\u00a0{strategy.micro_batch}{times}"])


def _short_offload(strategy: Strategy) -> str:
    return strategy.offload_summary.replace("optimizer", "opt.").replace("parameters", "par.")


def _row_cells(plan: Plan, plans: Plans, chosen: bool, tokens: int | None) -> list[str]:
    strategy, local_ranks = plan.strategy, min(plan.devices, plan.machine.devices)
    host = plan.footprint.host * local_ranks
    micro = f"{strategy.micro_batch}" + (f" × {strategy.accumulate}" if strategy.accumulate > 1 else "")
    return [
        CHOSEN_MARK if chosen else "",
        str(strategy.stage),
        str(strategy.tensor) if strategy.tensor > 1 else "-",
        CHECKPOINT_LABELS[strategy.checkpoint],
        "-" if strategy.offload is None else _short_offload(strategy),
        micro,
        *(format_bytes(part) for part in peak_breakdown(plan)),
        format_bytes(plan.memory),
        format_bytes(host) if host else "-",
        f"{data_parallel_traffic(plan) / psi_bytes(plans):.2f} Ψ" if collective_traffic(plan) else "-",
        format_bytes(collective_traffic(plan)) if collective_traffic(plan) else "-",
        format_seconds(plan.step_time.step),
        format_rate(plan.samples_per_second * (1 if tokens is None else tokens)),
        f"{plan.flops_per_second / 1e12:.3g}",
        fit_summary(plan) + (", chosen" if chosen else ""),
    ]
