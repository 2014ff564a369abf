"""Rehearsal: where PyTorch's caching allocator would place the requests of a step, found out on paper.

Only what matters for large tensors is modelled: a request is carved from the smallest free block that is large enough,
and what is left of the block stays free; where there is none, a segment is taken, as large as the request; neighbours
that are free are one block again. Memory of one stream, no limit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

UNIT = 2 << 20  # bytes: segments are multiples of it
SHARED = 20 << 20  # bytes: the segment that requests under half of it share
SMALL = 1 << 20  # bytes: requests of so many, or fewer, have segments of their own
REST = 1 << 20  # bytes: less than this is not split off

Request = tuple[int, int]  # (which tensor, its bytes; 0: it is freed)


class Block:
    """A stretch of a segment, between its neighbours."""

    __slots__ = ("after", "before", "free", "nbytes", "place")

    def __init__(self, nbytes: int, place: int, before: Block | None = None, after: Block | None = None) -> None:
        self.nbytes, self.before, self.after, self.free = nbytes, before, after, True
        self.place = place  # address: of blocks of one size, the lowest is taken


class Rehearsal:
    """An allocator without memory.

    >>> rehearsal = Rehearsal([100 << 20])
    >>> rehearsal.play([(1, 60 << 20), (2, 60 << 20), (1, 0), (3, 100 << 20)])  # the 2nd does not fit, the 3rd does
    >>> [size >> 20 for size in rehearsal.segments]
    [100, 60]
    """

    def __init__(self, segments: Iterable[int] = ()) -> None:
        self.segments: list[int] = []  # bytes
        self.reserved = 0  # bytes of all of them
        # The smallest first. No two have a place in common, so blocks themselves are never compared.
        self._free: list[tuple[int, int, Block]] = []
        for size in segments:
            self._insert(self._segment(size))

    def play(self, requests: Sequence[Request], most: float = math.inf) -> None:
        """Place a step's requests, one after the other, or the first of them, until more than ``most`` is reserved."""
        held: dict[int, Block] = {}
        for tensor, nbytes in requests:
            if nbytes:
                held[tensor] = self._take(nbytes)
                if self.reserved > most:
                    break
            elif tensor in held:
                self._give(held.pop(tensor))
        for block in held.values():
            self._give(block)

    def _segment(self, nbytes: int) -> Block:
        size = SHARED if nbytes < SHARED // 2 else -(-nbytes // UNIT) * UNIT
        block = Block(size, self.reserved)
        self.segments.append(size)
        self.reserved += size
        return block

    def _take(self, nbytes: int) -> Block:
        place = bisect_left(self._free, (nbytes,))
        block = self._free.pop(place)[2] if place < len(self._free) else self._segment(nbytes)
        rest = block.nbytes - nbytes
        if rest > REST:
            block.nbytes = nbytes
            block.after = Block(rest, block.place + nbytes, block, block.after)
            if block.after.after is not None:
                block.after.after.before = block.after
            self._insert(block.after)
        block.free = False
        return block

    def _give(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is not None and other.free:
                del self._free[bisect_left(self._free, (other.nbytes, other.place))]
                first, second = (other, block) if other is block.before else (block, other)
                first.nbytes += second.nbytes
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._insert(block)

    def _insert(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.nbytes, block.place, block))
