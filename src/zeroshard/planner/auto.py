"""Choose the fastest plan that fits the free memory of this job: rank 0 plans and broadcasts the result."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from zeroshard.activations import checkpoint_activations
from zeroshard.comm import ConsistencyChecker, open_consistency_checker
from zeroshard.config.offload import Offload, parse_bytes
from zeroshard.optim import is_supported, measure_update, state_bytes_per_element
from zeroshard.planner.free_memory import FreeMemory, machine_from_free_memory
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plans import Plan, Plans, plan
from zeroshard.planner.search import STAGES
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.tracing.inputs import Inputs, LossFn, compute_loss
from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, UntraceableError, strip_checkpointing
from zeroshard.planner.whole_params import find_whole_params
from zeroshard.sharding import Placement
from zeroshard.utils.format import format_bytes
from zeroshard.utils.tree import tensors_in

AUTO = "auto"
UNFUSED_SCRATCH_BYTES_PER_ELEMENT = 8.0  # temporary memory of an unfused optimizer, per updated element

_log = logging.getLogger("zeroshard")


class NothingFitsError(ValueError):
    """No plan fits the available memory."""


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """The ``planning`` options of :func:`zeroshard.shard`: the training loop and the machine to plan for."""

    micro_batch: int | None = None
    """Samples per forward on one rank. None: the first dimension of the example ``inputs``."""
    accumulate: int = 1
    """Backwards per step."""
    sequence: int | None = None
    """Tokens per sample, for language models that need no ``inputs``."""
    loss: LossFn = None
    """Reduces the model's output to a scalar, if it is not one already. Its memory is counted, too."""
    clip: bool = True
    """Whether gradients are clipped by norm."""
    machine: str | Machine | None = None
    """The machine whose rates are used, as in :func:`zeroshard.plan`. None: the local measurements, else the closest
    preset. The plan uses at most its memory, and at most the memory that is actually free."""
    memory: int | str | None = None
    """Upper limit of device memory, as a number of bytes or a string like "40GB"."""
    directory: str | os.PathLike[str] | None = None
    """A directory on a fast local disk for offloaded states. None: nothing is offloaded to disk."""

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> PlanningOptions:
        """Create it from a mapping; raise on unknown names and invalid values.

        >>> PlanningOptions.from_mapping({"micro_batches": 2})
        Traceback (most recent call last):
            ...
        TypeError: unknown planning option 'micro_batches': the options are micro_batch, accumulate, sequence, loss, ...
        """
        known = [field.name for field in fields(cls)]
        for name in options or {}:
            if name not in known:
                raise TypeError(f"unknown planning option {name!r}: the options are {', '.join(known)}")
        planning = cls(**(options or {}))
        for name in ("micro_batch", "accumulate"):
            value = getattr(planning, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if planning.loss is not None and not callable(planning.loss):
            raise TypeError(f"loss must be a function of the model's output, or None, got {planning.loss!r}")
        return planning

    def describe(self, inputs: Inputs) -> str:
        """Describe the options that must be the same on all ranks.

        >>> PlanningOptions(accumulate=2).describe((torch.ones(3, 4), torch.ones(3)))
        'inputs of shapes (3, 4), (3,), micro_batch None, accumulate 2, sequence None'
        """
        if inputs is None or callable(inputs):
            example = "no inputs" if inputs is None else "a function as inputs"
        else:
            shapes = [str(tuple(tensor.shape)) for tensor in tensors_in(inputs)]
            example = f"inputs of shapes {', '.join(shapes)}" if shapes else "inputs without tensors"
        numbers = [f"{name} {getattr(self, name)}" for name in ("micro_batch", "accumulate", "sequence")]
        return ", ".join([example, *numbers])


@dataclass(frozen=True)
class PlanDecision:
    """The chosen strategy and the reason in one line."""

    strategy: Strategy
    reason: str

    @property
    def as_json(self) -> str:
        """The JSON text that rank 0 broadcasts.

        >>> decision = PlanDecision(Strategy(stage=2, offload=Offload(optimizer="host")), "it is fast")
        >>> PlanDecision.from_json(decision.as_json) == decision
        True
        """
        return json.dumps({"choice": asdict(self.strategy), "why": self.reason}, default=os.fspath)

    def apply_checkpointing(self, model: nn.Module) -> None:
        """Apply the chosen checkpointing to the model's blocks."""
        options = self.strategy.checkpoint_options
        checkpoint_activations(model, () if options is None else None, **(options or {}))

    def with_directory(self, directory: str | os.PathLike[str] | None) -> PlanDecision:
        """Return a copy that offloads to another directory; unchanged if nothing is offloaded to disk."""
        offload = self.strategy.offload
        if offload is None or not offload.needs_disk:
            return self
        return replace(self, strategy=replace(self.strategy, offload=replace(offload, directory=directory)))

    @classmethod
    def from_json(cls, text: str) -> PlanDecision:
        """Parse the broadcast text; raise the error that it reports, if any."""
        message = json.loads(text)
        if "error" in message:
            raise _ERRORS_BY_NAME.get(message["kind"], RuntimeError)(message["error"])
        strategy = message["choice"]
        return cls(Strategy(**{**strategy, "offload": Offload.from_option(strategy["offload"])}), message["why"])


_ERRORS_BY_NAME = {error.__name__: error for error in (NothingFitsError, UntraceableError, ValueError)}


@dataclass(frozen=True)
class JobTopology:
    """The device and the ranks of a job."""

    device: torch.device
    ranks: int
    """All ranks of the mesh."""
    tensor: int = 1
    """Tensor-parallel degree."""
    replicas: int = 1
    """Size of the outer data axis."""


def choose_plan(
    model: nn.Module,
    inputs: Inputs,
    topology: JobTopology,
    control: ConsistencyChecker | None = None,
    *,
    timeout: float | None = None,
    machine: str | Machine | None = None,
    memory: int | str | None = None,
    directory: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> PlanDecision:
    """Choose the fastest plan that fits on all ranks. All ranks call it; rank 0 plans and broadcasts the decision.

    ``machine``, ``memory`` and ``directory`` are those of :class:`PlanningOptions`; ``arguments`` are those of
    :func:`zeroshard.plan`. Raises :class:`NothingFitsError` on all ranks, before any memory is allocated. Without
    ``control``, all ranks of the job take part and wait for each other for up to ``timeout`` seconds. If states are
    offloaded to disk, each rank gets its own directory, not rank 0's.
    """
    control = open_consistency_checker(None, timeout) if control is None else control
    offload_option = arguments.get("offload")
    if directory is None and offload_option != AUTO:
        offload = Offload.from_option(offload_option)
        directory = offload.directory if offload is not None else None
    free_memory = _gather_free_memory(control, FreeMemory.measure(topology.device, model, directory))
    if control.rank:
        return PlanDecision.from_json(control.broadcast_text("plan", "") or "").with_directory(directory)
    try:
        resolved = machine_from_free_memory(free_memory, topology.ranks, machine, memory)
        decision = choose_plan_for_machine(model, inputs, topology, resolved, directory=directory, **arguments)
    except Exception as error:
        control.broadcast_text("plan", json.dumps({"kind": type(error).__name__, "error": str(error)}))
        raise
    control.broadcast_text("plan", decision.as_json)
    _log.info("%s", decision.reason)
    return decision


def choose_plan_for_machine(
    model: nn.Module,
    inputs: Inputs,
    topology: JobTopology,
    machine: Machine,
    *,
    directory: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> PlanDecision:
    """Choose a plan for a machine, without communication.

    "auto" in ``arguments`` leaves the stage, offload or checkpointing open.
    """
    stripped, current_mode = strip_checkpointing(model, topology.tensor)
    fixed = [name for name in ("stage", "offload") if arguments.get(name) != AUTO]
    offload = arguments.pop("offload", None)
    arguments["checkpoint"] = CHECKPOINT_MODES if arguments.get("checkpoint") == AUTO else (current_mode,)
    if offload == AUTO:
        arguments["offload"] = "every"
        machine = replace(machine, disk=0) if directory is None else machine
    else:
        arguments["offload"] = [offload]
    if arguments["stage"] == AUTO:
        is_hybrid = arguments.get("partition", "hybrid") in ("hybrid", AUTO)
        fixed_offload = None if offload == AUTO else Offload.from_option(offload)
        arguments["stage"] = _supported_stages(topology, fixed_offload, topology.replicas if is_hybrid else 1)
    if arguments.get("partition") == AUTO:
        arguments["partition"] = None
    arguments = {"tensor": topology.tensor, "replicas": topology.replicas, **arguments}

    def make_plans(**changes: Any) -> Plans:
        plans = plan(stripped, inputs, devices=topology.ranks, machine=machine, **{**arguments, **changes})
        return replace(plans, candidates=tuple(_check_shared_memory(candidate) for candidate in plans.candidates))

    plans = make_plans()
    best = plans.best
    if best is None:
        raise NothingFitsError(_no_fit_message(plans, fixed, make_plans))
    decision = PlanDecision(best.strategy, plans.reason)
    return decision.with_directory(directory) if offload == AUTO else decision


def local_machine(
    device: torch.device,
    ranks: int,
    memory: int | str | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Machine:
    """Return the machine that ``ranks`` ranks would run on here, with the memory that is free now."""
    free_memory = FreeMemory.measure(device, nn.Module(), directory)
    return machine_from_free_memory([free_memory], ranks, memory=memory)


def choose_for_shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Inputs,
    planning: Mapping[str, Any] | None,
    topology: JobTopology,
    control: ConsistencyChecker,
    needs_whole: Sequence[bool] = (),
    **options: Any,
) -> PlanDecision:
    """Choose a plan for :func:`zeroshard.shard` from its ``options``, some of which are "auto".

    ``needs_whole``: which groups of the optimizer are updated as whole parameters.
    """
    planning_options = PlanningOptions.from_mapping(planning)
    memory = _min_memory_limit(control, planning_options, inputs)
    micro_batch, example = _micro_batch_and_inputs(inputs, planning_options.micro_batch)
    data_ranks = topology.ranks // topology.tensor
    return choose_plan(
        model,
        example,
        topology,
        control,
        machine=planning_options.machine,
        memory=memory,
        directory=planning_options.directory,
        micro_batch=micro_batch,
        batch=micro_batch * planning_options.accumulate * data_ranks,
        sequence=planning_options.sequence,
        loss=_OutputHoldingLoss(planning_options.loss),
        clip=planning_options.clip,
        optimizer=find_whole_params(model, optimizer, needs_whole) if optimizer and any(needs_whole) else {},
        optimizer_states=_slice_states(optimizer, needs_whole),
        one_pass=is_supported(optimizer),
        scratch=_scratch_bytes_per_element(optimizer),
        **{"stage": 3, "precision": None, **options},
    )


def _micro_batch_and_inputs(inputs: Inputs, micro_batch: int | None) -> tuple[int, Inputs]:
    """Return the micro-batch and the inputs of a forward; an example is always used at its own batch size."""
    if inputs is None or callable(inputs):
        if micro_batch is None:
            raise ValueError(
                "the number of samples per forward is not known: pass inputs=, an example of one rank's arguments of "
                "the model, or planning={'micro_batch': …}"
            )
        return micro_batch, inputs
    lengths = {tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()}
    batch_size = lengths.pop() if len(lengths) == 1 else 1  # a graph has nodes and edges: count it as one sample
    if micro_batch is not None and micro_batch != batch_size:
        raise ValueError(
            f"micro_batch must be the number of samples in the example inputs ({batch_size}), got {micro_batch}"
        )
    return batch_size, lambda _: inputs


class _OutputHoldingLoss:
    """A loss that holds the model's output until backward ends, like a loop that assigns it to a variable."""

    def __init__(self, loss: LossFn) -> None:
        self._loss, self._output = loss, None

    def __call__(self, output: Any) -> torch.Tensor:
        self._output = output  # replaces the previous one
        return compute_loss(output, self._loss)


def _slice_states(optimizer: torch.optim.Optimizer | None, needs_whole: Sequence[bool]) -> int:
    """Return the state values per element of the first group that is updated on flat slices."""
    if optimizer is None or not any(needs_whole):
        return state_bytes_per_element(optimizer) // 4
    groups = [group for group, is_whole in zip(optimizer.param_groups, needs_whole, strict=True) if not is_whole]
    found = measure_update(optimizer, groups[0], torch.Size([2**10]), torch.float32) if groups else None
    return 2 if found is None else found.state_bytes // 2**12


def _scratch_bytes_per_element(optimizer: torch.optim.Optimizer | None) -> float:
    groups = optimizer.param_groups if optimizer is not None else []
    return 0.0 if all(group.get("fused") for group in groups) else UNFUSED_SCRATCH_BYTES_PER_ELEMENT


def _supported_stages(topology: JobTopology, offload: Offload | None, replicas: int) -> list[int]:
    """Return the stages that support this offload, if there are ``replicas`` of all states."""
    stages = []
    for stage in STAGES:
        try:
            Placement.from_stage(stage, topology.ranks // topology.tensor // replicas, offload, replicas)
        except ValueError:
            continue
        stages.append(stage)
    return stages


def _check_shared_memory(candidate: Plan) -> Plan:
    """Check a plan for CPUs again: host and device share one memory, so the host bytes count in addition."""
    needed = candidate.memory + candidate.footprint.host
    if not candidate.fits or not candidate.machine.is_cpu or needed <= candidate.machine.memory:
        return candidate
    return replace(
        candidate,
        shortfall=f"it needs {format_bytes(int(needed))} per rank, but a rank has "
        f"{format_bytes(candidate.machine.memory)}",
    )


def _no_fit_message(plans: Plans, fixed_options: Sequence[str], replan: Callable[..., Plans]) -> str:
    """Say which plan is the smallest and what may help; ``fixed_options`` are those that were not "auto"."""
    smallest = plans.best_or_smallest.strategy
    if smallest.checkpoint == "none":
        recomputing = replan(checkpoint=CHECKPOINT_MODES).best
        if recomputing is not None:
            return f"{plans.reason}. With recomputed activations, this fits: {recomputing.strategy.description}"
    remedies = ["more ranks", "shorter samples"]
    remedies += ["a smaller micro-batch"] if smallest.micro_batch > 1 else []
    remedies += [f"{name}='auto' instead of a fixed value" for name in fixed_options]
    return f"{plans.reason}. Try {', '.join(remedies)}"


def _min_memory_limit(control: ConsistencyChecker, planning: PlanningOptions, inputs: Inputs) -> int | None:
    """Return the smallest memory limit of all ranks; raise on all ranks if they describe different loops."""
    local = [planning.describe(inputs), planning.memory]
    gathered = control.gather_text("loop", json.dumps(local, default=str))  # empty as in _gather_free_memory
    loops = {rank: json.loads(text) for rank, text in gathered.items()} or {0: local}
    first, *_ = (described for described, _ in loops.values())
    for rank, (described, _) in loops.items():
        if described != first:
            raise ValueError(
                f"all ranks must pass the same planning options: rank 0 has {first}; rank {rank} has {described}. "
                "As inputs, pass an example as large as the largest batch of any rank"
            )
    limits = [parse_bytes("memory", memory) for _, memory in loops.values()]
    return min((nbytes for nbytes in limits if nbytes is not None), default=None)


def _gather_free_memory(control: ConsistencyChecker, local: FreeMemory) -> list[FreeMemory]:
    """Return the free memory of every rank; only the local one for a single rank or a backend without communication."""
    gathered = control.gather_text("space", json.dumps(asdict(local)))  # it carries any text, not only errors
    return [FreeMemory(**json.loads(gathered[rank])) for rank in sorted(gathered)] or [local]
