"""States: what of a model and its optimizer a checkpoint keeps, sharded or plain, and where its values are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from zeroshard.checkpoint.element_order import ElementOrder
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.parameter import param_info
from zeroshard.optim.sharded_optimizer import ShardedOptimizer, allocate_state
from zeroshard.optim.slices import is_elementwise
from zeroshard.sharding.layout import Range

# options of a group that say how an optimizer computes, not what: a run keeps its own
IMPLEMENTATION_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass
class LocalTensor:
    """A tensor, and the stretches of its line that this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    element_order: ElementOrder
    shards: list[tuple[Range, torch.Tensor]] = field(default_factory=list)
    is_stable_until_step: bool = False
    """Whether it changes by a step alone, so that it can be read until the next one."""

    @classmethod
    def from_full_tensor(cls, name: str, tensor: torch.Tensor) -> LocalTensor:
        """A tensor that this rank holds all of."""
        tensor = tensor.detach()
        order = ElementOrder.from_tensor(tensor)
        try:
            line = tensor.permute(order.dim_order).view(-1)  # never a copy: a load writes into it
        except RuntimeError as error:
            raise CheckpointError(f"{name!r} is a view with gaps or overlaps: make it contiguous") from error
        parts = [(Range(0, line.numel()), line)] if line.numel() else []
        return cls(tuple(tensor.shape), tensor.dtype, order, parts)


@dataclass
class NamedParamGroup:
    """A parameter group: its parameters' names and its options."""

    names: list[str]
    options: dict[str, Any]


class TrainState(Protocol):
    """The training states of one model and, where given, its optimizer."""

    def parameters(self) -> dict[str, LocalTensor]:
        """Every parameter, in the most exact copy there is."""

    def optimizer_states(self) -> dict[str, LocalTensor]:
        """The optimizer's states with a value for each element, by ``NAME/STATE``."""

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """The optimizer's other states (step counts) of the parameters this rank holds something of."""

    def param_groups(self) -> list[NamedParamGroup]:
        """The optimizer's groups."""

    def allocate_optimizer_states(
        self, groups: list[NamedParamGroup] | None, states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Set groups' options, where given, and make room for states: see ``ShardedOptimizer.allocate_states``."""

    def sync_loaded_parameters(self) -> None:
        """Make what was written into the parameters' values count."""


@dataclass(frozen=True)
class _FlattenedParam:
    """The line of a sharded parameter, and where in it begins what this rank of the tensor axis has."""

    full_shape: tuple[int, ...]  # of the whole parameter
    element_order: ElementOrder
    tp_start: int

    @classmethod
    def from_flat_param(cls, flat_param: FlatParam, index: int) -> _FlattenedParam:
        """Of a flat's parameter."""
        part, share = (
            torch.empty_strided(flat_param.shapes[index], flat_param.strides[index], device="meta"),
            flat_param.tp_shards[index],
        )
        start = share.offset_of_rank(share.rank) if share is not None else 0
        return cls(
            tuple(part.shape if share is None else share.full_shape), ElementOrder.from_tensor(part, share), start
        )


class ShardedTrainState:
    """Those of a sharded model."""

    def __init__(self, engine: Engine, optimizer: ShardedOptimizer | None) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._flat_params = [flat for unit in engine.units for flat in unit.flats]
        self._flattened = {
            name: _FlattenedParam.from_flat_param(flat, index)
            for flat in self._flat_params
            for index, name in enumerate(flat.names)
        }

    def parameters(self) -> dict[str, LocalTensor]:
        """Every parameter: the master's values where there are any."""
        self._engine.state_guard.check_no_pending_edits()
        self._engine.state_guard.wait_updates()
        found: dict[str, LocalTensor] = {}
        for flat in self._flat_params:
            dtype = flat.dtype if flat.master is None else flat.master.dtype
            steady = flat.master is not None or flat.is_partitioned  # else the user may write into it
            for name in flat.names:
                found[name] = LocalTensor(
                    self._flattened[name].full_shape,
                    dtype,
                    self._flattened[name].element_order,
                    is_stable_until_step=steady,
                )
            for index, within, values in flat.owned_slices():
                name = flat.names[index]
                found[name].shards.append((within.shift(self._flattened[name].tp_start), values))
        return found

    def optimizer_states(self) -> dict[str, LocalTensor]:
        """The optimizer's elementwise states."""
        self._engine.state_guard.wait_updates()
        found: dict[str, LocalTensor] = {}
        for name, key, within, values in self._optimizer.local_states() if self._optimizer is not None else ():
            line = self._flattened[name]
            held = found.setdefault(
                f"{name}/{key}",
                LocalTensor(line.full_shape, values.dtype, line.element_order, is_stable_until_step=True),
            )
            if within.numel:
                held.shards.append((within.shift(line.tp_start), values))
        return found

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """The optimizer's counters."""
        return {} if self._optimizer is None else self._optimizer.local_scalars()

    def param_groups(self) -> list[NamedParamGroup]:
        """The optimizer's groups."""
        if self._optimizer is None:
            return []
        pairs = zip(self._optimizer.param_groups, self._optimizer.group_param_names, strict=True)
        return [NamedParamGroup(list(names), _saved_options(group)) for group, names in pairs]

    def allocate_optimizer_states(
        self, groups: list[NamedParamGroup] | None, states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make room in the optimizer."""
        if self._optimizer is not None:
            _set_options(self._optimizer, groups)
            self._optimizer.allocate_states(states)

    def sync_loaded_parameters(self) -> None:
        """Bring the parameters in computation into line."""
        self._engine.state_guard.sync_from_masters()
        self._engine.release_retained()


class PlainTrainState:
    """Those of a model that is not sharded."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._optimizer = optimizer
        strange = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
        if any(id(parameter) not in self._names for parameter in strange):
            raise CheckpointError("the optimizer holds parameters that are not the model's: give the model they are of")

    def parameters(self) -> dict[str, LocalTensor]:
        """Every parameter, whole."""
        return {name: LocalTensor.from_full_tensor(name, parameter) for name, parameter in self._parameters.items()}

    def _iter_optimizer_states(self) -> Iterator[tuple[str, torch.Tensor, str, Any]]:
        for parameter, state in self._optimizer.state.items() if self._optimizer is not None else ():
            for key, value in state.items():
                yield self._names[id(parameter)], parameter, key, value

    def optimizer_states(self) -> dict[str, LocalTensor]:
        """The optimizer's elementwise states, whole."""
        return {
            f"{name}/{key}": LocalTensor.from_full_tensor(f"{name}/{key}", value)
            for name, parameter, key, value in self._iter_optimizer_states()
            if is_elementwise(key, value, parameter.shape)
        }

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """The optimizer's counters."""
        found: dict[str, dict[str, Any]] = {}
        for name, parameter, key, value in self._iter_optimizer_states():
            counters = found.setdefault(name, {})
            if not is_elementwise(key, value, parameter.shape):
                counters[key] = value
        return found

    def param_groups(self) -> list[NamedParamGroup]:
        """The optimizer's groups."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [
            NamedParamGroup([self._names[id(p)] for p in group["params"]], _saved_options(group)) for group in groups
        ]

    def allocate_optimizer_states(
        self, groups: list[NamedParamGroup] | None, states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make room in the optimizer."""
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
        """Nothing: what was written into is what computes."""


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The model itself where ``torch.compile`` has wrapped it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a sharded model; None of a plain one."""
    sharded = model.__dict__.get("_zeroshard")
    engine: Engine | None = sharded.engine if sharded is not None else None
    return engine


def get_train_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainState:
    """The states of a model and its optimizer, as they are; refuses a pair that does not belong together."""
    engine = engine_of(model)
    if engine is None:
        if any(param_info(parameter) is not None for parameter in model.parameters()):
            raise CheckpointError(f"this {type(model).__name__} is part of a sharded model: give the whole model")
        if isinstance(optimizer, ShardedOptimizer):
            raise CheckpointError("the optimizer is sharded and the model is not: give the model shard() returned")
        divided = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        if divided:
            raise CheckpointError(
                f"{divided[0]!r} is a DTensor, and this {type(model).__name__} is not sharded by zeroshard: give it to "
                "shard(), with a mesh whose last axis is the tensor axis, and then save and load what shard() returns"
            )
        return PlainTrainState(model, optimizer)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise CheckpointError("the model is sharded and the optimizer is not: give the optimizer shard() returned")
    return ShardedTrainState(engine, optimizer)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to a model's state, by name."""
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(prefix, recurse=False):
            if key.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield key, _replicated_to_local(key, buffer)


def _replicated_to_local(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer itself, of which torch makes a DTensor where it divides the module's parameters."""
    if not isinstance(buffer, DTensor):
        return buffer
    if any(not isinstance(placement, Replicate) for placement in buffer.placements):
        raise CheckpointError(
            f"the buffer {name!r} is a DTensor placed as {buffer.placements}: a checkpoint keeps the first rank's "
            "buffers, so each rank has to have all of it. Make it a parameter, or register it with persistent=False"
        )
    return buffer.to_local()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names under which a parameter is found → the first one, which is the one it is kept under."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in everywhere if first[id(parameter)] != name}


def _saved_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in IMPLEMENTATION_OPTIONS}


def _set_options(optimizer: torch.optim.Optimizer, groups: list[NamedParamGroup] | None) -> None:
    for group, saved in zip(optimizer.param_groups, groups or [], strict=False):
        for key, value in saved.options.items():
            if key in IMPLEMENTATION_OPTIONS:
                continue
            own = group.get(key)  # a learning rate that is a tensor here stays one, on its device; and the reverse
            if isinstance(own, torch.Tensor):
                value = torch.as_tensor(value).to(own.device, own.dtype)
            elif isinstance(value, torch.Tensor) and isinstance(own, (int, float)):
                value = value.item()
            group[key] = value
