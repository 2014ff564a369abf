"""Table: plans as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.memory.report import size
from zeroshard.planner.choice import Choice
from zeroshard.planner.fullness import shares
from zeroshard.planner.plan import Plan, Plans
from zeroshard.planner.record import data_traffic, psi_bytes, sent, standing

CHECKPOINTS = {"none": "-", "recompute": "recompute", "host": "host"}
ACTIVATIONS = ("activations", "kept inputs")
CHOSEN = "►"


@dataclass(frozen=True)
class Column:
    """One column: its head in two lines, and whether figures stand in it."""

    head: tuple[str, str]
    figures: bool = True


SPEED, TOKENS = Column(("samples", "a second")), Column(("tokens", "a second"))
STATES = Column(("", "states"))  # the first that is no part of the choice
COLUMNS = (
    Column(("", "")),
    Column(("", "stage")),
    Column(("", "tensor")),
    Column(("check-", "pointing"), figures=False),
    Column(("", "offload"), figures=False),
    Column(("micro-", "batch")),
    STATES,
    Column(("activa-", "tions")),
    Column(("", "working")),
    Column(("device", "needs")),
    Column(("host", "a node")),
    Column(("traffic", "a step")),
    Column(("", "sent")),
    Column(("", "step")),
    SPEED,
    Column(("", "TFLOPS")),
    Column(("", ""), figures=False),
)


def table(plans: Plans, *, every: bool = False, tokens: int | None = None) -> str:
    """The rows worth a look, or ``every`` one: what fits first, the fastest at the top.

    ``tokens`` of a sample: speed is in tokens then.
    """
    columns, cells = grid(plans, standing(plans) if every else interesting(plans), tokens)
    lines = [[column.head[part] for column in columns] for part in (0, 1)] + cells
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    written = [
        "  ".join(
            f"{text:>{width}}" if column.figures else f"{text:<{width}}"
            for column, width, text in zip(columns, widths, line, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(written)


def grid(plans: Plans, rows: Sequence[Plan], tokens: int | None = None) -> tuple[list[Column], list[list[str]]]:
    """The columns that have something to tell, and what stands in them, in order."""
    best = plans.best
    cells = [_cells(plan, plans, plan is best, tokens) for plan in ordered(rows)]
    told = [any(row[at] not in ("", "-") for row in cells) for at in range(len(COLUMNS))]
    used = [at for at, tells in enumerate(told) if tells]
    columns = [COLUMNS[at] if COLUMNS[at] is not SPEED or tokens is None else TOKENS for at in used]
    return columns, [[row[at] for at in used] for row in cells]


def interesting(plans: Plans) -> list[Plan]:
    """Of all rows, those that answer most questions.

    Of the chosen tensor degree, for each stage: without offload or recomputation, the best without offload, and the
    best of all. Of the chosen stage, also each other checkpointing and offload at its best. Of other degrees the best.
    """
    rows, chosen = standing(plans), nearest(plans)
    shown = [chosen]
    mine = [plan for plan in rows if plan.choice.tensor == chosen.choice.tensor]
    for stage in sorted({plan.choice.stage for plan in mine}):
        here = [plan for plan in mine if plan.choice.stage == stage]
        near = [plan for plan in here if plan.choice.offload is None]
        plain = [plan for plan in near if plan.choice.checkpoint == "none"]
        shown += [leading(some) for some in (plain, near, here) if some]
    same = [plan for plan in mine if plan.choice.stage == chosen.choice.stage]
    for checkpoint in {plan.choice.checkpoint: None for plan in same}:
        shown.append(leading([plan for plan in same if plan.choice.checkpoint == checkpoint]))
    for far in {plan.choice.far: None for plan in same}:
        shown.append(leading([plan for plan in same if plan.choice.far == far]))
    for tensor in sorted({plan.choice.tensor for plan in rows} - {chosen.choice.tensor}):
        shown.append(leading([plan for plan in rows if plan.choice.tensor == tensor]))
    return list({id(plan): plan for plan in shown}.values())


def nearest(plans: Plans) -> Plan:
    """The chosen plan; where nothing fits, the one that needs least of a device."""
    return plans.best or min(plans.every, key=lambda plan: plan.memory)


def leading(some: Sequence[Plan]) -> Plan:
    """The fastest that fits, as plans are compared; else the one that needs least."""
    return max(some, key=lambda plan: (plan.fits, plan.credit if plan.fits else -plan.memory))


def ordered(rows: Sequence[Plan]) -> list[Plan]:
    """What fits first, the fastest at the top; then the rest, those that need least at the top."""
    return sorted(rows, key=lambda plan: (not plan.fits, -plan.samples if plan.fits else plan.memory))


def verdict(plan: Plan) -> str:
    """Whether it fits, or what there is too little of, in few words."""
    full = shares(plan.footprint, plan.devices, plan.machine)
    if plan.fits:
        return "fits"
    if full["device"] > 1:
        return f"needs {_times(full['device'])} the device"
    if full["host"] > 1:
        return f"needs {_times(full['host'])} what the host gives"
    return f"needs {_times(full['disk'])} the disk" if plan.machine.disk else "needs a disk"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"


def seconds(value: float) -> str:
    """A time in three figures.

    >>> seconds(0.01634), seconds(2.5), seconds(0.0000412)
    ('16.3 ms', '2.50 s', '41.2 µs')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            number = value * factor
            return f"{f'{number:#.3g}'.rstrip('.') if number < 999.5 else f'{number:,.0f}'} {unit}"
    raise AssertionError(value)


def rate(value: float) -> str:
    """How many a second.

    >>> rate(1_003_000), rate(3021.4), rate(0.1234)
    ('1,003,000', '3,021', '0.123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def parts(plan: Plan) -> tuple[float, float, float]:
    """Bytes at the peak: of states, of activations, and all else."""
    held = plan.footprint.peak.held
    kept = sum(held.get(kind, 0.0) for kind in ACTIVATIONS)
    states = held["states"] + held["gradients"]
    return states, kept, plan.footprint.peak.total - states - kept


def shortly(choice: Choice) -> str:
    """A choice in as few words as will do; a line does not break before the micro-batch.

    >>> shortly(Choice(stage=3, checkpoint="host", micro_batch=16))
    'stage 3, recompute (host), ×\\xa016'
    """
    said = [f"stage {choice.stage}"]
    said += [f"tensor {choice.tensor}"] if choice.tensor > 1 else []
    said += ["recompute (host)" if choice.checkpoint == "host" else "recompute"] if choice.checkpoint != "none" else []
    said += [_far(choice)] if choice.offload is not None else []
    times = f" × {choice.accumulate}" if choice.accumulate > 1 else ""
    return ", ".join([*said, f"×\u00a0{choice.micro_batch}{times}"])


def _far(choice: Choice) -> str:
    return choice.far.replace("optimizer", "opt.").replace("parameters", "par.")


def _cells(plan: Plan, plans: Plans, chosen: bool, tokens: int | None) -> list[str]:
    choice, here = plan.choice, min(plan.devices, plan.machine.devices)
    host = plan.footprint.host * here
    micro = f"{choice.micro_batch}" + (f" × {choice.accumulate}" if choice.accumulate > 1 else "")
    return [
        CHOSEN if chosen else "",
        str(choice.stage),
        str(choice.tensor) if choice.tensor > 1 else "-",
        CHECKPOINTS[choice.checkpoint],
        "-" if choice.offload is None else _far(choice),
        micro,
        *(size(part) for part in parts(plan)),
        size(plan.memory),
        size(host) if host else "-",
        f"{data_traffic(plan) / psi_bytes(plans):.2f} Ψ" if sent(plan) else "-",
        size(sent(plan)) if sent(plan) else "-",
        seconds(plan.pace.step),
        rate(plan.samples * (1 if tokens is None else tokens)),
        f"{plan.flops / 1e12:.3g}",
        verdict(plan) + (", chosen" if chosen else ""),
    ]
