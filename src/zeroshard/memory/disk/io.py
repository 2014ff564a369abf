"""Transfer: bytes on their way between a file and memory, and the threads that move them.

[Note: threads that only wait]
The threads are Python's: nearly all their time is spent inside one system call for some MiB, with the interpreter free
for others. They are started by the first transfer, refer to the queue and to nothing else, and do not keep the
interpreter from ending. What they are moving at that moment stays in memory: a piece refers to its buffer and its file,
so that neither is gone, nor the file's descriptor another's, before the system call returns.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Literal

import torch

from zeroshard.memory.disk.file import DiskError, OffloadFile

IO_REQUEST_BYTES = 8 << 20  # bytes of one system call


class Transfer:
    """A read or a write that was started. It is over when :meth:`wait` has returned, and only then has it succeeded.

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
        self._failure: tuple[str, BaseException | None] | None = None  # the first one's words and its cause
        if not requests:
            self._done_event.set()

    @property
    def is_done(self) -> bool:
        """Whether no byte is being moved any more: :meth:`wait` returns, or raises, at once."""
        return self._done_event.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether a piece has failed; the others need not be moved."""
        return self._failure is not None

    def wait(self) -> None:
        """Wait for the last byte. Raises :class:`DiskError` where one was not moved; the buffer is free either way."""
        self._done_event.wait()
        if self._failure is not None:
            words, cause = self._failure
            raise DiskError(words) from cause  # a new one each time: an error that is kept would keep its stack

    def finish_request(self, error: BaseException | None) -> None:
        """One piece is over."""
        with self._lock:
            if error is not None and self._failure is None:
                words = str(error) if isinstance(error, DiskError) else f"a transfer of the disk tier failed: {error!r}"
                cause = error.__cause__ if isinstance(error, DiskError) else error
                self._failure = words, cause and cause.with_traceback(None)  # its stack would keep the buffer
            self._requests_left -= 1
            if not self._requests_left:
                self._done_event.set()


@dataclass(frozen=True)
class IoRequest:
    """What one system call is to move."""

    transfer: Transfer
    file: OffloadFile
    direction: Literal["read", "write"]
    memory: memoryview
    owner: torch.Tensor  # of that memory
    offset: int  # in the file

    def run(self) -> None:
        """Move it, unless another piece of the transfer has failed."""
        try:
            if not self.transfer.has_failed:
                self.file.transfer(self.direction, self.memory, self.offset)
        except BaseException as error:  # whatever it was, somebody waits
            self.transfer.finish_request(error)
        else:
            self.transfer.finish_request(None)


class IoThreads:
    """The threads of one disk.

    >>> movers = IoThreads(2)
    >>> movers.close()
    """

    def __init__(self, threads: int) -> None:
        self._thread_count = threads
        self._is_running = False
        self._requests: queue.SimpleQueue[IoRequest | None] = queue.SimpleQueue()

    def submit(self, request: IoRequest) -> None:
        """Have a piece moved, after those that came before. One caller at a time."""
        if not self._is_running:
            for number in range(self._thread_count):
                name = f"zeroshard-disk-{number}"
                threading.Thread(target=_io_loop, args=(self._requests,), name=name, daemon=True).start()
            self._is_running = True
        self._requests.put(request)

    def close(self) -> None:
        """Let the threads end after what they have. Takes no lock: the garbage collector may call it anywhere."""
        for _ in range(self._thread_count):
            self._requests.put(None)


def _io_loop(requests: queue.SimpleQueue[IoRequest | None]) -> None:
    while (piece := requests.get()) is not None:
        piece.run()
        del piece  # and the buffer it refers to, while this thread waits
