"""Contribution: what one rank brings to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.group import CheckpointGroup
from zeroshard.checkpoint.json_codec import encode, state_dict_of
from zeroshard.checkpoint.rng_state import get_rng_states
from zeroshard.checkpoint.train_state import LocalTensor, engine_of, get_train_state, persistent_buffers, tied_names
from zeroshard.engine.engine import Engine
from zeroshard.optim.sharded_optimizer import ShardedOptimizer


@dataclass
class RankPayload:
    """What one rank brings to a checkpoint."""

    tensors: dict[str, LocalTensor]
    optimizer_scalars: dict[str, Any]  # encoded
    rank_data: Any  # encoded
    index_fields: dict[str, Any]  # what the first rank says in the index


def collect_payload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    rank_extra: Any,
    weights: bool,
    frozen: bool,
    checkpoint_group: CheckpointGroup,
) -> RankPayload:
    """Collect it: see :func:`zeroshard.save`."""
    states = get_train_state(model, optimizer)
    tensors: dict[str, LocalTensor] = {}
    others: dict[str, torch.Tensor] = {}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if weights:
        found = states.parameters()
        tensors |= {f"model/{name}": held for name, held in found.items() if frozen or name in trained}
    tensors |= {f"optimizer/{name}": held for name, held in states.optimizer_states().items()}
    engine = engine_of(model)
    number, replicas = _replica_rank_and_count(engine, checkpoint_group)
    if engine is not None:
        _assign_tp_writers(tensors, engine)
    _assign_replica_writers(tensors, number, replicas)
    if weights and checkpoint_group.rank == 0:  # its buffers count, as they do in training
        tensors |= {
            f"model/{name}": LocalTensor.from_full_tensor(name, buffer) for name, buffer in persistent_buffers(model)
        }
    mine = (
        states.optimizer_scalars() if number == 0 else {}
    )  # a rank that has some values of a parameter has its counters
    at = f"rank-{checkpoint_group.rank}.counters"  # several ranks have the same, and each writes tensors of its own
    counters = {name: encode(value, others, f"{at}.{name}") for name, value in mine.items()}
    own = {"random": get_rng_states(), "extra": state_dict_of(rank_extra)}
    encoded = encode(own, others, f"rank-{checkpoint_group.rank}")
    index = _make_index_fields(model, optimizer, states.param_groups(), others) if checkpoint_group.rank == 0 else {}
    index["extra"] = encode(state_dict_of(dict(extra or {})), others) if checkpoint_group.rank == 0 else None
    tensors |= {
        f"other/{name}": LocalTensor.from_full_tensor(name, tensor.contiguous()) for name, tensor in others.items()
    }
    return RankPayload(tensors, counters, encoded, index)


def _replica_rank_and_count(engine: Engine | None, checkpoint_group: CheckpointGroup) -> tuple[int, int]:
    """How many data-parallel ranks hold just what this one holds, and which of them it is."""
    if engine is None:
        return checkpoint_group.rank, checkpoint_group.size
    number, replicas = 0, 1
    for axis in engine.comm.replicate_axes:
        number, replicas = number * axis.size + axis.rank, replicas * axis.size
    return number, replicas


def _assign_tp_writers(tensors: dict[str, LocalTensor], engine: Engine) -> None:
    """Leave to this rank what it writes of the parameters that all ranks of the tensor axis have.

    Such a parameter is written by the data-parallel ranks of one tensor rank, with its states: where shares differ in
    length, layouts differ too, and what this rank's shard has of the parameter another tensor rank's may not have. All
    ranks of the mesh come to the same division, by bytes; frozen parameters, which have no states, by themselves.
    """
    axis = engine.comm.tensor_axis
    loads = {True: [0] * axis.size, False: [0] * axis.size}
    others: set[str] = set()  # parameters that another tensor rank writes
    members = [(flat, index) for unit in engine.units for flat in unit.flats for index in range(len(flat.names))]
    for flat, index in sorted(members, key=lambda member: member[0].tp_shards[member[1]] is None):  # divided ones first
        load, share = loads[flat.is_trainable], flat.tp_shards[index]
        if share is not None:
            for rank in range(axis.size):
                load[rank] += share.shape_on_rank(rank).numel() * flat.dtype.itemsize
            continue
        writer = load.index(min(load))
        load[writer] += flat.layout.numels[index] * flat.dtype.itemsize
        if writer != axis.rank:
            others.add(flat.names[index])
    for fqn, held in tensors.items():
        kind, _, name = fqn.partition("/")
        if (name.rpartition("/")[0] if kind == "optimizer" else name) in others:
            tensors[fqn] = replace(held, shards=[])


def _assign_replica_writers(tensors: dict[str, LocalTensor], replica_rank: int, replica_count: int) -> None:
    """Leave to this rank what it writes of what several hold. All of them come to the same division, by bytes."""
    loads = [0] * replica_count
    for fqn, held in tensors.items():
        writer = loads.index(min(loads))
        loads[writer] += sum(tensor.nbytes for _, tensor in held.shards)
        if writer != replica_rank:
            tensors[fqn] = replace(held, shards=[])


def _make_index_fields(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, groups: list[Any], extra_tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "sharding": _sharding_fields(engine_of(model)),
        "parameters": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "ties": tied_names(model),
        "config": _huggingface_config(model),
        "optimizer": None,
    }
    if optimizer is not None:
        inner = getattr(optimizer, "inner", optimizer)
        scale = optimizer.loss_scale_state() if isinstance(optimizer, ShardedOptimizer) else None
        described["optimizer"] = {
            "class": type(inner).__name__,
            "groups": [
                {"names": group.names, "options": encode(group.options, extra_tensors, f"groups[{number}]")}
                for number, group in enumerate(groups)
            ],
            "loss_scale": scale,
        }
    return described


def _sharding_fields(engine: Engine | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    tensor = {"tensor": engine.comm.tensor_axis.size} if engine.comm.tensor_axis.size > 1 else {}
    return {"stage": engine.config.stage, "precision": engine.config.precision, **tensor}


def _huggingface_config(model: nn.Module) -> dict[str, Any] | None:
    """What a Hugging Face model says of itself, so that an export can be loaded by it."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    plain: dict[str, Any] = json.loads(to_json())
    plain.setdefault("architectures", [type(model).__name__])
    return plain
