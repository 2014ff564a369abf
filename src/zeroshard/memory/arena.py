"""Arena: one contiguous allocation that long-lived tensors are placed in, once (the paper's M_D)."""

from __future__ import annotations

import torch

from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool


class Arena:
    """Hands out neighbouring parts of one tensor.

    Neighbours can be joined again into one view, so that an optimizer step over the shards of many units is one fused
    kernel.

    >>> arena = Arena("parameters", 8, torch.float32, Pool(torch.device("cpu")), Ledger())
    >>> a, b = arena.take(3), arena.take(5)
    >>> arena.tensor.numel() == a.numel() + b.numel()
    True
    """

    def __init__(self, kind: str, numel: int, dtype: torch.dtype, pool: Pool, ledger: Ledger) -> None:
        with pool:
            self.tensor = torch.zeros(numel, dtype=dtype, device=pool.device)  # zeros: alignment must hold no NaN
        self._taken = 0
        ledger.add(kind, self.tensor.nbytes)

    def take(self, numel: int) -> torch.Tensor:
        """Return the next ``numel`` elements."""
        if self._taken + numel > self.tensor.numel():
            raise ValueError(f"the arena holds {self.tensor.numel()} elements, {self._taken + numel} were asked for")
        part = self.tensor[self._taken : self._taken + numel]
        self._taken += numel
        return part
