"""Tiers: the memory outside the device that states rest in, taken and counted here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.config.offload import Offload
from zeroshard.memory.buffers import PinnedBuffer, host_zeros
from zeroshard.memory.disk.disk import Disk
from zeroshard.memory.disk.prefetch import PREFETCH_BUFFERS, ParamPrefetcher
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding.tier_placement import MAX_CHUNK_ELEMENTS, MAX_TENSORS_PER_CHUNK, PAGE_BYTES, FlatSizes

STAGING_SLOTS = 3  # buffers that far states travel through: one comes, one is worked on, one goes


def staging_bytes(offload: Offload | None, flat_sizes: Sequence[FlatSizes], on_gpu: bool) -> int:
    """Bytes of host memory that far states travel through on their way to and from the device, and the disk."""
    longest, nbytes = max((body.numel for body in flat_sizes), default=0), 0
    if on_gpu:
        each = max((body.param_bytes_per_element + body.grad_bytes_per_element for body in flat_sizes), default=0)
        nbytes += STAGING_SLOTS * min(longest, MAX_CHUNK_ELEMENTS["host"]) * each
    if offload is not None and offload.needs_disk:
        each = max((body.state_bytes_per_element for body in flat_sizes), default=0)
        nbytes += STAGING_SLOTS * (
            min(longest, MAX_CHUNK_ELEMENTS["disk"]) * each + MAX_TENSORS_PER_CHUNK * PAGE_BYTES
        )  # each buffer is whole pages
        if "disk" in offload.parameters:
            nbytes += PREFETCH_BUFFERS * (
                longest * max(body.param_bytes_per_element for body in flat_sizes) + PAGE_BYTES
            )
    return nbytes


class TierAllocator:
    """Allocates in host memory and on disk, for one model.

    On a machine without a GPU the host tier is memory like the device's own, only counted apart.

    >>> ledger = MemoryTracker()
    >>> tiers = TierAllocator(Offload(optimizer="host"), torch.device("cpu"), ledger)
    >>> tiers.zeros("master weights", "host", 4, torch.float32)
    tensor([0., 0., 0., 0.])
    >>> ledger.by_kind["master weights", "host"].now
    16
    """

    def __init__(self, offload: Offload | None, device: torch.device, tracker: MemoryTracker) -> None:
        self.offload = offload
        self._device, self._tracker = device, tracker
        self.spare_host_bytes: int | None = None  # bytes under the host's limit that no state needs; None: no limit
        self._disk: Disk | None = None
        self._pinned_buffers: list[PinnedBuffer] = []  # what is pinned stays so while the model lives
        self._temp_buffers: dict[int, PinnedBuffer] = {}  # or until it is given back; by address

    def staging_bytes(self, flat_sizes: Sequence[FlatSizes]) -> int:
        """Bytes of host memory that states travel through, whatever the size of the model."""
        return staging_bytes(self.offload, flat_sizes, on_gpu=self._device.type == "cuda")

    def open_disk(self) -> None:
        """Make this rank's file, where there is to be one."""
        if self.offload is not None and self.offload.needs_disk:
            self._disk = self.disk

    def check_disk(self) -> None:
        """Raise where states on disk cannot be read any more, before somebody touches them."""
        if self._disk is not None:
            self._disk.check()

    @property
    def disk(self) -> Disk:
        """This rank's file, made when it is first needed."""
        if self._disk is None:
            if self.offload is None or self.offload.directory is None:
                raise ValueError("nothing rests on disk: give offload a directory")
            self._disk = Disk(self.offload.directory, self.offload.byte_limit("disk"))
        return self._disk

    def make_prefetcher(self, shard_bytes: Sequence[int]) -> ParamPrefetcher | None:
        """What reads shards of these sizes, in bytes, from disk ahead of their use; None where there are none."""
        return ParamPrefetcher(self.disk, self._device, max(shard_bytes), self._tracker) if shard_bytes else None

    def zeros(self, kind: str | None, tier: str, numel: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """Make a line of zeros in a tier, counted as ``kind``; None: whoever asks counts it himself.

        ``pinned``: a GPU copies from and to it by itself, where it is host memory.
        """
        nbytes = numel * dtype.itemsize
        if tier == "disk":
            tensor = self.disk.zeros(numel, dtype)
        elif pinned and self._device.type == "cuda" and nbytes:
            room = PinnedBuffer(nbytes, device=self._device)
            self._pinned_buffers.append(room)
            tensor = room.tensor.view(dtype)
        else:
            tensor = host_zeros(nbytes).view(dtype)
        if kind is not None:
            self._tracker.add(kind, nbytes, tier)
        return tensor

    def alloc_temp(self, nbytes: int) -> torch.Tensor:
        """Host memory for a while, pinned where a GPU is to copy into it."""
        self._tracker.add("away", nbytes, "host")
        if self._device.type != "cuda":
            return host_zeros(nbytes)
        room = PinnedBuffer(nbytes, device=self._device)
        self._temp_buffers[room.tensor.data_ptr()] = room
        return room.tensor

    def free_temp(self, buffer: torch.Tensor) -> None:
        """Let go of what was borrowed."""
        self._tracker.add("away", -buffer.nbytes, "host")
        self._temp_buffers.pop(buffer.data_ptr(), None)

    def track_host_bytes(self, kind: str, nbytes: int) -> None:
        """Count host memory that was taken elsewhere, or freed when negative."""
        self._tracker.add(kind, nbytes, "host")
