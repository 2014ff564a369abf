"""save(): write a model's and its optimizer's states, with every rank writing what it holds."""

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
from zeroshard.engine.engine import Engine

_staging_buffers = HostStaging(), HostStaging()  # for what is copied at once, and later


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
    """Write a checkpoint into the directory ``path``. All ranks call it together; every rank writes what it holds.

    It loads on any number of ranks, at any stage, precision and tensor degree, and without zeroshard's sharding:
    :func:`load`. The model and optimizer may be plain ones, too. It holds parameters and buffers, optimizer states,
    fp16's loss scale and each rank's random states; all in safetensors and one JSON file, which is written last, so
    that a checkpoint is whole or not there. ``latest``, a file beside it, then names it.

    - ``extra``: plain data of the first rank (a step, a data position), and objects with ``state_dict()`` (schedulers).
    - ``rank_extra``: such data of each rank's own.
    - ``weights=False``: the optimizer's states without the model's. ``frozen=False``: without parameters that are not
      trained, such as the base of LoRA; a load leaves them as they are.
    - ``keep``: once it is whole, remove all but ``keep`` of it and those beside it that are called like it but for the
      last number, which is the step: the highest stay. One that cannot be removed is a warning, not a failed save.
    - ``wait=False``: copy the states and write while training goes on. The next save waits for this one and raises what
      went wrong with it, as :meth:`Save.wait` does: call that before the process group is destroyed.

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
    meeting = CheckpointGroup.open(engine, "save")
    workers = CheckpointWorkers(2)  # now: none can be started when the interpreter is ending

    def prepare() -> tuple[RankPayload, Snapshot | None]:
        if engine is not None:
            _check_can_save(engine)
        contents = collect_payload(model, optimizer, extra, rank_extra, weights, frozen, meeting)
        if wait:
            return contents, None
        snapshot = Snapshot(contents.tensors, _staging_buffers, workers)
        if engine is None:  # whose next step nobody would hold
            snapshot.finish()
        return replace(contents, tensors=snapshot.tensors), snapshot

    def write() -> None:
        try:
            with workers:
                before = snapshot.finish if snapshot is not None else lambda: None
                _write_checkpoint(directory, contents, meeting, workers, before, keep)
        finally:
            if snapshot is not None:
                snapshot.release_waiters()

    try:
        contents, snapshot = meeting.run_on_all(f"{directory} cannot be saved", prepare)
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
    """Write this rank's part, ``before`` which its values have to be there, and make a checkpoint of all parts."""
    lines = {
        fqn: FlatShards(torch.Size(held.shape).numel(), held.dtype, held.shards)
        for fqn, held in payload.tensors.items()
    }
    plain_order = {fqn: held.shape for fqn, held in payload.tensors.items() if held.element_order.is_row_major}
    described = {  # by the rank that holds some of it; the first knows every parameter, also the empty ones
        fqn: (held.shape, held.dtype, held.element_order)
        for fqn, held in payload.tensors.items()
        if held.shards or checkpoint_group.rank == 0
    }
    planner = SafetensorsSavePlanner((described, payload.optimizer_scalars, payload.rank_data), plain_order)

    def commit(files: list[FileRecord], stretches: dict[str, list[ShardEntry]], own: list[Any]) -> None:
        _commit(directory, payload, files, stretches, own)
        if keep is not None:
            prune(directory.parent, keep, directory)

    writer = SafetensorsStorageWriter(directory, planner, workers, before_write, commit)
    try:
        save_chunks(
            lines,
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
        told = CheckpointError.from_rank_failures(failures, checkpoint_group.size)
        raise CheckpointError(f"the save of {directory} failed: {told}") from error
    except RuntimeError as error:
        raise CheckpointError(f"the save of {directory} failed, as another rank is gone: {error}") from error
    finally:
        writer.release_lock()
        for line in lines.values():
            line.release()


def _remove_written_files(written_paths: list[Path]) -> None:
    """Make room again after all ranks have heard that the save failed.

    A rank that only lost the others cannot know: its files may be part of a whole checkpoint.
    """
    for path in written_paths:
        if path.name not in data_file_names(
            path.parent
        ):  # the first rank failed after it had made a checkpoint of them
            path.unlink(missing_ok=True)


def _commit(
    directory: Path,
    payload: RankPayload,
    files: list[FileRecord],
    shards: dict[str, list[ShardEntry]],
    all_planner_data: list[Any],
) -> None:
    """On the first rank, when all have written: see [Note: complete or absent]."""
    for record in files:
        found = directory / record.name
        if not found.is_file() or found.stat().st_size != record.nbytes:
            raise CheckpointError(
                f"{found} was written by another rank and is not seen whole from the first: a checkpoint's directory "
                "has to be on storage that all ranks share"
            )
    tensors: dict[str, TensorEntry] = {}
    counters: dict[str, Any] = {}
    for described, counted, _ in all_planner_data:
        for name, one in counted.items():
            if counters.setdefault(name, one) != one and "$tensor" not in str(one):
                raise CheckpointError(
                    f"the optimizer's numbers for {name!r} differ from rank to rank ({counters[name]} and {one}): a "
                    "checkpoint holds one of each, so these cannot be saved"
                )
        for fqn, (shape, dtype, order) in described.items():
            if fqn not in tensors:
                tensors[fqn] = TensorEntry(shape, dtype, order, sorted(shards.get(fqn, []), key=lambda s: s.start))
    for fqn, saved in tensors.items():
        saved.check_complete(directory, fqn)
    optimizer = payload.index_fields["optimizer"]
    index = CheckpointIndex(
        files=files,
        tensors=tensors,
        ranks=len(all_planner_data),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"zeroshard": zeroshard.__version__, "torch": torch.__version__},
        own=[data for _, _, data in all_planner_data],
        **{**payload.index_fields, "optimizer": optimizer and {**optimizer, "counters": counters}},
    )
    index.write(directory)
    update_latest(directory)
    remove_stale_files(directory, {record.name for record in files})
