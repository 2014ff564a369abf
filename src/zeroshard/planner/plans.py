"""Evaluate strategies: memory and step time of each, whether it fits, and which one is chosen.

[Note: which plan is chosen]
Of the plans that fit, those within 1 % of the best speed count as equally fast: predictions are not better than that.
Of these, the ones within 1 % of the least traffic a sample stay, over all links and tiers; and of these the one that
needs the least device memory is chosen. A speed counts in samples per second, of a plan that offloads with 95 %,
because the host may have other work, and with 97 % for each kind of 8-bit collective, because they change the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from zeroshard.config.offload import Offload
from zeroshard.planner.footprint import Footprint, device_bytes_needed, memory_shortfall, usage_fractions
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.search import SearchSpace, candidate_strategies, explain_unsupported
from zeroshard.planner.step_time import StepTime
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop
from zeroshard.planner.tracing.inputs import Inputs, LossFn
from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, CheckpointMode
from zeroshard.planner.whole_params import OwnerLoads, WholeParamSpec, find_whole_params
from zeroshard.utils.format import format_bytes

TOLERANCE = 0.01  # relative: speeds and traffic that differ by less count as equal
TIER_TRAFFIC = ("pcie", "disk")  # kinds of traffic that are not collectives
LOSSY_SCORE_FACTOR = 0.97  # for each kind of 8-bit collective
OFFLOAD_SCORE_FACTOR = 0.95


@dataclass(frozen=True)
class Plan:
    """One strategy with its memory footprint and step time on each device."""

    strategy: Strategy
    devices: int
    machine: Machine
    footprint: Footprint
    shortfall: str
    """Which memory is too small, with the numbers; empty if the plan fits."""
    traced_model: TracedModel = field(repr=False, compare=False)
    """The model that is planned."""

    @cached_property
    def step_time(self) -> StepTime:
        """The time of a step, by cause. Computed on first access."""
        return self.traced_model.step_time(self.strategy, self.devices, self.machine)

    @cached_property
    def useful_flops(self) -> float:
        """FLOPs of a step on one device, without recomputation."""
        return self.traced_model.useful_flops(self.strategy, self.machine)

    @property
    def owner_loads(self) -> OwnerLoads | None:
        """What each owner of whole parameters has; None if all parameters are updated on flat slices."""
        sizes = self.traced_model.state_sizes(self.strategy, self.devices, not self.machine.is_cpu)
        return sizes.whole.loads if sizes.whole is not None else None

    @property
    def fits(self) -> bool:
        """Whether the plan runs without running out of memory."""
        return not self.shortfall

    @property
    def memory(self) -> float:
        """Device memory needed, in bytes: what the allocator reserves plus the runtime's context."""
        return device_bytes_needed(self.footprint, self.machine)

    @property
    def usage_fractions(self) -> dict[str, float]:
        """Usage / usable capacity of device, host and disk; above 1, the plan does not fit."""
        return usage_fractions(self.footprint, self.devices, self.machine)

    @property
    def collective_bytes(self) -> float:
        """Bytes per step of all collectives."""
        return sum(nbytes for kind, nbytes in self.step_time.traffic.items() if kind not in TIER_TRAFFIC)

    @property
    def data_parallel_psi(self) -> float:
        """Bytes per step of data-parallel collectives, as a multiple of Ψ, all parameters in the compute precision."""
        traffic = self.step_time.traffic.items()
        nbytes = self.collective_bytes - sum(nbytes for kind, nbytes in traffic if kind.startswith("tensor "))
        itemsize = 2 if self.traced_model.options.get("precision") in ("bf16", "fp16", "fp8") else 4
        return nbytes / (self.traced_model.parameters * itemsize)

    @property
    def bytes_per_sample(self) -> float:
        """Bytes that a rank moves over all links, to the host and to the disk, per sample of the batch."""
        return sum(self.step_time.traffic.values()) / self.batch

    @property
    def node_bytes(self) -> dict[str, float]:
        """Bytes of host memory and disk that all ranks of a node need."""
        local_ranks = self.machine.local_ranks(self.devices)
        return {"host": self.footprint.host * local_ranks, "disk": self.footprint.disk * local_ranks}

    @property
    def batch(self) -> int:
        """Samples per step over all devices."""
        return self.strategy.micro_batch * self.strategy.accumulate * (self.devices // self.strategy.tensor)

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all devices."""
        return self.batch / self.step_time.step

    @property
    def score(self) -> float:
        """Samples per second as they count: [Note: which plan is chosen]."""
        strategy = self.strategy
        num_lossy = (strategy.gather_dtype is not None) + (strategy.reduce_wire is not None)
        factor = OFFLOAD_SCORE_FACTOR if strategy.offload is not None else 1.0
        return self.samples_per_second * factor * LOSSY_SCORE_FACTOR**num_lossy

    @property
    def order(self) -> tuple[bool, float]:
        """A key that sorts the plans that fit by speed, fastest first, and then the others by memory."""
        return not self.fits, -self.samples_per_second if self.fits else self.memory

    @property
    def flops_per_second(self) -> float:
        """Useful FLOPs per second on one device."""
        return self.useful_flops / self.step_time.step


@dataclass(frozen=True)
class Plans:
    """All plans of a model on a number of devices."""

    model: str
    parameters: int
    devices: int
    machine: Machine
    precision: str | None
    candidates: tuple[Plan, ...]
    """Every plan that was evaluated."""
    traced_model: TracedModel = field(repr=False, compare=False)
    """The model that is planned, with its traces."""

    @property
    def fitting(self) -> list[Plan]:
        """The plans that fit, fastest first."""
        return sorted((plan for plan in self.candidates if plan.fits), key=lambda plan: plan.order)

    @cached_property
    def best(self) -> Plan | None:
        """The plan that is chosen, None if none fits: [Note: which plan is chosen]."""
        fitting = self.fitting
        if not fitting:
            return None
        best_score = max(plan.score for plan in fitting)
        fast = [plan for plan in fitting if plan.score >= best_score * (1 - TOLERANCE)]
        least_bytes = min(plan.bytes_per_sample for plan in fast)
        lean = [plan for plan in fast if plan.bytes_per_sample <= least_bytes * (1 + TOLERANCE)]
        return min(lean, key=self._preference)

    @staticmethod
    def _preference(plan: Plan) -> tuple[float, float, bool, str]:
        uses_disk = "disk" in plan.strategy.offload_summary
        return plan.memory, plan.bytes_per_sample, uses_disk, plan.strategy.description

    @property
    def reason(self) -> str:
        """One line: what was chosen and why, or why nothing fits."""
        best = self.best
        if best is None:
            smallest = self.best_or_smallest
            return f"nothing fits: even with {smallest.strategy.description}, {smallest.shortfall}"
        return (
            f"{best.strategy.description}: {self._rule(best)}, {best.samples_per_second:.4g} samples/s, "
            f"{format_bytes(int(best.memory))} of {format_bytes(self.machine.memory)} a device"
            f"{self._caveats(best)}"
        )

    def _rule(self, best: Plan) -> str:
        """Say that the chosen plan is the fastest; if it is not, why it was chosen."""
        fastest = self.fitting[0]
        count = len(self.fitting)
        among = f"{count} plans that fit ({len(self.candidates) - count} do not)"
        gain = fastest.samples_per_second / best.samples_per_second
        if gain == 1:
            return f"the fastest of {among}"
        if gain < 1.0005:
            return f"as fast as any of {among}, with the least traffic, then memory"
        fraction = fastest.score / fastest.samples_per_second
        counted = "" if fraction == 1 else f", but counts with {fraction:.0%} of that"
        return (
            f"of {among} the one with the least traffic, then memory, within {TOLERANCE:.0%} of the best speed "
            f"({fastest.strategy.description} is {gain:.3f} × as fast{counted})"
        )

    def _caveats(self, best: Plan) -> str:
        """Say what the chosen plan does to the numbers; empty if they are those of other plans."""
        strategy, text = best.strategy, ""
        exact = next((plan for plan in self.fitting if not plan.strategy.is_lossy), None)
        if strategy.is_lossy:
            text += f"; {strategy.wire_summary} change the numbers"
        if strategy.is_lossy and exact is not None:
            gain = best.samples_per_second / exact.samples_per_second
            text += f", and are {gain:.2f} × as fast as the best without ({exact.strategy.description})"
        if strategy.local_steps > 1:
            text += f"; local_steps={strategy.local_steps}, as given, is another algorithm"
        return text

    @property
    def best_or_smallest(self) -> Plan:
        """The best plan; if nothing fits, the one that needs the least device memory."""
        return self.best or min(self.candidates, key=lambda plan: plan.memory)

    def best_per_strategy(self) -> list[Plan]:
        """Return :meth:`fastest_per_strategy`, but for the chosen strategy the chosen plan."""
        best = self.best  # not always the fastest of its strategy
        return [
            best if best is not None and plan.strategy.key == best.strategy.key else plan
            for plan in self.fastest_per_strategy()
        ]

    def fastest_per_strategy(self) -> list[Plan]:
        """Return the plan with the fastest micro-batch for each strategy."""
        groups: dict[Any, list[Plan]] = {}
        for plan in self.candidates:
            groups.setdefault(plan.strategy.key, []).append(plan)
        return [fastest_or_smallest(group) for group in groups.values()]


def fastest_or_smallest(plans: Sequence[Plan]) -> Plan:
    """Return the fastest plan that fits; if none fits, the one that needs the least device memory."""
    return min(plans, key=lambda plan: plan.order)


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
    partition: str | Sequence[str] | None = None,
    gather_dtype: str | Sequence[str] | None = None,
    reduce_wire: str | Sequence[str] | None = None,
    allow_lossy: bool = False,
    local_steps: int = 1,
    tensor: int | Sequence[int] | None = None,
    checkpoint: CheckpointMode | Sequence[CheckpointMode] = CHECKPOINT_MODES,
    offload: Any = "every",
    optimizer: str | Mapping[str, WholeParamSpec] = "adamw",
    optimizer_states: int = 2,
    one_pass: bool = True,
    scratch: float = 0.0,
    clip: bool = True,
    replicas: int | Sequence[int] | None = None,
    **options: Any,
) -> Plans:
    """Predict the memory and step time of training a model on ``devices`` for every strategy, and choose the best.

    Any model works, also on the meta device; it is run there once or a few times. ``inputs`` is what the model is
    called with: a function of the batch size, or an example whose first dimension is the batch. Known language models
    need no ``inputs``; their samples have ``sequence`` tokens. ``loss`` reduces the output to a scalar, if the output
    is not a scalar already. ``machine`` is a name, a JSON file or a :class:`zeroshard.planner.Machine`; ``memory``
    overrides the memory of each device.

    ``batch`` is the batch size of a step over all devices; without it, each plan uses its fastest micro-batch.
    ``stage``, ``tensor``, ``checkpoint``, ``offload``, ``micro_batch``, ``replicas`` (rows of a 2-D mesh; by default
    one, or as many as there are nodes) and ``partition`` (of such a mesh) restrict the search, each to one value or
    several. ``gather_dtype`` and ``reduce_wire`` do too: "int8", "fp8" or "none". Collectives in 8 bits change the
    numbers, so they are tried only if they are named here, or with ``allow_lossy=True``, which tries int8 for both.
    ``local_steps`` is used as given, never chosen, because it is another algorithm: the ``replicas`` train alone and
    are averaged after every so many steps, whose time and traffic are divided by their number.

    ``optimizer`` is "adamw" or "muon": Muon for the matrices of blocks, AdamW for the rest; or what is updated
    as a whole, by name, from :func:`zeroshard.planner.find_whole_params`. Offload and Muon are not planned together.
    ``optimizer_states`` is the number of state values per element that AdamW, or another optimizer in its place, keeps.
    ``one_pass``: if there are 2, it is torch's fused Adam or AdamW, which a GPU updates in one pass. ``scratch`` is the
    temporary memory of its kernels, in bytes per element. ``options`` are those of
    :func:`zeroshard.shard`.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)])
    >>> plans = plan(model, torch.empty(1, 4096), devices=8, machine="h100", memory="2GB", batch=512)
    >>> plans.best.strategy.stage, plans.best.fits
    (2, True)
    """
    for name, value, least in (
        ("devices", devices, 1),
        ("optimizer_states", optimizer_states, 0),
    ):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's output, or None, got {loss!r}")
    whole = find_whole_params(model, optimizer) if isinstance(optimizer, str) else optimizer
    if whole:
        _check_no_offload(offload)
        offload = None
    machine = Machine.resolve(machine).with_memory(memory).shared_by(devices)
    precision = options.setdefault("precision", machine.default_precision)
    if precision is not None:
        machine.peak_flops(precision)  # raises if the machine does not support it
    space = SearchSpace(
        batch=batch,
        micro_batches=as_tuple(micro_batch),
        stages=as_tuple(stage) or (),
        partitions=as_tuple(partition),
        replicas=as_tuple(replicas),
        gather_dtypes=as_tuple(gather_dtype),
        reduce_wires=as_tuple(reduce_wire),
        allow_lossy=allow_lossy,
        local_steps=(local_steps,),
        tensors=as_tuple(tensor),
        checkpoints=as_tuple(checkpoint) or (),
        offloads=offload,
    )
    loop = TrainingLoop(
        inputs=inputs,
        loss=loss,
        sequence=sequence,
        has_clipping=clip,
        optimizer_states=optimizer_states,
        has_fused_adam=one_pass,
        scratch_bytes_per_element=scratch,
        whole=whole,
    )
    traced_model = TracedModel(model, loop, **options)
    plans = _evaluate_all(traced_model, devices, machine, space)
    best = plans.best
    if best is not None and not traced_model.verify_extrapolation(best.strategy, machine):
        plans = _evaluate_all(traced_model, devices, machine, space)  # now from traces of the full model
    return plans


def _check_no_offload(offload: Any) -> None:
    """Raise if states must be offloaded, whose updates as whole parameters are not simulated."""
    options = offload if isinstance(offload, list) else [offload]
    if offload != "every" and any(Offload.from_option(option) is not None for option in options):
        raise ValueError(
            "the planner cannot predict the step time with offloaded states if parameters are updated as a whole, as "
            "by Muon: leave offload out, or plan with optimizer='adamw'"
        )


def _evaluate_all(traced_model: TracedModel, devices: int, machine: Machine, space: SearchSpace) -> Plans:
    strategies = candidate_strategies(traced_model, devices, machine, space)
    candidates = tuple(evaluate_strategy(traced_model, strategy, devices, machine) for strategy in strategies)
    if not candidates and (given := explain_unsupported(space)):
        raise ValueError(f"no strategy of this search supports {given}")
    if not candidates:
        raise ValueError(
            f"batch {space.batch} cannot be divided over {devices} devices: it must be a multiple of the data-parallel "
            f"ranks ({devices} / tensor degree) times the micro-batch"
            if not space.partitions or not {"hybrid", "full"}.isdisjoint(space.partitions)
            else f"no strategy of this search supports partition={space.partitions[0]!r}: the inner axis of the mesh "
            "must have several ranks, the batch must be a multiple of the ranks, and parameters cannot be offloaded "
            "if they are partitioned over the inner axis"
        )
    name, precision = type(traced_model.model).__name__, traced_model.options["precision"]
    return Plans(name, traced_model.parameters, devices, machine, precision, candidates, traced_model)


def evaluate_strategy(traced_model: TracedModel, strategy: Strategy, devices: int, machine: Machine) -> Plan:
    """Predict the footprint of one strategy and whether it fits."""
    footprint = traced_model.footprint(strategy, devices, machine)
    return Plan(strategy, devices, machine, footprint, memory_shortfall(footprint, devices, machine), traced_model)


def as_tuple(value: Any) -> tuple[Any, ...] | None:
    """Return one value or several as a tuple."""
    if value is None:
        return None
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
