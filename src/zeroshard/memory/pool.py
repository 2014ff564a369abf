"""Pool: device memory for the library's long-lived tensors, apart from the model's short-lived ones (M_D).

[Note: memory apart]
PyTorch's allocator hands out parts of large segments. Where tensors that stay (an activation checkpoint, an optimizer
state made in the first step, cuBLAS's workspace) take turns in one segment with the model's temporaries, they are left
standing in the middle of it, and the next large temporary (the logits) needs a new segment although most of the old one
is free. So what is there when the loss is computed is placed in a pool of its own: the model's segments are whole again
by then. What comes and goes within a forward or a backward (gathered units, the ring) stays in the model's memory,
which has room: kept apart, it took 0.4 GB more of 6.3 (GPT 7.6B, batch 4, one rank of 64 on an H200).

The pool is the allocator's own (``torch.cuda.MemPool``): its counts go on being right, and when memory runs out it may
still be used for anything. On the CPU, where the system's allocator has no such trouble, it is nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


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

    def renew(self) -> None:
        """Begin anew: what was taken before goes back to the device when nobody uses it any more."""
        if self._pool is not None:
            self._pool = torch.cuda.MemPool(use_on_oom=True)
            torch.cuda.empty_cache()
