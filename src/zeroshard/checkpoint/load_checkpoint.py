"""Load a model and its optimizer from a checkpoint, or a model from external weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.async_save import wait_for_pending_save
from zeroshard.checkpoint.extra_states import load_extra_states
from zeroshard.checkpoint.group import CheckpointError, CheckpointGroup
from zeroshard.checkpoint.json_codec import load_into
from zeroshard.checkpoint.mapping import LoadMapping, map_states
from zeroshard.checkpoint.reader import LoadSource, find_source
from zeroshard.checkpoint.replicas import open_replica, restore_steps
from zeroshard.checkpoint.rng_state import set_rng_states
from zeroshard.checkpoint.train_state import engine_of_model
from zeroshard.engine import EMA, unwrap_compiled
from zeroshard.optim import as_list


@dataclass
class Loaded:
    """Result of :func:`load`: the user's data and the names that did not match.

    >>> import tempfile, torch, zeroshard
    >>> model = torch.nn.Linear(2, 1)
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-1", model, extra={"step": 1}).path
    >>> loaded = zeroshard.load(path, model)
    >>> loaded.extra, loaded.missing
    ({'step': 1}, [])
    """

    path: Path
    extra: dict[str, Any] = field(default_factory=dict)
    """The value that was saved as ``extra``."""
    rank_extra: list[Any] = field(default_factory=list)
    """The value that each rank saved as ``rank_extra``."""
    missing: list[str] = field(default_factory=list)
    """Parameters and buffers that the file does not contain (they keep their values), and parameters without optimizer
    states in the file (their states start from scratch)."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the file that the model and optimizer do not have."""


def load(
    path: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    ema: EMA | None = None,
    extra: Mapping[str, Any] | None = None,
    weights: bool = True,
    strict: bool = True,
    random: bool | None = None,
    rename: Callable[[str], str] | None = None,
) -> Loaded:
    """Load a model, and its optimizer if given, from ``path``. All ranks must call it.

    ``path`` is a checkpoint written by :func:`save` on any number of ranks, at any stage, precision and tensor-parallel
    degree; a directory of checkpoints (the latest is loaded); or weights only: a safetensors file, a Hugging Face
    directory, or a state dict, written by ``torch.save`` or in memory on every rank. Each rank reads its local shards
    directly into place.

    - ``ema``: an average of the parameters to load, made by ``zeroshard.EMA(model, …)``; its decay stays its own.
    - ``extra``: objects whose state is restored (a scheduler), under the names they were saved with.
    - ``weights=False``: load the optimizer states without the model.
    - ``strict=False``: skip names that only one side has; :class:`Loaded` lists them. Shapes must still match.
    - ``random``: restore this rank's RNG states. The default is to restore them if the optimizer is loaded, so that
      training continues from there.
    - ``rename``: maps names of external weights to names of the model.

    Wrong names, shapes and files raise before anything changes. Corruption inside a file is detected when the file is
    read; a sharded model then raises on use until a load succeeds.

    >>> import tempfile, zeroshard
    >>> model = nn.Linear(2, 1)
    >>> torch.save(model.state_dict(), tempfile.gettempdir() + "/linear.pt")
    >>> model, _ = zeroshard.shard(nn.Linear(2, 1), stage=3)
    >>> zeroshard.load(tempfile.gettempdir() + "/linear.pt", model).missing
    []
    """
    optimizers = as_list(optimizer)
    if not weights and not optimizers:
        raise ValueError("weights=False loads only optimizer states, but no optimizer was given: pass the optimizer")
    wait_for_pending_save()
    model = unwrap_compiled(model)
    engine = engine_of_model(model)
    if engine is not None:
        engine.state_guard.check_not_gathered("zeroshard.load()")
    checkpoint_group = CheckpointGroup.open(engine, "load")
    if engine is not None:
        engine.state_guard.wait_readers()
    error_prefix = f"{'the state dict' if isinstance(path, Mapping) else path} cannot be loaded: "
    source = _open_source(path, rename, checkpoint_group, error_prefix)
    if engine is not None and isinstance(path, Mapping):
        _check_equal_weights(source, checkpoint_group, error_prefix)
    source, is_resumed = open_replica(source, model, optimizers, weights)

    def plan() -> LoadMapping:
        if engine is not None and engine.is_running:
            raise CheckpointError("a forward or backward is in progress: load between steps")
        return map_states(source, model, optimizers, ema, weights, strict, is_resumed)

    mapping = checkpoint_group.run_on_all(error_prefix, plan)
    extra_data = checkpoint_group.run_on_all(
        error_prefix, lambda: _ExtraData.read(source, checkpoint_group.rank, extra)
    )
    loaded_kinds = [*(["weights"] if weights else []), *(["optimizer"] if optimizers else [])]
    if engine is not None:
        reason = f"the load of {source.path} failed before its end: load a complete checkpoint"
        engine.state_guard.invalid_states |= dict.fromkeys(loaded_kinds, reason)
    targets = checkpoint_group.run_on_all(error_prefix, mapping.allocate_targets)
    checkpoint_group.without_timeout().run_on_all(error_prefix, lambda: source.load(targets))
    if weights:
        mapping.train_state.sync_loaded_parameters()
        checkpoint_group.run_on_all(
            "the extra states of modules cannot be loaded: ", lambda: load_extra_states(model, extra_data.modules)
        )
        restore_steps(model, source.index, is_resumed, ema)
    if engine is not None:
        for kind in loaded_kinds:
            del engine.state_guard.invalid_states[kind]
        engine.gradients.reducer.clear_feedback()
    if (bool(optimizers) if random is None else random) and extra_data.rng_states is not None:
        set_rng_states(extra_data.rng_states)
    checkpoint_group.run_on_all(
        "the objects in extra cannot be restored: ", lambda: load_into(dict(extra or {}), extra_data.extra)
    )
    return Loaded(source.path, extra_data.extra, extra_data.rank_extra, mapping.missing, mapping.unexpected)


def _open_source(
    path: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    rename: Callable[[str], str] | None,
    checkpoint_group: CheckpointGroup,
    error_prefix: str,
) -> LoadSource:
    if isinstance(path, Mapping):
        return checkpoint_group.run_on_all(error_prefix, lambda: LoadSource.from_state_dict(path, rename))
    # broadcast: `latest` may change between ranks
    found = checkpoint_group.run_on_all(error_prefix, lambda: find_source(Path(path)))
    source_path = Path(checkpoint_group.broadcast(os.fspath(found)))
    return checkpoint_group.run_on_all(
        error_prefix, lambda: LoadSource.open(source_path, rename, checkpoint_group.rank, checkpoint_group.size)
    )


def _check_equal_weights(source: LoadSource, checkpoint_group: CheckpointGroup, error_prefix: str) -> None:
    """Raise if ranks have other state dicts, by their names and by samples: each rank copies its own shards."""
    digests = checkpoint_group.run_on_all(error_prefix, source.weight_digests)
    total = hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).digest()
    if len(set(checkpoint_group.all_gather(total))) > 1:
        gathered = checkpoint_group.all_gather(digests)
        all_names = sorted({name for each in gathered for name in each})
        names = [name for name in all_names if len({each.get(name) for each in gathered}) > 1]
        raise CheckpointError(
            f"{error_prefix}{names[0]!r} differs between ranks, or some ranks do not have it. Each rank reads its own "
            "part of the weights: give all ranks the same"
        )


@dataclass
class _ExtraData:
    """Data of a checkpoint other than the tensors of the model and optimizer."""

    extra: dict[str, Any]
    rank_extra: list[Any]
    rng_states: dict[str, torch.Tensor] | None
    modules: dict[str, Any]

    @classmethod
    def read(cls, source: LoadSource, rank: int, wanted: Mapping[str, Any] | None) -> _ExtraData:
        """Read the data; raise if a name in ``wanted`` is missing or an RNG state is invalid."""
        rank_data = source.index.rank_data
        encoded_rng_states = rank_data[rank]["rng_states"] if rank < len(rank_data) else None
        rank_extra = [data["rank_extra"] for data in rank_data]
        extra, rank_extra, rng_states, modules = source.decode(
            [source.index.extra, rank_extra, encoded_rng_states, source.index.extra_states]
        )
        try:
            set_rng_states(rng_states or {}, is_trial=True)
        except ValueError as error:
            raise CheckpointError(f"{source.path}: {error}. Load an earlier checkpoint") from error
        missing = [name for name in wanted or () if name not in extra]
        if missing:
            raise CheckpointError(
                f"{source.path} has no extra data {', '.join(missing)}, only: {', '.join(extra) or 'none'}"
            )
        return cls(extra, rank_extra, rng_states, modules)
