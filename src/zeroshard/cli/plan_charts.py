"""Draw the charts of a plan. Colors are named as in :mod:`zeroshard.page.chart`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape

from zeroshard.cli.plan_text import format_seconds, short_label
from zeroshard.config.offload import Offload
from zeroshard.page import (
    BYTES_FORMAT,
    Chart,
    JsonObject,
    bar_rows,
    bytes_axis,
    line_trace,
    memory_over_time,
    plot_axis,
    plot_layout,
    stacked_bars,
)
from zeroshard.planner import CHECKPOINT_MODES, CheckpointMode, Plan, Strategy
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
TIME_LABELS = {  # label and color of each part of a step, in stacking order
    "compute": ("computing", "training"),
    "tensor": ("tensor collectives", "held"),
    "launch": ("waiting for the host to launch", "staging"),
    "gather": ("waiting for all-gathers", "parameters"),
    "reduce": ("waiting for reductions", "gradients"),
    "update": ("updating, or waiting for updates", "optimizer-states"),
    "average": ("averaging replicas", "master-weights"),
    "rest": ("everything else", "other"),
}
CHECKPOINT_LINES: dict[CheckpointMode, tuple[str, str]] = {
    "none": ("all activations kept", "training"),
    "recompute": ("recomputed", "gradients"),
    "host": ("recomputed, inputs on the host", "optimizer-states"),
}
MAX_BARS = 12  # the most plans in a chart
MAX_HALVINGS, MAX_DOUBLINGS = 4, 3  # of the chosen micro-batch, in micro_batch_chart
LIMIT_COLOR = "var(--bad)"  # the memory of a device


def _color(name: str) -> str:
    return f"var(--{name})"


def _colors(kinds: Iterable[str]) -> dict[str, str]:
    return {kind: _color(KIND_COLORS[kind]) for kind in kinds}


def bytes_by_kind(usage: Mapping[str, float], states: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes in use at a point in time by kind, with states split by kind and small kinds merged.

    >>> bytes_by_kind({"states": 2.0, "inputs": 1.0, "libraries": 2.0}, {"parameters": 2, "gradients": 4})
    {'parameters': 2.0, 'other': 3.0}
    """
    totals = {kind: float(nbytes) for kind, nbytes in states.items() if kind != "gradients"}
    for kind, nbytes in usage.items():
        if kind != "states":
            shown_kind = kind if kind in KIND_COLORS else OTHER_KIND
            totals[shown_kind] = totals.get(shown_kind, 0.0) + nbytes
    return {kind: totals[kind] for kind in KIND_COLORS if totals.get(kind)}


# ------------------------------------------------------------------------------------------------ memory


def stages_chart(chosen: Plan) -> Chart:
    """Draw the memory that a device needs in every stage, otherwise as chosen, against what it has."""
    plans = [chosen.with_strategy(strategy) for strategy in _strategies_by_stage(chosen)]
    usages = [
        bytes_by_kind(plan.footprint.peak.by_kind, plan.footprint.states)
        | {RUNTIME_KIND: plan.memory - plan.footprint.peak.total}
        for plan in plans
    ]
    names = [
        f"stage {plan.strategy.stage}" + (", chosen" if plan.strategy == chosen.strategy else "") for plan in plans
    ]
    bars = list(zip(names, usages, strict=True))
    colors = _colors(kind for kind in KIND_COLORS if any(by_kind.get(kind) for by_kind in usages))
    capacity = chosen.machine.memory
    figure = stacked_bars(bars, colors, min_axis_end=1.01 * capacity)
    figure["layout"]["shapes"] = [_limit_line(x=capacity)]
    needs = ", ".join(f"stage {plan.strategy.stage} {format_bytes(plan.memory)}" for plan in plans)
    label = f"Memory that a device needs: {needs}; it has {format_bytes(capacity)}."
    legend = [*colors.items(), _limit_legend(capacity)]
    return Chart("stages", label, figure, ["", *colors, "total"], bar_rows(bars, colors), legend)


def _strategies_by_stage(chosen: Plan) -> list[Strategy]:
    """Return the chosen strategy in every stage; stages that cannot offload parameters keep them on the device."""
    strategy, strategies = chosen.strategy, []
    if chosen.devices == strategy.tensor:  # one data-parallel rank: nothing is partitioned, all stages are the same
        return [strategy]
    for stage in STAGES:
        offload = strategy.offload
        if stage != strategy.stage and offload is not None and offload.parameters and stage < 3:
            offload = Offload.from_option(replace(offload, parameters="device"))
        strategies.append(replace(strategy, stage=stage, offload=offload))
    return strategies


def _limit_line(**at: float) -> JsonObject:
    """Return a line across the plot at the memory of a device."""
    value = next(iter(at.values()))
    coordinates = {"xref": "x", "yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 1}
    if "y" in at:
        coordinates = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"type": "line", **coordinates, "line": {"color": LIMIT_COLOR, "width": 2, "dash": "dash"}}


def _limit_legend(capacity: float) -> tuple[str, str]:
    return f"memory of a device, {format_bytes(capacity)}", LIMIT_COLOR


def timeline_chart(chosen: Plan) -> Chart:
    """Draw the memory in use on a device over one forward, backward and step, stacked by kind."""
    plan = chosen.with_strategy(chosen.strategy, timeline=True)
    usages, cost = plan.footprint.timeline, plan.traced_model.trace_and_cost(plan.strategy, plan.machine).cost
    starts_ms = [0.0]  # of each memory usage; the step starts at the end of the spans
    for span in cost.device_seconds:
        starts_ms.append(starts_ms[-1] + 1000 * span)
    end_ms = starts_ms[-1] + 1000 * max(plan.step_time.update, 0.02 * plan.step_time.step)
    parts = [bytes_by_kind(usage.by_kind, plan.footprint.states) for usage in usages]
    kinds = [kind for kind in KIND_COLORS if any(part.get(kind) for part in parts)]
    memory = {kind: [part.get(kind, 0.0) for part in [*parts, parts[-1]]] for kind in kinds}
    phases = [("forward", 0.0)]
    backward_start = next((start for start, span in zip(starts_ms, cost.spans, strict=False) if span.is_backward), None)
    phases += [("backward", backward_start / 1000)] if backward_start is not None else []
    phases.append(("step", starts_ms[-1] / 1000))
    peak = max(range(len(usages)), key=lambda number: usages[number].total)
    label = (
        f"Memory over a step: {format_bytes(usages[0].total)} at its start, at most "
        f"{format_bytes(usages[peak].total)} in {usages[peak].label}, after {starts_ms[peak]:.3g} ms."
    )
    return memory_over_time(
        label, [*starts_ms, end_ms], memory, _colors(kinds), phases=phases, time_title="milliseconds of computation"
    )


def micro_batch_chart(chosen: Plan) -> Chart:
    """Draw the memory that a device needs by micro-batch and checkpoint mode, against what it has."""
    capacity, modes = chosen.machine.memory, CHECKPOINT_MODES if chosen.traced_model.has_blocks else ("none",)
    lines = {
        CHECKPOINT_LINES[mode]: _bytes_by_micro_batch(chosen, mode)
        for mode in modes
        if mode != "host" or not chosen.machine.is_cpu
    }
    data = [
        line_trace(list(points), list(points.values()), name, _color(color), 2.2, BYTES_FORMAT)
        | {"mode": "lines+markers"}
        for (name, color), points in lines.items()
    ]
    sizes = sorted({micro_batch for points in lines.values() for micro_batch in points})
    xaxis = plot_axis("micro-batch", type="log", tickvals=sizes, unifiedhovertitle={"text": "micro-batch %{x}"})
    layout = plot_layout(320, xaxis, bytes_axis("bytes per device"), hovermode="x unified")
    layout["shapes"] = [_limit_line(y=capacity)]
    rows = [
        [str(size), *(format_bytes(points[size]) if size in points else "" for points in lines.values())]
        for size in sizes
    ]
    return Chart(
        "batches",
        f"Memory that a device needs by micro-batch, from {sizes[0]} to {sizes[-1]}; it has {format_bytes(capacity)}.",
        {"data": data, "layout": layout},
        ["micro-batch", *(name for name, _ in lines)],
        rows,
        [*((name, _color(color)) for name, color in lines), _limit_legend(capacity)],
    )


def _bytes_by_micro_batch(chosen: Plan, checkpoint: CheckpointMode) -> dict[int, float]:
    """Return device bytes by micro-batch, around the chosen one, up to the first larger one that does not fit."""
    points: dict[int, float] = {}
    micro_batch = chosen.strategy.micro_batch
    smaller = {max(1, micro_batch >> halvings) for halvings in range(MAX_HALVINGS + 1)}
    for candidate in sorted(smaller | {micro_batch << doublings for doublings in range(MAX_DOUBLINGS + 1)}):
        strategy = replace(chosen.strategy, checkpoint=checkpoint, micro_batch=candidate)
        points[candidate] = chosen.with_strategy(strategy).memory
        if points[candidate] > chosen.machine.memory and candidate > micro_batch:
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
    is_per_sample = needs_time_per_sample(plans)
    times, totals = [], []
    for plan in fitting:
        divisor = plan.batch if is_per_sample else 1
        totals.append(plan.step_time.step / divisor)
        parts = {name: max(0.0, getattr(plan.step_time, name)) / divisor for name in TIME_LABELS if name != "rest"}
        parts["rest"] = max(0.0, totals[-1] - sum(parts.values()))
        times.append({TIME_LABELS[name][0]: seconds for name, seconds in parts.items()})
    colors = {
        label: _color(color)
        for label, color in TIME_LABELS.values()
        if any(parts[label] > 1e-3 * sum(parts.values()) for parts in times)
    }
    names = [escape(short_label(plan.strategy)) + (", chosen" if plan is chosen else "") for plan in fitting]
    descriptions = [plan.strategy.description for plan in fitting]
    figure = stacked_bars(list(zip(names, times, strict=True)), colors, format_value=format_seconds, unit="s")
    for annotation, total in zip(figure["layout"]["annotations"], totals, strict=True):
        # The time comes first, because names are long.
        annotation["text"] = f"<b>{format_seconds(total)}</b> {annotation['y']}"
    described = "; ".join(f"{name} {format_seconds(total)}" for name, total in zip(descriptions, totals, strict=True))
    label = f"Time of {'a sample' if is_per_sample else 'a step'}: {described}."
    rows = bar_rows(list(zip(descriptions, times, strict=True)), colors, format_seconds)
    return Chart("times", label, figure, ["", *colors, "total"], rows, list(colors.items()))


def needs_time_per_sample(plans: Sequence[Plan]) -> bool:
    """Return whether batch sizes differ, so that only the time per sample can be compared."""
    return len({plan.batch for plan in plans if plan.fits}) > 1
