"""Plans as text: a table for the terminal, the command to train, and the calls for a user's own script."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.config.offload import STATE_KINDS, Offload
from zeroshard.planner import Machine, Plan, Plans, Strategy
from zeroshard.utils.format import format_bytes

ACTIVATION_KINDS = ("activations", "kept inputs")
CHOSEN_MARK = "►"
PLACEHOLDER_DIRECTORY = "/path/on/a/fast/disk"  # a plan does not know the path


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
    TableColumn(("", "8 bits"), is_numeric=False),
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
    columns, cells = table_cells(plans, plans.best_per_strategy() if show_all else summary_rows(plans), tokens)
    headers = [[column.header[part] for column in columns] for part in (0, 1)]
    return align_columns([*headers, *cells], [index for index, column in enumerate(columns) if not column.is_numeric])


def align_columns(rows: Sequence[Sequence[str]], left_aligned: Sequence[int] = ()) -> str:
    """Return rows of text in columns, right-aligned except the columns in ``left_aligned``.

    >>> print(align_columns([("a", "n"), ("bc", "10")], left_aligned=(0,)))
    a    n
    bc  10
    """
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if index in left_aligned else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def table_cells(
    plans: Plans, rows: Sequence[Plan], tokens: int | None = None
) -> tuple[list[TableColumn], list[list[str]]]:
    """Return the columns that are not empty, and the cells of the sorted rows."""
    best = plans.best
    cells = [_row_cells(plan, plan is best, tokens) for plan in sort_plans(rows)]
    used = [index for index in range(len(COLUMNS)) if any(row[index] not in ("", "-") for row in cells)]
    columns = [
        COLUMNS[index] if COLUMNS[index] is not SAMPLES_COLUMN or tokens is None else TOKENS_COLUMN for index in used
    ]
    return columns, [[row[index] for index in used] for row in cells]


def summary_rows(plans: Plans) -> list[Plan]:
    """Return the most informative rows.

    For the chosen tensor degree, each stage has the best plan without offload or recomputation, the best without
    offload, and the best overall. The chosen stage also has the best plan of each checkpoint mode, offload, mesh and
    kind of 8-bit collectives. Other tensor degrees have their best plan.
    """
    rows, chosen = plans.best_per_strategy(), plans.best_or_smallest
    same_degree = [plan for plan in rows if plan.strategy.tensor == chosen.strategy.tensor]
    on_device = [plan for plan in same_degree if plan.strategy.offload is None]
    plain = [plan for plan in on_device if plan.strategy.checkpoint == "none"]
    same_stage = [plan for plan in same_degree if plan.strategy.stage == chosen.strategy.stage]
    shown = [chosen]
    for group in (plain, on_device, same_degree):
        shown += _best_of_each(group, lambda strategy: strategy.stage)
    for part in (
        lambda strategy: strategy.checkpoint,
        lambda strategy: strategy.offload_summary,
        lambda strategy: (strategy.replicas, strategy.partition),
        lambda strategy: strategy.wire_summary,
    ):
        shown += _best_of_each(same_stage, part)
    others = [plan for plan in rows if plan.strategy.tensor != chosen.strategy.tensor]
    shown += _best_of_each(others, lambda strategy: strategy.tensor)
    return list({id(plan): plan for plan in shown}.values())


def _best_of_each(plans: Sequence[Plan], part: Callable[[Strategy], Any]) -> list[Plan]:
    """Return the first plan in order for each value that a part of the strategy has."""
    found: dict[Any, Plan] = {}
    for plan in sort_plans(plans):
        found.setdefault(part(plan.strategy), plan)
    return list(found.values())


def sort_plans(rows: Sequence[Plan]) -> list[Plan]:
    """Sort plans that fit by speed, fastest first, then the others by memory, smallest first."""
    return sorted(rows, key=lambda plan: plan.order)


def fit_summary(plan: Plan) -> str:
    """Say in a few words whether a plan fits, or which memory is too small."""
    if plan.fits:
        return "fits"
    usage = plan.usage_fractions
    ratios = {name: f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×" for name, ratio in usage.items()}
    if usage["device"] > 1:
        return f"needs {ratios['device']} the device"
    if usage["host"] > 1:
        return f"needs {ratios['host']} the usable host memory"
    return f"needs {ratios['disk']} the disk" if plan.machine.disk else "needs a disk"


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
    parts += [f"{strategy.partition} {strategy.replicas}×"] if strategy.replicas > 1 else []
    parts += [_short_wire(strategy)] if strategy.is_lossy else []
    if strategy.checkpoint != "none":
        parts.append("recompute (host)" if strategy.checkpoint == "host" else "recompute")
    parts += [_short_offload(strategy)] if strategy.offload is not None else []
    return ", ".join([*parts, f"×\u00a0{format_batch(strategy)}"])


def format_batch(strategy: Strategy) -> str:
    """Format the micro-batch and the backwards per step.

    >>> format_batch(Strategy(micro_batch=4, accumulate=2)), format_batch(Strategy(micro_batch=4))
    ('4 × 2', '4')
    """
    return f"{strategy.micro_batch}" + (f" × {strategy.accumulate}" if strategy.accumulate > 1 else "")


def _short_offload(strategy: Strategy) -> str:
    return strategy.offload_summary.replace("optimizer", "opt.").replace("parameters", "par.")


def _short_wire(strategy: Strategy) -> str:
    return strategy.wire_summary.replace("gathers", "gather").replace("reductions", "reduce")


def _row_cells(plan: Plan, chosen: bool, tokens: int | None) -> list[str]:
    strategy, host = plan.strategy, plan.node_bytes["host"]
    return [
        CHOSEN_MARK if chosen else "",
        str(strategy.stage) + (f" {strategy.partition}" if strategy.replicas > 1 else ""),
        _short_wire(strategy) or "-",
        str(strategy.tensor) if strategy.tensor > 1 else "-",
        "-" if strategy.checkpoint == "none" else strategy.checkpoint,
        "-" if strategy.offload is None else _short_offload(strategy),
        format_batch(strategy),
        *(format_bytes(part) for part in peak_breakdown(plan)),
        format_bytes(plan.memory),
        format_bytes(host) if host else "-",
        f"{plan.data_parallel_psi:.2f} Ψ" if plan.collective_bytes else "-",
        format_bytes(plan.collective_bytes) if plan.collective_bytes else "-",
        format_seconds(plan.step_time.step),
        format_rate(plan.samples_per_second * (1 if tokens is None else tokens)),
        f"{plan.flops_per_second / 1e12:.3g}",
        fit_summary(plan) + (", chosen" if chosen else ""),
    ]


def train_command(
    strategy: Strategy,
    model: str,
    devices: int,
    machine: Machine,
    precision: str | None = None,
    sequence: int | None = None,
) -> str:
    """Return the `zeroshard train` command for a strategy; for several nodes, the torchrun command of each node.

    >>> strategy = Strategy(stage=2, checkpoint="recompute", micro_batch=4)
    >>> print(train_command(strategy, "gpt2-xl", 8, Machine.resolve("h100")))
    zeroshard train --model gpt2-xl --ranks 8 --stage 2 --micro-batch 4 --recompute
    """
    nodes = machine.nodes(devices)
    args = ["--model", model]
    for flag, value, default in (
        ("--ranks", devices if nodes == 1 else None, None),
        ("--device", "cpu" if machine.is_cpu else None, None),
        ("--sequence", sequence, None),
        ("--stage", strategy.stage, None),
        ("--tensor", strategy.tensor, 1),
        ("--replicas", strategy.replicas, 1),
        ("--partition", strategy.partition if strategy.replicas > 1 else None, None),
        ("--gather-dtype", strategy.gather_dtype, None),
        ("--reduce-wire", strategy.reduce_wire, None),
        ("--local-steps", strategy.local_steps, 1),
        ("--micro-batch", strategy.micro_batch, None),
        ("--accumulate", strategy.accumulate, 1),
        ("--precision", precision, None),
    ):
        if value != default:
            args += [flag, str(value)]
    if strategy.checkpoint != "none":
        args.append("--offload-activations" if strategy.checkpoint == "host" else "--recompute")
    args += _offload_flags(strategy.offload)
    return f"{_launch_command(devices, nodes)} train {shlex.join(args)}"


def _launch_command(devices: int, nodes: int) -> str:
    if nodes == 1:
        return "zeroshard"
    if devices % nodes:
        return (
            f"# {devices} ranks do not divide evenly over {nodes} nodes: give torchrun each node's own --nproc-per-node"
            "\ntorchrun … -m zeroshard"
        )
    return f"torchrun --nnodes {nodes} --nproc-per-node {devices // nodes} … -m zeroshard"


def _offload_flags(offload: Offload | None) -> list[str]:
    flags: list[str] = []
    for tier, fraction in offload.optimizer.items() if offload is not None else ():
        flags += ["--offload", tier]
        if fraction < 1:
            flags += ["--offload-fraction", f"{fraction:g}"]
    if offload is not None and offload.parameters:
        flags.append("--offload-parameters")
    if offload is not None and offload.needs_disk:
        flags += ["--offload-directory", PLACEHOLDER_DIRECTORY]
    return flags


def python_calls(
    strategy: Strategy,
    devices: int,
    machine: Machine,
    precision: str | None = None,
    outer: Mapping[str, Any] | None = None,
    keep_bf16: Sequence[str] = (),
) -> str:
    """Return the Python calls for a strategy, for a user's own script.

    ``outer``: the hyper-parameters of the outer SGD, if there is one. ``keep_bf16``: the option of that name.

    >>> print(python_calls(Strategy(stage=3, checkpoint="host"), 8, Machine.resolve("h100"), "bf16"))
    model, optimizer = zeroshard.shard(model, optimizer, stage=3, precision="bf16")
    zeroshard.checkpoint_activations(model, offload=True)
    """
    lines, options = [], [f"stage={strategy.stage}"]
    if strategy.tensor > 1 or strategy.replicas > 1:
        shard_ranks = devices // strategy.tensor // strategy.replicas
        sizes = {"replicate": strategy.replicas, "shard": shard_ranks, "tensor": strategy.tensor}
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        names = ", ".join(f'"{name}"' for name in axes)
        shape = f"({', '.join(map(str, axes.values()))})"
        lines.append(f'mesh = init_device_mesh("{machine.kind}", {shape}, mesh_dim_names=({names}))')
        options.insert(0, "mesh=mesh")
    if strategy.partition != "hybrid":
        options.append(f'partition="{strategy.partition}"')
    for name in ("gather_dtype", "reduce_wire"):
        if getattr(strategy, name) is not None:
            options.append(f'{name}="{getattr(strategy, name)}"')
    if strategy.local_steps > 1:
        options.append(f"local_steps={strategy.local_steps}")
    if outer:
        arguments = ", ".join(f"{name}={value}" for name, value in outer.items())
        options.append(f"outer_optimizer=functools.partial(torch.optim.SGD, {arguments})")
    if precision not in (None, "fp32"):
        options.append(f'precision="{precision}"')
    if keep_bf16:
        options.append(f"keep_bf16={[*keep_bf16]}".replace("'", '"'))
    if strategy.offload is not None:
        options.append(f"offload={_offload_call(strategy.offload)}")
    lines.append(f"model, optimizer = zeroshard.shard(model, optimizer, {', '.join(options)})")
    if strategy.checkpoint != "none":
        lines.append(
            f"zeroshard.checkpoint_activations(model{', offload=True' if strategy.checkpoint == 'host' else ''})"
        )
    return "\n".join(lines)


def _offload_call(offload: Offload) -> str:
    arguments = []
    for kind in STATE_KINDS:
        fractions: dict[str, float] = getattr(offload, kind) or {}
        if not fractions:
            continue
        (tier, fraction), has_several = next(iter(fractions.items())), len(fractions) > 1
        value = str(fractions) if has_several else f'"{tier}"' if fraction == 1 else f'("{tier}", {fraction:g})'
        arguments.append(f"{kind}={value}")
    if offload.needs_disk:
        arguments.append(f'directory="{PLACEHOLDER_DIRECTORY}"')
    return f"zeroshard.Offload({', '.join(arguments)})"
