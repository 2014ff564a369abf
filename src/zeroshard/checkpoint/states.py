"""States: what of a model and its optimizer a checkpoint keeps, sharded or plain, and where its values are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.order import Order
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat import Flat
from zeroshard.engine.parameter import card_of
from zeroshard.layout import Range
from zeroshard.optimizer import ShardedOptimizer, opened
from zeroshard.runs import is_elementwise

# options of a group that say how an optimizer computes, not what: a run keeps its own
IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass
class Held:
    """A tensor, and the stretches of its line that this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: Order
    parts: list[tuple[Range, torch.Tensor]] = field(default_factory=list)
    steady: bool = False
    """Whether it changes by a step alone, so that it can be read until the next one."""

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Held:
        """A tensor that this rank holds all of."""
        tensor = tensor.detach()
        order = Order.of(tensor)
        try:
            line = tensor.permute(order.dims).view(-1)  # never a copy: a load writes into it
        except RuntimeError as error:
            raise CheckpointError(f"{name!r} is a view with gaps or overlaps: make it contiguous") from error
        parts = [(Range(0, line.numel()), line)] if line.numel() else []
        return cls(tuple(tensor.shape), tensor.dtype, order, parts)


@dataclass
class Group:
    """A parameter group: its parameters' names and its options."""

    names: list[str]
    options: dict[str, Any]


class States(Protocol):
    """The training states of one model and, where given, its optimizer."""

    def parameters(self) -> dict[str, Held]:
        """Every parameter, in the most exact copy there is."""

    def states(self) -> dict[str, Held]:
        """The optimizer's states with a value for each element, by ``NAME/STATE``."""

    def counters(self) -> dict[str, dict[str, Any]]:
        """The optimizer's other states (step counts) of the parameters this rank holds something of."""

    def groups(self) -> list[Group]:
        """The optimizer's groups."""

    def open(self, groups: list[Group] | None, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Set groups' options, where given, and make room for states: see ``ShardedOptimizer.open_states``."""

    def adopt(self) -> None:
        """Make what was written into the parameters' values count."""


@dataclass(frozen=True)
class _Line:
    """The line of a sharded parameter, and where in it begins what this rank of the tensor axis has."""

    shape: tuple[int, ...]  # of the whole parameter
    order: Order
    start: int

    @classmethod
    def of(cls, flat: Flat, index: int) -> _Line:
        """Of a flat's parameter."""
        part, share = torch.empty_strided(flat.shapes[index], flat.strides[index], device="meta"), flat.shares[index]
        start = share.start_of(share.rank) if share is not None else 0
        return cls(tuple(part.shape if share is None else share.shape), Order.of(part, share), start)


class ShardedStates:
    """Those of a sharded model."""

    def __init__(self, engine: Engine, optimizer: ShardedOptimizer | None) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._flats = [flat for unit in engine.units for flat in unit.flats]
        self._lines = {name: _Line.of(flat, index) for flat in self._flats for index, name in enumerate(flat.names)}

    def parameters(self) -> dict[str, Held]:
        """Every parameter: the master's values where there are any."""
        self._engine.states.refuse_edited()
        self._engine.states.finish_updates()
        found: dict[str, Held] = {}
        for flat in self._flats:
            dtype = flat.dtype if flat.master is None else flat.master.dtype
            steady = flat.master is not None or flat.partitioned  # else the user may write into it
            for name in flat.names:
                found[name] = Held(self._lines[name].shape, dtype, self._lines[name].order, steady=steady)
            for index, within, values in flat.held():
                name = flat.names[index]
                found[name].parts.append((within.moved(self._lines[name].start), values))
        return found

    def states(self) -> dict[str, Held]:
        """The optimizer's elementwise states."""
        self._engine.states.finish_updates()
        found: dict[str, Held] = {}
        for name, key, within, values in self._optimizer.held_states() if self._optimizer is not None else ():
            line = self._lines[name]
            held = found.setdefault(f"{name}/{key}", Held(line.shape, values.dtype, line.order, steady=True))
            if within.numel:
                held.parts.append((within.moved(line.start), values))
        return found

    def counters(self) -> dict[str, dict[str, Any]]:
        """The optimizer's counters."""
        return {} if self._optimizer is None else self._optimizer.held_counters()

    def groups(self) -> list[Group]:
        """The optimizer's groups."""
        if self._optimizer is None:
            return []
        pairs = zip(self._optimizer.param_groups, self._optimizer.names, strict=True)
        return [Group(list(names), _options(group)) for group, names in pairs]

    def open(self, groups: list[Group] | None, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room in the optimizer."""
        if self._optimizer is not None:
            _set_options(self._optimizer, groups)
            self._optimizer.open_states(states)

    def adopt(self) -> None:
        """Bring the parameters in computation into line."""
        self._engine.states.adopt()
        self._engine.drop_pins()


class PlainStates:
    """Those of a model that is not sharded."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._optimizer = optimizer
        strange = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
        if any(id(parameter) not in self._names for parameter in strange):
            raise CheckpointError("the optimizer holds parameters that are not the model's: give the model they are of")

    def parameters(self) -> dict[str, Held]:
        """Every parameter, whole."""
        return {name: Held.whole(name, parameter) for name, parameter in self._parameters.items()}

    def _states(self) -> Iterator[tuple[str, torch.Tensor, str, Any]]:
        for parameter, state in self._optimizer.state.items() if self._optimizer is not None else ():
            for key, value in state.items():
                yield self._names[id(parameter)], parameter, key, value

    def states(self) -> dict[str, Held]:
        """The optimizer's elementwise states, whole."""
        return {
            f"{name}/{key}": Held.whole(f"{name}/{key}", value)
            for name, parameter, key, value in self._states()
            if is_elementwise(key, value, parameter.shape)
        }

    def counters(self) -> dict[str, dict[str, Any]]:
        """The optimizer's counters."""
        found: dict[str, dict[str, Any]] = {}
        for name, parameter, key, value in self._states():
            counters = found.setdefault(name, {})
            if not is_elementwise(key, value, parameter.shape):
                counters[key] = value
        return found

    def groups(self) -> list[Group]:
        """The optimizer's groups."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [Group([self._names[id(p)] for p in group["params"]], _options(group)) for group in groups]

    def open(self, groups: list[Group] | None, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room in the optimizer."""
        if self._optimizer is None:
            return
        _set_options(self._optimizer, groups)
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                for key, value in states.get(self._names[id(parameter)], {}).items():
                    self._optimizer.state[parameter][key] = opened(key, value, parameter, on_device)

    def adopt(self) -> None:
        """Nothing: what was written into is what computes."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself where ``torch.compile`` has wrapped it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a sharded model; None of a plain one."""
    sharded = model.__dict__.get("_zeroshard")
    engine: Engine | None = sharded.engine if sharded is not None else None
    return engine


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> States:
    """The states of a model and its optimizer, as they are; refuses a pair that does not belong together."""
    engine = engine_of(model)
    if engine is None:
        if any(card_of(parameter) is not None for parameter in model.parameters()):
            raise CheckpointError(f"this {type(model).__name__} is part of a sharded model: give the whole model")
        if isinstance(optimizer, ShardedOptimizer):
            raise CheckpointError("the optimizer is sharded and the model is not: give the model shard() returned")
        divided = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        if divided:
            raise CheckpointError(
                f"{divided[0]!r} is a DTensor, and this {type(model).__name__} is not sharded by zeroshard: give it to "
                "shard(), with a mesh whose last axis is the tensor axis, and then save and load what shard() returns"
            )
        return PlainStates(model, optimizer)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise CheckpointError("the model is sharded and the optimizer is not: give the optimizer shard() returned")
    return ShardedStates(engine, optimizer)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to a model's state, by name."""
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(prefix, recurse=False):
            if key.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield key, _undivided(key, buffer)


def _undivided(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer itself, of which torch makes a DTensor where it divides the module's parameters."""
    if not isinstance(buffer, DTensor):
        return buffer
    if any(not isinstance(placement, Replicate) for placement in buffer.placements):
        raise CheckpointError(
            f"the buffer {name!r} is a DTensor placed as {buffer.placements}: a checkpoint keeps the first rank's "
            "buffers, so each rank has to have all of it. Make it a parameter, or register it with persistent=False"
        )
    return buffer.to_local()


def ties_of(model: nn.Module) -> dict[str, str]:
    """Other names under which a parameter is found → the first one, which is the one it is kept under."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in everywhere if first[id(parameter)] != name}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in IMPLEMENTATION}


def _set_options(optimizer: torch.optim.Optimizer, groups: list[Group] | None) -> None:
    for group, saved in zip(optimizer.param_groups, groups or [], strict=False):
        for key, value in saved.options.items():
            if key in IMPLEMENTATION:
                continue
            own = group.get(key)  # a learning rate that is a tensor here stays one, on its device; and the reverse
            if isinstance(own, torch.Tensor):
                value = torch.as_tensor(value).to(own.device, own.dtype)
            elif isinstance(value, torch.Tensor) and isinstance(own, (int, float)):
                value = value.item()
            group[key] = value
