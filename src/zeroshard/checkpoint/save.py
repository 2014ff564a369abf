"""Save a model and its optimizer; each rank writes its local shards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_chunks

import zeroshard
from zeroshard.checkpoint.async_save import Save, pending_saves, wait_for_pending_save
from zeroshard.checkpoint.block_files import CheckpointWorkers, FileRecord
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.flat_shards import FlatShards
from zeroshard.checkpoint.group import CheckpointGroup
from zeroshard.checkpoint.index import CheckpointIndex, ShardEntry, TensorEntry, data_file_names
from zeroshard.checkpoint.payload import RankPayload, collect_payload
from zeroshard.checkpoint.retention import prune, remove_stale_files, update_latest
from zeroshard.checkpoint.snapshot import HostStaging, Snapshot
from zeroshard.checkpoint.train_state import engine_of, unwrap_compiled
from zeroshard.checkpoint.writer import SafetensorsSavePlanner, SafetensorsStorageWriter
from zeroshard.engine import Engine

_staging_buffers = HostStaging(), HostStaging()  # for tensors copied immediately, and for deferred copies


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    rank_extra: Any = None,
    weights: bool = True,
    frozen: bool = True,
    keep: int | None = None,
    wait: bool = True,
) -> Save:
    """Write a checkpoint into the directory ``path``. All ranks must call it; each rank writes its local shards.

    :func:`load` reads the checkpoint on any number of ranks, at any stage, precision and tensor-parallel degree, and
    also without sharding. The model and optimizer may be unsharded, too. A checkpoint contains parameters, buffers,
    optimizer states, the fp16 loss scale and each rank's RNG states, in safetensors files and one JSON file. The JSON
    file is written last, so a save is atomic. The file ``latest`` next to the checkpoint then names it.

    - ``extra``: JSON-encodable data (a step, a data position) and objects with ``state_dict()`` (schedulers). The first
      rank's value is saved.
    - ``rank_extra``: the same kind of data, saved for each rank.
    - ``weights=False``: save the optimizer states without the model. ``frozen=False``: leave out parameters that are
      not trained, such as the base model of LoRA; a load does not change them.
    - ``keep``: after the checkpoint is complete, keep only ``keep`` checkpoints in its parent directory. Only names
      that differ from this one in the last number count; that number is the step, and the highest steps stay. A
      checkpoint that cannot be removed causes a warning; the save does not fail.
    - ``wait=False``: copy the states and write them while training continues. The next save waits for this one and
      raises its error, as :meth:`Save.wait` does. Call ``wait()`` before the process group is destroyed.

    >>> import tempfile, zeroshard
    >>> model = nn.Linear(2, 1)
    >>> model, optimizer = zeroshard.shard(model, torch.optim.Adam(model.parameters()))
    >>> path = tempfile.mkdtemp() + "/step-7"
    >>> zeroshard.save(path, model, optimizer, extra={"step": 7}).done
    True
    >>> zeroshard.load(path, model, optimizer).extra
    {'step': 7}
    """
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep is a number of checkpoints from 1 up, or None for all, got {keep!r}")
    if not weights and optimizer is None:
        raise ValueError("weights=False saves the optimizer's states alone, and no optimizer was given")
    directory = Path(path).absolute()
    model = unwrap_compiled(model)
    engine = engine_of(model)
    wait_for_pending_save()
    checkpoint_group = CheckpointGroup.open(engine, "save")
    workers = CheckpointWorkers(2)  # now: threads cannot be started during interpreter shutdown

    def prepare() -> tuple[RankPayload, Snapshot | None]:
        if engine is not None:
            _check_can_save(engine)
        payload = collect_payload(model, optimizer, extra, rank_extra, weights, frozen, checkpoint_group)
        if wait:
            return payload, None
        snapshot = Snapshot(payload.tensors, _staging_buffers, workers)
        if engine is None:  # nothing would delay the next step of an unsharded optimizer
            snapshot.finish()
        return replace(payload, tensors=snapshot.tensors), snapshot

    def write() -> None:
        try:
            with workers:
                before_write = snapshot.finish if snapshot is not None else lambda: None
                _write_checkpoint(directory, payload, checkpoint_group, workers, before_write, keep)
        finally:
            if snapshot is not None:
                snapshot.release_waiters()

    try:
        payload, snapshot = checkpoint_group.run_on_all(f"{directory} cannot be saved", prepare)
    except BaseException:
        workers.close()
        raise
    if snapshot is None:
        write()
        return Save(directory, done=True)
    if engine is not None:
        engine.state_guard.pending_reads.append(snapshot.wait_for_copies)
    handle = Save(directory)
    pending_saves.append(handle)
    threading.Thread(target=handle.run, args=(write,), name=f"save {directory.name}").start()
    return handle


def _check_can_save(engine: Engine) -> None:
    for why in engine.state_guard.invalid_states.values():
        raise CheckpointError(why)
    if engine.is_running:
        raise CheckpointError("a forward or backward is under way: save between steps")
    if engine.backward_count and engine.gradients.has_used_params:
        raise CheckpointError(
            f"{engine.backward_count} backwards have been summed since the last step, and a checkpoint holds "
            "no gradients: "
            "save after optimizer.step(), or drop them with optimizer.zero_grad()"
        )


def _write_checkpoint(
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
    flat_shards = {
        fqn: FlatShards(torch.Size(local.shape).numel(), local.dtype, local.shards)
        for fqn, local in payload.tensors.items()
    }
    row_major_shapes = {fqn: local.shape for fqn, local in payload.tensors.items() if local.element_order.is_row_major}
    described = {  # by ranks with a local shard; the first rank also describes empty parameters
        fqn: (local.shape, local.dtype, local.element_order)
        for fqn, local in payload.tensors.items()
        if local.shards or checkpoint_group.rank == 0
    }
    planner = SafetensorsSavePlanner((described, payload.optimizer_scalars, payload.rank_data), row_major_shapes)

    def commit(files: list[FileRecord], stretches: dict[str, list[ShardEntry]], own: list[Any]) -> None:
        _commit(directory, payload, files, stretches, own)
        if keep is not None:
            prune(directory.parent, keep, directory)

    writer = SafetensorsStorageWriter(directory, planner, workers, before_write, commit)
    try:
        save_chunks(
            flat_shards,
            storage_writer=writer,
            planner=planner,
            process_group=checkpoint_group.process_group,
            no_dist=checkpoint_group.process_group is None,
        )
    except CheckpointException as error:
        _remove_written_files(writer.written_paths)
        for failure, _ in error.failures.values():
            if isinstance(failure, KeyboardInterrupt):
                raise failure from error
        failures = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        failure_text = CheckpointError.from_rank_failures(failures, checkpoint_group.size)
        raise CheckpointError(f"the save of {directory} failed: {failure_text}") from error
    except RuntimeError as error:
        raise CheckpointError(f"the save of {directory} failed, as another rank is gone: {error}") from error
    finally:
        writer.release_lock()
        for flat in flat_shards.values():
            flat.release()


def _remove_written_files(written_paths: list[Path]) -> None:
    """Delete this rank's files after all ranks know that the save failed.

    A rank that only lost its connection must not call this: its files may belong to a complete checkpoint.
    """
    for path in written_paths:
        if path.name not in data_file_names(path.parent):  # the first rank failed after it had committed them
            path.unlink(missing_ok=True)


def _commit(
    directory: Path,
    payload: RankPayload,
    files: list[FileRecord],
    shards: dict[str, list[ShardEntry]],
    all_planner_data: list[Any],
) -> None:
    """Write the index on the first rank after all ranks have written: see [Note: atomic commit of a checkpoint]."""
    for record in files:
        path = directory / record.name
        if not path.is_file() or path.stat().st_size != record.nbytes:
            raise CheckpointError(
                f"{path} was written by another rank and is not seen whole from the first: a checkpoint's directory "
                "has to be on storage that all ranks share"
            )
    tensors: dict[str, TensorEntry] = {}
    scalars: dict[str, Any] = {}
    for described, rank_scalars, _ in all_planner_data:
        for name, value in rank_scalars.items():
            if scalars.setdefault(name, value) != value and "$tensor" not in str(value):
                raise CheckpointError(
                    f"the optimizer's numbers for {name!r} differ from rank to rank ({scalars[name]} and {value}): a "
                    "checkpoint holds one of each, so these cannot be saved"
                )
        for fqn, (shape, dtype, element_order) in described.items():
            if fqn not in tensors:
                tensors[fqn] = TensorEntry(
                    shape, dtype, element_order, sorted(shards.get(fqn, []), key=lambda shard: shard.start)
                )
    for fqn, entry in tensors.items():
        entry.check_complete(directory, fqn)
    optimizer = payload.index_fields["optimizer"]
    index = CheckpointIndex(
        files=files,
        tensors=tensors,
        ranks=len(all_planner_data),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"zeroshard": zeroshard.__version__, "torch": torch.__version__},
        own=[data for _, _, data in all_planner_data],
        **{**payload.index_fields, "optimizer": optimizer and {**optimizer, "counters": scalars}},
    )
    index.write(directory)
    update_latest(directory)
    remove_stale_files(directory, {record.name for record in files})
