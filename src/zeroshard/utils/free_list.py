"""FreeList: allocates extents of a range of bytes."""

from __future__ import annotations

from bisect import insort


class FreeList:
    """Allocates extents of a range that starts at 0 and grows without limit. A free extent is reused before it grows.

    >>> free_list = FreeList()
    >>> a, b, c = free_list.alloc(30), free_list.alloc(10), free_list.alloc(20)
    >>> free_list.free(a, 30)
    >>> free_list.free(b, 10)
    >>> free_list.alloc(40), free_list.end  # adjacent free extents are merged
    (0, 60)
    """

    def __init__(self) -> None:
        self.end = 0  # bytes: end of the last allocated extent
        self._gaps: list[tuple[int, int]] = []  # free extents before the end: (offset, bytes), sorted, never adjacent

    @property
    def used_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.end - sum(nbytes for _, nbytes in self._gaps)

    def alloc(self, nbytes: int) -> int:
        """Return the offset of a new extent: in the smallest free extent that is large enough, else at the end."""
        fitting = [gap for gap in self._gaps if gap[1] >= nbytes]
        if not fitting:
            self.end += nbytes
            return self.end - nbytes
        start, gap_bytes = gap = min(fitting, key=lambda gap: (gap[1], gap[0]))
        self._gaps.remove(gap)
        if gap_bytes > nbytes:
            insort(self._gaps, (start + nbytes, gap_bytes - nbytes))
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Free an extent and merge it with adjacent free extents."""
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
