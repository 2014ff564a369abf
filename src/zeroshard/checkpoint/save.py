"""save(): write a model's and its optimizer's states, with every rank writing what it holds."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_chunks

import zeroshard
from zeroshard.checkpoint.blocks import FileRecord
from zeroshard.checkpoint.chunks import Chunks
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.generators import generator_states
from zeroshard.checkpoint.history import point_latest, prune, sweep
from zeroshard.checkpoint.index import Index, Saved, Stretch, files_of
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.plain import encode, state_of
from zeroshard.checkpoint.snapshot import Snapshot, Stage
from zeroshard.checkpoint.states import Held, engine_of, persistent_buffers, states_of, ties_of
from zeroshard.checkpoint.storage import SavePlans, Writer
from zeroshard.engine.engine import Engine


class Save:
    """A save, under way or done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._told = False
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has come to its end, well or not."""
        return self._done.is_set()

    def wait(self) -> Path:
        """Wait for the end. Raises :class:`CheckpointError` where the checkpoint could not be written."""
        self._done.wait()
        self._told = True
        if self._error is not None:
            raise CheckpointError(f"the save of {self.path} failed: {self._error}") from self._error
        return self.path

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
        self._done.set()

    def _report(self) -> None:
        if self._error is not None and not self._told:
            print(f"zeroshard: the save of {self.path} failed: {self._error}", file=sys.stderr)


_pending: list[Save] = []  # the last asynchronous save of this process
_stages = Stage(), Stage()  # for what is copied at once, and later


def wait_for_pending() -> None:
    """Wait for an asynchronous save of before; raises where it failed."""
    while _pending:
        handle = _pending.pop()
        if not handle._told:
            handle.wait()


@atexit.register
def _report_pending() -> None:
    for pending in _pending:
        pending._report()


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

    It loads on any number of ranks, at any stage and precision, and without zeroshard's sharding: :func:`load`. The
    model and optimizer may be plain ones, too. It holds parameters and buffers, optimizer states, fp16's loss scale and
    each rank's random states; all in safetensors and one JSON file, which is written last, so that a checkpoint is
    whole or not there. ``latest``, a file beside it, then names it.

    - ``extra``: plain data of the first rank (a step, a data position), and objects with ``state_dict()`` (schedulers).
    - ``rank_extra``: such data of each rank's own.
    - ``weights=False``: the optimizer's states without the model's. ``frozen=False``: without parameters that are not
      trained, such as the base of LoRA; a load leaves them as they are.
    - ``keep``: remove all but the newest ``keep`` checkpoints beside this one, once it is whole.
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
    directory = Path(path).absolute()
    engine = engine_of(model)
    wait_for_pending()
    meeting = Meeting.call(engine, "save")

    def prepare() -> _Contents:
        if engine is not None:
            _refuse_unfit(engine)
        return _collect(model, optimizer, extra, rank_extra, _kept(model, weights, frozen), meeting)

    contents = meeting.together(f"{directory} cannot be saved", prepare)
    handle = Save(directory)
    if wait:
        handle._run(lambda: _write(directory, contents, meeting, keep))
        handle.wait()
        return handle
    snapshot = Snapshot(contents.tensors, _stages)
    contents.tensors = snapshot.tensors
    if engine is not None:
        engine.readers.append(snapshot.settle)
    else:
        snapshot.finish()

    def write() -> None:
        snapshot.finish()
        _write(directory, contents, meeting, keep)

    _pending.append(handle)
    threading.Thread(target=handle._run, args=(write,), name=f"save {directory.name}").start()
    return handle


def _refuse_unfit(engine: Engine) -> None:
    for why in engine.spoilt.values():
        raise CheckpointError(why)
    if engine.running:
        raise CheckpointError("a forward or backward is under way: save between steps")
    if engine.backwards and engine.gradients.exist:
        raise CheckpointError(
            f"{engine.backwards} backwards have been summed since the last step, and a checkpoint holds no gradients: "
            "save after optimizer.step(), or drop them with optimizer.zero_grad()"
        )


@dataclass
class _Contents:
    """What one rank brings to a checkpoint."""

    tensors: dict[str, Held]
    counters: dict[str, Any]  # encoded
    own: Any  # encoded
    index: dict[str, Any]  # what the first rank says in the index


def _collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    rank_extra: Any,
    parameters: Collection[str] | None,
    meeting: Meeting,
) -> _Contents:
    """``parameters`` are those to be kept; None: neither parameters nor buffers."""
    states = states_of(model, optimizer)
    tensors: dict[str, Held] = {}
    others: dict[str, torch.Tensor] = {}
    if parameters is not None:
        found = states.parameters()
        tensors |= {f"model/{name}": held for name, held in found.items() if name in parameters}
    tensors |= {f"optimizer/{name}": held for name, held in states.states().items()}
    number, replicas = _replica(engine_of(model), meeting)
    _share(tensors, number, replicas)
    if parameters is not None and meeting.rank == 0:  # its buffers count, as they do in training
        tensors |= {f"model/{name}": Held.whole(name, buffer) for name, buffer in persistent_buffers(model)}
    mine = states.counters() if number == 0 else {}  # a rank that has some values of a parameter has its counters
    counters = {name: encode(value, others, f"counters.{name}") for name, value in mine.items()}
    own = {"random": generator_states(), "extra": state_of(rank_extra)}
    encoded = encode(own, others, f"rank-{meeting.rank}")
    index = _described(model, optimizer, states.groups(), others) if meeting.rank == 0 else {}
    index["extra"] = encode(state_of(dict(extra or {})), others) if meeting.rank == 0 else None
    tensors |= {f"other/{name}": Held.whole(name, tensor.contiguous()) for name, tensor in others.items()}
    return _Contents(tensors, counters, encoded, index)


def _kept(model: nn.Module, weights: bool, frozen: bool) -> Collection[str] | None:
    kept = {name for name, parameter in model.named_parameters() if frozen or parameter.requires_grad}
    return kept if weights else None


def _replica(engine: Engine | None, meeting: Meeting) -> tuple[int, int]:
    """How many ranks hold just what this one holds, and which of them it is."""
    if engine is None:
        return meeting.rank, meeting.size
    number, replicas = 0, 1
    for axis in engine.comm.replicas:
        number, replicas = number * axis.size + axis.rank, replicas * axis.size
    return number, replicas


def _share(tensors: dict[str, Held], number: int, replicas: int) -> None:
    """Leave to this rank what it writes of what several hold. All of them come to the same division, by bytes."""
    loads = [0] * replicas
    for fqn, held in tensors.items():
        writer = loads.index(min(loads))
        loads[writer] += sum(tensor.nbytes for _, tensor in held.parts)
        if writer != number:
            tensors[fqn] = replace(held, parts=[])


def _described(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, groups: list[Any], others: dict[str, torch.Tensor]
) -> dict[str, Any]:
    engine = engine_of(model)
    described: dict[str, Any] = {
        "sharding": engine and {"stage": engine.config.stage, "precision": engine.config.precision},
        "parameters": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "ties": ties_of(model),
        "config": _huggingface_config(model),
        "optimizer": None,
    }
    if optimizer is not None:
        inner = getattr(optimizer, "inner", optimizer)
        scale = optimizer.loss_scale_state() if isinstance(optimizer, zeroshard.ShardedOptimizer) else None
        described["optimizer"] = {
            "class": type(inner).__name__,
            "groups": [
                {"names": group.names, "options": encode(group.options, others, f"groups[{number}]")}
                for number, group in enumerate(groups)
            ],
            "loss_scale": scale,
        }
    return described


def _huggingface_config(model: nn.Module) -> dict[str, Any] | None:
    """What a Hugging Face model says of itself, so that an export can be loaded by it."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    plain: dict[str, Any] = json.loads(to_json())
    plain.setdefault("architectures", [type(model).__name__])
    return plain


def _write(directory: Path, contents: _Contents, meeting: Meeting, keep: int | None) -> None:
    """Write this rank's part, and on the first rank make a checkpoint of all parts."""
    lines = {
        fqn: Chunks(torch.Size(held.shape).numel(), held.dtype, held.parts) for fqn, held in contents.tensors.items()
    }
    plain_order = {
        fqn: held.shape for fqn, held in contents.tensors.items() if held.order == tuple(range(len(held.shape)))
    }
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

    writer = Writer(directory, planner, commit)
    try:
        with warnings.catch_warnings():  # torch warns where there is one rank alone
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save_chunks(
                lines,
                storage_writer=writer,
                planner=planner,
                process_group=meeting.group,
                no_dist=meeting.group is None,
            )
    except CheckpointException as error:
        _remove(writer.written)
        failures = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        raise CheckpointError.of_ranks(failures, meeting.size) from error


def _remove(written: list[Path]) -> None:
    """Make room again after all ranks have heard that the save failed.

    A rank that only lost the others cannot know: its files may be part of a whole checkpoint.
    """
    for path in written:
        if path.name not in files_of(path.parent):  # the first rank failed after it had made a checkpoint of them
            path.unlink(missing_ok=True)


def _commit(
    directory: Path,
    contents: _Contents,
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
        counters |= counted
        for fqn, (shape, dtype, order) in described.items():
            if fqn not in tensors:
                tensors[fqn] = Saved(shape, dtype, order, sorted(stretches.get(fqn, []), key=lambda s: s.start))
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
