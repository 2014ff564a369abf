"""Ring: the few fixed buffers gradients travel through on their way to the owners (the paper's C_B)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zeroshard.memory.ledger import Ledger


@dataclass
class Slot:
    """One buffer of the ring: a packed bucket, this rank's reduced part of it, and how to end what is under way."""

    index: int
    packed: torch.Tensor  # [bucket]
    reduced: torch.Tensor  # [bucket / ranks]
    finish: Callable[[], None] | None = None

    def settle(self) -> None:
        """End the reduction under way, if there is one."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


class Ring:
    """Buffers taken in turn. Their number bounds what is in flight; their size does not grow with the model."""

    def __init__(
        self, slots: int, numel: int, parts: int, dtype: torch.dtype, device: torch.device, ledger: Ledger
    ) -> None:
        self.slots = [
            Slot(index, torch.zeros(numel, dtype=dtype, device=device), torch.zeros(numel // parts, dtype=dtype, device=device))
            for index in range(slots)
        ]
        ledger.add("buckets", sum(slot.packed.nbytes + slot.reduced.nbytes for slot in self.slots))
        self._turn = 0

    def in_turn(self) -> list[Slot]:
        """Return all slots, the one that has been on its way longest first."""
        return self.slots[self._turn :] + self.slots[: self._turn]

    def take(self) -> Slot:
        """Return the slot that has been on its way longest. The caller settles it first."""
        slot = self.slots[self._turn]
        self._turn = (self._turn + 1) % len(self.slots)
        return slot
