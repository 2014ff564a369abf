"""Staging buffers of CPU updates: gradients from the device, new parameters to it, states from and to disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from zeroshard.engine import Gradients
from zeroshard.memory import DiskError, TierAllocator, Transfer, aligned_buffer, record_blocking_event
from zeroshard.optim.cpu.chunk import StateChunk
from zeroshard.optim.slices import OptimizerSlice
from zeroshard.sharding import STAGING_SLOTS
from zeroshard.utils.profiling import label


class StagingSlot:
    """A buffer for the new parameters of one chunk, in use until they are copied to the device."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.copy_done: torch.cuda.Event | None = None  # the last copy from it

    def param_view(self, chunk: StateChunk) -> torch.Tensor:
        """Return a view of the buffer for the chunk's compute-dtype parameters."""
        return self._buffer[: chunk.numel * chunk.flat.dtype.itemsize].view(chunk.flat.dtype)


class PinnedStaging:
    """Pinned buffers and two streams for a GPU; nothing if the device is the CPU.

    ``step_event`` is always the event recorded by the step: before it, the device may still read the old parameters.
    """

    def __init__(self, device: torch.device, tiers: TierAllocator, chunks: Iterable[StateChunk]) -> None:
        self._device, self._tiers = device, tiers
        self._is_cuda = device.type == "cuda"
        # Two streams: copies to the device wait for the step event, and copies from it must not.
        self._h2d_stream = _new_stream(device)
        self._d2h_stream = _new_stream(device)
        found = list(chunks)
        self._slot_bytes = max((chunk.numel * chunk.flat.dtype.itemsize for chunk in found), default=0)
        self._max_chunk_numel = max((chunk.numel for chunk in found), default=0)
        self._slots: list[StagingSlot] = []
        self._next_slot = 0
        self._grad_buffer: torch.Tensor | None = None

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event on the current stream."""
        return record_blocking_event(torch.cuda.current_stream()) if self._is_cuda else None

    def fetch_grad(self, slice_: OptimizerSlice, gradients: Gradients) -> torch.Tensor:
        """Return a slice's reduced gradient in host memory, valid until the next call. It must be complete."""
        (grad,) = slice_.grad_views(gradients.flat_grads)
        if grad.device.type == "cpu" or self._d2h_stream is None:
            return grad
        if self._grad_buffer is None or self._grad_buffer.nbytes < grad.nbytes:
            nbytes = self._max_chunk_numel * grad.itemsize
            self._grad_buffer = self._tiers.zeros("buckets", "host", nbytes, torch.uint8, pinned=True)
        host_grad = self._grad_buffer[: grad.nbytes].view(grad.dtype)
        with label("copy gradients to host"), torch.cuda.stream(self._d2h_stream):
            host_grad.copy_(grad, non_blocking=True)
            record_blocking_event(self._d2h_stream).synchronize()
        return host_grad

    def can_write_directly(self, param_shard: torch.Tensor, step_event: torch.cuda.Event | None) -> bool:
        """Whether the host can write the parameter shard; if so, wait until the device has read the old values."""
        if param_shard.device.type != "cpu":
            return False
        if step_event is not None:
            step_event.synchronize()
        return True

    def acquire_slot(self) -> StagingSlot:
        """Return a free buffer; a job takes at most one: [Note: overlapping Python with native kernels]."""
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
        """Copy new parameters to the parameter shard; return the event of the copy if it is asynchronous."""
        if values is None:
            raise ValueError("there are no new parameters to copy: please report this")
        if self.can_write_directly(param_shard, step_event) or self._h2d_stream is None:
            param_shard.copy_(values)
            return None
        if step_event is not None:
            self._h2d_stream.wait_event(step_event)
        with label("copy parameters to device"), torch.cuda.stream(self._h2d_stream):
            param_shard.copy_(values, non_blocking=True)
            return record_blocking_event(self._h2d_stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class _StagedChunk:
    """The tensors of one chunk on disk, in host buffers."""

    def __init__(self, chunk: StateChunk, buffers: dict[str, torch.Tensor], tiers: TierAllocator) -> None:
        self.chunk, self.buffers = chunk, buffers
        disk_tensors = chunk.tensors
        self.tensors = {key: buffers[key][: tensor.nbytes].view(tensor.dtype) for key, tensor in disk_tensors.items()}
        self._disk_tensors, self._tiers = disk_tensors, tiers
        self._transfers: list[Transfer] = [
            tiers.disk.start_read(tensor, buffers[key]) for key, tensor in disk_tensors.items()
        ]

    def wait(self) -> None:
        """Wait for the pending reads or writes; raise only after all of them are done."""
        failures: list[DiskError] = []
        with label("wait for disk {!r}", self.chunk.flat.spec.unit):
            for transfer in self._transfers:
                try:
                    transfer.wait()
                except DiskError as error:
                    failures.append(error)
        self._transfers = []
        if failures:
            raise failures[0]

    def start_write_back(self) -> None:
        """Start to write all buffers back."""
        self._transfers = [
            self._tiers.disk.start_write(self.buffers[key], tensor) for key, tensor in self._disk_tensors.items()
        ]


class DiskStaging:
    """Read the next chunk and write the previous one while a chunk is updated. Used by one thread."""

    def __init__(self, tiers: TierAllocator) -> None:
        self._tiers = tiers
        self._buffer_sets: list[dict[str, torch.Tensor]] = [{} for _ in range(STAGING_SLOTS)]  # each by key
        self._free_buffer_sets = list(self._buffer_sets)
        self._reading: dict[StateChunk, _StagedChunk] = {}
        self._writing: deque[_StagedChunk] = deque()

    @contextmanager
    def staged(self, chunk: StateChunk, upcoming: list[StateChunk]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the chunk's master weights and states in host memory, by key; write them back on exit.

        ``upcoming`` lists the chunks that the step has not updated yet, including this one, which is removed. The chunk
        after it is read in the meantime, although chunks may be updated in another order.
        """
        staged_chunk = self._reading.pop(chunk, None) or self._start_read(chunk)
        next_index = upcoming.index(chunk)
        upcoming.remove(chunk)  # if it were read again, the next step would find stale values
        if next_index < len(upcoming) and not self._reading:  # one at a time, or the buffers would not suffice
            self._reading[upcoming[next_index]] = self._start_read(upcoming[next_index])
        staged_chunk.wait()
        yield staged_chunk.tensors
        staged_chunk.start_write_back()
        self._writing.append(staged_chunk)

    def wait_writes(self) -> None:
        """Wait for all pending writes."""
        while self._writing:
            self._wait_oldest_write()

    def reset(self) -> None:
        """After a failure, wait for all transfers and free all buffers."""
        for staged_chunk in (*self._reading.values(), *self._writing):
            with suppress(DiskError):
                staged_chunk.wait()
        self._reading.clear()
        self._writing.clear()
        self._free_buffer_sets = list(self._buffer_sets)

    def _start_read(self, chunk: StateChunk) -> _StagedChunk:
        while not self._free_buffer_sets:
            self._wait_oldest_write()
        buffers = self._free_buffer_sets.pop()
        for key, tensor in chunk.tensors.items():
            old_bytes = buffers[key].nbytes if key in buffers else 0
            if old_bytes < tensor.nbytes:
                buffers[key] = aligned_buffer(tensor.nbytes)
                self._tiers.track_host_bytes("buckets", buffers[key].nbytes - old_bytes)
        return _StagedChunk(chunk, buffers, self._tiers)

    def _wait_oldest_write(self) -> None:
        """Wait for the oldest write and free its buffers."""
        self._writing[0].wait()
        self._free_buffer_sets.append(self._writing.popleft().buffers)
