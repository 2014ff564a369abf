"""Store: the activations kept for one device, on it or in host memory.

[Note: near and far]
Without offload all stays near, on the device. With it all goes far, into host memory, while its block runs, and the
device has only the call at work and the one before it: in forward the last two calls, so that backward begins without
waiting; in backward the call that runs again and the one that comes next, which is on its way. So the device holds the
activations of two calls, however many blocks there are. Copies run on a lane: see [Note: streams without record_stream]
in ``memory/streams.py``. What a lane reads or writes is a slot, and a slot is used again only when the compute stream
has waited for the lane.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from zeroshard.activations.stack import ActivationStack, OptionalEvent, StackSlot
from zeroshard.comm.wait_timer import WaitTimer
from zeroshard.memory.buffers import PinnedBuffer, PoolBuffer
from zeroshard.memory.streams import SideStream
from zeroshard.memory.tracker import MemoryTracker


class SavedActivation:
    """What this rank keeps of one tensor, until nothing needs it any more."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device_slot: StackSlot | None = None
        self.host_slot: StackSlot | None = None
        self.copy_done: OptionalEvent = None  # when what was far is near
        self.full_copy: torch.Tensor | None = None  # the tensor as it lies in ``near``, where it never goes far


class ActivationStore:
    """Keeps bytes of one device.

    >>> store = ActivationStore(torch.device("cpu"), offload=True)
    >>> kept = store.save(torch.arange(4, dtype=torch.uint8), 4)
    >>> store.evict_except([])  # it is far now
    >>> store.device_stack.used_bytes, store.host_stack.used_bytes
    (0, 16)
    >>> store.prefetch(kept)
    >>> store.load(kept)
    tensor([0, 1, 2, 3], dtype=torch.uint8)
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.is_offloaded = offload
        self._copy_stream = SideStream(device, WaitTimer(on_stream=False))
        on_gpu = device.type == "cuda"
        host = partial(PinnedBuffer, device=device) if on_gpu else partial(PoolBuffer, device=torch.device("cpu"))
        self.device_stack = ActivationStack(
            "device", partial(PoolBuffer, device=device), self._copy_stream.compute_wait_event
        )
        self.host_stack = ActivationStack("host", host, lambda event: None)  # only the lane uses it, in order
        self._on_both_tiers: weakref.WeakSet[SavedActivation] = weakref.WeakSet()  # that are both near and far

    def set_tracker(self, tracker: MemoryTracker | None) -> None:
        """Count what is allocated in a ledger."""
        self.device_stack.set_tracker(tracker)
        self.host_stack.set_tracker(tracker)

    def save(self, values: torch.Tensor, nbytes: int) -> SavedActivation:
        """Keep a copy of one-dimensional ``values`` at the beginning of ``nbytes`` bytes."""
        kept = SavedActivation(nbytes)
        kept.device_slot = self.device_stack.push(nbytes)
        kept.device_slot.data[: values.nbytes].view(values.dtype).copy_(values)
        if self.is_offloaded:
            kept.host_slot = self.host_stack.push(nbytes)
            with self._copy_stream:
                kept.host_slot.data.copy_(kept.device_slot.data, non_blocking=True)
            self._record_last_use(kept)
        return kept

    def save_full(self, tensor: torch.Tensor) -> SavedActivation:
        """Keep a copy of a tensor whose elements fill its memory, on the device."""
        kept = SavedActivation(tensor.nbytes)
        kept.device_slot = self.device_stack.push(tensor.nbytes)
        kept.full_copy = kept.device_slot.data.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        kept.full_copy.copy_(tensor)
        return kept

    def evict_except(self, needed: Iterable[SavedActivation]) -> None:
        """Leave on the device only these, of what is in host memory too."""
        if not self._on_both_tiers:
            return
        for kept in self._on_both_tiers.difference(needed):
            kept.device_slot = None
            self._on_both_tiers.discard(kept)

    def prefetch(self, saved: SavedActivation) -> None:
        """Start to copy to the device what is not there."""
        if saved.device_slot is None and saved.host_slot is not None:
            saved.device_slot = self.device_stack.push(saved.nbytes)
            with self._copy_stream:
                saved.device_slot.data.copy_(saved.host_slot.data, non_blocking=True)
            saved.copy_done = self._record_last_use(saved)

    def load(self, saved: SavedActivation) -> torch.Tensor:
        """The bytes, on the device, for use by what comes next on this stream."""
        self.prefetch(saved)
        if saved.device_slot is None:
            raise RuntimeError("an activation was asked for that nobody kept: please report this")
        self._copy_stream.compute_wait_event(saved.copy_done)
        saved.copy_done = None
        return saved.device_slot.data

    def _record_last_use(self, saved: SavedActivation) -> OptionalEvent:
        """Both places of a tensor are in use until the lane has done what it was given."""
        end = self._copy_stream.record_event()
        for slot in (saved.device_slot, saved.host_slot):
            if slot is not None:
                slot.set_last_use(end)
        self._on_both_tiers.add(saved)
        return end
