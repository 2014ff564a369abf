"""Plan: what one choice takes, and whether it fits; and all plans of a model, of which one is the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from zeroshard.config.offload import parse_bytes
from zeroshard.memory.report import format_bytes
from zeroshard.planner.footprint import Footprint, device_bytes_needed, memory_shortfall
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.search import candidate_strategies
from zeroshard.planner.step_time import StepTime
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel
from zeroshard.planner.tracing.inputs import Inputs, LossFn
from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, CheckpointMode

SPEED_TOLERANCE = 0.01  # of the pace: plans that differ by less count as equally fast, and the smaller is better
OFFLOAD_SCORE_FACTOR = 0.95  # of its pace is what a plan that offloads is credited with: its host may have other work


@dataclass(frozen=True)
class Plan:
    """One choice, what it holds and how long it takes on each of so many devices."""

    strategy: Strategy
    devices: int
    machine: Machine
    footprint: Footprint
    shortfall: str
    """What it does not fit into, with figures; empty where it fits."""
    traced_model: TracedModel = field(repr=False, compare=False)
    """What is planned."""

    @cached_property
    def step_time(self) -> StepTime:
        """How long a step takes, and what the time goes to. Worked out when it is first asked for."""
        return self.traced_model.step_time(self.strategy, self.devices, self.machine)

    @cached_property
    def useful_flops(self) -> float:
        """Of a step on one device, without what is computed again."""
        return self.traced_model.useful_flops(self.strategy, self.machine)

    @property
    def fits(self) -> bool:
        """Whether it runs without running out of memory."""
        return not self.shortfall

    @property
    def memory(self) -> float:
        """Bytes of a device that it needs: what the allocator reserves, and the runtime's own."""
        return device_bytes_needed(self.footprint, self.machine)

    @property
    def samples_per_second(self) -> float:
        """Samples a second, over all devices."""
        choice = self.strategy
        return choice.micro_batch * choice.accumulate * (self.devices // choice.tensor) / self.step_time.step

    @property
    def score(self) -> float:
        """Samples a second that it is compared by."""
        return self.samples_per_second * (OFFLOAD_SCORE_FACTOR if self.strategy.offload is not None else 1.0)

    @property
    def flops_per_second(self) -> float:
        """Useful operations a second on one device."""
        return self.useful_flops / self.step_time.step


@dataclass(frozen=True)
class Plans:
    """All plans of a model on so many devices."""

    model: str
    parameters: int
    devices: int
    machine: Machine
    precision: str | None
    candidates: tuple[Plan, ...]
    """All that were looked at."""
    traced_model: TracedModel = field(repr=False, compare=False)
    """What is planned, with its traces."""

    @property
    def fitting(self) -> list[Plan]:
        """Those that fit, the fastest first."""
        return sorted((plan for plan in self.candidates if plan.fits), key=lambda plan: -plan.samples_per_second)

    @property
    def best(self) -> Plan | None:
        """The fastest that fits; of those that are as fast, the one that needs least memory."""
        fitting = self.fitting
        if not fitting:
            return None
        most = max(plan.score for plan in fitting)
        return min(
            (plan for plan in fitting if plan.score >= most * (1 - SPEED_TOLERANCE)), key=lambda plan: plan.memory
        )

    @property
    def reason(self) -> str:
        """One line on what was chosen and why, or on why nothing fits."""
        best = self.best
        if best is None:
            least = min(self.candidates, key=lambda plan: plan.memory)
            return f"nothing fits: what needs least is {least.strategy.description}, and {least.shortfall}"
        fitting = self.fitting
        out = len(self.candidates) - len(fitting)
        return (
            f"{best.strategy.description}: the fastest of {len(fitting)} plans that fit ({out} do not), "
            f"{best.samples_per_second:.4g} samples/s, {format_bytes(int(best.memory))} of "
            f"{format_bytes(self.machine.memory)} a device"
        )

    def fastest_per_strategy(self) -> list[Plan]:
        """For every stage, tensor degree, offload and checkpointing, the micro-batch that is fastest."""
        groups: dict[tuple[int, int, str, str], list[Plan]] = {}
        for plan in self.candidates:
            groups.setdefault(plan.strategy.key, []).append(plan)
        return [
            max(group, key=lambda plan: (plan.fits, plan.samples_per_second if plan.fits else -plan.memory))
            for group in groups.values()
        ]


def plan(
    model: nn.Module,
    inputs: Inputs = None,
    *,
    devices: int,
    machine: str | Machine = "h100",
    memory: str | int | None = None,
    batch: int | None = None,
    micro_batch: int | Sequence[int] | None = None,
    sequence: int | None = None,
    loss: LossFn = None,
    stage: int | Sequence[int] = (0, 1, 2, 3),
    tensor: int | Sequence[int] | None = None,
    checkpoint: CheckpointMode | Sequence[CheckpointMode] = CHECKPOINT_MODES,
    offload: Any = "every",
    optimizer_states: int = 2,
    one_pass: bool = True,
    scratch: float = 0.0,
    clip: bool = True,
    replicas: int = 1,
    **options: Any,
) -> Plans:
    """Work out what training a model takes on so many devices, in every way that zeroshard knows, and choose.

    The model may be on the meta device and of any kind; it runs there once or a few times. ``inputs`` says what it is
    called with: a function of the batch, or an example whose first dimension is the batch; language models that are
    known need none, with ``sequence`` tokens a sample. ``loss`` makes one number of its output, where that is none
    already. ``machine`` is the name of one, a JSON file, or a :class:`zeroshard.planner.machines.machine.Machine`;
    ``memory`` is what each device has, if another.

    ``batch`` is that of a step over all devices; without it, each plan has the micro-batch that is fastest.
    ``stage``, ``tensor``, ``checkpoint``, ``offload`` and ``micro_batch`` narrow the choice where they are given, as
    one value or several. ``optimizer_states`` are the optimizer's values for each element (2 for Adam); ``one_pass``:
    with 2 of them, it is torch's fused Adam or AdamW, which a GPU updates in one pass over memory; ``scratch`` are the
    bytes its kernels take for each element. ``replicas`` is the number of groups of ``devices`` with the same states,
    on a mesh of two axes; sums over them are not counted as time. ``options`` are those of :func:`zeroshard.shard`.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)])
    >>> plans = plan(model, torch.empty(1, 4096), devices=8, machine="h100", memory="2GB", batch=512)
    >>> plans.best.strategy.stage, plans.best.fits
    (3, True)
    """
    for name, value, least in (
        ("devices", devices, 1),
        ("replicas", replicas, 1),
        ("optimizer_states", optimizer_states, 0),
    ):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is a whole number from {least} up, got {value!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is a function of the model's output, or None, got {loss!r}")
    machine = (
        Machine.resolve(machine) if memory is None else Machine.resolve(machine, memory=parse_bytes("memory", memory))
    )
    machine = machine.shared_by(devices)
    precision = options.setdefault("precision", default_precision(machine))
    if precision is not None:
        machine.peak_flops(precision)  # refuses one that the machine does not compute in
    subject = TracedModel(
        model,
        inputs,
        loss=loss,
        sequence=sequence,
        optimizer_states=optimizer_states,
        one_pass=one_pass,
        scratch=scratch,
        clipped=clip,
        replicas=replicas,
        **options,
    )
    narrowed = {
        "batch": batch,
        "micro_batches": _as_tuple(micro_batch),
        "stages": _as_tuple(stage) or (),
        "tensors": _as_tuple(tensor),
        "checkpoints": _as_tuple(checkpoint) or (),
        "offloads": offload,
    }
    plans = _evaluate_all(subject, devices, machine, precision, narrowed)
    best = plans.best
    if best is not None and not subject.verify_extrapolation(best.strategy, machine):
        plans = _evaluate_all(subject, devices, machine, precision, narrowed)  # from traces of the whole model
    return plans


def _evaluate_all(
    traced_model: TracedModel, devices: int, machine: Machine, precision: str | None, constraints: dict[str, Any]
) -> Plans:
    """Work out all choices."""
    found = candidate_strategies(traced_model, devices, machine, **constraints)
    every = tuple(evaluate_strategy(traced_model, choice, devices, machine) for choice in found)
    if not every:
        raise ValueError(
            f"a batch of {constraints['batch']} cannot be divided over {devices} devices as asked: give a multiple of "
            f"the data-parallel devices, {devices} over the tensor degree, times the micro-batch"
        )
    model = traced_model.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Plans(type(model).__name__, parameters, devices, machine, precision, every, traced_model)


def evaluate_strategy(
    traced_model: TracedModel, strategy: Strategy, devices: int, machine: Machine, timeline: bool = False
) -> Plan:
    """Work out one choice."""
    held = traced_model.footprint(strategy, devices, machine, timeline)
    return Plan(strategy, devices, machine, held, memory_shortfall(held, devices, machine), traced_model)


def default_precision(machine: Machine) -> str:
    """The 16 bits that a GPU computes in; 32 on a CPU.

    >>> default_precision(Machine.resolve("dgx2")), default_precision(Machine.resolve("cpu"))
    ('fp16', 'fp32')
    """
    if machine.kind == "cpu":
        return "fp32"
    return next(name for name in ("bf16", "fp16", "fp32") if name in machine.flops)


def _as_tuple(value: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
