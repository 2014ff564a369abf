"""The payload of one rank: its tensors and data for a checkpoint."""

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
from zeroshard.engine import Engine
from zeroshard.optim import ShardedOptimizer


@dataclass
class RankPayload:
    """The tensors and data that one rank adds to a checkpoint."""

    tensors: dict[str, LocalTensor]
    optimizer_scalars: dict[str, Any]  # encoded
    rank_data: Any  # encoded
    index_fields: dict[str, Any]  # on the first rank


def collect_payload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    rank_extra: Any,
    weights: bool,
    frozen: bool,
    checkpoint_group: CheckpointGroup,
) -> RankPayload:
    """Collect this rank's payload: see :func:`zeroshard.save`."""
    train_state = get_train_state(model, optimizer)
    tensors: dict[str, LocalTensor] = {}
    extra_tensors: dict[str, torch.Tensor] = {}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if weights:
        parameters = train_state.parameters()
        tensors |= {f"model/{name}": local for name, local in parameters.items() if frozen or name in trained}
    tensors |= {f"optimizer/{name}": local for name, local in train_state.optimizer_states().items()}
    engine = engine_of(model)
    replica_rank, replica_count = _replica_rank_and_count(engine, checkpoint_group)
    if engine is not None:
        _assign_tp_writers(tensors, engine)
    _assign_replica_writers(tensors, replica_rank, replica_count)
    if weights and checkpoint_group.rank == 0:  # the first rank's buffers are saved, as in training
        tensors |= {
            f"model/{name}": LocalTensor.from_full_tensor(name, buffer) for name, buffer in persistent_buffers(model)
        }
    # a rank with elements of a parameter has its scalar states
    local_scalars = train_state.optimizer_scalars() if replica_rank == 0 else {}
    # a path per rank: several ranks have the same scalars, and each writes its own tensors
    scalars_path = f"rank-{checkpoint_group.rank}.counters"
    scalars = {name: encode(value, extra_tensors, f"{scalars_path}.{name}") for name, value in local_scalars.items()}
    rank_data = {"random": get_rng_states(), "extra": state_dict_of(rank_extra)}
    encoded_rank_data = encode(rank_data, extra_tensors, f"rank-{checkpoint_group.rank}")
    index_fields = (
        _make_index_fields(model, optimizer, train_state.param_groups(), extra_tensors)
        if checkpoint_group.rank == 0
        else {}
    )
    index_fields["extra"] = (
        encode(state_dict_of(dict(extra or {})), extra_tensors) if checkpoint_group.rank == 0 else None
    )
    tensors |= {
        f"other/{name}": LocalTensor.from_full_tensor(name, tensor.contiguous())
        for name, tensor in extra_tensors.items()
    }
    return RankPayload(tensors, scalars, encoded_rank_data, index_fields)


def _replica_rank_and_count(engine: Engine | None, checkpoint_group: CheckpointGroup) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks that hold the same shards, and their number."""
    if engine is None:
        return checkpoint_group.rank, checkpoint_group.size
    rank, count = 0, 1
    for axis in engine.comm.replicate_axes:
        rank, count = rank * axis.size + axis.rank, count * axis.size
    return rank, count


def _assign_tp_writers(tensors: dict[str, LocalTensor], engine: Engine) -> None:
    """Keep only the shards that this rank writes, for parameters that are replicated over the tensor axis.

    Such a parameter and its states are written by the data-parallel ranks of one tensor rank. If TP shards differ in
    size, layouts differ too, and two tensor ranks may own different ranges of the parameter. All ranks of the mesh
    compute the same assignment, balanced by bytes; frozen parameters have no states and are balanced separately.
    """
    axis = engine.comm.tensor_axis
    loads = {True: [0] * axis.size, False: [0] * axis.size}
    written_elsewhere: set[str] = set()  # parameters that another tensor rank writes
    members = [(flat, index) for unit in engine.units for flat in unit.flats for index in range(len(flat.names))]
    for flat, index in sorted(
        members, key=lambda member: member[0].tp_shards[member[1]] is None
    ):  # tensor-parallel ones first
        load, tp_shard = loads[flat.is_trainable], flat.tp_shards[index]
        if tp_shard is not None:
            for rank in range(axis.size):
                load[rank] += tp_shard.shape_on_rank(rank).numel() * flat.dtype.itemsize
            continue
        writer = load.index(min(load))
        load[writer] += flat.layout.numels[index] * flat.dtype.itemsize
        if writer != axis.rank:
            written_elsewhere.add(flat.names[index])
    for fqn, local in tensors.items():
        kind, _, name = fqn.partition("/")
        if (name.rpartition("/")[0] if kind == "optimizer" else name) in written_elsewhere:
            tensors[fqn] = replace(local, shards=[])


def _assign_replica_writers(tensors: dict[str, LocalTensor], replica_rank: int, replica_count: int) -> None:
    """Keep only the shards that this replica writes. All replicas compute the same assignment, balanced by bytes."""
    loads = [0] * replica_count
    for fqn, local in tensors.items():
        writer = loads.index(min(loads))
        loads[writer] += sum(tensor.nbytes for _, tensor in local.shards)
        if writer != replica_rank:
            tensors[fqn] = replace(local, shards=[])


def _make_index_fields(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, groups: list[Any], extra_tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    index_fields: dict[str, Any] = {
        "sharding": _sharding_fields(engine_of(model)),
        "parameters": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "ties": tied_names(model),
        "config": _huggingface_config(model),
        "optimizer": None,
    }
    if optimizer is not None:
        inner = getattr(optimizer, "inner", optimizer)
        loss_scale = optimizer.loss_scale_state() if isinstance(optimizer, ShardedOptimizer) else None
        index_fields["optimizer"] = {
            "class": type(inner).__name__,
            "groups": [
                {"names": group.names, "options": encode(group.options, extra_tensors, f"groups[{number}]")}
                for number, group in enumerate(groups)
            ],
            "loss_scale": loss_scale,
        }
    return index_fields


def _sharding_fields(engine: Engine | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    tensor_field = {"tensor": engine.comm.tensor_axis.size} if engine.comm.tensor_axis.size > 1 else {}
    return {"stage": engine.config.stage, "precision": engine.config.precision, **tensor_field}


def _huggingface_config(model: nn.Module) -> dict[str, Any] | None:
    """Return the config of a Hugging Face model, so that an export can be loaded; None for other models."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    config: dict[str, Any] = json.loads(to_json())
    config.setdefault("architectures", [type(model).__name__])
    return config
