"""Reader: parameters that rest on disk, on their way to the device, read ahead into a few pinned buffers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from zeroshard.memory.buffers import PinnedRegistration
from zeroshard.memory.disk.disk import Disk, DiskError, Transfer, aligned_buffer
from zeroshard.memory.streams import record_blocking_event
from zeroshard.memory.tracker import MemoryTracker

PREFETCH_SHARDS = 2  # shards that are read before they are wanted
PREFETCH_BUFFERS = PREFETCH_SHARDS + 1


@dataclass(eq=False)
class _PrefetchBuffer:
    """Host memory for one shard."""

    memory: torch.Tensor
    registration: PinnedRegistration | None
    transfer: Transfer | None = None
    copy_done: torch.cuda.Event | None = None  # when the device has all of it

    def wait_unused(self) -> None:
        """Wait until nobody uses it."""
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None  # not before: until then somebody writes into the memory
        if self.copy_done is not None:
            self.copy_done.synchronize()
            self.copy_done = None


class ParamPrefetcher:
    """Reads shards of one model. What was read holds for one pass: between passes they change.

    >>> import tempfile
    >>> disk = Disk(tempfile.gettempdir())
    >>> shard = disk.zeros(3, torch.float32).fill_(7)
    >>> reader = ParamPrefetcher(disk, torch.device("cpu"), shard.nbytes, MemoryTracker())
    >>> reader.prefetch(shard)
    >>> reader.acquire(shard)
    tensor([7., 7., 7.])
    """

    def __init__(self, disk: Disk, device: torch.device, max_shard_bytes: int, tracker: MemoryTracker) -> None:
        """``nbytes`` are those of the largest shard."""
        self._disk, self._device, self._buffer_bytes, self._tracker = disk, device, max_shard_bytes, tracker
        self._free_buffers: list[_PrefetchBuffer] = []
        self._buffer_count = 0
        self._buffer_by_shard: dict[int, _PrefetchBuffer] = {}  # by the address of the shard

    def prefetch(self, shard: torch.Tensor) -> None:
        """Start to read a shard, unless it is under way or there is no room for it."""
        if shard.data_ptr() not in self._buffer_by_shard and len(self._buffer_by_shard) < PREFETCH_SHARDS:
            self._start_read(shard)

    def acquire(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard in memory, for the device to copy from; :meth:`give` it back afterwards."""
        found = self._buffer_by_shard.get(shard.data_ptr()) or self._start_read(shard)
        if found.transfer is not None:
            found.transfer.wait()
            found.transfer = None
        return found.memory[: shard.nbytes].view(shard.dtype)

    def release(self, shard: torch.Tensor) -> None:
        """What was taken is used by nothing that comes after now on this stream."""
        found = self._buffer_by_shard.pop(shard.data_ptr())
        found.copy_done = record_blocking_event(torch.cuda.current_stream()) if self._device.type == "cuda" else None
        self._free_buffers.append(found)

    def discard(self) -> None:
        """A pass is over: what was read and not taken may be old by the next."""
        for address, found in list(self._buffer_by_shard.items()):
            with suppress(DiskError):  # nobody has it: whoever reads the shard again is told
                found.wait_unused()
            found.transfer = None
            self._free_buffers.append(self._buffer_by_shard.pop(address))

    def _start_read(self, shard: torch.Tensor) -> _PrefetchBuffer:
        found = self._acquire_buffer()
        found.transfer = self._disk.start_read(shard, found.memory)
        self._buffer_by_shard[shard.data_ptr()] = found
        return found

    def _acquire_buffer(self) -> _PrefetchBuffer:
        if not self._free_buffers and self._buffer_count < PREFETCH_BUFFERS:
            memory = aligned_buffer(self._buffer_bytes)
            self._buffer_count += 1
            self._tracker.add("buckets", memory.nbytes, "host")
            return _PrefetchBuffer(
                memory, PinnedRegistration(memory, self._device) if self._device.type == "cuda" else None
            )
        if not self._free_buffers:  # shards were read ahead that nobody came for
            self.discard()
        found = self._free_buffers.pop(0)
        found.wait_unused()
        return found
