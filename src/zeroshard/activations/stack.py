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

from zeroshard.layout import round_up
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.room import Room

ALIGN = 16  # bytes: what copies and collectives like to begin at

Event = torch.Event | None
Note = tuple["Chunk", int, int, "Event"]  # where from, start, bytes, what still reads or writes it


class Slot:
    """Some bytes of a stack, until the last reference to this object goes."""

    __slots__ = ("_busy", "_chunk", "_notes", "_start", "bytes")

    def __init__(self, chunk: Chunk, start: int, nbytes: int, notes: deque[Note]) -> None:
        self.bytes = chunk.room.tensor[start : start + nbytes]
        self._busy: Event = None
        self._chunk, self._start, self._notes = chunk, start, notes

    def used_until(self, event: Event) -> None:
        """A side stream reads or writes the bytes until ``event``."""
        self._busy = self._chunk.busy = event

    def __del__(self) -> None:
        self._notes.append((self._chunk, self._start, self.bytes.numel(), self._busy))


class Chunk:
    """One allocation of a stack, and which of its bytes are free."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.nbytes = room.tensor.numel()
        self.busy: Event = None  # the last use of any of its bytes on the side stream
        self._free = [(0, self.nbytes)]  # [start, end), in order, never touching
        self._ledger: Ledger | None = None
        self._tier = ""

    def take(self, nbytes: int) -> int | None:
        """Take the first bytes that are free and enough; return where they start, None where there are none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[index : index + 1] = [(start + nbytes, end)] if start + nbytes < end else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take bytes back."""
        end = start + nbytes
        index = bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))

    @property
    def empty(self) -> bool:
        """Whether nothing is in it."""
        return self._free == [(0, self.nbytes)]

    def charge(self, ledger: Ledger | None, tier: str) -> None:
        """Count it in a ledger, and no more in the one before."""
        if ledger is not self._ledger:
            self._count(-self.nbytes)
            self._ledger, self._tier = ledger, tier
            self._count(self.nbytes)

    def _count(self, nbytes: int) -> None:
        if self._ledger is not None:
            self._ledger.add("activations", nbytes, self._tier)

    def __del__(self) -> None:
        self._count(-self.nbytes)
        if self.busy is not None:
            self.busy.synchronize()


class Stack:
    """Memory that slots are pushed on: see [Note: stacks].

    >>> stack = Stack("device", lambda nbytes: Room(nbytes, torch.device("cpu")), join=lambda event: None)
    >>> first, second = stack.push(100), stack.push(50)
    >>> stack.held
    176
    >>> del first, second
    >>> slots = stack.push(100), stack.push(50)  # side by side from now on
    >>> slots[1].bytes.data_ptr() - slots[0].bytes.data_ptr()
    112
    """

    def __init__(self, tier: str, allocate: Callable[[int], Room], join: Callable[[Event], None]) -> None:
        self._tier = tier
        self._allocate = allocate
        self._join = join  # makes the compute stream wait
        self._ledger: Ledger | None = None
        self._chunks: list[Chunk] = []
        self._notes: deque[Note] = deque()
        self._used = 0  # bytes
        self._most = 0  # bytes that were used at once
        self._size = 0  # bytes of the one chunk that all is placed in

    @property
    def held(self) -> int:
        """Bytes allocated."""
        self._settle()
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def used(self) -> int:
        """Bytes in use."""
        self._settle()
        return self._used

    def charge(self, ledger: Ledger | None) -> None:
        """Count what is allocated in a ledger."""
        self._ledger = ledger
        for chunk in self._chunks:
            chunk.charge(ledger, self._tier)

    def push(self, nbytes: int) -> Slot:
        """Place so many bytes."""
        self._settle()
        length = round_up(nbytes, ALIGN)
        chunk, start = self._find(length) or self._grow(length)
        self._used += length
        self._most = max(self._most, self._used)
        return Slot(chunk, start, nbytes, self._notes)

    def _find(self, nbytes: int) -> tuple[Chunk, int] | None:
        for chunk in self._chunks:
            start = chunk.take(nbytes)
            if start is not None:
                return chunk, start
        return None

    def _grow(self, nbytes: int) -> tuple[Chunk, int]:
        self._chunks = [chunk for chunk in self._chunks if not chunk.empty]  # what is free is too small: it goes first
        chunk = Chunk(self._room(nbytes))
        chunk.charge(self._ledger, self._tier)
        self._chunks.append(chunk)
        return chunk, chunk.take(nbytes) or 0

    def _room(self, nbytes: int) -> Room:
        if not self._chunks and self._size > nbytes:
            try:
                return self._allocate(self._size)
            except torch.OutOfMemoryError:  # there is no such piece left: as in the first step, then
                pass
        return self._allocate(nbytes)

    def _settle(self) -> None:
        """Take back what was let go of."""
        while self._notes:
            chunk, start, nbytes, busy = self._notes.popleft()
            self._join(busy)
            length = round_up(nbytes, ALIGN)
            chunk.give(start, length)
            self._used -= length
        if self._used == 0 and len(self._chunks) > 1:
            gaps = self._most <= self._size  # it did not fit though it was not too much
            self._size = sum(chunk.nbytes for chunk in self._chunks) if gaps else self._most
            self._chunks.clear()
