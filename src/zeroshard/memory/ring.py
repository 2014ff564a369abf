"""Ring: the few fixed buffers gradients travel through on their way to the owners (the paper's C_B)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from zeroshard.memory.ledger import Ledger

STEP = 4  # a buffer is at most so many times as long as what it is taken for


def buffer_lengths(buckets: Iterable[int]) -> list[int]:
    """Lengths of buffers for buckets of these: the longest, the longest of at most a quarter of it, and so on.

    >>> buffer_lengths([100, 30, 26, 25, 7, 6, 1])
    [100, 25, 6, 1]
    """
    lengths: list[int] = []
    for length in sorted(set(buckets), reverse=True):
        if not lengths or length * STEP <= lengths[-1]:
            lengths.append(length)
    return lengths


class Buffers:
    """One buffer of each of a few lengths, which has memory from when it is wanted until all are closed.

    While it has none, views into it stay valid.
    """

    def __init__(self, lengths: Iterable[int], dtype: torch.dtype, device: torch.device, ledger: Ledger) -> None:
        self._lengths = sorted(lengths)
        self._dtype, self._device, self._ledger = dtype, device, ledger
        self._made: dict[int, torch.Tensor] = {}  # by length
        self._open: dict[int, torch.Tensor] = {}

    def open(self, numel: int) -> None:
        """Have memory for so many elements."""
        length = self._length(numel)
        if length in self._open:
            return
        buffer = self._made.get(length)
        if buffer is None:
            buffer = self._made[length] = torch.empty(length, dtype=self._dtype, device=self._device)
        else:
            buffer.untyped_storage().resize_(buffer.nbytes)
        self._open[length] = buffer
        self._ledger.add("buckets", buffer.nbytes)

    def first(self, numel: int) -> torch.Tensor:
        """So many elements of the buffer that was opened for them."""
        return self._open[self._length(numel)][:numel]

    @property
    def is_open(self) -> bool:
        """Whether any has memory."""
        return bool(self._open)

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self._open.values():
            buffer.untyped_storage().resize_(0)
            self._ledger.add("buckets", -buffer.nbytes)
        self._open.clear()

    def _length(self, numel: int) -> int:
        """Of the shortest buffer that has so many elements."""
        return next(length for length in self._lengths if length >= numel)


@dataclass
class Slot:
    """A place in the ring, for one reduction at a time."""

    index: int
    packed: Buffers  # for a bucket
    reduced: Buffers  # for this rank's part of it
    finish: Callable[[], None] | None = None  # ends what is under way

    def settle(self) -> None:
        """End the reduction under way, if there is one."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


class Ring:
    """Slots taken in turn. Their number bounds what is in flight; their size does not grow with the model.

    [Note: buffers of a ring]
    They breathe as units do: between backwards they have no memory, so that they take no part in the peak of the loss.
    A backward's first reductions are often of a small head, beside all the activations there are; so a slot has buffers
    of a few lengths, each of which gets memory in a backward when it is first wanted. Together they have at most a
    third more than the longest.
    """

    def __init__(
        self,
        slots: int,
        packed: Collection[int],
        reduced: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        self.slots = [
            Slot(index, Buffers(packed, dtype, device, ledger), Buffers(reduced, dtype, device, ledger))
            for index in range(slots)
        ]
        self._turn = 0

    def take(self) -> Slot:
        """Return the next slot. Who uses it ends what is under way there first."""
        slot = self.slots[self._turn]
        self._turn = (self._turn + 1) % len(self.slots)
        return slot

    @property
    def busy(self) -> bool:
        """Whether a reduction is under way, or buffers are open for one."""
        return any(slot.finish is not None or slot.packed.is_open or slot.reduced.is_open for slot in self.slots)

    def settle(self) -> None:
        """End every reduction under way, the longest first."""
        for slot in self.slots[self._turn :] + self.slots[: self._turn]:
            slot.settle()

    def close(self) -> None:
        """Give the buffers' memory back, until they are wanted again."""
        for slot in self.slots:
            slot.packed.close()
            slot.reduced.close()
