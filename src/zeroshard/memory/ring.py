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
    """Buffers taken in turn. Their number bounds what is in flight; their size does not grow with the model.

    They breathe as units do: between backwards their storage is empty, so that they take no part in the peak of the
    loss, while views into them stay valid.
    """

    def __init__(
        self, slots: int, packed: int, reduced: int, dtype: torch.dtype, device: torch.device, ledger: Ledger
    ) -> None:
        self.longest = packed  # elements of the longest bucket that can be packed
        self._ledger = ledger
        self._open = True
        self.slots = [
            Slot(
                index,
                torch.empty(packed, dtype=dtype, device=device),
                torch.empty(reduced, dtype=dtype, device=device),
            )
            for index in range(slots)
        ]
        self._buffers = [buffer for slot in self.slots for buffer in (slot.packed, slot.reduced)]
        self._bytes = sum(buffer.nbytes for buffer in self._buffers)
        self._ledger.add("buckets", self._bytes)
        self._turn = 0

    def open(self) -> None:
        """Allocate the buffers, if they are not there."""
        if not self._open:
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(buffer.nbytes)
            self._ledger.add("buckets", self._bytes)
            self._open = True

    def take(self) -> Slot:
        """Return the slot that has been on its way longest. The caller settles it first."""
        slot = self.slots[self._turn]
        self._turn = (self._turn + 1) % len(self.slots)
        return slot

    @property
    def busy(self) -> bool:
        """Whether a reduction is under way."""
        return any(slot.finish is not None for slot in self.slots)

    def settle(self) -> None:
        """End every reduction under way, the longest first."""
        for slot in self.slots[self._turn :] + self.slots[: self._turn]:
            slot.settle()

    def close(self) -> None:
        """Free the buffers until the next :meth:`open`."""
        if self._open:
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(0)
            self._ledger.add("buckets", -self._bytes)
            self._open = False
