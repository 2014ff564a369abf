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

from zeroshard.memory.file import DiskError, File

PIECE = 8 << 20  # bytes of one system call


class Transfer:
    """A read or a write that was started. It is over when :meth:`wait` has returned, and only then has it succeeded.

    >>> transfer = Transfer(pieces=1)
    >>> transfer.done
    False
    >>> transfer.finish(None)
    >>> transfer.wait()
    """

    def __init__(self, pieces: int) -> None:
        self._left = pieces
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failure: tuple[str, BaseException | None] | None = None  # the first one's words and its cause
        if not pieces:
            self._over.set()

    @property
    def done(self) -> bool:
        """Whether no byte is being moved any more: :meth:`wait` returns, or raises, at once."""
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        """Whether a piece has failed; the others need not be moved."""
        return self._failure is not None

    def wait(self) -> None:
        """Wait for the last byte. Raises :class:`DiskError` where one was not moved; the buffer is free either way."""
        self._over.wait()
        if self._failure is not None:
            words, cause = self._failure
            raise DiskError(words) from cause  # a new one each time: an error that is kept would keep its stack

    def finish(self, error: BaseException | None) -> None:
        """One piece is over."""
        with self._lock:
            if error is not None and self._failure is None:
                words = str(error) if isinstance(error, DiskError) else f"a transfer of the disk tier failed: {error!r}"
                cause = error.__cause__ if isinstance(error, DiskError) else error
                self._failure = words, cause and cause.with_traceback(None)  # its stack would keep the buffer
            self._left -= 1
            if not self._left:
                self._over.set()


@dataclass(frozen=True)
class Piece:
    """What one system call is to move."""

    transfer: Transfer
    file: File
    way: Literal["read", "write"]
    memory: memoryview
    owner: torch.Tensor  # of that memory
    offset: int  # in the file

    def run(self) -> None:
        """Move it, unless another piece of the transfer has failed."""
        try:
            if not self.transfer.failed:
                self.file.move(self.way, self.memory, self.offset)
        except BaseException as error:  # whatever it was, somebody waits
            self.transfer.finish(error)
        else:
            self.transfer.finish(None)


class Movers:
    """The threads of one disk.

    >>> movers = Movers(2)
    >>> movers.close()
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._running = False
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()

    def submit(self, piece: Piece) -> None:
        """Have a piece moved, after those that came before. One caller at a time."""
        if not self._running:
            for number in range(self._threads):
                name = f"zeroshard-disk-{number}"
                threading.Thread(target=_work, args=(self._pieces,), name=name, daemon=True).start()
            self._running = True
        self._pieces.put(piece)

    def close(self) -> None:
        """Let the threads end after what they have. Takes no lock: the garbage collector may call it anywhere."""
        for _ in range(self._threads):
            self._pieces.put(None)


def _work(pieces: queue.SimpleQueue[Piece | None]) -> None:
    while (piece := pieces.get()) is not None:
        piece.run()
        del piece  # and the buffer it refers to, while this thread waits
