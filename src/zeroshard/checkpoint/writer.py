"""Writer: how a plan of ``torch.distributed.checkpoint`` becomes our files (its own storage pickles its metadata).

[Note: a checkpoint's files]
Rank 3 writes ``model-00003-TOKEN.safetensors`` (parameters and buffers), ``optimizer-00003-…`` and ``other-00003-…``
(random states, the user's tensors). A tensor that one rank holds whole lies there in its shape under its plain name; a
stretch of one is ``NAME[start:end]``, in elements of the tensor's line. Any tool that reads safetensors opens them.
Within a file tensors are sorted by the size of their elements, so that no element crosses the end of a block.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zeroshard.checkpoint.block_files import BlockWriter, CheckpointWorkers, FileRecord
from zeroshard.checkpoint.index import ShardEntry
from zeroshard.checkpoint.retention import SaveLock
from zeroshard.checkpoint.safetensors_files import TensorInfo, build_header

CommitCallback = Callable[[list[FileRecord], dict[str, list[ShardEntry]], list[Any]], None]


class SafetensorsSavePlanner(DefaultSavePlanner):
    """Plans a save, and collects what each rank says besides."""

    def __init__(self, planner_data: Any, row_major_shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner_data = planner_data
        self._row_major_shapes = row_major_shapes  # of the tensors whose line is in the order of their dimensions
        self.all_planner_data: list[Any] = []  # on the coordinator, once planned

    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        self.plan = replace(plan, planner_data=self._planner_data)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank writes."""
        self.all_planner_data = [plan.planner_data for plan in all_plans]
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def tensor_info(self, item: WriteItem) -> TensorInfo:
        """How a stretch is written: see [Note: a checkpoint's files]."""
        data, name = item.tensor_data, item.index.fqn.partition("/")[2]
        if data is None:
            raise TypeError(f"{item.index.fqn!r} is no tensor")
        start, numel = data.chunk.offsets[0], data.chunk.sizes[0]
        if numel == data.size[0] and item.index.fqn in self._row_major_shapes:
            return TensorInfo(name, data.properties.dtype, self._row_major_shapes[item.index.fqn])
        return TensorInfo(f"{name}[{start}:{start + numel}]", data.properties.dtype, (numel,))


class SafetensorsStorageWriter(StorageWriter):
    """Writes this rank's files; on the coordinator ``commit`` then makes a checkpoint of all ranks' files."""

    def __init__(
        self,
        directory: Path,
        planner: SafetensorsSavePlanner,
        workers: CheckpointWorkers,
        before_write: Callable[[], None],
        commit: CommitCallback,
    ) -> None:
        super().__init__()
        self._directory, self._planner, self._workers = directory, planner, workers
        self._before_write, self._commit = before_write, commit
        self.written_paths: list[Path] = []
        self._lock: SaveLock | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory; what fails here fails on all ranks, as everything else does that torch calls."""
        self._before_write()
        if is_coordinator:
            self._lock = SaveLock(self._directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def release_lock(self) -> None:
        """End the save, whatever came of it: the directory is nobody's any more."""
        if self._lock is not None:
            self._lock.release()

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
        for kind, items in kinds.items():
            results += self._write_file(f"{kind}-{plan.storage_data}.safetensors", items)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: list[WriteItem]) -> list[WriteResult]:
        planner = self._planner
        pairs = sorted(((planner.tensor_info(item), item) for item in items), key=lambda pair: -pair[0].dtype.itemsize)
        path = self._directory / name
        self.written_paths.append(path)
        head = build_header([entry for entry, _ in pairs], {"format": "pt"})
        results, at = [], len(head)
        on_gpu = any(_resolve_tensor(planner, item).is_cuda for item in items)
        try:
            with BlockWriter(path, self._workers, pinned=on_gpu) as file:
                file.write(torch.frombuffer(bytearray(head), dtype=torch.uint8))
                for entry, item in pairs:
                    file.write(_resolve_tensor(planner, item).view(torch.uint8))
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
        stretches: dict[str, list[ShardEntry]] = {}
        for result in everything:
            if not isinstance(result.storage_data, FileRecord):
                (name, offset), fqn = result.storage_data, result.index.fqn
                properties = metadata.state_dict_metadata[fqn].properties  # type: ignore[union-attr]
                start = result.index.offset[0] if result.index.offset is not None else 0
                numel = result.size_in_bytes // properties.dtype.itemsize
                stretches.setdefault(fqn, []).append(ShardEntry(start, numel, numbers[name], offset))
        self._commit(files, stretches, self._planner.all_planner_data)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path is one of ours: any is."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Nothing that a planner needs to know."""
        return None


def _resolve_tensor(planner: SafetensorsSavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{item.index.fqn!r} is no tensor")
    return tensor
