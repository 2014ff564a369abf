"""Stack: contiguous memory for what forward leaves and backward takes.

[Note: stacks]
Activation checkpoints live from forward to backward, among temporaries that live for one operation. Were each allocated
where a temporary has just been freed, they would cut memory into pieces (the paper's M_D). So they are placed in one
allocation that stays from step to step, one behind the other as forward goes, and given back from the end as backward
comes. Other orders are right too: several forwards before a backward, a loss that is dropped, a graph kept for a second
backward. A gap that appears in the middle is used again.

The size is learnt. What does not fit (everything in the first step, a longer sequence later) is an allocation of its
own. As soon as all of it is given back, the pieces go, and the next push allocates one piece of the largest size
seen: old and new are never held at once.

A slot is given back by letting go of it, which may happen at any moment, also in the middle of a push. So that leaves
only a note, and the next push reads the notes: it has the compute stream wait for a side stream that still uses the
bytes. Only where memory itself goes does the host wait for such a stream, which it hardly ever has to.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable

import torch

from zeroshard.memory.buffers import PoolBuffer
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding.layout import round_up

ALIGN_BYTES = 16  # bytes: what copies and collectives like to begin at

OptionalEvent = torch.Event | None
PendingFree = tuple["StackChunk", int, int, "OptionalEvent"]  # where from, start, bytes, what still reads or writes it


class StackSlot:
    """Some bytes of a stack, until the last reference to this object goes."""

    __slots__ = ("_chunk", "_last_use", "_pending_frees", "_start", "data")

    def __init__(self, chunk: StackChunk, start: int, nbytes: int, pending_frees: deque[PendingFree]) -> None:
        self.data = chunk.buffer.tensor[start : start + nbytes]
        self._last_use: OptionalEvent = None
        self._chunk, self._start, self._pending_frees = chunk, start, pending_frees

    def set_last_use(self, event: OptionalEvent) -> None:
        """A side stream reads or writes the bytes until ``event``."""
        self._last_use = self._chunk.last_use = event

    def __del__(self) -> None:
        self._pending_frees.append((self._chunk, self._start, self.data.numel(), self._last_use))


class StackChunk:
    """One allocation of a stack, and which of its bytes are free."""

    def __init__(self, buffer: PoolBuffer) -> None:
        self.buffer = buffer
        self.nbytes = buffer.tensor.numel()
        self.last_use: OptionalEvent = None  # the last use of any of its bytes on the side stream
        self._free_ranges = [(0, self.nbytes)]  # [start, end), in order, never touching
        self._tracker: MemoryTracker | None = None
        self._tier = ""

    def alloc(self, nbytes: int) -> int | None:
        """Take the first bytes that are free and enough; return where they start, None where there are none."""
        for index, (start, end) in enumerate(self._free_ranges):
            if end - start >= nbytes:
                self._free_ranges[index : index + 1] = [(start + nbytes, end)] if start + nbytes < end else []
                return start
        return None

    def free(self, start: int, nbytes: int) -> None:
        """Take bytes back."""
        end = start + nbytes
        index = bisect(self._free_ranges, (start, end))
        if index < len(self._free_ranges) and self._free_ranges[index][0] == end:
            end = self._free_ranges.pop(index)[1]
        if index > 0 and self._free_ranges[index - 1][1] == start:
            index -= 1
            start = self._free_ranges.pop(index)[0]
        self._free_ranges.insert(index, (start, end))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return self._free_ranges == [(0, self.nbytes)]

    def set_tracker(self, tracker: MemoryTracker | None, tier: str) -> None:
        """Count it in a ledger, and no more in the one before."""
        if tracker is not self._tracker:
            self._record_bytes(-self.nbytes)
            self._tracker, self._tier = tracker, tier
            self._record_bytes(self.nbytes)

    def _record_bytes(self, nbytes: int) -> None:
        if self._tracker is not None:
            self._tracker.add("activations", nbytes, self._tier)

    def __del__(self) -> None:
        self._record_bytes(-self.nbytes)
        if self.last_use is not None:
            self.last_use.synchronize()


class ActivationStack:
    """Memory that slots are pushed on: see [Note: stacks].

    >>> allocate = lambda nbytes: PoolBuffer(nbytes, torch.device("cpu"))
    >>> stack = ActivationStack("device", allocate, wait_event=lambda event: None)
    >>> first, second = stack.push(100), stack.push(50)
    >>> stack.allocated_bytes
    176
    >>> del first, second
    >>> slots = stack.push(100), stack.push(50)  # side by side from now on
    >>> slots[1].data.data_ptr() - slots[0].data.data_ptr()
    112
    """

    def __init__(
        self, tier: str, allocate: Callable[[int], PoolBuffer], wait_event: Callable[[OptionalEvent], None]
    ) -> None:
        self._tier = tier
        self._allocate = allocate
        self._wait_event = wait_event  # makes the compute stream wait
        self._tracker: MemoryTracker | None = None
        self._chunks: list[StackChunk] = []
        self._pending_frees: deque[PendingFree] = deque()
        self._used_bytes = 0  # bytes
        self._peak_bytes = 0  # bytes that were used at once
        self._chunk_bytes = 0  # bytes of the one chunk that all is placed in

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated."""
        self._apply_pending_frees()
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        self._apply_pending_frees()
        return self._used_bytes

    def set_tracker(self, tracker: MemoryTracker | None) -> None:
        """Count what is allocated in a ledger."""
        self._tracker = tracker
        for chunk in self._chunks:
            chunk.set_tracker(tracker, self._tier)

    def push(self, nbytes: int) -> StackSlot:
        """Place so many bytes."""
        self._apply_pending_frees()
        length = round_up(nbytes, ALIGN_BYTES)
        chunk, start = self._alloc_in_chunks(length) or self._alloc_new_chunk(length)
        self._used_bytes += length
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return StackSlot(chunk, start, nbytes, self._pending_frees)

    def _alloc_in_chunks(self, nbytes: int) -> tuple[StackChunk, int] | None:
        for chunk in self._chunks:
            start = chunk.alloc(nbytes)
            if start is not None:
                return chunk, start
        return None

    def _alloc_new_chunk(self, nbytes: int) -> tuple[StackChunk, int]:
        self._chunks = [
            chunk for chunk in self._chunks if not chunk.is_empty
        ]  # what is free is too small: it goes first
        chunk = StackChunk(self._allocate_buffer(nbytes))
        chunk.set_tracker(self._tracker, self._tier)
        self._chunks.append(chunk)
        return chunk, chunk.alloc(nbytes) or 0

    def _allocate_buffer(self, nbytes: int) -> PoolBuffer:
        if not self._chunks and self._chunk_bytes > nbytes:
            try:
                return self._allocate(self._chunk_bytes)
            except torch.OutOfMemoryError:  # there is no such piece left: as in the first step, then
                pass
        return self._allocate(nbytes)

    def _apply_pending_frees(self) -> None:
        """Take back what was let go of."""
        while self._pending_frees:
            chunk, start, nbytes, busy = self._pending_frees.popleft()
            self._wait_event(busy)
            length = round_up(nbytes, ALIGN_BYTES)
            chunk.free(start, length)
            self._used_bytes -= length
        if self._used_bytes == 0 and len(self._chunks) > 1:
            gaps = self._peak_bytes <= self._chunk_bytes  # it did not fit though it was not too much
            self._chunk_bytes = sum(chunk.nbytes for chunk in self._chunks) if gaps else self._peak_bytes
            self._chunks.clear()
