"""Charts: the pictures of a plan. Colours are named as in :mod:`zeroshard.page.chart`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from zeroshard.config.offload import Offload
from zeroshard.memory.report import format_bytes
from zeroshard.page.chart import (
    Chart,
    JsonObject,
    bar_trace,
    bytes_axis,
    line_trace,
    phase_markers,
    plot_axis,
    plot_layout,
    stacked_bar_layout,
)
from zeroshard.planner.footprint import MemoryUsage, device_bytes_needed
from zeroshard.planner.plan import Plan, evaluate_strategy
from zeroshard.planner.plan_json import TIME_PARTS
from zeroshard.planner.plan_table import format_seconds, short_label
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel
from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, CheckpointMode

STAGES = (0, 1, 2, 3)
OTHER_KIND, RUNTIME_KIND = "other", "runtime and allocator"
KIND_COLORS = {  # kinds in the order they are stacked
    "parameters": "parameters",
    "gradients": "gradients",
    "master weights": "master-weights",
    "optimizer states": "optimizer-states",
    "activations": "activations",
    "kept inputs": "kept-inputs",
    "gathered": "gathered",
    "gradients of autograd": "autograd",
    "buckets": "buckets",
    "step": "step",
    OTHER_KIND: "staging",
    RUNTIME_KIND: "other",
}
TIME_LABELS = {
    "compute": ("computing", "training"),
    "tensor": ("tensor collectives", "held"),
    "launch": ("waiting for the host to launch", "staging"),
    "gather": ("waiting for gathers", "parameters"),
    "reduce": ("waiting for reductions", "gradients"),
    "update": ("updating, or waiting for it", "optimizer-states"),
    "rest": ("all else", "other"),
}
CHECKPOINT_LINES: dict[CheckpointMode, tuple[str, str]] = {
    "none": ("all activations kept", "training"),
    "recompute": ("recomputed", "gradients"),
    "host": ("recomputed, inputs on the host", "optimizer-states"),
}
MAX_BARS = 12  # most plans that are drawn
MAX_HALVINGS, MAX_DOUBLINGS = 4, 3  # how often the chosen micro-batch is halved and doubled
LIMIT_COLOR = "var(--bad)"  # a device's memory


def kind_color(kind: str) -> str:
    """The custom property of a kind's colour."""
    return f"var(--{KIND_COLORS[kind]})"


def bytes_by_kind(moment: MemoryUsage, states: dict[str, int]) -> dict[str, float]:
    """What is held at a moment, with the states by kind, and small kinds in one.

    >>> usage = MemoryUsage("head", {"states": 2.0, "inputs": 1.0, "libraries": 2.0})
    >>> bytes_by_kind(usage, {"parameters": 2, "gradients": 4})
    {'parameters': 2.0, 'other': 3.0}
    """
    found = {kind: float(nbytes) for kind, nbytes in states.items() if kind != "gradients"}
    for kind, nbytes in moment.by_kind.items():
        if kind != "states":
            known = kind if kind in KIND_COLORS else OTHER_KIND
            found[known] = found.get(known, 0.0) + nbytes
    return {kind: found[kind] for kind in KIND_COLORS if found.get(kind)}


# ------------------------------------------------------------------------------------------------ memory


def stages_chart(traced_model: TracedModel, chosen: Plan) -> Chart:
    """Draw what a device needs in every stage, all else as chosen, against what it has."""
    machine = chosen.machine
    alone = chosen.devices == chosen.strategy.tensor  # then there is nothing to partition, and all stages are one
    some = [
        evaluate_strategy(traced_model, choice, chosen.devices, machine)
        for choice in _strategies_by_stage(chosen.strategy, alone)
    ]
    held = []
    for plan in some:
        parts = bytes_by_kind(plan.footprint.peak, plan.footprint.states)
        held.append(parts | {RUNTIME_KIND: plan.memory - plan.footprint.peak.total})
    names = [f"stage {plan.strategy.stage}" + (", chosen" if plan.strategy == chosen.strategy else "") for plan in some]
    kinds = [kind for kind in KIND_COLORS if any(parts.get(kind) for parts in held)]
    data = [bar_trace(names, [parts.get(kind, 0.0) for parts in held], kind, kind_color(kind)) for kind in kinds]
    layout = stacked_bar_layout(names, [plan.memory for plan in some], min_axis_end=1.01 * machine.memory)
    layout["shapes"] = [_limit_line(x=machine.memory)]
    label = "Memory that a device needs: " + ", ".join(
        f"stage {plan.strategy.stage} {format_bytes(plan.memory)}" for plan in some
    )
    rows = [
        [name, *(format_bytes(parts.get(kind, 0.0)) for kind in kinds), format_bytes(plan.memory)]
        for name, parts, plan in zip(names, held, some, strict=True)
    ]
    legend = [
        *((kind, kind_color(kind)) for kind in kinds),
        (f"what a device has, {format_bytes(machine.memory)}", LIMIT_COLOR),
    ]
    label += f"; it has {format_bytes(machine.memory)}."
    return Chart("stages", label, {"data": data, "layout": layout}, ["", *kinds, "together"], rows, legend)


def _strategies_by_stage(strategy: Strategy, is_single_rank: bool) -> list[Strategy]:
    """The choice in every stage; where a stage cannot keep parameters outside the device, without that."""
    found = []
    for stage in STAGES:
        offload = strategy.offload
        if stage != strategy.stage and offload is not None and offload.parameters:
            offload = Offload.from_option(replace(offload, parameters="device")) if stage < 3 else offload
        if stage == strategy.stage or not is_single_rank:
            found.append(replace(strategy, stage=stage, offload=offload))
    return found


def _limit_line(**at: float) -> JsonObject:
    """A line at what a device has, across the plot."""
    value = next(iter(at.values()))
    across = {"xref": "x", "yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 1}
    if "y" in at:
        across = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"type": "line", **across, "line": {"color": LIMIT_COLOR, "width": 2, "dash": "dash"}}


def timeline_chart(traced_model: TracedModel, chosen: Plan) -> Chart:
    """Draw what a device holds over one forward, backward and step, stacked by kind."""
    plan = evaluate_strategy(traced_model, chosen.strategy, chosen.devices, chosen.machine, timeline=True)
    moments, work = plan.footprint.timeline, traced_model.trace_and_cost(chosen.strategy, chosen.machine).cost
    at = [0.0]  # milliseconds at which each moment begins; the step's at the end of the spans
    for span in work.device_seconds:
        at.append(at[-1] + 1000 * span)
    ends = at[-1] + 1000 * max(plan.step_time.update, 0.02 * plan.step_time.step)
    parts = [bytes_by_kind(moment, plan.footprint.states) for moment in moments]
    kinds = [kind for kind in KIND_COLORS if any(part.get(kind) for part in parts)]
    data = []
    for kind in kinds:
        values = [part.get(kind, 0.0) for part in parts]
        area = line_trace([*at, ends], [*values, values[-1]], escape(kind), kind_color(kind), 0)
        area["line"]["shape"] = "hv"  # memory is taken and given back at once
        data.append(area | {"stackgroup": "held", "fillcolor": kind_color(kind), "hovertemplate": "%{y:.3~s}B"})
    begun = [("forward", 0.0)]
    turn = next((begin for begin, span in zip(at, work.spans, strict=False) if span.is_backward), None)
    begun += [("backward", turn / 1000)] if turn is not None else []
    begun.append(("step", at[-1] / 1000))
    xaxis = plot_axis("milliseconds of computation", range=[0, ends], unifiedhovertitle={"text": "%{x:.3~g} ms"})
    layout = plot_layout(380, xaxis, bytes_axis("bytes held"), hovermode="x unified", **phase_markers(begun, ends))
    layout["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    peak = max(range(len(moments)), key=lambda number: moments[number].total)
    label = (
        f"Memory over a step: {format_bytes(moments[0].total)} at its start, at most "
        f"{format_bytes(moments[peak].total)}"
    )
    label += f" in {moments[peak].label}, after {at[peak]:.3g} ms."
    most = {kind: max(part.get(kind, 0.0) for part in parts) for kind in kinds}
    rows = [
        [kind, *map(format_bytes, (parts[0].get(kind, 0.0), most[kind], parts[peak].get(kind, 0.0)))] for kind in kinds
    ]
    rows.append(
        [
            "together",
            format_bytes(moments[0].total),
            format_bytes(moments[peak].total),
            format_bytes(moments[peak].total),
        ]
    )
    columns = ["", "at the start", "at most", "at the fullest moment"]
    return Chart(
        "timeline", label, {"data": data, "layout": layout}, columns, rows, [(k, kind_color(k)) for k in kinds]
    )


def micro_batch_chart(traced_model: TracedModel, chosen: Plan) -> Chart:
    """Draw what a device needs at every micro-batch, for each checkpointing, against what it has."""
    machine, kinds = chosen.machine, CHECKPOINT_MODES if traced_model.has_blocks else CHECKPOINT_MODES[:1]
    found = {
        CHECKPOINT_LINES[kind]: _bytes_by_micro_batch(traced_model, chosen, kind)
        for kind in kinds
        if kind != "host" or machine.kind == "cuda"
    }
    data = [
        line_trace(list(points), list(points.values()), name, f"var(--{colour})", 2.2)
        | {"mode": "lines+markers", "hovertemplate": "%{y:.3~s}B"}
        for (name, colour), points in found.items()
    ]
    sizes = sorted({micro for points in found.values() for micro in points})
    xaxis = plot_axis("micro-batch", type="log", tickvals=sizes, unifiedhovertitle={"text": "micro-batch %{x}"})
    layout = plot_layout(320, xaxis, bytes_axis("bytes of a device"), hovermode="x unified")
    layout["shapes"] = [_limit_line(y=machine.memory)]
    legend = [(name, f"var(--{colour})") for name, colour in found]
    label = (
        f"Memory that a device needs by micro-batch, from {sizes[0]} to {sizes[-1]}; it has "
        f"{format_bytes(machine.memory)}."
    )
    rows = [
        [str(micro), *(format_bytes(points[micro]) if micro in points else "" for points in found.values())]
        for micro in sizes
    ]
    columns = ["micro-batch", *(name for name, _ in found)]
    legend.append((f"what a device has, {format_bytes(machine.memory)}", LIMIT_COLOR))
    return Chart("batches", label, {"data": data, "layout": layout}, columns, rows, legend)


def _bytes_by_micro_batch(traced_model: TracedModel, chosen: Plan, checkpoint: CheckpointMode) -> dict[int, float]:
    """Bytes by micro-batch, around the chosen one, until it does not fit."""
    points: dict[int, float] = {}
    micro, machine = chosen.strategy.micro_batch, chosen.machine
    for tried in sorted(
        {max(1, micro >> down) for down in range(MAX_HALVINGS + 1)} | {micro << up for up in range(MAX_DOUBLINGS + 1)}
    ):
        choice = replace(chosen.strategy, checkpoint=checkpoint, micro_batch=tried)
        points[tried] = device_bytes_needed(traced_model.footprint(choice, chosen.devices, machine), machine)
        if points[tried] > machine.memory and tried > micro:
            break
    return points


# ------------------------------------------------------------------------------------------------ time


def step_time_chart(plans: Sequence[Plan], chosen: Plan) -> Chart | None:
    """Draw what a step's time goes to; a sample's, where steps are of different batches."""
    some = [plan for plan in plans if plan.fits][:MAX_BARS]
    if not some:
        return None
    each = [samples_per_step(plan) if needs_time_per_sample(plans) else 1.0 for plan in some]
    spent = []
    for plan, count in zip(some, each, strict=True):
        parts = {name: max(0.0, getattr(plan.step_time, name)) / count for name in TIME_PARTS}
        spent.append(parts | {"rest": max(0.0, plan.step_time.step / count - sum(parts.values()))})
    names = [escape(short_label(plan.strategy)) + (", chosen" if plan is chosen else "") for plan in some]
    kinds = [kind for kind in TIME_LABELS if any(parts[kind] > 1e-3 * sum(parts.values()) for parts in spent)]
    data = [
        bar_trace(
            names, [parts[kind] for parts in spent], TIME_LABELS[kind][0], f"var(--{TIME_LABELS[kind][1]})", unit="s"
        )
        for kind in kinds
    ]
    layout = stacked_bar_layout(
        names, [plan.step_time.step / count for plan, count in zip(some, each, strict=True)], format_seconds
    )
    for note, plan, count in zip(layout["annotations"], some, each, strict=True):
        note["text"] = (
            f"<b>{format_seconds(plan.step_time.step / count)}</b> {note['y']}"  # names are long: the figure first
        )
    of = "a sample" if needs_time_per_sample(plans) else "a step"
    label = f"Time of {of}: " + "; ".join(
        f"{plan.strategy.description} {format_seconds(plan.step_time.step / count)}"
        for plan, count in zip(some, each, strict=True)
    )
    rows = [
        [
            plan.strategy.description,
            *(format_seconds(parts[kind]) for kind in kinds),
            format_seconds(plan.step_time.step / count),
        ]
        for plan, parts, count in zip(some, spent, each, strict=True)
    ]
    legend = [(TIME_LABELS[kind][0], f"var(--{TIME_LABELS[kind][1]})") for kind in kinds]
    columns = ["", *(TIME_LABELS[kind][0] for kind in kinds), "together"]
    return Chart("times", label + ".", {"data": data, "layout": layout}, columns, rows, legend)


def samples_per_step(plan: Plan) -> float:
    """Samples of a step over all devices."""
    return plan.samples_per_second * plan.step_time.step


def needs_time_per_sample(plans: Sequence[Plan]) -> bool:
    """Whether steps are of different batches, and so only the time of a sample can be compared."""
    return len({round(samples_per_step(plan)) for plan in plans if plan.fits}) > 1
