"""Blocks: files in blocks of a fixed size, each with a checksum, written and read in bounded memory.

[Note: blocks]
A rank that loads with another number of ranks needs parts of files, and a part must be checked as well as the whole. So
a file is cut into blocks of ``BLOCK_BYTES`` bytes from its first byte on, and the CRC-32 of each is in the index.
Writing fills one buffer while another is summed and written by a thread beside it; reading fetches and sums a few
blocks ahead.
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
from zeroshard.checkpoint.safetensors_files import as_memoryview

BLOCK_BYTES = 4 * 2**20  # bytes
BLOCKS_IN_FLIGHT = 3  # blocks that are read or written while another is filled or emptied


@dataclass(frozen=True)
class FileRecord:
    """What the index says of a file."""

    name: str
    nbytes: int
    sums: tuple[int, ...]  # the CRC-32 of each block


class CheckpointWorkers:
    """Threads that live as long as one save or load: a thread cannot be started when the interpreter is ending."""

    def __init__(self, count: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], WorkerFuture] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._worker_loop, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[[], Any]) -> WorkerFuture:
        """Have something done; ask the job for its result."""
        job = WorkerFuture()
        self._queue.put((fn, job))
        return job

    def _worker_loop(self) -> None:
        while (item := self._queue.get()) is not None:
            work, job = item
            try:
                job.value = work()
            except BaseException as error:
                job.error = error
            job.done_event.set()
            del item, work, job  # and the buffers they hold, while this thread waits

    def __enter__(self) -> CheckpointWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, after what they still have to do."""
        for _thread in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


class WorkerFuture:
    """Something that a worker does."""

    def __init__(self) -> None:
        self.done_event = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        """Wait for it; raises what it raised."""
        self.done_event.wait()
        if self.error is not None:
            raise self.error
        return self.value


class BlockWriter:
    """Writes one file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.bin"
    >>> with CheckpointWorkers(2) as workers:
    ...     with BlockWriter(path, workers) as file:
    ...         file.write(torch.arange(3, dtype=torch.uint8))
    ...     file.record
    FileRecord(name='a.bin', nbytes=3, sums=(139757951,))
    """

    record: FileRecord
    """Set when the file is closed."""

    def __init__(self, path: Path, workers: CheckpointWorkers, pinned: bool = False) -> None:
        self._path, self._workers = path, workers
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._free_buffers = [
            torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(BLOCKS_IN_FLIGHT)
        ]
        self._in_flight: list[tuple[torch.Tensor, WorkerFuture, WorkerFuture]] = []
        self._buffer = self._free_buffers.pop()
        self._filled_bytes = 0
        self._checksums: list[int] = []
        self._nbytes = 0

    def write(self, data: torch.Tensor) -> None:
        """Append bytes, 1-D uint8 on any device."""
        at = 0
        while at < data.numel():
            count = min(BLOCK_BYTES - self._filled_bytes, data.numel() - at)
            self._buffer[self._filled_bytes : self._filled_bytes + count].copy_(data[at : at + count])
            self._filled_bytes += count
            at += count
            if self._filled_bytes == BLOCK_BYTES:
                self._start_block_write()

    def _start_block_write(self) -> None:
        """Have the block summed and written, and go on with another."""
        block, view = self._buffer, as_memoryview(self._buffer)[: self._filled_bytes]
        self._nbytes += self._filled_bytes
        summed = self._workers.submit(lambda: zlib.crc32(view))
        earlier = self._in_flight[-1][2] if self._in_flight else None

        def put() -> None:
            if earlier is not None:
                earlier.result()  # blocks go to the file in their order
            _write_all(self._file, view)

        self._in_flight.append((block, summed, self._workers.submit(put)))
        self._filled_bytes = 0
        if not self._free_buffers:
            self._wait_oldest_write()
        self._buffer = self._free_buffers.pop()

    def _wait_oldest_write(self) -> None:
        block, summed, written = self._in_flight.pop(0)
        self._checksums.append(summed.result())
        written.result()
        self._free_buffers.append(block)

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._filled_bytes:
                    self._start_block_write()
                while self._in_flight:
                    self._wait_oldest_write()
                os.fsync(self._file.fileno())
        finally:
            for _block, _summed, written in self._in_flight:
                written.done_event.wait()
            self._file.close()
        self.record = FileRecord(self._path.name, self._nbytes, tuple(self._checksums))


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

    def iter_blocks(
        self, block_numbers: Iterable[int], workers: CheckpointWorkers
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first byte, bytes) of blocks, in order. A block's memory is used again after the next one."""
        waiting: list[tuple[int, torch.Tensor, WorkerFuture]] = []
        free = [torch.empty(min(BLOCK_BYTES, self._record.nbytes), dtype=torch.uint8) for _ in range(BLOCKS_IN_FLIGHT)]
        for number in block_numbers:
            if not free:
                yield from self._wait_block(waiting.pop(0), free)
            buffer = free.pop()
            waiting.append((number, buffer, workers.submit(partial(self._read_block, number, buffer))))
        while waiting:
            yield from self._wait_block(waiting.pop(0), free)

    def _wait_block(
        self, item: tuple[int, torch.Tensor, WorkerFuture], free: list[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        number, buffer, job = item
        count = job.result()
        yield number * BLOCK_BYTES, buffer[:count]
        free.append(buffer)

    def _read_block(self, number: int, buffer: torch.Tensor) -> int:
        start = number * BLOCK_BYTES
        view = as_memoryview(buffer)[: min(BLOCK_BYTES, self._record.nbytes - start)]
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
