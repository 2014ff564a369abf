"""Extents: which stretches of a file are taken, and where the next one goes. Arithmetic only."""

from __future__ import annotations

from bisect import insort


class FreeList:
    """Stretches of a line that begins at 0 and has no end. A gap is filled before the line grows.

    >>> extents = FreeList()
    >>> a, b, c = extents.alloc(30), extents.alloc(10), extents.alloc(20)
    >>> extents.free(a, 30)
    >>> extents.free(b, 10)
    >>> extents.alloc(40), extents.end  # two gaps that were neighbours are one
    (0, 60)
    """

    def __init__(self) -> None:
        self.end = 0  # bytes: the farthest that is taken
        self._gaps: list[tuple[int, int]] = []  # (first byte, bytes) before the end, in order, never neighbours

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return self.end - sum(nbytes for _, nbytes in self._gaps)

    def alloc(self, nbytes: int) -> int:
        """Return the first byte of a stretch: in the smallest gap that is large enough, or else at the end."""
        fitting = [gap for gap in self._gaps if gap[1] >= nbytes]
        if not fitting:
            self.end += nbytes
            return self.end - nbytes
        start, room = gap = min(fitting, key=lambda gap: (gap[1], gap[0]))
        self._gaps.remove(gap)
        if room > nbytes:
            insort(self._gaps, (start + nbytes, room - nbytes))
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Take a stretch back."""
        stop = start + nbytes
        for gap in list(self._gaps):
            if gap[0] + gap[1] == start:
                start = gap[0]
            elif gap[0] == stop:
                stop += gap[1]
            else:
                continue
            self._gaps.remove(gap)
        if stop == self.end:
            self.end = start
        else:
            insort(self._gaps, (start, stop - start))
