"""Match: which saved tensors go where in a model and its optimizer, and what only one side has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.chunks import Chunks, Turned
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.index import Saved
from zeroshard.checkpoint.optimizer_states import Trials, fits, refuse_counters, refuse_options
from zeroshard.checkpoint.source import Source
from zeroshard.checkpoint.states import Group, Held, States, persistent_buffers, states_of, ties_of
from zeroshard.optimizer import ShardedOptimizer, refuse_states


@dataclass
class Match:
    """What of a source goes where in a model and its optimizer."""

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


def match(
    source: Source, model: nn.Module, optimizer: torch.optim.Optimizer | None, weights: bool, strict: bool
) -> Match:
    """Find it; refuses what does not fit, with every name."""
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
    plan = Match(states, targets, tensors, None, None, optimizer, None, missing, unexpected)
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
        elif not fits(saved.dtype, held.dtype):
            unlike.append(f"{name} is {saved.dtype} there and {held.dtype} here")
    if unlike:
        raise CheckpointError(f"{path} is of another model: {'; '.join(unlike)}")


def _plan_optimizer(plan: Match, source: Source, optimizer: torch.optim.Optimizer, strict: bool) -> None:
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
    options = source.decode([group["options"] for group in saved["groups"]])
    groups = [Group(group["names"], chosen) for group, chosen in zip(saved["groups"], options, strict=True)]
    mine = [name for group in own for name in group.names]
    theirs = [name for group in groups for name in group.names]
    alike = [set(group.names) for group in groups] == [set(group.names) for group in own]
    if alike and saved["class"] == kind:
        plan.groups = groups
        for number, (given, present) in enumerate(zip(groups, own, strict=True)):
            refuse_options(f"{source.path}: group {number}", given.options, present.options)
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
    for parameter, counted in source.decode(counters).items():
        refuse_counters(f"{source.path}: {parameter}", counted, plan.opened[parameter], shapes[parameter])
        plan.opened[parameter] |= counted
    trials = Trials(getattr(optimizer, "inner", optimizer))
    of_name = {name: group for group in plan.groups or own for name in group.names}
    for parameter, opened in plan.opened.items():
        if opened:
            trials.refuse_incomplete(
                f"{source.path}: {parameter}", of_name[parameter].options, shapes[parameter], opened
            )
    if isinstance(optimizer, ShardedOptimizer):
        refuse_states(plan.opened)
    plan.loss_scale = saved["loss_scale"]
