"""Ring: the few fixed buffers gradients travel through on their way to the owners (the paper's C_B)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from zeroshard.memory.tracker import MemoryTracker

MAX_LENGTH_RATIO = 4  # a buffer is at most so many times as long as what it is taken for


def buffer_lengths(bucket_lengths: Iterable[int]) -> list[int]:
    """Lengths of buffers for buckets of these: the longest, the longest of at most a quarter of it, and so on.

    >>> buffer_lengths([100, 30, 26, 25, 7, 6, 1])
    [100, 25, 6, 1]
    """
    lengths: list[int] = []
    for length in sorted(set(bucket_lengths), reverse=True):
        if not lengths or length * MAX_LENGTH_RATIO <= lengths[-1]:
            lengths.append(length)
    return lengths


class SizedBuffers:
    """One buffer of each of a few lengths, which has memory from when it is wanted until all are closed.

    While it has none, views into it stay valid.
    """

    def __init__(
        self, lengths: Iterable[int], dtype: torch.dtype, device: torch.device, tracker: MemoryTracker
    ) -> None:
        self._lengths = sorted(lengths)
        self._dtype, self._device, self._tracker = dtype, device, tracker
        self._buffers: dict[int, torch.Tensor] = {}  # by length
        self._allocated: dict[int, torch.Tensor] = {}

    def alloc_storage(self, numel: int) -> None:
        """Have memory for so many elements."""
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
        """So many elements of the buffer that was opened for them."""
        return self._allocated[self._buffer_length(numel)][:numel]

    @property
    def has_storage(self) -> bool:
        """Whether any has memory."""
        return bool(self._allocated)

    def free_storage(self) -> None:
        """Give the memory back."""
        for buffer in self._allocated.values():
            buffer.untyped_storage().resize_(0)
            self._tracker.add("buckets", -buffer.nbytes)
        self._allocated.clear()

    def _buffer_length(self, numel: int) -> int:
        """Of the shortest buffer that has so many elements."""
        return next(length for length in self._lengths if length >= numel)


@dataclass
class BucketSlot:
    """A place in the ring, for one reduction at a time."""

    index: int
    input_buffers: SizedBuffers  # for a bucket
    output_buffers: SizedBuffers  # for this rank's part of it
    finish_reduce: Callable[[], None] | None = None  # ends what is under way

    def wait(self) -> None:
        """End the reduction under way, if there is one."""
        finish, self.finish_reduce = self.finish_reduce, None
        if finish is not None:
            finish()


class BucketRing:
    """Slots taken in turn. Their number bounds what is in flight; their size does not grow with the model.

    [Note: buffers of a ring]
    They breathe as units do: between backwards they have no memory, so that they take no part in the peak of the loss.
    A backward's first reductions are often of a small head, beside all the activations there are; so a slot has buffers
    of a few lengths, each of which gets memory in a backward when it is first wanted. Together they have at most a
    third more than the longest.
    """

    def __init__(
        self,
        slots: int,
        input_lengths: Collection[int],
        output_lengths: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
        tracker: MemoryTracker,
    ) -> None:
        self.slots = [
            BucketSlot(
                index,
                SizedBuffers(input_lengths, dtype, device, tracker),
                SizedBuffers(output_lengths, dtype, device, tracker),
            )
            for index in range(slots)
        ]
        self._next_index = 0

    def next_slot(self) -> BucketSlot:
        """Return the next slot. Who uses it ends what is under way there first."""
        slot = self.slots[self._next_index]
        self._next_index = (self._next_index + 1) % len(self.slots)
        return slot

    @property
    def is_busy(self) -> bool:
        """Whether a reduction is under way, or buffers are open for one."""
        return any(
            slot.finish_reduce is not None or slot.input_buffers.has_storage or slot.output_buffers.has_storage
            for slot in self.slots
        )

    def wait_all(self) -> None:
        """End every reduction under way, the longest first."""
        for slot in self.slots[self._next_index :] + self.slots[: self._next_index]:
            slot.wait()

    def free_storage(self) -> None:
        """Give the buffers' memory back, until they are wanted again."""
        for slot in self.slots:
            slot.input_buffers.free_storage()
            slot.output_buffers.free_storage()
