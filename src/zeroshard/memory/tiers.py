"""Tiers: the memory outside the device that states rest in, taken and counted here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.memory.disk import Disk
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.reader import BUFFERS, Reader
from zeroshard.memory.room import PinnedRoom, host_zeros
from zeroshard.offload import Offload
from zeroshard.rests import GRANULES, PAGE, TENSORS, Body

SLOTS = 3  # buffers that far states travel through: one comes, one is worked on, one goes


def travel_bytes(offload: Offload | None, bodies: Sequence[Body], on_gpu: bool) -> int:
    """Bytes of host memory that far states travel through on their way to and from the device, and the disk."""
    longest, nbytes = max((body.numel for body in bodies), default=0), 0
    if on_gpu:
        each = max((body.parameter_bytes + body.gradient_bytes for body in bodies), default=0)
        nbytes += SLOTS * min(longest, GRANULES["host"]) * each
    if offload is not None and offload.uses_disk:
        each = max((body.state_bytes for body in bodies), default=0)
        nbytes += SLOTS * (min(longest, GRANULES["disk"]) * each + TENSORS * PAGE)  # each buffer is whole pages
        if "disk" in offload.parameters:
            nbytes += BUFFERS * (longest * max(body.parameter_bytes for body in bodies) + PAGE)
    return nbytes


class Tiers:
    """Allocates in host memory and on disk, for one model.

    On a machine without a GPU the host tier is memory like the device's own, only counted apart.

    >>> ledger = Ledger()
    >>> tiers = Tiers(Offload(optimizer="host"), torch.device("cpu"), ledger)
    >>> tiers.zeros("master weights", "host", 4, torch.float32)
    tensor([0., 0., 0., 0.])
    >>> ledger.kinds["master weights", "host"].now
    16
    """

    def __init__(self, offload: Offload | None, device: torch.device, ledger: Ledger) -> None:
        self.offload = offload
        self._device, self._ledger = device, ledger
        self.host_left: int | None = None  # bytes under the host's limit that no state needs; None: no limit
        self._disk: Disk | None = None
        self._rooms: list[PinnedRoom] = []  # what is pinned stays so while the model lives
        self._lent: dict[int, PinnedRoom] = {}  # or until it is given back; by address

    def buffers(self, bodies: Sequence[Body]) -> int:
        """Bytes of host memory that states travel through, whatever the size of the model."""
        return travel_bytes(self.offload, bodies, on_gpu=self._device.type == "cuda")

    def open(self) -> None:
        """Make this rank's file, where there is to be one."""
        if self.offload is not None and self.offload.uses_disk:
            self._disk = self.disk

    def check(self) -> None:
        """Raise where states on disk cannot be read any more, before somebody touches them."""
        if self._disk is not None:
            self._disk.check()

    @property
    def disk(self) -> Disk:
        """This rank's file, made when it is first needed."""
        if self._disk is None:
            if self.offload is None or self.offload.directory is None:
                raise ValueError("nothing rests on disk: give offload a directory")
            self._disk = Disk(self.offload.directory, self.offload.limit("disk"))
        return self._disk

    def reader(self, sizes: Sequence[int]) -> Reader | None:
        """What reads shards of these sizes, in bytes, from disk ahead of their use; None where there are none."""
        return Reader(self.disk, self._device, max(sizes), self._ledger) if sizes else None

    def zeros(self, kind: str | None, tier: str, numel: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """Make a line of zeros in a tier, counted as ``kind``; None: whoever asks counts it himself.

        ``pinned``: a GPU copies from and to it by itself, where it is host memory.
        """
        nbytes = numel * dtype.itemsize
        if tier == "disk":
            tensor = self.disk.empty(numel, dtype)
        elif pinned and self._device.type == "cuda" and nbytes:
            room = PinnedRoom(nbytes, serves=self._device)
            self._rooms.append(room)
            tensor = room.tensor.view(dtype)
        else:
            tensor = host_zeros(nbytes).view(dtype)
        if kind is not None:
            self._ledger.add(kind, nbytes, tier)
        return tensor

    def borrow(self, nbytes: int) -> torch.Tensor:
        """Host memory for a while, pinned where a GPU is to copy into it."""
        self._ledger.add("away", nbytes, "host")
        if self._device.type != "cuda":
            return host_zeros(nbytes)
        room = PinnedRoom(nbytes, serves=self._device)
        self._lent[room.tensor.data_ptr()] = room
        return room.tensor

    def give_back(self, borrowed: torch.Tensor) -> None:
        """Let go of what was borrowed."""
        self._ledger.add("away", -borrowed.nbytes, "host")
        self._lent.pop(borrowed.data_ptr(), None)

    def count(self, kind: str, nbytes: int) -> None:
        """Count host memory that was taken elsewhere, or freed when negative."""
        self._ledger.add(kind, nbytes, "host")
