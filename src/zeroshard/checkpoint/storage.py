"""Storage: how ``torch.distributed.checkpoint`` writes and reads our files (its own storage pickles its metadata).

[Note: a checkpoint's files]
Rank 3 writes ``model-00003-TOKEN.safetensors`` (parameters and buffers), ``optimizer-00003-…`` and ``other-00003-…``
(random states, the user's tensors). A tensor that one rank holds whole lies there in its shape under its plain name; a
stretch of one is ``NAME[start:end]``, in elements of the tensor's line. Any tool that reads safetensors opens them.
Within a file tensors are sorted by the size of their elements, so that no element crosses the end of a block.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zeroshard.checkpoint.blocks import BLOCK, BlockReader, BlockWriter, FileRecord, Workers
from zeroshard.checkpoint.chunks import Chunks, Turned
from zeroshard.checkpoint.index import Index, Saved, Stretch
from zeroshard.checkpoint.weights import Entry, header

Commit = Callable[[list[FileRecord], dict[str, list[Stretch]], list[Any]], None]


class SavePlans(DefaultSavePlanner):
    """Plans a save, and collects what each rank says besides."""

    def __init__(self, own: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._own = own
        self._shapes = shapes  # of the tensors whose line is in the order of their dimensions
        self.all_own: list[Any] = []  # on the coordinator, once planned

    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        self.plan = replace(plan, planner_data=self._own)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank writes."""
        self.all_own = [plan.planner_data for plan in all_plans]
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def entry(self, item: WriteItem) -> Entry:
        """How a stretch is written: see [Note: a checkpoint's files]."""
        data, name = item.tensor_data, item.index.fqn.partition("/")[2]
        if data is None:
            raise TypeError(f"{item.index.fqn!r} is no tensor")
        start, numel = data.chunk.offsets[0], data.chunk.sizes[0]
        if numel == data.size[0] and item.index.fqn in self._shapes:
            return Entry(name, data.properties.dtype, self._shapes[item.index.fqn])
        return Entry(f"{name}[{start}:{start + numel}]", data.properties.dtype, (numel,))


class LoadPlans(DefaultLoadPlanner):
    """Plans a load, and tells tensors that are read whole when they are there."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def target(self, item: ReadItem) -> Chunks:
        """The tensor that an item belongs to."""
        chunks: Chunks = self.state_dict[item.dest_index.fqn]
        return chunks

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Some elements have been loaded."""
        self.target(read_item).arrived(read_item.lengths[0])


class Writer(StorageWriter):
    """Writes this rank's files; on the coordinator ``commit`` then makes a checkpoint of all ranks' files."""

    def __init__(self, directory: Path, planner: SavePlans, commit: Commit) -> None:
        super().__init__()
        self._directory, self._planner, self._commit = directory, planner, commit
        self.written: list[Path] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank the end of its files' names, which is this save's alone."""
        token = secrets.token_hex(4)
        return [replace(plan, storage_data=f"{rank:05d}-{token}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files, one after the other."""
        results: list[WriteResult] = []
        kinds: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            kinds.setdefault(item.index.fqn.partition("/")[0], []).append(item)
        with Workers(2) as workers:
            for kind, items in kinds.items():
                results += self._write_file(f"{kind}-{plan.storage_data}.safetensors", items, workers)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: list[WriteItem], workers: Workers) -> list[WriteResult]:
        planner = self._planner
        pairs = sorted(((planner.entry(item), item) for item in items), key=lambda pair: -pair[0].dtype.itemsize)
        path = self._directory / name
        self.written.append(path)
        head = header([entry for entry, _ in pairs], {"format": "pt"})
        results, at = [], len(head)
        on_gpu = any(_data(planner, item).is_cuda for item in items)
        try:
            with BlockWriter(path, workers, pinned=on_gpu) as file:
                file.write(torch.frombuffer(bytearray(head), dtype=torch.uint8))
                for entry, item in pairs:
                    file.write(_data(planner, item).view(torch.uint8))
                    results.append(WriteResult(item.index, entry.nbytes, (name, at)))
                    at += entry.nbytes
        except OSError as error:
            raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error
        return [*results, WriteResult(MetadataIndex(name), at, file.record)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have written: make it a checkpoint."""
        everything = [result for rank in results for result in rank]
        files = [result.storage_data for result in everything if isinstance(result.storage_data, FileRecord)]
        numbers = {record.name: number for number, record in enumerate(files)}
        stretches: dict[str, list[Stretch]] = {}
        for result in everything:
            if not isinstance(result.storage_data, FileRecord):
                (name, offset), fqn = result.storage_data, result.index.fqn
                properties = metadata.state_dict_metadata[fqn].properties  # type: ignore[union-attr]
                start = result.index.offset[0] if result.index.offset is not None else 0
                numel = result.size_in_bytes // properties.dtype.itemsize
                stretches.setdefault(fqn, []).append(Stretch(start, numel, numbers[name], offset))
        self._commit(files, stretches, self._planner.all_own)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path is one of ours: any is."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Nothing that a planner needs to know."""
        return None


def _data(planner: SavePlans, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{item.index.fqn!r} is no tensor")
    return tensor


@dataclass
class Read:
    """Bytes of a file, and where their elements are wanted."""

    start: int
    end: int
    dtype: torch.dtype
    target: torch.Tensor

    def take(self, first: int, block: torch.Tensor) -> None:
        """Take what there is of it in a block that begins at byte ``first``; a copy changes dtype and device."""
        start, end = max(self.start, first), min(self.end, first + block.numel())
        size = self.dtype.itemsize
        to = self.target[(start - self.start) // size : (end - self.start) // size]
        to.copy_(block[start - first : end - first].view(self.dtype))


def deliver(file: BlockReader, reads: Iterable[Read], workers: Workers) -> None:
    """Read parts of a file, each block once."""
    wanted = sorted(reads, key=lambda read: read.start)
    numbers = sorted({n for read in wanted for n in range(read.start // BLOCK, -(-read.end // BLOCK))})
    done = 0
    for first, block in file.blocks(numbers, workers):
        end = first + block.numel()
        at = done
        while at < len(wanted) and wanted[at].start < end:
            if wanted[at].end > first:
                wanted[at].take(first, block)
            at += 1
        while done < len(wanted) and wanted[done].end <= end:
            done += 1


class TensorReader(StorageReader):
    """What reading has in common, whatever the files are."""

    def __init__(self, tensors: Mapping[str, Saved]) -> None:
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
                    [ChunkStorageMetadata(torch.Size([s.start]), torch.Size([s.numel])) for s in saved.stretches],
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
        assert isinstance(planner, LoadPlans)
        self.read(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(self, items: Sequence[ReadItem], planner: LoadPlans) -> None:
        """Fill the places of some items."""
        raise NotImplementedError

    def saved_name(self, item: ReadItem) -> str:
        """The name that an item's tensor was saved with."""
        return self.aliases.get(item.storage_index.fqn, item.storage_index.fqn)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path is one of ours: any is."""
        return True


class Reader(TensorReader):
    """Reads a checkpoint's stretches."""

    def __init__(self, directory: Path, index: Index) -> None:
        super().__init__(index.tensors)
        self._directory, self._files = directory, index.files
        self._homes = {(fqn, s.start): s for fqn, saved in index.tensors.items() for s in saved.stretches}

    def read(self, items: Sequence[ReadItem], planner: LoadPlans) -> None:
        """Read tensors to be turned one by one, then all others file by file."""
        turned: dict[str, list[ReadItem]] = {}
        others: list[ReadItem] = []
        for item in items:
            whole = isinstance(planner.target(item), Turned)
            (turned.setdefault(item.dest_index.fqn, []) if whole else others).append(item)
        with Workers(2) as workers:
            for batch in (*turned.values(), others):
                self._read(batch, planner, workers)

    def _read(self, items: Sequence[ReadItem], planner: LoadPlans, workers: Workers) -> None:
        files: dict[int, list[Read]] = {}
        for item in items:
            name, at = self.saved_name(item), item.storage_index.offset
            stretch, dtype = self._homes[name, at[0] if at is not None else 0], self._tensors[name].dtype
            start = stretch.offset + item.storage_offsets[0] * dtype.itemsize
            end = start + item.lengths[0] * dtype.itemsize
            files.setdefault(stretch.file, []).append(Read(start, end, dtype, planner.resolve_tensor(item)))
        for number, reads in sorted(files.items()):
            record = self._files[number]
            with BlockReader(self._directory / record.name, record) as file:
                deliver(file, reads, workers)
        for item in items:
            planner.commit_tensor(item, planner.resolve_tensor(item))
