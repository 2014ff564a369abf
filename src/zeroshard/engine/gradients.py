"""Gradients: taken from autograd, summed over backwards, reduced over the ranks, and kept by their owners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from zeroshard.comm import Communicator, Pending
from zeroshard.config import Config
from zeroshard.engine.order import Order
from zeroshard.engine.unit import Flat, Unit
from zeroshard.layout import Piece, Range
from zeroshard.memory.arena import Arena
from zeroshard.memory.lane import Lane
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.ring import Ring
from zeroshard.placement import Placement


class FlatGradient:
    """The gradient of one trainable flat: what this rank has summed itself, and its part of the reduced whole."""

    def __init__(self, flat: Flat, dtype: torch.dtype) -> None:
        self.flat = flat
        self.dtype = dtype
        self.local: torch.Tensor | None = None  # [numel]: this rank's own sum, not reduced yet
        self.shard: torch.Tensor | None = None  # [shard_numel]: the mean over the ranks, this rank's part
        self.carried: torch.Tensor | None = None  # [shard_numel]: reduced before, where ``local`` is reused
        self.has_local = False
        self.has_shard = False
        self.used = [False] * len(flat.parameters)  # got a gradient on this rank since zero_grad()
        self._views: list[torch.Tensor] = []

    @property
    def local_views(self) -> list[torch.Tensor]:
        """The parameters' places in ``local``."""
        if not self._views and self.local is not None:
            self._views = [self.flat.view(self.local, index) for index in range(len(self.flat.parameters))]
        return self._views

    def take(self) -> list[torch.Tensor | None]:
        """Take what autograd has put into the parameters' ``grad``."""
        taken: list[torch.Tensor | None] = []
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(self.flat.parameters):
                gradient = torch.Tensor.grad.__get__(parameter)  # type: ignore[attr-defined]
                if gradient is not None and gradient.layout is not torch.strided:
                    gradient = gradient.to_dense()
                taken.append(gradient)
                if gradient is not None:
                    self.used[index] = True
                    torch.Tensor.grad.__set__(parameter, None)  # type: ignore[attr-defined]
        return taken

    def clear(self, index: int) -> None:
        """Forget the gradient of one parameter."""
        self.used[index] = False
        if self.has_local:
            self.local_views[index].zero_()
        for piece in self.flat.segments if self.has_shard and self.shard is not None else ():
            if piece.parameter == index:
                self.shard[piece.at : piece.at + piece.within.numel].zero_()

    def pending(self) -> bool:
        """Whether autograd has left gradients here."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(torch.Tensor.grad.__get__(p) is not None for p in self.flat.parameters)  # type: ignore[attr-defined]


class Gradients:
    """All gradients of one model.

    Partitioned gradients (stages 2 and 3) are packed into a ring of buckets as each unit's backward ends and reduced
    there, in one fixed order on every rank. Replicated gradients (stages 0 and 1) are summed in place over any number
    of backwards and reduced once, in place, when the optimizer asks.
    """

    def __init__(
        self,
        units: list[Unit],
        placement: Placement,
        comm: Communicator,
        order: Order,
        ledger: Ledger,
        config: Config,
        reduce_dtypes: dict[torch.dtype, torch.dtype],
    ) -> None:
        self.of_flat = {
            flat: FlatGradient(flat, reduce_dtypes[flat.dtype]) for unit in units for flat in unit.flats if flat.trainable
        }
        self.units = [unit for unit in units if unit.trainable]
        self.coefficient: torch.Tensor | None = None  # of a clip that the optimizer has not applied yet
        self.unreduced = False  # some backward has only summed locally
        self.partitioned = placement.gradients
        self.queue: list[Unit] | None = None if self.partitioned else list(reversed(self.units))
        self._device = comm.device
        self._comm, self._order, self._ledger, self._config = comm, order, ledger, config
        self._lane = Lane(comm.device)
        self._rings: dict[torch.dtype, Ring] = {}
        self._landings: dict[torch.dtype, list[torch.Tensor]] = {}
        self._packers: dict[tuple[int, int, int], _Packer] = {}
        self._next = 0  # position in the queue
        self._finished: set[Unit] = set()
        self._held: list[tuple[torch.cuda.Event | None, list[torch.Tensor]]] = []  # read by the lane

    # -- inside backward ----------------------------------------------------------------------------------------

    def finish(self, unit: Unit, sync: bool) -> None:
        """Take the gradients of a unit whose backward is over on this rank."""
        if unit not in self.units:
            return
        if self.partitioned and sync:
            self._finished.add(unit)
            while self._next < len(self._queue) and self._queue[self._next] in self._finished:
                self._reduce(self._queue[self._next])
                self._next += 1
        else:
            self._add_local(unit)

    def end_backward(self, sync: bool) -> None:
        """Finish the units that are left: those without gradient on this rank take part with zeros."""
        if self.partitioned and sync:
            for unit in self._queue[self._next :]:
                self._reduce(unit)
            self._next = 0
            self._finished.clear()
        else:
            self.unreduced = bool(self.units)
        for unit in self.units:
            if any(gradient.pending() for gradient in self._of(unit)):  # came after its unit was finished
                self._reduce(unit) if self.partitioned and sync else self._add_local(unit)
        self._settle()

    @property
    def _queue(self) -> list[Unit]:
        return self.queue or []

    def abort(self) -> None:
        """Forget a backward that did not end."""
        self._next = 0
        self._finished.clear()

    # -- between backward and step ------------------------------------------------------------------------------

    def reduce_rest(self) -> None:
        """Reduce what this rank has only summed for itself so far."""
        for unit in self._queue or list(reversed(self.units)):
            if self.partitioned:
                self._reduce(unit)
                continue
            self._order.check(unit.reduce_event)
            for gradient in self._of(unit):
                if not gradient.has_local:  # no gradient on this rank: take part with zeros
                    self._open_local(gradient).zero_()
                self._reduce_local(gradient, unit.reduce_event)
        self._settle()
        self.unreduced = False

    def apply_coefficient(self) -> None:
        """Clip now what was to be clipped at the step: a backward is about to add to it."""
        if self.coefficient is not None:
            shards = [g.shard for g in self.of_flat.values() if g.has_shard and g.shard is not None]
            torch._foreach_mul_(shards, self.coefficient)
            self.coefficient = None

    def collect_stray(self) -> None:
        """Take gradients that autograd left without any hook having noticed the backward."""
        for unit in self.units:
            if any(gradient.pending() for gradient in self._of(unit)):
                self._add_local(unit)
                self.unreduced = True

    def clear(self, set_to_none: bool) -> None:
        """Forget all gradients, or make them zero."""
        self.coefficient = None
        for gradient in self.of_flat.values():
            gradient.carried = None
            if set_to_none:
                gradient.take()
                gradient.used = [False] * len(gradient.used)
                gradient.has_local = gradient.has_shard = False
            else:
                for tensor in (gradient.local if gradient.has_local else None, gradient.shard):
                    if tensor is not None:
                        tensor.zero_()
        if set_to_none:
            self.unreduced = False

    # -- summing locally ----------------------------------------------------------------------------------------

    def _add_local(self, unit: Unit) -> None:
        for gradient in self._of(unit):
            taken = gradient.take()
            present = [i for i, tensor in enumerate(taken) if tensor is not None]
            if not present:
                continue
            sources = [tensor for tensor in taken if tensor is not None]
            self._in_backward(sources)
            local = self._open_local(gradient)
            views = [gradient.local_views[i] for i in present]
            if gradient.has_local:
                torch._foreach_add_(views, sources)
                continue
            if len(present) < len(taken) or gradient.flat.layout.numel > sum(gradient.flat.layout.numels):
                local.zero_()
            torch._foreach_copy_(views, sources)
            gradient.has_local = True

    def _open_local(self, gradient: FlatGradient) -> torch.Tensor:
        if gradient.local is None:
            gradient.local = torch.zeros(gradient.flat.layout.numel, dtype=gradient.dtype, device=self._device)
            self._ledger.add("gradients", gradient.local.nbytes)
        elif gradient.has_shard and not gradient.has_local and not self.partitioned and gradient.shard is not None:
            # A backward after the reduction and before zero_grad(): the reduced part lies in ``local``, save it.
            gradient.carried = gradient.shard.clone()
        return gradient.local

    def _reduce_local(self, gradient: FlatGradient, what: str) -> None:
        """Reduce ``local`` bucket by bucket. The reduced parts go to its front: together they become the shard.

        The place a part goes to, ``in_shard(bucket)``, lies in buckets that are reduced already, so nothing that is
        still needed is overwritten, and stage 1 needs no memory beside its full gradients.
        """
        local, layout = self._open_local(gradient), gradient.flat.layout
        shard = local[: layout.shard_numel]
        under_way: deque[Callable[[], None]] = deque()
        for number, bucket in enumerate(layout.buckets):
            home = layout.in_shard(bucket)
            mine = shard[home.start : home.end]
            if self._comm.shard.size == 1:
                under_way.append(partial(self._average, mine, what))
            else:
                reduced = self._landing(gradient.dtype, number)[: home.numel]
                pending = self._comm.reduce_scatter(reduced, local[bucket.start : bucket.end], what)
                under_way.append(partial(self._land, pending, reduced, mine, what, add=False))
            if len(under_way) == self._config.ring:
                under_way.popleft()()
        for finish in under_way:
            finish()
        gradient.shard = shard
        if gradient.carried is not None:
            shard.add_(gradient.carried)
            gradient.carried = None
        gradient.has_local, gradient.has_shard = False, True

    # -- packing and reducing -----------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Pack a unit's gradients bucket by bucket and start their reduction, beside the computation."""
        self._order.check(unit.reduce_event)
        for event, _ in self._held:  # the last unit's gradients may go once the lane has read them
            Lane.join(event)
        self._drop_held()
        held: list[torch.Tensor] = []
        for gradient in self._of(unit):
            if gradient.has_local:
                self._add_local_flat(gradient, unit)
            taken = [None] * len(gradient.used) if gradient.has_local else gradient.take()
            sources = [tensor for tensor in taken if tensor is not None]
            self._in_backward(sources)
            held += sources
            self._open_shard(gradient)
            with self._lane:
                for number in range(len(gradient.flat.layout.buckets)):
                    self._launch(gradient, number, taken, unit.reduce_event)
            if gradient.has_local and gradient.local is not None:
                held.append(gradient.local)
                self._ledger.add("gradients", -gradient.local.nbytes)
                gradient.local, gradient._views, gradient.has_local = None, [], False
            gradient.has_shard = True
        self._held.append((self._lane.mark(), held))
        if self._device.type != "cuda":
            self._drop_held()

    def _add_local_flat(self, gradient: FlatGradient, unit: Unit) -> None:
        taken = gradient.take()
        present = [(view, t) for view, t in zip(gradient.local_views, taken, strict=True) if t is not None]
        if present:
            torch._foreach_add_([view for view, _ in present], [tensor for _, tensor in present])

    def _launch(self, gradient: FlatGradient, number: int, taken: list[torch.Tensor | None], what: str) -> None:
        bucket = gradient.flat.layout.buckets[number]
        slot = self._ring(gradient.dtype).take()
        slot.settle()
        packed = slot.packed[: bucket.numel]
        if gradient.has_local and gradient.local is not None:
            packed.copy_(gradient.local[bucket.start : bucket.end])
        else:
            key = (id(gradient), number, slot.index)
            packer = self._packers.get(key)
            if packer is None:
                packer = self._packers[key] = _Packer(gradient.flat, bucket, packed)
            packer.pack(taken)
        home = gradient.flat.layout.in_shard(bucket)
        assert gradient.shard is not None
        fresh = not gradient.has_shard  # nothing to add to: the result can land where it belongs
        target = gradient.shard[home.start : home.end] if fresh else slot.reduced[: home.numel]
        pending = self._comm.reduce_scatter(target, packed, what)
        slot.finish = partial(self._land, pending, target, gradient.shard[home.start : home.end], what, add=not fresh)

    def _land(self, pending: Pending, result: torch.Tensor, shard: torch.Tensor, what: str, add: bool) -> None:
        """End a reduction: sum over the replicas, average, and put the result where it belongs."""
        pending.wait()
        self._average(result, what)
        if add:
            shard.add_(result)
        elif result.data_ptr() != shard.data_ptr():
            shard.copy_(result)

    def _settle(self) -> None:
        """Finish every reduction under way, so that compute may use the results."""
        with self._lane:
            for ring in self._rings.values():
                for slot in ring.in_turn():
                    slot.settle()
        Lane.join(self._lane.mark())
        self._drop_held()

    def _average(self, shard: torch.Tensor, what: str) -> None:
        for axis in self._comm.replicas:
            self._comm.all_reduce(shard, axis, what).wait()
        if self._comm.ranks > 1:
            shard.mul_(1 / self._comm.ranks)

    # -- memory -------------------------------------------------------------------------------------------------

    def _of(self, unit: Unit) -> list[FlatGradient]:
        return [self.of_flat[flat] for flat in unit.flats if flat.trainable]

    def _ring(self, dtype: torch.dtype) -> Ring:
        if dtype not in self._rings:
            layouts = [g.flat.layout for g in self.of_flat.values() if g.dtype == dtype]
            longest = max(bucket.numel for layout in layouts for bucket in layout.buckets)
            self._rings[dtype] = Ring(self._config.ring, longest, self._comm.shard.size, dtype, self._device, self._ledger)
        return self._rings[dtype]

    def _landing(self, dtype: torch.dtype, number: int) -> torch.Tensor:
        """One of the few buffers that parts of replicated gradients are reduced into."""
        buffers = self._landings.setdefault(dtype, [])
        if not buffers:
            layouts = [g.flat.layout for g in self.of_flat.values() if g.dtype == dtype]
            longest = max(layout.in_shard(bucket).numel for layout in layouts for bucket in layout.buckets)
            buffers += [torch.empty(longest, dtype=dtype, device=self._device) for _ in range(self._config.ring)]
            self._ledger.add("buckets", sum(buffer.nbytes for buffer in buffers))
        return buffers[number % len(buffers)]

    def _open_shard(self, gradient: FlatGradient) -> None:
        """Place the shard: in one arena for all flats of a dtype, in flat order, so that the optimizer can join them."""
        if gradient.shard is not None:
            return
        group = [other for other in self.of_flat.values() if other.dtype == gradient.dtype]
        numel = sum(other.flat.layout.shard_numel for other in group)
        arena = Arena("gradients", numel, gradient.dtype, self._device, self._ledger)
        for other in group:
            other.shard = arena.take(other.flat.layout.shard_numel)

    def _in_backward(self, gradients: list[torch.Tensor]) -> None:
        nbytes = sum(tensor.nbytes for tensor in gradients)
        self._ledger.add("autograd", nbytes)  # what autograd made and this took: counted at its highest
        self._ledger.add("autograd", -nbytes)

    def _drop_held(self) -> None:
        self._held.clear()


class _Packer:
    """Copies the gradients of one bucket into one slot of the ring, with the cast, in a few fused kernels."""

    def __init__(self, flat: Flat, bucket: Range, packed: torch.Tensor) -> None:
        self._flat = flat
        self._pieces: list[tuple[Piece, bool]] = []
        self._places: list[torch.Tensor] = []
        for piece in flat.layout.pieces(bucket):
            whole = piece.within.numel == flat.layout.numels[piece.parameter]
            shape = flat.shapes[piece.parameter] if whole else torch.Size((piece.within.numel,))
            stride = flat.strides[piece.parameter] if whole else (1,)
            self._places.append(packed.as_strided(shape, stride, packed.storage_offset() + piece.at))
            self._pieces.append((piece, whole))
        self._gaps = [packed[gap.start : gap.end] for gap in flat.layout.gaps(bucket)]

    def pack(self, gradients: list[torch.Tensor | None]) -> None:
        """Fill the slot: what has no gradient, and what belongs to no parameter, is zero."""
        places, sources, empty = [], [], list(self._gaps)
        for (piece, whole), place in zip(self._pieces, self._places, strict=True):
            gradient = gradients[piece.parameter]
            if gradient is None:
                empty.append(place)
                continue
            if not whole:
                gradient = self._flat.line(gradient, piece.parameter)[piece.within.start : piece.within.end]
            places.append(place)
            sources.append(gradient)
        if empty:
            torch._foreach_zero_(empty)
        if places:
            torch._foreach_copy_(places, sources)
