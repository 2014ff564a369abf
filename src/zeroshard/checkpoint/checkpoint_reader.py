"""Read a checkpoint in one process, without a model or ranks, one full tensor at a time.

[Note: reading tensor after tensor]
A tensor written by 64 ranks has a shard in each of 64 files. The next tensor's shards follow directly, mostly in the
block where this one ended. So each file stays open and keeps the block that was read last; otherwise small tensors
would read and checksum the same 4 MiB again and again. At most ``MAX_OPEN_FILES`` files are open, with 256 MiB of
blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from zeroshard.checkpoint.block_files import BLOCK_BYTES, BlockReader, CheckpointWorkers, FileRecord
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.index import CheckpointIndex
from zeroshard.checkpoint.reader import FileRange, read_ranges
from zeroshard.checkpoint.retention import find_checkpoint

MAX_OPEN_FILES = 64


class CheckpointReader:
    """Reads full tensors from a checkpoint.

    ``path`` is a checkpoint, a directory of checkpoints (the latest is read) or the output directory of
    `zeroshard train`.

    >>> import tempfile, zeroshard
    >>> model = torch.nn.Linear(2, 1)
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-7", model).path
    >>> with CheckpointReader(path) as contents:
    ...     torch.equal(contents.read_tensor("model/weight"), model.weight)
    True
    """

    def __init__(self, path: Path, index: CheckpointIndex | None = None) -> None:
        self.path = find_checkpoint(path) if index is None else path
        self.index = index or CheckpointIndex.read(self.path)
        self._open_files: OrderedDict[int, _CachingReader] = OrderedDict()  # by file number; least recently used first
        self._workers = CheckpointWorkers(2)

    def read_tensor(
        self, fqn: str, dtype: torch.dtype | None = None, buffer: torch.Tensor | None = None
    ) -> torch.Tensor:  # full shape, contiguous
        """Read a tensor, for example ``model/NAME``, and verify its blocks.

        Elements are cast while they are read if ``dtype`` is not the saved one. The tensor is a view of ``buffer``
        (uint8), if given; only a tensor that was not saved in row-major order is a new allocation.
        """
        saved = self.index.tensors[fqn]
        if buffer is None:  # check sizes before allocating
            self.index.check_file_sizes(self.path, {shard.file_number for shard in saved.shards})
        dtype = dtype or saved.dtype
        if buffer is None:
            buffer = torch.empty(saved.numel * dtype.itemsize, dtype=torch.uint8)
        flat = buffer[: saved.numel * dtype.itemsize].view(dtype)
        ranges_by_file: dict[int, list[FileRange]] = {}
        for shard in saved.shards:
            end = shard.byte_offset + shard.numel * saved.dtype.itemsize
            target = flat[shard.start : shard.start + shard.numel]
            ranges_by_file.setdefault(shard.file_number, []).append(
                FileRange(shard.byte_offset, end, saved.dtype, target)
            )
        for number, ranges in sorted(ranges_by_file.items()):
            read_ranges(self._open_file(number), ranges, self._workers)
        return saved.element_order.unflatten(flat, saved.shape).contiguous()

    def _open_file(self, number: int) -> _CachingReader:
        """Return the open file, or open it: see [Note: reading tensor after tensor]."""
        if number not in self._open_files:
            if len(self._open_files) == MAX_OPEN_FILES:
                self._open_files.popitem(last=False)[1].__exit__()
            record = self.index.files[number]
            self._open_files[number] = _CachingReader(self.path / record.name, record)
            self.index.check_file_headers(self.path, [number])
        self._open_files.move_to_end(number)
        return self._open_files[number]

    def verify(self) -> Iterator[str]:
        """Read all files and yield an error message for each damaged one."""
        for number, record in enumerate(self.index.files):
            try:
                with BlockReader(self.path / record.name, record) as file:
                    for _ in file.iter_blocks(range(len(record.sums)), self._workers):
                        pass
                self.index.check_file_headers(self.path, [number])
            except CheckpointError as error:
                yield str(error)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        while self._open_files:
            self._open_files.popitem()[1].__exit__()


class _CachingReader(BlockReader):
    """A reader that caches the block it read last."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        super().__init__(path, record)
        self._cached_number, self._cached_bytes = -1, 0
        self._cached_block = torch.empty(min(BLOCK_BYTES, record.nbytes), dtype=torch.uint8)

    def iter_blocks(
        self, block_numbers: Iterable[int], workers: CheckpointWorkers
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the blocks; take the first from the cache if it is there."""
        numbers = list(block_numbers)
        if numbers and numbers[0] == self._cached_number:
            yield self._cached_number * BLOCK_BYTES, self._cached_block[: self._cached_bytes]
            del numbers[0]
        for start, block in super().iter_blocks(numbers, workers) if numbers else ():
            if start == numbers[-1] * BLOCK_BYTES:
                self._cached_number, self._cached_bytes = numbers[-1], block.numel()
                self._cached_block[: self._cached_bytes].copy_(block)
            yield start, block
