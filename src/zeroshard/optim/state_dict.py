"""OptimizerStates: read, load and allocate optimizer states by parameter name, as shards or in full."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zeroshard.engine import Engine, FlatParam, assemble_full_tensor, find_parameter
from zeroshard.memory import TieredTensor, TierSegment
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.optimizer_copy import number_states, state_dtypes
from zeroshard.optim.param_groups import FrozenParamStates, ParamGroups
from zeroshard.optim.slices import OptimizerSlice, is_elementwise, is_scalar_state
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS, WHOLE_PARAM_OPTIMIZERS
from zeroshard.optim.whole_params import WholeParam
from zeroshard.sharding import Range


class OptimizerStates:
    """The states of one sharded optimizer, by parameter name.

    A description of a state is its dtype if it is elementwise, else its value: a step count, for example.
    """

    def __init__(self, engine: Engine, groups: ParamGroups, cpu_updates: CpuUpdates | None) -> None:
        self._engine, self._groups, self._cpu_updates = engine, groups, cpu_updates
        self._states = groups.inner.state

    # -- reading ----------------------------------------------------------------------------------------------------

    def state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the full state dict, as the plain optimizer would; see :meth:`full`. All ranks call it together."""
        _warn_of_replicas(self._groups)
        param_ids = {name: number for number, name in enumerate(name for names in self._groups.names for name in names)}
        described = self.describe(param_ids, "read the optimizer's state_dict()")
        states = {param_ids[name]: state for name, state in self.full(described, rank).items() if state}
        groups = [
            {key: [param_ids[n] for n in names] if key == "params" else value for key, value in group.copy().items()}
            for group, names in zip(self._groups.views, self._groups.names, strict=True)
        ]
        is_receiver = rank in (None, self._engine.comm.consistency.rank)
        return {"state": states, "param_groups": groups} if is_receiver else {}

    def describe(
        self, names: Iterable[str] | None = None, what: str = "read the optimizer's states"
    ) -> dict[str, dict[str, Any]]:
        """Describe the states of all parameters, or of ``names``, without gathering them. All ranks call it together.

        ``what`` names the operation in errors.
        """
        engine = self._engine
        engine.state_guard.prepare_read(what, "optimizer")
        local: dict[str, dict[str, Any]] = {
            name: {} for name in (names or [name for group in self._groups.names for name in group])
        }
        error_text = ""
        for slice_ in self._groups.all_slices:
            state = self._states.get(slice_.parameter, {})
            described = _describe(state, slice_.parameter.shape)
            for flat, parameter, _, _ in slice_.param_ranges() if described else ():
                if flat.names[parameter] in local:
                    local[flat.names[parameter]] = described
                    error_text = error_text or self._state_error(flat.names[parameter], slice_.parameter, state)
        for param in self._groups.whole.owned():
            if param.name in local:
                described = _describe(self._states.get(param.parameter, {}), param.parameter.shape)
                # on the host: a pickled tensor of a GPU would be loaded on the owner's GPU
                local[param.name] = tree_map_only(torch.Tensor, torch.Tensor.cpu, described)
        for name, frozen in self._groups.frozen_states.items():
            if name in local:
                local[name] = {key: flattened.dtype for key, flattened in frozen.elementwise.items()} | frozen.scalars
        if engine.comm.shard_axis.size * engine.comm.tensor_axis.size > 1:
            engine.order.check(what)
        local = {} if error_text else tree_map_only(float, float, local)  # NumPy's numbers are floats, too
        gathered = engine.comm.all_gather_object((error_text, local), what)
        for error, _ in gathered:
            if error:
                raise RuntimeError(error)
        return {name: self._merge(name, [rank[name] for _, rank in gathered if rank[name]]) for name in local}

    def _merge(self, name: str, descriptions: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the description that all ranks share."""
        merged = descriptions[0] if descriptions else {}
        for other in descriptions[1:]:
            different = [key for key, value in merged.items() if key in other and not _is_equal(value, other[key])]
            if different:
                raise RuntimeError(
                    f"the state {different[0]!r} of {name!r} differs between ranks, so it has no full value: "
                    f"{type(self._groups.inner).__name__} computes it from the slices of each rank"
                )
        return merged

    def _state_error(self, name: str, parameter: torch.Tensor, state: dict[str, Any]) -> str:
        """Return why the states of a slice are not valid states of its parameter; empty if they are."""
        for key, value in state.items():
            if not is_elementwise(key, value, parameter.shape) and not is_scalar_state(value):
                what = f"has shape {tuple(value.shape)}" if torch.is_tensor(value) else f"is a {type(value).__name__}"
                return (
                    f"the state {key!r} that {type(self._groups.inner).__name__} keeps for {name!r} cannot be saved or "
                    f"read in full: it {what} for a slice of {parameter.numel()} elements, so it belongs to this "
                    "rank's slice and not to the parameter or its elements. Train with an optimizer whose states are "
                    "elementwise or numbers (AdamW, …), or save the model without the optimizer"
                )
        return ""

    def full(self, described: Mapping[str, dict[str, Any]], rank: int | None = None) -> dict[str, dict[str, Any]]:
        """Return the full states of parameters, by name, which have these states. All ranks call it together."""
        ranges, keep = self._local_ranges(described), partial(_keep, rank, self._engine.comm.consistency.rank)
        full = {name: keep(self._full(name, states, ranges[name])) for name, states in described.items()}
        self._engine.comm.check_results("read the optimizer's states")
        return full

    def _full(
        self, name: str, described: dict[str, Any], ranges: list[tuple[dict[str, Any], Range, int]]
    ) -> dict[str, Any]:
        flat, index = find_parameter(self._engine.units, name)
        result: dict[str, Any] = {}
        for key, value in described.items():
            if not isinstance(value, torch.dtype):
                # a state of a whole parameter may be anything; only numbers stay on the host
                device = None if is_scalar_state(value) else flat.device
                result[key] = _copy_tensors(value, device)
                continue
            flattened = torch.zeros(flat.layout.numels[index], dtype=value, device=flat.device)
            for state, within, at in ranges:
                flattened[within.start : within.end] = state[key][at : at + within.numel]
            result[key] = assemble_full_tensor(self._engine.comm, flattened, flat, index)
        return result

    def _local_ranges(self, names: Iterable[str]) -> dict[str, list[tuple[dict[str, Any], Range, int]]]:
        """Return this rank's states by parameter: (states, range in the parameter, offset in the state tensors)."""
        found: dict[str, list[tuple[dict[str, Any], Range, int]]] = {name: [] for name in names}
        for name in found.keys() & self._groups.frozen_states.keys():
            states = self._groups.frozen_states[name].elementwise
            found[name] = [(states, *place) for place in _owned_param_ranges(*find_parameter(self._engine.units, name))]
        for param in self._groups.whole.owned():
            if param.name in found:
                flattened = {key: param.flatten(value) for key, value in self._whole_states(param).items()}
                found[param.name].append((flattened, Range(0, param.numel), 0))
        for slice_ in self._groups.all_slices:
            for flat, parameter, within, at in slice_.param_ranges():
                if flat.names[parameter] in found:
                    found[flat.names[parameter]].append((self._states[slice_.parameter], within, at))
        return found

    def _whole_states(self, param: WholeParam) -> dict[str, torch.Tensor]:
        """Return the elementwise states of a parameter that this rank owns."""
        states = self._states.get(param.parameter, {})
        return {key: value for key, value in states.items() if is_elementwise(key, value, param.parameter.shape)}

    def local(self) -> Iterator[tuple[str, str, Range, torch.Tensor]]:
        """Yield (parameter name, state key, range, values) for every elementwise state on this rank.

        Those of :attr:`ShardedOptimizer.tp_whole_names` are full tensors, in the order of a contiguous parameter.
        """
        for param in self._groups.whole.owned():
            for key, value in self._whole_states(param).items():
                flattened = param.flatten(value) if param.tp_shard is None else value.reshape(-1)
                yield param.name, key, Range(0, flattened.numel()), flattened
        for name, frozen in self._groups.frozen_states.items():
            ranges = _owned_param_ranges(*find_parameter(self._engine.units, name))
            for key, value in frozen.elementwise.items():
                for within, at in ranges:
                    yield name, key, within, value[at : at + within.numel]
        for slice_ in self._groups.all_slices:
            for key, value in self._states.get(slice_.parameter, {}).items():
                if is_elementwise(key, value, slice_.parameter.shape):
                    for flat, parameter, within, at in slice_.param_ranges():
                        yield flat.names[parameter], key, within, value[at : at + within.numel]

    def local_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the states that are not elementwise, such as step counts, by name of the parameters on this rank."""
        found = {name: frozen.scalars for name, frozen in self._groups.frozen_states.items()}
        for slice_ in self._groups.all_slices:
            state = self._states.get(slice_.parameter, {})
            scalars = {k: v for k, v in state.items() if not is_elementwise(k, v, slice_.parameter.shape)}
            for flat, parameter, _, _ in slice_.param_ranges() if state else ():
                name = flat.names[parameter]
                error = self._state_error(name, slice_.parameter, scalars)
                if error:
                    raise RuntimeError(error)
                found[name] = scalars
        for param in self._groups.whole.owned():
            state = self._states.get(param.parameter, {})
            if state:
                shape = param.parameter.shape
                found[param.name] = {k: v for k, v in state.items() if not is_elementwise(k, v, shape)}
        return found

    # -- writing ----------------------------------------------------------------------------------------------------

    def check_full(self, states: dict[str, dict[str, Any]]) -> None:
        """Raise if full states, by parameter name, cannot be sharded."""
        self.check_shardable(_describe_full(self._groups, states, self.full_shapes()))

    def check_shardable(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise if states, by their descriptions, cannot be sharded. Owners keep any state of whole parameters."""
        sliced = {name: state for name, state in states.items() if name not in self._groups.whole.names}
        check_shardable_states(sliced)

    def load_full(self, states: dict[str, dict[str, Any]]) -> None:
        """Replace all states by this rank's shards of full states, by parameter name."""
        self._states.clear()
        self._groups.whole.states.forget()
        self._groups.frozen_states.clear()
        if not states:
            return
        self.allocate(_describe_full(self._groups, states, self.full_shapes()))
        places = {name: (f, i) for unit in self._engine.units for f in unit.flats for i, name in enumerate(f.names)}
        whole_names = {param.name for param in self._groups.whole.params}  # without frozen ones
        for param in self._groups.whole.owned():
            for key, value in self._whole_states(param).items():
                value.copy_(states[param.name][key])
        for name, key, within, values in self.local():
            flat, index = places[name]
            full_state: Any = states.get(name, {}).get(key)
            if name not in whole_names and is_elementwise(key, full_state, flat.full_shapes[index]):
                values.copy_(_flatten_local_state(full_state, flat, index)[within.slice])

    def allocate(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all states, by their descriptions: allocate zeros for a dtype, copy any other value.

        Floating point states take the dtype in which the optimizer stores them, and step counts are placed where its
        kernels need them.
        """
        self.check_shardable(states)
        self._engine.state_guard.prepare_write()
        before, dtypes = dict(self._states), StateDtypes(self._groups.inner)
        self._states.clear()
        self._allocate_frozen(states)
        for index, slices in enumerate(self._groups.slices):
            if not _have_equal_scalars(slices, states):
                self._groups.split(index)
        before = {s.parameter: before[s.parameter] for s in self._groups.all_slices if s.parameter in before}
        for slice_ in self._groups.all_slices:
            old_states = before.pop(slice_.parameter, {})  # freed as soon as its slice has new states
            for flat, parameter, _, _ in slice_.param_ranges():
                for key, value in states.get(flat.names[parameter], {}).items():
                    if key not in self._states[slice_.parameter]:
                        value = dtypes.resolve(key, value, slice_.parameter, slice_.param_group)
                        new_state = self._allocate(slice_, key, value, old_states.pop(key, None))
                        self._states[slice_.parameter][key] = new_state
        self._groups.whole.states.forget()
        for param in self._groups.whole.owned() if self._groups.whole.params else ():
            group, example = self._group_of(param.name), param.empty()
            for key, value in states.get(param.name, {}).items():
                value = dtypes.resolve(key, value, example, group)
                self._states[param.parameter][key] = _allocate_whole(key, value, example, group)
            self._groups.whole.states.store([param])

    def _group_of(self, name: str) -> dict[str, Any]:
        """Return the inner optimizer's group that has the named parameter."""
        groups = zip(self._groups.inner.param_groups, self._groups.names, strict=True)
        return next(group for group, names in groups if name in names)

    def _allocate(self, slice_: OptimizerSlice, key: str, value: Any, reuse: Any) -> Any:
        if slice_.tier_segment is not None and self._cpu_updates is not None and isinstance(value, torch.dtype):
            reuse = self._cpu_updates.state_buffer(slice_, key, value)
        return allocate_state(key, value, slice_.parameter, slice_.param_group, reuse)

    def _allocate_frozen(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Allocate the states of parameters that are in a group and currently frozen.

        No optimizer slice holds them. Each rank keeps its shard; they are saved and restored like all other states.
        """
        trainable = {name for flat in self._engine.gradients.flat_grads for name in flat.names}
        self._groups.frozen_states.clear()
        for name, state in states.items():
            if state and name not in trainable:
                flat, index = find_parameter(self._engine.units, name)
                numel = sum(within.numel for within, _ in _owned_param_ranges(flat, index))
                dtypes = {key: value for key, value in state.items() if isinstance(value, torch.dtype)}
                self._groups.frozen_states[name] = FrozenParamStates(
                    {key: torch.zeros(numel, dtype=dtype, device=flat.device) for key, dtype in dtypes.items()},
                    {key: value for key, value in state.items() if key not in dtypes},
                )

    def full_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all parameters, by name."""
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        return {name: shape for flat in flats for name, shape in zip(flat.names, flat.full_shapes, strict=True)}


def _warn_of_replicas(groups: ParamGroups) -> None:
    if groups.member.local_steps is not None:
        warnings.warn(
            "optimizer.state_dict() with local_steps has the states of one replica, without the others' and the outer "
            "optimizer's: to continue a run exactly, use zeroshard.save()",
            stacklevel=5,
        )


def give_matrices_to_owners(states: OptimizerStates, groups: ParamGroups, engine: Engine) -> None:
    """Give the matrices that Muon has on slices to their owners, with their states. All ranks call it together."""
    params = groups.muon.params if groups.muon is not None else []
    described = states.describe([param.name for param in params], "give Muon's matrices to their owners")
    owned: dict[WholeParam, dict[str, Any]] = {}
    for param in params:
        state = states.full({param.name: described[param.name]})[param.name]
        if param.owner == engine.comm.shard_axis.rank:
            owned[param] = state
    before = {slice_.parameter for slice_ in groups.all_slices}
    groups.set_whole_matrices()
    for parameter in before - {slice_.parameter for slice_ in groups.all_slices}:
        groups.inner.state.pop(parameter, None)
    groups.inner.state.update({param.parameter: state for param, state in owned.items() if state})


class StateDtypes:
    """The dtypes in which an optimizer stores its states.

    torch's own use that of the parameter. Any other class may use another one, which its first step shows.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> adam = torch.optim.Adam([weight])
    >>> StateDtypes(adam).resolve("exp_avg", torch.float32, weight, adam.param_groups[0])
    torch.bfloat16
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[tuple[int, int, torch.dtype], dict[str, torch.dtype]] = {}  # by group and kind of parameter

    def resolve(self, key: str, saved: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
        """Return the dtype for a state that was saved in another one; as saved if that is not known, or no dtype."""
        is_cast = isinstance(saved, torch.dtype) and saved.is_floating_point and parameter.is_floating_point()
        if not is_cast or saved == parameter.dtype:
            return saved
        if type(self._optimizer) in (*ELEMENTWISE_OPTIMIZERS, *WHOLE_PARAM_OPTIMIZERS):
            return parameter.dtype
        place = id(group), parameter.dim(), parameter.dtype
        if place not in self._known:
            self._known[place] = state_dtypes(self._optimizer, group, *place[1:])
        return self._known[place].get(key, saved)


def allocate_masters(engine: Engine, names: set[str]) -> None:
    """Allocate fp32 master weights for flats that had none because no group trained the named parameters."""
    trainable = [(unit, flat) for unit in engine.units for flat in unit.flats if flat.spec.is_trainable]
    for unit, flat in trainable:
        if flat.master is None and names & set(flat.names) and engine.context.precision.has_master(flat.dtype):
            master = torch.empty(flat.layout.shard_numel, dtype=torch.float32, device=flat.device)
            segment = TierSegment(Range(0, flat.layout.shard_numel), "device", master)
            flat.master = TieredTensor([segment], master.dtype)
            engine.context.tracker.add("master weights", master.nbytes)
            for shard_range, local_shard in zip(flat.shard_ranges, flat.local_shards, strict=True):
                flat.master.write(shard_range, local_shard)
            unit.replicated_edits.record_versions([flat])
    engine.state_guard.expose_reduced_grads()  # from now on, detect in-place edits of these parameters


def check_shardable_states(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise if a state cannot be sharded: it is neither elementwise (given as a dtype) nor a scalar.

    >>> check_shardable_states({"weight": {"exp_avg": torch.float32, "step": torch.tensor(3.0)}})
    """
    for name, state in states.items():
        for key, value in state.items():
            if not isinstance(value, torch.dtype) and not is_scalar_state(value):
                what = f"of shape {tuple(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"
                raise ValueError(
                    f"the state {key!r} of {name!r}, {what}, is neither elementwise nor a number, so it cannot be "
                    "sharded: use an optimizer that is not sharded, or drop these states (a new optimizer; "
                    "load(path, model) for the weights alone)"
                )


def describe_full_states(
    states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, Any]]:
    """Describe full states by parameter: elementwise states by their dtype, others by their value."""
    return {name: _describe(state, shapes[name]) for name, state in states.items()}


def _describe_full(
    groups: ParamGroups, states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, Any]]:
    """Describe full states. All those of a 0-dim parameter have its shape, and some are numbers on a slice."""
    described = describe_full_states(states, shapes)
    for name, state in states.items():
        if not shapes[name] and name not in groups.whole.names:
            number = next(number for number, names in enumerate(groups.names) if name in names)
            numbers = number_states(groups.inner, groups.inner.param_groups[number])
            described[name] |= {key: value for key, value in state.items() if key in numbers}
    return described


def _describe(state: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    return {key: value.dtype if is_elementwise(key, value, shape) else value for key, value in state.items()}


def _have_equal_scalars(slices: list[OptimizerSlice], states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether all parameters of the slices have equal scalar states, so that one set per slice is enough."""
    ranges = (place for slice_ in slices for place in slice_.param_ranges())
    seen = [states.get(flat.names[parameter], {}) for flat, parameter, _, _ in ranges]
    return all(
        one.keys() == seen[0].keys() and all(_is_equal(one[key], seen[0][key]) for key in one) for one in seen[1:]
    )


def _owned_param_ranges(flat: FlatParam, index: int) -> list[tuple[Range, int]]:
    """Return this rank's ranges of a parameter, each with its offset when they are packed contiguously."""
    ranges, offset = [], 0
    for param_range in flat.owned_ranges:
        if param_range.param_index == index:
            ranges.append((param_range.elements, offset))
            offset += param_range.elements.numel
    return ranges


def _flatten_local_state(value: torch.Tensor, flat: FlatParam, index: int) -> torch.Tensor:
    """Return this tensor rank's TP shard of a full state, flattened like the parameter in its FlatParam."""
    tp_shard = flat.tp_shards[index]
    return flat.flatten((value if tp_shard is None else tp_shard.slice(value)).to(flat.device), index)


def _copy_tensors(value: Any, device: torch.device | None) -> Any:
    """Copy a state and the tensors in it, to a device or each to its own."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device or tensor.device, copy=True), copy.copy(value))


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    return type(left) is type(right) and bool(left == right)


def _allocate_whole(key: str, value: Any, example: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Allocate one state of a whole parameter, or copy it: it may be anything that an optimizer stores."""
    if isinstance(value, (torch.dtype, torch.Tensor)):
        return allocate_state(key, value, example, group)
    return _copy_tensors(value, example.device)


def allocate_state(key: str, value: Any, parameter: torch.Tensor, group: Mapping[str, Any], reuse: Any = None) -> Any:
    """Allocate one state of a parameter of a group: zeros if ``value`` is a dtype, else a copy.

    Take the memory of ``reuse`` if it fits, since allocation takes time.
    """
    if isinstance(value, torch.dtype):
        if torch.is_tensor(reuse) and reuse.dtype == value and reuse.shape == parameter.shape:
            return reuse.zero_()
        return torch.zeros_like(parameter, dtype=value)
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":  # these optimizers' kernels read it on the device
        on_device = group.get("capturable") or group.get("fused")
        return value.to(parameter.device, torch.float32, copy=True) if on_device else value.clone()
    return value.to(parameter.device, copy=True)


def _keep(receiver: int | None, rank: int, state: dict[str, Any]) -> dict[str, Any]:
    """Return a full state: as it is without ``receiver``, else in host memory on that rank and {} on the others."""
    if receiver is None:
        return state
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, state) if rank == receiver else {}
