"""Disk: tensors that rest in a file, and their way to host memory and back.

A tensor of a disk is a CPU tensor over a shared map of the file ([Note: maps and direct I/O], in ``file.py``): whoever
reads, writes, saves or loads it need not know. A step of the optimizer, which needs all of them, would fill the page
cache that way and wait for one page after the other; it moves them with :meth:`Disk.start_read` and
:meth:`Disk.start_write` instead, asynchronously and past the cache, between the file and buffers of
:func:`aligned_buffer`.

```
file      | tensor 0        ......| tensor 1 ..| gap            | tensor 2            ...|
           begins with a page; the rest of its last page belongs to it too
```
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from bisect import insort
from typing import Literal, NamedTuple

import torch

from zeroshard.memory.buffers import mmap_buffer
from zeroshard.memory.disk.file import DiskError, OffloadFile
from zeroshard.memory.disk.io import IO_REQUEST_BYTES, IoRequest, IoThreads, Transfer
from zeroshard.memory.report import format_bytes
from zeroshard.sharding.layout import round_up
from zeroshard.sharding.tier_placement import PAGE_BYTES


class FreeList:
    """Stretches of a line that begins at 0 and has no end. A gap is filled before the line grows.

    >>> extents = FreeList()
    >>> a, b, c = extents.alloc(30), extents.alloc(10), extents.alloc(20)
    >>> extents.free(a, 30)
    >>> extents.free(b, 10)
    >>> extents.alloc(40), extents.end  # two gaps that were neighbours are one
    (0, 60)
    """

    def __init__(self) -> None:
        self.end = 0  # bytes: the farthest that is taken
        self._gaps: list[tuple[int, int]] = []  # (first byte, bytes) before the end, in order, never neighbours

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return self.end - sum(nbytes for _, nbytes in self._gaps)

    def alloc(self, nbytes: int) -> int:
        """Return the first byte of a stretch: in the smallest gap that is large enough, or else at the end."""
        fitting = [gap for gap in self._gaps if gap[1] >= nbytes]
        if not fitting:
            self.end += nbytes
            return self.end - nbytes
        start, room = gap = min(fitting, key=lambda gap: (gap[1], gap[0]))
        self._gaps.remove(gap)
        if room > nbytes:
            insort(self._gaps, (start + nbytes, room - nbytes))
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Take a stretch back."""
        stop = start + nbytes
        for gap in list(self._gaps):
            if gap[0] + gap[1] == start:
                start = gap[0]
            elif gap[0] == stop:
                stop += gap[1]
            else:
                continue
            self._gaps.remove(gap)
        if stop == self.end:
            self.end = start
        else:
            insort(self._gaps, (start, stop - start))


__all__ = ["Disk", "DiskError", "Transfer", "aligned_buffer"]


class MappedExtent(NamedTuple):
    """Where a tensor rests in the file."""

    offset: int
    nbytes: int  # in whole pages
    mapping: ctypes.Array[ctypes.c_char]  # the map: no other may get its address before the tensor is freed


class Disk:
    """One rank's part of the disk tier: a file without a name, which the system removes however the process ends.

    >>> import tempfile
    >>> disk = Disk(tempfile.gettempdir(), limit=1 << 20)
    >>> moments = disk.zeros(1000, torch.float32)
    >>> moments.sum(), disk.used_bytes
    (tensor(0.), 4096)
    >>> near = aligned_buffer(moments.nbytes)
    >>> disk.start_read(moments, into=near).wait()
    >>> near.view(torch.float32)[:1000] += 1
    >>> disk.start_write(near, to=moments).wait()
    >>> moments.sum()
    tensor(1000.)
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int | None = None, threads: int = 8) -> None:
        """Make a file in ``directory`` of at most ``limit`` bytes, moved by up to ``threads`` threads at once."""
        if threads < 1:
            raise ValueError(f"a disk has {threads} threads, and needs at least 1 to move anything")
        self._limit_bytes = limit
        self._file: OffloadFile | None = OffloadFile(directory)
        self.directory = self._file.directory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free_list = FreeList()
        self._mappings: dict[int, MappedExtent] = {}  # by the address of the map
        self._is_freed_space_zeroed = True  # whether space that was given back reads as zeros
        self._io_threads = IoThreads(threads)
        self._finalizer = weakref.finalize(self, self._io_threads.close)
        self._finalizer.atexit = False  # threads need no word then

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that are reserved."""
        return self._free_list.used_bytes

    @property
    def is_direct_io(self) -> bool:
        """Whether transfers pass the page cache by. False where the file system refuses that: they go through it."""
        return self._checked_file().is_direct_io

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` zeros on disk, as a CPU tensor. Space is reserved here: later writes find it.

        >>> import tempfile
        >>> Disk(tempfile.gettempdir(), limit=8192).zeros(3000, torch.float32)
        Traceback (most recent call last):
            ...
        zeroshard.memory.disk.file.DiskError: 12.29 kB were asked for on disk, where 0 B of at most 8.19 kB ...
        """
        if numel < 0:
            raise ValueError(f"a tensor of {numel} elements was asked for; it has to be 0 or more")
        nbytes = max(PAGE_BYTES, round_up(numel * dtype.itemsize, PAGE_BYTES))
        with self._lock:
            file = self._checked_file()
            self.check()  # a new tensor would make a file that was cut off as long as it was
            used = self._free_list.used_bytes
            if self._limit_bytes is not None and used + nbytes > self._limit_bytes:
                raise DiskError(
                    f"{format_bytes(nbytes)} were asked for on disk, where {format_bytes(used)} of at most "
                    f"{format_bytes(self._limit_bytes)} are "
                    f"taken: raise the limit of {self.directory}, or keep less there"
                )
            offset = self._free_list.alloc(nbytes)
            try:
                file.reserve(offset, nbytes)
                array = file.map(offset, nbytes)
            except DiskError:
                self._release(file, offset, nbytes)
                raise
            self._mappings[ctypes.addressof(array)] = MappedExtent(offset, nbytes, array)
        tensor = torch.frombuffer(array, dtype=dtype, count=max(1, numel))[:numel]
        return tensor if self._is_freed_space_zeroed else tensor.zero_()

    def check(self) -> None:
        """Raise where the file was cut off: a touch of a tensor behind its end would end the process (SIGBUS).

        >>> import tempfile
        >>> disk = Disk(tempfile.gettempdir())
        >>> moments = disk.zeros(1000, torch.float32)
        >>> os.truncate(disk._file.descriptor, 0)
        >>> disk.check()
        Traceback (most recent call last):
            ...
        zeroshard.memory.disk.file.DiskError: the disk tier's file in ... has 0 B, expected 4.10 kB: it was cut off, ...
        """
        if self._file is None:
            return
        try:
            found = os.fstat(self._file.descriptor).st_size
        except OSError as error:
            raise DiskError.from_os_error(
                f"the disk tier's file in {self.directory} cannot be looked at", error
            ) from error
        if found < self._free_list.end:
            raise DiskError(
                f"the disk tier's file in {self.directory} has {format_bytes(found)}, expected "
                f"{format_bytes(self._free_list.end)}: it "
                "was cut off, or the device lost it. What rested there is gone: begin anew from the last checkpoint, "
                "with another directory"
            )

    def free(self, tensor: torch.Tensor) -> None:
        """Give the space of a tensor back. Nobody may use it, or a view of it, any more: another will rest there."""
        with self._lock:
            file = self._checked_file()
            place = self._mappings.pop(tensor.untyped_storage().data_ptr(), None)
            if place is None:
                raise ValueError(self._unknown_tensor_message(tensor))
            self._release(file, place.offset, place.nbytes)

    def _release(self, file: OffloadFile, offset: int, nbytes: int) -> None:
        self._is_freed_space_zeroed = file.release(offset, nbytes) and self._is_freed_space_zeroed
        self._free_list.free(offset, nbytes)

    def start_read(self, tensor: torch.Tensor, into: torch.Tensor) -> Transfer:
        """Start to read a tensor of this disk, or a view of one that begins with a page, into a buffer.

        The buffer is filled up to the end of the page that the tensor ends in. Until the transfer is over nobody may
        touch either.
        """
        return self._start_transfer("read", tensor, into)

    def start_write(self, values: torch.Tensor, to: torch.Tensor) -> Transfer:
        """Start to write what a buffer begins with to a tensor of this disk, or to a view of one made of whole pages.

        Until the transfer is over nobody may touch either; it has succeeded when :meth:`Transfer.wait` returns.
        """
        return self._start_transfer("write", to, values)

    def _start_transfer(
        self, direction: Literal["read", "write"], tensor: torch.Tensor, buffer: torch.Tensor
    ) -> Transfer:
        nbytes = round_up(tensor.nbytes, PAGE_BYTES)
        starts = range(0, nbytes, IO_REQUEST_BYTES)
        with self._lock:  # a piece behind close()'s last word would wait for ever
            file = self._checked_file()
            offset = self._file_offset(tensor, needs_whole_pages=direction == "write")
            memory = _checked_memory(buffer, tensor, nbytes)
            transfer = Transfer(len(starts))
            for start in starts:
                self._io_threads.submit(
                    IoRequest(
                        transfer, file, direction, memory[start : start + IO_REQUEST_BYTES], buffer, offset + start
                    )
                )
        return transfer

    def _file_offset(self, tensor: torch.Tensor, needs_whole_pages: bool) -> int:
        """Where a tensor begins in the file. ``whole``: its last page must not be shared with what lies behind it."""
        storage = tensor.untyped_storage()
        place = self._mappings.get(storage.data_ptr())
        if place is None:
            raise ValueError(self._unknown_tensor_message(tensor))
        start = int(tensor.storage_offset()) * tensor.itemsize
        stop = start + tensor.nbytes
        if (
            not tensor.is_contiguous()
            or start % PAGE_BYTES
            or (needs_whole_pages and stop % PAGE_BYTES and stop != storage.nbytes())
        ):
            raise ValueError(
                f"bytes {start} to {stop} of a tensor of {storage.nbytes()} bytes were to be moved. Only contiguous "
                f"views that begin at a multiple of {PAGE_BYTES} bytes, and to be written end at one or at "
                "the tensor's end, "
                "can be: move the whole tensor, or cut it elsewhere"
            )
        return place.offset + start

    def _unknown_tensor_message(self, tensor: torch.Tensor) -> str:
        return (
            f"a tensor of {tensor.numel()} elements, {tensor.dtype}, on {tensor.device} is none of the disk in "
            f"{self.directory}, or was freed: give one that its empty() returned, or a view of it"
        )

    def _checked_file(self) -> OffloadFile:
        file = self._file
        if file is None:
            raise DiskError(f"the disk in {self.directory} was closed: make a new one")
        if os.getpid() != self._pid:  # it has the file in common with its parent, and no threads
            raise DiskError(f"the disk in {self.directory} belongs to process {self._pid}: make one in this process")
        return file

    def close(self) -> None:
        """Let the file go. Transfers under way end first, and tensors keep their values for as long as they are there.

        >>> import tempfile
        >>> disk = Disk(tempfile.gettempdir())
        >>> disk.close()
        >>> disk.zeros(1, torch.float32)
        Traceback (most recent call last):
            ...
        zeroshard.memory.disk.file.DiskError: the disk in ... was closed: make a new one
        """
        with self._lock:
            self._finalizer()
            self._file = None
            self._mappings.clear()


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Return host memory for either side of a transfer: whole pages, beginning with one, as uint8.

    Views of it that begin with a page serve as well. It is not pinned; whoever owns it may do so. Processes forked from
    this one do not have it.

    >>> near = aligned_buffer(5000)
    >>> near.numel(), near.data_ptr() % 4096
    (8192, 0)
    """
    if nbytes < 0:
        raise ValueError(f"a buffer of {nbytes} bytes was asked for; it has to be 0 or more")
    return mmap_buffer(max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES)))


def _checked_memory(buffer: torch.Tensor, tensor: torch.Tensor, nbytes: int) -> memoryview:
    """The first ``nbytes`` of a buffer, after a look at whether it is one."""
    storage = buffer.untyped_storage()
    start = int(buffer.storage_offset()) * buffer.itemsize
    address = storage.data_ptr() + start
    if (
        buffer.device.type != "cpu"
        or not buffer.is_contiguous()
        or address % PAGE_BYTES
        or storage.nbytes() - start < nbytes
    ):
        raise ValueError(
            f"a tensor of {buffer.nbytes} bytes on {buffer.device} cannot be one side of a transfer of "
            f"{nbytes} bytes: it "
            f"has to be contiguous, to begin at a multiple of {PAGE_BYTES} and to have room for whole pages. "
            "Take it from zeroshard.memory.disk.disk.aligned_buffer()"
        )
    if buffer.nbytes < tensor.nbytes or buffer.dtype not in (torch.uint8, tensor.dtype):
        raise ValueError(
            f"a buffer of {buffer.numel()} × {buffer.dtype} was given for a tensor of {tensor.numel()} × "
            f"{tensor.dtype}: "
            "it has to be of the same dtype, or of uint8, and of at least as many bytes"
        )
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
