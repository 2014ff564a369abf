"""AllocatorSimulator: where PyTorch's caching allocator would place the requests of a step.

It models only what matters for large tensors: a request is carved from the smallest free block that is large enough,
and the remainder of the block stays free; if there is none, a new segment of the request's size is allocated; adjacent
free blocks are merged. It models one stream and no memory limit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from zeroshard.sharding import round_up

ROUND_LARGE_BYTES = 2 << 20  # segment sizes are multiples of this
LARGE_BUFFER_BYTES = 20 << 20  # size of the segment that requests under half of it share
SMALL_SIZE_BYTES = 1 << 20  # requests up to this size have separate segments
MIN_SPLIT_BYTES = 1 << 20  # smaller remainders are not split off

AllocRequest = tuple[int, int]  # (tensor id, bytes; 0: freed)


class SimulatedBlock:
    """A block of a segment, linked to its neighbours."""

    __slots__ = ("address", "is_free", "nbytes", "next", "prev")

    def __init__(
        self, nbytes: int, address: int, prev: SimulatedBlock | None = None, next: SimulatedBlock | None = None
    ) -> None:
        self.nbytes, self.prev, self.next, self.is_free = nbytes, prev, next, True
        self.address = address  # of blocks of equal size, the lowest is used


class AllocatorSimulator:
    """An allocator without memory.

    >>> simulator = AllocatorSimulator([100 << 20])
    >>> simulator.replay([(1, 60 << 20), (2, 60 << 20), (1, 0), (3, 100 << 20)])  # the 2nd does not fit, the 3rd does
    >>> [size >> 20 for size in simulator.segments]
    [100, 60]
    """

    def __init__(self, segments: Iterable[int] = ()) -> None:
        self.segments: list[int] = []  # bytes
        self.reserved_bytes = 0  # total of all segments
        # Sorted, the smallest first. Addresses are unique, so blocks themselves are never compared.
        self._free_blocks: list[tuple[int, int, SimulatedBlock]] = []
        for size in segments:
            self._insert_free_block(self._new_segment(size))

    def replay(self, requests: Sequence[AllocRequest], max_reserved_bytes: float = math.inf) -> None:
        """Place the requests of a step in order; stop once more than ``max_reserved_bytes`` are reserved."""
        held: dict[int, SimulatedBlock] = {}
        for tensor, nbytes in requests:
            if nbytes:
                held[tensor] = self._allocate(nbytes)
                if self.reserved_bytes > max_reserved_bytes:
                    break
            elif tensor in held:
                self._free_block(held.pop(tensor))
        for block in held.values():
            self._free_block(block)

    def _new_segment(self, nbytes: int) -> SimulatedBlock:
        size = LARGE_BUFFER_BYTES if nbytes < LARGE_BUFFER_BYTES // 2 else round_up(nbytes, ROUND_LARGE_BYTES)
        block = SimulatedBlock(size, self.reserved_bytes)
        self.segments.append(size)
        self.reserved_bytes += size
        return block

    def _allocate(self, nbytes: int) -> SimulatedBlock:
        index = bisect_left(self._free_blocks, (nbytes,))
        block = self._free_blocks.pop(index)[2] if index < len(self._free_blocks) else self._new_segment(nbytes)
        remainder = block.nbytes - nbytes
        if remainder > MIN_SPLIT_BYTES:
            block.nbytes = nbytes
            block.next = SimulatedBlock(remainder, block.address + nbytes, block, block.next)
            if block.next.next is not None:
                block.next.next.prev = block.next
            self._insert_free_block(block.next)
        block.is_free = False
        return block

    def _free_block(self, block: SimulatedBlock) -> None:
        for other in (block.prev, block.next):
            if other is not None and other.is_free:
                del self._free_blocks[bisect_left(self._free_blocks, (other.nbytes, other.address))]
                first, second = (other, block) if other is block.prev else (block, other)
                first.nbytes += second.nbytes
                first.next = second.next
                if second.next is not None:
                    second.next.prev = first
                block = first
        self._insert_free_block(block)

    def _insert_free_block(self, block: SimulatedBlock) -> None:
        block.is_free = True
        insort(self._free_blocks, (block.nbytes, block.address, block))
