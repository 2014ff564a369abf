"""Checkpoints of replicas that train alone: ``Config.local_steps``.

[Note: replicas in a checkpoint]
Replicas have their own optimizer states, step counts and buffers, and between two averages their own parameters and
EMAs. The first replica's are saved under the ordinary names, so a checkpoint reads like any other. The others save what
differs as ``replica/1/model/NAME``, ``replica/1/optimizer/NAME/STATE`` and so on. Anchors and states of the outer
optimizer are equal on all replicas: the first one saves them as ``outer_optimizer/NAME/anchor`` and
``outer_optimizer/NAME/STATE``. ``sharding.replicas`` in the index has the number of replicas, and the steps of each
optimizer since the last average.

A load of weights and all optimizers on the same number of replicas gives each replica its own states, and the run
continues to the bit. Any other load gives all ranks those of the first replica, and starts new local steps. Between two
averages that drops what the others have learnt since, so it warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.flat_shards import LocalTensor
from zeroshard.checkpoint.index import CheckpointIndex
from zeroshard.checkpoint.reader import LoadSource
from zeroshard.checkpoint.train_state import engine_of_model
from zeroshard.engine import EMA, Engine
from zeroshard.optim import LocalSteps, ShardedOptimizer


def replicas_field(engine: Engine) -> dict[str, Any]:
    """Return the entry of an index's ``sharding`` for replicas that train alone; {} if there are none."""
    if engine.context.config.local_steps == 1:
        return {}
    steps = engine.state_guard.replica_steps
    counts = [steps[number] for number in sorted(steps)]
    return {"replicas": {"count": engine.comm.average_axis.size, "steps_since_average": counts}}


def name_by_replica(tensors: dict[str, LocalTensor], engine: Engine) -> dict[str, LocalTensor]:
    """Return what this rank's replica saves, by name: see [Note: replicas in a checkpoint]."""
    replica = engine.comm.average_axis.rank
    if replica == 0:
        return tensors
    are_equal = engine.state_guard.replica_steps.are_replicas_equal
    flats = [flat for unit in engine.units for flat in unit.flats]
    # by what was frozen at shard(): a parameter that was frozen later has been trained
    equal = {f"model/{name}" for flat in flats if are_equal or not flat.spec.is_trainable for name in flat.names}
    equal |= {fqn for fqn in tensors if are_equal and fqn.startswith("ema/")}
    return {
        f"replica/{replica}/{fqn}": local
        for fqn, local in tensors.items()
        if fqn not in equal and not fqn.startswith("outer_optimizer/")
    }


def open_replica(
    source: LoadSource, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], weights: bool
) -> tuple[LoadSource, bool]:
    """Return the source as this rank's replica reads it, and whether the replica gets its own states from it."""
    saved = replicas_in(source.index)
    if saved is None:
        return source, False
    engine, sharded = engine_of_model(model), vars(model).get("_zeroshard")
    is_resumed = False
    if engine is not None and sharded is not None and engine.context.config.local_steps > 1:
        has_all = len(optimizers) == len(sharded.optimizers) > 0
        is_resumed = has_all and engine.comm.average_axis.size == saved["count"]
    if not is_resumed:
        if weights:
            warn_of_replicas(source.index, f"zeroshard.load({str(source.path)!r})")
        return source, False
    assert engine is not None
    prefix, index = f"replica/{engine.comm.average_axis.rank}/", source.index
    own = {name.removeprefix(prefix): entry for name, entry in index.tensors.items() if name.startswith(prefix)}
    # without the first replica's states that this one does not have
    others = {n: e for n, e in index.tensors.items() if not (own and n.startswith("optimizer/"))}
    optimizer = index.optimizer
    if optimizer is not None and own:
        scalars = optimizer["scalars"]
        found = {name.removeprefix(prefix): value for name, value in scalars.items() if name.startswith(prefix)}
        found |= {name: value for name, value in scalars.items() if name.startswith("outer_optimizer/")}
        optimizer = {**optimizer, "scalars": found}
    return replace(source, index=replace(index, tensors=others | own, optimizer=optimizer)), True


def replicas_in(index: CheckpointIndex) -> dict[str, Any] | None:
    """Return the number of replicas that trained alone, and their steps since the last average; None without any."""
    found: dict[str, Any] | None = (index.sharding or {}).get("replicas")
    return found


def warn_of_replicas(index: CheckpointIndex, call: str) -> None:
    """Warn if a checkpoint was saved between two averages, and only the first replica's parameters are read."""
    saved = replicas_in(index)
    if saved is not None and saved["count"] > 1 and any(steps := saved["steps_since_average"]):
        warnings.warn(
            f"{call}: the checkpoint has {saved['count']} replicas, {max(steps)} steps after their last "
            "average (local_steps), and the first one's parameters are read. To keep what the others have learnt, "
            "continue with as many replicas, or call zeroshard.average_replicas(model) before zeroshard.save()",
            stacklevel=3,
        )


def restore_steps(model: nn.Module, index: CheckpointIndex, is_resumed: bool, ema: EMA | None) -> None:
    """Set the number of steps since the last average, after parameters, and ``ema``, were loaded."""
    sharded: Any = vars(model).get("_zeroshard")
    saved = replicas_in(index)
    for local_steps in map(local_steps_of, sharded.optimizers if sharded is not None else ()):
        if local_steps is not None:
            steps = saved["steps_since_average"] if is_resumed and saved is not None else []
            count = steps[local_steps.number] if local_steps.number < len(steps) else 0
            local_steps.restore_count(count, ema)


def local_steps_of(optimizer: torch.optim.Optimizer) -> LocalSteps | None:
    """Return the counter of an optimizer's local steps; None if it has none."""
    return optimizer.local_steps if isinstance(optimizer, ShardedOptimizer) else None
