"""Shelf: the few buffers that states on disk are read into, updated in and written from, granule by granule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from zeroshard.host.granule import Granule
from zeroshard.memory.disk import DiskError, Transfer, buffer
from zeroshard.memory.tiers import SLOTS, Tiers


class _Loan:
    """The states of one granule in memory."""

    def __init__(self, granule: Granule, buffers: dict[str, torch.Tensor], tiers: Tiers) -> None:
        self.granule, self.buffers = granule, buffers
        rests = granule.lines
        self.lines = {key: buffers[key][: tensor.nbytes].view(tensor.dtype) for key, tensor in rests.items()}
        self._rests, self._tiers = rests, tiers
        self._transfers: list[Transfer] = [tiers.disk.read(tensor, buffers[key]) for key, tensor in rests.items()]

    def wait(self) -> None:
        """Return when what was started last, the reads or the writes, is over; raise only then."""
        failures: list[DiskError] = []
        for transfer in self._transfers:
            try:
                transfer.wait()
            except DiskError as error:
                failures.append(error)
        self._transfers = []
        if failures:
            raise failures[0]

    def write(self) -> None:
        """Start to write everything back."""
        self._transfers = [self._tiers.disk.write(self.buffers[key], tensor) for key, tensor in self._rests.items()]


class Shelf:
    """While one granule is worked on, the next is read and the one before written. Used by one thread."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._buffers: list[dict[str, torch.Tensor]] = [{} for _ in range(SLOTS)]  # sets, by key
        self._free = list(self._buffers)
        self._read: dict[Granule, _Loan] = {}
        self._written: deque[_Loan] = deque()

    @contextmanager
    def taken(self, granule: Granule, following: list[Granule]) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, the granule's master and states are in memory, by key; what is changed there is written back.

        ``following`` are the granules that the step still has to come to, this one included, which is taken from it.
        The one after it is read meanwhile, though granules may be taken in another order.
        """
        loan = self._read.pop(granule, None) or self._lend(granule)
        after = following.index(granule)
        following.remove(granule)  # read again, it would be kept as it is now until the next step
        if after < len(following) and not self._read:  # one at a time, or the buffers would not do
            self._read[following[after]] = self._lend(following[after])
        loan.wait()
        yield loan.lines
        loan.write()
        self._written.append(loan)

    def finish(self) -> None:
        """Wait for all that is being written."""
        while self._written:
            self._reclaim()

    def forget(self) -> None:
        """After a failure: let what is under way end, and begin anew."""
        for loan in (*self._read.values(), *self._written):
            with suppress(DiskError):
                loan.wait()
        self._read.clear()
        self._written.clear()
        self._free = list(self._buffers)

    def _lend(self, granule: Granule) -> _Loan:
        while not self._free:
            self._reclaim()
        buffers = self._free.pop()
        for key, tensor in granule.lines.items():
            before = buffers[key].nbytes if key in buffers else 0
            if before < tensor.nbytes:
                buffers[key] = buffer(tensor.nbytes)
                self._tiers.count("buckets", buffers[key].nbytes - before)
        return _Loan(granule, buffers, self._tiers)

    def _reclaim(self) -> None:
        """Wait for what has been under way longest, and have its buffers back."""
        self._written[0].wait()
        self._free.append(self._written.popleft().buffers)
