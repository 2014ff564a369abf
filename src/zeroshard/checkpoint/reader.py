"""Read the tensors of a checkpoint: this rank's shards through DCP, or full tensors in a single process.

[Note: reading tensor after tensor]
A tensor written by 64 ranks has a shard in each of 64 files. The next tensor's shards follow directly, mostly in the
block where this one ended. So :class:`CheckpointReader` leaves files open, and each keeps the block that was read last;
otherwise small tensors would read and checksum the same 4 MiB again and again. At most ``MAX_OPEN_FILES`` files are
open, with 256 MiB of blocks.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zeroshard.checkpoint.block_files import BLOCK_BYTES, BlockReader, CheckpointWorkers
from zeroshard.checkpoint.flat_shards import FlatShards, ReorderedTensor
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.index import CheckpointIndex, TensorEntry
from zeroshard.checkpoint.retention import find_checkpoint

MAX_OPEN_FILES = 64


@dataclass
class FileRange:
    """A byte range of a file, and the tensor that receives its elements."""

    start: int
    end: int
    dtype: torch.dtype
    target: torch.Tensor

    def copy_from_block(self, block_start: int, block: torch.Tensor) -> None:
        """Copy the part of this range that lies in a block starting at byte ``block_start``; cast dtype and device."""
        start, end = max(self.start, block_start), min(self.end, block_start + block.numel())
        itemsize = self.dtype.itemsize
        target = self.target[(start - self.start) // itemsize : (end - self.start) // itemsize]
        target.copy_(block[start - block_start : end - block_start].view(self.dtype))


def read_ranges(file: BlockReader, ranges: Iterable[FileRange], workers: CheckpointWorkers) -> None:
    """Read byte ranges of a file; read each block once."""
    ranges_by_block: dict[int, list[FileRange]] = {}
    for file_range in ranges:
        for number in range(file_range.start // BLOCK_BYTES, -(-file_range.end // BLOCK_BYTES)):
            ranges_by_block.setdefault(number, []).append(file_range)
    for block_start, block in file.iter_blocks(sorted(ranges_by_block), workers):
        for file_range in ranges_by_block[block_start // BLOCK_BYTES]:
            file_range.copy_from_block(block_start, block)


class SafetensorsLoadPlanner(DefaultLoadPlanner):
    """Plans a load and notifies each target tensor when its elements have been read."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def dest_tensor(self, item: ReadItem) -> FlatShards:
        """Return the target tensor of an item."""
        chunks: FlatShards = self.state_dict[item.dest_index.fqn]
        return chunks

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.dest_tensor(read_item).on_elements_read(read_item.lengths[0])


class TensorStorageReader(StorageReader):
    """Base of the storage readers, independent of the file format. A reader serves one load."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        super().__init__()
        self.tensors = tensors
        self.aliases: dict[str, str] = {}  # requested name → saved name, where they differ

    def read_items(self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner) -> None:
        """Read the items into their target tensors."""
        raise NotImplementedError

    def saved_name(self, item: ReadItem) -> str:
        """Return the name under which an item's tensor was saved."""
        return self.aliases.get(item.storage_index.fqn, item.storage_index.fqn)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the sizes, dtypes and saved shards that DCP plans with."""
        tensors = {**self.tensors, **{fqn: self.tensors[saved] for fqn, saved in self.aliases.items()}}
        return Metadata(
            {
                fqn: TensorStorageMetadata(
                    TensorProperties(dtype=saved.dtype),
                    torch.Size([saved.numel]),
                    [ChunkStorageMetadata(torch.Size([s.start]), torch.Size([s.numel])) for s in saved.shards],
                )
                for fqn, saved in tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan."""
        assert isinstance(planner, SafetensorsLoadPlanner)
        self.read_items(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # DCP also requires these:

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsStorageReader(TensorStorageReader):
    """Reads the shards of a checkpoint."""

    def __init__(self, directory: Path, index: CheckpointIndex) -> None:
        super().__init__(index.tensors)
        self._directory, self._files = directory, index.files
        self._shard_entries = {
            (fqn, shard.start): shard for fqn, entry in index.tensors.items() for shard in entry.shards
        }

    def read_items(self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner) -> None:
        """Read tensors that must be reordered one by one, to limit memory; then read all others file by file."""
        reordered: dict[str, list[ReadItem]] = {}
        others: list[ReadItem] = []
        for item in items:
            needs_reorder = isinstance(planner.dest_tensor(item), ReorderedTensor)
            (reordered.setdefault(item.dest_index.fqn, []) if needs_reorder else others).append(item)
        with CheckpointWorkers(2) as workers:
            for batch in (*reordered.values(), others):
                self._read_batch(batch, planner, workers)

    def _read_batch(
        self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner, workers: CheckpointWorkers
    ) -> None:
        ranges_by_file: dict[int, list[FileRange]] = {}
        for item in items:
            name, offset = self.saved_name(item), item.storage_index.offset
            shard, dtype = self._shard_entries[name, 0 if offset is None else offset[0]], self.tensors[name].dtype
            start = shard.byte_offset + item.storage_offsets[0] * dtype.itemsize
            end = start + item.lengths[0] * dtype.itemsize
            file_range = FileRange(start, end, dtype, planner.resolve_tensor(item))
            ranges_by_file.setdefault(shard.file_number, []).append(file_range)
        for number, ranges in sorted(ranges_by_file.items()):
            record = self._files[number]
            with BlockReader(self._directory / record.name, record) as file:
                read_ranges(file, ranges, workers)
        for item in items:
            planner.commit_tensor(item, planner.resolve_tensor(item))


class CheckpointReader:
    """Reads full tensors from a checkpoint in one process, without a model or ranks.

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
        self._open_files: OrderedDict[int, BlockReader] = OrderedDict()  # by file number; least recently used first
        self._workers = CheckpointWorkers(2)

    def read_tensor(
        self, fqn: str, dtype: torch.dtype | None = None, buffer: torch.Tensor | None = None
    ) -> torch.Tensor:  # full shape, contiguous
        """Read a tensor, for example ``model/NAME``, and verify its blocks.

        Elements are cast while they are read if ``dtype`` is not the saved one. The tensor is a view of ``buffer``
        (uint8), if given; only a tensor that was not saved in row-major order is a new allocation.
        """
        saved = self.index.tensors[fqn]
        dtype = dtype or saved.dtype
        if buffer is None:  # check sizes before allocating
            self.index.check_file_sizes(self.path, {shard.file_number for shard in saved.shards})
            buffer = torch.empty(saved.numel * dtype.itemsize, dtype=torch.uint8)
        flat = buffer[: saved.numel * dtype.itemsize].view(dtype)
        ranges_by_file: dict[int, list[FileRange]] = {}
        for shard in saved.shards:
            end = shard.byte_offset + shard.numel * saved.dtype.itemsize
            target = flat[shard.start : shard.start + shard.numel]
            file_range = FileRange(shard.byte_offset, end, saved.dtype, target)
            ranges_by_file.setdefault(shard.file_number, []).append(file_range)
        for number, ranges in sorted(ranges_by_file.items()):
            read_ranges(self._open_file(number), ranges, self._workers)
        return saved.element_order.unflatten(flat, saved.shape).contiguous()

    def _open_file(self, number: int) -> BlockReader:
        """Return the open file, or open it: see [Note: reading tensor after tensor]."""
        if number not in self._open_files:
            if len(self._open_files) == MAX_OPEN_FILES:
                self._open_files.popitem(last=False)[1].__exit__()
            record = self.index.files[number]
            self._open_files[number] = BlockReader(self.path / record.name, record)
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
