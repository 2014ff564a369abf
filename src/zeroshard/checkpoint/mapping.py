"""Map saved tensors to the tensors of a model and its optimizer, and find names that only one side has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.flat_shards import LocalTensor
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.index import TensorEntry
from zeroshard.checkpoint.optimizer_checks import OptimizerProbe, can_load_as, check_options, check_scalars
from zeroshard.checkpoint.reader import LoadSource, LoadTarget
from zeroshard.checkpoint.train_state import (
    NamedParamGroup,
    TrainState,
    get_train_state,
    persistent_buffers,
    tied_names,
)
from zeroshard.optim import ShardedOptimizer, check_shardable_states


@dataclass
class LoadMapping:
    """Which tensors of a source are loaded into which tensors of a model and its optimizer."""

    train_state: TrainState
    optimizer: torch.optim.Optimizer | None
    weights: list[LoadTarget] = field(default_factory=list)
    param_groups: list[NamedParamGroup] | None = None
    optimizer_states: dict[str, dict[str, Any]] | None = None  # by parameter name; None: not loaded
    loss_scale: list[float] | None = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def allocate_targets(self) -> list[LoadTarget]:
        """Set the optimizer's options, allocate its states and return the target of every tensor to load."""
        if self.optimizer_states is None:
            return self.weights
        if self.param_groups is not None:
            self.train_state.set_options(self.param_groups)
        self.train_state.allocate_optimizer_states(self.optimizer_states)
        if self.loss_scale is not None and isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.load_loss_scale(self.loss_scale)
        states = self.train_state.optimizer_states()
        return [*self.weights, *(LoadTarget(f"optimizer/{name}", local) for name, local in states.items())]


def map_states(
    source: LoadSource, model: nn.Module, optimizer: torch.optim.Optimizer | None, weights: bool, strict: bool
) -> LoadMapping:
    """Map the source to the model and optimizer; raise an error that lists every mismatch."""
    mapping = LoadMapping(get_train_state(model, optimizer), optimizer)
    if weights:
        _map_weights(mapping, source, model)
    if optimizer is not None:
        _map_optimizer_states(mapping, source, optimizer, strict)
    if strict and (mapping.missing or mapping.unexpected):
        problems = [f"not in the file: {', '.join(mapping.missing)}"] if mapping.missing else []
        problems += [f"only in the file: {', '.join(mapping.unexpected)}"] if mapping.unexpected else []
        raise CheckpointError(
            f"{source.path} does not match the model. {'. '.join(problems)}. Pass strict=False to skip these"
        )
    return mapping


def _map_weights(mapping: LoadMapping, source: LoadSource, model: nn.Module) -> None:
    local_tensors = mapping.train_state.parameters() | {
        name: LocalTensor.from_full_tensor(name, buffer) for name, buffer in persistent_buffers(model)
    }
    ties = tied_names(model)
    saved = source.index.tensors_of_kind("model")
    known = {*local_tensors, *ties}
    problems = []
    for name, local in local_tensors.items():
        # saved under its own name, or under one it is, or was, tied to
        candidates = [name, source.index.ties.get(name), *(alias for alias, first in ties.items() if first == name)]
        saved_name = next((candidate for candidate in candidates if candidate in saved), None)
        if saved_name is not None:
            known.add(saved_name)
            problems += _mismatches(name, saved[saved_name], local.shape, local.dtype)
            mapping.weights.append(LoadTarget(f"model/{saved_name}", local))
        elif source.index.parameters.get(name) is not False:  # False: saved with frozen=False
            mapping.missing.append(name)
    mapping.unexpected += [name for name in saved if name not in known]
    _raise_mismatches(source, problems)


def _mismatches(name: str, saved: TensorEntry, shape: Sequence[int], dtype: torch.dtype) -> list[str]:
    """Return why a saved tensor cannot be loaded into a tensor of this shape and dtype, if it cannot."""
    if tuple(saved.shape) != tuple(shape):
        return [f"{name} has shape {list(saved.shape)}, expected {list(shape)}"]
    if not can_load_as(saved.dtype, dtype):
        return [f"{name} has dtype {saved.dtype}, expected {dtype}"]
    return []


def _raise_mismatches(source: LoadSource, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{source.path} does not match the model: {'; '.join(problems)}")


def _map_optimizer_states(
    mapping: LoadMapping, source: LoadSource, optimizer: torch.optim.Optimizer, strict: bool
) -> None:
    if source.index.optimizer is None:
        raise CheckpointError(
            f"{source.path} contains no optimizer states: use load(path, model) to load only the weights"
        )
    saved, optimizer_class = source.index.optimizer, type(getattr(optimizer, "inner", optimizer)).__name__
    if strict and saved["class"] != optimizer_class:
        raise CheckpointError(
            f"{source.path} was saved with the optimizer {saved['class']}, expected {optimizer_class}: use "
            "load(path, model) to load only the weights"
        )
    # only these have states with the same meaning
    if saved["class"] != optimizer_class and not {saved["class"], optimizer_class} <= {"Adam", "AdamW"}:
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
            f"{source.path} has other param groups ({[len(group.names) for group in saved_groups]} parameters) than "
            f"the optimizer ({[len(group.names) for group in current_groups]}): use the same groups, or pass "
            "strict=False to load the states and keep the options of this optimizer"
        )
    mapping.missing += [f"{name} (optimizer)" for name in current_names if name not in set(saved_names)]
    mapping.unexpected += [f"{name} (optimizer)" for name in saved_names if name not in set(current_names)]
    mapping.optimizer_states = _map_param_states(mapping, source, optimizer, current_groups)
    mapping.loss_scale = saved["loss_scale"]


def _map_param_states(
    mapping: LoadMapping,
    source: LoadSource,
    optimizer: torch.optim.Optimizer,
    current_groups: list[NamedParamGroup],
) -> dict[str, dict[str, Any]]:
    """Return the saved states of each parameter: the dtypes of elementwise states, and the scalars."""
    assert source.index.optimizer is not None
    param_states: dict[str, dict[str, Any]] = {name: {} for group in current_groups for name in group.names}
    shapes = {name: local.shape for name, local in mapping.train_state.parameters().items()}
    problems = []
    for name, state in source.index.tensors_of_kind("optimizer").items():
        parameter, _, key = name.rpartition("/")
        if parameter in param_states:
            param_states[parameter][key] = state.dtype
            problems += _mismatches(name, state, shapes[parameter], state.dtype)
    _raise_mismatches(source, problems)
    scalars = {name: values for name, values in source.index.optimizer["counters"].items() if name in param_states}
    for parameter, values in source.decode(scalars).items():
        check_scalars(f"{source.path}: {parameter}", values, param_states[parameter], shapes[parameter])
        param_states[parameter] |= values
    probe = OptimizerProbe(getattr(optimizer, "inner", optimizer))
    for group in mapping.param_groups or current_groups:
        for parameter in group.names:
            if param_states[parameter]:
                where = f"{source.path}: {parameter}"
                probe.check_state(where, group.options, shapes[parameter], param_states[parameter])
    if isinstance(optimizer, ShardedOptimizer):
        check_shardable_states(param_states)
    return param_states
