"""Auto: the fastest plan that fits what the ranks of this job have, found by one of them and told to all."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from zeroshard.activations.checkpoint import checkpoint_activations
from zeroshard.comm.consistency import ConsistencyChecker
from zeroshard.config.offload import Offload, parse_bytes
from zeroshard.engine.hooks import tensors_in
from zeroshard.engine.rank_checks import open_consistency_checker
from zeroshard.memory.report import format_bytes
from zeroshard.optim.fused_adam.kernel_inputs import is_supported
from zeroshard.optim.slices import state_bytes_per_element
from zeroshard.planner.free_memory import FreeMemory, machine_from_free_memory
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plan import Plan, Plans, plan
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.tracing.checkpointing import strip_checkpointing
from zeroshard.planner.tracing.inputs import Inputs, LossFn, compute_loss
from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, UntraceableError
from zeroshard.sharding.placement import Placement

AUTO = "auto"
STAGES = (0, 1, 2, 3)
UNFUSED_SCRATCH_BYTES_PER_ELEMENT = (
    8.0  # bytes that an optimizer's kernels take for each element they update, where they are not fused
)

_log = logging.getLogger("zeroshard")


class NothingFitsError(ValueError):
    """No plan fits the memory there is."""


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """What :func:`zeroshard.shard` can be told, as ``planning``, of the loop and the machine that it plans for."""

    micro_batch: int | None = None
    """Samples of one forward on one rank. None: the first dimension of the example that ``inputs`` is."""
    accumulate: int = 1
    """Backwards a step."""
    sequence: int | None = None
    """Tokens a sample, for language models that need no ``inputs``."""
    loss: LossFn = None
    """Makes one number of the model's output, where that is none already: it takes memory, too."""
    clip: bool = True
    """Whether gradients are clipped by their norm."""
    machine: str | Machine | None = None
    """Whose rates are taken, as :func:`zeroshard.plan` takes it. None: as measured here, else the nearest preset's.
    What it has of memory is the most that is counted on; so is what is really left."""
    memory: int | str | None = None
    """The most of a device that may be taken, as a number of bytes or "40GB"."""
    directory: str | os.PathLike[str] | None = None
    """A directory on a fast local disk, where states may rest. None: none do."""

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any] | None) -> PlanningOptions:
        """Refuse what it does not know.

        >>> PlanningOptions.from_mapping({"micro_batches": 2})
        Traceback (most recent call last):
            ...
        TypeError: planning knows no 'micro_batches': it has micro_batch, accumulate, sequence, loss, clip, machine, ...
        """
        known = [field.name for field in fields(cls)]
        for name in options or {}:
            if name not in known:
                raise TypeError(f"planning knows no {name!r}: it has {', '.join(known)}")
        found = cls(**(options or {}))
        for name in ("micro_batch", "accumulate"):
            value = getattr(found, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is a whole number from 1 up, got {value!r}")
        if found.loss is not None and not callable(found.loss):
            raise TypeError(f"loss is a function of the model's output, or None, got {found.loss!r}")
        return found

    def describe(self, inputs: Inputs) -> str:
        """What all ranks must plan with alike, in words.

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
    """What was chosen, and why in a line."""

    strategy: Strategy
    reason: str

    @property
    def as_json(self) -> str:
        """As one rank tells it to others.

        >>> said = PlanDecision(Strategy(stage=2, offload=Offload(optimizer="host")), "it is fast")
        >>> PlanDecision.from_json(said.as_json) == said
        True
        """
        return json.dumps({"choice": asdict(self.strategy), "why": self.reason}, default=os.fspath)

    def apply_checkpointing(self, model: nn.Module) -> None:
        """Have a model's blocks keep what was chosen."""
        activations = self.strategy.checkpoint_options
        checkpoint_activations(model, () if activations is None else None, **(activations or {}))

    def with_directory(self, directory: str | os.PathLike[str] | None) -> PlanDecision:
        """The same with what rests on disk in another directory."""
        offload = self.strategy.offload
        if offload is None or not offload.needs_disk:
            return self
        return replace(self, strategy=replace(self.strategy, offload=replace(offload, directory=directory)))

    @classmethod
    def from_json(cls, text: str) -> PlanDecision:
        """What another rank told; raises what it could not do."""
        found = json.loads(text)
        if "error" in found:
            raise _ERRORS_BY_NAME.get(found["kind"], RuntimeError)(found["error"])
        choice = found["choice"]
        return cls(Strategy(**{**choice, "offload": Offload.from_option(choice["offload"])}), found["why"])


_ERRORS_BY_NAME = {error.__name__: error for error in (NothingFitsError, UntraceableError, ValueError)}


@dataclass(frozen=True)
class JobTopology:
    """Where a job runs."""

    device: torch.device
    ranks: int
    """That share the states, times ``tensor``."""
    tensor: int = 1
    """That divide each layer."""
    replicas: int = 1
    """Groups of ``ranks`` with the same states."""


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
    **question: Any,
) -> PlanDecision:
    """Choose the fastest plan that fits on all ranks. All of them call it, the first decides, and all hear it.

    ``machine``, ``memory`` and ``directory`` are those of :class:`PlanningOptions`, ``question`` what
    :func:`zeroshard.plan` is asked. Raises :class:`NothingFitsError` on all ranks alike, before anything is taken.
    Without ``control``, all ranks of the job take part, and wait for each other for ``timeout`` seconds. Where states
    rest on disk, each rank hears of its own directory, not of the first's.
    """
    control = open_consistency_checker(None, timeout) if control is None else control
    given = question.get("offload")
    if directory is None and given != AUTO:
        offload = Offload.from_option(given)
        directory = offload.directory if offload is not None else None
    spaces = _gather_free_memory(control, FreeMemory.measure(topology.device, model, directory))
    if control.rank:
        return PlanDecision.from_json(control.broadcast_text("plan", "") or "").with_directory(directory)
    try:
        found = machine_from_free_memory(spaces, topology.ranks, machine, memory)
        decision = choose_plan_for_machine(model, inputs, topology, found, directory=directory, **question)
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
    **question: Any,
) -> PlanDecision:
    """The same on a machine, without ranks. An open stage, offload or checkpointing is "auto" in the question."""
    copied, kept = strip_checkpointing(model, topology.tensor)
    fixed = [name for name in ("stage", "offload") if question.get(name) != AUTO]
    given = question.pop("offload", None)
    question["checkpoint"] = CHECKPOINT_MODES if question.get("checkpoint") == AUTO else (kept,)
    if given == AUTO:
        question["offload"] = "every"
        machine = replace(machine, disk=0) if directory is None else machine
    else:
        question["offload"] = [given]
    if question["stage"] == AUTO:
        question["stage"] = _supported_stages(topology, None if given == AUTO else Offload.from_option(given))

    def planned(**more: Any) -> Plans:
        where = {
            "devices": topology.ranks,
            "replicas": topology.replicas,
            "machine": machine,
            "tensor": topology.tensor,
        }
        asked = {**where, **question, **more}
        return _with_shared_host_memory(plan(copied, inputs, **asked))

    plans = planned()
    best = plans.best
    if best is None:
        raise NothingFitsError(_no_fit_message(plans, fixed, planned))
    decision = PlanDecision(best.strategy, plans.reason)
    return decision.with_directory(directory) if given == AUTO else decision


def choose_for_shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Inputs,
    planning: Mapping[str, Any] | None,
    topology: JobTopology,
    control: ConsistencyChecker,
    **options: Any,
) -> PlanDecision:
    """Choose for :func:`zeroshard.shard`, whose ``options`` these are, those that are "auto" among them."""
    told = PlanningOptions.from_mapping(planning)
    memory = _min_memory_limit(control, told, inputs)
    micro_batch, example = _micro_batch_and_inputs(inputs, told.micro_batch)
    data = topology.ranks // topology.tensor
    return choose_plan(
        model,
        example,
        topology,
        control,
        machine=told.machine,
        memory=memory,
        directory=told.directory,
        micro_batch=micro_batch,
        batch=micro_batch * told.accumulate * data,
        sequence=told.sequence,
        loss=_OutputHoldingLoss(told.loss),
        clip=told.clip,
        optimizer_states=state_bytes_per_element(optimizer) // 4,
        one_pass=is_supported(optimizer),
        scratch=_scratch_bytes_per_element(optimizer),
        **{"stage": 3, "precision": None, **options},
    )


def _micro_batch_and_inputs(inputs: Inputs, micro_batch: int | None) -> tuple[int, Inputs]:
    """The samples of one forward, and what it is called with: of an example, neither more nor less than it has."""
    if inputs is None or callable(inputs):
        if micro_batch is None:
            raise ValueError(
                "it is not known how many samples a forward has: give inputs=, an example of what one rank calls the "
                "model with, or planning={'micro_batch': …}"
            )
        return micro_batch, inputs
    lengths = {tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()}
    found = lengths.pop() if len(lengths) == 1 else 1  # a graph has nodes and edges: one sample
    if micro_batch is not None and micro_batch != found:
        raise ValueError(f"planning says micro_batch {micro_batch}, and the example that inputs is has {found} samples")
    return found, lambda _: inputs


class _OutputHoldingLoss:
    """A loss that holds the model's output until backward is over, as a loop does that has a name for it."""

    def __init__(self, loss: LossFn) -> None:
        self._loss, self._output = loss, None

    def __call__(self, output: Any) -> torch.Tensor:
        """Make one number of it."""
        self._output = output  # in the place of the one before
        return compute_loss(output, self._loss)


def _scratch_bytes_per_element(optimizer: torch.optim.Optimizer | None) -> float:
    groups = optimizer.param_groups if optimizer is not None else []
    return 0.0 if all(group.get("fused") for group in groups) else UNFUSED_SCRATCH_BYTES_PER_ELEMENT


def _supported_stages(topology: JobTopology, offload: Offload | None) -> list[int]:
    """The stages that can offload what is to be offloaded."""
    found = []
    for stage in STAGES:
        try:
            Placement.from_stage(stage, topology.ranks // topology.tensor, offload, topology.replicas)
        except ValueError:
            continue
        found.append(stage)
    return found


def _with_shared_host_memory(plans: Plans) -> Plans:
    """Plans for CPUs, where a device's memory is the host's: what rests "on the host" needs space beside the rest."""
    return replace(plans, candidates=tuple(_check_shared_memory(found) for found in plans.candidates))


def _check_shared_memory(candidate: Plan) -> Plan:
    wanted = candidate.memory + candidate.footprint.host
    if not candidate.fits or candidate.machine.kind != "cpu" or wanted <= candidate.machine.memory:
        return candidate
    return replace(
        candidate,
        shortfall=f"it needs {format_bytes(int(wanted))} a rank, which has {format_bytes(candidate.machine.memory)}",
    )


def _no_fit_message(plans: Plans, fixed_options: Sequence[str], replan: Callable[..., Plans]) -> str:
    """What comes nearest, and what to do; ``fixed`` is what was not left open."""
    least = min(plans.candidates, key=lambda found: found.memory).strategy
    if least.checkpoint == "none":
        more = replan(checkpoint=CHECKPOINT_MODES).best
        if more is not None:
            return f"{plans.reason}. With activations recomputed, this fits: {more.strategy.description}"
    helps = ["more ranks", "shorter samples"]
    helps += ["a smaller micro-batch"] if least.micro_batch > 1 else []
    helps += [f"{name} 'auto', which is given" for name in fixed_options]
    return f"{plans.reason}. What may help: {', '.join(helps)}"


def _min_memory_limit(control: ConsistencyChecker, planning: PlanningOptions, inputs: Inputs) -> int | None:
    """The least memory that a rank was allowed; raises on all ranks where they were not told of the same loop."""
    said = control.gather_text(
        "loop", json.dumps([planning.describe(inputs), planning.memory], default=str)
    )  # as for spaces
    loops = {rank: json.loads(words) for rank, words in said.items()} or {
        0: [planning.describe(inputs), planning.memory]
    }
    first, *_ = loops.values()
    for rank, (described, _) in loops.items():
        if described != first[0]:
            raise ValueError(
                f"ranks were told of different loops to plan for: rank 0 has {first[0]}; rank {rank} has {described}. "
                "Give the same on all ranks: as inputs, an example as large as the largest batch of any"
            )
    allowed = [parse_bytes("memory", memory) for _, memory in loops.values()]
    return min((nbytes for nbytes in allowed if nbytes is not None), default=None)


def _gather_free_memory(control: ConsistencyChecker, local: FreeMemory) -> list[FreeMemory]:
    """What every rank says; of a lone rank, or on a backend that communicates nothing, its own word."""
    said = control.gather_text("space", json.dumps(asdict(local)))  # carries any words, and these are no complaint
    return [FreeMemory(**json.loads(said[rank])) for rank in sorted(said)] or [local]
