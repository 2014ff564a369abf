"""Reader: parameters that rest on disk, on their way to the device, read ahead into a few pinned buffers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from zeroshard.memory.disk import Disk, DiskError, Transfer, buffer
from zeroshard.memory.lane import moment
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.room import Pin

AHEAD = 2  # shards that are read before they are wanted
BUFFERS = AHEAD + 1


@dataclass(eq=False)
class _Buffer:
    """Host memory for one shard."""

    memory: torch.Tensor
    pin: Pin | None
    transfer: Transfer | None = None
    copied: torch.cuda.Event | None = None  # when the device has all of it

    def clear(self) -> None:
        """Wait until nobody uses it."""
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None  # not before: until then somebody writes into the memory
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class Reader:
    """Reads shards of one model. What was read holds for one pass: between passes they change.

    >>> import tempfile
    >>> disk = Disk(tempfile.gettempdir())
    >>> shard = disk.empty(3, torch.float32).fill_(7)
    >>> reader = Reader(disk, torch.device("cpu"), shard.nbytes, Ledger())
    >>> reader.fetch(shard)
    >>> reader.take(shard)
    tensor([7., 7., 7.])
    """

    def __init__(self, disk: Disk, device: torch.device, nbytes: int, ledger: Ledger) -> None:
        """``nbytes`` are those of the largest shard."""
        self._disk, self._device, self._nbytes, self._ledger = disk, device, nbytes, ledger
        self._free: list[_Buffer] = []
        self._made = 0
        self._read: dict[int, _Buffer] = {}  # by the address of the shard

    def fetch(self, shard: torch.Tensor) -> None:
        """Start to read a shard, unless it is under way or there is no room for it."""
        if shard.data_ptr() not in self._read and len(self._read) < AHEAD:
            self._start(shard)

    def take(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard in memory, for the device to copy from; :meth:`give` it back afterwards."""
        found = self._read.get(shard.data_ptr()) or self._start(shard)
        if found.transfer is not None:
            found.transfer.wait()
            found.transfer = None
        return found.memory[: shard.nbytes].view(shard.dtype)

    def give(self, shard: torch.Tensor) -> None:
        """What was taken is used by nothing that comes after now on this stream."""
        found = self._read.pop(shard.data_ptr())
        found.copied = moment(torch.cuda.current_stream()) if self._device.type == "cuda" else None
        self._free.append(found)

    def forget(self) -> None:
        """A pass is over: what was read and not taken may be old by the next."""
        for address, found in list(self._read.items()):
            with suppress(DiskError):  # nobody has it: whoever reads the shard again is told
                found.clear()
            found.transfer = None
            self._free.append(self._read.pop(address))

    def _start(self, shard: torch.Tensor) -> _Buffer:
        found = self._buffer()
        found.transfer = self._disk.read(shard, found.memory)
        self._read[shard.data_ptr()] = found
        return found

    def _buffer(self) -> _Buffer:
        if not self._free and self._made < BUFFERS:
            memory = buffer(self._nbytes)
            self._made += 1
            self._ledger.add("buckets", memory.nbytes, "host")
            return _Buffer(memory, Pin(memory, self._device) if self._device.type == "cuda" else None)
        if not self._free:  # shards were read ahead that nobody came for
            self.forget()
        found = self._free.pop(0)
        found.clear()
        return found
