"""DCP storage reader for safetensors files."""

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
    """Plans a load and notifies each target tensor when its elements have been read."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def dest_tensor(self, item: ReadItem) -> FlatShards:
        """Return the target tensor of an item."""
        chunks: FlatShards = self.state_dict[item.dest_index.fqn]
        return chunks

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Notify the target that the item's elements have been read."""
        self.dest_tensor(read_item).on_elements_read(read_item.lengths[0])


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
    pending = sorted(ranges, key=lambda file_range: file_range.start)
    block_numbers = sorted(
        {
            number
            for file_range in pending
            for number in range(file_range.start // BLOCK_BYTES, -(-file_range.end // BLOCK_BYTES))
        }
    )
    done = 0
    for start, block in file.iter_blocks(block_numbers, workers):
        end = start + block.numel()
        position = done
        while position < len(pending) and pending[position].start < end:
            if pending[position].end > start:
                pending[position].copy_from_block(start, block)
            position += 1
        while done < len(pending) and pending[done].end <= end:
            done += 1


class TensorStorageReader(StorageReader):
    """Base of the storage readers, independent of the file format."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        super().__init__()
        self._tensors = tensors
        self.aliases: dict[str, str] = {}  # requested name → saved name, where they differ

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the sizes, dtypes and saved shards that DCP plans with."""
        tensors = {**self._tensors, **{fqn: self._tensors[saved] for fqn, saved in self.aliases.items()}}
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

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no setup."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan."""
        assert isinstance(planner, SafetensorsLoadPlanner)
        self.read_items(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_items(self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner) -> None:
        """Read the items into their target tensors."""
        raise NotImplementedError

    def saved_name(self, item: ReadItem) -> str:
        """Return the name under which an item's tensor was saved."""
        return self.aliases.get(item.storage_index.fqn, item.storage_index.fqn)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path is valid."""
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
            name, shard_start = self.saved_name(item), item.storage_index.offset
            shard, dtype = (
                self._shard_entries[name, shard_start[0] if shard_start is not None else 0],
                self._tensors[name].dtype,
            )
            start = shard.byte_offset + item.storage_offsets[0] * dtype.itemsize
            end = start + item.lengths[0] * dtype.itemsize
            ranges_by_file.setdefault(shard.file_number, []).append(
                FileRange(start, end, dtype, planner.resolve_tensor(item))
            )
        for number, ranges in sorted(ranges_by_file.items()):
            record = self._files[number]
            with BlockReader(self._directory / record.name, record) as file:
                read_ranges(file, ranges, workers)
        for item in items:
            planner.commit_tensor(item, planner.resolve_tensor(item))
