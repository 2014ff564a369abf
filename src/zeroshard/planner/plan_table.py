"""Table: plans as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.memory.report import format_bytes
from zeroshard.planner.footprint import usage_fractions
from zeroshard.planner.plan import Plan, Plans
from zeroshard.planner.plan_json import best_per_strategy, collective_traffic, data_parallel_traffic, psi_bytes
from zeroshard.planner.strategy import Strategy

CHECKPOINT_LABELS = {"none": "-", "recompute": "recompute", "host": "host"}
ACTIVATION_KINDS = ("activations", "kept inputs")
CHOSEN_MARK = "►"


@dataclass(frozen=True)
class TableColumn:
    """One column: its head in two lines, and whether figures stand in it."""

    header: tuple[str, str]
    is_numeric: bool = True


SAMPLES_COLUMN, TOKENS_COLUMN = TableColumn(("samples", "a second")), TableColumn(("tokens", "a second"))
STATES_COLUMN = TableColumn(("", "states"))  # the first that is no part of the choice
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
    """The rows worth a look, or ``every`` one: what fits first, the fastest at the top.

    ``tokens`` of a sample: speed is in tokens then.
    """
    columns, cells = table_cells(plans, best_per_strategy(plans) if show_all else summary_rows(plans), tokens)
    lines = [[column.header[part] for column in columns] for part in (0, 1)] + cells
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    written = [
        "  ".join(
            f"{text:>{width}}" if column.is_numeric else f"{text:<{width}}"
            for column, width, text in zip(columns, widths, line, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(written)


def table_cells(
    plans: Plans, rows: Sequence[Plan], tokens: int | None = None
) -> tuple[list[TableColumn], list[list[str]]]:
    """The columns that have something to tell, and what stands in them, in order."""
    best = plans.best
    cells = [_row_cells(plan, plans, plan is best, tokens) for plan in sort_plans(rows)]
    told = [any(row[at] not in ("", "-") for row in cells) for at in range(len(COLUMNS))]
    used = [at for at, tells in enumerate(told) if tells]
    columns = [COLUMNS[at] if COLUMNS[at] is not SAMPLES_COLUMN or tokens is None else TOKENS_COLUMN for at in used]
    return columns, [[row[at] for at in used] for row in cells]


def summary_rows(plans: Plans) -> list[Plan]:
    """Of all rows, those that answer most questions.

    Of the chosen tensor degree, for each stage: without offload or recomputation, the best without offload, and the
    best of all. Of the chosen stage, also each other checkpointing and offload at its best. Of other degrees the best.
    """
    rows, chosen = best_per_strategy(plans), best_or_smallest(plans)
    shown = [chosen]
    mine = [plan for plan in rows if plan.strategy.tensor == chosen.strategy.tensor]
    for stage in sorted({plan.strategy.stage for plan in mine}):
        here = [plan for plan in mine if plan.strategy.stage == stage]
        near = [plan for plan in here if plan.strategy.offload is None]
        plain = [plan for plan in near if plan.strategy.checkpoint == "none"]
        shown += [best_of(some) for some in (plain, near, here) if some]
    same = [plan for plan in mine if plan.strategy.stage == chosen.strategy.stage]
    for checkpoint in {plan.strategy.checkpoint: None for plan in same}:
        shown.append(best_of([plan for plan in same if plan.strategy.checkpoint == checkpoint]))
    for far in {plan.strategy.offload_summary: None for plan in same}:
        shown.append(best_of([plan for plan in same if plan.strategy.offload_summary == far]))
    for tensor in sorted({plan.strategy.tensor for plan in rows} - {chosen.strategy.tensor}):
        shown.append(best_of([plan for plan in rows if plan.strategy.tensor == tensor]))
    return list({id(plan): plan for plan in shown}.values())


def best_or_smallest(plans: Plans) -> Plan:
    """The chosen plan; where nothing fits, the one that needs least of a device."""
    return plans.best or min(plans.candidates, key=lambda plan: plan.memory)


def best_of(plans: Sequence[Plan]) -> Plan:
    """The fastest that fits, as plans are compared; else the one that needs least."""
    return max(plans, key=lambda plan: (plan.fits, plan.score if plan.fits else -plan.memory))


def sort_plans(rows: Sequence[Plan]) -> list[Plan]:
    """What fits first, the fastest at the top; then the rest, those that need least at the top."""
    return sorted(rows, key=lambda plan: (not plan.fits, -plan.samples_per_second if plan.fits else plan.memory))


def fit_summary(plan: Plan) -> str:
    """Whether it fits, or what there is too little of, in few words."""
    full = usage_fractions(plan.footprint, plan.devices, plan.machine)
    if plan.fits:
        return "fits"
    if full["device"] > 1:
        return f"needs {_format_ratio(full['device'])} the device"
    if full["host"] > 1:
        return f"needs {_format_ratio(full['host'])} what the host gives"
    return f"needs {_format_ratio(full['disk'])} the disk" if plan.machine.disk else "needs a disk"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"


def format_seconds(value: float) -> str:
    """A time in three figures.

    >>> format_seconds(0.01634), format_seconds(2.5), format_seconds(0.0000412)
    ('16.3 ms', '2.50 s', '41.2 µs')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            number = value * factor
            return f"{f'{number:#.3g}'.rstrip('.') if number < 999.5 else f'{number:,.0f}'} {unit}"
    raise AssertionError(value)


def format_rate(value: float) -> str:
    """How many a second.

    >>> format_rate(1_003_000), format_rate(3021.4), format_rate(0.1234)
    ('1,003,000', '3,021', '0.123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def peak_breakdown(plan: Plan) -> tuple[float, float, float]:
    """Bytes at the peak: of states, of activations, and all else."""
    held = plan.footprint.peak.by_kind
    kept = sum(held.get(kind, 0.0) for kind in ACTIVATION_KINDS)
    states = held["states"] + held["gradients"]
    return states, kept, plan.footprint.peak.total - states - kept


def short_label(strategy: Strategy) -> str:
    """A choice in as few words as will do; a line does not break before the micro-batch.

    >>> short_label(Strategy(stage=3, checkpoint="host", micro_batch=16))
    'stage 3, recompute (host), ×\\xa016'
    """
    said = [f"stage {strategy.stage}"]
    said += [f"tensor {strategy.tensor}"] if strategy.tensor > 1 else []
    said += (
        ["recompute (host)" if strategy.checkpoint == "host" else "recompute"] if strategy.checkpoint != "none" else []
    )
    said += [_short_offload(strategy)] if strategy.offload is not None else []
    times = f" × {strategy.accumulate}" if strategy.accumulate > 1 else ""
    return ", ".join([*said, f"×\u00a0{strategy.micro_batch}{times}"])


def _short_offload(strategy: Strategy) -> str:
    return strategy.offload_summary.replace("optimizer", "opt.").replace("parameters", "par.")


def _row_cells(plan: Plan, plans: Plans, chosen: bool, tokens: int | None) -> list[str]:
    choice, here = plan.strategy, min(plan.devices, plan.machine.devices)
    host = plan.footprint.host * here
    micro = f"{choice.micro_batch}" + (f" × {choice.accumulate}" if choice.accumulate > 1 else "")
    return [
        CHOSEN_MARK if chosen else "",
        str(choice.stage),
        str(choice.tensor) if choice.tensor > 1 else "-",
        CHECKPOINT_LABELS[choice.checkpoint],
        "-" if choice.offload is None else _short_offload(choice),
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
