"""The pictures of a plan: memory of a device by kind, and time by part, of the most informative rows."""

from __future__ import annotations

from zeroshard.planner import Plans
from zeroshard.planner.commands.plan_text import format_seconds, short_label, sort_plans, summary_rows
from zeroshard.utils.chart import as_svg, bar_chart

TIME_PARTS = {  # field of StepTime → its name in the picture
    "compute": "computing",
    "tensor": "tensor collectives",
    "launch": "launching",
    "gather": "waiting for all-gathers",
    "reduce": "waiting for reductions",
    "update": "updating",
    "average": "averaging replicas",
}


def draw_plans(plans: Plans) -> str:
    """Return an SVG file with bars of memory and of time, fastest plan first; time is per sample over all devices.

    >>> import torch, zeroshard
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(64, 64)
    >>> plans = zeroshard.plan(layer, torch.empty(1, 64), devices=2, stage=3, micro_batch=4)
    >>> draw_plans(plans)[:4]
    '<svg'
    """
    memory = []
    times = []
    for plan in sort_plans(summary_rows(plans)):
        name = short_label(plan.strategy) + (", chosen" if plan is plans.best else "")
        peak = plan.footprint.peak
        kinds: dict[str, float] = {
            kind: nbytes for kind, nbytes in plan.footprint.states.items() if kind != "gradients"
        }
        kinds |= {kind: nbytes for kind, nbytes in peak.by_kind.items() if kind != "states"}
        memory.append((name, {**kinds, "runtime and allocator": plan.memory - peak.total}))
        if plan.fits:
            seconds = {label: max(0.0, getattr(plan.step_time, part)) for part, label in TIME_PARTS.items()}
            seconds["other"] = max(0.0, plan.step_time.step - sum(seconds.values()))
            times.append((name, {label: value / plan.batch for label, value in seconds.items()}))
    limit = ("memory of a device", plans.machine.memory)
    charts = [bar_chart("Memory of a device", memory, limit=limit)]
    if times:
        charts.append(bar_chart("Time of a sample, over all devices", times, format_value=format_seconds))
    return as_svg(charts)
