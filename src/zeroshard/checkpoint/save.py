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
from zeroshard.checkpoint.blocks import FileRecord, Workers
from zeroshard.checkpoint.chunks import Chunks
from zeroshard.checkpoint.contribution import Contribution, collect
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.history import point_latest, prune, sweep
from zeroshard.checkpoint.index import Index, Saved, Stretch, files_of
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.pending import Save, pending, wait_for_pending
from zeroshard.checkpoint.snapshot import Snapshot, Stage
from zeroshard.checkpoint.states import engine_of, unwrapped
from zeroshard.checkpoint.writer import SavePlans, Writer
from zeroshard.engine.engine import Engine

_stages = Stage(), Stage()  # for what is copied at once, and later


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
    model = unwrapped(model)
    engine = engine_of(model)
    wait_for_pending()
    meeting = Meeting.call(engine, "save")
    workers = Workers(2)  # now: none can be started when the interpreter is ending

    def prepare() -> tuple[Contribution, Snapshot | None]:
        if engine is not None:
            _refuse_unfit(engine)
        contents = collect(model, optimizer, extra, rank_extra, weights, frozen, meeting)
        if wait:
            return contents, None
        snapshot = Snapshot(contents.tensors, _stages, workers)
        if engine is None:  # whose next step nobody would hold
            snapshot.finish()
        return replace(contents, tensors=snapshot.tensors), snapshot

    def write() -> None:
        try:
            with workers:
                before = snapshot.finish if snapshot is not None else lambda: None
                _write(directory, contents, meeting, workers, before, keep)
        finally:
            if snapshot is not None:
                snapshot.let_go()

    try:
        contents, snapshot = meeting.together(f"{directory} cannot be saved", prepare)
    except BaseException:
        workers.close()
        raise
    if snapshot is None:
        write()
        return Save(directory, done=True)
    if engine is not None:
        engine.states.readers.append(snapshot.settle)
    handle = Save(directory)
    pending.append(handle)
    threading.Thread(target=handle.run, args=(write,), name=f"save {directory.name}").start()
    return handle


def _refuse_unfit(engine: Engine) -> None:
    for why in engine.states.spoilt.values():
        raise CheckpointError(why)
    if engine.running:
        raise CheckpointError("a forward or backward is under way: save between steps")
    if engine.backwards and engine.gradients.exist:
        raise CheckpointError(
            f"{engine.backwards} backwards have been summed since the last step, and a checkpoint holds no gradients: "
            "save after optimizer.step(), or drop them with optimizer.zero_grad()"
        )


def _write(
    directory: Path,
    contents: Contribution,
    meeting: Meeting,
    workers: Workers,
    before: Callable[[], None],
    keep: int | None,
) -> None:
    """Write this rank's part, ``before`` which its values have to be there, and make a checkpoint of all parts."""
    lines = {
        fqn: Chunks(torch.Size(held.shape).numel(), held.dtype, held.parts) for fqn, held in contents.tensors.items()
    }
    plain_order = {fqn: held.shape for fqn, held in contents.tensors.items() if held.order.plain}
    described = {  # by the rank that holds some of it; the first knows every parameter, also the empty ones
        fqn: (held.shape, held.dtype, held.order)
        for fqn, held in contents.tensors.items()
        if held.parts or meeting.rank == 0
    }
    planner = SavePlans((described, contents.counters, contents.own), plain_order)

    def commit(files: list[FileRecord], stretches: dict[str, list[Stretch]], own: list[Any]) -> None:
        _commit(directory, contents, files, stretches, own)
        if keep is not None:
            prune(directory.parent, keep, directory)

    writer = Writer(directory, planner, workers, before, commit)
    try:
        save_chunks(
            lines,
            storage_writer=writer,
            planner=planner,
            process_group=meeting.group,
            no_dist=meeting.group is None,
        )
    except CheckpointException as error:
        _remove(writer.written)
        for failure, _ in error.failures.values():
            if isinstance(failure, KeyboardInterrupt):
                raise failure from error
        failures = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        told = CheckpointError.of_ranks(failures, meeting.size)
        raise CheckpointError(f"the save of {directory} failed: {told}") from error
    except RuntimeError as error:
        raise CheckpointError(f"the save of {directory} failed, as another rank is gone: {error}") from error
    finally:
        writer.release()
        for line in lines.values():
            line.let_go()


def _remove(written: list[Path]) -> None:
    """Make room again after all ranks have heard that the save failed.

    A rank that only lost the others cannot know: its files may be part of a whole checkpoint.
    """
    for path in written:
        if path.name not in files_of(path.parent):  # the first rank failed after it had made a checkpoint of them
            path.unlink(missing_ok=True)


def _commit(
    directory: Path,
    contents: Contribution,
    files: list[FileRecord],
    stretches: dict[str, list[Stretch]],
    own: list[Any],
) -> None:
    """On the first rank, when all have written: see [Note: complete or absent]."""
    for record in files:
        found = directory / record.name
        if not found.is_file() or found.stat().st_size != record.nbytes:
            raise CheckpointError(
                f"{found} was written by another rank and is not seen whole from the first: a checkpoint's directory "
                "has to be on storage that all ranks share"
            )
    tensors: dict[str, Saved] = {}
    counters: dict[str, Any] = {}
    for described, counted, _ in own:
        for name, one in counted.items():
            if counters.setdefault(name, one) != one and "$tensor" not in str(one):
                raise CheckpointError(
                    f"the optimizer's numbers for {name!r} differ from rank to rank ({counters[name]} and {one}): a "
                    "checkpoint holds one of each, so these cannot be saved"
                )
        for fqn, (shape, dtype, order) in described.items():
            if fqn not in tensors:
                tensors[fqn] = Saved(shape, dtype, order, sorted(stretches.get(fqn, []), key=lambda s: s.start))
    for fqn, saved in tensors.items():
        saved.refuse_gaps(directory, fqn)
    optimizer = contents.index["optimizer"]
    index = Index(
        files=files,
        tensors=tensors,
        ranks=len(own),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"zeroshard": zeroshard.__version__, "torch": torch.__version__},
        own=[data for _, _, data in own],
        **{**contents.index, "optimizer": optimizer and {**optimizer, "counters": counters}},
    )
    index.write(directory)
    point_latest(directory)
    sweep(directory, {record.name for record in files})
