"""Files of checksummed blocks, written and read in bounded memory.

[Note: blocks]
A load on another number of ranks reads byte ranges of files, and a range must be verified like a complete file. So a
file is split into blocks of ``BLOCK_BYTES`` from its first byte, and the index contains the CRC-32 of each block. The
writer fills one buffer while worker threads checksum and write others. The reader keeps a few blocks in flight.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.group import CheckpointError
from zeroshard.utils.safetensors_files import as_memoryview

BLOCK_BYTES = 4 * 2**20
BLOCKS_IN_FLIGHT = 3  # blocks that are read or written at the same time
DAMAGED_FILE_REMEDY = "Load an earlier checkpoint, or copy this file again from its source"


@dataclass(frozen=True)
class FileRecord:
    """The index entry of a file."""

    name: str
    nbytes: int
    block_crc32: tuple[int, ...]

    def check_size(self, directory: Path) -> None:
        """Raise if the file is not in ``directory``, or has another size."""
        path = directory / self.name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. {DAMAGED_FILE_REMEDY}")
        nbytes = path.stat().st_size
        if nbytes != self.nbytes:
            raise CheckpointError(
                f"{path} has {nbytes} bytes, expected {self.nbytes}: it is truncated or another file. "
                f"{DAMAGED_FILE_REMEDY}"
            )


class CheckpointWorkers:
    """Threads of one save or load, started up front: none can be started during interpreter shutdown.

    For the same reason this is not a ``ThreadPoolExecutor``: during shutdown it accepts no work.
    """

    def __init__(self, count: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._worker_loop, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        """Run ``fn`` on a worker thread and return its future."""
        future: Future[Any] = Future()
        self._queue.put((fn, future))
        return future

    def _worker_loop(self) -> None:
        while (item := self._queue.get()) is not None:
            fn, future = item
            try:
                future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)
            del item, fn, future  # release their buffers while this thread waits

    def __enter__(self) -> CheckpointWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish all submitted work and join the threads."""
        for _thread in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


class BlockWriter:
    """Writes one file in checksummed blocks.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.bin"
    >>> with CheckpointWorkers(2) as workers:
    ...     with BlockWriter(path, workers) as file:
    ...         file.write(torch.arange(3, dtype=torch.uint8))
    ...     file.record
    FileRecord(name='a.bin', nbytes=3, block_crc32=(139757951,))
    """

    record: FileRecord
    """Set when the file is closed."""

    def __init__(self, path: Path, workers: CheckpointWorkers, pinned: bool = False) -> None:
        self._path, self._workers = path, workers
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._free_buffers = [
            torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned, device="cpu")
            for _ in range(BLOCKS_IN_FLIGHT)
        ]
        self._in_flight: deque[tuple[torch.Tensor, Future[int]]] = deque()  # buffer, and the write of it
        self._buffer = self._free_buffers.pop()
        self._filled_bytes = 0
        self._checksums: list[int] = []
        self._nbytes = 0

    def write(self, data: torch.Tensor) -> None:
        """Append bytes: a 1-D uint8 tensor on any device."""
        position = 0
        while position < data.numel():
            count = min(BLOCK_BYTES - self._filled_bytes, data.numel() - position)
            self._buffer[self._filled_bytes : self._filled_bytes + count].copy_(data[position : position + count])
            self._filled_bytes += count
            position += count
            if self._filled_bytes == BLOCK_BYTES:
                self._start_block_write()

    def _start_block_write(self) -> None:
        """Submit the filled block for checksum and write, and continue with a free buffer."""
        view = as_memoryview(self._buffer)[: self._filled_bytes]
        previous_write = self._in_flight[-1][1] if self._in_flight else None
        write = self._workers.submit(partial(self._write_block, view, previous_write))
        self._in_flight.append((self._buffer, write))
        self._nbytes += self._filled_bytes
        self._filled_bytes = 0
        if not self._free_buffers:
            self._wait_oldest_write()
        self._buffer = self._free_buffers.pop()

    def _write_block(self, view: memoryview, previous_write: Future[int] | None) -> int:
        """Write a block after the previous one; return its checksum."""
        checksum = zlib.crc32(view)
        if previous_write is not None:
            previous_write.result()
        while view:
            view = view[self._file.write(view) :]
        return checksum

    def _wait_oldest_write(self) -> None:
        buffer, write = self._in_flight.popleft()
        self._checksums.append(write.result())
        self._free_buffers.append(buffer)

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
            for _buffer, write in self._in_flight:
                write.exception()  # wait; the error that matters was raised before
            self._file.close()
        self.record = FileRecord(self._path.name, self._nbytes, tuple(self._checksums))


class BlockReader:
    """Reads blocks of one file and verifies each one before use. Keeps the block that was read last."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path, self._record = path, record
        self._last_number, self._last_block = -1, torch.empty(0, dtype=torch.uint8, device="cpu")
        record.check_size(path.parent)
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. {DAMAGED_FILE_REMEDY}") from error

    def iter_blocks(self, numbers: Iterable[int], workers: CheckpointWorkers) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first byte, bytes) of each block, in order. A block is valid until the next one is requested."""
        number, block = self._last_number, self._last_block
        pending = deque(numbers)
        if pending and pending[0] == number:
            yield pending.popleft() * BLOCK_BYTES, block
        in_flight: deque[tuple[int, torch.Tensor, Future[int]]] = deque()
        free_buffers = [
            torch.empty(min(BLOCK_BYTES, self._record.nbytes), dtype=torch.uint8, device="cpu")
            for _ in range(min(BLOCKS_IN_FLIGHT, len(pending)))
        ]
        while pending or in_flight:
            while pending and free_buffers:
                number, buffer = pending.popleft(), free_buffers.pop()
                in_flight.append((number, buffer, workers.submit(partial(self._read_block, number, buffer))))
            number, buffer, read = in_flight.popleft()
            block = buffer[: read.result()]
            yield number * BLOCK_BYTES, block
            free_buffers.append(buffer)
        self._last_number, self._last_block = number, block

    def _read_block(self, number: int, buffer: torch.Tensor) -> int:
        start = number * BLOCK_BYTES
        view = as_memoryview(buffer)[: min(BLOCK_BYTES, self._record.nbytes - start)]
        filled = 0
        while filled < len(view):
            count = os.preadv(self._file.fileno(), [view[filled:]], start + filled)
            if count == 0:
                raise CheckpointError(f"{self._path} was truncated to {start + filled} bytes while it was read")
            filled += count
        if zlib.crc32(view) != self._record.block_crc32[number]:
            raise CheckpointError(
                f"{self._path} is damaged: bytes {start} to {start + filled} do not match their checksum. "
                f"{DAMAGED_FILE_REMEDY}"
            )
        return filled

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
