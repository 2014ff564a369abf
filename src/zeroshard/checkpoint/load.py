"""load(): fill a model and its optimizer from a checkpoint, or a model from weights that others wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_chunks

from zeroshard.checkpoint.async_save import wait_for_pending_save
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.flat_shards import FlatShards
from zeroshard.checkpoint.group import CheckpointGroup
from zeroshard.checkpoint.json_codec import load_into
from zeroshard.checkpoint.mapping import LoadMapping, LoadSource, find_source, map_states
from zeroshard.checkpoint.reader import SafetensorsLoadPlanner
from zeroshard.checkpoint.rng_state import check_rng_states, set_rng_states
from zeroshard.checkpoint.train_state import engine_of, unwrap_compiled


@dataclass
class Loaded:
    """What a load brought besides the states.

    >>> import tempfile, torch, zeroshard
    >>> model = torch.nn.Linear(2, 1)
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-1", model, extra={"step": 1}).path
    >>> loaded = zeroshard.load(path, model)
    >>> loaded.extra, loaded.missing
    ({'step': 1}, [])
    """

    path: Path
    extra: dict[str, Any] = field(default_factory=dict)
    """What was saved as ``extra``."""
    rank_extra: list[Any] = field(default_factory=list)
    """What each rank saved as ``rank_extra``."""
    missing: list[str] = field(default_factory=list)
    """Parameters and buffers that are not in the file, which stay as they were, and parameters that the file has no
    optimizer states for, which begin anew."""
    unexpected: list[str] = field(default_factory=list)
    """Those in the file that the model and optimizer have not."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    weights: bool = True,
    strict: bool = True,
    random: bool | None = None,
    rename: Callable[[str], str] | None = None,
) -> Loaded:
    """Fill a model, and its optimizer where one is given, from ``path``. All ranks call it together.

    ``path`` is a checkpoint of :func:`save`, written on any number of ranks at any stage, precision and tensor degree;
    a directory of such, for the latest; or weights alone: a safetensors file, a Hugging Face directory of them, or a
    state dict of ``torch.save``. Each rank reads what it holds, straight into place.

    - ``extra``: objects to be given their state back, under the names they were saved with (a scheduler).
    - ``weights=False``: the optimizer's states without the model's.
    - ``strict=False``: leave out what only one side has; :class:`Loaded` lists it. Shapes have to be the same.
    - ``random``: give this rank its random states back; by default where the optimizer is loaded, to go on from there.
    - ``rename``: maps the names of foreign weights to the model's.

    What is wrong with names, shapes or files is found before anything changes. Damage inside a file is found when it is
    read: a sharded model then refuses to go on until a load has succeeded.

    >>> import tempfile, zeroshard
    >>> model = nn.Linear(2, 1)
    >>> torch.save(model.state_dict(), tempfile.gettempdir() + "/linear.pt")
    >>> model, _ = zeroshard.shard(nn.Linear(2, 1), stage=3)
    >>> zeroshard.load(tempfile.gettempdir() + "/linear.pt", model).missing
    []
    """
    if not weights and optimizer is None:
        raise ValueError("weights=False loads the optimizer's states alone, and no optimizer was given")
    wait_for_pending_save()
    model = unwrap_compiled(model)
    engine = engine_of(model)
    if engine is not None:
        engine.state_guard.check_not_gathered("zeroshard.load()")
    meeting = CheckpointGroup.open(engine, "load")
    if engine is not None:
        engine.state_guard.wait_readers()
    what = f"{path} cannot be loaded"
    found = meeting.broadcast(meeting.run_on_all(what, lambda: find_source(Path(path))))  # `latest` may move meanwhile
    source = meeting.run_on_all(what, lambda: LoadSource.open(found, rename, meeting.rank, meeting.size))

    def plan() -> LoadMapping:
        if engine is not None and engine.is_running:
            raise CheckpointError("a forward or backward is under way: load between steps")
        return map_states(source, model, optimizer, weights, strict)

    planned = meeting.run_on_all(what, plan)
    given = meeting.run_on_all(what, lambda: _ExtraData.read(source, meeting.rank, extra))
    parts = [*(["weights"] if weights else []), *(["optimizer"] if optimizer is not None else [])]
    if engine is not None:
        why = f"the load of {source.path} was not finished: load a whole checkpoint"
        engine.state_guard.invalid_states |= dict.fromkeys(parts, why)
    targets = meeting.run_on_all(what, planned.allocate_targets)
    _load_tensors(source, targets, meeting)
    if weights:
        planned.train_state.sync_loaded_parameters()
    if engine is not None:
        for part in parts:
            del engine.state_guard.invalid_states[part]
    if (optimizer is not None if random is None else random) and given.rng_states is not None:
        set_rng_states(given.rng_states)
    meeting.run_on_all("a state of extra was not taken", lambda: load_into(dict(extra or {}), given.extra))
    return Loaded(source.path, given.extra, given.rank_extra, planned.missing, planned.unexpected)


@dataclass
class _ExtraData:
    """What a checkpoint holds besides tensors of the model and optimizer."""

    extra: dict[str, Any] = field(default_factory=dict)
    rank_extra: list[Any] = field(default_factory=list)
    rng_states: dict[str, torch.Tensor] | None = None

    @classmethod
    def read(cls, source: LoadSource, rank: int, wanted: Mapping[str, Any] | None) -> _ExtraData:
        """Read it, and refuse what is wanted and not there."""
        extra: dict[str, Any] = {}
        given = cls()
        if source.index is not None:
            own = source.index.own
            random = own[rank]["random"] if rank < len(own) else None
            extra, each, random = source.decode([source.index.extra, [one["extra"] for one in own], random])
            given = cls(extra, each, random)
            try:
                check_rng_states(random or {})
            except ValueError as error:
                raise CheckpointError(f"{source.path}: {error}. Load an earlier checkpoint") from error
        lacking = [name for name in wanted or () if name not in extra]
        if lacking:
            raise CheckpointError(
                f"{source.path} has no extra {', '.join(lacking)}: it has {', '.join(extra) or 'none'}"
            )
        return given


def _load_tensors(source: LoadSource, targets: dict[str, FlatShards], checkpoint_group: CheckpointGroup) -> None:
    """Fill the targets, on all ranks together."""
    try:
        load_chunks(
            targets,
            storage_reader=source.reader,
            planner=SafetensorsLoadPlanner(),
            process_group=checkpoint_group.process_group,
            no_dist=checkpoint_group.process_group is None,
        )
    except CheckpointException as error:
        failures = {rank: str(failure) for rank, (failure, _) in error.failures.items()}
        raise CheckpointError.from_rank_failures(failures, checkpoint_group.size) from error
    finally:
        for line in targets.values():
            line.release()
