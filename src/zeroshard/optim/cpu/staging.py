"""Desk: how updates on the host get at gradients, and send new parameters away."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from zeroshard.engine.gradients import Gradients
from zeroshard.memory.disk.disk import DiskError, Transfer, aligned_buffer
from zeroshard.memory.streams import record_blocking_event
from zeroshard.memory.tier_allocator import STAGING_SLOTS, TierAllocator
from zeroshard.optim.cpu.chunk import StateChunk
from zeroshard.optim.slices import OptimizerSlice


class StagingSlot:
    """A buffer that new parameters of one granule wait in until the device has fetched them."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.copy_done: torch.cuda.Event | None = None  # when the last copy from it is over

    def param_view(self, chunk: StateChunk) -> torch.Tensor:
        """The buffer, as the granule's parameters in computation."""
        return self._buffer[: chunk.numel * chunk.flat.dtype.itemsize].view(chunk.flat.dtype)


class PinnedStaging:
    """On a GPU a few pinned buffers and two streams; where the device is the host itself, nothing.

    ``now`` is everywhere the moment of the step: before it, the device may still read the old parameters.
    """

    def __init__(self, device: torch.device, tiers: TierAllocator, chunks: Iterable[StateChunk]) -> None:
        self._device, self._tiers = device, tiers
        self._is_cuda = device.type == "cuda"
        # Two, since what is sent waits for the step on the device, and what is fetched before it must not.
        self._h2d_stream = _new_stream(device)
        self._d2h_stream = _new_stream(device)
        found = list(chunks)
        self._slot_bytes = max((g.numel * g.flat.dtype.itemsize for g in found), default=0)
        self._max_chunk_numel = max((g.numel for g in found), default=0)
        self._slots: list[StagingSlot] = []
        self._next_slot = 0
        self._grad_buffer: torch.Tensor | None = None

    def record_event(self) -> torch.cuda.Event | None:
        """The present moment of this thread's stream."""
        return record_blocking_event(torch.cuda.current_stream()) if self._is_cuda else None

    def fetch_grad(self, slice_: OptimizerSlice, gradients: Gradients) -> torch.Tensor:
        """The reduced gradient of a run in host memory; valid until the next is asked for. It has to be complete."""
        (found,) = slice_.grad_views(gradients.flat_grads)
        if found.device.type == "cpu" or self._d2h_stream is None:
            return found
        if self._grad_buffer is None or self._grad_buffer.nbytes < found.nbytes:
            nbytes = self._max_chunk_numel * found.itemsize
            self._grad_buffer = self._tiers.zeros("buckets", "host", nbytes, torch.uint8, pinned=True)
        there = self._grad_buffer[: found.nbytes].view(found.dtype)
        with torch.cuda.stream(self._d2h_stream):
            there.copy_(found, non_blocking=True)
            record_blocking_event(self._d2h_stream).synchronize()
        return there

    def can_write_directly(self, param_shard: torch.Tensor, step_event: torch.cuda.Event | None) -> bool:
        """Whether the host may write into a place itself; if so, the device has read the old values."""
        if param_shard.device.type != "cpu":
            return False
        if step_event is not None:
            step_event.synchronize()
        return True

    def acquire_slot(self) -> StagingSlot:
        """A free buffer. Whoever has one takes no other, and two may have one: see [Note: behind the kernel]."""
        if not self._slots:
            buffers = [
                self._tiers.zeros("buckets", "host", self._slot_bytes, torch.uint8, pinned=True)
                for _ in range(STAGING_SLOTS)
            ]
            self._slots = [StagingSlot(buffer) for buffer in buffers]
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % len(self._slots)
        if slot.copy_done is not None:
            slot.copy_done.synchronize()
            slot.copy_done = None
        return slot

    def copy_to_device(
        self, param_shard: torch.Tensor, values: torch.Tensor | None, step_event: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy new parameters to their place. Returns when the device will have them, where it copies by itself."""
        if values is None:
            raise ValueError("there are no new parameters to deliver: please report this")
        if self.can_write_directly(param_shard, step_event) or self._h2d_stream is None:
            param_shard.copy_(values)
            return None
        if step_event is not None:
            self._h2d_stream.wait_event(step_event)
        with torch.cuda.stream(self._h2d_stream):
            param_shard.copy_(values, non_blocking=True)
            return record_blocking_event(self._h2d_stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


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
