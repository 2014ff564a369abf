"""BucketRing: a fixed number of buffers through which gradients are reduced to their shards (the paper's C_B)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from zeroshard.memory.tracker import MemoryTracker

MAX_LENGTH_RATIO = 4  # a buffer is at most this many times as long as its content


def buffer_lengths(bucket_lengths: Iterable[int]) -> list[int]:
    """Return buffer lengths for these bucket lengths: the longest, the longest of at most a quarter of it, and so on.

    >>> buffer_lengths([100, 30, 26, 25, 7, 6, 1])
    [100, 25, 6, 1]
    """
    lengths: list[int] = []
    for length in sorted(set(bucket_lengths), reverse=True):
        if not lengths or length * MAX_LENGTH_RATIO <= lengths[-1]:
            lengths.append(length)
    return lengths


class SizedBuffers:
    """One buffer for each of a few lengths. A buffer has storage from its first use until all are freed.

    Views into a buffer stay valid while it has no storage.
    """

    def __init__(
        self, lengths: Iterable[int], dtype: torch.dtype, device: torch.device, tracker: MemoryTracker
    ) -> None:
        self._lengths = sorted(lengths)
        self._dtype, self._device, self._tracker = dtype, device, tracker
        self._buffers: dict[int, torch.Tensor] = {}  # by length
        self._allocated: dict[int, torch.Tensor] = {}

    def alloc_storage(self, numel: int) -> None:
        """Allocate the storage of the buffer for ``numel`` elements."""
        length = self._buffer_length(numel)
        if length in self._allocated:
            return
        buffer = self._buffers.get(length)
        if buffer is None:
            buffer = self._buffers[length] = torch.empty(length, dtype=self._dtype, device=self._device)
        else:
            buffer.untyped_storage().resize_(buffer.nbytes)
        self._allocated[length] = buffer
        self._tracker.add("buckets", buffer.nbytes)

    def view(self, numel: int) -> torch.Tensor:
        """Return the first ``numel`` elements of the buffer that was allocated for them."""
        return self._allocated[self._buffer_length(numel)][:numel]

    def free_storage(self) -> None:
        for buffer in self._allocated.values():
            buffer.untyped_storage().resize_(0)
            self._tracker.add("buckets", -buffer.nbytes)
        self._allocated.clear()

    def _buffer_length(self, numel: int) -> int:
        """Return the length of the shortest buffer for ``numel`` elements."""
        return next(length for length in self._lengths if length >= numel)


@dataclass
class BucketSlot:
    """A slot of the ring, for one reduction at a time."""

    index: int
    input_buffers: SizedBuffers  # for a bucket
    output_buffers: SizedBuffers  # for this rank's shard of it
    # for this rank's shard of it as each rank has it, if the backend needs one, or for 8-bit payloads
    receive_buffers: SizedBuffers | None
    finish_reduce: Callable[[], None] | None = None  # completes the pending reduction

    def wait(self) -> None:
        """Wait for the pending reduction, if there is one."""
        finish, self.finish_reduce = self.finish_reduce, None
        if finish is not None:
            finish()


class BucketRing:
    """Slots used in turn. Their number bounds what is in flight; their size does not grow with the model.

    [Note: bucket ring]
    Storage is resized as for units: between backwards the buffers have none, so they do not add to the peak at the
    loss. The first reductions of a backward are often those of a small head, while all activations are still in memory.
    So a slot has buffers of a few lengths, and each is allocated on its first use in a backward. Together they take at
    most a third more than the longest.
    """

    def __init__(
        self,
        slots: int,
        lengths: tuple[Collection[int], Collection[int], Collection[int]],
        dtype: torch.dtype,
        device: torch.device,
        tracker: MemoryTracker,
    ) -> None:
        """``lengths``: of the input buffers, of the output buffers, and of the receive buffers if there are any."""
        self.slots = []
        for index in range(slots):
            inputs, outputs, received = (SizedBuffers(given, dtype, device, tracker) for given in lengths)
            self.slots.append(BucketSlot(index, inputs, outputs, received if lengths[2] else None))
        self._next_index = 0

    def next_slot(self) -> BucketSlot:
        """Return the next slot. The caller first waits for its pending reduction."""
        slot = self.slots[self._next_index]
        self._next_index = (self._next_index + 1) % len(self.slots)
        return slot

    def wait_all(self) -> None:
        """Wait for every pending reduction, the oldest first."""
        for slot in self.slots[self._next_index :] + self.slots[: self._next_index]:
            slot.wait()

    def free_storage(self) -> None:
        for slot in self.slots:
            slot.input_buffers.free_storage()
            slot.output_buffers.free_storage()
            if slot.receive_buffers is not None:
                slot.receive_buffers.free_storage()
