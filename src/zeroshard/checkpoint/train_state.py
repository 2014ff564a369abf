"""The states of a model and its optimizer that a checkpoint contains, sharded or not, and where their values are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from zeroshard.checkpoint.flat_shards import ElementOrder, LocalTensor
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.engine import Engine, param_info
from zeroshard.optim import ShardedOptimizer, allocate_state, is_elementwise

# param group options that select an implementation and do not change the result: a load keeps the current ones
IMPLEMENTATION_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass
class NamedParamGroup:
    """A param group: the names of its parameters, and its options."""

    names: list[str]
    options: dict[str, Any]


class TrainState(ABC):
    """The training states of a model and, if given, its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups

    @abstractmethod
    def parameters(self) -> dict[str, LocalTensor]:
        """Return every parameter, in the highest precision available."""

    @abstractmethod
    def optimizer_states(self) -> dict[str, LocalTensor]:
        """Return the optimizer's elementwise states by ``NAME/STATE``."""

    @abstractmethod
    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the scalar states (step counts) of the parameters that this rank has elements of."""

    @abstractmethod
    def _group_names(self) -> list[list[str]]:
        """Return the names of each param group's parameters."""

    @abstractmethod
    def allocate_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Allocate states in the optimizer: see ``ShardedOptimizer.allocate_states``."""

    def sync_loaded_parameters(self) -> None:  # noqa: B027 - an unsharded model needs nothing
        """Apply the values that a load wrote into the tensors of :meth:`parameters`."""

    def param_groups(self) -> list[NamedParamGroup]:
        """Return the optimizer's param groups."""
        return [
            NamedParamGroup(names, {key: value for key, value in group.items() if key not in IMPLEMENTATION_OPTIONS})
            for group, names in zip(self._groups, self._group_names(), strict=True)
        ]

    def set_options(self, saved_groups: list[NamedParamGroup]) -> None:
        """Set the options of the optimizer's param groups."""
        for group, saved in zip(self._groups, saved_groups, strict=True):
            for key, value in saved.options.items():
                if key in IMPLEMENTATION_OPTIONS:
                    continue
                current = group.get(key)  # keep its type: a tensor lr stays a tensor on its device, a float a float
                if isinstance(current, torch.Tensor):
                    value = torch.as_tensor(value).to(current.device, current.dtype)
                elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
                    value = value.item()
                group[key] = value


class ShardedTrainState(TrainState):
    """The training states of a sharded model."""

    def __init__(self, engine: Engine, optimizer: ShardedOptimizer | None) -> None:
        super().__init__(optimizer)
        self._engine, self._optimizer = engine, optimizer
        self._flat_params = [flat for unit in engine.units for flat in unit.flats]
        self._specs: dict[str, tuple[tuple[int, ...], ElementOrder]] = {}  # full shape and element order
        self._tp_starts: dict[str, int] = {}  # first element of this rank's TP shard in the flattened parameter
        for flat in self._flat_params:
            for name, shape, stride, tp_shard in zip(
                flat.names, flat.shapes, flat.strides, flat.tp_shards, strict=True
            ):
                local = torch.empty_strided(shape, stride, device="meta")
                full_shape = local.shape if tp_shard is None else tp_shard.full_shape
                self._specs[name] = tuple(full_shape), ElementOrder.from_tensor(local, tp_shard)
                self._tp_starts[name] = 0 if tp_shard is None else tp_shard.offset_of_rank(tp_shard.rank)

    def parameters(self) -> dict[str, LocalTensor]:
        self._engine.state_guard.check_no_pending_edits()
        self._engine.state_guard.wait_updates()
        tensors: dict[str, LocalTensor] = {}
        for flat in self._flat_params:
            dtype = flat.dtype if flat.master is None else flat.master.dtype
            is_stable = flat.master is not None or flat.is_partitioned  # otherwise the user may write into it
            for name in flat.names:
                tensors[name] = self._local_tensor(name, dtype, is_stable)
            for index, element_range, values in flat.owned_slices():
                name = flat.names[index]
                tensors[name].shards.append((element_range.shift(self._tp_starts[name]), values))
        return tensors

    def optimizer_states(self) -> dict[str, LocalTensor]:
        self._engine.state_guard.wait_updates()
        tensors: dict[str, LocalTensor] = {}
        if self._optimizer is None:
            return tensors
        full_names = self._optimizer.tp_whole_names
        for name, key, element_range, values in self._optimizer.local_states():
            if name in full_names:
                shape, _ = self._specs[name]
                local = tensors[f"{name}/{key}"] = LocalTensor.from_full_tensor(name, values.view(shape))
                local.is_stable_until_step = local.is_on_all_tp_ranks = True
                continue
            local = tensors.setdefault(f"{name}/{key}", self._local_tensor(name, values.dtype, is_stable=True))
            if element_range.numel:
                local.shards.append((element_range.shift(self._tp_starts[name]), values))
        return tensors

    def _local_tensor(self, name: str, dtype: torch.dtype, is_stable: bool) -> LocalTensor:
        shape, element_order = self._specs[name]
        return LocalTensor(shape, dtype, element_order, is_stable_until_step=is_stable)

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        return {} if self._optimizer is None else self._optimizer.local_scalars()

    def _group_names(self) -> list[list[str]]:
        return [] if self._optimizer is None else [list(names) for names in self._optimizer.group_param_names]

    def allocate_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        if self._optimizer is not None:
            self._optimizer.allocate_states(states)

    def sync_loaded_parameters(self) -> None:
        """Update the compute parameters from the master weights."""
        self._engine.finish_write()


class PlainTrainState(TrainState):
    """The training states of an unsharded model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(optimizer)
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._states: dict[torch.Tensor, dict[str, Any]] = {} if optimizer is None else optimizer.state
        if any(id(parameter) not in self._names for group in self._groups for parameter in group["params"]):
            raise CheckpointError(
                "the optimizer has parameters that are not in this model: pass the model it was created for"
            )

    def parameters(self) -> dict[str, LocalTensor]:
        return {name: LocalTensor.from_full_tensor(name, parameter) for name, parameter in self._parameters.items()}

    def optimizer_states(self) -> dict[str, LocalTensor]:
        tensors: dict[str, LocalTensor] = {}
        for parameter, state in self._states.items():
            for key, value in state.items():
                if is_elementwise(key, value, parameter.shape):
                    name = f"{self._names[id(parameter)]}/{key}"
                    tensors[name] = LocalTensor.from_full_tensor(name, value)
        return tensors

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        return {
            self._names[id(parameter)]: {
                key: value for key, value in state.items() if not is_elementwise(key, value, parameter.shape)
            }
            for parameter, state in self._states.items()
            if state
        }

    def _group_names(self) -> list[list[str]]:
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in self._groups]

    def allocate_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._states.clear()
        for group in self._groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                for key, value in states.get(self._names[id(parameter)], {}).items():
                    self._states[parameter][key] = allocate_state(key, value, parameter, on_device)


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the model inside a ``torch.compile`` wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def engine_of_model(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model, or None for an unsharded one."""
    sharded = model.__dict__.get("_zeroshard")
    engine: Engine | None = sharded.engine if sharded is not None else None
    return engine


def get_train_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainState:
    """Return the states of a model and its optimizer; raise if the two do not belong together."""
    engine = engine_of_model(model)
    if engine is not None:
        if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
            raise CheckpointError(
                "the model is sharded but the optimizer is not: pass the optimizer that shard() returned"
            )
        return ShardedTrainState(engine, optimizer)
    if any(param_info(parameter) is not None for parameter in model.parameters()):
        raise CheckpointError(f"this {type(model).__name__} is a part of a sharded model: pass the whole model")
    if isinstance(optimizer, ShardedOptimizer):
        raise CheckpointError("the optimizer is sharded but the model is not: pass the model that shard() returned")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise CheckpointError(
                f"{name!r} is a DTensor, but this {type(model).__name__} is not sharded by zeroshard: pass it to "
                "shard() with a mesh whose last axis is the tensor axis, then save and load what shard() returns"
            )
    return PlainTrainState(model, optimizer)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each persistent buffer."""
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(prefix, recurse=False):
            if key.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield key, _replicated_to_local(key, buffer)


def _replicated_to_local(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a buffer. Torch makes buffers DTensors when it shards a module's parameters."""
    if not isinstance(buffer, DTensor):
        return buffer
    if any(not isinstance(placement, Replicate) for placement in buffer.placements):
        raise CheckpointError(
            f"buffer {name!r} is a DTensor with placements {buffer.placements}, expected Replicate(): only the first "
            "rank's buffers are saved. Make it a parameter, or register it with persistent=False"
        )
    return buffer.to_local()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to its first name, under which it is saved."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    all_names = model.named_parameters(remove_duplicate=False)
    return {name: first_names[id(parameter)] for name, parameter in all_names if first_names[id(parameter)] != name}
