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
from zeroshard.agreement import Agreement
from zeroshard.device.strip import serves
from zeroshard.engine.alike import open_agreement
from zeroshard.engine.hooks import tensors_in
from zeroshard.memory.report import size
from zeroshard.offload import Offload, read_bytes
from zeroshard.placement import Placement
from zeroshard.planner.choice import Choice
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plan import Plan, Plans, plan
from zeroshard.planner.space import Space, machine_of
from zeroshard.planner.traces.inputs import Inputs, Loss, loss_of
from zeroshard.planner.traces.recomputed import as_planned
from zeroshard.planner.traces.tracing import CHECKPOINTS, UntraceableError
from zeroshard.runs import states_of_an_element

AUTO = "auto"
STAGES = (0, 1, 2, 3)
UNFUSED = 8.0  # bytes that an optimizer's kernels take for each element they update, where they are not fused

_log = logging.getLogger("zeroshard")


class NothingFitsError(ValueError):
    """No plan fits the memory there is."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What :func:`zeroshard.shard` can be told, as ``planning``, of the loop and the machine that it plans for."""

    micro_batch: int | None = None
    """Samples of one forward on one rank. None: the first dimension of the example that ``inputs`` is."""
    accumulate: int = 1
    """Backwards a step."""
    sequence: int | None = None
    """Tokens a sample, for language models that need no ``inputs``."""
    loss: Loss = None
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
    def of(cls, given: Mapping[str, Any] | None) -> Planning:
        """Refuse what it does not know.

        >>> Planning.of({"micro_batches": 2})
        Traceback (most recent call last):
            ...
        TypeError: planning knows no 'micro_batches': it has micro_batch, accumulate, sequence, loss, clip, machine, ...
        """
        known = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise TypeError(f"planning knows no {name!r}: it has {', '.join(known)}")
        found = cls(**(given or {}))
        for name in ("micro_batch", "accumulate"):
            value = getattr(found, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is a whole number from 1 up, got {value!r}")
        if found.loss is not None and not callable(found.loss):
            raise TypeError(f"loss is a function of the model's output, or None, got {found.loss!r}")
        return found

    def described(self, inputs: Inputs) -> str:
        """What all ranks must plan with alike, in words.

        >>> Planning(accumulate=2).described((torch.ones(3, 4), torch.ones(3)))
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
class Decision:
    """What was chosen, and why in a line."""

    choice: Choice
    why: str

    @property
    def told(self) -> str:
        """As one rank tells it to others.

        >>> said = Decision(Choice(stage=2, offload=Offload(optimizer="host")), "it is fast")
        >>> Decision.read(said.told) == said
        True
        """
        return json.dumps({"choice": asdict(self.choice), "why": self.why}, default=os.fspath)

    def recompute(self, model: nn.Module) -> None:
        """Have a model's blocks keep what was chosen."""
        activations = self.choice.activations
        checkpoint_activations(model, () if activations is None else None, **(activations or {}))

    def resting_in(self, directory: str | os.PathLike[str] | None) -> Decision:
        """The same with what rests on disk in another directory."""
        offload = self.choice.offload
        if offload is None or not offload.uses_disk:
            return self
        return replace(self, choice=replace(self.choice, offload=replace(offload, directory=directory)))

    @classmethod
    def read(cls, told: str) -> Decision:
        """What another rank told; raises what it could not do."""
        found = json.loads(told)
        if "error" in found:
            raise _ERRORS.get(found["kind"], RuntimeError)(found["error"])
        choice = found["choice"]
        return cls(Choice(**{**choice, "offload": Offload.of(choice["offload"])}), found["why"])


_ERRORS = {error.__name__: error for error in (NothingFitsError, UntraceableError, ValueError)}


@dataclass(frozen=True)
class Site:
    """Where a job runs."""

    device: torch.device
    ranks: int
    """That share the states, times ``tensor``."""
    tensor: int = 1
    """That divide each layer."""
    replicas: int = 1
    """Groups of ``ranks`` with the same states."""


def decide(
    model: nn.Module,
    inputs: Inputs,
    site: Site,
    control: Agreement | None = None,
    *,
    timeout: float | None = None,
    machine: str | Machine | None = None,
    memory: int | str | None = None,
    directory: str | os.PathLike[str] | None = None,
    **question: Any,
) -> Decision:
    """Choose the fastest plan that fits on all ranks. All of them call it, the first decides, and all hear it.

    ``machine``, ``memory`` and ``directory`` are those of :class:`Planning`, ``question`` what
    :func:`zeroshard.plan` is asked. Raises :class:`NothingFitsError` on all ranks alike, before anything is taken.
    Without ``control``, all ranks of the job take part, and wait for each other for ``timeout`` seconds. Where states
    rest on disk, each rank hears of its own directory, not of the first's.
    """
    control = open_agreement(None, timeout) if control is None else control
    given = question.get("offload")
    if directory is None and given != AUTO:
        offload = Offload.of(given)
        directory = offload.directory if offload is not None else None
    spaces = _told_by_all(control, Space.of(site.device, model, directory))
    if control.rank:
        return Decision.read(control.exchange("plan", "") or "").resting_in(directory)
    try:
        found = machine_of(spaces, site.ranks, machine, memory)
        decision = decided(model, inputs, site, found, directory=directory, **question)
    except Exception as error:
        control.exchange("plan", json.dumps({"kind": type(error).__name__, "error": str(error)}))
        raise
    control.exchange("plan", decision.told)
    _log.info("%s", decision.why)
    return decision


def decided(
    model: nn.Module,
    inputs: Inputs,
    site: Site,
    machine: Machine,
    *,
    directory: str | os.PathLike[str] | None = None,
    **question: Any,
) -> Decision:
    """The same on a machine, without ranks. An open stage, offload or checkpointing is "auto" in the question."""
    copied, kept = as_planned(model, site.tensor)
    fixed = [name for name in ("stage", "offload") if question.get(name) != AUTO]
    given = question.pop("offload", None)
    question["checkpoint"] = CHECKPOINTS if question.get("checkpoint") == AUTO else (kept,)
    if given == AUTO:
        question["offload"] = "every"
        machine = replace(machine, disk=0) if directory is None else machine
    else:
        question["offload"] = [given]
    if question["stage"] == AUTO:
        question["stage"] = _stages(site, None if given == AUTO else Offload.of(given))

    def planned(**more: Any) -> Plans:
        where = {"devices": site.ranks, "replicas": site.replicas, "machine": machine, "tensor": site.tensor}
        asked = {**where, **question, **more}
        return _together(plan(copied, inputs, **asked))

    plans = planned()
    best = plans.best
    if best is None:
        raise NothingFitsError(_advice(plans, fixed, planned))
    decision = Decision(best.choice, plans.why)
    return decision.resting_in(directory) if given == AUTO else decision


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Inputs,
    planning: Mapping[str, Any] | None,
    site: Site,
    control: Agreement,
    **options: Any,
) -> Decision:
    """Choose for :func:`zeroshard.shard`, whose ``options`` these are, those that are "auto" among them."""
    told = Planning.of(planning)
    memory = _least_memory(control, told, inputs)
    micro_batch, example = _batch_of(inputs, told.micro_batch)
    data = site.ranks // site.tensor
    return decide(
        model,
        example,
        site,
        control,
        machine=told.machine,
        memory=memory,
        directory=told.directory,
        micro_batch=micro_batch,
        batch=micro_batch * told.accumulate * data,
        sequence=told.sequence,
        loss=_Loop(told.loss),
        clip=told.clip,
        optimizer_states=states_of_an_element(optimizer) // 4,
        one_pass=serves(optimizer),
        scratch=_scratch(optimizer),
        **{"stage": 3, "precision": None, **options},
    )


def _batch_of(inputs: Inputs, micro_batch: int | None) -> tuple[int, Inputs]:
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


class _Loop:
    """A loss that holds the model's output until backward is over, as a loop does that has a name for it."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._output = loss, None

    def __call__(self, output: Any) -> torch.Tensor:
        """Make one number of it."""
        self._output = output  # in the place of the one before
        return loss_of(output, self._loss)


def _scratch(optimizer: torch.optim.Optimizer | None) -> float:
    groups = optimizer.param_groups if optimizer is not None else []
    return 0.0 if all(group.get("fused") for group in groups) else UNFUSED


def _stages(site: Site, offload: Offload | None) -> list[int]:
    """The stages that can offload what is to be offloaded."""
    found = []
    for stage in STAGES:
        try:
            Placement.of_stage(stage, site.ranks // site.tensor, offload, site.replicas)
        except ValueError:
            continue
        found.append(stage)
    return found


def _together(plans: Plans) -> Plans:
    """Plans for CPUs, where a device's memory is the host's: what rests "on the host" needs space beside the rest."""
    return replace(plans, every=tuple(_in_one_memory(found) for found in plans.every))


def _in_one_memory(found: Plan) -> Plan:
    wanted = found.memory + found.footprint.host
    if not found.fits or found.machine.kind != "cpu" or wanted <= found.machine.memory:
        return found
    return replace(found, lacks=f"it needs {size(int(wanted))} a rank, which has {size(found.machine.memory)}")


def _advice(plans: Plans, fixed: Sequence[str], again: Callable[..., Plans]) -> str:
    """What comes nearest, and what to do; ``fixed`` is what was not left open."""
    least = min(plans.every, key=lambda found: found.memory).choice
    if least.checkpoint == "none":
        more = again(checkpoint=CHECKPOINTS).best
        if more is not None:
            return f"{plans.why}. With activations recomputed, this fits: {more.choice.words}"
    helps = ["more ranks", "shorter samples"]
    helps += ["a smaller micro-batch"] if least.micro_batch > 1 else []
    helps += [f"{name} 'auto', which is given" for name in fixed]
    return f"{plans.why}. What may help: {', '.join(helps)}"


def _least_memory(control: Agreement, told: Planning, inputs: Inputs) -> int | None:
    """The least memory that a rank was allowed; raises on all ranks where they were not told of the same loop."""
    said = control.complain("loop", json.dumps([told.described(inputs), told.memory], default=str))  # as for spaces
    loops = {rank: json.loads(words) for rank, words in said.items()} or {0: [told.described(inputs), told.memory]}
    first, *_ = loops.values()
    for rank, (described, _) in loops.items():
        if described != first[0]:
            raise ValueError(
                f"ranks were told of different loops to plan for: rank 0 has {first[0]}; rank {rank} has {described}. "
                "Give the same on all ranks: as inputs, an example as large as the largest batch of any"
            )
    allowed = [read_bytes("memory", memory) for _, memory in loops.values()]
    return min((nbytes for nbytes in allowed if nbytes is not None), default=None)


def _told_by_all(control: Agreement, mine: Space) -> list[Space]:
    """What every rank says; of a lone rank, or on a backend that communicates nothing, its own word."""
    said = control.complain("space", json.dumps(asdict(mine)))  # carries any words, and these are no complaint
    return [Space(**json.loads(said[rank])) for rank in sorted(said)] or [mine]
