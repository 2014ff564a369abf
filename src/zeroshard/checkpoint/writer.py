"""Write a rank's part of a checkpoint, and commit the checkpoint when all ranks have written theirs.

DCP plans which rank writes what. Its own file storage pickles metadata, so this one replaces it: see [Note: a
checkpoint's files].
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_chunks
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zeroshard.checkpoint.block_files import BlockWriter, CheckpointWorkers, FileRecord
from zeroshard.checkpoint.flat_shards import FlatShards, LocalTensor
from zeroshard.checkpoint.group import CheckpointError, CheckpointGroup
from zeroshard.checkpoint.index import CheckpointIndex, ShardEntry, TensorEntry
from zeroshard.checkpoint.retention import SaveLock, prune, remove_stale_files, update_latest
from zeroshard.utils.safetensors_files import TensorInfo, build_header
from zeroshard.utils.version import __version__


@dataclass
class RankPayload:
    """The tensors and data that one rank adds to a checkpoint."""

    tensors: dict[str, LocalTensor]
    optimizer_scalars: dict[str, Any]  # encoded
    rank_data: Any  # encoded
    index_fields: dict[str, Any]  # on the first rank


def write_checkpoint(
    directory: Path,
    payload: RankPayload,
    checkpoint_group: CheckpointGroup,
    workers: CheckpointWorkers,
    before_write: Callable[[], None],
    keep: int | None,
) -> None:
    """Write this rank's payload, then commit all ranks' files as one checkpoint.

    ``before_write`` waits until the payload's values are in memory.
    """
    flat_shards = {fqn: FlatShards(local.numel, local.dtype, local.shards) for fqn, local in payload.tensors.items()}
    planner = SafetensorsSavePlanner(payload, checkpoint_group.rank)
    writer = SafetensorsStorageWriter(directory, planner, workers, before_write, keep)
    try:
        save_chunks(
            flat_shards,
            storage_writer=writer,
            planner=planner,
            process_group=checkpoint_group.process_group,
            no_dist=checkpoint_group.process_group is None,
        )
    except CheckpointException as error:
        writer.remove_written_files()
        for failure, _ in error.failures.values():
            if isinstance(failure, KeyboardInterrupt):
                raise failure from error
        failures = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        failure_text = CheckpointError.from_rank_failures(failures, checkpoint_group.size)
        raise CheckpointError(f"the save of {directory} failed: {failure_text}") from error
    except RuntimeError as error:
        raise CheckpointError(f"the save of {directory} failed because another rank is gone: {error}") from error
    finally:
        writer.release_lock()
        for flat in flat_shards.values():
            flat.release()


class SafetensorsSavePlanner(DefaultSavePlanner):
    """Plans a save and gathers each rank's payload, without the values of tensors, on the coordinator."""

    def __init__(self, payload: RankPayload, rank: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.payload, self._rank = payload, rank
        self.all_payloads: list[RankPayload] = []  # without values; on the coordinator, after planning

    def create_local_plan(self) -> SavePlan:
        """Return the items that this rank can write, and its payload without values."""
        tensors = {  # described by ranks with a local shard; the first rank also describes empty parameters
            fqn: replace(local, shards=[])
            for fqn, local in self.payload.tensors.items()
            if local.shards or self._rank == 0
        }
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        self.plan = replace(plan, planner_data=replace(self.payload, tensors=tensors, index_fields={}))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of every rank, and DCP's metadata."""
        self.all_payloads = [plan.planner_data for plan in all_plans]
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def tensor_info(self, item: WriteItem) -> TensorInfo:
        """Return a shard's name and shape in the file."""
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        return self.payload.tensors[item.index.fqn].shard_info(item.index.fqn, chunk.offsets[0], chunk.sizes[0])

    def resolve_tensor(self, item: WriteItem) -> torch.Tensor:
        """Return a shard's values."""
        tensor = self.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor


class SafetensorsStorageWriter(StorageWriter):
    """Writes this rank's files; the coordinator then commits the files of all ranks. A writer serves one save."""

    def __init__(
        self,
        directory: Path,
        planner: SafetensorsSavePlanner,
        workers: CheckpointWorkers,
        before_write: Callable[[], None],
        keep: int | None,
    ) -> None:
        super().__init__()
        self._directory, self._planner, self._workers = directory, planner, workers
        self._before_write, self._keep = before_write, keep
        self._written_paths: list[Path] = []
        self._lock: SaveLock | None = None

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
        self._written_paths.append(path)
        header = build_header([info for info, _ in pairs], {"format": "pt"})
        results, offset = [], len(header)
        on_gpu = any(planner.resolve_tensor(item).is_cuda for item in items)
        try:
            with BlockWriter(path, self._workers, pinned=on_gpu) as file:
                file.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
                for info, item in pairs:
                    file.write(planner.resolve_tensor(item).view(torch.uint8))
                    results.append(WriteResult(item.index, info.nbytes, (name, offset)))
                    offset += info.nbytes
        except OSError as error:
            raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error
        return [*results, WriteResult(MetadataIndex(name), offset, file.record)]

    def remove_written_files(self) -> None:
        """Delete this rank's files after all ranks know that the save failed.

        A rank that only lost its connection must not call this: its files may belong to a complete checkpoint.
        """
        try:  # the first rank may have failed after it had committed them
            committed = {record.name for record in CheckpointIndex.read(self._directory).files}
        except CheckpointError:
            committed = set()
        for path in self._written_paths:
            if path.name not in committed:
                path.unlink(missing_ok=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index after all ranks have written: see [Note: atomic commit of a checkpoint]."""
        all_results = [result for rank_results in results for result in rank_results]
        files = [result.storage_data for result in all_results if isinstance(result.storage_data, FileRecord)]
        self._check_files(files)
        file_numbers = {record.name: number for number, record in enumerate(files)}
        tensors: dict[str, TensorEntry] = {}
        for payload in self._planner.all_payloads:
            for fqn, local in payload.tensors.items():
                tensors.setdefault(fqn, TensorEntry(local.shape, local.dtype, local.element_order))
        for result in all_results:
            if not isinstance(result.storage_data, FileRecord):
                (name, offset), entry = result.storage_data, tensors[result.index.fqn]
                start = result.index.offset[0] if result.index.offset is not None else 0
                numel = result.size_in_bytes // entry.dtype.itemsize
                entry.shards.append(ShardEntry(start, numel, file_numbers[name], offset))
        for fqn, entry in tensors.items():
            entry.shards.sort(key=lambda shard: shard.start)
            end = 0
            for shard in entry.shards:
                if shard.start <= end:
                    end = max(end, shard.start + shard.numel)
            if end != entry.numel:
                raise CheckpointError(f"no rank has written {fqn} from element {end} of {entry.numel} on")
        index_fields = dict(self._planner.payload.index_fields)
        if index_fields["optimizer"] is not None:
            index_fields["optimizer"] = {**index_fields["optimizer"], "counters": self._merge_scalars()}
        index = CheckpointIndex(
            files=files,
            tensors=tensors,
            ranks=len(self._planner.all_payloads),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"zeroshard": __version__, "torch": torch.__version__},
            own=[payload.rank_data for payload in self._planner.all_payloads],
            **index_fields,
        )
        index.write(self._directory)
        update_latest(self._directory)
        remove_stale_files(self._directory, set(file_numbers))
        if self._keep is not None:
            prune(self._directory.parent, self._keep, self._directory)

    def _check_files(self, files: list[FileRecord]) -> None:
        for record in files:
            path = self._directory / record.name
            if not path.is_file() or path.stat().st_size != record.nbytes:
                raise CheckpointError(
                    f"{path} was written by another rank, but the first rank does not see all of it: save into a "
                    "directory on storage that all ranks share"
                )

    def _merge_scalars(self) -> dict[str, Any]:
        """Return the optimizer's scalar states of all ranks; raise if ranks differ."""
        scalars: dict[str, Any] = {}
        for payload in self._planner.all_payloads:
            for name, value in payload.optimizer_scalars.items():
                if scalars.setdefault(name, value) != value and "$tensor" not in str(value):
                    raise CheckpointError(
                        f"the optimizer's scalar states of {name!r} differ between ranks ({scalars[name]} and "
                        f"{value}): a checkpoint has one value for all ranks, so they cannot be saved"
                    )
        return scalars

    # DCP also requires these:

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None
