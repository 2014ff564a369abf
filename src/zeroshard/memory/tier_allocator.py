"""TierAllocator: allocates and tracks the memory of offloaded states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.config.offload import Offload
from zeroshard.memory.buffers import PinnedBuffer, host_zeros
from zeroshard.memory.disk.disk import Disk
from zeroshard.memory.disk.prefetch import PREFETCH_BUFFERS, ParamPrefetcher
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding import MAX_CHUNK_ELEMENTS, MAX_TENSORS_PER_CHUNK, PAGE_BYTES, FlatSizes

STAGING_SLOTS = 3  # staging buffers for offloaded states: one is read, one is updated, one is written


def staging_bytes(offload: Offload | None, flat_sizes: Sequence[FlatSizes], on_gpu: bool) -> int:
    """Return the bytes of host memory that stage offloaded states to and from the device and the disk."""
    max_numel, nbytes = max((sizes.numel for sizes in flat_sizes), default=0), 0
    if on_gpu:
        bytes_per_element = max(
            (sizes.param_bytes_per_element + sizes.grad_bytes_per_element for sizes in flat_sizes), default=0
        )
        nbytes += STAGING_SLOTS * min(max_numel, MAX_CHUNK_ELEMENTS["host"]) * bytes_per_element
    if offload is not None and offload.needs_disk:
        bytes_per_element = max((sizes.state_bytes_per_element for sizes in flat_sizes), default=0)
        nbytes += STAGING_SLOTS * (
            min(max_numel, MAX_CHUNK_ELEMENTS["disk"]) * bytes_per_element + MAX_TENSORS_PER_CHUNK * PAGE_BYTES
        )  # each buffer is rounded up to full pages
        if "disk" in offload.parameters:
            nbytes += PREFETCH_BUFFERS * (
                max_numel * max(sizes.param_bytes_per_element for sizes in flat_sizes) + PAGE_BYTES
            )
    return nbytes


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

    def staging_bytes(self, flat_sizes: Sequence[FlatSizes]) -> int:
        """Return the bytes of host memory for staging buffers. They do not grow with the model."""
        return staging_bytes(self.offload, flat_sizes, on_gpu=self._device.type == "cuda")

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
            buffer = PinnedBuffer(nbytes, device=self._device)
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
        buffer = PinnedBuffer(nbytes, device=self._device)
        self._temp_buffers[buffer.tensor.data_ptr()] = buffer
        return buffer.tensor

    def free_temp(self, buffer: torch.Tensor) -> None:
        """Free a buffer from :meth:`alloc_temp`."""
        self._tracker.add("away", -buffer.nbytes, "host")
        self._temp_buffers.pop(buffer.data_ptr(), None)

    def track_host_bytes(self, kind: str, nbytes: int) -> None:
        """Track host memory that was allocated elsewhere, or freed if negative."""
        self._tracker.add(kind, nbytes, "host")
