"""Contents: a checkpoint read in one process, without a model and without ranks, one whole tensor at a time.

[Note: reading tensor after tensor]
A tensor that 64 ranks wrote lies in 64 files, a piece in each, and the next tensor's pieces lie right behind: mostly in
the block where this one ended. A file is therefore left open together with the block that was read last, else small
tensors would have the same 4 MiB read and summed again and again. No more than ``OPEN`` files are, 256 MiB of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from zeroshard.checkpoint.blocks import BLOCK, BlockReader, FileRecord, Workers
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.history import find_checkpoint
from zeroshard.checkpoint.index import Index
from zeroshard.checkpoint.reader import Read, deliver

OPEN = 64  # files


class Contents:
    """What a checkpoint holds. ``path`` is one, a directory of some, for the latest, or a run of `zeroshard train`.

    >>> import tempfile, zeroshard
    >>> model = torch.nn.Linear(2, 1)
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-7", model).path
    >>> with Contents(path) as contents:
    ...     torch.equal(contents.tensor("model/weight"), model.weight)
    True
    """

    def __init__(self, path: Path, index: Index | None = None) -> None:
        self.path = find_checkpoint(path) if index is None else path
        self.index = index or Index.read(self.path)
        self._files: OrderedDict[int, _KeepingReader] = OrderedDict()  # by number, the one used last at the end
        self._workers = Workers(2)

    def tensor(
        self, fqn: str, dtype: torch.dtype | None = None, memory: torch.Tensor | None = None
    ) -> torch.Tensor:  # in its shape, contiguous
        """Read a tensor, ``model/NAME`` for one, and check each block of it.

        Elements are cast as they are read, where ``dtype`` is not the saved one. ``memory``, bytes, is where the tensor
        is put, if it is to be put anywhere: only a tensor whose elements were saved in another order is beside it.
        """
        saved = self.index.tensors[fqn]
        if memory is None:  # not for more than there is
            self.index.check_sizes(self.path, {stretch.file for stretch in saved.stretches})
        dtype = dtype or saved.dtype
        if memory is None:
            memory = torch.empty(saved.numel * dtype.itemsize, dtype=torch.uint8)
        line = memory[: saved.numel * dtype.itemsize].view(dtype)
        reads: dict[int, list[Read]] = {}
        for stretch in saved.stretches:
            end = stretch.offset + stretch.numel * saved.dtype.itemsize
            to = line[stretch.start : stretch.start + stretch.numel]
            reads.setdefault(stretch.file, []).append(Read(stretch.offset, end, saved.dtype, to))
        for number, wanted in sorted(reads.items()):
            deliver(self._file(number), wanted, self._workers)
        return saved.order.whole(line, saved.shape).contiguous()

    def _file(self, number: int) -> _KeepingReader:
        """Open a file, or take it as it was left: see [Note: reading tensor after tensor]."""
        if number not in self._files:
            if len(self._files) == OPEN:
                self._files.popitem(last=False)[1].__exit__()
            record = self.index.files[number]
            self._files[number] = _KeepingReader(self.path / record.name, record)
            self.index.check_headers(self.path, [number])
        self._files.move_to_end(number)
        return self._files[number]

    def damages(self) -> Iterator[str]:
        """Read everything, and tell what is wrong with each file and tensor that is not whole."""
        for number, record in enumerate(self.index.files):
            try:
                with BlockReader(self.path / record.name, record) as file:
                    for _ in file.blocks(range(len(record.sums)), self._workers):
                        pass
                self.index.check_headers(self.path, [number])
            except CheckpointError as error:
                yield str(error)

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        while self._files:
            self._files.popitem()[1].__exit__()


class _KeepingReader(BlockReader):
    """A file that keeps the block it read last."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        super().__init__(path, record)
        self._number, self._filled = -1, 0
        self._block = torch.empty(min(BLOCK, record.nbytes), dtype=torch.uint8)

    def blocks(self, numbers: Iterable[int], workers: Workers) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the block that was kept, where it is the first that is wanted, and then the others."""
        wanted = list(numbers)
        if wanted and wanted[0] == self._number:
            yield self._number * BLOCK, self._block[: self._filled]
            del wanted[0]
        for first, block in super().blocks(wanted, workers) if wanted else ():
            if first == wanted[-1] * BLOCK:
                self._number, self._filled = wanted[-1], block.numel()
                self._block[: self._filled].copy_(block)
            yield first, block
