"""Buckets: the buffers that gradients pass on their way to their owners, and what is spared the way through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import FlatGradient
from zeroshard.engine.packer import Packer
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.ring import Ring, Slot


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
    same: whoever has seen the gradient in a hook may have kept it. The ring is as long as the longest bucket that is
    packed in any case, until another one has to be. Not so where there are replicas: to grow, it ends what is under way
    at a moment of this rank's own, and what is summed over replicas when it ends has to come in one order on all ranks.
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

    def open(self, gradient: FlatGradient, ready: list[torch.Tensor | None], settle: Callable[[], None]) -> Ring:
        """Have a ring for a gradient of which all but what is ``ready`` is packed.

        Where it has to become longer, for what mostly lies as it should, ``settle`` ends what is under way in it.
        """
        pairs = zip(gradient.flat.layout.buckets, ready, strict=True)
        longest = max((bucket.numel for bucket, found in pairs if found is None), default=0)
        ring = self._rings.get(gradient.dtype)
        if ring is None or ring.longest < longest:
            if ring is not None:
                settle()
                self._packers.clear()
            ring = self._rings[gradient.dtype] = self._ring(gradient.dtype, longest)
        ring.open()
        self.reads_gradients |= self._may_lie(gradient) and any(sole is not None for sole in gradient.soles)
        return ring

    def pack(self, gradient: FlatGradient, number: int, slot: Slot, taken: list[torch.Tensor | None]) -> torch.Tensor:
        """Fill a slot with a bucket of what this rank has summed before, or else of what autograd has made."""
        flat, bucket = gradient.flat, gradient.flat.layout.buckets[number]
        packer = self._packers.get((flat, number, slot.index))
        if packer is None:
            packer = self._packers[flat, number, slot.index] = Packer(flat, bucket, slot.packed[: bucket.numel])
        if gradient.has_local and gradient.local is not None:
            packer.packed.copy_(gradient.local[bucket.slice])
        else:
            packer.pack(taken)
        return packer.packed

    def landing(self, dtype: torch.dtype, number: int) -> torch.Tensor:
        """One of the few buffers that parts of replicated gradients are reduced into."""
        buffers = self._landings.setdefault(dtype, [])
        if not buffers:
            part, device = self._longest_part(dtype), self._comm.device
            buffers += [torch.empty(part, dtype=dtype, device=device) for _ in range(self._slots)]
            self._ledger.add("buckets", sum(buffer.nbytes for buffer in buffers))
        return buffers[number % len(buffers)]

    def _ring(self, dtype: torch.dtype, longest: int) -> Ring:
        packed = [longest, *(length for g in self._of(dtype) for length in self._always_packed(g))]
        part, device = self._longest_part(dtype), self._comm.device
        return Ring(self._slots, max(packed), part, dtype, device, self._ledger)

    def _of(self, dtype: torch.dtype) -> list[FlatGradient]:
        return [gradient for gradient in self._gradients if gradient.dtype == dtype]

    def _longest_part(self, dtype: torch.dtype) -> int:
        """Elements of a rank's part of the longest bucket."""
        layouts = [gradient.flat.layout for gradient in self._of(dtype)]
        return max((bucket.numel // layout.parts for layout in layouts for bucket in layout.buckets), default=0)

    def _may_lie(self, gradient: FlatGradient) -> bool:
        """Whether buckets within one parameter may be reduced as they lie; all ranks say the same."""
        return not (self._comm.overwrites or gradient.far or gradient.flat.dtype != gradient.dtype)

    def _always_packed(self, gradient: FlatGradient) -> list[int]:
        """Elements of the buckets that there is room for from the beginning: those packed whatever autograd makes."""
        every = bool(self._comm.replicas) or not self._may_lie(gradient)
        pairs = zip(gradient.flat.layout.buckets, gradient.soles, strict=True)
        return [bucket.numel for bucket, sole in pairs if every or sole is None]
