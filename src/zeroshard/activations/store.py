"""Store: the activations kept for one device, on it or in host memory.

[Note: near and far]
Without offload all stays near, on the device. With it all goes far, into host memory, while its block runs, and the
device has only the call at work and the one before it: in forward the last two calls, so that backward begins without
waiting; in backward the call that runs again and the one that comes next, which is on its way. So the device holds the
activations of two calls, however many blocks there are. Copies run on a lane: see
[Note: streams without record_stream] in ``memory/lane.py``. What a lane reads or writes is a slot, and a slot is used
again only when the compute stream has waited for the lane.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from zeroshard.activations.stack import Event, Slot, Stack
from zeroshard.memory.lane import Lane
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.room import PinnedRoom, Room
from zeroshard.stopwatch import Stopwatch


class Kept:
    """What this rank keeps of one tensor, until nothing needs it any more."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.near: Slot | None = None
        self.far: Slot | None = None
        self.arrives: Event = None  # when what was far is near
        self.whole: torch.Tensor | None = None  # the tensor as it lies in ``near``, where it never goes far


class Store:
    """Keeps bytes of one device.

    >>> store = Store(torch.device("cpu"), offload=True)
    >>> kept = store.keep(torch.arange(4, dtype=torch.uint8), 4)
    >>> store.only([])  # it is far now
    >>> store.near.used, store.far.used
    (0, 16)
    >>> store.bring(kept)
    >>> store.read(kept)
    tensor([0, 1, 2, 3], dtype=torch.uint8)
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.offload = offload
        self._lane = Lane(device, Stopwatch(on_stream=False))
        on_gpu = device.type == "cuda"
        host = partial(PinnedRoom, serves=device) if on_gpu else partial(Room, device=torch.device("cpu"))
        self.near = Stack("device", partial(Room, device=device), self._lane.join)
        self.far = Stack("host", host, lambda event: None)  # only the lane uses it, in order
        self._present: weakref.WeakSet[Kept] = weakref.WeakSet()  # that are both near and far

    def charge(self, ledger: Ledger | None) -> None:
        """Count what is allocated in a ledger."""
        self.near.charge(ledger)
        self.far.charge(ledger)

    def keep(self, values: torch.Tensor, nbytes: int) -> Kept:
        """Keep a copy of one-dimensional ``values`` at the beginning of ``nbytes`` bytes."""
        kept = Kept(nbytes)
        kept.near = self.near.push(nbytes)
        kept.near.bytes[: values.nbytes].view(values.dtype).copy_(values)
        if self.offload:
            kept.far = self.far.push(nbytes)
            with self._lane:
                kept.far.bytes.copy_(kept.near.bytes, non_blocking=True)
            self._note_use(kept)
        return kept

    def keep_whole(self, tensor: torch.Tensor) -> Kept:
        """Keep a copy of a tensor whose elements fill its memory, on the device."""
        kept = Kept(tensor.nbytes)
        kept.near = self.near.push(tensor.nbytes)
        kept.whole = kept.near.bytes.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        kept.whole.copy_(tensor)
        return kept

    def only(self, wanted: Iterable[Kept]) -> None:
        """Leave on the device only these, of what is in host memory too."""
        if not self._present:
            return
        for kept in self._present.difference(wanted):
            kept.near = None
            self._present.discard(kept)

    def bring(self, kept: Kept) -> None:
        """Start to copy to the device what is not there."""
        if kept.near is None and kept.far is not None:
            kept.near = self.near.push(kept.nbytes)
            with self._lane:
                kept.near.bytes.copy_(kept.far.bytes, non_blocking=True)
            kept.arrives = self._note_use(kept)

    def read(self, kept: Kept) -> torch.Tensor:
        """The bytes, on the device, for use by what comes next on this stream."""
        self.bring(kept)
        if kept.near is None:
            raise RuntimeError("an activation was asked for that nobody kept: please report this")
        self._lane.join(kept.arrives)
        kept.arrives = None
        return kept.near.bytes

    def _note_use(self, kept: Kept) -> Event:
        """Both places of a tensor are in use until the lane has done what it was given."""
        end = self._lane.mark()
        for slot in (kept.near, kept.far):
            if slot is not None:
                slot.used_until(end)
        self._present.add(kept)
        return end
