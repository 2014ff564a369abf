"""Parameter groups: as users see them, the slices that replace their parameters, and equal options on all ranks."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.engine import NO_HISTORY, Engine, FlatGrad, FlatParam, GradHistory, Unit, param_info, take_edits
from zeroshard.memory import record_blocking_event
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.model_optimizers import Membership
from zeroshard.optim.slices import OptimizerSlice, make_slices
from zeroshard.optim.step import OptimizerStep
from zeroshard.optim.whole_params import WholeParam

DIGEST_BYTES = 8
REPLACED_ERROR = (
    "optimizer.param_groups or optimizer.state was replaced by another object, which zeroshard would not use: change "
    "the groups in place (optimizer.param_groups[0]['lr'] = …), drop all states by optimizer.state.clear(), or "
    "call optimizer.load_state_dict()"
)
CHANGED_INNER_ERROR = (
    "the groups or the states of the optimizer that was passed to zeroshard.shard() were added or replaced, which its "
    "shards do not follow: call load_state_dict(), add_param_group() and all else on the optimizer that shard() "
    "returned"
)


class ParamGroupView(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[metaclass, misc]
    """One of ``ShardedOptimizer.param_groups``.

    The inner optimizer's groups hold slices of shards ([Note: optimizer slices]). They differ between ranks and are not
    parameters of the model. Users expect the model's parameters in a group (to clip gradients, count or look up
    parameters), so "params" returns those. All other entries, such as the learning rate, are those of the inner group.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> inner = {"params": ["a slice"], "lr": 0.1}
    >>> group = ParamGroupView(inner, [weight])
    >>> group["lr"] = 0.2
    >>> inner["lr"], group["params"][0] is weight, isinstance(group, dict), dict(group)["lr"]
    (0.2, True, True, 0.2)
    >>> group |= {"lr": 0.3}
    >>> inner["lr"], (group | {"lr": 0.4})["lr"], ({"lr": 0.4} | group)["lr"], group != dict(group)
    (0.3, 0.4, 0.3, False)
    """

    def __init__(self, inner: dict[str, Any], parameters: list[nn.Parameter], needs_whole: bool = False) -> None:
        super().__init__()
        self.inner, self.parameters, self.needs_whole = inner, parameters, needs_whole
        self._param_names = inner.get("param_names")  # of ``parameters``; the inner group may have fewer

    def __getitem__(self, key: str) -> Any:
        """Return the model's parameters for "params", and their names; else the inner group's entry."""
        if key == "param_names" and self._param_names is not None:
            return self._param_names
        return self.parameters if key == "params" else self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an entry of the inner group."""
        if key == "param_names" and self._param_names is not None:
            self._param_names = value
        elif key != "params":
            self.inner[key] = value
        elif value is not self.parameters:
            raise RuntimeError(
                "the parameters of a group cannot be replaced after zeroshard.shard(): call "
                "optimizer.add_param_group() to add some, or zeroshard.unwrap() and shard again"
            )

    def __delitem__(self, key: str) -> None:
        """Delete an entry of the inner group."""
        if key == "params":
            raise RuntimeError("the parameters of a group cannot be deleted while the model is sharded")
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter(self.inner)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.inner)

    # A dictionary's own operators would use its storage, which is empty.

    __ne__ = object.__ne__

    def __or__(self, other: Any) -> dict[str, Any]:
        """Return a plain dictionary with the entries of both."""
        return {**self.copy(), **other}

    def __ior__(self, other: Any) -> Any:
        """Set entries of the inner group."""
        for key, value in dict(other).items():
            self[key] = value
        return self

    def __repr__(self) -> str:
        """Return the repr of the plain dictionary."""
        return repr(self.copy())

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary with the same entries."""
        return {key: self[key] for key in self}

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Return a deep copy as a plain dictionary."""
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain dictionary."""
        return dict, (self.copy(),)


class StateView(MutableMapping[Any, Any], dict[Any, Any]):  # type: ignore[metaclass, misc]
    """``ShardedOptimizer.state``.

    The inner optimizer's states belong to slices or to what this rank owns, never to a parameter of the model: with one
    as the key, a plain dictionary would return an empty state, and keep what is written to it, without any effect.

    >>> weight, inner = nn.Parameter(torch.ones(2)), {}
    >>> state = StateView(inner)
    >>> state[weight] = {"step": 1}
    >>> weight in state, len(state), list(state.values()), isinstance(state, dict)
    (True, 1, [{'step': 1}], True)
    >>> state.clear()
    >>> inner
    {}
    """

    def __init__(self, inner: MutableMapping[Any, Any]) -> None:
        super().__init__()
        self.inner = inner

    def _check(self, key: Any) -> Any:
        info = param_info(key) if isinstance(key, torch.Tensor) else None
        if info is not None:
            raise RuntimeError(
                f"optimizer.state has the states of this rank's shards, not those of {info.name!r}: read them by "
                f"zeroshard.full_state(optimizer, {info.name!r}), change them by optimizer.load_state_dict(), or drop "
                "all by optimizer.state.clear()"
            )
        return key

    def __getitem__(self, key: Any) -> Any:
        """Return the state of a slice."""
        return self.inner[self._check(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set the state of a slice."""
        self.inner[self._check(key)] = value

    def __delitem__(self, key: Any) -> None:
        """Delete the state of a slice."""
        del self.inner[self._check(key)]

    def __contains__(self, key: Any) -> bool:
        """Return whether there is a state of a slice."""
        return self._check(key) in self.inner

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a slice if there is one."""
        return self.inner.get(self._check(key), default)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the slices."""
        return iter(self.inner)

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self.inner)

    def __repr__(self) -> str:
        """Return the repr of the plain dictionary."""
        return repr(self.inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy as a plain dictionary."""
        return copy.deepcopy(self.inner, memo)


class StepChecker:
    """Check that all ranks step with the same hyper-parameters, gradients and edits, in an all-reduce needed anyway.

    Each rank sends digests and their complements. After a MAX all-reduce, each byte and its complement add up to 255
    only if all ranks sent the same. On a GPU the result is read in the next step, so there is no host sync.

    >>> checker = StepChecker(torch.device("cpu"))
    >>> checker.compare(checker.local_digest([{"lr": 0.1}], NO_HISTORY), rank=0)
    >>> digests = [checker.local_digest([{"lr": lr}], NO_HISTORY) for lr in (0.1, 0.2)]
    >>> both = torch.maximum(*digests)
    >>> try:
    ...     checker.compare(both, rank=0)
    ... except RuntimeError as error:
    ...     print(str(error).partition(". ")[0])
    the hyper-parameters of the optimizer differ between ranks: rank 0 has [{'lr': 0.2}]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._options: list[dict[str, Any]] | None = None
        self._grad_history = NO_HISTORY
        self._local_digest = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._received_bytes = bytearray(6 * DIGEST_BYTES)  # read without a torch operation
        self._received = torch.frombuffer(self._received_bytes, dtype=torch.uint8)
        self._pinned = (
            torch.empty(6 * DIGEST_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
            if device.type == "cuda"
            else None
        )
        self._copy_done: torch.cuda.Event | None = None  # the copy of the result to the host

    def local_digest(
        self, groups: Sequence[Mapping[str, Any]], grad_history: GradHistory, edits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the digests and their complements, as this rank sends them. ``edits``: see :func:`take_edits`."""
        options = [_numeric_options(group) for group in groups]
        if (options, grad_history) != (self._options, self._grad_history):
            digest = b"".join(
                hashlib.blake2b(repr(value).encode(), digest_size=DIGEST_BYTES).digest()
                for value in (options, grad_history)
            )
            digest += bytes(DIGEST_BYTES)  # no edits
            both = [*digest, *(255 - byte for byte in digest)]
            self._local_digest = torch.tensor(both, dtype=torch.uint8, device=self._device)
            self._options, self._grad_history = options, grad_history
        if edits is None:
            return self._local_digest
        digest, complement = self._local_digest.view(2, -1)[:, : 2 * DIGEST_BYTES]
        number = edits.view(1).view(torch.uint8)
        return torch.cat([digest, number, complement, 255 - number])

    def compare(self, largest: torch.Tensor, rank: int) -> None:
        """Raise if the ranks sent different digests. ``largest`` is the maximum of each byte over the ranks."""
        if self._pinned is None:
            self._raise_if_different(largest, rank)
            return
        copy_done, self._copy_done = self._copy_done, None  # of the previous step; reported once
        if copy_done is not None:
            copy_done.synchronize()
            self._raise_if_different(self._pinned, rank)
        self._pinned.copy_(largest, non_blocking=True)
        self._copy_done = record_blocking_event(torch.cuda.current_stream())

    def _raise_if_different(self, received: torch.Tensor, rank: int) -> None:
        self._received.copy_(received)
        digest, complement = self._received_bytes[: 3 * DIGEST_BYTES], self._received_bytes[3 * DIGEST_BYTES :]
        sums = list(map(operator.add, digest, complement))
        if set(sums) == {255}:
            return
        if set(sums[2 * DIGEST_BYTES :]) != {255}:
            has_unedited = set(complement[2 * DIGEST_BYTES :]) == {255}  # a rank has sent 0
            raise RuntimeError(
                "parameters were changed since the last step, in place or by load_state_dict(), "
                f"{'but not on all ranks' if has_unedited else 'and not to the same values on all ranks'}: each rank "
                "would train another model. Make the same change on all ranks, or make it inside `with "
                "zeroshard.gathered(model, write_rank=0):`, which gives all ranks the values of one"
            )
        if set(sums[:DIGEST_BYTES]) != {255}:
            raise RuntimeError(
                f"the hyper-parameters of the optimizer differ between ranks: rank {rank} has {self._options}. Each "
                "rank updates its shard of every parameter with its own values: set the same learning rate and other "
                "options in optimizer.param_groups on all ranks"
            )
        raise RuntimeError(
            "some ranks have cleared gradients between backward and step, and others have not, but these are already "
            "summed over the ranks: call zero_grad(), or set parameter.grad = None, on all ranks or on none"
        )


def _numeric_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group that are one number or several, except tensors on a GPU."""
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):  # slices differ between ranks
            continue
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()
        is_sequence = isinstance(value, (tuple, list))
        if isinstance(value, (int, float)) or (is_sequence and all(isinstance(v, (int, float)) for v in value)):
            options[key] = tuple(value) if is_sequence else value
    return options


@dataclass
class FrozenParamStates:
    """The states of a frozen parameter in a group. No optimizer slice holds them."""

    elementwise: dict[str, torch.Tensor]  # this rank's elements, packed contiguously
    scalars: dict[str, Any]


@dataclass(frozen=True)
class OwnParams:
    """The trainable parameters in the groups of one optimizer, and where they are."""

    params: list[nn.Parameter] = field(default_factory=list)
    flats: dict[FlatParam, bool] = field(default_factory=dict)  # and whether all parameters of the flat are in groups
    units: list[Unit] = field(default_factory=list)
    has_ungrouped: bool = False  # whether there are others, whose gradients are not touched

    @classmethod
    def find(cls, engine: Engine, names: set[str]) -> OwnParams:
        """Find the parameters with these names; frozen ones do not count."""
        flats = list(engine.gradients.flat_grads)
        trainable = [pair for flat in flats for pair in flat.named_parameters]
        own_flats = {flat: names.issuperset(flat.names) for flat in flats if not names.isdisjoint(flat.names)}
        units = [unit for unit in engine.units if not own_flats.keys().isdisjoint(unit.flats)]
        params = [parameter for name, parameter in trainable if name in names]
        return cls(params, own_flats, units, has_ungrouped=len(params) < len(trainable))


class ParamGroups:
    """The parameter groups of one optimizer: the names of their parameters, and the slices that replace them."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        member: Membership,
        cpu_updates: CpuUpdates | None,
        step: OptimizerStep,
    ) -> None:
        engine = self._engine = member.shared.engine
        self.inner, self.member, self._cpu_updates = inner, member, cpu_updates
        self._step, self.whole, self.muon = step, step.whole, step.muon
        self.names: list[list[str]] = []  # per group, in the order the user gave them
        self.views: list[ParamGroupView] = []  # the groups as users see them
        self.slices: list[list[OptimizerSlice]] = []  # per group; none for a group of whole parameters
        self.all_slices: list[OptimizerSlice] = []
        self.own = OwnParams()
        self.frozen_states: dict[str, FrozenParamStates] = {}  # states of frozen parameters, by name
        self._is_every_param_used = True  # whether every parameter had a gradient on some rank in this step
        self._used_flags_cache: tuple[list[bool], torch.Tensor] | None = None
        self._step_checker = StepChecker(engine.comm.device)

    def as_named(self) -> list[dict[str, Any]]:
        """Return the groups with the names of their parameters: a rank may have no slice of a group."""
        groups = zip(self.inner.param_groups, self.names, strict=True)
        return [{**group, "params": names} for group, names in groups]

    def add(self, names: list[str], needs_whole: bool) -> None:
        """Replace the parameters of the inner optimizer's next group by slices, or by those that this rank owns."""
        index, flats = len(self.names), list(self._engine.gradients.flat_grads)
        parameters = {
            name: p for unit in self._engine.units for flat in unit.flats for name, p in flat.named_parameters
        }
        self.names.append(names)
        listed = [parameters[name] for name in names]
        self.views.append(ParamGroupView(self.inner.param_groups[index], listed, needs_whole))
        self.member.names.update(names)
        self.own = OwnParams.find(self._engine, self.member.names)
        self.slices.append([])
        if needs_whole:
            group = self.inner.param_groups[index]
            if self.muon is None or not self.muon.accepts(group, group["params"]):
                self._set_whole(index, names)
                return
            self.muon.add(names, group)
        segments = self._engine.gradients.memory.segments
        self.whole.overrides.set_owned(index, listed, [])
        self._set_slices(index, make_slices(flats, set(names), self._step.max_slice_numel, segments))

    def _set_whole(self, index: int, names: list[str]) -> None:
        """Replace the parameters of a group by those that this rank owns, with the attributes that the user has set."""
        group, listed = self.inner.param_groups[index], self.views[index].parameters
        originals = dict(zip(names, group["params"], strict=True))  # placeholders if it was added later
        by_original, by_listed = (self.whole.overrides.find(index, each) for each in (group["params"], listed))
        options = {name: a or b for name, a, b in zip(names, by_original, by_listed, strict=True)}
        owned = self.whole.add(names)
        for param in owned:
            param.copy_attributes(originals.get(param.name))
        self.whole.overrides.set_owned(index, listed, [options[param.name] for param in owned])
        self._set_owned(index, names, owned)

    def set_whole_matrices(self) -> None:
        """Replace the slices of Muon's groups by the matrices that this rank owns; their states are left behind."""
        for index, names in enumerate(self.names):
            params = self.muon.remove(self.inner.param_groups[index]) if self.muon is not None else []
            if params:
                self._set_slices(index, [])
                self._set_owned(index, names, self.whole.add(names, params))

    def _set_owned(self, index: int, names: list[str], owned: list[WholeParam]) -> None:
        group = self.inner.param_groups[index]
        group["params"] = [param.parameter for param in owned]
        if "param_names" in group:
            labels = dict(zip(names, group["param_names"], strict=True))
            group["param_names"] = [labels[param.name] for param in owned]
        self._step.slice_guard.guard(group["params"])

    def check_addable(self, parameters: list[nn.Parameter]) -> list[str]:
        """Return the names of parameters for a new group; raise if they are not the model's or in a group already."""
        names: list[str] = []
        for parameter in parameters:
            info = param_info(parameter)
            if info is None or info.flat() not in self._engine.gradients.flat_grads:
                raise ValueError("add_param_group() takes trainable parameters of the sharded model only")
            names.append(info.name)
        self.member.check_ungrouped(names)
        if self._engine.context.config.local_steps > 1:
            for flat in self._engine.gradients.flat_grads:
                for name in flat.names:
                    if name in names:
                        self.member.check_averaged_alone(name, flat.names)
        return names

    def split(self, index: int) -> None:
        """Split the slices of a group permanently into one slice per parameter, with their states."""
        split = []
        for slice_ in self.slices[index]:
            for param_slice, state in slice_.split_per_param(self.inner.state.pop(slice_.parameter, {})):
                split.append(param_slice)
                if state:
                    self.inner.state[param_slice.parameter] = state
        self._set_slices(index, split)

    def _set_slices(self, index: int, slices: list[OptimizerSlice]) -> None:
        self.slices[index] = slices
        self.all_slices = [slice_ for group in self.slices for slice_ in group]
        self.inner.param_groups[index]["params"] = [slice_.parameter for slice_ in slices]
        self._step.slice_guard.guard([slice_.parameter for slice_ in slices])
        for slice_ in slices:
            slice_.param_group = self.inner.param_groups[index]
        if self._cpu_updates is not None:
            self._cpu_updates.set_slices(self.all_slices)

    def state_tensors(self, tier: str | None = None) -> list[torch.Tensor]:
        """Return this rank's optimizer states, in all tiers or in one, without the master weights."""
        tensors = [
            value
            for slice_ in self.all_slices
            if tier is None or tier == ("device" if slice_.tier_segment is None else slice_.tier_segment.tier)
            for value in list(self.inner.state.get(slice_.parameter, {}).values())  # a pending update may add to it
            if isinstance(value, torch.Tensor)
        ]
        if tier in (None, "device"):
            for frozen in self.frozen_states.values():
                tensors += frozen.elementwise.values()
        return tensors + (self.whole.states.tensors(self.whole.owned(), tier) if self.whole.params else [])

    # -- gradients --------------------------------------------------------------------------------------------------

    def grouped_params(self) -> list[tuple[FlatGrad, int]]:
        """Return the trainable parameters in groups: (gradient of the flat, index in the flat)."""
        grouped_names = self.member.names
        return [
            (flat_grad, index)
            for flat, flat_grad in self._engine.gradients.flat_grads.items()
            for index, name in enumerate(flat.names)
            if name in grouped_names
        ]

    def grad_shards(self) -> list[torch.Tensor]:
        """Return this rank's reduced gradients of the parameters in groups."""
        if not self.own.has_ungrouped:
            return self._engine.gradients.scaling.shards()
        return [shard for flat_grad, index in self.grouped_params() for _, shard in flat_grad.param_shards(index)]

    def has_grads(self) -> bool:
        """Return whether this rank has a gradient of a parameter in a group."""
        return any(flat_grad.is_param_used[index] for flat_grad, index in self.grouped_params())

    def clear_grads(self, set_to_none: bool) -> None:
        """Clear the gradients of the parameters in groups, or set them to zero."""
        gradients = self._engine.gradients
        if not self.own.has_ungrouped:
            gradients.clear(set_to_none)
            return
        self.member.discards_grads |= self.member.backwards > 0
        self._engine.state_guard.apply_clip()  # of all gradients
        own = [gradients.flat_grads[flat] for flat, has_all in self.own.flats.items() if has_all]
        gradients.clear_flats(own, set_to_none)
        for flat_grad, index in self.grouped_params():
            if not self.own.flats[flat_grad.flat]:  # the flat also has parameters in no group, or of another optimizer
                gradients.prepare_write(flat_grad)
                flat_grad.clear_param(index) if set_to_none else flat_grad.zero_param(index)
        gradients.reduce_queue.record_optimizer_clear(self.member.number, self.member.shared.count)
        if set_to_none:
            gradients.clear_if_empty()

    def check_frozen_grads(self) -> None:
        """Raise if a parameter in a group that was frozen at shard() has a gradient: torch would update it.

        It has no shard.
        """
        given = self._engine.state_guard.frozen_params_with_grads()
        given = [name for name in given if name in self.member.names] if given else given
        if given:
            raise RuntimeError(
                f"{given[0]!r} was frozen when shard() was called and has a gradient now: clear it (parameter.grad = "
                "None), or call zeroshard.unwrap(), set requires_grad, and shard again"
            )

    def sync_unused_params(self) -> None:
        """Find the parameters that have no gradient on any rank; split slices that mix used and unused parameters.

        All ranks join the all-reduce, but only a rank that misses a gradient reads the result: for the others every
        parameter is used. So if all parameters are used, there is no host sync.
        """
        comm, gradients = self._engine.comm, self._engine.gradients
        flat_grads = [gradients.flat_grads[flat] for flat in self.own.flats]
        flags = [flag for flat_grad in flat_grads for flag in flat_grad.is_param_used]
        if comm.data_axes and comm.consistency.is_distributed:
            if self._used_flags_cache is None or self._used_flags_cache[0] != flags:
                self._used_flags_cache = (flags, torch.tensor(flags, dtype=torch.uint8, device=comm.device))
            replicated = self._engine.state_guard.replicated_units
            edits = take_edits([unit.replicated_edits for unit in replicated]) if replicated else None
            digest = self._step_checker.local_digest(self.inner.param_groups, gradients.reduce_queue.history, edits)
            merged = torch.cat([self._used_flags_cache[1], digest])
            what = "agree on unused parameters"
            self._engine.order.check(what)
            comm.all_reduce_over_mesh(merged, what, dist.ReduceOp.MAX)
            self._step_checker.compare(merged[len(flags) :], comm.consistency.rank)
            if not all(flags):
                flags = [bool(flag) for flag in comm.read_to_host(merged[: len(flags)], what)]
                gradients.set_used_params(flags, flat_grads)
        self._is_every_param_used = all(flags)
        if self._is_every_param_used:
            return
        for index, slices in enumerate(self.slices):  # per group: so every stage splits and rounds the same way
            if len({used for slice_ in slices for used in self._used_flags_of(slice_)}) > 1:
                if self._cpu_updates is not None:
                    self._cpu_updates.wait()  # the previous step's update may still write to the slice
                self.split(index)

    def _used_flags_of(self, slice_: OptimizerSlice) -> set[bool]:
        flat_grads = self._engine.gradients.flat_grads
        return {flat_grads[flat].is_param_used[index] for flat, index, _, _ in slice_.param_ranges()}

    def slices_with_grad(self) -> list[OptimizerSlice]:
        """Return the slices to update, after :meth:`sync_unused_params`."""
        flat_grads = self._engine.gradients.flat_grads
        found, reduced = self.all_slices, {flat for flat in self.own.flats if flat_grads[flat].has_shard}
        if len(reduced) < len(self.own.flats):
            found = [slice_ for slice_ in found if any(part.flat in reduced for part in slice_.flat_ranges)]
        return found if self._is_every_param_used else [s for s in found if True in self._used_flags_of(s)]

    def params_with_grad(self) -> list[nn.Parameter]:
        """Return the parameters in groups that have a gradient, after :meth:`sync_unused_params`."""
        if self._is_every_param_used:
            return self.own.params
        used = {
            id(parameter)
            for flat, flat_grad in self._engine.gradients.flat_grads.items()
            for parameter, is_used in zip(flat.parameters, flat_grad.is_param_used, strict=True)
            if is_used
        }
        return [parameter for parameter in self.own.params if id(parameter) in used]


def check_unchanged(own: ParamGroups, groups: Any, states: Any) -> None:
    """Raise if the user's code has replaced groups or states, or changed a list of them: it would have no effect.

    ``groups`` and ``states`` are those of the sharded optimizer.
    """
    if groups is not own.views or not isinstance(states, StateView):
        raise RuntimeError(REPLACED_ERROR)
    if states.inner is not own.inner.state or len(own.inner.param_groups) != len(own.names):
        raise RuntimeError(CHANGED_INNER_ERROR)
    if own.whole.overrides.has_manager:
        own.whole.overrides.check_unchanged()
    if len(own.names) != len(own.views) or {*map(type, own.views)} != {ParamGroupView}:
        raise RuntimeError(
            f"optimizer.param_groups had {len(own.names)} groups, and some were added, removed or replaced in the "
            "list, which has no effect: change groups in place (optimizer.param_groups[0]['lr'] = …); to train "
            "more, call optimizer.add_param_group(); to train fewer, call zeroshard.unwrap() and shard again"
        )
    for names, view, group in zip(own.names, own.views, own.inner.param_groups, strict=True):
        if view.inner is not group:
            raise RuntimeError(CHANGED_INNER_ERROR)
        if len(names) != len(view.parameters):
            raise RuntimeError(
                f"a parameter group had {len(names)} parameters at shard() and has {len(view.parameters)} now, "
                "which has no effect: to train more, call optimizer.add_param_group(); to train fewer, call "
                "zeroshard.unwrap() and shard again"
            )
