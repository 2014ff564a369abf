"""Write each rank's part of a checkpoint, and commit the checkpoint when all ranks have written theirs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.block_files import BlockWriter, CheckpointWorkers, FileRecord
from zeroshard.checkpoint.flat_shards import LocalTensor
from zeroshard.checkpoint.group import CheckpointError, CheckpointGroup
from zeroshard.checkpoint.index import HEADER_METADATA, CheckpointIndex, ShardEntry, TensorEntry
from zeroshard.checkpoint.retention import finish_save, lock_for_save
from zeroshard.comm import RanksDisagreeError
from zeroshard.utils.safetensors_files import TensorInfo, build_header
from zeroshard.utils.version import __version__


@dataclass
class RankPayload:
    """The tensors and data that one rank adds to a checkpoint."""

    tensors: dict[str, LocalTensor]
    optimizer_scalars: dict[str, Any]  # encoded
    rank_data: Any  # encoded
    index_fields: dict[str, Any]  # on the first rank


@dataclass
class RankFiles:
    """The files that one rank has written, and where each shard is in them."""

    files: list[FileRecord] = field(default_factory=list)
    shards: dict[str, list[ShardEntry]] = field(default_factory=dict)  # file numbers count this rank's files


def write_checkpoint(
    directory: Path,
    payload: RankPayload,
    checkpoint_group: CheckpointGroup,
    workers: CheckpointWorkers,
    before_write: Callable[[], None],
    keep: int | None,
) -> None:
    """Write this rank's payload, then commit all ranks' files as one checkpoint.

    ``before_write`` waits until the payload's values are in memory. ``keep``: see :func:`zeroshard.save`.
    """
    group = checkpoint_group.without_timeout()
    writer = _RankWriter(directory, workers)
    with ExitStack() as cleanup:

        def prepare() -> None:
            before_write()
            if group.rank == 0:
                cleanup.enter_context(lock_for_save(directory))
            directory.mkdir(parents=True, exist_ok=True)

        try:
            group.run_on_all("", prepare)
            token = group.broadcast(secrets.token_hex(4))  # makes the file names unique to this save
            written = group.run_on_all("", lambda: writer.write(payload.tensors, f"{group.rank:05d}-{token}"))
            # ranks with a shard describe a tensor; the first rank also describes empty parameters
            described = {
                fqn: TensorEntry(local.shape, local.dtype, local.element_order, written.shards.get(fqn, [])).to_json()
                for fqn, local in payload.tensors.items()
                if local.shards or not local.numel or group.rank == 0  # one without elements may be on one rank only
            }
            part = {
                "tensors": described,
                "files": [(record.name, record.nbytes, record.block_crc32) for record in written.files],
                "scalars": payload.optimizer_scalars,
                "rank_data": payload.rank_data,
            }
            all_parts = group.gather(part)
            group.run_on_all(
                "", lambda: _commit(directory, payload.index_fields, all_parts, keep) if group.rank == 0 else None
            )
        except CheckpointError as error:
            writer.remove_files()
            raise CheckpointError(f"the save of {directory} failed: {error}") from error
        except RanksDisagreeError:
            raise
        except RuntimeError as error:
            raise CheckpointError(f"the save of {directory} failed because another rank is gone: {error}") from error


class _RankWriter:
    """Writes this rank's files: see [Note: a checkpoint's files]."""

    def __init__(self, directory: Path, workers: CheckpointWorkers) -> None:
        self._directory, self._workers = directory, workers
        self._written_paths: list[Path] = []

    def write(self, tensors: dict[str, LocalTensor], suffix: str) -> RankFiles:
        """Write the shards of all tensors, one file after another."""
        shards_by_kind: dict[str, list[tuple[str, int, torch.Tensor, TensorInfo]]] = {}
        for fqn, local in tensors.items():
            for element_range, values in local.shards:
                info = local.shard_info(fqn, element_range.start, values.numel())
                shards = shards_by_kind.setdefault(fqn.partition("/")[0], [])
                shards.append((fqn, element_range.start, values, info))
        written = RankFiles()
        for kind, shards in shards_by_kind.items():
            path = self._directory / f"{kind}-{suffix}.safetensors"
            self._written_paths.append(path)
            try:
                self._write_file(path, sorted(shards, key=lambda shard: -shard[3].dtype.itemsize), written)
            except OSError as error:
                raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error
        return written

    def _write_file(
        self, path: Path, shards: list[tuple[str, int, torch.Tensor, TensorInfo]], written: RankFiles
    ) -> None:
        header = build_header([info for *_, info in shards], HEADER_METADATA)
        offset = len(header)
        on_gpu = any(values.is_cuda for _, _, values, _ in shards)
        with BlockWriter(path, self._workers, pinned=on_gpu) as file:
            file.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for fqn, start, values, info in shards:
                file.write(values.view(torch.uint8))
                entry = ShardEntry(start, values.numel(), len(written.files), offset)
                written.shards.setdefault(fqn, []).append(entry)
                offset += info.nbytes
        written.files.append(file.record)

    def remove_files(self) -> None:
        """Delete this rank's files after all ranks know that the save failed.

        A rank that only lost its connection must not call this: its files may belong to a complete checkpoint.
        """
        try:  # the first rank may have failed after it had committed them
            committed = {record.name for record in CheckpointIndex.read(self._directory).files}
        except CheckpointError:
            committed = set()
        for path in self._written_paths:
            if path.name not in committed:
                with suppress(OSError):  # the save's error is the one to raise; the next save removes them
                    path.unlink()


def _commit(directory: Path, index_fields: dict[str, Any], all_parts: list[dict[str, Any]], keep: int | None) -> None:
    """Write the index on the first rank after all ranks have written: see [Note: atomic commit of a checkpoint]."""
    files: list[FileRecord] = []
    tensors: dict[str, TensorEntry] = {}
    scalars: dict[str, Any] = {}
    for part in all_parts:
        for fqn, described in part["tensors"].items():
            local = TensorEntry.from_json(fqn, described)
            entry = tensors.setdefault(fqn, replace(local, shards=[]))
            entry.shards += [replace(shard, file_number=len(files) + shard.file_number) for shard in local.shards]
        for file_name, nbytes, block_crc32 in part["files"]:
            files.append(FileRecord(file_name, nbytes, tuple(block_crc32)))
        for name, value in part["scalars"].items():
            if scalars.setdefault(name, value) != value and "$tensor" not in str(value):
                raise CheckpointError(
                    f"the optimizer's scalar states of {name!r} differ between ranks ({scalars[name]} and {value}): a "
                    "checkpoint has one value for all ranks, so they cannot be saved"
                )
    _check_visible(directory, files)
    index = CheckpointIndex(
        files=files,
        tensors=tensors,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"zeroshard": __version__, "torch": torch.__version__},
        rank_data=[part["rank_data"] for part in all_parts],
        **index_fields,
    )
    if index.optimizer is not None:
        index.optimizer["scalars"] = scalars
    index.write(directory)
    finish_save(directory, {record.name for record in files}, keep)


def _check_visible(directory: Path, files: list[FileRecord]) -> None:
    """Raise if the first rank does not see all of a file."""
    for record in files:
        path = directory / record.name
        if not path.is_file() or path.stat().st_size != record.nbytes:
            raise CheckpointError(
                f"{path} was written by another rank, but the first rank does not see all of it: save into a "
                "directory on storage that all ranks share"
            )
