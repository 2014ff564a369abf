"""TierAllocator: allocates and tracks the memory of offloaded states. ParamPrefetcher: reads them ahead of use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from zeroshard.config.offload import Offload
from zeroshard.memory.disk.disk import Disk, Transfer, aligned_buffer
from zeroshard.memory.disk.file import DiskError
from zeroshard.memory.host_memory import PinnedBuffer, host_zeros
from zeroshard.memory.streams import record_blocking_event
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding import PREFETCH_SHARDS


@dataclass(eq=False)
class _PrefetchBuffer:
    """Host memory for one shard."""

    memory: torch.Tensor
    pinned: PinnedBuffer | None  # keeps the memory pinned
    transfer: Transfer | None = None
    copy_done: torch.cuda.Event | None = None  # when the copy to the device is complete

    def wait_for_transfer(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None  # only now: until then the transfer writes into the memory

    def wait_unused(self) -> None:
        """Wait until no transfer or copy uses it."""
        self.wait_for_transfer()
        if self.copy_done is not None:
            self.copy_done.synchronize()
            self.copy_done = None


class ParamPrefetcher:
    """Reads parameter shards from disk ahead of use, into a few pinned buffers.

    Data is valid for one pass: shards change between passes.

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
        buffer.wait_for_transfer()
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
        if not self._free_buffers and self._buffer_count <= PREFETCH_SHARDS:
            memory = aligned_buffer(self._buffer_bytes)
            self._buffer_count += 1
            self._tracker.add("buckets", memory.nbytes, "host")
            is_cuda = self._device.type == "cuda"
            return _PrefetchBuffer(memory, PinnedBuffer(memory, self._device) if is_cuda else None)
        if not self._free_buffers:  # shards were prefetched that were never acquired
            self.discard()
        buffer = self._free_buffers.pop(0)
        buffer.wait_unused()
        return buffer


class TierAllocator:
    """Allocates in host memory and on disk, for one model.

    Without a GPU, the host tier is the same memory as the device tier; it is only tracked separately.

    >>> tracker = MemoryTracker()
    >>> tiers = TierAllocator(Offload(optimizer="host"), torch.device("cpu"), tracker)
    >>> tiers.zeros("master weights", "host", 4, torch.float32)
    tensor([0., 0., 0., 0.])
    >>> tracker.by_kind["master weights", "host"].now
    16
    """

    def __init__(self, offload: Offload | None, device: torch.device, tracker: MemoryTracker) -> None:
        self.offload = offload
        self._device, self._tracker = device, tracker
        self.spare_host_bytes: int | None = None  # bytes below the host limit that no state needs; None: no limit
        self._disk: Disk | None = None
        self._pinned_buffers: list[PinnedBuffer] = []  # pinned for the lifetime of the model
        self._temp_buffers: dict[int, PinnedBuffer] = {}  # pinned until free_temp(); by address

    def open_disk(self) -> None:
        """Create this rank's file, if any state is placed on disk."""
        if self.offload is not None and self.offload.needs_disk:
            self._disk = self.disk

    def check_disk(self) -> None:
        """Raise if states on disk are no longer readable, before anything accesses them."""
        if self._disk is not None:
            self._disk.check()

    @property
    def disk(self) -> Disk:
        """This rank's file, created on first use."""
        if self._disk is None:
            if self.offload is None or self.offload.directory is None:
                raise ValueError("there is no disk tier: pass Offload a directory")
            self._disk = Disk(self.offload.directory, self.offload.byte_limit("disk"))
        return self._disk

    def make_prefetcher(self, shard_bytes: Sequence[int]) -> ParamPrefetcher | None:
        """Return a prefetcher for parameter shards on disk, given their sizes in bytes; None if there are none."""
        return ParamPrefetcher(self.disk, self._device, max(shard_bytes), self._tracker) if shard_bytes else None

    def zeros(self, kind: str | None, tier: str, numel: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """Return a 1-D tensor of zeros in a tier, tracked as ``kind``; with None the caller tracks it.

        ``pinned``: if it is in host memory, pin it, so that the GPU can copy asynchronously.
        """
        nbytes = numel * dtype.itemsize
        if tier == "disk":
            tensor = self.disk.zeros(numel, dtype)
        elif pinned and self._device.type == "cuda" and nbytes:
            buffer = PinnedBuffer.allocate(nbytes, self._device)
            self._pinned_buffers.append(buffer)
            tensor = buffer.tensor.view(dtype)
        else:
            tensor = host_zeros(nbytes).view(dtype)
        if kind is not None:
            self._tracker.add(kind, nbytes, tier)
        return tensor

    def alloc_temp(self, nbytes: int) -> torch.Tensor:
        """Allocate temporary host memory, pinned if there is a GPU."""
        self._tracker.add("away", nbytes, "host")
        if self._device.type != "cuda":
            return host_zeros(nbytes)
        buffer = PinnedBuffer.allocate(nbytes, self._device)
        self._temp_buffers[buffer.tensor.data_ptr()] = buffer
        return buffer.tensor

    def free_temp(self, buffer: torch.Tensor) -> None:
        self._tracker.add("away", -buffer.nbytes, "host")
        self._temp_buffers.pop(buffer.data_ptr(), None)

    def track_host_bytes(self, kind: str, nbytes: int) -> None:
        """Track host memory that was allocated elsewhere, or freed if negative."""
        self._tracker.add(kind, nbytes, "host")
