"""Save a model and its optimizer; each rank writes its local shards."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.async_save import HostStaging, Save, Snapshot, pending_saves, wait_for_pending_save
from zeroshard.checkpoint.block_files import CheckpointWorkers
from zeroshard.checkpoint.extra_states import encode_extra_states
from zeroshard.checkpoint.flat_shards import LocalTensor
from zeroshard.checkpoint.group import CheckpointError, CheckpointGroup, absolute_path
from zeroshard.checkpoint.json_codec import encode, state_dict_of
from zeroshard.checkpoint.replicas import name_by_replica, replicas_field
from zeroshard.checkpoint.rng_state import get_rng_states
from zeroshard.checkpoint.train_state import (
    engine_of_model,
    get_train_state,
    persistent_buffers,
    tied_names,
)
from zeroshard.checkpoint.writer import RankPayload, write_checkpoint
from zeroshard.comm import MeshAxis
from zeroshard.engine import EMA, Engine, unwrap_compiled
from zeroshard.optim import ShardedOptimizer, as_list

_staging_buffers = HostStaging(), HostStaging()  # for tensors copied immediately, and for deferred copies


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    ema: EMA | None = None,
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
    extra states of modules, optimizer states, the fp16 loss scale and each rank's RNG states, in safetensors files and
    one JSON file. The JSON file is written last, so a save is atomic. The file ``latest`` next to the checkpoint then
    names it.

    If the model has several optimizers, pass them in a list, and pass the same list to :func:`load`.

    - ``ema``: an average of the parameters, saved with them.
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
        raise ValueError(f"keep is {keep!r}, expected a number of checkpoints of at least 1, or None to keep all")
    optimizers = as_list(optimizer)
    if not weights and not optimizers:
        raise ValueError("weights=False saves only optimizer states, but no optimizer was given: pass the optimizer")
    directory = absolute_path(path)
    model = unwrap_compiled(model)
    engine = engine_of_model(model)
    wait_for_pending_save()
    checkpoint_group = CheckpointGroup.open(engine, "save")
    workers = CheckpointWorkers(2)  # now: threads cannot be started during interpreter shutdown

    def prepare() -> tuple[RankPayload, Snapshot | None]:
        if engine is not None:
            _check_can_save(engine, not optimizers and ema is None)
            _check_no_unsaved_grads(engine, model)
        _warn_of_unsaved_grads(optimizers)
        payload = _PayloadBuilder(model, optimizers, checkpoint_group, ema).build(extra, rank_extra, weights, frozen)
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
                write_checkpoint(directory, payload, checkpoint_group, workers, before_write, keep)
        finally:
            if snapshot is not None:
                snapshot.release_waiters()

    try:
        payload, snapshot = checkpoint_group.run_on_all(f"{directory} cannot be saved: ", prepare)
    except BaseException:
        workers.close()
        raise
    if snapshot is None:
        write()
        return Save(directory, is_done=True)
    if engine is not None:
        engine.state_guard.pending_reads.append(snapshot.wait_for_copies)
    handle = Save(directory)
    pending_saves.append(handle)
    threading.Thread(target=handle.run, args=(write,), name=f"save {directory.name}").start()
    return handle


def _check_can_save(engine: Engine, is_weights_only: bool) -> None:
    if engine.state_guard.has_averages and not is_weights_only:
        raise CheckpointError(
            "the model has the averages of its parameters inside `with ema.swapped():`: leave the block to save the "
            "training states, or save the averages as weights, without the optimizer and the EMA"
        )
    for reason in engine.state_guard.invalid_states.values():
        raise CheckpointError(reason)
    if engine.is_running:
        raise CheckpointError("a forward or backward is in progress: save between steps")


def _check_no_unsaved_grads(engine: Engine, model: nn.Module) -> None:
    """Raise if the next step would use gradients of backwards so far: a checkpoint contains none.

    It would not if the model has no optimizer, or if its loop clears such gradients: the judge of a GAN has some of the
    maker's loss.
    """
    sharded: Any = vars(model)["_zeroshard"]
    is_cleared = engine.gradients.memory.discards_unstepped or not sharded.optimizers
    if engine.backward_count and engine.gradients.has_used_params and not is_cleared:
        raise CheckpointError(
            f"there are gradients of {engine.backward_count} backwards since the last step, and a checkpoint contains "
            "no gradients: save after optimizer.step(), or clear them with optimizer.zero_grad()"
        )


def _warn_of_unsaved_grads(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn if one of several optimizers has not been stepped with its gradients: a GAN clears them, others add more."""
    for number, optimizer in enumerate(optimizers if len(optimizers) > 1 else ()):
        if isinstance(optimizer, ShardedOptimizer) and optimizer.has_accumulated_grads():
            warnings.warn(
                f"optimizer {number} ({type(optimizer.inner).__name__}) has gradients of backwards since its last "
                "step, and a checkpoint contains none: if it accumulates them, save after its step",
                stacklevel=2,
            )


class _PayloadBuilder:
    """Collects the tensors and data that this rank writes."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        checkpoint_group: CheckpointGroup,
        ema: EMA | None,
    ) -> None:
        self._model, self._optimizers, self._ema = model, optimizers, ema
        self._engine = engine_of_model(model)
        self._train_state = get_train_state(model, optimizers)
        self._rank, self._group_size = checkpoint_group.rank, checkpoint_group.size
        self._replica_rank, self._replica_count = checkpoint_group.rank, checkpoint_group.size
        if self._engine is not None:  # the data-parallel ranks that hold the same shards
            self._replica_rank, self._replica_count = 0, 1
            for axis in self._engine.comm.replicate_axes:
                self._replica_rank = self._replica_rank * axis.size + axis.rank
                self._replica_count *= axis.size
        self._extra_tensors: dict[str, torch.Tensor] = {}  # tensors inside encoded data

    def build(self, extra: Mapping[str, Any] | None, rank_extra: Any, weights: bool, frozen: bool) -> RankPayload:
        """Return the payload; the options are those of :func:`save`."""
        tensors = self._model_and_optimizer_tensors(weights, frozen)
        axis = self._engine.comm.average_axis if self._engine is not None else MeshAxis(None, 1, 0)
        replicas, replica = axis.size, axis.rank
        if self._engine is not None:
            _assign_tp_writers(tensors, self._engine)
        self._assign_replica_writers(tensors)
        if weights and self._rank == replica * (self._group_size // replicas):
            # the first rank's buffers are saved, as in training
            for name, buffer in persistent_buffers(self._model):
                tensors[f"model/{name}"] = LocalTensor.from_full_tensor(name, buffer)
        # a rank with elements of a parameter has its scalar states. Their path contains the rank, because several ranks
        # have the same scalars and each writes its own tensors
        local_scalars = self._train_state.optimizer_scalars() if self._replica_rank == 0 else {}
        if self._engine is not None and replicas > 1:
            tensors = name_by_replica(tensors, self._engine)
            prefix = f"replica/{replica}/" if replica else ""
            local_scalars = {f"{prefix}{name}": value for name, value in local_scalars.items()}
        if self._replica_rank == replica == 0:
            outer_scalars = self._train_state.outer_scalars()
            local_scalars |= {f"outer_optimizer/{name}": value for name, value in outer_scalars.items()}
        path = f"optimizer.scalars.rank-{self._rank}"
        scalars = {name: self._encode(value, f"{path}.{name}") for name, value in local_scalars.items()}
        rank_data = {"rng_states": get_rng_states(), "rank_extra": state_dict_of(rank_extra)}
        encoded_rank_data = self._encode(rank_data, f"rank_data[{self._rank}]")
        if weights:  # on all ranks, whose modules may communicate to answer
            extra_state_tensors: dict[str, torch.Tensor] = {}
            extra_states = encode_extra_states(self._model, extra_state_tensors)
            if self._rank == 0 and extra_states:
                encoded_rank_data["extra_states"] = extra_states
                self._extra_tensors |= extra_state_tensors
        index_fields = self._index_fields(extra) if self._rank == 0 else {}
        for name, tensor in self._extra_tensors.items():
            tensors[f"other/{name}"] = LocalTensor.from_full_tensor(name, tensor.contiguous())
        return RankPayload(tensors, scalars, encoded_rank_data, index_fields)

    def _model_and_optimizer_tensors(self, weights: bool, frozen: bool) -> dict[str, LocalTensor]:
        tensors: dict[str, LocalTensor] = {}
        if weights:
            trained = {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
            parameters = self._train_state.parameters()
            tensors |= {f"model/{name}": local for name, local in parameters.items() if frozen or name in trained}
        if self._ema is not None:
            tensors |= {f"ema/{name}": local for name, local in self._train_state.averages(self._ema).items()}
        tensors |= {f"outer_optimizer/{name}": local for name, local in self._train_state.outer_states().items()}
        return tensors | {f"optimizer/{name}": local for name, local in self._train_state.optimizer_states().items()}

    def _assign_replica_writers(self, tensors: dict[str, LocalTensor]) -> None:
        """Keep only this replica's shards. All replicas compute the same assignment, balanced by bytes."""
        loads = [0] * self._replica_count
        for fqn, local in tensors.items():
            writer = loads.index(min(loads))
            loads[writer] += sum(tensor.nbytes for _, tensor in local.shards)
            if writer != self._replica_rank:
                tensors[fqn] = replace(local, shards=[])

    def _index_fields(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        sharding: dict[str, Any] | None = None
        if self._engine is not None:
            config = self._engine.context.config
            sharding = {
                "stage": config.stage,
                "precision": config.precision,
                "tensor_parallel_degree": self._engine.comm.tensor_axis.size,
                **replicas_field(self._engine),
            }
        return {
            "sharding": sharding,
            "requires_grad": {name: parameter.requires_grad for name, parameter in self._model.named_parameters()},
            "tied_names": tied_names(self._model),
            "huggingface_config": _huggingface_config(self._model),
            "optimizer": self._optimizer_fields(),
            "extra": self._encode(state_dict_of(dict(extra or {})), "extra"),
        }

    def _optimizer_fields(self) -> dict[str, Any] | None:
        if not self._optimizers:
            return None
        groups: list[dict[str, Any]] = [
            {
                "class": group.class_name,
                "param_names": group.names,
                "options": self._encode(group.options, f"optimizer.param_groups[{number}]"),
            }
            for number, group in enumerate(self._train_state.param_groups())
        ]
        first = self._optimizers[0]  # several share the loss scale
        loss_scale = first.loss_scale_state() if isinstance(first, ShardedOptimizer) else None
        return {
            "param_groups": groups,
            "loss_scale": loss_scale and dict(zip(("scale", "growth_tracker"), loss_scale, strict=True)),
        }

    def _encode(self, value: Any, path: str) -> Any:
        return encode(value, self._extra_tensors, path)


def _assign_tp_writers(tensors: dict[str, LocalTensor], engine: Engine) -> None:
    """Keep only the shards that this rank writes, for parameters that are replicated over the tensor axis.

    Such a parameter and its states are written by the data-parallel ranks of one tensor rank. If TP shards differ in
    size, layouts differ too, and two tensor ranks may own different ranges of the parameter. All ranks of the mesh
    compute the same assignment, balanced by bytes; frozen parameters have no states and are balanced separately.
    """
    axis = engine.comm.tensor_axis
    loads = {True: [0] * axis.size, False: [0] * axis.size}
    written_elsewhere: set[str] = set()  # parameters that another tensor rank writes
    state_writers: dict[str, int] = {}  # of divided parameters, if every tensor rank has their full states
    members = [(flat, index) for unit in engine.units for flat in unit.flats for index in range(len(flat.names))]
    members.sort(key=lambda member: member[0].tp_shards[member[1]] is None)  # tensor-parallel ones first
    for flat, index in members:
        load, tp_shard = loads[flat.spec.is_trainable], flat.tp_shards[index]
        if tp_shard is not None:
            state_writers[flat.names[index]] = len(state_writers) % axis.size
            for rank in range(axis.size):
                load[rank] += tp_shard.shape_on_rank(rank).numel() * flat.dtype.itemsize
            continue
        writer = load.index(min(load))
        load[writer] += flat.layout.numels[index] * flat.dtype.itemsize
        if writer != axis.rank:
            written_elsewhere.add(flat.names[index])
    for fqn, local in tensors.items():
        kind, _, name = fqn.partition("/")
        param_name = name.rpartition("/")[0] if kind in ("optimizer", "outer_optimizer") else name
        is_state_elsewhere = local.is_on_all_tp_ranks and state_writers[param_name] != axis.rank
        if param_name in written_elsewhere or is_state_elsewhere:
            tensors[fqn] = replace(local, shards=[])


def _huggingface_config(model: nn.Module) -> dict[str, Any] | None:
    """Return the config of a Hugging Face model, so that an export can be loaded; None for other models."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    config: dict[str, Any] = json.loads(to_json())
    config.setdefault("architectures", [type(model).__name__])
    return config
