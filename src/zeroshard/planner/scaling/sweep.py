"""Simulate how training a model scales, from one device to many thousands.

[Note: simulating scaling]
One trace of the model is replayed for every stage and every number of devices. The number of devices changes what a
rank holds, how long collectives take (``machines/collective_time.py``), and how much of them overlaps with computation.
Each device has the same work for every number of devices (weak scaling), unless ``batch`` fixes the work of all devices
together (strong scaling). A stage *stops scaling* at the first number of devices where the throughput per device falls
below a given fraction of the stage's best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plans import Plan, evaluate_strategy, fastest_or_smallest
from zeroshard.planner.search import STAGES, SearchSpace, candidate_strategies
from zeroshard.planner.traced_model import TracedModel, TrainingLoop
from zeroshard.planner.tracing.inputs import Inputs, LossFn
from zeroshard.planner.tracing.trace_model import CheckpointMode

DEVICE_COUNTS = tuple(2**power for power in range(15))  # 1 to 16,384
WAIT_KINDS = ("tensor", "gather", "reduce", "update", "launch")
GOOD_FRACTION, HALF_FRACTION = 0.9, 0.5  # of a stage's best throughput per device


@dataclass(frozen=True)
class ScalingPoint:
    """The plan of one stage on one number of devices."""

    plan: Plan

    @property
    def devices(self) -> int:
        """The number of devices in the job."""
        return self.plan.devices

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.plan.strategy.stage

    @property
    def fits(self) -> bool:
        """Whether the plan fits in memory."""
        return self.plan.fits

    @property
    def samples_per_second_per_device(self) -> float:
        """Samples per second and device."""
        return self.plan.samples_per_second / self.devices

    @property
    def tflops_per_device(self) -> float:
        """Useful TFLOP/s per device: recomputation does not count."""
        return self.plan.flops_per_second / 1e12

    @property
    def time_fractions(self) -> dict[str, float]:
        """Fractions of the step time: "compute", "tensor", "gather", "reduce", "update", "launch".

        Only communication that does not overlap with computation counts. All remaining time is "compute".
        """
        step_time = self.plan.step_time
        waits = {name: max(0.0, getattr(step_time, name)) / step_time.step for name in WAIT_KINDS}
        return {"compute": 1 - sum(waits.values()), **waits}


@dataclass(frozen=True)
class StageScaling:
    """The numbers of devices between which one stage scales."""

    stage: int
    fits_from: int | None
    """The fewest simulated devices on which the model fits; None if it fits on none."""
    best: ScalingPoint | None
    """The point that fits and has the highest throughput per device."""
    good_until: int | None
    """The most devices up to which the throughput per device is at least 90 % of the best."""
    under_90_percent: int | None
    """The first number of devices above the best point with less than 90 % of its throughput; None if there is none."""
    under_50_percent: int | None
    """The same for 50 %."""


@dataclass(frozen=True)
class ScalingSimulation:
    """The results of a sweep over devices and stages."""

    model: str
    parameters: int
    machine: Machine
    precision: str
    points: tuple[ScalingPoint, ...]
    """Sorted by stage, then by devices."""

    def points_of_stage(self, stage: int) -> list[ScalingPoint]:
        """Return the points of one stage, sorted by devices."""
        return [point for point in self.points if point.stage == stage]

    @property
    def stages(self) -> list[int]:
        """The simulated stages."""
        return sorted({point.stage for point in self.points})

    @property
    def scaling(self) -> list[StageScaling]:
        """Where each stage stops scaling: see [Note: simulating scaling]."""
        return [_stage_scaling(stage, self.points_of_stage(stage)) for stage in self.stages]


def _stage_scaling(stage: int, points: Sequence[ScalingPoint]) -> StageScaling:
    fitting = [point for point in points if point.fits]
    if not fitting:
        return StageScaling(stage, None, None, None, None, None)
    best = max(fitting, key=lambda point: point.samples_per_second_per_device)
    beyond = [point for point in fitting if point.devices > best.devices]

    def first_under(fraction: float) -> int | None:
        limit = fraction * best.samples_per_second_per_device
        return next((point.devices for point in beyond if point.samples_per_second_per_device < limit), None)

    under_90, under_50 = first_under(GOOD_FRACTION), first_under(HALF_FRACTION)
    good = [point.devices for point in beyond if under_90 is None or point.devices < under_90]
    return StageScaling(stage, fitting[0].devices, best, max(good, default=best.devices), under_90, under_50)


def simulate(
    model: nn.Module,
    inputs: Inputs = None,
    *,
    devices: Iterable[int] = DEVICE_COUNTS,
    machine: str | Machine = "h100",
    memory: str | int | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    loss: LossFn = None,
    stages: Iterable[int] = STAGES,
    tensor: int = 1,
    checkpoint: CheckpointMode = "none",
    offload: Any = None,
    clip: bool = True,
    **options: Any,
) -> ScalingSimulation:
    """Simulate how training a model scales with the number of devices: see [Note: simulating scaling].

    ``model``, ``inputs``, ``loss``, ``sequence``, ``machine``, ``memory``, ``offload`` and ``options`` are those of
    :func:`zeroshard.plan`. ``micro_batch`` is the number of samples per data-parallel rank and backward; the default is
    the fastest power of two that fits. ``batch`` is the total over all devices, the same for every number of devices.
    Numbers of devices that do not divide it, or that are not a multiple of ``tensor``, are skipped.

    >>> import torch
    >>> from zeroshard.models import GPT, GPTConfig
    >>> with torch.device("meta"):
    ...     model = GPT(GPTConfig(layers=24, heads=16, width=2048))
    >>> found = simulate(model, devices=(8, 1024), machine="dgx2", batch=1024, stages=(3,), checkpoint="recompute")
    >>> [point.plan.strategy.micro_batch for point in found.points], found.scaling[0].under_90_percent
    ([32, 1], 1024)
    """
    counts = _sorted_counts("devices", devices, 1)
    sorted_stages = _sorted_counts("stages", stages, 0)
    machine = Machine.resolve(machine).with_memory(memory)
    precision = options.setdefault("precision", machine.default_precision)
    machine.peak_flops(precision)  # raises if the machine does not support the precision
    if tensor < 1:
        raise ValueError(f"tensor must be a positive integer, got {tensor}")
    valid_counts = [count for count in counts if count % tensor == 0]
    if not valid_counts:
        raise ValueError(f"no number of devices is a multiple of the tensor degree ({tensor}), got {counts}")
    loop = TrainingLoop(inputs=inputs, loss=loss, sequence=sequence, has_clipping=clip)
    traced_model = TracedModel(model, loop, **options)
    points = []
    for stage in sorted_stages:
        space = SearchSpace(
            batch=batch,
            micro_batches=None if micro_batch is None else (micro_batch,),
            stages=(stage,),
            replicas=(1,),
            tensors=(tensor,),
            checkpoints=(checkpoint,),
            offloads=[offload],
        )
        for count in valid_counts:
            strategies = candidate_strategies(traced_model, count, machine, space)
            plans = [evaluate_strategy(traced_model, strategy, count, machine) for strategy in strategies]
            if plans:
                points.append(ScalingPoint(fastest_or_smallest(plans)))
    if not points:
        raise ValueError(f"batch {batch} cannot be divided evenly over any of {valid_counts} devices: change one")
    return ScalingSimulation(type(model).__name__, traced_model.parameters, machine, precision, tuple(points))


def _sorted_counts(name: str, given: Iterable[int], least: int) -> list[int]:
    numbers = sorted(set(given))
    if not numbers:
        raise ValueError(f"{name} is empty: pass at least one number")
    for number in numbers:
        if type(number) is not int or number < least:
            raise ValueError(f"{name} must be integers of at least {least}, got {number!r}")
    return numbers
