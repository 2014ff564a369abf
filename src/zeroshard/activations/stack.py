"""ActivationStack: contiguous memory for activations that forward saves and backward uses.

[Note: activation stacks]
Activation checkpoints live from forward to backward, among temporaries that live for one operation. If each were
allocated where a temporary was just freed, they would fragment memory (the paper's M_D). So they are packed into one
allocation that persists across steps: forward pushes them one after another, and backward frees them from the end.
Other orders work too: several forwards before a backward, a loss that is dropped, a graph retained for a second
backward. A gap in the middle is reused.

The size is learned. Whatever does not fit (everything in the first step, a longer sequence later) gets its own chunk.
Once all slots are free, the chunks are freed, and the next push allocates one chunk of the peak size. So old and new
chunks never coexist.

A slot is freed when its last reference is dropped. That can happen at any time, even during a push, so it only records
a pending free. The next push applies the pending frees: the compute stream waits for a side stream that still uses the
bytes. The host waits for such a stream only when a chunk itself is freed, which is rarely needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from zeroshard.memory import MemoryTracker, PinnedBuffer, Pool
from zeroshard.sharding import round_up
from zeroshard.utils.free_list import FreeList

ALIGN_BYTES = 16  # alignment of slots, for copies and collectives


class PoolBuffer:
    """Device memory in its own pool: [Note: separate pool for long-lived tensors] in ``memory/pool.py``.

    The pool is freed together with the memory: a pool that outlives it would keep the segment.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pool = Pool(device)
        with pool:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._pool = pool  # set last, so that it is deleted last


OptionalEvent = torch.Event | None
StackBuffer = PoolBuffer | PinnedBuffer
PendingFree = tuple["StackChunk", int, int, "OptionalEvent"]  # chunk, start, bytes, last use on the side stream


class StackSlot:
    """A range of bytes in a stack. It is freed when the last reference to this object is dropped."""

    __slots__ = ("_chunk", "_last_use", "_pending_frees", "_start", "data")

    def __init__(self, chunk: StackChunk, start: int, nbytes: int, pending_frees: deque[PendingFree]) -> None:
        self.data = chunk.buffer.tensor[start : start + nbytes]
        self._last_use: OptionalEvent = None
        self._chunk, self._start, self._pending_frees = chunk, start, pending_frees

    def set_last_use(self, event: OptionalEvent) -> None:
        """Record that a side stream reads or writes the bytes until ``event``."""
        self._last_use = self._chunk.last_use = event

    def __del__(self) -> None:
        self._pending_frees.append((self._chunk, self._start, self.data.numel(), self._last_use))


class StackChunk:
    """One allocation of a stack, and its free ranges."""

    def __init__(self, buffer: StackBuffer) -> None:
        self.buffer = buffer
        self.nbytes = buffer.tensor.numel()
        self.last_use: OptionalEvent = None  # last use of any byte on the side stream
        self._extents = FreeList()
        self._tracker: MemoryTracker | None = None
        self._tier = ""

    def alloc(self, nbytes: int) -> int | None:
        """Allocate bytes and return their start, or None if no free range is large enough."""
        start = self._extents.alloc(nbytes)
        if self._extents.end <= self.nbytes:
            return start
        self._extents.free(start, nbytes)
        return None

    def free(self, start: int, nbytes: int) -> None:
        self._extents.free(start, nbytes)

    @property
    def is_empty(self) -> bool:
        return self._extents.end == 0

    def set_tracker(self, tracker: MemoryTracker | None, tier: str) -> None:
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
    """A stack of activation slots: see [Note: activation stacks].

    >>> allocate = lambda nbytes: PoolBuffer(nbytes, torch.device("cpu"))
    >>> stack = ActivationStack("device", allocate, wait_event=lambda event: None)
    >>> first, second = stack.push(100), stack.push(50)
    >>> stack.allocated_bytes
    176
    >>> del first, second
    >>> slots = stack.push(100), stack.push(50)  # now packed contiguously
    >>> slots[1].data.data_ptr() - slots[0].data.data_ptr()
    112
    """

    def __init__(
        self, tier: str, allocate: Callable[[int], StackBuffer], wait_event: Callable[[OptionalEvent], None]
    ) -> None:
        self._tier = tier
        self._allocate = allocate
        self._wait_event = wait_event  # makes the compute stream wait
        self._tracker: MemoryTracker | None = None
        self._chunks: list[StackChunk] = []
        self._pending_frees: deque[PendingFree] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0  # peak of _used_bytes
        self._chunk_bytes = 0  # learned size of the single chunk

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all chunks, used or free."""
        self._apply_pending_frees()
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def used_bytes(self) -> int:
        self._apply_pending_frees()
        return self._used_bytes

    def set_tracker(self, tracker: MemoryTracker | None) -> None:
        self._tracker = tracker
        for chunk in self._chunks:
            chunk.set_tracker(tracker, self._tier)

    def push(self, nbytes: int) -> StackSlot:
        """Allocate a slot of ``nbytes`` bytes."""
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
        # empty chunks are too small: free them before allocating
        self._chunks = [chunk for chunk in self._chunks if not chunk.is_empty]
        chunk = StackChunk(self._allocate_buffer(nbytes))
        chunk.set_tracker(self._tracker, self._tier)
        self._chunks.append(chunk)
        return chunk, chunk.alloc(nbytes) or 0

    def _allocate_buffer(self, nbytes: int) -> StackBuffer:
        if not self._chunks and self._chunk_bytes > nbytes:
            try:
                return self._allocate(self._chunk_bytes)
            except torch.OutOfMemoryError:  # no contiguous range of that size: allocate as in the first step
                pass
        return self._allocate(nbytes)

    def _apply_pending_frees(self) -> None:
        """Free the slots that were dropped, and the chunks once no slot is in use."""
        while self._pending_frees:
            chunk, start, nbytes, last_use = self._pending_frees.popleft()
            self._wait_event(last_use)
            length = round_up(nbytes, ALIGN_BYTES)
            chunk.free(start, length)
            self._used_bytes -= length
        if self._used_bytes == 0 and len(self._chunks) > 1:
            is_fragmented = self._peak_bytes <= self._chunk_bytes  # gaps, not size, made an extra chunk necessary
            self._chunk_bytes = sum(chunk.nbytes for chunk in self._chunks) if is_fragmented else self._peak_bytes
            self._chunks.clear()
