"""MuonUpdater: torch's Muon with its momentum on the shards.

[Note: Muon on shards]
Most of Muon is elementwise: the momentum, Nesterov's update, the decay and the addition to the values. Only
Newton–Schulz reads whole matrices, and it begins by rounding the update to bf16. So the groups of torch's own Muon
have slices and states like those of Adam ([Note: optimizer slices]), and a matrix has an *owner*, one rank of the shard
axis, that only orthogonalizes it:

    every rank    momentum of its shards, update in bf16    --all-to-all-->   matrices on the owner
    owner         orthogonalizes them, those of one shape at once on a GPU ([Note: Muon in batches])
    every rank    its shards of the result, in bf16         <--all-to-all--   matrices on the owner
    every rank    decays its values, adds the result

All roundings are those of torch's step, so the bits are, too. For Ψ elements on N ranks, a rank sends and receives 2Ψ/N
elements of 2 bytes. All ranks have the same bytes of states. Owners have none, so they are chosen by work alone: the
most expensive matrix first, each to the rank with the fewest FLOPs so far.

An exchange has at most ``MAX_EXCHANGED_NUMEL`` or ``bucket_size`` elements of an owner, or one matrix if it is larger.
While the matrices of one exchange are orthogonalized, the updates of the next one and the results of the one before are
in flight. If there are two exchanges, not large, their matrices are orthogonalized at once, on two streams. An exchange
of one matrix needs no copy on its owner, if the parts of all ranks, one after the other, are the matrix.

A matrix that is divided over a tensor axis is put together by its owners, one on each tensor rank, which all
orthogonalize it and keep their shard of the result.

Whole parameters ([Note: whole parameters]) are used instead if states are offloaded, for any other class than torch's
own, for parameters of 16 bits without master weights (a CPU rounds such elements differently at the end of a range),
and from the first step on in which a hook or a replaced step() must see matrices.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from zeroshard.engine import Engine, FlatParam, GradScale
from zeroshard.memory import OwnedMatrix, SideStream
from zeroshard.optim.muon import MuonOptions, MuonWithAdamW, is_known_group
from zeroshard.optim.newton_schulz.orthogonalize import load_stack_kernels, newton_schulz_flops, orthogonalize_bf16
from zeroshard.optim.sharded_muon.kernels import MomentumPart, MuonKernels, TorchKernels, ValuePart
from zeroshard.optim.slices import OptimizerSlice, defer_clip
from zeroshard.optim.whole_params import (
    TENSOR_AXIS_LABEL,
    Exchange,
    Run,
    WholeParam,
    gather_tp_shards,
    has_grad,
    make_whole_params,
    run_bytes,
    split_batches,
)
from zeroshard.sharding import Range
from zeroshard.utils.kernel_loader import KernelLoader

MAX_EXCHANGED_NUMEL = 2**24  # elements of an owner in an exchange: their products take longer than to send as many
MOMENTUM_KEY = "momentum_buffer"
DTYPE = torch.bfloat16  # of all that is exchanged
MOMENTUM_DTYPES = {torch.float32, torch.float64}  # in which slices can be updated
MUON_CLASSES = (torch.optim.Muon, MuonWithAdamW)


def runs_on_shards(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtypes: set[torch.dtype] | None = None
) -> bool:
    """Return whether a group is updated on shards, unless states are offloaded: see [Note: Muon on shards].

    ``dtypes``: those in which its parameters are updated, if not fp32.

    >>> muon = torch.optim.Muon([torch.ones(2, 2)])
    >>> runs_on_shards(muon, muon.param_groups[0])
    True
    """
    dtypes = dtypes or {torch.float32}
    is_muon = type(optimizer) in MUON_CLASSES and group.get("rule", "muon") == "muon"
    return is_muon and dtypes <= MOMENTUM_DTYPES and is_known_group(group, dtypes)


def _build_kernels(device: torch.device) -> MuonKernels:
    from zeroshard.optim.sharded_muon.triton_kernels import TritonKernels  # imported here because it imports Triton

    return TritonKernels(device)


def _self_test(kernels: MuonKernels, device: torch.device) -> None:
    """Raise if kernels do not compile, or their results differ from torch's."""
    options = MuonOptions(0.1, 0.1, 0.95, True, ((1.0, 1.0, 1.0), 1, 0.0), None)
    gradient = torch.linspace(-1, 1, 100, device=device).bfloat16()
    found = []
    for each in (kernels, TorchKernels()):
        momentum, values = (torch.full((100,), start, dtype=torch.float32, device=device) for start in (0.25, 1.0))
        update = torch.zeros_like(gradient)
        each.update_momenta([MomentumPart(gradient, momentum, update)], options, GradScale())
        each.update_values([ValuePart(update, values)], options.decay, -0.3)
        found.append([momentum, update, values])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


KERNEL_LOADER = KernelLoader("Muon", _build_kernels, _self_test)


class Place(NamedTuple):
    """Where a range of a matrix is on this rank."""

    elements: Range  # in the matrix
    slice_: OptimizerSlice
    within: slice  # in the slice
    flat: FlatParam
    span: slice  # in the shard of the flat

    @property
    def values(self) -> torch.Tensor:
        """The values that are updated."""
        return self.slice_.parameter.data[self.within]


class Gathering(NamedTuple):
    """Updates on their way to the owners."""

    params: list[WholeParam]  # that this rank owns
    exchange: Exchange | None  # None: there is one rank
    updates: dict[WholeParam, torch.Tensor]  # of that rank, flattened


class Scattering(NamedTuple):
    """Results on their way to the shards."""

    params: list[WholeParam]  # in the order in which they arrive
    exchange: Exchange | None  # None: there is one rank
    results: dict[WholeParam, torch.Tensor]  # of that rank, flattened


class MuonUpdater:
    """Updates the slices of the groups of torch's Muon: see [Note: Muon on shards]."""

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, loads: list[int]) -> None:
        """``loads``: FLOPs by owner, of all optimizers of the model."""
        self._inner, self._states = inner, inner.state
        self._engine, self._loads = engine, loads
        self._kernels = KERNEL_LOADER.load(engine.comm.device) or TorchKernels()
        load_stack_kernels(engine.comm.device)  # compiles them now, not in the first step
        self._side_stream = SideStream(engine.comm.device)
        self._groups: dict[WholeParam, dict[str, Any]] = {}  # of the inner optimizer
        self._places: dict[WholeParam, list[Place]] = {}
        self._places_of: tuple[list[OptimizerSlice], list[WholeParam]] | None = None  # what they were found for

    @staticmethod
    def of(inner: torch.optim.Optimizer, engine: Engine, loads: list[int]) -> MuonUpdater | None:
        """Return None if the groups of an optimizer need whole parameters, or are not Muon's."""
        is_known = type(inner) in MUON_CLASSES and engine.context.config.offload is None
        return MuonUpdater(inner, engine, loads) if is_known else None

    @property
    def params(self) -> list[WholeParam]:
        """The matrices, in the order of the groups, the same on all ranks."""
        return list(self._groups)

    def accepts(self, group: Mapping[str, Any], parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether it can update a group that needs whole parameters."""
        has_master = self._engine.context.config.precision is not None
        return runs_on_shards(
            self._inner, group, {torch.float32 if has_master else parameter.dtype for parameter in parameters}
        )

    def add(self, names: Sequence[str], group: dict[str, Any]) -> None:
        """Assign owners to the matrices of a group, without frozen ones."""

        def flops(shape: torch.Size) -> int:
            return newton_schulz_flops(shape, group["ns_steps"])

        for param in make_whole_params(self._engine, names, self._loads, flops):
            self._groups[param] = group

    def owned_matrices(self) -> dict[str, OwnedMatrix]:
        """Return who orthogonalizes which matrix, by name."""
        found = {}
        for param, group in self._groups.items():
            shape = param.parameter.shape
            found[param.name] = OwnedMatrix(param.owner, shape.numel(), newton_schulz_flops(shape, group["ns_steps"]))
        return found

    def remove(self, group: dict[str, Any]) -> list[WholeParam]:
        """Forget the matrices of a group, and return them: from now on they are updated as whole parameters."""
        params = [param for param, other in self._groups.items() if other is group]
        for param in params:
            del self._groups[param]
        return params

    def can_step(self) -> bool:
        """Return whether the groups still have the rule that they had in :meth:`accepts`."""
        dtypes: dict[int, set[torch.dtype]] = {}
        for param, group in self._groups.items():
            dtypes.setdefault(id(group), set()).add(param.dtype)
        groups = {id(group): group for group in self._groups.values()}
        return all(runs_on_shards(self._inner, group, dtypes[key]) for key, group in groups.items())

    def split_batches(self, params: Sequence[WholeParam]) -> list[list[WholeParam]]:
        """Split matrices into batches of one exchange each, the same on all ranks."""
        max_numel = max_exchanged_numel(self._engine.context.config.bucket_size)
        numels = [param.parameter.numel() for param in params]
        batches = split_batches([param.owner for param in params], numels, max_numel)
        return [[params[index] for index in batch] for batch in batches]

    # -- a step -----------------------------------------------------------------------------------------------------

    def select(self, slices: list[OptimizerSlice]) -> list[OptimizerSlice]:
        """Return the slices of its groups."""
        groups = {id(group) for group in self._groups.values()}
        return [slice_ for slice_ in slices if id(slice_.param_group) in groups]

    def step(self, slices: list[OptimizerSlice], grad_scale: GradScale) -> bool:
        """Update the slices, which all have a gradient; return False if a gradient overflowed on any rank."""
        params = [param for param in self._groups if has_grad(self._engine, param)]
        if not params:
            return True
        if grad_scale.found_inf is not None and bool(grad_scale.found_inf):
            return False
        options = {id(group): MuonOptions.from_group(group) for group in self._groups.values()}
        by_param = {param: options[id(self._groups[param])] for param in params}
        self._allocate_momenta(slices)
        step = MuonStep(self._engine, self._kernels, self._side_stream, by_param, self._find_places(slices))
        step.run(self.split_batches(params), self._states, grad_scale)
        defer_clip(self._engine.gradients, slices, grad_scale)
        return True

    def _allocate_momenta(self, slices: list[OptimizerSlice]) -> None:
        """Allocate the momenta of new slices: [Note: separate pool for long-lived tensors]."""
        new = [slice_.parameter for slice_ in slices if MOMENTUM_KEY not in self._states[slice_.parameter]]
        self._engine.context.pool.reserve(parameter.nbytes for parameter in new)
        for parameter in new:
            with self._engine.context.pool:
                self._states[parameter][MOMENTUM_KEY] = torch.zeros_like(parameter.data)

    def _find_places(self, slices: list[OptimizerSlice]) -> dict[WholeParam, list[Place]]:
        """Return where the matrices are on this rank, each in the order of its elements."""
        if self._places_of == (slices, self.params):
            return self._places
        params = {(param.flat, param.index): param for param in self._groups}
        places: dict[WholeParam, list[Place]] = {param: [] for param in self._groups}
        for slice_ in slices:
            offset = 0
            for part in slice_.flat_ranges:
                for index, elements, span in part.param_ranges():
                    start = offset + span.start - part.span.start
                    place = Place(elements, slice_, slice(start, start + span.numel), part.flat, span.slice)
                    places[params[part.flat, index]].append(place)
                offset += part.span.numel
        for found in places.values():
            found.sort(key=lambda place: place.elements.start)
        self._places, self._places_of = places, (list(slices), self.params)
        return places


def _can_run_at_once(batches: list[list[WholeParam]]) -> bool:
    """Return whether two batches are all, and so small that the memory for both does not matter."""
    by_owner = Counter[int]()
    for batch in batches:
        for param in batch:
            by_owner[param.owner] += param.parameter.numel()
    is_divided = any(param.tp_shard is not None for batch in batches for param in batch)
    return len(batches) == 2 and max(by_owner.values()) <= 2 * MAX_EXCHANGED_NUMEL and not is_divided


def max_exchanged_numel(bucket_size: int) -> int:
    """Return the most elements of an owner in an exchange, unless one matrix has more."""
    return min(bucket_size, MAX_EXCHANGED_NUMEL)


class MuonStep:
    """One step of the matrices that have a gradient: see [Note: Muon on shards]."""

    def __init__(
        self,
        engine: Engine,
        kernels: MuonKernels,
        side_stream: SideStream,
        options: dict[WholeParam, MuonOptions],
        places: dict[WholeParam, list[Place]],
    ) -> None:
        self._engine, self._axis, self._kernels = engine, engine.comm.shard_axis, kernels
        self._options, self._places = options, places
        self._tracker, self._side_stream = engine.context.tracker, side_stream
        self._gathering: deque[Gathering] = deque()  # updates on their way to the owners
        self._scattering: deque[Scattering] = deque()  # results on their way to the shards

    def run(self, batches: list[list[WholeParam]], states: Any, grad_scale: GradScale) -> None:
        """Update the matrices of each batch. All ranks call it together."""
        start_gather = partial(self._start_gather, states=states, grad_scale=grad_scale)
        tracked_bytes = self._tracker.get("step").now
        try:
            start_gather(batches[0])
            if _can_run_at_once(batches):
                start_gather(batches[1])
                self._finish_two(*batches)
                return
            for batch, following in zip_longest(batches, batches[1:]):
                matrices = self._finish_gather()
                if following is not None:
                    start_gather(following)
                results = self._orthogonalize(batch, matrices)
                self._finish_scatter()
                self._start_scatter(batch, results)
            self._finish_scatter()
        except BaseException:  # the buffers of what is in flight must live until it is done
            exchanges = [gathering.exchange for gathering in self._gathering]
            for exchange in exchanges + [scattering.exchange for scattering in self._scattering]:
                if exchange is not None:
                    exchange.wait()
            self._tracker.set("step", tracked_bytes)
            raise

    def _finish_two(self, first: list[WholeParam], second: list[WholeParam]) -> None:
        """Orthogonalize the matrices of two exchanges at once, and update the values.

        Between the products of one there are copies, sums and launches, during which the other's run. Memory of the
        side stream is reused in later steps, whose side stream first waits for this one's compute stream. cuBLAS has a
        second workspace for it.
        """
        self._gathering.rotate(1)
        exchange = self._gathering[0].exchange
        inputs: list[object] = [] if exchange is None else exchange.buffers()  # of the compute stream, until it waits
        with self._side_stream:
            inputs.append(matrices := self._finish_gather())
            self._start_scatter(second, self._orthogonalize(second, matrices))
        results = self._orthogonalize(first, self._finish_gather())
        self._start_scatter(first, results)
        self._scattering.rotate(1)
        self._finish_scatter()
        self._side_stream.compute_wait_all()
        self._finish_scatter()
        inputs.clear()

    def _start_gather(self, batch: list[WholeParam], states: Any, grad_scale: GradScale) -> None:
        """Update the momenta, and start to send the updates to the owners."""
        ordered = self._by_owner(batch)
        owned = [param for param in batch if param.owner == self._axis.rank]
        exchange, wholes = None, {}
        if self._axis.size == 1:
            wholes = self._allocate(owned)
            views = [wholes[param][place.elements.slice] for param in ordered for place in self._places[param]]
        else:
            sent = [[self._run(param) for param in batch if param.owner == rank] for rank in self._axis.ranks_by_group]
            received_bytes = [
                sum(run_bytes(param.numel_by_rank[rank], DTYPE) for param in owned)
                for rank in self._axis.ranks_by_group
            ]
            exchange = Exchange(self._engine, sent, received_bytes)
            views = exchange.sent_views()
        self._update_momenta(ordered, views, states, grad_scale)
        if exchange is not None:
            exchange.start()
        self._gathering.append(Gathering(owned, exchange, wholes))

    def _update_momenta(
        self, params: list[WholeParam], views: list[torch.Tensor], states: Any, grad_scale: GradScale
    ) -> None:
        """Update the momenta, and write the updates to the views, one for each place of the matrices."""
        flat_grads = self._engine.gradients.flat_grads
        by_options: dict[MuonOptions, list[MomentumPart]] = {}
        views_left = iter(views)
        for param in params:
            parts = by_options.setdefault(self._options[param], [])
            for place in self._places[param]:
                gradient = flat_grads[place.flat].shard
                assert gradient is not None
                momentum = states[place.slice_.parameter][MOMENTUM_KEY][place.within]
                parts.append(MomentumPart(gradient[place.span], momentum, next(views_left)))
        for options, parts in by_options.items():
            if parts:
                self._tracker.record_transient("step", self._kernels.update_momenta(parts, options, grad_scale))

    def _allocate(self, params: list[WholeParam]) -> dict[WholeParam, torch.Tensor]:
        """Return memory for matrices, flattened, or for their TP shards; adjacent for those of one shape."""
        by_shape: dict[torch.Size, list[WholeParam]] = {}
        for param in params:
            by_shape.setdefault(param.flat.shapes[param.index], []).append(param)
        found: dict[WholeParam, torch.Tensor] = {}
        for shape, same in by_shape.items():
            stack = torch.empty((len(same), shape.numel()), dtype=DTYPE, device=self._engine.comm.device)
            self._tracker.add("step", stack.nbytes)
            found |= zip(same, stack.unbind(), strict=True)
        return found

    def _finish_gather(self) -> dict[WholeParam, torch.Tensor]:
        """Return the updates of the matrices that this rank owns, flattened, or of their TP shards."""
        owned, exchange, wholes = self._gathering.popleft()
        if exchange is None:
            return wholes
        exchange.wait()
        if self._is_in_order(owned):
            return {owned[0]: exchange.take_received(DTYPE)}
        wholes = self._allocate(owned)
        ranks = self._axis.ranks_by_group
        exchange.unpack(Run(DTYPE, param.views_of(wholes[param], rank)) for rank in ranks for param in owned)
        return wholes

    def _orthogonalize(
        self, batch: list[WholeParam], wholes: dict[WholeParam, torch.Tensor]
    ) -> dict[WholeParam, torch.Tensor]:
        """Return the orthogonalized updates of the matrices that this rank owns, in the same form."""
        if any(param.tp_shard is not None for param in batch):
            self._engine.order.check(TENSOR_AXIS_LABEL)  # also on ranks that own none of these
        # in the order of the batch, the same on all tensor ranks; the others' shapes depend on the rank
        divided = [(param, wholes[param]) for param in batch if param.tp_shard is not None and param in wholes]
        matrices = {param: param.shape_as_param(whole) for param, whole in wholes.items() if param.tp_shard is None}
        held = sum(whole.nbytes for whole in wholes.values())
        if divided:
            tensors = gather_tp_shards(self._engine, divided)
            self._tracker.record_transient("step", sum(tensor.nbytes for tensor in tensors))
            matrices |= {param: tensor for (param, _), tensor in zip(divided, tensors, strict=True)}
        results: dict[WholeParam, torch.Tensor] = {}
        for same in self._stackable(list(matrices)):
            newton_schulz = self._options[same[0]].newton_schulz
            found = orthogonalize_bf16([matrices.pop(param) for param in same], *newton_schulz)
            results |= {param: param.flatten(result) for param, result in zip(same, found, strict=True)}
        self._tracker.add("step", -held)
        return {param: results[param] for param in batch if param in results}  # in the order of the exchange

    def _stackable(self, params: list[WholeParam]) -> list[list[WholeParam]]:
        """Return the matrices that are orthogonalized together."""
        groups: dict[Any, list[WholeParam]] = {}
        for param in params:
            groups.setdefault((param.parameter.shape, self._options[param].newton_schulz), []).append(param)
        return list(groups.values())

    def _start_scatter(self, batch: list[WholeParam], results: dict[WholeParam, torch.Tensor]) -> None:
        """Start to send the results to the shards on all ranks."""
        ordered, exchange = self._by_owner(batch), None
        if self._axis.size > 1:
            sent = [
                [Run(DTYPE, param.views_of(result, rank)) for param, result in results.items()]
                for rank in self._axis.ranks_by_group
            ]
            received_bytes = [
                sum(self._run(param).nbytes for param in batch if param.owner == rank)
                for rank in self._axis.ranks_by_group
            ]
            if self._is_in_order(list(results)):
                exchange = Exchange(self._engine, sent, received_bytes, packed=next(iter(results.values()))).start()
            else:
                exchange = Exchange(self._engine, sent, received_bytes).pack().start()
        self._scattering.append(Scattering(ordered, exchange, results if exchange is None else {}))

    def _finish_scatter(self) -> None:
        """Update the values on this rank by the results that it has received."""
        if not self._scattering:
            return
        params, exchange, results = self._scattering.popleft()
        if exchange is None:
            views = [results[param][place.elements.slice] for param in params for place in self._places[param]]
        else:
            exchange.wait()
            views = exchange.received_views([self._run(param) for param in params])
        views_left = iter(views)
        by_factors: dict[tuple[float, float], list[ValuePart]] = {}
        for param in params:
            factors = self._options[param].decay, self._options[param].alpha(param.parameter.shape)
            parts = by_factors.setdefault(factors, [])
            parts += [ValuePart(next(views_left), place.values) for place in self._places[param]]
        for (decay, alpha), parts in by_factors.items():
            if parts:
                self._kernels.update_values(parts, decay, alpha)
        if exchange is not None:
            exchange.free()

    def _is_in_order(self, params: list[WholeParam]) -> bool:
        """Return whether the parts of all ranks, one after the other, are a matrix: then it needs no copy."""
        ranks = self._axis.ranks_by_group
        return len(params) == 1 and params[0].is_in_order(DTYPE) and all(map(operator.eq, ranks, range(len(ranks))))

    def _by_owner(self, params: list[WholeParam]) -> list[WholeParam]:
        """Return the matrices in the order of an exchange on this rank."""
        return [param for rank in self._axis.ranks_by_group for param in params if param.owner == rank]

    def _run(self, param: WholeParam) -> Run:
        """Return this rank's parts of a matrix, as they are in the buffer of an exchange."""
        return Run(DTYPE, [place.values for place in self._places[param]])
