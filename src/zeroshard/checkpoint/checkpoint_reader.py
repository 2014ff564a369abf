"""Contents: a checkpoint read in one process, without a model and without ranks, one whole tensor at a time.

[Note: reading tensor after tensor]
A tensor that 64 ranks wrote lies in 64 files, a piece in each, and the next tensor's pieces lie right behind: mostly in
the block where this one ended. A file is therefore left open together with the block that was read last, else small
tensors would have the same 4 MiB read and summed again and again. No more than ``MAX_OPEN_FILES`` files are, 256 MiB of
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

MAX_OPEN_FILES = 64  # files


class CheckpointReader:
    """What a checkpoint holds. ``path`` is one, a directory of some, for the latest, or a run of `zeroshard train`.

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
        self._open_files: OrderedDict[int, _CachingReader] = OrderedDict()  # by number, the one used last at the end
        self._workers = CheckpointWorkers(2)

    def read_tensor(
        self, fqn: str, dtype: torch.dtype | None = None, buffer: torch.Tensor | None = None
    ) -> torch.Tensor:  # in its shape, contiguous
        """Read a tensor, ``model/NAME`` for one, and check each block of it.

        Elements are cast as they are read, where ``dtype`` is not the saved one. ``memory``, bytes, is where the tensor
        is put, if it is to be put anywhere: only a tensor whose elements were saved in another order is beside it.
        """
        saved = self.index.tensors[fqn]
        if buffer is None:  # not for more than there is
            self.index.check_file_sizes(self.path, {stretch.file_number for stretch in saved.shards})
        dtype = dtype or saved.dtype
        if buffer is None:
            buffer = torch.empty(saved.numel * dtype.itemsize, dtype=torch.uint8)
        line = buffer[: saved.numel * dtype.itemsize].view(dtype)
        reads: dict[int, list[FileRange]] = {}
        for stretch in saved.shards:
            end = stretch.byte_offset + stretch.numel * saved.dtype.itemsize
            to = line[stretch.start : stretch.start + stretch.numel]
            reads.setdefault(stretch.file_number, []).append(FileRange(stretch.byte_offset, end, saved.dtype, to))
        for number, wanted in sorted(reads.items()):
            read_ranges(self._open_file(number), wanted, self._workers)
        return saved.element_order.unflatten(line, saved.shape).contiguous()

    def _open_file(self, number: int) -> _CachingReader:
        """Open a file, or take it as it was left: see [Note: reading tensor after tensor]."""
        if number not in self._open_files:
            if len(self._open_files) == MAX_OPEN_FILES:
                self._open_files.popitem(last=False)[1].__exit__()
            record = self.index.files[number]
            self._open_files[number] = _CachingReader(self.path / record.name, record)
            self.index.check_file_headers(self.path, [number])
        self._open_files.move_to_end(number)
        return self._open_files[number]

    def verify(self) -> Iterator[str]:
        """Read everything, and tell what is wrong with each file and tensor that is not whole."""
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
    """A file that keeps the block it read last."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        super().__init__(path, record)
        self._cached_number, self._cached_bytes = -1, 0
        self._cached_block = torch.empty(min(BLOCK_BYTES, record.nbytes), dtype=torch.uint8)

    def iter_blocks(
        self, block_numbers: Iterable[int], workers: CheckpointWorkers
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the block that was kept, where it is the first that is wanted, and then the others."""
        wanted = list(block_numbers)
        if wanted and wanted[0] == self._cached_number:
            yield self._cached_number * BLOCK_BYTES, self._cached_block[: self._cached_bytes]
            del wanted[0]
        for first, block in super().iter_blocks(wanted, workers) if wanted else ():
            if first == wanted[-1] * BLOCK_BYTES:
                self._cached_number, self._cached_bytes = wanted[-1], block.numel()
                self._cached_block[: self._cached_bytes].copy_(block)
            yield first, block
