"""Away: all states of a model in host memory for a while, and back where they were, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroshard.memory.tiers import Tiers


class Away:
    """Empties the storages of tensors, and fills them again.

    Tensors that view a storage go on doing so: nobody who holds one has to be told.

    >>> from zeroshard.memory.ledger import Ledger
    >>> line = torch.arange(4.0)
    >>> view = line[2:]
    >>> away = Away([line, view], Tiers(None, torch.device("cpu"), Ledger()))
    >>> line.untyped_storage().nbytes()
    0
    >>> away.back()
    >>> view
    tensor([2., 3.])
    """

    def __init__(self, tensors: Iterable[torch.Tensor], tiers: Tiers) -> None:
        self._tiers = tiers
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        storages = {t.untyped_storage().data_ptr(): (t.untyped_storage(), t.device) for t in tensors if t.numel()}
        try:
            for storage, device in storages.values():
                kept = tiers.borrow(storage.nbytes())
                kept.copy_(_line(storage, device), non_blocking=True)
                self._kept.append((storage, kept))
        except BaseException:
            self._return()
            raise
        if any(device.type == "cuda" for _, device in storages.values()):
            torch.cuda.synchronize()
        for storage, _ in self._kept:
            storage.resize_(0)

    def back(self) -> None:
        """Bring everything back."""
        for storage, kept in self._kept:
            storage.resize_(kept.nbytes)
            _line(storage, storage.device).copy_(kept, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            torch.cuda.synchronize()
        self._return()

    def _return(self) -> None:
        for _, kept in self._kept:
            self._tiers.give_back(kept)
        self._kept = []


def _line(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
