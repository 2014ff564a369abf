"""Arena: one contiguous allocation that long-lived tensors are placed in, once (the paper's M_D)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool


class Arena:
    """Hands out neighbouring parts of one tensor.

    Neighbours can be joined again into one view, so that an optimizer step over the shards of many units is one fused
    kernel. ``apart``: in the pool, else in the model's memory.

    >>> arena = Arena("parameters", 8, torch.float32, Pool(torch.device("cpu")), Ledger())
    >>> a, b = arena.take(3), arena.take(5)
    >>> arena.tensor.numel() == a.numel() + b.numel()
    True

    It breathes where it is told to: closed it takes no memory, and what was handed out is valid again, with any values,
    once it is open.

    >>> arena.close()
    >>> arena.open()
    >>> a.zero_()
    tensor([0., 0., 0.])
    """

    def __init__(
        self, kind: str, numel: int, dtype: torch.dtype, pool: Pool, ledger: Ledger, apart: bool = True
    ) -> None:
        self._kind, self._pool, self._ledger, self._apart = kind, pool, ledger, apart
        with self._memory(numel * dtype.itemsize):
            self.tensor = torch.zeros(numel, dtype=dtype, device=pool.device)  # zeros: alignment must hold no NaN
        self._taken = 0
        self._open = True
        ledger.add(kind, self.tensor.nbytes)

    def take(self, numel: int) -> torch.Tensor:
        """Return the next ``numel`` elements."""
        if self._taken + numel > self.tensor.numel():
            raise ValueError(f"the arena holds {self.tensor.numel()} elements, {self._taken + numel} were asked for")
        part = self.tensor[self._taken : self._taken + numel]
        self._taken += numel
        return part

    def open(self) -> None:
        """Take memory, if there is none."""
        if not self._open:
            with self._memory(self.tensor.nbytes):
                self.tensor.untyped_storage().resize_(self.tensor.nbytes)
            self._ledger.add(self._kind, self.tensor.nbytes)
            self._open = True

    def close(self) -> None:
        """Give the memory back until the next :meth:`open`. Nobody may look at what was handed out meanwhile."""
        if self._open:
            self.tensor.untyped_storage().resize_(0)
        self.drop()

    def drop(self) -> None:
        """Count the memory no longer: it belongs to whoever was given a part of it."""
        if self._open:
            self._ledger.add(self._kind, -self.tensor.nbytes)
            self._open = False

    def move_apart(self) -> None:
        """Move what is there into the pool, for good, if there is room. Parts that were handed out go with it."""
        if self._apart or not self._open or self._pool.device.type != "cuda":
            self._apart = True
            return
        try:
            values = self.tensor.clone()
        except torch.OutOfMemoryError:
            return
        self.close()
        self._apart = True
        try:
            self.open()
        except torch.OutOfMemoryError:
            self._apart = False
            self.open()
        self.tensor.copy_(values)

    def _memory(self, nbytes: int) -> AbstractContextManager[object]:
        """Where so many bytes are to be taken."""
        if self._apart:
            self._pool.make_room([nbytes])
        return self._pool if self._apart else nullcontext()
