"""Shelf: the few buffers that states on disk are read into, updated in and written from, granule by granule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from zeroshard.host.granule import StateChunk
from zeroshard.memory.disk import DiskError, Transfer, aligned_buffer
from zeroshard.memory.tiers import STAGING_SLOTS, TierAllocator


class _StagedChunk:
    """The states of one granule in memory."""

    def __init__(self, chunk: StateChunk, buffers: dict[str, torch.Tensor], tiers: TierAllocator) -> None:
        self.chunk, self.buffers = chunk, buffers
        rests = chunk.tensors
        self.tensors = {key: buffers[key][: tensor.nbytes].view(tensor.dtype) for key, tensor in rests.items()}
        self._disk_tensors, self._tiers = rests, tiers
        self._transfers: list[Transfer] = [tiers.disk.start_read(tensor, buffers[key]) for key, tensor in rests.items()]

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

    def start_write_back(self) -> None:
        """Start to write everything back."""
        self._transfers = [
            self._tiers.disk.start_write(self.buffers[key], tensor) for key, tensor in self._disk_tensors.items()
        ]


class DiskStaging:
    """While one granule is worked on, the next is read and the one before written. Used by one thread."""

    def __init__(self, tiers: TierAllocator) -> None:
        self._tiers = tiers
        self._buffer_sets: list[dict[str, torch.Tensor]] = [{} for _ in range(STAGING_SLOTS)]  # sets, by key
        self._free_buffer_sets = list(self._buffer_sets)
        self._reading: dict[StateChunk, _StagedChunk] = {}
        self._writing: deque[_StagedChunk] = deque()

    @contextmanager
    def staged(self, chunk: StateChunk, upcoming: list[StateChunk]) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, the granule's master and states are in memory, by key; what is changed there is written back.

        ``following`` are the granules that the step still has to come to, this one included, which is taken from it.
        The one after it is read meanwhile, though granules may be taken in another order.
        """
        loan = self._reading.pop(chunk, None) or self._start_read(chunk)
        after = upcoming.index(chunk)
        upcoming.remove(chunk)  # read again, it would be kept as it is now until the next step
        if after < len(upcoming) and not self._reading:  # one at a time, or the buffers would not do
            self._reading[upcoming[after]] = self._start_read(upcoming[after])
        loan.wait()
        yield loan.tensors
        loan.start_write_back()
        self._writing.append(loan)

    def wait_writes(self) -> None:
        """Wait for all that is being written."""
        while self._writing:
            self._wait_oldest_write()

    def reset(self) -> None:
        """After a failure: let what is under way end, and begin anew."""
        for loan in (*self._reading.values(), *self._writing):
            with suppress(DiskError):
                loan.wait()
        self._reading.clear()
        self._writing.clear()
        self._free_buffer_sets = list(self._buffer_sets)

    def _start_read(self, chunk: StateChunk) -> _StagedChunk:
        while not self._free_buffer_sets:
            self._wait_oldest_write()
        buffers = self._free_buffer_sets.pop()
        for key, tensor in chunk.tensors.items():
            before = buffers[key].nbytes if key in buffers else 0
            if before < tensor.nbytes:
                buffers[key] = aligned_buffer(tensor.nbytes)
                self._tiers.track_host_bytes("buckets", buffers[key].nbytes - before)
        return _StagedChunk(chunk, buffers, self._tiers)

    def _wait_oldest_write(self) -> None:
        """Wait for what has been under way longest, and have its buffers back."""
        self._writing[0].wait()
        self._free_buffer_sets.append(self._writing.popleft().buffers)
