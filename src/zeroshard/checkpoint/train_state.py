"""The states of a model and its optimizer that a checkpoint contains, sharded or not, and where their values are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from zeroshard.checkpoint.flat_shards import ElementOrder, LocalTensor
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.engine import EMA, Engine, FlatParam, param_info
from zeroshard.optim import ShardedOptimizer, StateDtypes, allocate_state, is_elementwise
from zeroshard.sharding import Range

# param group options that select an implementation and do not change the result: a load keeps the current ones
IMPLEMENTATION_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass
class NamedParamGroup:
    """A param group: the class of its optimizer, the names of its parameters, and its options."""

    class_name: str
    names: list[str]
    options: dict[str, Any]


class TrainState:
    """The training states of an unsharded model and, if given, its optimizers."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._optimizers = optimizers
        self._groups: list[dict[str, Any]] = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.group_optimizers = [  # the user's own optimizer of each group
            getattr(optimizer, "inner", optimizer) for optimizer in optimizers for _ in optimizer.param_groups
        ]

    def parameters(self) -> dict[str, LocalTensor]:
        """Return every parameter, in the highest precision available."""
        return {name: LocalTensor.from_full_tensor(name, parameter) for name, parameter in self._parameters.items()}

    def optimizer_states(self) -> dict[str, LocalTensor]:
        """Return the optimizer's elementwise states by ``NAME/STATE``."""
        tensors: dict[str, LocalTensor] = {}
        for parameter, state in self._states():
            for key, value in state.items():
                if is_elementwise(key, value, parameter.shape):
                    name = f"{self._names[id(parameter)]}/{key}"
                    tensors[name] = LocalTensor.from_full_tensor(name, value)
        return tensors

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the scalar states (step counts) of the parameters that this rank has elements of."""
        return {
            self._names[id(parameter)]: {
                key: value for key, value in state.items() if not is_elementwise(key, value, parameter.shape)
            }
            for parameter, state in self._states()
            if state
        }

    def _states(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        return (pair for optimizer in self._optimizers for pair in optimizer.state.items())

    def _group_names(self) -> list[list[str]]:
        """Return the names of each param group's parameters."""
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in self._groups]

    def allocate_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Allocate states in the optimizer: see ``ShardedOptimizer.allocate_states``."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        owners = [(optimizer, StateDtypes(optimizer)) for optimizer in self._optimizers for _ in optimizer.param_groups]
        for group, (optimizer, dtypes) in zip(self._groups, owners, strict=True):
            for parameter in group["params"]:
                for key, value in states.get(self._names[id(parameter)], {}).items():
                    found = dtypes.resolve(key, value, parameter, group)
                    optimizer.state[parameter][key] = allocate_state(key, found, parameter, group)

    def sync_loaded_parameters(self) -> None:
        """Apply the values that a load wrote into the tensors of :meth:`parameters`."""

    def outer_states(self, with_anchors: bool | None = None) -> dict[str, LocalTensor]:
        """Return anchors and elementwise states of ``Config.outer_optimizer`` by ``NAME/STATE``."""
        return {}

    def outer_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the outer optimizer's scalar states of the parameters that this rank has elements of."""
        return {}

    def averages(self, ema: EMA) -> dict[str, LocalTensor]:
        """Return the averages of an EMA by the names of their parameters; raise if it is of another model."""
        raise CheckpointError("an EMA belongs to a sharded model, and this one is not: pass what shard() returned")

    def param_groups(self) -> list[NamedParamGroup]:
        """Return the optimizer's param groups."""
        groups = zip(self.group_optimizers, self._groups, self._group_names(), strict=True)
        return [
            NamedParamGroup(
                type(optimizer).__name__,
                names,
                {key: value for key, value in group.items() if key not in IMPLEMENTATION_OPTIONS},
            )
            for optimizer, group, names in groups
        ]

    def set_options(self, saved_groups: list[NamedParamGroup]) -> None:
        """Set the options of the optimizer's param groups."""
        for group, saved in zip(self._groups, saved_groups, strict=True):
            for key, value in saved.options.items():
                if key in IMPLEMENTATION_OPTIONS:  # of another program: save() leaves them out
                    continue
                current = group.get(key)  # keep its type: a tensor lr stays a tensor on its device, a float a float
                if isinstance(current, torch.Tensor):
                    value = torch.as_tensor(value, device=current.device).to(current.dtype)
                elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
                    value = value.item()
                group[key] = value


class ShardedTrainState(TrainState):
    """The training states of a sharded model."""

    def __init__(self, engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
        super().__init__(optimizers, {})
        self._engine = engine
        self._optimizers: Sequence[ShardedOptimizer] = optimizers
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
            tensors |= self._local_tensors(flat, flat.owned_slices(), dtype, is_stable)
        return tensors

    def averages(self, ema: EMA) -> dict[str, LocalTensor]:
        """Return the averages of an EMA by the names of their parameters."""
        if not ema.is_of(self._engine):
            raise CheckpointError("the EMA is of another model: make it with zeroshard.EMA(model, …) after shard()")
        tensors: dict[str, LocalTensor] = {}
        for flat, average in ema.flat_averages():
            tensors |= self._local_tensors(flat, flat.owned_slices(average), average.dtype, is_stable=False)
        return tensors

    def outer_states(self, with_anchors: bool | None = None) -> dict[str, LocalTensor]:
        """Return anchors and states; by default anchors only between two averages: after one, a step takes new ones."""
        tensors: dict[str, LocalTensor] = {}
        for local_steps in (optimizer.local_steps for optimizer in self._optimizers):
            if local_steps is None or local_steps.outer is None:
                continue
            for flat in local_steps.outer.flats():
                has_anchors = local_steps.count > 0 if with_anchors is None else with_anchors
                for key, values in local_steps.outer.states(flat, has_anchors).items():
                    local = self._local_tensors(flat, flat.owned_slices(values), values.dtype, is_stable=True)
                    tensors |= {f"{name}/{key}": tensor for name, tensor in local.items()}
        return tensors

    def outer_scalars(self) -> dict[str, dict[str, Any]]:
        outers = [each.local_steps.outer for each in self._optimizers if each.local_steps is not None]
        owned = ((outer, flat) for outer in outers if outer is not None for flat in outer.flats())
        return {flat.names[index]: outer.scalars(flat) for outer, flat in owned for index, _, _ in flat.owned_slices()}

    def optimizer_states(self) -> dict[str, LocalTensor]:
        self._engine.state_guard.wait_updates()
        tensors: dict[str, LocalTensor] = {}
        full_names = {name for optimizer in self._optimizers for name in optimizer.tp_whole_names}
        local_states = (state for optimizer in self._optimizers for state in optimizer.local_states())
        for name, key, element_range, values in local_states:
            if name in full_names:
                shape, _ = self._specs[name]
                local = tensors[f"{name}/{key}"] = LocalTensor.from_full_tensor(name, values.view(shape))
                local.is_stable_until_step = local.is_on_all_tp_ranks = True
                continue
            local = tensors.setdefault(f"{name}/{key}", self._local_tensor(name, values.dtype, is_stable=True))
            if element_range.numel:
                local.shards.append((element_range.shift(self._tp_starts[name]), values))
        return tensors

    def _local_tensors(
        self, flat: FlatParam, slices: Iterable[tuple[int, Range, torch.Tensor]], dtype: torch.dtype, is_stable: bool
    ) -> dict[str, LocalTensor]:
        """Return the parameters of a flat, or a state of each, by name; ``slices`` are this rank's, by index."""
        tensors = {name: self._local_tensor(name, dtype, is_stable) for name in flat.names}
        for index, element_range, values in slices:
            name = flat.names[index]
            tensors[name].shards.append((element_range.shift(self._tp_starts[name]), values))
        return tensors

    def _local_tensor(self, name: str, dtype: torch.dtype, is_stable: bool) -> LocalTensor:
        shape, element_order = self._specs[name]
        return LocalTensor(shape, dtype, element_order, is_stable_until_step=is_stable)

    def optimizer_scalars(self) -> dict[str, dict[str, Any]]:
        return {name: scalars for optimizer in self._optimizers for name, scalars in optimizer.local_scalars().items()}

    def _group_names(self) -> list[list[str]]:
        return [list(names) for optimizer in self._optimizers for names in optimizer.group_param_names]

    def allocate_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for optimizer in self._optimizers:
            names = [name for group in optimizer.group_param_names for name in group]
            optimizer.allocate_states({name: states[name] for name in names if name in states})

    def sync_loaded_parameters(self) -> None:
        """Update the compute parameters from the master weights."""
        self._engine.finish_write()


def engine_of_model(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model, or None for an unsharded one."""
    sharded = model.__dict__.get("_zeroshard")
    engine: Engine | None = sharded.engine if sharded is not None else None
    return engine


def get_train_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> TrainState:
    """Return the states of a model and its optimizers; raise if they do not belong together."""
    engine = engine_of_model(model)
    sharded = [optimizer for optimizer in optimizers if isinstance(optimizer, ShardedOptimizer)]
    if len(set(map(id, optimizers))) < len(optimizers):
        raise CheckpointError("the same optimizer is given twice: pass each optimizer of the model once")
    if engine is not None:
        if len(sharded) < len(optimizers):
            raise CheckpointError(
                "the model is sharded but the optimizer is not: pass the optimizer that shard() returned"
            )
        return ShardedTrainState(engine, sharded)
    if any(param_info(parameter) is not None for parameter in model.parameters()):
        raise CheckpointError(f"this {type(model).__name__} is a part of a sharded model: pass the whole model")
    if sharded:
        raise CheckpointError("the optimizer is sharded but the model is not: pass the model that shard() returned")
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise CheckpointError(
                f"{name!r} is a DTensor, but this {type(model).__name__} is not sharded by zeroshard: pass it to "
                "shard() with a mesh whose last axis is the tensor axis, then save and load what shard() returns"
            )
    known = set(map(id, parameters.values()))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(id(parameter) not in known for group in groups for parameter in group["params"]):
        raise CheckpointError(
            "the optimizer has parameters that are not in this model: pass the model it was created for"
        )
    return TrainState(optimizers, parameters)


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
    """Map each further name of a tied parameter or buffer to its first name, under which it is saved."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    all_names = model.named_parameters(remove_duplicate=False)
    ties = {name: first_names[id(parameter)] for name, parameter in all_names if first_names[id(parameter)] != name}
    saved, first_names = {name for name, _ in persistent_buffers(model)}, {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in saved:
                first_names[id(buffer)] = name
            elif id(buffer) in first_names and key not in module._non_persistent_buffers_set:
                ties[name] = first_names[id(buffer)]
    return ties
