"""Draw the charts of a plan. Colors are named as in :mod:`zeroshard.page.chart`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from zeroshard.config.offload import Offload
from zeroshard.page import (
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
from zeroshard.utils.format import format_bytes

STAGES = (0, 1, 2, 3)
OTHER_KIND, RUNTIME_KIND = "other", "runtime and allocator"
KIND_COLORS = {  # kinds of memory in stacking order
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
MAX_BARS = 12  # the most plans in a chart
MAX_HALVINGS, MAX_DOUBLINGS = 4, 3  # of the chosen micro-batch, in micro_batch_chart
LIMIT_COLOR = "var(--bad)"  # the memory of a device


def kind_color(kind: str) -> str:
    """Return the CSS variable of a kind's color."""
    return f"var(--{KIND_COLORS[kind]})"


def bytes_by_kind(moment: MemoryUsage, states: dict[str, int]) -> dict[str, float]:
    """Return the bytes in use at a point in time by kind, with states split by kind and small kinds merged.

    >>> usage = MemoryUsage("head", {"states": 2.0, "inputs": 1.0, "libraries": 2.0})
    >>> bytes_by_kind(usage, {"parameters": 2, "gradients": 4})
    {'parameters': 2.0, 'other': 3.0}
    """
    totals = {kind: float(nbytes) for kind, nbytes in states.items() if kind != "gradients"}
    for kind, nbytes in moment.by_kind.items():
        if kind != "states":
            shown_kind = kind if kind in KIND_COLORS else OTHER_KIND
            totals[shown_kind] = totals.get(shown_kind, 0.0) + nbytes
    return {kind: totals[kind] for kind in KIND_COLORS if totals.get(kind)}


# ------------------------------------------------------------------------------------------------ memory


def stages_chart(traced_model: TracedModel, chosen: Plan) -> Chart:
    """Draw the memory that a device needs in every stage, otherwise as chosen, against what it has."""
    machine = chosen.machine
    # With one data-parallel rank nothing is partitioned, and all stages are the same.
    is_single_rank = chosen.devices == chosen.strategy.tensor
    plans = [
        evaluate_strategy(traced_model, strategy, chosen.devices, machine)
        for strategy in _strategies_by_stage(chosen.strategy, is_single_rank)
    ]
    usages = []
    for plan in plans:
        by_kind = bytes_by_kind(plan.footprint.peak, plan.footprint.states)
        usages.append(by_kind | {RUNTIME_KIND: plan.memory - plan.footprint.peak.total})
    names = [
        f"stage {plan.strategy.stage}" + (", chosen" if plan.strategy == chosen.strategy else "") for plan in plans
    ]
    kinds = [kind for kind in KIND_COLORS if any(by_kind.get(kind) for by_kind in usages)]
    data = [bar_trace(names, [by_kind.get(kind, 0.0) for by_kind in usages], kind, kind_color(kind)) for kind in kinds]
    layout = stacked_bar_layout(names, [plan.memory for plan in plans], min_axis_end=1.01 * machine.memory)
    layout["shapes"] = [_limit_line(x=machine.memory)]
    label = "Memory that a device needs: " + ", ".join(
        f"stage {plan.strategy.stage} {format_bytes(plan.memory)}" for plan in plans
    )
    rows = [
        [name, *(format_bytes(by_kind.get(kind, 0.0)) for kind in kinds), format_bytes(plan.memory)]
        for name, by_kind, plan in zip(names, usages, plans, strict=True)
    ]
    legend = [
        *((kind, kind_color(kind)) for kind in kinds),
        (f"what a device has, {format_bytes(machine.memory)}", LIMIT_COLOR),
    ]
    label += f"; it has {format_bytes(machine.memory)}."
    return Chart("stages", label, {"data": data, "layout": layout}, ["", *kinds, "together"], rows, legend)


def _strategies_by_stage(strategy: Strategy, is_single_rank: bool) -> list[Strategy]:
    """Return the strategy in every stage; stages that cannot offload parameters keep them on the device."""
    strategies = []
    for stage in STAGES:
        offload = strategy.offload
        if stage != strategy.stage and offload is not None and offload.parameters:
            offload = Offload.from_option(replace(offload, parameters="device")) if stage < 3 else offload
        if stage == strategy.stage or not is_single_rank:
            strategies.append(replace(strategy, stage=stage, offload=offload))
    return strategies


def _limit_line(**at: float) -> JsonObject:
    """Return a line across the plot at the memory of a device."""
    value = next(iter(at.values()))
    coordinates = {"xref": "x", "yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 1}
    if "y" in at:
        coordinates = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"type": "line", **coordinates, "line": {"color": LIMIT_COLOR, "width": 2, "dash": "dash"}}


def timeline_chart(traced_model: TracedModel, chosen: Plan) -> Chart:
    """Draw the memory in use on a device over one forward, backward and step, stacked by kind."""
    plan = evaluate_strategy(traced_model, chosen.strategy, chosen.devices, chosen.machine, timeline=True)
    usages, cost = plan.footprint.timeline, traced_model.trace_and_cost(chosen.strategy, chosen.machine).cost
    starts_ms = [0.0]  # of each memory usage; the step starts at the end of the spans
    for span in cost.device_seconds:
        starts_ms.append(starts_ms[-1] + 1000 * span)
    end_ms = starts_ms[-1] + 1000 * max(plan.step_time.update, 0.02 * plan.step_time.step)
    parts = [bytes_by_kind(usage, plan.footprint.states) for usage in usages]
    kinds = [kind for kind in KIND_COLORS if any(part.get(kind) for part in parts)]
    data = []
    for kind in kinds:
        values = [part.get(kind, 0.0) for part in parts]
        area = line_trace([*starts_ms, end_ms], [*values, values[-1]], escape(kind), kind_color(kind), 0)
        area["line"]["shape"] = "hv"  # memory is allocated and freed instantly
        data.append(area | {"stackgroup": "held", "fillcolor": kind_color(kind), "hovertemplate": "%{y:.3~s}B"})
    phases = [("forward", 0.0)]
    backward_start = next((start for start, span in zip(starts_ms, cost.spans, strict=False) if span.is_backward), None)
    phases += [("backward", backward_start / 1000)] if backward_start is not None else []
    phases.append(("step", starts_ms[-1] / 1000))
    xaxis = plot_axis("milliseconds of computation", range=[0, end_ms], unifiedhovertitle={"text": "%{x:.3~g} ms"})
    layout = plot_layout(380, xaxis, bytes_axis("bytes held"), hovermode="x unified", **phase_markers(phases, end_ms))
    layout["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    peak = max(range(len(usages)), key=lambda number: usages[number].total)
    label = (
        f"Memory over a step: {format_bytes(usages[0].total)} at its start, at most {format_bytes(usages[peak].total)}"
    )
    label += f" in {usages[peak].label}, after {starts_ms[peak]:.3g} ms."
    peak_by_kind = {kind: max(part.get(kind, 0.0) for part in parts) for kind in kinds}
    rows = [
        [kind, *map(format_bytes, (parts[0].get(kind, 0.0), peak_by_kind[kind], parts[peak].get(kind, 0.0)))]
        for kind in kinds
    ]
    rows.append(
        [
            "together",
            format_bytes(usages[0].total),
            format_bytes(usages[peak].total),
            format_bytes(usages[peak].total),
        ]
    )
    columns = ["", "at the start", "at most", "at the fullest moment"]
    return Chart(
        "timeline", label, {"data": data, "layout": layout}, columns, rows, [(k, kind_color(k)) for k in kinds]
    )


def micro_batch_chart(traced_model: TracedModel, chosen: Plan) -> Chart:
    """Draw the memory that a device needs by micro-batch and checkpoint mode, against what it has."""
    machine, modes = chosen.machine, CHECKPOINT_MODES if traced_model.has_blocks else CHECKPOINT_MODES[:1]
    lines = {
        CHECKPOINT_LINES[mode]: _bytes_by_micro_batch(traced_model, chosen, mode)
        for mode in modes
        if mode != "host" or machine.kind == "cuda"
    }
    data = [
        line_trace(list(points), list(points.values()), name, f"var(--{color})", 2.2)
        | {"mode": "lines+markers", "hovertemplate": "%{y:.3~s}B"}
        for (name, color), points in lines.items()
    ]
    sizes = sorted({micro_batch for points in lines.values() for micro_batch in points})
    xaxis = plot_axis("micro-batch", type="log", tickvals=sizes, unifiedhovertitle={"text": "micro-batch %{x}"})
    layout = plot_layout(320, xaxis, bytes_axis("bytes of a device"), hovermode="x unified")
    layout["shapes"] = [_limit_line(y=machine.memory)]
    legend = [(name, f"var(--{color})") for name, color in lines]
    label = (
        f"Memory that a device needs by micro-batch, from {sizes[0]} to {sizes[-1]}; it has "
        f"{format_bytes(machine.memory)}."
    )
    rows = [
        [
            str(micro_batch),
            *(format_bytes(points[micro_batch]) if micro_batch in points else "" for points in lines.values()),
        ]
        for micro_batch in sizes
    ]
    columns = ["micro-batch", *(name for name, _ in lines)]
    legend.append((f"what a device has, {format_bytes(machine.memory)}", LIMIT_COLOR))
    return Chart("batches", label, {"data": data, "layout": layout}, columns, rows, legend)


def _bytes_by_micro_batch(traced_model: TracedModel, chosen: Plan, checkpoint: CheckpointMode) -> dict[int, float]:
    """Return device bytes by micro-batch, around the chosen one, up to the first larger one that does not fit."""
    points: dict[int, float] = {}
    micro_batch, machine = chosen.strategy.micro_batch, chosen.machine
    for candidate in sorted(
        {max(1, micro_batch >> down) for down in range(MAX_HALVINGS + 1)}
        | {micro_batch << up for up in range(MAX_DOUBLINGS + 1)}
    ):
        strategy = replace(chosen.strategy, checkpoint=checkpoint, micro_batch=candidate)
        points[candidate] = device_bytes_needed(traced_model.footprint(strategy, chosen.devices, machine), machine)
        if points[candidate] > machine.memory and candidate > micro_batch:
            break
    return points


# ------------------------------------------------------------------------------------------------ time


def step_time_chart(plans: Sequence[Plan], chosen: Plan) -> Chart | None:
    """Draw the parts of the step time, or of the time per sample if the plans have different batch sizes.

    Return None if no plan fits.
    """
    fitting = [plan for plan in plans if plan.fits][:MAX_BARS]
    if not fitting:
        return None
    divisors = [samples_per_step(plan) if needs_time_per_sample(plans) else 1.0 for plan in fitting]
    times = []
    for plan, divisor in zip(fitting, divisors, strict=True):
        parts = {name: max(0.0, getattr(plan.step_time, name)) / divisor for name in TIME_PARTS}
        times.append(parts | {"rest": max(0.0, plan.step_time.step / divisor - sum(parts.values()))})
    names = [escape(short_label(plan.strategy)) + (", chosen" if plan is chosen else "") for plan in fitting]
    kinds = [kind for kind in TIME_LABELS if any(parts[kind] > 1e-3 * sum(parts.values()) for parts in times)]
    data = [
        bar_trace(
            names, [parts[kind] for parts in times], TIME_LABELS[kind][0], f"var(--{TIME_LABELS[kind][1]})", unit="s"
        )
        for kind in kinds
    ]
    layout = stacked_bar_layout(
        names, [plan.step_time.step / divisor for plan, divisor in zip(fitting, divisors, strict=True)], format_seconds
    )
    for annotation, plan, divisor in zip(layout["annotations"], fitting, divisors, strict=True):
        # The time comes first, because names are long.
        annotation["text"] = f"<b>{format_seconds(plan.step_time.step / divisor)}</b> {annotation['y']}"
    scope = "a sample" if needs_time_per_sample(plans) else "a step"
    label = f"Time of {scope}: " + "; ".join(
        f"{plan.strategy.description} {format_seconds(plan.step_time.step / divisor)}"
        for plan, divisor in zip(fitting, divisors, strict=True)
    )
    rows = [
        [
            plan.strategy.description,
            *(format_seconds(parts[kind]) for kind in kinds),
            format_seconds(plan.step_time.step / divisor),
        ]
        for plan, parts, divisor in zip(fitting, times, divisors, strict=True)
    ]
    legend = [(TIME_LABELS[kind][0], f"var(--{TIME_LABELS[kind][1]})") for kind in kinds]
    columns = ["", *(TIME_LABELS[kind][0] for kind in kinds), "together"]
    return Chart("times", label + ".", {"data": data, "layout": layout}, columns, rows, legend)


def samples_per_step(plan: Plan) -> float:
    """Return the samples per step over all devices."""
    return plan.samples_per_second * plan.step_time.step


def needs_time_per_sample(plans: Sequence[Plan]) -> bool:
    """Return whether batch sizes differ, so that only the time per sample can be compared."""
    return len({round(samples_per_step(plan)) for plan in plans if plan.fits}) > 1
