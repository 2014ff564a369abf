"""Blocks: files in blocks of a fixed size, each with a checksum, written and read in bounded memory.

[Note: blocks]
A rank that loads with another number of ranks needs parts of files, and a part must be checked as well as the whole.
So a file is cut into blocks of ``BLOCK`` bytes from its first byte on, and the CRC-32 of each is in the index. Writing
fills one buffer while another is summed and written by a thread beside it; reading fetches and sums a few blocks ahead.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.weights import bytes_of

BLOCK = 4 * 2**20  # bytes
AHEAD = 3  # blocks that are read or written while another is filled or emptied


@dataclass(frozen=True)
class FileRecord:
    """What the index says of a file."""

    name: str
    nbytes: int
    sums: tuple[int, ...]  # the CRC-32 of each block


class Workers:
    """Threads that live as long as one save or load: a thread cannot be started when the interpreter is ending."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Job] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Any]) -> Job:
        """Have something done; ask the job for its result."""
        job = Job()
        self._jobs.put((work, job))
        return job

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            work, job = item
            try:
                job.value = work()
            except BaseException as error:
                job.error = error
            job.done.set()
            del item, work, job  # and the buffers they hold, while this thread waits

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, after what they still have to do."""
        for _thread in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


class Job:
    """Something that a worker does."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        """Wait for it; raises what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.value


class BlockWriter:
    """Writes one file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.bin"
    >>> with Workers(2) as workers:
    ...     with BlockWriter(path, workers) as file:
    ...         file.write(torch.arange(3, dtype=torch.uint8))
    ...     file.record
    FileRecord(name='a.bin', nbytes=3, sums=(139757951,))
    """

    record: FileRecord
    """Set when the file is closed."""

    def __init__(self, path: Path, workers: Workers, pinned: bool = False) -> None:
        self._path, self._workers = path, workers
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._free = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned) for _ in range(AHEAD)]
        self._busy: list[tuple[torch.Tensor, Job, Job]] = []
        self._block = self._free.pop()
        self._filled = 0
        self._sums: list[int] = []
        self._nbytes = 0

    def write(self, data: torch.Tensor) -> None:
        """Append bytes, 1-D uint8 on any device."""
        at = 0
        while at < data.numel():
            count = min(BLOCK - self._filled, data.numel() - at)
            self._block[self._filled : self._filled + count].copy_(data[at : at + count])
            self._filled += count
            at += count
            if self._filled == BLOCK:
                self._send()

    def _send(self) -> None:
        """Have the block summed and written, and go on with another."""
        block, view = self._block, bytes_of(self._block)[: self._filled]
        self._nbytes += self._filled
        summed = self._workers.submit(lambda: zlib.crc32(view))
        earlier = self._busy[-1][2] if self._busy else None

        def put() -> None:
            if earlier is not None:
                earlier.result()  # blocks go to the file in their order
            _write_all(self._file, view)

        self._busy.append((block, summed, self._workers.submit(put)))
        self._filled = 0
        if not self._free:
            self._take_back()
        self._block = self._free.pop()

    def _take_back(self) -> None:
        block, summed, written = self._busy.pop(0)
        self._sums.append(summed.result())
        written.result()
        self._free.append(block)

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._filled:
                    self._send()
                while self._busy:
                    self._take_back()
                os.fsync(self._file.fileno())
        finally:
            for _block, _summed, written in self._busy:
                written.done.wait()
            self._file.close()
        self.record = FileRecord(self._path.name, self._nbytes, tuple(self._sums))


def _write_all(file: Any, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


class BlockReader:
    """Reads parts of one file, each block checked before it is used."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path, self._record = path, record
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise CheckpointError(f"{path}, a file of the checkpoint, cannot be read: {error.strerror}") from error
        found = os.fstat(self._file.fileno()).st_size
        if found != record.nbytes:
            self._file.close()
            raise CheckpointError(
                f"{path} has {found} bytes and was written with {record.nbytes}: it is truncated or foreign. Load an "
                "earlier checkpoint, or bring this file anew from where it was copied"
            )

    def blocks(self, numbers: Iterable[int], workers: Workers) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first byte, bytes) of blocks, in order. A block's memory is used again after the next one."""
        waiting: list[tuple[int, torch.Tensor, Job]] = []
        free = [torch.empty(min(BLOCK, self._record.nbytes), dtype=torch.uint8) for _ in range(AHEAD)]
        for number in numbers:
            if not free:
                yield from self._ready(waiting.pop(0), free)
            buffer = free.pop()
            waiting.append((number, buffer, workers.submit(partial(self._fetch, number, buffer))))
        while waiting:
            yield from self._ready(waiting.pop(0), free)

    def _ready(
        self, item: tuple[int, torch.Tensor, Job], free: list[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        number, buffer, job = item
        count = job.result()
        yield number * BLOCK, buffer[:count]
        free.append(buffer)

    def _fetch(self, number: int, buffer: torch.Tensor) -> int:
        start = number * BLOCK
        view = bytes_of(buffer)[: min(BLOCK, self._record.nbytes - start)]
        got = 0
        while got < len(view):
            count = os.preadv(self._file.fileno(), [view[got:]], start + got)
            if count == 0:
                raise CheckpointError(f"{self._path} ended at byte {start + got} while it was read")
            got += count
        if zlib.crc32(view) != self._record.sums[number]:
            raise CheckpointError(
                f"{self._path} is damaged: bytes {start} to {start + got} are not what was written (checksum). Load an "
                "earlier checkpoint, or bring this file anew from where it was copied"
            )
        return got

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
