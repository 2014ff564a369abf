"""Match: which saved tensors go where in a model and its optimizer, and what only one side has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.checkpoint_reader import CheckpointReader
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.external_weights import (
    ExternalWeightsReader,
    is_external_weights,
    make_tensor_entries,
    open_external_weights,
)
from zeroshard.checkpoint.flat_shards import FlatShards, ReorderedTensor
from zeroshard.checkpoint.index import CheckpointIndex, TensorEntry, is_checkpoint
from zeroshard.checkpoint.json_codec import decode
from zeroshard.checkpoint.optimizer_checks import OptimizerProbe, can_load_as, check_options, check_scalars
from zeroshard.checkpoint.reader import SafetensorsStorageReader, TensorStorageReader
from zeroshard.checkpoint.retention import find_checkpoint
from zeroshard.checkpoint.train_state import (
    LocalTensor,
    NamedParamGroup,
    TrainState,
    get_train_state,
    persistent_buffers,
    tied_names,
)
from zeroshard.optim.sharded_optimizer import ShardedOptimizer, check_shardable_states


@dataclass
class LoadSource:
    """What is read."""

    path: Path
    tensors: dict[str, TensorEntry]
    reader: TensorStorageReader
    index: CheckpointIndex | None  # of a checkpoint; None of weights alone

    @classmethod
    def open(cls, path: Path, rename: Callable[[str], str] | None, rank: int = 0, world_size: int = 1) -> LoadSource:
        """Open what :func:`find_source` found; refuses a checkpoint that lacks a file, or has one of another size.

        The files' own headers are compared with the index, some by each of the ``ranks`` that open it together.
        """
        if not is_checkpoint(path) and is_external_weights(path):
            foreign = open_external_weights(path, rename)
            return cls(path, make_tensor_entries(foreign), ExternalWeightsReader(foreign), None)
        index = CheckpointIndex.read(path)
        index.check_file_sizes(path, range(len(index.files)))
        index.check_file_headers(path, range(rank, len(index.files), world_size))
        return cls(path, index.tensors, SafetensorsStorageReader(path, index), index)

    def decode(self, value: Any) -> Any:
        """Plain data of a checkpoint, with the tensors in it."""
        with CheckpointReader(self.path, self.index) as contents:
            return decode(value, lambda name: contents.read_tensor(f"other/{name}"))


def find_source(path: Path) -> Path:
    """What a path means: weights, a checkpoint, or the latest of several."""
    return path if not is_checkpoint(path) and is_external_weights(path) else find_checkpoint(path)


@dataclass
class LoadMapping:
    """What of a source goes where in a model and its optimizer."""

    train_state: TrainState
    targets: dict[str, LocalTensor]  # of the model
    saved_tensors: dict[str, TensorEntry]
    param_groups: list[NamedParamGroup] | None
    optimizer_states: dict[str, dict[str, Any]] | None  # the optimizer's states by parameter; None: none are loaded
    optimizer: torch.optim.Optimizer | None
    loss_scale: list[float] | None
    missing: list[str]
    unexpected: list[str]

    def allocate_targets(self) -> dict[str, FlatShards]:
        """Give every tensor that is loaded its place."""
        targets = dict(self.targets)
        if self.optimizer_states is not None:
            self.train_state.allocate_optimizer_states(self.param_groups, self.optimizer_states)
            targets |= {f"optimizer/{name}": held for name, held in self.train_state.optimizer_states().items()}
            if self.loss_scale is not None and isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.load_loss_scale(self.loss_scale)
        return {fqn: _load_target(held, self.saved_tensors[fqn]) for fqn, held in targets.items()}


def _load_target(local_tensor: LocalTensor, saved: TensorEntry) -> FlatShards:
    if local_tensor.element_order == saved.element_order:
        return FlatShards(saved.numel, saved.dtype, local_tensor.shards)
    return ReorderedTensor.make(
        saved.shape, saved.dtype, saved.element_order, local_tensor.element_order, local_tensor.shards
    )


def map_states(
    source: LoadSource, model: nn.Module, optimizer: torch.optim.Optimizer | None, weights: bool, strict: bool
) -> LoadMapping:
    """Find it; refuses what does not fit, with every name."""
    states = get_train_state(model, optimizer)
    missing: list[str] = []
    unexpected: list[str] = []
    targets: dict[str, LocalTensor] = {}
    tensors = dict(source.tensors)
    if weights:
        wanted = states.parameters() | {
            name: LocalTensor.from_full_tensor(name, b) for name, b in persistent_buffers(model)
        }
        ties = tied_names(model)
        saved_ties = source.index.ties if source.index is not None else {}
        found = {fqn.removeprefix("model/"): saved for fqn, saved in tensors.items() if fqn.startswith("model/")}
        for name, held in wanted.items():
            other = _saved_name(name, found, ties, saved_ties)
            if other is None:
                left_out = source.index is not None and source.index.parameters.get(name) is False  # frozen=False
                missing += [] if left_out else [name]
            else:
                targets[f"model/{name}"] = held
                tensors[f"model/{name}"] = source.tensors[f"model/{other}"]
                if other != name:
                    source.reader.aliases[f"model/{name}"] = f"model/{other}"
        known = {*wanted, *ties, *(_saved_name(name, found, ties, saved_ties) for name in wanted)}
        unexpected = [name for name in found if name not in known]
        _check_shapes_and_dtypes(source.path, targets, tensors)
    plan = LoadMapping(states, targets, tensors, None, None, optimizer, None, missing, unexpected)
    if optimizer is not None:
        _map_optimizer_states(plan, source, optimizer, strict)
    if strict and (missing or unexpected):
        told = [f"not in the file: {', '.join(missing)}"] if missing else []
        told += [f"only in the file: {', '.join(unexpected)}"] if unexpected else []
        raise CheckpointError(f"{source.path} does not fit. {'. '.join(told)}. strict=False leaves these out")
    return plan


def _saved_name(
    name: str, found: Mapping[str, Any], ties: Mapping[str, str], saved_ties: Mapping[str, str]
) -> str | None:
    """The name under which a parameter was saved: its own, or that of one it is, or was, tied with."""
    names = [name, saved_ties.get(name), *(alias for alias, first in ties.items() if first == name)]
    return next((other for other in names if other in found), None)


def _check_shapes_and_dtypes(
    path: Path, targets: Mapping[str, LocalTensor], tensors: Mapping[str, TensorEntry]
) -> None:
    unlike = []
    for fqn, held in targets.items():
        saved, name = tensors[fqn], fqn.partition("/")[2]
        saved.check_complete(path, fqn)
        if tuple(saved.shape) != tuple(held.shape):
            unlike.append(f"{name} is {list(saved.shape)} there and {list(held.shape)} here")
        elif not can_load_as(saved.dtype, held.dtype):
            unlike.append(f"{name} is {saved.dtype} there and {held.dtype} here")
    if unlike:
        raise CheckpointError(f"{path} is of another model: {'; '.join(unlike)}")


def _map_optimizer_states(
    mapping: LoadMapping, source: LoadSource, optimizer: torch.optim.Optimizer, strict: bool
) -> None:
    if source.index is None or source.index.optimizer is None:
        raise CheckpointError(f"{source.path} holds no optimizer states: load(path, model) loads the weights alone")
    saved, kind = source.index.optimizer, type(getattr(optimizer, "inner", optimizer)).__name__
    if strict and saved["class"] != kind:
        raise CheckpointError(
            f"{source.path} was saved with torch.optim.{saved['class']}, the optimizer is {kind}: load(path, model) "
            "loads the weights alone"
        )
    if saved["class"] != kind and not {saved["class"], kind} <= {"Adam", "AdamW"}:  # states that mean something else
        mapping.unexpected += [f"{name} (optimizer)" for group in saved["groups"] for name in group["names"]]
        return
    own = mapping.train_state.param_groups()
    options = source.decode([group["options"] for group in saved["groups"]])
    groups = [NamedParamGroup(group["names"], chosen) for group, chosen in zip(saved["groups"], options, strict=True)]
    mine = [name for group in own for name in group.names]
    theirs = [name for group in groups for name in group.names]
    alike = [set(group.names) for group in groups] == [set(group.names) for group in own]
    if alike and saved["class"] == kind:
        mapping.param_groups = groups
        for number, (given, present) in enumerate(zip(groups, own, strict=True)):
            check_options(f"{source.path}: group {number}", given.options, present.options)
    elif strict and set(mine) == set(theirs):
        raise CheckpointError(
            f"{source.path} has its parameters in other groups ({[len(group.names) for group in groups]}) than the "
            f"optimizer ({[len(group.names) for group in own]}): group them alike, or give strict=False to load the "
            "states and keep this optimizer's options"
        )
    mapping.missing += [f"{name} (optimizer)" for name in mine if name not in set(theirs)]
    mapping.unexpected += [f"{name} (optimizer)" for name in theirs if name not in set(mine)]
    mapping.optimizer_states = {name: {} for name in mine}
    shapes = {name: held.shape for name, held in mapping.train_state.parameters().items()}
    states: dict[str, LocalTensor] = {}
    for name, state in source.index.tensors_of_kind("optimizer").items():
        parameter, _, key = name.rpartition("/")
        if parameter in mapping.optimizer_states:
            mapping.optimizer_states[parameter][key] = state.dtype
            states[f"optimizer/{name}"] = LocalTensor(shapes[parameter], state.dtype, state.element_order)
    _check_shapes_and_dtypes(source.path, states, source.tensors)
    counters = {name: counted for name, counted in saved["counters"].items() if name in mapping.optimizer_states}
    for parameter, counted in source.decode(counters).items():
        check_scalars(f"{source.path}: {parameter}", counted, mapping.optimizer_states[parameter], shapes[parameter])
        mapping.optimizer_states[parameter] |= counted
    trials = OptimizerProbe(getattr(optimizer, "inner", optimizer))
    of_name = {name: group for group in mapping.param_groups or own for name in group.names}
    for parameter, opened in mapping.optimizer_states.items():
        if opened:
            trials.check_state(f"{source.path}: {parameter}", of_name[parameter].options, shapes[parameter], opened)
    if isinstance(optimizer, ShardedOptimizer):
        check_shardable_states(mapping.optimizer_states)
    mapping.loss_scale = saved["loss_scale"]
