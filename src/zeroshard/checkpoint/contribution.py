"""Contribution: what one rank brings to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.generators import generator_states
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.plain import encode, state_of
from zeroshard.checkpoint.states import Held, engine_of, persistent_buffers, states_of, ties_of
from zeroshard.engine.engine import Engine
from zeroshard.optimizer import ShardedOptimizer


@dataclass
class Contribution:
    """What one rank brings to a checkpoint."""

    tensors: dict[str, Held]
    counters: dict[str, Any]  # encoded
    own: Any  # encoded
    index: dict[str, Any]  # what the first rank says in the index


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    rank_extra: Any,
    weights: bool,
    frozen: bool,
    meeting: Meeting,
) -> Contribution:
    """Collect it: see :func:`zeroshard.save`."""
    states = states_of(model, optimizer)
    tensors: dict[str, Held] = {}
    others: dict[str, torch.Tensor] = {}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if weights:
        found = states.parameters()
        tensors |= {f"model/{name}": held for name, held in found.items() if frozen or name in trained}
    tensors |= {f"optimizer/{name}": held for name, held in states.states().items()}
    engine = engine_of(model)
    number, replicas = _replica(engine, meeting)
    if engine is not None:
        _leave_to_tensor_ranks(tensors, engine)
    _share(tensors, number, replicas)
    if weights and meeting.rank == 0:  # its buffers count, as they do in training
        tensors |= {f"model/{name}": Held.whole(name, buffer) for name, buffer in persistent_buffers(model)}
    mine = states.counters() if number == 0 else {}  # a rank that has some values of a parameter has its counters
    at = f"rank-{meeting.rank}.counters"  # several ranks have the same, and each writes tensors of its own
    counters = {name: encode(value, others, f"{at}.{name}") for name, value in mine.items()}
    own = {"random": generator_states(), "extra": state_of(rank_extra)}
    encoded = encode(own, others, f"rank-{meeting.rank}")
    index = _described(model, optimizer, states.groups(), others) if meeting.rank == 0 else {}
    index["extra"] = encode(state_of(dict(extra or {})), others) if meeting.rank == 0 else None
    tensors |= {f"other/{name}": Held.whole(name, tensor.contiguous()) for name, tensor in others.items()}
    return Contribution(tensors, counters, encoded, index)


def _replica(engine: Engine | None, meeting: Meeting) -> tuple[int, int]:
    """How many data-parallel ranks hold just what this one holds, and which of them it is."""
    if engine is None:
        return meeting.rank, meeting.size
    number, replicas = 0, 1
    for axis in engine.comm.replicas:
        number, replicas = number * axis.size + axis.rank, replicas * axis.size
    return number, replicas


def _leave_to_tensor_ranks(tensors: dict[str, Held], engine: Engine) -> None:
    """Leave to this rank what it writes of the parameters that all ranks of the tensor axis have.

    Such a parameter is written by the data-parallel ranks of one tensor rank, with its states: where shares differ in
    length, layouts differ too, and what this rank's shard has of the parameter another tensor rank's may not have. All
    ranks of the mesh come to the same division, by bytes; frozen parameters, which have no states, by themselves.
    """
    axis = engine.comm.tensor
    loads = {True: [0] * axis.size, False: [0] * axis.size}
    others: set[str] = set()  # parameters that another tensor rank writes
    members = [(flat, index) for unit in engine.units for flat in unit.flats for index in range(len(flat.names))]
    for flat, index in sorted(members, key=lambda member: member[0].shares[member[1]] is None):  # divided ones first
        load, share = loads[flat.trainable], flat.shares[index]
        if share is not None:
            for rank in range(axis.size):
                load[rank] += share.shape_of(rank).numel() * flat.dtype.itemsize
            continue
        writer = load.index(min(load))
        load[writer] += flat.layout.numels[index] * flat.dtype.itemsize
        if writer != axis.rank:
            others.add(flat.names[index])
    for fqn, held in tensors.items():
        kind, _, name = fqn.partition("/")
        if (name.rpartition("/")[0] if kind == "optimizer" else name) in others:
            tensors[fqn] = replace(held, parts=[])


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
    described: dict[str, Any] = {
        "sharding": _sharding(engine_of(model)),
        "parameters": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "ties": ties_of(model),
        "config": _huggingface_config(model),
        "optimizer": None,
    }
    if optimizer is not None:
        inner = getattr(optimizer, "inner", optimizer)
        scale = optimizer.loss_scale_state() if isinstance(optimizer, ShardedOptimizer) else None
        described["optimizer"] = {
            "class": type(inner).__name__,
            "groups": [
                {"names": group.names, "options": encode(group.options, others, f"groups[{number}]")}
                for number, group in enumerate(groups)
            ],
            "loss_scale": scale,
        }
    return described


def _sharding(engine: Engine | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    tensor = {"tensor": engine.comm.tensor.size} if engine.comm.tensor.size > 1 else {}
    return {"stage": engine.config.stage, "precision": engine.config.precision, **tensor}


def _huggingface_config(model: nn.Module) -> dict[str, Any] | None:
    """What a Hugging Face model says of itself, so that an export can be loaded by it."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    plain: dict[str, Any] = json.loads(to_json())
    plain.setdefault("architectures", [type(model).__name__])
    return plain
