"""Buckets: the buffers that gradients pass on their way to their owners, and what is spared the way through them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import FlatGradient
from zeroshard.engine.packer import Packer
from zeroshard.layout import Piece, Range
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.ring import Ring, Slot, buffer_lengths


class Buckets:
    """For each dtype that gradients are reduced in, a ring where they are partitioned, or a few landings.

    [Note: what needs no packing]
    A bucket that lies within one large parameter ([Note: large parameters]) is given to the reduction as a part of the
    gradient that autograd has made, where that has the dtype it would be packed in: a copy saved, which reads and
    writes the gradient once beside a computation that wants the same memory. Where there is no such gradient, or with
    other strides, a tensor is made that could be one. It then has to live until the reduction has read it, so its slot
    of the ring, of which no buffer is used, keeps it until it is settled, and the lane's list until compute has waited
    for the lane. That is when the next unit's gradients are there: where a unit has such buckets (which all ranks know
    alike), its reductions end before those of the next begin, so that no more than two units' gradients are in memory.
    What was summed inside ``no_sync`` is reduced where it lies in the same way. A backend that overwrites what it
    reduces is given a copy all the same: whoever has seen the gradient in a hook may have kept it.
    """

    def __init__(self, gradients: Iterable[FlatGradient], comm: Communicator, slots: int, ledger: Ledger) -> None:
        self._gradients, self._comm, self._slots, self._ledger = list(gradients), comm, slots, ledger
        self._rings: dict[torch.dtype, Ring] = {}
        self._landings: dict[torch.dtype, list[torch.Tensor]] = {}
        self._packers: dict[tuple[Flat, int, int], Packer] = {}  # by flat, bucket and slot
        self.reads_gradients = False  # whether reductions under way may be reading autograd's own

    @property
    def busy(self) -> bool:
        """Whether a reduction is under way, or buffers are open for one."""
        return any(ring.busy for ring in self._rings.values())

    def settle(self) -> None:
        """End every reduction under way."""
        for ring in self._rings.values():
            ring.settle()
        self.reads_gradients = False

    def close(self) -> None:
        """Free the rings' buffers until they are wanted again."""
        for ring in self._rings.values():
            ring.close()

    def as_they_lie(self, gradient: FlatGradient, taken: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of each bucket, what is reduced without being packed, or None."""
        buckets, local = gradient.flat.layout.buckets, gradient.local
        if not self._may_lie(gradient):
            return [None] * len(buckets)
        if gradient.has_local and local is not None:
            return [local[bucket.slice] for bucket in buckets]
        return [
            None if sole is None else self._lying(gradient, bucket, sole, taken)
            for bucket, sole in zip(buckets, gradient.soles, strict=True)
        ]

    def slots(self, gradient: FlatGradient, ready: list[torch.Tensor | None]) -> list[Slot]:
        """A slot for each bucket in turn, where all that is not ``ready`` can be packed, and what needs to be reduced.

        It takes memory, so it is called on the compute stream: see [Note: streams without record_stream].
        """
        ring = self._rings.get(gradient.dtype)
        if ring is None:
            ring = self._rings[gradient.dtype] = self._ring(gradient.dtype)
        slots = [ring.take() for _ in ready]
        for number, slot in enumerate(slots):
            if ready[number] is None:
                slot.packed.open(gradient.flat.layout.buckets[number].numel)
            if gradient.is_reduced_aside:
                slot.reduced.open(gradient.flat.homes[number].numel)
        self.reads_gradients |= self._may_lie(gradient) and any(sole is not None for sole in gradient.soles)
        return slots

    def pack(self, gradient: FlatGradient, number: int, slot: Slot, taken: list[torch.Tensor | None]) -> torch.Tensor:
        """Fill a slot with a bucket of what this rank has summed before, or else of what autograd has made."""
        flat, bucket = gradient.flat, gradient.flat.layout.buckets[number]
        packer = self._packers.get((flat, number, slot.index))
        if packer is None:
            packer = Packer(flat, bucket, slot.packed.first(bucket.numel))
            self._packers[flat, number, slot.index] = packer
        if gradient.has_local and gradient.local is not None:
            packer.packed.copy_(gradient.local[bucket.slice])
        else:
            packer.pack(taken)
        return packer.packed

    def landing(self, dtype: torch.dtype, number: int) -> torch.Tensor:
        """One of the few buffers that parts of replicated gradients are reduced into."""
        buffers = self._landings.setdefault(dtype, [])
        if not buffers:
            part, device = max(self._parts(dtype), default=0), self._comm.device
            buffers += [torch.empty(part, dtype=dtype, device=device) for _ in range(self._slots)]
            self._ledger.add("buckets", sum(buffer.nbytes for buffer in buffers))
        return buffers[number % len(buffers)]

    def _ring(self, dtype: torch.dtype) -> Ring:
        packed = {
            bucket.numel
            for gradient in self._of(dtype)
            for bucket, sole in zip(gradient.flat.layout.buckets, gradient.soles, strict=True)
            if sole is None or not self._may_lie(gradient)
        }
        parts = buffer_lengths(self._parts(dtype))
        return Ring(self._slots, buffer_lengths(packed), parts, dtype, self._comm.device, self._ledger)

    def _of(self, dtype: torch.dtype) -> list[FlatGradient]:
        return [gradient for gradient in self._gradients if gradient.dtype == dtype]

    def _parts(self, dtype: torch.dtype) -> list[int]:
        """Elements of a rank's part of each bucket."""
        return [home.numel for gradient in self._of(dtype) for home in gradient.flat.homes]

    def _lying(
        self, gradient: FlatGradient, bucket: Range, sole: Piece, taken: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """A bucket within one parameter, as it lies, or laid out anew."""
        found = gradient.as_it_lies(sole, taken)
        if found is None:
            found = torch.empty(bucket.numel, dtype=gradient.dtype, device=self._comm.device)
            Packer(gradient.flat, bucket, found).pack(taken)
            self._ledger.pass_through("autograd", found.nbytes)
        return found

    def _may_lie(self, gradient: FlatGradient) -> bool:
        """Whether buckets within one parameter may be reduced as they lie; all ranks say the same."""
        return not (self._comm.overwrites or gradient.far or gradient.flat.dtype != gradient.dtype)
