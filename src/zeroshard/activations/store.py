"""ActivationStore: the saved activations of one device, on it or in host memory.

[Note: activations on device and host]
Without offload all activations stay on the device. With offload each is copied to host memory while its block runs,
and the device holds only those of two block calls: in forward the last two calls, so that backward starts without
waiting; in backward the call being recomputed and the next one, which is being prefetched. The number of blocks does
not matter. Copies run on a side stream: see [Note: streams without record_stream] in ``memory/streams.py``. The stream
reads and writes slots, and a slot is reused only after the compute stream has waited for the copy stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from zeroshard.activations.stack import ActivationStack, OptionalEvent, PoolBuffer, StackSlot
from zeroshard.memory import MemoryTracker, PinnedBuffer, SideStream
from zeroshard.utils.profiling import label


class SavedActivation:
    """The saved bytes of one tensor on this rank."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device_slot: StackSlot | None = None
        self.host_slot: StackSlot | None = None
        self.copy_done: OptionalEvent = None  # when the copy to the device is done
        self.full_copy: torch.Tensor | None = None  # the tensor in ``device_slot``, if it is never offloaded


class ActivationStore:
    """Saves activations of one device as bytes.

    >>> store = ActivationStore(torch.device("cpu"), offload=True)
    >>> saved = store.save(torch.arange(4, dtype=torch.uint8), 4)
    >>> store.evict_except([])  # now only in host memory
    >>> store.device_stack.used_bytes, store.host_stack.used_bytes
    (0, 16)
    >>> store.prefetch(saved)
    >>> store.load(saved)
    tensor([0, 1, 2, 3], dtype=torch.uint8)
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.is_offloaded = offload
        self._copy_stream = SideStream(device)
        on_device = partial(PoolBuffer, device=device)
        on_host = partial(PinnedBuffer.allocate, device=device) if device.type == "cuda" else on_device
        self.device_stack = ActivationStack("device", on_device, self._copy_stream.compute_wait_event)
        self.host_stack = ActivationStack("host", on_host, lambda event: None)  # only the copy stream uses it, in order
        self._on_both_tiers: weakref.WeakSet[SavedActivation] = weakref.WeakSet()  # on the device and in host memory

    def set_tracker(self, tracker: MemoryTracker | None) -> None:
        self.device_stack.set_tracker(tracker)
        self.host_stack.set_tracker(tracker)

    def save(self, values: torch.Tensor, nbytes: int) -> SavedActivation:
        """Save a copy of one-dimensional ``values`` at the start of a slot of ``nbytes`` bytes."""
        saved = SavedActivation(nbytes)
        saved.device_slot = self.device_stack.push(nbytes)
        saved.device_slot.data[: values.nbytes].view(values.dtype).copy_(values)
        if self.is_offloaded:
            saved.host_slot = self.host_stack.push(nbytes)
            with label("offload activation"), self._copy_stream:
                saved.host_slot.data.copy_(saved.device_slot.data, non_blocking=True)
            self._record_last_use(saved)
        return saved

    def save_full(self, tensor: torch.Tensor) -> SavedActivation:
        """Save a copy of a dense tensor on the device."""
        saved = SavedActivation(tensor.nbytes)
        saved.device_slot = self.device_stack.push(tensor.nbytes)
        saved.full_copy = saved.device_slot.data.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        saved.full_copy.copy_(tensor)
        return saved

    def evict_except(self, needed: Iterable[SavedActivation]) -> None:
        """Free the device slots of activations that are also in host memory, except ``needed``."""
        if not self._on_both_tiers:
            return
        for saved in self._on_both_tiers.difference(needed):
            saved.device_slot = None
            self._on_both_tiers.discard(saved)

    def prefetch(self, saved: SavedActivation) -> None:
        """Start the copy to the device, if the activation is not there."""
        if saved.device_slot is None and saved.host_slot is not None:
            saved.device_slot = self.device_stack.push(saved.nbytes)
            with label("reload activation"), self._copy_stream:
                saved.device_slot.data.copy_(saved.host_slot.data, non_blocking=True)
            saved.copy_done = self._record_last_use(saved)

    def load(self, saved: SavedActivation) -> torch.Tensor:
        """Return the bytes on the device, ready for the current stream."""
        self.prefetch(saved)
        if saved.device_slot is None:
            raise RuntimeError("the activation was not saved: please report this")
        self._copy_stream.compute_wait_event(saved.copy_done)
        saved.copy_done = None
        return saved.device_slot.data

    def _record_last_use(self, saved: SavedActivation) -> OptionalEvent:
        """Mark both slots as in use until the copy stream has finished its queued work."""
        copy_done = self._copy_stream.record_event()
        for slot in (saved.device_slot, saved.host_slot):
            if slot is not None:
                slot.set_last_use(copy_done)
        self._on_both_tiers.add(saved)
        return copy_done
