"""WholeParams: parameters whose update rule reads all of them, each updated by the rank that owns its states.

[Note: whole parameters]
Muon orthogonalizes matrices, Adafactor averages over rows and columns, LAMB takes the norm of a tensor: such rules
cannot run on flat slices ([Note: optimizer slices]). Their parameters are stored like all others: values, master
weights and gradients stay sharded, in every stage and tier. Only the optimizer states are different: one rank of the
shard axis, the *owner*, has all of them, in the shapes that the optimizer gave them. A step:

    every rank    its shards of gradient and value   --all-to-all-->   whole tensors on the owner
    owner         the user's optimizer steps nn.Parameters of the true shapes
    every rank    its shards of the new value        <--all-to-all--   whole tensors on the owner

For Ψ elements on N ranks, a rank sends and receives about 3Ψ/N elements, next to nothing compared with an all-gather.
Gradients are sent in the dtype in which they were reduced. Owners are assigned group by group, the largest parameter
first, each to the rank with the fewest elements so far. Replicas (the outer axis of a 2-D mesh) each have an owner, as
they each have a copy of every other state. If the shard axis has one rank (stage 0, or one rank in all), it owns
everything, nothing is sent, and the optimizer steps views of the stored values.

A parameter that is divided over a tensor axis is put together: its owners, one on each tensor rank, exchange their TP
shards in one all-gather more, compute the same update, and keep their shard of the new value. So their states are
replicated over the tensor axis.

The exchange moves values as they are, so the owner's optimizer sees what the plain run's would see: parameters of the
true shape, with a gradient or None. torch's own optimizers skip those without a gradient, so these are not sent. Any
other rule or hook may change them too, so their values are sent. All stages compute with the same bits, except where an
update depends on which parameters are stepped together: stage 0 steps more of Muon's matrices at once ([Note: Muon in
batches]).

Memory: an exchange has at most ``bucket_size`` elements from or to a rank, or one parameter of each owner if that is
larger. So there are two collectives a step if 2Ψ/N is at most ``bucket_size``, and no buffer grows with Ψ. For torch's
own optimizers each exchange is a batch. While one batch is stepped, the gradients and values of the next one and the
new values of the one before are in flight: at most 4 · ``bucket_size`` elements in all. Any other optimizer must be
stepped by one call ([Note: stepping in batches]), so the owner has the values and gradients of all its parameters at
once: 2Ψ/N elements, in addition to the buffers of one exchange.

Tiers: if the optimizer states of most elements of a parameter's flat are placed in host memory or on disk, the states
of the parameter rest there between steps. They are copied to the device for the update and back, batch by batch. Master
weights and gradients are read from and written to their own tiers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.comm import CollectiveWork
from zeroshard.engine import Engine, FlatParam, GradScale
from zeroshard.memory import TierAllocator
from zeroshard.optim.param_overrides import ParamOverrides
from zeroshard.optim.slices import is_adjacent
from zeroshard.sharding import Range, round_up
from zeroshard.tensor_parallel import TPShard

EXCHANGE_LABEL = "exchange whole parameters"
TENSOR_AXIS_LABEL = "gather TP shards of whole parameters"
ALIGN_BYTES = 16  # of each run in the buffer of an exchange


def assign_owners(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Return the owner of each item, the most expensive first, and add the costs to the ranks' ``loads``.

    >>> loads = [0, 0]
    >>> assign_owners([3, 5, 4, 2], loads), loads
    ([1, 0, 1, 0], [7, 7])
    """
    queue = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(queue)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = heapq.heappop(queue)
        owners[index], loads[rank] = rank, load + costs[index]
        heapq.heappush(queue, (loads[rank], rank))
    return owners


def split_batches(owners: Sequence[int], numels: Sequence[int], max_numel: int) -> list[list[int]]:
    """Return batches of indices in which no owner has more than ``max_numel`` elements, or one item if it is larger.

    Each owner's items keep their order, so the owners' first items are in the first batch.

    >>> split_batches([0, 0, 1, 0, 1], [5, 4, 3, 9, 3], max_numel=9)
    [[0, 1, 2, 4], [3]]
    """
    batches: list[list[int]] = []
    positions: dict[int, tuple[int, int]] = {}  # by owner: its last batch, and its elements in it
    for index, (owner, numel) in enumerate(zip(owners, numels, strict=True)):
        batch, used = positions.get(owner, (0, 0))
        if used and used + numel > max_numel:
            batch, used = batch + 1, 0
        if batch == len(batches):
            batches.append([])
        batches[batch].append(index)
        positions[owner] = batch, used + numel
    return batches


@dataclass(eq=False)
class WholeParam:
    """One whole parameter. Between steps ``parameter`` has its shape and no values."""

    flat: FlatParam
    index: int  # in the flat
    owner: int  # rank on the shard axis
    parameter: nn.Parameter = field(init=False)  # what the inner optimizer sees, on the owner

    def __post_init__(self) -> None:
        placeholder = self.flat.placeholder(torch.Size()).to(self.dtype)
        self._placeholder = placeholder.expand(self.flat.full_shapes[self.index])  # takes no memory
        self.parameter = nn.Parameter(self._placeholder)

    @property
    def name(self) -> str:
        return self.flat.names[self.index]

    @property
    def numel(self) -> int:
        """The number of elements, of this rank's TP shard if it has one."""
        return self.flat.layout.numels[self.index]

    @property
    def tp_shard(self) -> TPShard | None:
        """How it is divided over the tensor axis; None: not at all."""
        return self.flat.tp_shards[self.index]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is updated."""
        return self.flat.dtype if self.flat.master is None else self.flat.master.dtype

    @cached_property
    def tier(self) -> str:
        """Where its states rest between steps: the tier of most of the flat's optimizer states."""
        return self.flat.spec.tier_placement.main_optimizer_tier

    @cached_property
    def ranges_by_rank(self) -> list[list[Range]]:
        """The elements that each rank of the shard axis has, in the order of its shard."""
        layout = self.flat.layout
        return [
            [owned.elements for owned in layout.owned_ranges(rank) if owned.param_index == self.index]
            for rank in range(layout.shard_count)
        ]

    @cached_property
    def numel_by_rank(self) -> list[int]:
        """The number of elements that each rank of the shard axis has."""
        return [sum(elements.numel for elements in ranges) for ranges in self.ranges_by_rank]

    def is_in_order(self, dtype: torch.dtype) -> bool:
        """Return whether the runs of all ranks, one after the other and in this dtype, are the flattened parameter."""
        ranges = [elements for by_rank in self.ranges_by_rank for elements in by_rank]
        starts = accumulate((elements.numel for elements in ranges), initial=0)
        is_adjacent = all(elements.start == start for elements, start in zip(ranges, starts, strict=False))
        return is_adjacent and all(run_bytes(n, dtype) == n * dtype.itemsize for n in self.numel_by_rank)

    def views_of(self, flattened: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return the ranges of the flattened parameter that a rank of the shard axis has."""
        return [flattened[elements.slice] for elements in self.ranges_by_rank[rank]]

    def shape_as_param(self, flattened: torch.Tensor) -> torch.Tensor:
        """View its elements, or those of its TP shard, in their shape and strides."""
        return flattened.as_strided(self.flat.shapes[self.index], self.flat.strides[self.index])

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor of its shape, or those of its TP shard, in the order of the flat."""
        return self.flat.flatten(tensor if self.tp_shard is None else self.tp_shard.slice(tensor), self.index)

    def empty(self) -> torch.Tensor:
        """Return a new tensor with the shape and strides that the parameter has in a step."""
        shape, stride = self.flat.shapes[self.index], self.flat.strides[self.index]
        if self.tp_shard is not None:
            return torch.empty(self.tp_shard.full_shape, dtype=self.dtype, device=self.flat.device)
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.flat.device)

    def copy_attributes(self, source: nn.Parameter | None) -> None:
        """Take over the attributes that the user has set on a parameter: the update rule may read them."""
        if source is not None:
            found = {key: value for key, value in vars(source).items() if not key.startswith("_zeroshard")}
            self.parameter.__dict__.update(found)

    def drop_values(self) -> None:
        """Leave the parameter its shape only."""
        self.parameter.grad = None
        self.parameter.data = self._placeholder


def make_whole_params(
    engine: Engine, names: Sequence[str], loads: list[int], cost: Callable[[torch.Size], int]
) -> list[WholeParam]:
    """Assign owners to the named parameters, without frozen ones, by the cost of their shapes."""
    places = {name: (flat, i) for flat in engine.gradients.flat_grads for i, name in enumerate(flat.names)}
    found = [places[name] for name in names if name in places]
    owners = assign_owners([cost(flat.full_shapes[index]) for flat, index in found], loads)
    return [WholeParam(flat, index, owner) for (flat, index), owner in zip(found, owners, strict=True)]


def has_grad(engine: Engine, param: WholeParam) -> bool:
    """Return whether a parameter has a gradient on some rank: the same on all ranks."""
    flat_grad = engine.gradients.flat_grads[param.flat]
    return flat_grad.has_shard and flat_grad.is_param_used[param.index]


@dataclass(slots=True)
class Run:
    """This rank's parts of one tensor, adjacent in the buffer of an exchange."""

    dtype: torch.dtype  # in the buffer
    parts: list[torch.Tensor]
    numels: list[int] = field(init=False)
    nbytes: int = field(init=False)  # in the buffer, with padding

    def __post_init__(self) -> None:
        self.numels = [part.numel() for part in self.parts]
        self.nbytes = run_bytes(sum(self.numels), self.dtype)


Key = tuple[WholeParam, bool]  # a parameter, and whether its gradient is meant, not its values
Shards = dict[Key, Run]  # this rank's shards
Wholes = dict[Key, torch.Tensor]


class WholeParams:
    """The whole parameters of one optimizer, and the exchange with their owners: see [Note: whole parameters]."""

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, loads: list[int]) -> None:
        """``loads``: elements by owner, of all optimizers of the model."""
        self._engine = engine
        self._axis = engine.comm.shard_axis
        self._loads = loads
        self._held_bytes = 0  # of values and gradients that are gathered now
        self._gathering: tuple[dict[Key, torch.dtype], Exchange] | None = None  # owned tensors, in flight
        self._scattering: tuple[list[list[Run]], Exchange] | None = None  # this rank's shards, in flight
        self._value_runs: dict[WholeParam, Run] = {}  # this rank's shards of what is gathered now
        self.params: list[WholeParam] = []  # in the order of the groups, the same on all ranks
        self.names: set[str] = set()  # of all parameters in their groups, frozen ones included
        self.overrides = ParamOverrides(inner)
        self.states = WholeStates(inner.state, engine.comm.device, engine.context.tiers)

    def add(self, names: Sequence[str], params: list[WholeParam] | None = None) -> list[WholeParam]:
        """Assign owners to the named parameters, unless they have some; return those that this rank owns."""
        added = make_whole_params(self._engine, names, self._loads, torch.Size.numel) if params is None else params
        self.params += added
        self.names.update(names)
        return self.owned(added)

    def owned(self, params: Iterable[WholeParam] | None = None) -> list[WholeParam]:
        """Return those that this rank owns, of all or of ``params``."""
        return [param for param in (self.params if params is None else params) if param.owner == self._axis.rank]

    def with_grads(self) -> list[WholeParam]:
        """Return the parameters that have a gradient on some rank: the same on all ranks."""
        return [param for param in self.params if has_grad(self._engine, param)]

    def split_batches(self, params: Sequence[WholeParam]) -> list[list[WholeParam]]:
        """Split parameters into batches of one exchange each, the same on all ranks."""
        max_numel = self._engine.context.config.bucket_size // 2  # a value and a gradient for each element
        numels = [param.parameter.numel() for param in params]
        batches = split_batches([param.owner for param in params], numels, max_numel)
        return [[params[index] for index in batch] for batch in batches]

    def copy_offloaded_masters(self) -> None:
        """Copy master weights that a step has updated in their tier to the compute parameters."""
        flats = dict.fromkeys(p.flat for p in self.params if p.flat.spec.tier_placement.has_offloaded_optimizer)
        self._engine.state_guard.copy_masters(flats)

    # -- a step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(
        self, params: Sequence[WholeParam], grad_scale: GradScale | None, following: Sequence[WholeParam] = ()
    ) -> Iterator[None]:
        """Give the parameters that this rank owns their values and gradients; write the new values to the shards.

        The gradients are unscaled and clipped. None: without gradients. ``following``: what the next call gathers; its
        exchange starts now, and that of the new values ends in the next call. All ranks call it together.
        """
        owned, has_grads = self.owned(params), grad_scale is not None
        try:
            batches = self.split_batches(params)
            for batch in batches:
                self._gather(batch, has_grads)
            if following and self._axis.size > 1:
                self._start_gather(following, has_grads)
            if grad_scale is not None and grad_scale.factors:
                self._scale_gradients(params, grad_scale)
            for param in owned:
                param.copy_attributes(param.flat.parameters[param.index])
            self._engine.context.tracker.record_transient("step", self.states.load(owned))
            yield
            self.states.store(owned)
            for batch in batches:
                self._finish_scatter()
                self._start_scatter(batch)
            if not following:
                self._finish_scatter()
        except BaseException:
            self._finish_scatter()
            self._finish_gather()
            self._value_runs.clear()
            raise
        finally:
            for param in owned:
                param.drop_values()
            self._free(self._held_bytes)

    def _scale_gradients(self, params: Sequence[WholeParam], grad_scale: GradScale) -> None:
        """Unscale and clip the gradients of the owned parameters: copies, or the stored gradients themselves."""
        scaling = self._engine.gradients.scaling
        for factor in grad_scale.factors:
            scaling.multiply([p.parameter.grad for p in self.owned(params) if p.parameter.grad is not None], factor)
        stored: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        for (param, is_grad), run in self._shards(params, has_grads=True).items():
            gradient = param.parameter.grad
            if is_grad and run.parts:
                is_stored = gradient is not None and gradient.data_ptr() == run.parts[0].data_ptr()
                (stored if is_stored else copied).extend(run.parts)
        if stored:
            scaling.clear_norms()
            if grad_scale.inv_scale is not None:  # later readers expect scaled values, as in all others
                scaling.defer(stored, 1 / grad_scale.inv_scale)
        if grad_scale.clip_coef is not None:
            scaling.defer(copied, grad_scale.clip_coef)

    def _gather(self, params: Sequence[WholeParam], has_grads: bool) -> None:
        """Give the owned parameters their values and gradients."""
        if self._axis.size == 1:
            wholes = self._join(self._find_shards(params, has_grads))
        else:
            if self._gathering is None:
                self._start_gather(params, has_grads)
            wholes = self._finish_gather()
        divided = {key: whole for key, whole in wholes.items() if key[0].tp_shard is not None}
        tensors = {key: key[0].shape_as_param(whole) for key, whole in wholes.items() if key not in divided}
        if any(param.tp_shard is not None for param in params):
            self._engine.order.check(TENSOR_AXIS_LABEL)  # also on ranks that own none of these
        for (param, is_grad), tensor in (tensors | (self._gather_tp_shards(divided) if divided else {})).items():
            if is_grad:
                param.parameter.grad = tensor
            else:
                param.parameter.data = tensor

    def _join(self, shards: Shards) -> Wholes:
        """Return the flattened tensors of a single rank: views of the shards if possible, else copies."""
        self._engine.gradients.wait_offloaded()
        device, wholes = self._engine.comm.device, {}
        for (param, is_grad), run in shards.items():
            parts = run.parts
            is_view = bool(parts) and run.dtype == param.dtype and parts[0].device == device and _are_adjacent(parts)
            if is_view and param.tp_shard is None:
                wholes[param, is_grad] = parts[0].as_strided((param.numel,), (1,))
                continue
            wholes[param, is_grad] = joined = self._allocate((param.numel,), param.dtype)
            _copy(list(torch.split(joined, run.numels)), parts)
        return wholes

    def _start_gather(self, params: Sequence[WholeParam], has_grads: bool) -> None:
        """Start to send this rank's shards to the owners."""
        shards = self._find_shards(params, has_grads)
        owned = {key: run.dtype for key, run in shards.items() if key[0].owner == self._axis.rank}
        received_bytes = [
            sum(run_bytes(param.numel_by_rank[rank], dtype) for (param, _), dtype in owned.items())
            for rank in self._axis.ranks_by_group
        ]
        sent = self._by_owner((param, run) for (param, _), run in shards.items())
        self._gathering = owned, Exchange(self._engine, sent, received_bytes).pack().start()

    def _finish_gather(self) -> Wholes:
        """Return the flattened tensors of the parameters that this rank owns, from the shards of all ranks."""
        if self._gathering is None:
            return {}
        (owned, exchange), self._gathering = self._gathering, None
        exchange.wait()
        wholes = {key: self._allocate((key[0].numel,), key[0].dtype) for key in owned}
        exchange.unpack(
            Run(dtype, key[0].views_of(wholes[key], rank))
            for rank in self._axis.ranks_by_group
            for key, dtype in owned.items()
        )
        return wholes

    def _gather_tp_shards(self, wholes: Wholes) -> Wholes:
        """Return the tensors of parameters that are divided over the tensor axis, from the TP shards of its ranks."""
        tensors = gather_tp_shards(self._engine, [(param, whole) for (param, _), whole in wholes.items()])
        self._free(sum(whole.nbytes for whole in wholes.values()) - sum(tensor.nbytes for tensor in tensors))
        return dict(zip(wholes, tensors, strict=True))

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for values or a gradient, tracked until the step of its batch is done."""
        tensor = torch.empty(torch.Size(shape), dtype=dtype, device=self._engine.comm.device)
        self._held_bytes += tensor.nbytes
        self._engine.context.tracker.add("step", tensor.nbytes)
        return tensor

    def _free(self, nbytes: int) -> None:
        self._held_bytes -= nbytes
        self._engine.context.tracker.add("step", -nbytes)

    def _start_scatter(self, params: Sequence[WholeParam]) -> None:
        """Start to send the new values of the owned parameters to the shards on all ranks."""
        runs = {param: self._value_runs.pop(param) for param in params}
        values = [(param, param.flatten(param.parameter.data)) for param in self.owned(params)]
        if self._axis.size == 1:
            for (_, value), run in zip(values, runs.values(), strict=True):
                if run.parts and run.parts[0].data_ptr() != value.data_ptr():  # else it was updated in place
                    _copy(run.parts, list(torch.split(value, run.numels)))
            return
        sent = [
            [Run(param.dtype, param.views_of(value, rank)) for param, value in values]
            for rank in self._axis.ranks_by_group
        ]
        received = self._by_owner(runs.items())
        received_bytes = [sum(run.nbytes for run in from_owner) for from_owner in received]
        self._scattering = received, Exchange(self._engine, sent, received_bytes).pack().start()

    def _finish_scatter(self) -> None:
        """Write the new values that this rank has received to its shards."""
        if self._scattering is not None:
            (received, exchange), self._scattering = self._scattering, None
            exchange.wait()
            exchange.unpack(run for runs in received for run in runs)

    def _find_shards(self, params: Sequence[WholeParam], has_grads: bool) -> Shards:
        """Return this rank's shards of the parameters, and keep those of the values for the way back."""
        shards = self._shards(params, has_grads)
        self._value_runs.update((param, run) for (param, is_grad), run in shards.items() if not is_grad)
        return shards

    def _shards(self, params: Sequence[WholeParam], has_grads: bool) -> Shards:
        """Return this rank's shards of the parameters, from the master weights if there are any, in their tiers."""
        values: dict[tuple[FlatParam, int], list[torch.Tensor]] = {(param.flat, param.index): [] for param in params}
        for flat in dict.fromkeys(param.flat for param in params):
            for index, _, part in flat.owned_slices():
                if (flat, index) in values:
                    values[flat, index].append(part)
        shards: Shards = {}
        for param in params:
            shards[param, False] = Run(param.dtype, values[param.flat, param.index])
            if has_grads and has_grad(self._engine, param):
                flat_grad = self._engine.gradients.flat_grads[param.flat]
                shards[param, True] = Run(flat_grad.dtype, [part for _, part in flat_grad.param_shards(param.index)])
        return shards

    def _by_owner(self, runs: Iterable[tuple[WholeParam, Run]]) -> list[list[Run]]:
        """Return the runs of each owner, in the order of an exchange."""
        by_owner: list[list[Run]] = [[] for _ in range(self._axis.size)]
        for param, run in runs:
            by_owner[param.owner].append(run)
        return [by_owner[rank] for rank in self._axis.ranks_by_group]


class Exchange:
    """An all-to-all over the shard axis, in flight. Both buffers live until it is done."""

    def __init__(
        self,
        engine: Engine,
        sent: list[list[Run]],
        received_bytes: list[int],
        packed: torch.Tensor | None = None,
    ) -> None:
        """Allocate the buffers: for the runs that each rank gets, and for as many bytes from each.

        ``packed``: the runs, one after the other.
        """
        self._engine, self._tracker = engine, engine.context.tracker
        self._runs = [run for runs in sent for run in runs]
        self._sizes = received_bytes, [sum(run.nbytes for run in runs) for runs in sent]
        self._received, empty = (
            torch.empty(sum(sizes) if sizes else 0, dtype=torch.uint8, device=engine.comm.device)
            for sizes in (received_bytes, self._sizes[1] if packed is None else [])
        )
        self._packed = empty if packed is None else packed.view(torch.uint8)
        self._tracker.add("step", self._packed.nbytes + self._received.nbytes)
        self._work: CollectiveWork | None = None

    def buffers(self) -> list[object]:
        """Return both buffers, to keep them alive."""
        return [self._packed, self._received]

    def sent_views(self) -> list[torch.Tensor]:
        """Return a view of the buffer for each part that is sent, in the order of the runs."""
        return views_of_runs(self._packed, self._runs)

    def pack(self) -> Exchange:
        """Copy the parts into the buffer."""
        self._engine.gradients.wait_offloaded()
        _copy(self.sent_views(), [part for run in self._runs for part in run.parts])
        return self

    def start(self) -> Exchange:
        """Start to send what is in the buffer."""
        comm = self._engine.comm
        self._engine.order.check(EXCHANGE_LABEL)
        self._work = comm.all_to_all(self._received, self._packed, *self._sizes, EXCHANGE_LABEL)
        return self

    def wait(self) -> None:
        """Wait until all is received, and free what was sent."""
        if self._work is not None:
            self._work.wait()
        self._tracker.add("step", -self._packed.nbytes)
        self._packed = torch.empty(0, device="cpu")

    def received_views(self, runs: list[Run]) -> list[torch.Tensor]:
        """Return a view of what was received for each part of the runs, in the order of the ranks."""
        return views_of_runs(self._received, runs)

    def take_received(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all that was received; the caller tracks its memory from now on."""
        return self._received.view(dtype)

    def unpack(self, runs: Iterable[Run]) -> None:
        """Copy what was received, in the order of the ranks, to the parts of the runs, and free it."""
        listed = list(runs)
        _copy([part for run in listed for part in run.parts], self.received_views(listed))
        self.free()

    def free(self) -> None:
        """Free what was received."""
        self._tracker.add("step", -self._received.nbytes)
        self._received = torch.empty(0, device="cpu")


def gather_tp_shards(engine: Engine, wholes: list[tuple[WholeParam, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of parameters that are divided over the tensor axis, from their flattened TP shards.

    All ranks of this axis call it together.
    """
    comm, ranks = engine.comm, range(engine.comm.tensor_axis.size)
    divided = [(tp_shard, whole.dtype) for param, whole in wholes if (tp_shard := param.tp_shard) is not None]
    sizes = [sum(run_bytes(shard.shape_on_rank(rank).numel(), dtype) for shard, dtype in divided) for rank in ranks]
    packed = torch.empty(max(sizes), dtype=torch.uint8, device=comm.device)
    received = torch.empty(len(ranks) * max(sizes), dtype=torch.uint8, device=comm.device)
    _copy(views_of_runs(packed, [Run(whole.dtype, [whole]) for _, whole in wholes]), [whole for _, whole in wholes])
    engine.context.tracker.record_transient("step", packed.nbytes + received.nbytes)
    comm.all_gather_tp_shards(received, packed, TENSOR_AXIS_LABEL).wait()
    tensors = [torch.empty(tp_shard.full_shape, dtype=dtype, device=comm.device) for tp_shard, dtype in divided]
    for rank, part in zip(ranks, received.view(len(ranks), -1), strict=True):
        offset = 0
        for (tp_shard, dtype), tensor in zip(divided, tensors, strict=True):
            shape = tp_shard.shape_on_rank(rank)
            values = part[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            tp_shard.write(values, rank, tensor)
            offset += run_bytes(shape.numel(), dtype)
    return tensors


def run_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a run in the buffer of an exchange.

    >>> run_bytes(5, torch.bfloat16)
    16
    """
    return round_up(numel * dtype.itemsize, ALIGN_BYTES)


def views_of_runs(buffer: torch.Tensor, runs: list[Run]) -> list[torch.Tensor]:
    """Return a view of the buffer for each part of each run, by one split for each dtype."""
    views_by_dtype = {}
    buffer = buffer[: sum(run.nbytes for run in runs)]
    for dtype in {run.dtype for run in runs}:
        sizes: list[int] = []
        for run in runs:
            numels = run.numels if run.dtype == dtype else []
            sizes += [*numels, run.nbytes // dtype.itemsize - sum(numels)]
        views_by_dtype[dtype] = iter(torch.split(buffer.view(dtype), sizes))
    found: list[torch.Tensor] = []
    for run in runs:
        found += islice(views_by_dtype[run.dtype], len(run.parts))
        for views in views_by_dtype.values():  # the padding; of the other dtypes the whole run
            next(views)
    return found


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy sources to targets, those of one dtype and device by one kernel."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.dtype, target.device, source.dtype, source.device), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


def _are_adjacent(parts: list[torch.Tensor]) -> bool:
    return all(is_adjacent(left, right) for left, right in pairwise(parts))


class WholeStates:
    """The optimizer states of whole parameters, and the tiers in which they rest between steps.

    Any tensor with more than one element rests in its parameter's tier, in any container that torch's pytrees know. A
    tensor subclass, such as a quantized state, rests in host memory instead of on disk.
    """

    def __init__(self, states: Any, device: torch.device, tiers: TierAllocator) -> None:
        self._states, self._device, self._tiers = states, device, tiers
        self._resting: dict[WholeParam, set[int]] = {}  # which leaves of a parameter's states rest in a tier
        self._buffers: dict[WholeParam, list[torch.Tensor]] = {}  # memory in the tier, which leaves reuse

    def tensors(self, params: list[WholeParam], tier: str | None) -> list[torch.Tensor]:
        """Return the state tensors of parameters that this rank owns, in all tiers or in one."""
        found: list[torch.Tensor] = []
        for param in params:
            for index, leaf in enumerate(tree_flatten(dict(self._states.get(param.parameter, {})))[0]):
                if torch.is_tensor(leaf) and tier in (None, self._tier_of(param, index, leaf)):
                    found += _plain_tensors(leaf)
        return found

    def _tier_of(self, param: WholeParam, index: int, leaf: torch.Tensor) -> str:
        if index not in self._resting.get(param, ()):
            return "device" if self._is_on_device(leaf) else param.tier
        return param.tier if _is_plain(leaf) else "host"

    def load(self, params: list[WholeParam]) -> int:
        """Copy states that rest in a tier to the device; return their bytes."""
        nbytes = 0
        for param in params:
            resting, state = self._resting.pop(param, None), self._states.get(param.parameter)
            if not resting or not state:  # the user may have cleared them
                continue
            leaves, spec = tree_flatten(dict(state))
            for index in resting:
                nbytes += leaves[index].nbytes
                leaves[index] = leaves[index].to(self._device, copy=True, non_blocking=True)
            state.update(tree_unflatten(leaves, spec))
        return nbytes

    def store(self, params: list[WholeParam]) -> None:
        """Copy states from the device to the tiers in which they rest."""
        for param in params:
            state = self._states.get(param.parameter)
            if param.tier == "device" or not state:
                continue
            leaves, spec = tree_flatten(dict(state))
            resting = {index for index, leaf in enumerate(leaves) if self._is_on_device(leaf)}
            unused = list(self._buffers.setdefault(param, []))
            for index in resting:
                leaves[index] = self._copy_to_tier(param, leaves[index], unused)
            state.update(tree_unflatten(leaves, spec))
            self._resting[param] = resting

    def forget(self) -> None:
        """Forget which states rest in a tier, because all states are replaced."""
        self._resting.clear()

    def _is_on_device(self, leaf: Any) -> bool:
        """Return whether a leaf is a tensor on the device, except for step counts and other numbers."""
        return torch.is_tensor(leaf) and leaf.numel() > 1 and leaf.device == self._device

    def _copy_to_tier(self, param: WholeParam, leaf: torch.Tensor, unused: list[torch.Tensor]) -> torch.Tensor:
        """Copy a tensor to its tier, into an unused buffer if one has its size."""
        if not _is_plain(leaf):
            return leaf.to("cpu", copy=True)
        position = next((i for i, buffer in enumerate(unused) if buffer.nbytes == leaf.nbytes), None)
        if position is None:
            buffer = self._tiers.zeros(None, param.tier, leaf.nbytes, torch.uint8, pinned=True)
            self._buffers[param].append(buffer)
        else:
            buffer = unused.pop(position)
        stride = torch.empty_like(leaf, device="meta", memory_format=torch.preserve_format).stride()
        return buffer.view(leaf.dtype).as_strided(leaf.shape, stride).copy_(leaf.detach())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)


def _plain_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return a tensor, or the tensors inside a tensor subclass."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _plain_tensors(getattr(tensor, name))]
