"""DCP storage writer for safetensors files (DCP's own file storage pickles its metadata).

[Note: a checkpoint's files]
Rank 3 writes ``model-00003-TOKEN.safetensors`` (parameters and buffers), ``optimizer-00003-…`` and ``other-00003-…``
(RNG states, the user's tensors). A full tensor written by one rank has its own shape and name. A shard is named
``NAME[start:end]``, in elements of the flattened tensor. Any tool that reads safetensors can open the files. Tensors in
a file are sorted by element size, so that no element crosses a block boundary.
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
    """Plans a save and gathers each rank's ``planner_data`` on the coordinator."""

    def __init__(self, planner_data: Any, row_major_shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner_data = planner_data
        self._row_major_shapes = row_major_shapes  # of tensors whose element order is row-major
        self.all_planner_data: list[Any] = []  # on the coordinator, after planning

    def create_local_plan(self) -> SavePlan:
        """Return the items that this rank can write."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        self.plan = replace(plan, planner_data=self._planner_data)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of every rank, and DCP's metadata."""
        self.all_planner_data = [plan.planner_data for plan in all_plans]
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def tensor_info(self, item: WriteItem) -> TensorInfo:
        """Return a shard's name and shape in the file: see [Note: a checkpoint's files]."""
        data, name = item.tensor_data, item.index.fqn.partition("/")[2]
        if data is None:
            raise TypeError(f"{item.index.fqn!r} is no tensor")
        start, numel = data.chunk.offsets[0], data.chunk.sizes[0]
        if numel == data.size[0] and item.index.fqn in self._row_major_shapes:
            return TensorInfo(name, data.properties.dtype, self._row_major_shapes[item.index.fqn])
        return TensorInfo(f"{name}[{start}:{start + numel}]", data.properties.dtype, (numel,))


class SafetensorsStorageWriter(StorageWriter):
    """Writes this rank's files; the coordinator then calls ``commit`` with the files of all ranks."""

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
        """Do nothing: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Wait for the values, lock the directory (coordinator) and create it. DCP raises its errors on all ranks."""
        self._before_write()
        if is_coordinator:
            self._lock = SaveLock(self._directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def release_lock(self) -> None:
        """Unlock the directory, whether the save succeeded or failed."""
        if self._lock is not None:
            self._lock.release()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Send each rank the suffix of its file names, which is unique to this save."""
        token = secrets.token_hex(4)
        return [replace(plan, storage_data=f"{rank:05d}-{token}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files one after another."""
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
        header = build_header([info for info, _ in pairs], {"format": "pt"})
        results, offset = [], len(header)
        on_gpu = any(_resolve_tensor(planner, item).is_cuda for item in items)
        try:
            with BlockWriter(path, self._workers, pinned=on_gpu) as file:
                file.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
                for info, item in pairs:
                    file.write(_resolve_tensor(planner, item).view(torch.uint8))
                    results.append(WriteResult(item.index, info.nbytes, (name, offset)))
                    offset += info.nbytes
        except OSError as error:
            raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error
        return [*results, WriteResult(MetadataIndex(name), offset, file.record)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint after all ranks have written."""
        all_results = [result for rank_results in results for result in rank_results]
        files = [result.storage_data for result in all_results if isinstance(result.storage_data, FileRecord)]
        file_numbers = {record.name: number for number, record in enumerate(files)}
        shards: dict[str, list[ShardEntry]] = {}
        for result in all_results:
            if not isinstance(result.storage_data, FileRecord):
                (name, offset), fqn = result.storage_data, result.index.fqn
                properties = metadata.state_dict_metadata[fqn].properties  # type: ignore[union-attr]
                start = result.index.offset[0] if result.index.offset is not None else 0
                numel = result.size_in_bytes // properties.dtype.itemsize
                shards.setdefault(fqn, []).append(ShardEntry(start, numel, file_numbers[name], offset))
        self._commit(files, shards, self._planner.all_planner_data)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path is valid."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return None: planners need no storage metadata."""
        return None


def _resolve_tensor(planner: SafetensorsSavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{item.index.fqn!r} is no tensor")
    return tensor
