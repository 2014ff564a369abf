"""The states of a model and its optimizer that a checkpoint contains, sharded or not, and where their values are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from zeroshard.checkpoint.element_order import ElementOrder
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.engine import Engine, FlatParam, param_info
from zeroshard.optim import ShardedOptimizer, allocate_state, is_elementwise
from zeroshard.sharding import Range

# param group options that select an implementation and do not change the result: a load keeps the current ones
IMPLEMENTATION_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass
class LocalTensor:
    """A tensor, and the shards of the flattened tensor that this rank owns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    element_order: ElementOrder
    shards: list[tuple[Range, torch.Tensor]] = field(default_factory=list)
    is_stable_until_step: bool = False
    """Whether only an optimizer step changes the tensor, so that it can be read until the next step."""

    @classmethod
    def from_full_tensor(cls, name: str, tensor: torch.Tensor) -> LocalTensor:
        """Describe a tensor that this rank has in full."""
        tensor = tensor.detach()
        element_order = ElementOrder.from_tensor(tensor)
        try:
            flat = tensor.permute(element_order.dim_order).view(-1)  # must be a view: a load writes into it
        except RuntimeError as error:
            raise CheckpointError(f"{name!r} is a view with gaps or overlaps: make it contiguous") from error
        shards = [(Range(0, flat.numel()), flat)] if flat.numel() else []
        return cls(tuple(tensor.shape), tensor.dtype, element_order, shards)


@dataclass
class NamedParamGroup:
    """A param group: the names of its parameters, and its options."""

    names: list[str]
    options: dict[str, Any]


class TrainState(Protocol):
    """The training states of a model and, if given, its optimizer."""

    def parameters(self) -> dict[str, LocalTensor]:
        """Return every parameter, in the highest precision available."""

    def optimizer_states(self) -> dict[str, LocalTensor]:
        """Return the optimizer's elementwise states by ``NAME/STATE``."""

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the scalar states (step counts) of the parameters that this rank has elements of."""

    def param_groups(self) -> list[NamedParamGroup]:
        """Return the optimizer's param groups."""

    def allocate_optimizer_states(
        self, groups: list[NamedParamGroup] | None, states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Set the groups' options, if given, and allocate states: see ``ShardedOptimizer.allocate_states``."""

    def sync_loaded_parameters(self) -> None:
        """Apply the values that a load wrote into the tensors of :meth:`parameters`."""


@dataclass(frozen=True)
class _FlattenedParam:
    """The flattened form of a sharded parameter, and the offset of this rank's TP shard in it."""

    full_shape: tuple[int, ...]  # of the parameter before TP sharding
    element_order: ElementOrder
    tp_start: int

    @classmethod
    def from_flat_param(cls, flat_param: FlatParam, index: int) -> _FlattenedParam:
        """Describe the parameter at ``index`` of a FlatParam."""
        local, tp_shard = (
            torch.empty_strided(flat_param.shapes[index], flat_param.strides[index], device="meta"),
            flat_param.tp_shards[index],
        )
        start = tp_shard.offset_of_rank(tp_shard.rank) if tp_shard is not None else 0
        return cls(
            tuple(local.shape if tp_shard is None else tp_shard.full_shape),
            ElementOrder.from_tensor(local, tp_shard),
            start,
        )


class ShardedTrainState:
    """The training states of a sharded model."""

    def __init__(self, engine: Engine, optimizer: ShardedOptimizer | None) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._flat_params = [flat for unit in engine.units for flat in unit.flats]
        self._flattened = {
            name: _FlattenedParam.from_flat_param(flat, index)
            for flat in self._flat_params
            for index, name in enumerate(flat.names)
        }

    def parameters(self) -> dict[str, LocalTensor]:
        """Return every parameter; master weights if there are any."""
        self._engine.state_guard.check_no_pending_edits()
        self._engine.state_guard.wait_updates()
        tensors: dict[str, LocalTensor] = {}
        for flat in self._flat_params:
            dtype = flat.dtype if flat.master is None else flat.master.dtype
            is_stable = flat.master is not None or flat.is_partitioned  # otherwise the user may write into it
            for name in flat.names:
                tensors[name] = LocalTensor(
                    self._flattened[name].full_shape,
                    dtype,
                    self._flattened[name].element_order,
                    is_stable_until_step=is_stable,
                )
            for index, element_range, values in flat.owned_slices():
                name = flat.names[index]
                tensors[name].shards.append((element_range.shift(self._flattened[name].tp_start), values))
        return tensors

    def optimizer_states(self) -> dict[str, LocalTensor]:
        """Return the optimizer's elementwise states by ``NAME/STATE``."""
        self._engine.state_guard.wait_updates()
        tensors: dict[str, LocalTensor] = {}
        for name, key, element_range, values in self._optimizer.local_states() if self._optimizer is not None else ():
            flattened = self._flattened[name]
            local = tensors.setdefault(
                f"{name}/{key}",
                LocalTensor(flattened.full_shape, values.dtype, flattened.element_order, is_stable_until_step=True),
            )
            if element_range.numel:
                local.shards.append((element_range.shift(flattened.tp_start), values))
        return tensors

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's scalar states by parameter name."""
        return {} if self._optimizer is None else self._optimizer.local_scalars()

    def param_groups(self) -> list[NamedParamGroup]:
        """Return the optimizer's param groups."""
        if self._optimizer is None:
            return []
        pairs = zip(self._optimizer.param_groups, self._optimizer.group_param_names, strict=True)
        return [NamedParamGroup(list(names), _saved_options(group)) for group, names in pairs]

    def allocate_optimizer_states(
        self, groups: list[NamedParamGroup] | None, states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Set the groups' options and allocate states in the optimizer."""
        if self._optimizer is not None:
            _set_options(self._optimizer, groups)
            self._optimizer.allocate_states(states)

    def sync_loaded_parameters(self) -> None:
        """Update the compute parameters from the master weights."""
        self._engine.state_guard.sync_from_masters()
        self._engine.release_retained()


class PlainTrainState:
    """The training states of an unsharded model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._optimizer = optimizer
        optimized = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
        if any(id(parameter) not in self._names for parameter in optimized):
            raise CheckpointError("the optimizer holds parameters that are not the model's: give the model they are of")

    def parameters(self) -> dict[str, LocalTensor]:
        """Return every parameter as a full tensor."""
        return {name: LocalTensor.from_full_tensor(name, parameter) for name, parameter in self._parameters.items()}

    def _iter_optimizer_states(self) -> Iterator[tuple[str, torch.Tensor, str, Any]]:
        for parameter, state in self._optimizer.state.items() if self._optimizer is not None else ():
            for key, value in state.items():
                yield self._names[id(parameter)], parameter, key, value

    def optimizer_states(self) -> dict[str, LocalTensor]:
        """Return the optimizer's elementwise states as full tensors."""
        return {
            f"{name}/{key}": LocalTensor.from_full_tensor(f"{name}/{key}", value)
            for name, parameter, key, value in self._iter_optimizer_states()
            if is_elementwise(key, value, parameter.shape)
        }

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's scalar states by parameter name."""
        all_scalars: dict[str, dict[str, Any]] = {}
        for name, parameter, key, value in self._iter_optimizer_states():
            scalars = all_scalars.setdefault(name, {})
            if not is_elementwise(key, value, parameter.shape):
                scalars[key] = value
        return all_scalars

    def param_groups(self) -> list[NamedParamGroup]:
        """Return the optimizer's param groups."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [
            NamedParamGroup([self._names[id(p)] for p in group["params"]], _saved_options(group)) for group in groups
        ]

    def allocate_optimizer_states(
        self, groups: list[NamedParamGroup] | None, states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Set the groups' options and allocate states in the optimizer."""
        if self._optimizer is None:
            return
        _set_options(self._optimizer, groups)
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                for key, value in states.get(self._names[id(parameter)], {}).items():
                    self._optimizer.state[parameter][key] = allocate_state(key, value, parameter, on_device)

    def sync_loaded_parameters(self) -> None:
        """Do nothing: a load writes into the compute parameters themselves."""


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the model inside a ``torch.compile`` wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model, or None for an unsharded one."""
    sharded = model.__dict__.get("_zeroshard")
    engine: Engine | None = sharded.engine if sharded is not None else None
    return engine


def get_train_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainState:
    """Return the states of a model and its optimizer; raise if the two do not belong together."""
    engine = engine_of(model)
    if engine is None:
        if any(param_info(parameter) is not None for parameter in model.parameters()):
            raise CheckpointError(f"this {type(model).__name__} is part of a sharded model: give the whole model")
        if isinstance(optimizer, ShardedOptimizer):
            raise CheckpointError("the optimizer is sharded and the model is not: give the model shard() returned")
        dtensor_names = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        if dtensor_names:
            raise CheckpointError(
                f"{dtensor_names[0]!r} is a DTensor, and this {type(model).__name__} is not sharded by zeroshard: give "
                "it to shard(), with a mesh whose last axis is the tensor axis, and then save and load what shard() "
                "returns"
            )
        return PlainTrainState(model, optimizer)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise CheckpointError("the model is sharded and the optimizer is not: give the optimizer shard() returned")
    return ShardedTrainState(engine, optimizer)


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
            f"the buffer {name!r} is a DTensor placed as {buffer.placements}: a checkpoint keeps the first rank's "
            "buffers, so each rank has to have all of it. Make it a parameter, or register it with persistent=False"
        )
    return buffer.to_local()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to its first name, under which it is saved."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    all_names = model.named_parameters(remove_duplicate=False)
    return {name: first_names[id(parameter)] for name, parameter in all_names if first_names[id(parameter)] != name}


def _saved_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in IMPLEMENTATION_OPTIONS}


def _set_options(optimizer: torch.optim.Optimizer, groups: list[NamedParamGroup] | None) -> None:
    for group, saved in zip(optimizer.param_groups, groups or [], strict=False):
        for key, value in saved.options.items():
            if key in IMPLEMENTATION_OPTIONS:
                continue
            current = group.get(key)  # keep its type: a tensor lr stays a tensor on its device, a float stays a float
            if isinstance(current, torch.Tensor):
                value = torch.as_tensor(value).to(current.device, current.dtype)
            elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
                value = value.item()
            group[key] = value
