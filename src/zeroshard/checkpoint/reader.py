"""Reader: how a plan of ``torch.distributed.checkpoint`` is read from our files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
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
from zeroshard.checkpoint.index import CheckpointIndex, TensorEntry


class SafetensorsLoadPlanner(DefaultLoadPlanner):
    """Plans a load, and tells tensors that are read whole when they are there."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def dest_tensor(self, item: ReadItem) -> FlatShards:
        """The tensor that an item belongs to."""
        chunks: FlatShards = self.state_dict[item.dest_index.fqn]
        return chunks

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Some elements have been loaded."""
        self.dest_tensor(read_item).on_elements_read(read_item.lengths[0])


@dataclass
class FileRange:
    """Bytes of a file, and where their elements are wanted."""

    start: int
    end: int
    dtype: torch.dtype
    target: torch.Tensor

    def copy_from_block(self, block_start: int, block: torch.Tensor) -> None:
        """Take what there is of it in a block that begins at byte ``first``; a copy changes dtype and device."""
        start, end = max(self.start, block_start), min(self.end, block_start + block.numel())
        size = self.dtype.itemsize
        to = self.target[(start - self.start) // size : (end - self.start) // size]
        to.copy_(block[start - block_start : end - block_start].view(self.dtype))


def read_ranges(file: BlockReader, ranges: Iterable[FileRange], workers: CheckpointWorkers) -> None:
    """Read parts of a file, each block once."""
    wanted = sorted(ranges, key=lambda read: read.start)
    numbers = sorted({n for read in wanted for n in range(read.start // BLOCK_BYTES, -(-read.end // BLOCK_BYTES))})
    done = 0
    for first, block in file.iter_blocks(numbers, workers):
        end = first + block.numel()
        at = done
        while at < len(wanted) and wanted[at].start < end:
            if wanted[at].end > first:
                wanted[at].copy_from_block(first, block)
            at += 1
        while done < len(wanted) and wanted[done].end <= end:
            done += 1


class TensorStorageReader(StorageReader):
    """What reading has in common, whatever the files are."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        super().__init__()
        self._tensors = tensors
        self.aliases: dict[str, str] = {}  # tensors that are wanted under another name than they were saved with

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to the next."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What torch plans with."""
        wanted = {**self._tensors, **{fqn: self._tensors[saved] for fqn, saved in self.aliases.items()}}
        return Metadata(
            {
                fqn: TensorStorageMetadata(
                    TensorProperties(dtype=saved.dtype),
                    torch.Size([saved.numel]),
                    [ChunkStorageMetadata(torch.Size([s.start]), torch.Size([s.numel])) for s in saved.shards],
                )
                for fqn, saved in wanted.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs."""
        assert isinstance(planner, SafetensorsLoadPlanner)
        self.read_items(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_items(self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner) -> None:
        """Fill the places of some items."""
        raise NotImplementedError

    def saved_name(self, item: ReadItem) -> str:
        """The name that an item's tensor was saved with."""
        return self.aliases.get(item.storage_index.fqn, item.storage_index.fqn)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path is one of ours: any is."""
        return True


class SafetensorsStorageReader(TensorStorageReader):
    """Reads a checkpoint's stretches."""

    def __init__(self, directory: Path, index: CheckpointIndex) -> None:
        super().__init__(index.tensors)
        self._directory, self._files = directory, index.files
        self._shard_entries = {(fqn, s.start): s for fqn, saved in index.tensors.items() for s in saved.shards}

    def read_items(self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner) -> None:
        """Read tensors to be turned one by one, then all others file by file."""
        turned: dict[str, list[ReadItem]] = {}
        others: list[ReadItem] = []
        for item in items:
            whole = isinstance(planner.dest_tensor(item), ReorderedTensor)
            (turned.setdefault(item.dest_index.fqn, []) if whole else others).append(item)
        with CheckpointWorkers(2) as workers:
            for batch in (*turned.values(), others):
                self._read_batch(batch, planner, workers)

    def _read_batch(
        self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner, workers: CheckpointWorkers
    ) -> None:
        files: dict[int, list[FileRange]] = {}
        for item in items:
            name, at = self.saved_name(item), item.storage_index.offset
            stretch, dtype = self._shard_entries[name, at[0] if at is not None else 0], self._tensors[name].dtype
            start = stretch.byte_offset + item.storage_offsets[0] * dtype.itemsize
            end = start + item.lengths[0] * dtype.itemsize
            files.setdefault(stretch.file_number, []).append(FileRange(start, end, dtype, planner.resolve_tensor(item)))
        for number, reads in sorted(files.items()):
            record = self._files[number]
            with BlockReader(self._directory / record.name, record) as file:
                read_ranges(file, reads, workers)
        for item in items:
            planner.commit_tensor(item, planner.resolve_tensor(item))
