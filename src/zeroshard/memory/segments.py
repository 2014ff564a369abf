"""Segments: which pieces of device memory the model's temporaries are carved from (the paper's M_D).

[Note: the largest first]
PyTorch's allocator takes memory from the device in segments, each as large as the request that needed it, and carves
later, smaller requests from segments that are free. A step asks for its small temporaries first (a block's) and for its
largest last (the loss's): each of these then gets a segment of its own, beside all the small ones, which are free and
of no use by then. Were the large ones there first, the small ones would be carved from them.

So once a few steps have shown which segments the model needs, the cache is emptied and the largest are made before the
others. How many of them is best depends on which are in use together, which the allocator does not tell; so a few sets
of them are tried, for one step each, and the one that took least memory is kept. This rearranges memory that the model
has used anyway: it never asks for more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

LARGE = 20 << 20  # bytes; smaller requests share segments of this size
TRIALS = 12  # steps that are spent on finding the best order, at most
WARM_UP = 2  # steps before the model's needs are looked at: optimizer states are made in the first


class Segments:
    """Watches the segments of one model's temporaries, one training forward after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._course: Iterator[None] | None = self._learn()
        self._first: list[int] = []  # sizes of the segments that are made first
        self._reserved = 0  # bytes the allocator had when this was last looked at

    def begin(self) -> None:
        """A training forward begins: what the one before has used is known."""
        if self._course is not None:
            if next(self._course, self) is self:  # learnt
                self._course = None
        elif self._now() < 0.9 * self._reserved:  # somebody has emptied the cache
            self._lay(self._first)
        self._reserved = self._now()

    def _learn(self) -> Iterator[None]:
        """See [Note: the largest first]. Between two yields lie a forward and its backward."""
        for _ in range(WARM_UP):
            yield
        self._lay([])
        yield
        least = self._now()
        for sizes in self._choices():
            laid = self._lay(sizes)
            if laid >= least:  # and so are all that follow
                break
            yield
            if self._now() < least:
                least, self._first = self._now(), sizes
        self._lay(self._first)

    def _choices(self) -> list[list[int]]:
        """Sets of sizes to try, the least first: all down to some size, and perhaps one for what is left standing."""
        snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        found = [segment["total_size"] for segment in snapshot if self._is_free(segment)]
        sizes = sorted((size for size in found if size > LARGE), reverse=True)
        distinct = list(dict.fromkeys(sizes))
        largest = [[size for size in sizes if size >= least] for least in distinct]
        with_one = [[*first, size] for first in largest[:2] for size in distinct if size < first[-1]]
        choices = sorted(largest + with_one, key=sum)
        return [choice for choice in choices if sum(choice) < sum(sizes)][:TRIALS]

    def _is_free(self, segment: dict[str, object]) -> bool:
        of_model = tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)  # type: ignore[arg-type]
        return of_model and segment["device"] == self._device.index and segment["allocated_size"] == 0

    def _lay(self, sizes: list[int]) -> int:
        """Empty the cache, then make segments of these sizes, and leave them free; returns the bytes reserved then."""
        torch.cuda.empty_cache()
        try:
            made = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
            del made
        except torch.OutOfMemoryError:  # others have taken the memory meanwhile
            torch.cuda.empty_cache()
        return self._now()

    def _now(self) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved: int = stats["reserved_bytes"]["all"]["current"]
        return reserved
