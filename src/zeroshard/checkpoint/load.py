"""load(): fill a model and its optimizer from a checkpoint, or a model from weights that others wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_chunks

from zeroshard.checkpoint.chunks import Chunks, Turned
from zeroshard.checkpoint.contents import Contents
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.foreign import ForeignReader, is_foreign, open_foreign, saved_of
from zeroshard.checkpoint.generators import set_generators
from zeroshard.checkpoint.history import find_checkpoint
from zeroshard.checkpoint.index import Index, Saved, is_checkpoint
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.pending import wait_for_pending
from zeroshard.checkpoint.plain import decode, give_state
from zeroshard.checkpoint.reader import LoadPlans, Reader, TensorReader
from zeroshard.checkpoint.states import (
    Group,
    Held,
    States,
    engine_of,
    persistent_buffers,
    states_of,
    ties_of,
    unwrapped,
)
from zeroshard.optimizer import ShardedOptimizer


@dataclass
class Loaded:
    """What a load brought besides the states.

    >>> import tempfile, torch, zeroshard
    >>> model = torch.nn.Linear(2, 1)
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-1", model, extra={"step": 1}).path
    >>> loaded = zeroshard.load(path, model)
    >>> loaded.extra, loaded.missing
    ({'step': 1}, [])
    """

    path: Path
    extra: dict[str, Any] = field(default_factory=dict)
    """What was saved as ``extra``."""
    rank_extra: list[Any] = field(default_factory=list)
    """What each rank saved as ``rank_extra``."""
    missing: list[str] = field(default_factory=list)
    """Parameters and buffers that are not in the file, which stay as they were, and parameters that the file has no
    optimizer states for, which begin anew."""
    unexpected: list[str] = field(default_factory=list)
    """Those in the file that the model and optimizer have not."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    weights: bool = True,
    strict: bool = True,
    random: bool | None = None,
    rename: Callable[[str], str] | None = None,
) -> Loaded:
    """Fill a model, and its optimizer where one is given, from ``path``. All ranks call it together.

    ``path`` is a checkpoint of :func:`save`, written on any number of ranks at any stage and precision; a directory of
    such, for the latest; or weights alone: a safetensors file, a Hugging Face directory of them, or a state dict of
    ``torch.save``. Each rank reads what it holds, straight into place.

    - ``extra``: objects to be given their state back, under the names they were saved with (a scheduler).
    - ``weights=False``: the optimizer's states without the model's.
    - ``strict=False``: leave out what only one side has; :class:`Loaded` lists it. Shapes have to be the same.
    - ``random``: give this rank its random states back; by default where the optimizer is loaded, to go on from there.
    - ``rename``: maps the names of foreign weights to the model's.

    What is wrong with names, shapes or files is found before anything changes. Damage inside a file is found when it is
    read: a sharded model then refuses to go on until a load has succeeded.

    >>> import tempfile, zeroshard
    >>> model = nn.Linear(2, 1)
    >>> torch.save(model.state_dict(), tempfile.gettempdir() + "/linear.pt")
    >>> model, _ = zeroshard.shard(nn.Linear(2, 1), stage=3)
    >>> zeroshard.load(tempfile.gettempdir() + "/linear.pt", model).missing
    []
    """
    wait_for_pending()
    model = unwrapped(model)
    engine = engine_of(model)
    meeting = Meeting.call(engine, "load")
    if engine is not None:
        engine.settle()
    source = meeting.together(f"{path} cannot be loaded", lambda: _open(Path(path), meeting, rename))

    def plan() -> _Plan:
        if engine is not None and engine.running:
            raise CheckpointError("a forward or backward is under way: load between steps")
        return _plan(source, model, optimizer, weights, strict)

    planned = meeting.together(f"{source.path} cannot be loaded", plan)
    given = meeting.together(f"{source.path} cannot be loaded", lambda: _Given.read(source, meeting.rank, extra))
    parts = [*(["weights"] if weights else []), *(["optimizer"] if optimizer is not None else [])]
    if engine is not None:
        why = f"the load of {source.path} was not finished: load a whole checkpoint"
        engine.spoilt |= dict.fromkeys(parts, why)
    targets = meeting.together(f"{source.path} cannot be loaded", planned.make_room)
    _read(source, targets, meeting)
    if weights:
        planned.states.adopt()
    if engine is not None:
        for part in parts:
            del engine.spoilt[part]
    if (optimizer is not None if random is None else random) and given.random is not None:
        set_generators(given.random)
    meeting.together("a state of extra was not taken", lambda: give_state(dict(extra or {}), given.extra))
    return Loaded(source.path, given.extra, given.rank_extra, planned.missing, planned.unexpected)


@dataclass
class _Source:
    """What is read."""

    path: Path
    tensors: dict[str, Saved]
    reader: TensorReader
    index: Index | None  # of a checkpoint; None of weights alone


def _open(path: Path, meeting: Meeting, rename: Callable[[str], str] | None) -> _Source:
    if not is_checkpoint(path) and is_foreign(path):
        foreign = open_foreign(path, rename)
        return _Source(path, saved_of(foreign), ForeignReader(foreign), None)
    found = find_checkpoint(path)
    index = Index.read(found)
    for record in index.files:
        file = found / record.name
        size = file.stat().st_size if file.is_file() else -1
        if size != record.nbytes:
            state = "is missing" if size < 0 else f"has {size} bytes, was written with {record.nbytes}: it is truncated"
            raise CheckpointError(f"{file} {state}. Load an earlier checkpoint, or bring the file anew")
    return _Source(found, index.tensors, Reader(found, index), index)


@dataclass
class _Plan:
    """What goes where."""

    states: States
    targets: dict[str, Held]  # of the model
    tensors: dict[str, Saved]
    groups: list[Group] | None
    opened: dict[str, dict[str, Any]] | None  # the optimizer's states by parameter; None: none are loaded
    optimizer: torch.optim.Optimizer | None
    loss_scale: list[float] | None
    missing: list[str]
    unexpected: list[str]

    def make_room(self) -> dict[str, Chunks]:
        """Give every tensor that is loaded its place."""
        targets = dict(self.targets)
        if self.opened is not None:
            self.states.open(self.groups, self.opened)
            targets |= {f"optimizer/{name}": held for name, held in self.states.states().items()}
            if self.loss_scale is not None and isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.load_loss_scale(self.loss_scale)
        return {fqn: _line(held, self.tensors[fqn]) for fqn, held in targets.items()}


def _line(held: Held, saved: Saved) -> Chunks:
    if held.order == saved.order:
        return Chunks(saved.numel, saved.dtype, held.parts)
    return Turned.make(saved.shape, saved.dtype, saved.order, held.order, held.parts)


def _plan(
    source: _Source, model: nn.Module, optimizer: torch.optim.Optimizer | None, weights: bool, strict: bool
) -> _Plan:
    states = states_of(model, optimizer)
    missing: list[str] = []
    unexpected: list[str] = []
    targets: dict[str, Held] = {}
    tensors = dict(source.tensors)
    if weights:
        wanted = states.parameters() | {name: Held.whole(name, b) for name, b in persistent_buffers(model)}
        ties = ties_of(model)
        saved_ties = source.index.ties if source.index is not None else {}
        found = {fqn.removeprefix("model/"): saved for fqn, saved in tensors.items() if fqn.startswith("model/")}
        for name, held in wanted.items():
            other = _other_name(name, found, ties, saved_ties)
            if other is None:
                left_out = source.index is not None and source.index.parameters.get(name) is False  # frozen=False
                missing += [] if left_out else [name]
            else:
                targets[f"model/{name}"] = held
                tensors[f"model/{name}"] = source.tensors[f"model/{other}"]
                if other != name:
                    source.reader.aliases[f"model/{name}"] = f"model/{other}"
        known = {*wanted, *ties, *(_other_name(name, found, ties, saved_ties) for name in wanted)}
        unexpected = [name for name in found if name not in known]
        _refuse_unlike(source.path, targets, tensors)
    plan = _Plan(states, targets, tensors, None, None, optimizer, None, missing, unexpected)
    if optimizer is not None:
        _plan_optimizer(plan, source, optimizer, strict)
    if strict and (missing or unexpected):
        told = [f"not in the file: {', '.join(missing)}"] if missing else []
        told += [f"only in the file: {', '.join(unexpected)}"] if unexpected else []
        raise CheckpointError(f"{source.path} does not fit. {'. '.join(told)}. strict=False leaves these out")
    return plan


def _other_name(
    name: str, found: Mapping[str, Any], ties: Mapping[str, str], saved_ties: Mapping[str, str]
) -> str | None:
    """The name under which a parameter was saved: its own, or that of one it is, or was, tied with."""
    names = [name, saved_ties.get(name), *(alias for alias, first in ties.items() if first == name)]
    return next((other for other in names if other in found), None)


def _refuse_unlike(path: Path, targets: Mapping[str, Held], tensors: Mapping[str, Saved]) -> None:
    unlike = []
    for fqn, held in targets.items():
        saved, name = tensors[fqn], fqn.partition("/")[2]
        saved.refuse_gaps(path, fqn)
        if tuple(saved.shape) != tuple(held.shape):
            unlike.append(f"{name} is {list(saved.shape)} there and {list(held.shape)} here")
        elif not torch.can_cast(saved.dtype, held.dtype):
            unlike.append(f"{name} is {saved.dtype} there and {held.dtype} here")
    if unlike:
        raise CheckpointError(f"{path} is of another model: {'; '.join(unlike)}")


def _plan_optimizer(plan: _Plan, source: _Source, optimizer: torch.optim.Optimizer, strict: bool) -> None:
    if source.index is None or source.index.optimizer is None:
        raise CheckpointError(f"{source.path} holds no optimizer states: load(path, model) loads the weights alone")
    saved, kind = source.index.optimizer, type(getattr(optimizer, "inner", optimizer)).__name__
    if strict and saved["class"] != kind:
        raise CheckpointError(
            f"{source.path} was saved with torch.optim.{saved['class']}, the optimizer is {kind}: load(path, model) "
            "loads the weights alone"
        )
    if saved["class"] != kind and not {saved["class"], kind} <= {"Adam", "AdamW"}:  # states that mean something else
        plan.unexpected += [f"{name} (optimizer)" for group in saved["groups"] for name in group["names"]]
        return
    own = plan.states.groups()
    options = _decode(source, [group["options"] for group in saved["groups"]])
    groups = [Group(group["names"], chosen) for group, chosen in zip(saved["groups"], options, strict=True)]
    mine = [name for group in own for name in group.names]
    theirs = [name for group in groups for name in group.names]
    alike = [set(group.names) for group in groups] == [set(group.names) for group in own]
    if alike and saved["class"] == kind:
        plan.groups = groups
    elif strict and set(mine) == set(theirs):
        raise CheckpointError(
            f"{source.path} has its parameters in other groups ({[len(group.names) for group in groups]}) than the "
            f"optimizer ({[len(group.names) for group in own]}): group them alike, or give strict=False to load the "
            "states and keep this optimizer's options"
        )
    plan.missing += [f"{name} (optimizer)" for name in mine if name not in set(theirs)]
    plan.unexpected += [f"{name} (optimizer)" for name in theirs if name not in set(mine)]
    plan.opened = {name: {} for name in mine}
    shapes = {name: held.shape for name, held in plan.states.parameters().items()}
    states: dict[str, Held] = {}
    for name, state in source.index.names("optimizer").items():
        parameter, _, key = name.rpartition("/")
        if parameter in plan.opened:
            plan.opened[parameter][key] = state.dtype
            states[f"optimizer/{name}"] = Held(shapes[parameter], state.dtype, state.order)
    _refuse_unlike(source.path, states, source.tensors)
    counters = {name: counted for name, counted in saved["counters"].items() if name in plan.opened}
    for parameter, counted in _decode(source, counters).items():
        plan.opened[parameter] |= counted
    plan.loss_scale = saved["loss_scale"]


@dataclass
class _Given:
    """What a checkpoint holds besides tensors of the model and optimizer."""

    extra: dict[str, Any] = field(default_factory=dict)
    rank_extra: list[Any] = field(default_factory=list)
    random: dict[str, torch.Tensor] | None = None

    @classmethod
    def read(cls, source: _Source, rank: int, wanted: Mapping[str, Any] | None) -> _Given:
        """Read it, and refuse what is wanted and not there."""
        extra: dict[str, Any] = {}
        given = cls()
        if source.index is not None:
            own = source.index.own
            random = own[rank]["random"] if rank < len(own) else None
            extra, each, random = _decode(source, [source.index.extra, [one["extra"] for one in own], random])
            given = cls(extra, each, random)
        lacking = [name for name in wanted or () if name not in extra]
        if lacking:
            raise CheckpointError(
                f"{source.path} has no extra {', '.join(lacking)}: it has {', '.join(extra) or 'none'}"
            )
        return given


def _decode(source: _Source, value: Any) -> Any:
    """Plain data of a checkpoint, with the tensors in it."""
    with Contents(source.path, source.index) as contents:
        return decode(value, lambda name: contents.tensor(f"other/{name}"))


def _read(source: _Source, targets: dict[str, Chunks], meeting: Meeting) -> None:
    """Fill the targets, on all ranks together."""
    try:
        load_chunks(
            targets,
            storage_reader=source.reader,
            planner=LoadPlans(),
            process_group=meeting.group,
            no_dist=meeting.group is None,
        )
    except CheckpointException as error:
        failures = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        raise CheckpointError.of_ranks(failures, meeting.size) from error
    finally:
        for line in targets.values():
            line.let_go()
