"""Disk: tensors stored in a file, and their transfers to and from host memory.

A tensor of a disk is a CPU tensor over a shared mapping of the file ([Note: maps and direct I/O], in ``file.py``): code
that reads, writes, saves or loads it does not need to know. An optimizer step needs all of them; through the mapping it
would fill the page cache and wait for one page after the other. It uses :meth:`Disk.start_read` and
:meth:`Disk.start_write` instead: asynchronous transfers that bypass the page cache, between the file and buffers of
:func:`aligned_buffer`.

```
file      | tensor 0        ......| tensor 1 ..| free           | tensor 2            ...|
           starts on a page; the remainder of its last page belongs to it too
```

[Note: threads that only wait]
Python threads are sufficient: they spend nearly all their time inside a system call for several MiB, without the GIL.
The first transfer starts them. They reference only the queue, and do not keep the interpreter from exiting. The memory
of a request in progress stays valid: a request references its buffer and its file, so neither is freed, and the file
descriptor is not reused, before the system call returns.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import weakref
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from zeroshard.memory.disk.file import DiskError, OffloadFile
from zeroshard.memory.host_memory import mmap_buffer
from zeroshard.sharding import PAGE_BYTES, round_up
from zeroshard.utils.format import format_bytes
from zeroshard.utils.free_list import FreeList

IO_REQUEST_BYTES = 8 << 20  # size of one system call


class Transfer:
    """A read or write that was started. Only when :meth:`wait` has returned is it complete and successful.

    >>> transfer = Transfer(requests=1)
    >>> transfer.is_done
    False
    >>> transfer.finish_request(None)
    >>> transfer.wait()
    """

    def __init__(self, requests: int) -> None:
        self._requests_left = requests
        self._lock = threading.Lock()
        self._done_event = threading.Event()
        self._failure: tuple[str, BaseException | None] | None = None  # message and cause of the first error
        if not requests:
            self._done_event.set()

    @property
    def is_done(self) -> bool:
        """Whether all requests have finished: :meth:`wait` returns, or raises, immediately."""
        return self._done_event.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether a request has failed; the others can be skipped."""
        return self._failure is not None

    def wait(self) -> None:
        """Wait for all requests. Raise :class:`DiskError` if one failed. Either way the buffer is free afterwards."""
        self._done_event.wait()
        if self._failure is not None:
            message, cause = self._failure
            raise DiskError(message) from cause  # a new error each time: a stored one would keep its stack alive

    def finish_request(self, error: BaseException | None) -> None:
        """Count one request as finished, with its error if it failed."""
        with self._lock:
            if error is not None and self._failure is None:
                is_explained = isinstance(error, DiskError)
                message = str(error) if is_explained else f"a transfer of the disk tier failed: {error!r}"
                cause = error.__cause__ if is_explained else error
                self._failure = message, cause and cause.with_traceback(None)  # its stack would keep the buffer alive
            self._requests_left -= 1
            if not self._requests_left:
                self._done_event.set()


@dataclass(frozen=True)
class IoRequest:
    """The work of one system call."""

    transfer: Transfer
    file: OffloadFile
    direction: Literal["read", "write"]
    memory: memoryview
    owner: torch.Tensor  # keeps that memory alive
    offset: int  # in the file

    def run(self) -> None:
        """Execute the request, unless another request of the transfer has failed."""
        try:
            if not self.transfer.has_failed:
                self.file.transfer(self.direction, self.memory, self.offset)
        except BaseException as error:  # any error: a caller waits for the transfer
            self.transfer.finish_request(error)
        else:
            self.transfer.finish_request(None)


def _run_requests(requests: queue.SimpleQueue[IoRequest | None]) -> None:
    while (request := requests.get()) is not None:
        request.run()
        del request  # frees its buffer while this thread waits


def _stop_threads(requests: queue.SimpleQueue[IoRequest | None], threads: int) -> None:
    """Stop the threads after the queued requests. Takes no lock: the garbage collector may call it at any point."""
    for _ in range(threads):
        requests.put(None)


class MappedExtent(NamedTuple):
    """Where a tensor is stored in the file."""

    offset: int
    nbytes: int  # a multiple of the page size
    mapping: ctypes.Array[ctypes.c_char]  # kept alive: the address must not be reused before the tensor is freed


class Disk:
    """One rank's file of the disk tier: unnamed, so the system removes it however the process ends.

    >>> import tempfile
    >>> disk = Disk(tempfile.gettempdir(), limit=1 << 20)
    >>> moments = disk.zeros(1000, torch.float32)
    >>> moments.sum(), disk.used_bytes
    (tensor(0.), 4096)
    >>> buffer = aligned_buffer(moments.nbytes)
    >>> disk.start_read(moments, into=buffer).wait()
    >>> buffer.view(torch.float32)[:1000] += 1
    >>> disk.start_write(buffer, to=moments).wait()
    >>> moments.sum()
    tensor(1000.)
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int | None = None, threads: int = 8) -> None:
        """Create a file in ``directory`` of at most ``limit`` bytes, with up to ``threads`` I/O threads."""
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._limit_bytes = limit
        self._file: OffloadFile | None = OffloadFile(directory)
        self.directory = self._file.directory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free_list = FreeList()
        self._mappings: dict[int, MappedExtent] = {}  # by the address of the mapping
        self._is_freed_space_zeroed = True  # whether freed space reads as zeros
        self._requests: queue.SimpleQueue[IoRequest | None] = queue.SimpleQueue()
        self._thread_count = threads
        self._has_threads = False  # whether they have been started
        self._finalizer = weakref.finalize(self, _stop_threads, self._requests, threads)
        self._finalizer.atexit = False  # daemon threads need no shutdown at exit

    @property
    def used_bytes(self) -> int:
        return self._free_list.used_bytes

    @property
    def is_direct_io(self) -> bool:
        """Whether transfers bypass the page cache. False if the file system does not support that."""
        return self._checked_file().is_direct_io

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` zeros on disk, as a CPU tensor. Space is reserved now: later writes cannot run out of it."""
        if numel < 0:
            raise ValueError(f"numel must be at least 0, got {numel}")
        nbytes = max(PAGE_BYTES, round_up(numel * dtype.itemsize, PAGE_BYTES))
        with self._lock:
            file = self._checked_file()
            self.check()  # first: a new tensor would extend a truncated file to its old length
            used = self._free_list.used_bytes
            if self._limit_bytes is not None and used + nbytes > self._limit_bytes:
                raise DiskError(
                    f"cannot allocate {format_bytes(nbytes)} on disk: {format_bytes(used)} of "
                    f"{format_bytes(self._limit_bytes)} are used in {self.directory}. Raise the limit, or offload less"
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
        """Raise if the file was truncated: accessing a tensor past its end would kill the process (SIGBUS)."""
        if self._file is None:
            return
        try:
            file_bytes = os.fstat(self._file.descriptor).st_size
        except OSError as error:
            raise DiskError.from_os_error(f"cannot stat the disk tier's file in {self.directory}", error) from error
        if file_bytes < self._free_list.end:
            raise DiskError(
                f"the disk tier's file in {self.directory} has {format_bytes(file_bytes)}, expected "
                f"{format_bytes(self._free_list.end)}: it was truncated, or the device lost it. Its states are lost: "
                "restart from the last checkpoint, with another directory"
            )

    def free(self, tensor: torch.Tensor) -> None:
        """Free the space of a tensor, for reuse by other tensors. It and its views must not be used any more."""
        with self._lock:
            file = self._checked_file()
            extent = self._mappings.pop(tensor.untyped_storage().data_ptr(), None)
            if extent is None:
                raise ValueError(self._unknown_tensor_message(tensor))
            self._release(file, extent.offset, extent.nbytes)

    def _release(self, file: OffloadFile, offset: int, nbytes: int) -> None:
        self._is_freed_space_zeroed = file.release(offset, nbytes) and self._is_freed_space_zeroed
        self._free_list.free(offset, nbytes)

    def start_read(self, tensor: torch.Tensor, into: torch.Tensor) -> Transfer:
        """Start reading a tensor of this disk, or a page-aligned view of one, into a buffer.

        The buffer is filled up to the end of the tensor's last page. Neither may be accessed until the transfer is
        done.
        """
        return self._start_transfer("read", tensor, into)

    def start_write(self, values: torch.Tensor, to: torch.Tensor) -> Transfer:
        """Start writing the beginning of a buffer to a tensor of this disk, or to a view of one that covers full pages.

        Neither may be accessed until the transfer is done. It has succeeded when :meth:`Transfer.wait` returns.
        """
        return self._start_transfer("write", to, values)

    def _start_transfer(
        self, direction: Literal["read", "write"], tensor: torch.Tensor, buffer: torch.Tensor
    ) -> Transfer:
        nbytes = round_up(tensor.nbytes, PAGE_BYTES)
        starts = range(0, nbytes, IO_REQUEST_BYTES)
        with self._lock:  # a request queued after close() would never complete
            file = self._checked_file()
            offset = self._file_offset(tensor, needs_whole_pages=direction == "write")
            memory = _checked_memory(buffer, tensor, nbytes)
            transfer = Transfer(len(starts))
            self._start_threads()
            for start in starts:
                part = memory[start : start + IO_REQUEST_BYTES]
                self._requests.put(IoRequest(transfer, file, direction, part, buffer, offset + start))
        return transfer

    def _start_threads(self) -> None:
        for index in range(0 if self._has_threads else self._thread_count):
            name = f"zeroshard-disk-{index}"
            threading.Thread(target=_run_requests, args=(self._requests,), name=name, daemon=True).start()
        self._has_threads = True

    def _file_offset(self, tensor: torch.Tensor, needs_whole_pages: bool) -> int:
        """Return where a tensor starts in the file.

        ``needs_whole_pages``: raise if its last page also holds other elements.
        """
        storage = tensor.untyped_storage()
        extent = self._mappings.get(storage.data_ptr())
        if extent is None:
            raise ValueError(self._unknown_tensor_message(tensor))
        start = int(tensor.storage_offset()) * tensor.itemsize
        stop = start + tensor.nbytes
        if (
            not tensor.is_contiguous()
            or start % PAGE_BYTES
            or (needs_whole_pages and stop % PAGE_BYTES and stop != storage.nbytes())
        ):
            raise ValueError(
                f"cannot transfer bytes {start} to {stop} of a tensor of {storage.nbytes()} bytes: the view must be "
                f"contiguous and start at a multiple of {PAGE_BYTES} bytes; a write must also end at one, or at the "
                "end of the tensor"
            )
        return extent.offset + start

    def _unknown_tensor_message(self, tensor: torch.Tensor) -> str:
        return (
            f"a tensor of {tensor.numel()} elements, {tensor.dtype}, on {tensor.device} does not belong to the disk in "
            f"{self.directory}, or was freed: pass a tensor that zeros() returned, or a view of one"
        )

    def _checked_file(self) -> OffloadFile:
        file = self._file
        if file is None:
            raise DiskError(f"the disk in {self.directory} is closed: create a new one")
        if os.getpid() != self._pid:  # a fork shares the file but has no threads
            raise DiskError(f"the disk in {self.directory} belongs to process {self._pid}: create one in this process")
        return file

    def close(self) -> None:
        """Close the file after the transfers in flight. Tensors keep their values as long as they exist."""
        with self._lock:
            self._finalizer()
            self._file = None
            self._mappings.clear()


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """Return page-aligned host memory for either side of a transfer, rounded up to full pages, as uint8.

    Page-aligned views of it work too. It is not pinned; the owner may pin it. Forked processes do not inherit it.

    >>> buffer = aligned_buffer(5000)
    >>> buffer.numel(), buffer.data_ptr() % 4096
    (8192, 0)
    """
    if nbytes < 0:
        raise ValueError(f"nbytes must be at least 0, got {nbytes}")
    return mmap_buffer(max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES)))


def _checked_memory(buffer: torch.Tensor, tensor: torch.Tensor, nbytes: int) -> memoryview:
    """Return the first ``nbytes`` of a buffer; raise if it cannot be used for a transfer."""
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
            f"a tensor of {buffer.nbytes} bytes on {buffer.device} cannot be the buffer of a transfer of {nbytes} "
            f"bytes: it must be contiguous, start at a multiple of {PAGE_BYTES} and have space for full pages. Use one "
            "from aligned_buffer()"
        )
    if buffer.nbytes < tensor.nbytes or buffer.dtype not in (torch.uint8, tensor.dtype):
        raise ValueError(
            f"a buffer of {buffer.numel()} × {buffer.dtype} cannot hold a tensor of {tensor.numel()} × {tensor.dtype}"
            ": it must have the same dtype, or uint8, and at least as many bytes"
        )
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
