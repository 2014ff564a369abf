"""Arena: one contiguous allocation for long-lived tensors, each placed once (the paper's M_D)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.memory.pool import Pool
from zeroshard.memory.tracker import MemoryTracker


class Arena:
    """Allocates consecutive ranges of one tensor.

    Adjacent ranges can be viewed as one tensor, so that one fused kernel steps the shards of many units. ``in_pool``:
    allocate in the separate pool, else in the default pool.

    >>> arena = Arena("parameters", 8, torch.float32, Pool(torch.device("cpu")), MemoryTracker())
    >>> a, b = arena.allocate(3), arena.allocate(5)
    >>> arena.tensor.numel() == a.numel() + b.numel()
    True

    Its storage can be freed and allocated again: the ranges become valid again, with undefined values.

    >>> arena.free_storage()
    >>> arena.alloc_storage()
    >>> a.zero_()
    tensor([0., 0., 0.])
    """

    def __init__(
        self, kind: str, numel: int, dtype: torch.dtype, pool: Pool, tracker: MemoryTracker, in_pool: bool = True
    ) -> None:
        self._kind, self._pool, self._tracker, self._is_in_pool = kind, pool, tracker, in_pool
        with self._allocation_context(numel * dtype.itemsize):
            self.tensor = torch.zeros(numel, dtype=dtype, device=pool.device)  # zeros: padding must not contain NaN
        self._allocated_numel = 0
        self._has_storage = True
        tracker.add(kind, self.tensor.nbytes)

    def allocate(self, numel: int) -> torch.Tensor:
        """Return the next ``numel`` elements."""
        if self._allocated_numel + numel > self.tensor.numel():
            raise ValueError(
                f"the arena has {self.tensor.numel()} elements, but {self._allocated_numel + numel} were requested"
            )
        view = self.tensor[self._allocated_numel : self._allocated_numel + numel]
        self._allocated_numel += numel
        return view

    def alloc_storage(self) -> None:
        """Allocate the storage, if there is none."""
        if not self._has_storage:
            with self._allocation_context(self.tensor.nbytes):
                self.tensor.untyped_storage().resize_(self.tensor.nbytes)
            self._tracker.add(self._kind, self.tensor.nbytes)
            self._has_storage = True

    def free_storage(self) -> None:
        """Free the storage until the next :meth:`alloc_storage`. Until then no range may be accessed."""
        if self._has_storage:
            self.tensor.untyped_storage().resize_(0)
        self.disown()

    def disown(self) -> None:
        """Stop tracking the memory: it now belongs to the holders of its ranges."""
        if self._has_storage:
            self._tracker.add(self._kind, -self.tensor.nbytes)
            self._has_storage = False

    def move_to_pool(self) -> None:
        """Move the tensor into the pool permanently, if memory allows. Ranges already returned move with it."""
        if self._is_in_pool or not self._has_storage or self._pool.device.type != "cuda":
            self._is_in_pool = True
            return
        try:
            values = self.tensor.clone()
        except torch.OutOfMemoryError:
            return
        self.free_storage()
        self._is_in_pool = True
        try:
            self.alloc_storage()
        except torch.OutOfMemoryError:
            self._is_in_pool = False
            self.alloc_storage()
        self.tensor.copy_(values)

    def _allocation_context(self, nbytes: int) -> AbstractContextManager[object]:
        if self._is_in_pool:
            self._pool.reserve([nbytes])
        return self._pool if self._is_in_pool else nullcontext()
