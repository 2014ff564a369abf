"""Transfer: an asynchronous read or write of a file, and the I/O threads that execute it.

[Note: threads that only wait]
Python threads are sufficient: they spend nearly all their time inside a system call for several MiB, without the GIL.
The first transfer starts them. They reference only the queue, and do not keep the interpreter from exiting. The memory
of a request in progress stays valid: a request references its buffer and its file, so neither is freed, and the file
descriptor is not reused, before the system call returns.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Literal

import torch

from zeroshard.memory.disk.file import DiskError, OffloadFile

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
                message = (
                    str(error) if isinstance(error, DiskError) else f"a transfer of the disk tier failed: {error!r}"
                )
                cause = error.__cause__ if isinstance(error, DiskError) else error
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


class IoThreads:
    """The I/O threads of one disk.

    >>> threads = IoThreads(2)
    >>> threads.close()
    """

    def __init__(self, threads: int) -> None:
        self._thread_count = threads
        self._is_running = False
        self._requests: queue.SimpleQueue[IoRequest | None] = queue.SimpleQueue()

    def submit(self, request: IoRequest) -> None:
        """Queue a request. Not thread-safe: one caller at a time."""
        if not self._is_running:
            for index in range(self._thread_count):
                name = f"zeroshard-disk-{index}"
                threading.Thread(target=_io_loop, args=(self._requests,), name=name, daemon=True).start()
            self._is_running = True
        self._requests.put(request)

    def close(self) -> None:
        """Stop the threads after the queued requests. Takes no lock: the garbage collector may call it at any point."""
        for _ in range(self._thread_count):
            self._requests.put(None)


def _io_loop(requests: queue.SimpleQueue[IoRequest | None]) -> None:
    while (request := requests.get()) is not None:
        request.run()
        del request  # frees its buffer while this thread waits
