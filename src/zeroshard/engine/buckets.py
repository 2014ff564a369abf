"""Buckets: the buffers that gradients pass on their way to their owners, and what is spared the way through them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import FlatGradient
from zeroshard.engine.packer import Packer
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.ring import Ring, Slot, buffer_lengths


class Buckets:
    """For each dtype that gradients are reduced in, a ring where they are partitioned, or a few landings.

    [Note: what needs no packing]
    A bucket that lies within one large parameter ([Note: large parameters]) is given to the reduction as a part of the
    gradient that autograd has made, where that has the dtype and the strides it would be packed in: a copy saved, which
    reads and writes the gradient once beside a computation that wants the same memory. The gradient then has to live
    until the reduction has read it, so its slot of the ring, whose buffer is not used, keeps it until it is settled,
    and the lane's list until compute has waited for the lane. That is when the next unit's gradients are there: where
    a unit has such buckets (which all ranks know alike), its reductions end before those of the next begin, so that no
    more than two units' gradients are in memory. A backend that overwrites what it reduces is given a copy all the
    same: whoever has seen the gradient in a hook may have kept it. Where one rank has to pack such a bucket, as it has
    no gradient of it, its slot has a buffer of that length, whose memory is taken then.
    """

    def __init__(self, gradients: Iterable[FlatGradient], comm: Communicator, slots: int, ledger: Ledger) -> None:
        self._gradients, self._comm, self._slots, self._ledger = list(gradients), comm, slots, ledger
        self._rings: dict[torch.dtype, Ring] = {}
        self._landings: dict[torch.dtype, list[torch.Tensor]] = {}
        self._packers: dict[tuple[Flat, int, int], Packer] = {}  # by flat, bucket and slot
        self.reads_gradients = False  # whether reductions under way may be reading autograd's own

    @property
    def busy(self) -> bool:
        """Whether a reduction is under way."""
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
        """Of each bucket, what can be reduced without being packed, of what autograd has made."""
        may = self._may_lie(gradient)
        return [gradient.as_it_lies(number, taken) if may else None for number in range(len(gradient.soles))]

    def slots(self, gradient: FlatGradient, ready: list[torch.Tensor | None]) -> list[Slot]:
        """A slot for each bucket, with memory for what has to be packed: all but what is ``ready``."""
        ring = self._rings.get(gradient.dtype)
        if ring is None:
            ring = self._rings[gradient.dtype] = self._ring(gradient.dtype)
        slots = [ring.take() for _ in ready]
        for slot, bucket, home, found in zip(
            slots, gradient.flat.layout.buckets, gradient.flat.homes, ready, strict=True
        ):
            if found is None:
                slot.packed.open(bucket.numel)
            if gradient.is_reduced_aside:
                slot.reduced.open(home.numel)
        self.reads_gradients |= self._may_lie(gradient) and any(sole is not None for sole in gradient.soles)
        return slots

    def pack(self, gradient: FlatGradient, number: int, slot: Slot, taken: list[torch.Tensor | None]) -> torch.Tensor:
        """Fill a slot with a bucket of what this rank has summed before, or else of what autograd has made."""
        flat, bucket = gradient.flat, gradient.flat.layout.buckets[number]
        packer = self._packers.get((flat, number, slot.index))
        if packer is None:
            packed = slot.packed.open(bucket.numel)[: bucket.numel]
            packer = self._packers[flat, number, slot.index] = Packer(flat, bucket, packed)
        if gradient.has_local and gradient.local is not None:
            packer.packed.copy_(gradient.local[bucket.slice])
        else:
            packer.pack(taken)
        return packer.packed

    def landing(self, dtype: torch.dtype, number: int) -> torch.Tensor:
        """One of the few buffers that parts of replicated gradients are reduced into."""
        buffers = self._landings.setdefault(dtype, [])
        if not buffers:
            homes = [home.numel for g in self._gradients if g.dtype == dtype for home in g.flat.homes]
            part, device = max(homes, default=0), self._comm.device
            buffers += [torch.empty(part, dtype=dtype, device=device) for _ in range(self._slots)]
            self._ledger.add("buckets", sum(buffer.nbytes for buffer in buffers))
        return buffers[number % len(buffers)]

    def _ring(self, dtype: torch.dtype) -> Ring:
        of_dtype = [gradient for gradient in self._gradients if gradient.dtype == dtype]
        packed: list[int] = []
        lying: list[int] = []
        for gradient in of_dtype:
            may = self._may_lie(gradient)
            for bucket, sole in zip(gradient.flat.layout.buckets, gradient.soles, strict=True):
                (lying if may and sole is not None else packed).append(bucket.numel)
        lengths = {*buffer_lengths(packed), *buffer_lengths(lying)}
        parts = buffer_lengths(home.numel for gradient in of_dtype for home in gradient.flat.homes)
        return Ring(self._slots, lengths, parts, dtype, self._comm.device, self._ledger)

    def _may_lie(self, gradient: FlatGradient) -> bool:
        """Whether buckets within one parameter may be reduced as they lie; all ranks say the same."""
        return not (self._comm.overwrites or gradient.far or gradient.flat.dtype != gradient.dtype)
