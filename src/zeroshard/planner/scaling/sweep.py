"""Simulate how training a model scales, from one device to many thousands.

[Note: simulating scaling]
One trace of the model is replayed for every stage and every number of devices. The number of devices changes what a
rank holds, how long collectives take (``machines/collective_time.py``), and how much of them overlaps with computation.
Each device has the same work for every number of devices (weak scaling), unless ``batch`` fixes the work of all devices
together (strong scaling). A stage *stops scaling* at the first number of devices where the throughput per device falls
below a given fraction of the stage's best.

A *series* has one point for each number of devices: a stage, on one axis of data-parallel ranks or on a 2-D mesh, with
or without collectives in 8 bits and local steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plans import Plan, as_tuple, evaluate_strategy, fastest_or_smallest
from zeroshard.planner.search import EXACT, STAGES, SearchSpace, candidate_strategies, explain_unsupported
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop
from zeroshard.planner.tracing.inputs import Inputs, LossFn
from zeroshard.planner.tracing.trace_model import CheckpointMode

DEVICE_COUNTS = tuple(2**power for power in range(15))  # 1 to 16,384
WAIT_KINDS = ("tensor", "gather", "reduce", "update", "average", "launch")
NODES = "nodes"  # as many replicas as there are nodes


@dataclass(frozen=True)
class ScalingPoint:
    """The plan of one series on one number of devices."""

    plan: Plan
    series: str
    """What the points of a series have in common: "stage 3", "stage 3, hierarchical"."""

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
        """Fractions of the step time: "compute", "tensor", "gather", "reduce", "update", "average", "launch".

        Only communication that does not overlap with computation counts. All remaining time is "compute".
        """
        step_time = self.plan.step_time
        waits = {name: max(0.0, getattr(step_time, name)) / step_time.step for name in WAIT_KINDS}
        return {"compute": 1 - sum(waits.values()), **waits}


@dataclass(frozen=True)
class StageScaling:
    """The numbers of devices between which one series scales."""

    stage: int
    fits_from: int | None
    """The fewest simulated devices on which the model fits; None if it fits on none."""
    best: ScalingPoint | None
    """The point that fits and has the highest throughput per device."""
    under_90_percent: int | None
    """The first number of devices above the best point with less than 90 % of its throughput; None if there is none."""
    under_50_percent: int | None
    """The same for 50 %."""
    series: str
    """As in :class:`ScalingPoint`."""


@dataclass(frozen=True)
class ScalingSimulation:
    """The results of a sweep over devices and series."""

    model: str
    parameters: int
    machine: Machine
    precision: str
    points: tuple[ScalingPoint, ...]
    """Sorted by stage, then by series, then by devices."""
    sweep: _Sweep = field(repr=False, compare=False)

    def with_network(self, gigabits: float) -> ScalingSimulation:
        """Simulate the same with another rate between nodes: see :meth:`zeroshard.planner.Machine.with_network`."""
        return self.sweep.run(self.machine.with_network(gigabits))

    def points_of_series(self, series: str) -> list[ScalingPoint]:
        """Return the points of one series, sorted by devices."""
        return [point for point in self.points if point.series == series]

    @property
    def series(self) -> list[str]:
        """The simulated series."""
        return list(dict.fromkeys(point.series for point in self.points))

    @property
    def scaling(self) -> list[StageScaling]:
        """Where each series stops scaling: see [Note: simulating scaling]."""
        return [_stage_scaling(self.points_of_series(series)) for series in self.series]


def _stage_scaling(points: Sequence[ScalingPoint]) -> StageScaling:
    stage, series = points[0].stage, points[0].series
    fitting = [point for point in points if point.fits]
    if not fitting:
        return StageScaling(stage, None, None, None, None, series)
    best = max(fitting, key=lambda point: point.samples_per_second_per_device)
    beyond = [point for point in fitting if point.devices > best.devices]

    def first_under(fraction: float) -> int | None:
        limit = fraction * best.samples_per_second_per_device
        return next((point.devices for point in beyond if point.samples_per_second_per_device < limit), None)

    return StageScaling(stage, fitting[0].devices, best, first_under(0.9), first_under(0.5), series)


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
    replicas: int | str | Sequence[int | str] = 1,
    partition: str | Sequence[str] | None = None,
    gather_dtype: str | Sequence[str] = EXACT,
    reduce_wire: str | Sequence[str] = EXACT,
    local_steps: int | Sequence[int] = 1,
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

    ``replicas`` are the rows of a 2-D mesh, or several numbers of them; 1 is one axis, "nodes" one row per node.
    ``partition`` is how such a mesh divides the states, by default every way that differs. ``gather_dtype`` and
    ``reduce_wire`` are "none", "int8", "fp8", or several of them. ``local_steps`` are numbers of steps after which the
    ``replicas``, or in stage 0 without any, all ranks, are averaged. Each combination is a series of its own.

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
    rows = as_tuple(replicas) or ()
    counted = [row for row in rows if row != NODES]
    space = SearchSpace(
        batch=batch,
        micro_batches=None if micro_batch is None else (micro_batch,),
        stages=sorted_stages,
        replicas=counted or None if rows else (),
        partitions=as_tuple(partition),
        gather_dtypes=as_tuple(gather_dtype),
        reduce_wires=as_tuple(reduce_wire),
        local_steps=as_tuple(local_steps) or (),
        tensors=(tensor,),
        checkpoints=(checkpoint,),
        offloads=[offload],
    )
    loop = TrainingLoop(inputs=inputs, loss=loss, sequence=sequence, has_clipping=clip)
    return _Sweep(TracedModel(model, loop, **options), space, valid_counts, rows).run(machine)


@dataclass(frozen=True)
class _Sweep:
    """What is simulated, apart from the machine."""

    traced_model: TracedModel
    space: SearchSpace
    counts: list[int]  # of devices
    rows: Sequence[int | str]  # of 2-D meshes, or NODES

    def run(self, machine: Machine) -> ScalingSimulation:
        """Simulate all series on all numbers of devices."""
        points = [
            point
            for stage in self.space.stages
            for count in self.counts
            for point in _simulate_stage(
                self.traced_model, count, machine, replace(self.space, stages=(stage,)), self.rows
            )
        ]
        if not points:
            if given := explain_unsupported(self.space):
                raise ValueError(f"none of {self.counts} devices supports {given}")
            raise ValueError(
                f"none of {self.counts} devices can be used: the data-parallel ranks must divide the batch "
                f"({self.space.batch}) evenly, and replicas divide them; unless partition is 'hybrid' or 'full', each "
                "replica needs several"
            )
        series = list(dict.fromkeys(point.series for point in points))
        points.sort(key=lambda point: (point.stage, series.index(point.series)))
        model, precision = self.traced_model, self.traced_model.options["precision"]
        return ScalingSimulation(
            type(model.model).__name__, model.parameters, machine, precision, tuple(points), sweep=self
        )


def _simulate_stage(
    traced_model: TracedModel, devices: int, machine: Machine, space: SearchSpace, rows: Sequence[int | str]
) -> Iterator[ScalingPoint]:
    """Yield a point for each mesh of this number of devices, kind of 8-bit collectives and number of local steps."""
    shown: set[tuple[int, str, str, int]] = set()
    for row in rows:
        count = machine.nodes(devices) if row == NODES else int(row)
        if devices // (space.tensors or (1,))[0] % count:
            continue
        plans: dict[tuple[str, str, int], list[Plan]] = {}  # by partition, 8-bit collectives and local steps
        for strategy in candidate_strategies(traced_model, devices, machine, replace(space, replicas=(count,))):
            found = evaluate_strategy(traced_model, strategy, devices, machine)
            series = strategy.partition, strategy.wire_summary, strategy.local_steps
            plans.setdefault(series, []).append(found)
        for (partition, wire, steps), of_series in plans.items():
            key = (count, partition if count > 1 else "", wire, steps)
            if key not in shown:
                shown.add(key)
                best = fastest_or_smallest(of_series)
                yield ScalingPoint(best, _series(best.strategy, names_count=row != NODES))


def _series(strategy: Strategy, names_count: bool) -> str:
    """Return what a strategy has in common with those for other numbers of devices."""
    parts = [f"stage {strategy.stage}"]
    if strategy.replicas > 1:
        parts.append(strategy.partition + (f" over {strategy.replicas} replicas" if names_count else ""))
    if strategy.local_steps > 1:
        parts.append(f"local steps {strategy.local_steps}")
    return ", ".join([*parts, strategy.wire_summary] if strategy.is_lossy else parts)


def _sorted_counts(name: str, given: Iterable[int], least: int) -> list[int]:
    numbers = sorted(set(given))
    if not numbers:
        raise ValueError(f"{name} is empty: pass at least one number")
    for number in numbers:
        if type(number) is not int or number < least:
            raise ValueError(f"{name} must be integers of at least {least}, got {number!r}")
    return numbers
