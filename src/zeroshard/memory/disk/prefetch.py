"""ParamPrefetcher: reads parameter shards from disk ahead of use, into a few pinned buffers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from zeroshard.memory.buffers import PinnedRegistration
from zeroshard.memory.disk.disk import Disk, DiskError, Transfer, aligned_buffer
from zeroshard.memory.streams import record_blocking_event
from zeroshard.memory.tracker import MemoryTracker

PREFETCH_SHARDS = 2  # shards read ahead of use
PREFETCH_BUFFERS = PREFETCH_SHARDS + 1


@dataclass(eq=False)
class _PrefetchBuffer:
    """Host memory for one shard."""

    memory: torch.Tensor
    registration: PinnedRegistration | None
    transfer: Transfer | None = None
    copy_done: torch.cuda.Event | None = None  # when the copy to the device is complete

    def wait_unused(self) -> None:
        """Wait until no transfer or copy uses it."""
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None  # only now: until then the transfer writes into the memory
        if self.copy_done is not None:
            self.copy_done.synchronize()
            self.copy_done = None


class ParamPrefetcher:
    """Reads shards of one model. Data is valid for one pass: shards change between passes.

    >>> import tempfile
    >>> disk = Disk(tempfile.gettempdir())
    >>> shard = disk.zeros(3, torch.float32).fill_(7)
    >>> prefetcher = ParamPrefetcher(disk, torch.device("cpu"), shard.nbytes, MemoryTracker())
    >>> prefetcher.prefetch(shard)
    >>> prefetcher.acquire(shard)
    tensor([7., 7., 7.])
    """

    def __init__(self, disk: Disk, device: torch.device, max_shard_bytes: int, tracker: MemoryTracker) -> None:
        """``max_shard_bytes``: size of the largest shard."""
        self._disk, self._device, self._buffer_bytes, self._tracker = disk, device, max_shard_bytes, tracker
        self._free_buffers: list[_PrefetchBuffer] = []
        self._buffer_count = 0
        self._buffer_by_shard: dict[int, _PrefetchBuffer] = {}  # by the address of the shard

    def prefetch(self, shard: torch.Tensor) -> None:
        """Start reading a shard, unless it is already being read or no buffer is free."""
        if shard.data_ptr() not in self._buffer_by_shard and len(self._buffer_by_shard) < PREFETCH_SHARDS:
            self._start_read(shard)

    def acquire(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the shard in host memory, for the device to copy from. Call :meth:`release` afterwards."""
        buffer = self._buffer_by_shard.get(shard.data_ptr()) or self._start_read(shard)
        if buffer.transfer is not None:
            buffer.transfer.wait()
            buffer.transfer = None
        return buffer.memory[: shard.nbytes].view(shard.dtype)

    def release(self, shard: torch.Tensor) -> None:
        """Free the shard's buffer: no later work on the current stream reads it."""
        buffer = self._buffer_by_shard.pop(shard.data_ptr())
        buffer.copy_done = record_blocking_event(torch.cuda.current_stream()) if self._device.type == "cuda" else None
        self._free_buffers.append(buffer)

    def discard(self) -> None:
        """Discard shards that were read but not acquired: by the next pass they may be stale."""
        for address, buffer in list(self._buffer_by_shard.items()):
            with suppress(DiskError):  # nothing uses it: the next read of the shard raises again
                buffer.wait_unused()
            buffer.transfer = None
            self._free_buffers.append(self._buffer_by_shard.pop(address))

    def _start_read(self, shard: torch.Tensor) -> _PrefetchBuffer:
        buffer = self._acquire_buffer()
        buffer.transfer = self._disk.start_read(shard, buffer.memory)
        self._buffer_by_shard[shard.data_ptr()] = buffer
        return buffer

    def _acquire_buffer(self) -> _PrefetchBuffer:
        if not self._free_buffers and self._buffer_count < PREFETCH_BUFFERS:
            memory = aligned_buffer(self._buffer_bytes)
            self._buffer_count += 1
            self._tracker.add("buckets", memory.nbytes, "host")
            return _PrefetchBuffer(
                memory, PinnedRegistration(memory, self._device) if self._device.type == "cuda" else None
            )
        if not self._free_buffers:  # shards were prefetched that were never acquired
            self.discard()
        buffer = self._free_buffers.pop(0)
        buffer.wait_unused()
        return buffer
