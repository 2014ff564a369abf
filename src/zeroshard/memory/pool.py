"""Pool: device memory for the library's long-lived tensors, apart from the model's short-lived ones (M_D).

[Note: memory apart]
PyTorch's allocator hands out parts of large segments. Where tensors that stay (an activation checkpoint, an optimizer
state made in the first step, cuBLAS's workspace) take turns in one segment with the model's temporaries, they are left
standing in the middle of it, and the next large temporary (the logits) needs a new segment although most of the old one
is free. So what is there when the loss is computed is placed in a pool of its own: the model's segments are whole again
by then. What comes and goes within a forward or a backward (gathered units, the ring) stays in the model's memory,
which has room: kept apart, it took 0.4 GB more of 6.3 (GPT 7.6B, batch 4, one rank of 64 on an H200).

[Note: one segment for several]
A tensor of 10 MiB or more gets a segment of its own, rounded up to 2 MiB; smaller ones share segments of 20 MiB, and
those up to 1 MiB such of 2 MiB. What is placed in a pool stays, so what is over stays over. Where several tensors
follow each other, as optimizer states do, room is made for all of them first: one segment, as large as they are
together or of 10 MiB, from which the allocator then carves them.

The pool is the allocator's own (``torch.cuda.MemPool``): its counts go on being right, and when memory runs out it may
still be used for anything. On the CPU, where the system's allocator has no such trouble, it is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from zeroshard.memory.allocator.simulator import LARGE_BUFFER_BYTES, SMALL_SIZE_BYTES
from zeroshard.sharding.layout import round_up

MIN_LARGE_ALLOC_BYTES = LARGE_BUFFER_BYTES // 2  # bytes: the least that has a segment of its size
MIN_BLOCK_BYTES = 512  # bytes: tensors are rounded up to these


def segment_bytes_for(sizes: Iterable[int]) -> int:
    """Bytes of one segment for tensors of these bytes: see [Note: one segment for several]; 0 where it needs none.

    >>> segment_bytes_for([3 << 20, 3 << 20]) >> 20, segment_bytes_for([7 << 20, 1 << 20, (8 << 20) - 4]) >> 20
    (10, 15)
    >>> segment_bytes_for([1000, 1000]), segment_bytes_for([30 << 20])
    (0, 0)
    """
    large = [round_up(size, MIN_BLOCK_BYTES) for size in sizes if size > SMALL_SIZE_BYTES]
    if not large or large[0] == sum(large) >= MIN_LARGE_ALLOC_BYTES:
        return 0
    return max(sum(large), MIN_LARGE_ALLOC_BYTES)


class Pool:
    """Inside ``with pool:``, this thread's device memory comes from the pool.

    >>> with Pool(torch.device("cpu")):
    ...     torch.zeros(1)
    tensor([0.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = torch.cuda.MemPool(use_on_oom=True) if device.type == "cuda" else None
        self._guards: list[Any] = []

    def __enter__(self) -> Pool:
        if self._pool is not None:
            guard = torch.cuda.use_mem_pool(self._pool, self.device)
            guard.__enter__()
            self._guards.append(guard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._guards.pop().__exit__(kind, error, trace)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Tensors of these bytes come next: see [Note: one segment for several]."""
        room = segment_bytes_for(sizes) if self._pool is not None else 0
        if room:
            with self, suppress(torch.OutOfMemoryError):  # each may still find a place
                torch.empty(room, dtype=torch.uint8, device=self.device)

    def reset(self) -> None:
        """Begin anew: what was taken before goes back to the device when nobody uses it any more."""
        if self._pool is not None:
            self._pool = torch.cuda.MemPool(use_on_oom=True)
            torch.cuda.empty_cache()
