"""Map saved tensors to the tensors of a model and its optimizer, and find names that only one side has."""

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
from zeroshard.optim import ShardedOptimizer, check_shardable_states


@dataclass
class LoadSource:
    """A checkpoint or external weights, open for reading."""

    path: Path
    tensors: dict[str, TensorEntry]
    reader: TensorStorageReader
    index: CheckpointIndex | None  # None for external weights

    @classmethod
    def open(cls, path: Path, rename: Callable[[str], str] | None, rank: int = 0, world_size: int = 1) -> LoadSource:
        """Open a path returned by :func:`find_source`; raise if a file is missing or has the wrong size.

        Also compare the files' headers with the index; each of the ``world_size`` ranks checks some of them.
        """
        if not is_checkpoint(path) and is_external_weights(path):
            external = open_external_weights(path, rename)
            return cls(path, make_tensor_entries(external), ExternalWeightsReader(external), None)
        index = CheckpointIndex.read(path)
        index.check_file_sizes(path, range(len(index.files)))
        index.check_file_headers(path, range(rank, len(index.files), world_size))
        return cls(path, index.tensors, SafetensorsStorageReader(path, index), index)

    def decode(self, value: Any) -> Any:
        """Decode JSON-encoded data of a checkpoint, and read the tensors in it."""
        with CheckpointReader(self.path, self.index) as reader:
            return decode(value, lambda name: reader.read_tensor(f"other/{name}"))


def find_source(path: Path) -> Path:
    """Resolve a path to external weights, a checkpoint, or the latest checkpoint in a directory."""
    return path if not is_checkpoint(path) and is_external_weights(path) else find_checkpoint(path)


@dataclass
class LoadMapping:
    """Which tensors of a source are loaded into which tensors of a model and its optimizer."""

    train_state: TrainState
    targets: dict[str, LocalTensor]  # tensors of the model
    saved_tensors: dict[str, TensorEntry]
    param_groups: list[NamedParamGroup] | None
    optimizer_states: dict[str, dict[str, Any]] | None  # by parameter name; None: not loaded
    optimizer: torch.optim.Optimizer | None
    loss_scale: list[float] | None
    missing: list[str]
    unexpected: list[str]

    def allocate_targets(self) -> dict[str, FlatShards]:
        """Allocate optimizer states and return the target of every tensor to load."""
        targets = dict(self.targets)
        if self.optimizer_states is not None:
            self.train_state.allocate_optimizer_states(self.param_groups, self.optimizer_states)
            targets |= {f"optimizer/{name}": local for name, local in self.train_state.optimizer_states().items()}
            if self.loss_scale is not None and isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.load_loss_scale(self.loss_scale)
        return {fqn: _load_target(local, self.saved_tensors[fqn]) for fqn, local in targets.items()}


def _load_target(local_tensor: LocalTensor, saved: TensorEntry) -> FlatShards:
    if local_tensor.element_order == saved.element_order:
        return FlatShards(saved.numel, saved.dtype, local_tensor.shards)
    return ReorderedTensor.make(
        saved.shape, saved.dtype, saved.element_order, local_tensor.element_order, local_tensor.shards
    )


def map_states(
    source: LoadSource, model: nn.Module, optimizer: torch.optim.Optimizer | None, weights: bool, strict: bool
) -> LoadMapping:
    """Map the source to the model and optimizer; raise an error that lists every mismatch."""
    train_state = get_train_state(model, optimizer)
    missing: list[str] = []
    unexpected: list[str] = []
    targets: dict[str, LocalTensor] = {}
    tensors = dict(source.tensors)
    if weights:
        local_tensors = train_state.parameters() | {
            name: LocalTensor.from_full_tensor(name, b) for name, b in persistent_buffers(model)
        }
        ties = tied_names(model)
        saved_ties = source.index.ties if source.index is not None else {}
        saved_model = {fqn.removeprefix("model/"): entry for fqn, entry in tensors.items() if fqn.startswith("model/")}
        for name, local in local_tensors.items():
            saved_name = _saved_name(name, saved_model, ties, saved_ties)
            if saved_name is None:
                # saved with frozen=False
                is_frozen_and_skipped = source.index is not None and source.index.parameters.get(name) is False
                missing += [] if is_frozen_and_skipped else [name]
            else:
                targets[f"model/{name}"] = local
                tensors[f"model/{name}"] = source.tensors[f"model/{saved_name}"]
                if saved_name != name:
                    source.reader.aliases[f"model/{name}"] = f"model/{saved_name}"
        known = {*local_tensors, *ties, *(_saved_name(name, saved_model, ties, saved_ties) for name in local_tensors)}
        unexpected = [name for name in saved_model if name not in known]
        _check_shapes_and_dtypes(source.path, targets, tensors)
    mapping = LoadMapping(train_state, targets, tensors, None, None, optimizer, None, missing, unexpected)
    if optimizer is not None:
        _map_optimizer_states(mapping, source, optimizer, strict)
    if strict and (missing or unexpected):
        problems = [f"not in the file: {', '.join(missing)}"] if missing else []
        problems += [f"only in the file: {', '.join(unexpected)}"] if unexpected else []
        raise CheckpointError(f"{source.path} does not fit. {'. '.join(problems)}. strict=False leaves these out")
    return mapping


def _saved_name(
    name: str, found: Mapping[str, Any], ties: Mapping[str, str], saved_ties: Mapping[str, str]
) -> str | None:
    """Return the name under which a parameter was saved: its own, or one it is, or was, tied to."""
    candidates = [name, saved_ties.get(name), *(alias for alias, first in ties.items() if first == name)]
    return next((candidate for candidate in candidates if candidate in found), None)


def _check_shapes_and_dtypes(
    path: Path, targets: Mapping[str, LocalTensor], tensors: Mapping[str, TensorEntry]
) -> None:
    mismatches = []
    for fqn, local in targets.items():
        saved, name = tensors[fqn], fqn.partition("/")[2]
        saved.check_complete(path, fqn)
        if tuple(saved.shape) != tuple(local.shape):
            mismatches.append(f"{name} is {list(saved.shape)} there and {list(local.shape)} here")
        elif not can_load_as(saved.dtype, local.dtype):
            mismatches.append(f"{name} is {saved.dtype} there and {local.dtype} here")
    if mismatches:
        raise CheckpointError(f"{path} is of another model: {'; '.join(mismatches)}")


def _map_optimizer_states(
    mapping: LoadMapping, source: LoadSource, optimizer: torch.optim.Optimizer, strict: bool
) -> None:
    if source.index is None or source.index.optimizer is None:
        raise CheckpointError(f"{source.path} holds no optimizer states: load(path, model) loads the weights alone")
    saved, optimizer_class = source.index.optimizer, type(getattr(optimizer, "inner", optimizer)).__name__
    if strict and saved["class"] != optimizer_class:
        raise CheckpointError(
            f"{source.path} was saved with torch.optim.{saved['class']}, the optimizer is {optimizer_class}: "
            "load(path, model) loads the weights alone"
        )
    if saved["class"] != optimizer_class and not {saved["class"], optimizer_class} <= {
        "Adam",
        "AdamW",
    }:  # states with another meaning
        mapping.unexpected += [f"{name} (optimizer)" for group in saved["groups"] for name in group["names"]]
        return
    current_groups = mapping.train_state.param_groups()
    options = source.decode([group["options"] for group in saved["groups"]])
    saved_groups = [
        NamedParamGroup(group["names"], group_options)
        for group, group_options in zip(saved["groups"], options, strict=True)
    ]
    current_names = [name for group in current_groups for name in group.names]
    saved_names = [name for group in saved_groups for name in group.names]
    same_groups = [set(group.names) for group in saved_groups] == [set(group.names) for group in current_groups]
    if same_groups and saved["class"] == optimizer_class:
        mapping.param_groups = saved_groups
        for number, (saved_group, current_group) in enumerate(zip(saved_groups, current_groups, strict=True)):
            check_options(f"{source.path}: group {number}", saved_group.options, current_group.options)
    elif strict and set(current_names) == set(saved_names):
        raise CheckpointError(
            f"{source.path} has its parameters in other groups ({[len(group.names) for group in saved_groups]}) than "
            f"the optimizer ({[len(group.names) for group in current_groups]}): group them alike, or give "
            "strict=False to load the states and keep this optimizer's options"
        )
    mapping.missing += [f"{name} (optimizer)" for name in current_names if name not in set(saved_names)]
    mapping.unexpected += [f"{name} (optimizer)" for name in saved_names if name not in set(current_names)]
    mapping.optimizer_states = {name: {} for name in current_names}
    shapes = {name: local.shape for name, local in mapping.train_state.parameters().items()}
    states: dict[str, LocalTensor] = {}
    for name, state in source.index.tensors_of_kind("optimizer").items():
        parameter, _, key = name.rpartition("/")
        if parameter in mapping.optimizer_states:
            mapping.optimizer_states[parameter][key] = state.dtype
            states[f"optimizer/{name}"] = LocalTensor(shapes[parameter], state.dtype, state.element_order)
    _check_shapes_and_dtypes(source.path, states, source.tensors)
    scalars = {name: values for name, values in saved["counters"].items() if name in mapping.optimizer_states}
    for parameter, values in source.decode(scalars).items():
        check_scalars(f"{source.path}: {parameter}", values, mapping.optimizer_states[parameter], shapes[parameter])
        mapping.optimizer_states[parameter] |= values
    probe = OptimizerProbe(getattr(optimizer, "inner", optimizer))
    group_by_name = {name: group for group in mapping.param_groups or current_groups for name in group.names}
    for parameter, param_state in mapping.optimizer_states.items():
        if param_state:
            probe.check_state(
                f"{source.path}: {parameter}", group_by_name[parameter].options, shapes[parameter], param_state
            )
    if isinstance(optimizer, ShardedOptimizer):
        check_shardable_states(mapping.optimizer_states)
    mapping.loss_scale = saved["loss_scale"]
