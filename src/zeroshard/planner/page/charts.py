"""Charts: the pictures of a plan. Colours are named as in :mod:`zeroshard.page.chart`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from zeroshard.memory.report import size
from zeroshard.offload import Offload
from zeroshard.page.chart import Chart, Record, axis, bar, bars, bytes_axis, frame, line, phases
from zeroshard.planner.choice import Choice
from zeroshard.planner.footprint import Moment
from zeroshard.planner.fullness import needed
from zeroshard.planner.plan import Plan, consider
from zeroshard.planner.record import PARTS
from zeroshard.planner.subject import Subject
from zeroshard.planner.table import seconds, shortly
from zeroshard.planner.traces.tracing import CHECKPOINTS, Checkpoint

STAGES = (0, 1, 2, 3)
OTHER, RUNTIME = "other", "runtime and allocator"
HUES = {  # kinds in the order they are stacked
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
    OTHER: "staging",
    RUNTIME: "other",
}
TIMES = {
    "compute": ("computing", "training"),
    "tensor": ("tensor collectives", "held"),
    "launch": ("waiting for the host to launch", "staging"),
    "gather": ("waiting for gathers", "parameters"),
    "reduce": ("waiting for reductions", "gradients"),
    "update": ("updating, or waiting for it", "optimizer-states"),
    "rest": ("all else", "other"),
}
LINES: dict[Checkpoint, tuple[str, str]] = {
    "none": ("all activations kept", "training"),
    "recompute": ("recomputed", "gradients"),
    "host": ("recomputed, inputs on the host", "optimizer-states"),
}
BARS = 12  # most plans that are drawn
BELOW, ABOVE = 4, 3  # how often the chosen micro-batch is halved and doubled
LIMIT = "var(--bad)"  # a device's memory


def hue(kind: str) -> str:
    """The custom property of a kind's colour."""
    return f"var(--{HUES[kind]})"


def by_kind(moment: Moment, states: dict[str, int]) -> dict[str, float]:
    """What is held at a moment, with the states by kind, and small kinds in one.

    >>> by_kind(Moment("head", {"states": 2.0, "inputs": 1.0, "libraries": 2.0}), {"parameters": 2, "gradients": 4})
    {'parameters': 2.0, 'other': 3.0}
    """
    found = {kind: float(nbytes) for kind, nbytes in states.items() if kind != "gradients"}
    for kind, nbytes in moment.held.items():
        if kind != "states":
            known = kind if kind in HUES else OTHER
            found[known] = found.get(known, 0.0) + nbytes
    return {kind: found[kind] for kind in HUES if found.get(kind)}


# ------------------------------------------------------------------------------------------------ memory


def stages(subject: Subject, chosen: Plan) -> Chart:
    """Draw what a device needs in every stage, all else as chosen, against what it has."""
    machine = chosen.machine
    alone = chosen.devices == chosen.choice.tensor  # then there is nothing to partition, and all stages are one
    some = [consider(subject, choice, chosen.devices, machine) for choice in _in_stages(chosen.choice, alone)]
    held = []
    for plan in some:
        parts = by_kind(plan.footprint.peak, plan.footprint.states)
        held.append(parts | {RUNTIME: plan.memory - plan.footprint.peak.total})
    names = [f"stage {plan.choice.stage}" + (", chosen" if plan.choice == chosen.choice else "") for plan in some]
    kinds = [kind for kind in HUES if any(parts.get(kind) for parts in held)]
    data = [bar(names, [parts.get(kind, 0.0) for parts in held], kind, hue(kind)) for kind in kinds]
    layout = bars(names, [plan.memory for plan in some], most=1.01 * machine.memory)
    layout["shapes"] = [_limit(x=machine.memory)]
    label = "Memory that a device needs: " + ", ".join(
        f"stage {plan.choice.stage} {size(plan.memory)}" for plan in some
    )
    rows = [
        [name, *(size(parts.get(kind, 0.0)) for kind in kinds), size(plan.memory)]
        for name, parts, plan in zip(names, held, some, strict=True)
    ]
    legend = [*((kind, hue(kind)) for kind in kinds), (f"what a device has, {size(machine.memory)}", LIMIT)]
    label += f"; it has {size(machine.memory)}."
    return Chart("stages", label, {"data": data, "layout": layout}, ["", *kinds, "together"], rows, legend)


def _in_stages(choice: Choice, alone: bool) -> list[Choice]:
    """The choice in every stage; where a stage cannot keep parameters outside the device, without that."""
    found = []
    for stage in STAGES:
        offload = choice.offload
        if stage != choice.stage and offload is not None and offload.parameters:
            offload = Offload.of(replace(offload, parameters="device")) if stage < 3 else offload
        if stage == choice.stage or not alone:
            found.append(replace(choice, stage=stage, offload=offload))
    return found


def _limit(**at: float) -> Record:
    """A line at what a device has, across the plot."""
    value = next(iter(at.values()))
    across = {"xref": "x", "yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 1}
    if "y" in at:
        across = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"type": "line", **across, "line": {"color": LIMIT, "width": 2, "dash": "dash"}}


def timeline(subject: Subject, chosen: Plan) -> Chart:
    """Draw what a device holds over one forward, backward and step, stacked by kind."""
    plan = consider(subject, chosen.choice, chosen.devices, chosen.machine, timeline=True)
    moments, work = plan.footprint.timeline, subject.traced(chosen.choice, chosen.machine).work
    at = [0.0]  # milliseconds at which each moment begins; the step's at the end of the spans
    for span in work.device:
        at.append(at[-1] + 1000 * span)
    ends = at[-1] + 1000 * max(plan.pace.update, 0.02 * plan.pace.step)
    parts = [by_kind(moment, plan.footprint.states) for moment in moments]
    kinds = [kind for kind in HUES if any(part.get(kind) for part in parts)]
    data = []
    for kind in kinds:
        values = [part.get(kind, 0.0) for part in parts]
        area = line([*at, ends], [*values, values[-1]], escape(kind), hue(kind), 0)
        area["line"]["shape"] = "hv"  # memory is taken and given back at once
        data.append(area | {"stackgroup": "held", "fillcolor": hue(kind), "hovertemplate": "%{y:.3~s}B"})
    begun = [("forward", 0.0)]
    turn = next((begin for begin, span in zip(at, work.spans, strict=False) if span.backward), None)
    begun += [("backward", turn / 1000)] if turn is not None else []
    begun.append(("step", at[-1] / 1000))
    xaxis = axis("milliseconds of computation", range=[0, ends], unifiedhovertitle={"text": "%{x:.3~g} ms"})
    layout = frame(380, xaxis, bytes_axis("bytes held"), hovermode="x unified", **phases(begun, ends))
    layout["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    peak = max(range(len(moments)), key=lambda number: moments[number].total)
    label = f"Memory over a step: {size(moments[0].total)} at its start, at most {size(moments[peak].total)}"
    label += f" in {moments[peak].what}, after {at[peak]:.3g} ms."
    most = {kind: max(part.get(kind, 0.0) for part in parts) for kind in kinds}
    rows = [[kind, *map(size, (parts[0].get(kind, 0.0), most[kind], parts[peak].get(kind, 0.0)))] for kind in kinds]
    rows.append(["together", size(moments[0].total), size(moments[peak].total), size(moments[peak].total)])
    columns = ["", "at the start", "at most", "at the fullest moment"]
    return Chart("timeline", label, {"data": data, "layout": layout}, columns, rows, [(k, hue(k)) for k in kinds])


def batches(subject: Subject, chosen: Plan) -> Chart:
    """Draw what a device needs at every micro-batch, for each checkpointing, against what it has."""
    machine, kinds = chosen.machine, CHECKPOINTS if subject.has_blocks else CHECKPOINTS[:1]
    found = {LINES[kind]: _growing(subject, chosen, kind) for kind in kinds if kind != "host" or machine.kind == "cuda"}
    data = [
        line(list(points), list(points.values()), name, f"var(--{colour})", 2.2)
        | {"mode": "lines+markers", "hovertemplate": "%{y:.3~s}B"}
        for (name, colour), points in found.items()
    ]
    sizes = sorted({micro for points in found.values() for micro in points})
    xaxis = axis("micro-batch", type="log", tickvals=sizes, unifiedhovertitle={"text": "micro-batch %{x}"})
    layout = frame(320, xaxis, bytes_axis("bytes of a device"), hovermode="x unified")
    layout["shapes"] = [_limit(y=machine.memory)]
    legend = [(name, f"var(--{colour})") for name, colour in found]
    label = f"Memory that a device needs by micro-batch, from {sizes[0]} to {sizes[-1]}; it has {size(machine.memory)}."
    rows = [
        [str(micro), *(size(points[micro]) if micro in points else "" for points in found.values())] for micro in sizes
    ]
    columns = ["micro-batch", *(name for name, _ in found)]
    legend.append((f"what a device has, {size(machine.memory)}", LIMIT))
    return Chart("batches", label, {"data": data, "layout": layout}, columns, rows, legend)


def _growing(subject: Subject, chosen: Plan, checkpoint: Checkpoint) -> dict[int, float]:
    """Bytes by micro-batch, around the chosen one, until it does not fit."""
    points: dict[int, float] = {}
    micro, machine = chosen.choice.micro_batch, chosen.machine
    for tried in sorted(
        {max(1, micro >> down) for down in range(BELOW + 1)} | {micro << up for up in range(ABOVE + 1)}
    ):
        choice = replace(chosen.choice, checkpoint=checkpoint, micro_batch=tried)
        points[tried] = needed(subject.footprint(choice, chosen.devices, machine), machine)
        if points[tried] > machine.memory and tried > micro:
            break
    return points


# ------------------------------------------------------------------------------------------------ time


def times(plans: Sequence[Plan], chosen: Plan) -> Chart | None:
    """Draw what a step's time goes to; a sample's, where steps are of different batches."""
    some = [plan for plan in plans if plan.fits][:BARS]
    if not some:
        return None
    each = [samples(plan) if per_sample(plans) else 1.0 for plan in some]
    spent = []
    for plan, count in zip(some, each, strict=True):
        parts = {name: max(0.0, getattr(plan.pace, name)) / count for name in PARTS}
        spent.append(parts | {"rest": max(0.0, plan.pace.step / count - sum(parts.values()))})
    names = [escape(shortly(plan.choice)) + (", chosen" if plan is chosen else "") for plan in some]
    kinds = [kind for kind in TIMES if any(parts[kind] > 1e-3 * sum(parts.values()) for parts in spent)]
    data = [
        bar(names, [parts[kind] for parts in spent], TIMES[kind][0], f"var(--{TIMES[kind][1]})", unit="s")
        for kind in kinds
    ]
    layout = bars(names, [plan.pace.step / count for plan, count in zip(some, each, strict=True)], seconds)
    for note, plan, count in zip(layout["annotations"], some, each, strict=True):
        note["text"] = f"<b>{seconds(plan.pace.step / count)}</b> {note['y']}"  # names are long: the figure first
    of = "a sample" if per_sample(plans) else "a step"
    label = f"Time of {of}: " + "; ".join(
        f"{plan.choice.words} {seconds(plan.pace.step / count)}" for plan, count in zip(some, each, strict=True)
    )
    rows = [
        [plan.choice.words, *(seconds(parts[kind]) for kind in kinds), seconds(plan.pace.step / count)]
        for plan, parts, count in zip(some, spent, each, strict=True)
    ]
    legend = [(TIMES[kind][0], f"var(--{TIMES[kind][1]})") for kind in kinds]
    columns = ["", *(TIMES[kind][0] for kind in kinds), "together"]
    return Chart("times", label + ".", {"data": data, "layout": layout}, columns, rows, legend)


def samples(plan: Plan) -> float:
    """Samples of a step over all devices."""
    return plan.samples * plan.pace.step


def per_sample(plans: Sequence[Plan]) -> bool:
    """Whether steps are of different batches, and so only the time of a sample can be compared."""
    return len({round(samples(plan)) for plan in plans if plan.fits}) > 1
