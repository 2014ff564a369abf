"""Full values between steps: copy a unit for ``gathered()``, write it back, make it plain, assemble one tensor.

All ranks call these functions together.
"""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.comm import CollectiveOrder, Communicator
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.param_data import data_ptrs, local_data, param_versions, set_data_and_dtype
from zeroshard.engine.parameter import GatheredBlock
from zeroshard.engine.unit import Unit, UnitState
from zeroshard.sharding import Range
from zeroshard.tensor_parallel import TensorParallelState


@torch.no_grad()
def gather_copy(unit: Unit, comm: Communicator) -> None:
    """Point the parameters at full values in new memory, which stays valid as long as a reference to it exists.

    They point there until :func:`drop_copy`.
    """
    if unit.is_partitioned and unit.state is not UnitState.SHARDED:
        error = unit.access.find_edit(keep_record=True)
        if error is not None:
            raise error
    copies = []
    for flat in unit.flats:
        if not unit.is_partitioned:
            copies.append(flat.full.clone())
            continue
        full = torch.empty(flat.layout.numel, dtype=flat.dtype, device=flat.device)
        flat.wait_for_update()
        for index, bucket in enumerate(flat.layout.buckets):
            _all_gather_bucket(comm, full[bucket.slice], flat.local_shard(index), unit.gather_copy_label)
        copies.append(full)
    block = GatheredBlock()
    unit.enter_block(block, copies)
    block.snapshot = _edit_snapshot(unit)


def drop_copy(unit: Unit) -> None:
    """Drop the copy of :func:`gather_copy`: the parameters are again what the unit's state says."""
    if unit.gathered_block is None:
        return
    unit.gathered_block.is_open = False
    edited = edited_params(unit)
    if edited:  # the block's values are gone: no backward may use a graph made with them
        torch.autograd.graph.increment_version(edited)
        unit.accept_edits()
    unit.leave_block()


def edited_params(unit: Unit) -> list[nn.Parameter]:
    """Return the parameters that were changed in place, or got other ``data``, since :func:`gather_copy`."""
    if unit.gathered_block is None:
        return []
    return [
        parameter
        for flat, old_snapshot, new_snapshot in zip(
            unit.flats, unit.gathered_block.snapshot, _edit_snapshot(unit), strict=True
        )
        if old_snapshot != new_snapshot
        for index, parameter in enumerate(flat.parameters)
        if any(old[index] != new[index] for old, new in zip(old_snapshot, new_snapshot, strict=True))
    ]


def _edit_snapshot(unit: Unit) -> list[tuple[list[int], list[int]]]:
    """Return the version counters and addresses of each flat's parameters."""
    return [(param_versions(flat.parameters), data_ptrs(flat.parameters, flat.has_dtensors)) for flat in unit.flats]


def check_param_data(unit: Unit) -> None:
    """Raise if a parameter's shape, dtype or device is not the one it was sharded with."""
    for flat in unit.flats:
        for index, (name, parameter) in enumerate(flat.named_parameters):
            values = local_data(parameter)
            expected, got = (
                f"{tuple(shape)} {dtype} on {device}"
                for shape, dtype, device in (
                    (flat.shapes[index], flat.dtype, flat.device),
                    (values.shape, values.dtype, values.device),
                )
            )
            if expected != got:
                raise RuntimeError(
                    f"{name!r} was sharded as {expected} and is {got} now: nothing was written. Change shape, "
                    "dtype or device before zeroshard.shard(), or after zeroshard.unwrap()"
                )


@torch.no_grad()
def write_back(unit: Unit, comm: Communicator, src_rank: int | None) -> torch.Tensor:
    """Write the parameters' current full values back to shards and master weights.

    With ``src_rank``, those of this rank of the mesh; the caller then marks the units that have changed on any rank.
    Returns whether any value in this rank's shard changed.
    """
    changed: list[torch.Tensor] = []
    what = f"write unit {unit.name!r}"
    check_param_data(unit)
    for flat in unit.flats:
        if flat.prefetcher is not None:
            flat.prefetcher.discard()
        for index, bucket in enumerate(flat.layout.buckets):
            values = torch.zeros(bucket.numel, dtype=flat.dtype, device=flat.device)
            for part in flat.layout.params_in_bucket(bucket):
                flattened = flat.flatten(local_data(flat.parameters[part.param_index]), part.param_index)
                values[part.offset : part.offset + part.elements.numel] = flattened[part.elements.slice]
            if src_rank is not None:
                comm.broadcast(values, src_rank, what)
                _broadcast_tp_replicated(flat, bucket, values, comm, what)
            changed.append(_write_bucket(flat, index, values, comm, None if src_rank is None else what))
    unit.accept_edits()
    if src_rank is None:
        unit.mark_values_changed()
    return torch.stack(changed).any() if changed else torch.tensor(False, device="cpu")


def _broadcast_tp_replicated(
    flat: FlatParam, bucket: Range, values: torch.Tensor, comm: Communicator, what: str
) -> None:
    """Broadcast what is replicated over the tensor axis: the first rank's values count."""
    for part in flat.layout.params_in_bucket(bucket) if comm.tensor_axis.size > 1 else ():
        if flat.tp_shards[part.param_index] is None:
            param_values = values[part.offset : part.offset + part.elements.numel]
            comm.broadcast_over_axis(comm.tensor_axis, param_values, what)


def _write_bucket(
    flat: FlatParam, index: int, values: torch.Tensor, comm: Communicator, broadcast: str | None
) -> torch.Tensor:
    """Write new values of a bucket; return whether any value in this rank's shard changed.

    ``broadcast``: for what to make the master weights of replicas equal, which the user's edits may have changed.
    """
    bucket = flat.layout.buckets[index]
    new = values[flat.layout.bucket_shard(bucket, comm.shard_axis.rank).shift(-bucket.start).slice]
    changed = (flat.local_shard(index).to(flat.device) != new).any()
    if flat.master is not None:  # first: on the device it may be the shard itself
        master = flat.master.read(flat.shard_ranges[index], flat.device)
        # unchanged elements keep their exact master value
        updated = torch.where(master.to(flat.dtype) == new, master, new.to(master.dtype))
        if broadcast is not None:
            for axis in comm.replicate_axes:
                comm.broadcast_over_axis(axis, updated, broadcast)
        flat.master.write(flat.shard_ranges[index], updated)
    if not flat.is_partitioned:
        flat.bucket_views[index].copy_(values)
    elif not flat.spec.is_cast_from_master:
        flat.local_shards[index].copy_(new)
    return changed


@torch.no_grad()
def make_plain(
    units: list[Unit], comm: Communicator, order: CollectiveOrder, tp_state: TensorParallelState | None
) -> None:
    """Make all parameters of a model plain, and the user's own again where they were split over the tensor axis."""
    for unit in units:
        order.check(unit.all_gather_label)
        _make_unit_plain(unit, comm)
    if tp_state is None:
        return
    for flat in (flat for unit in units for flat in unit.flats):
        for index, (name, parameter) in enumerate(flat.named_parameters):
            if name in tp_state.original_params:
                full = gather_tp_shards(comm, local_data(parameter), flat, index)
                tp_state.original_params[name].data = full
    tp_state.restore()


def _make_unit_plain(unit: Unit, comm: Communicator) -> None:
    """Make the parameters plain: separate memory, original dtype, the master weights' values if there are any."""
    unit.wait_for_unshard()
    unit.release_params()
    for flat in unit.flats:
        full = gather_exact(flat, comm, unit.all_gather_label)
        for index, parameter in enumerate(flat.parameters):
            view = flat.view(full, index)
            plain = torch.empty_strided(
                view.shape, view.stride(), dtype=flat.original_dtypes[index], device=view.device
            )
            set_data_and_dtype(parameter, plain.copy_(view), flat.tp_params[index])


def gather_exact(flat: FlatParam, comm: Communicator, what: str) -> torch.Tensor:
    """Return all values of a flat, of its master weights if it has any. All ranks call it together."""
    if flat.master is None and not flat.is_partitioned:  # every rank has them
        return flat.full
    dtype = flat.dtype if flat.master is None else flat.master.dtype
    full = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
    for i, (bucket, shard_range) in enumerate(zip(flat.layout.buckets, flat.shard_ranges, strict=True)):
        shard = flat.local_shards[i] if flat.master is None else flat.master.read(shard_range, flat.device)
        _all_gather_bucket(comm, full[bucket.slice], shard, what)
    return full


def _all_gather_bucket(comm: Communicator, output: torch.Tensor, shard: torch.Tensor, what: str) -> None:
    """All-gather a bucket from shards in any tier, and wait for it."""
    shard = shard.to(output.device)
    if comm.shard_axis.size > 1:
        comm.all_gather(output, shard, what).wait()
    else:
        output.copy_(shard)


def assemble_full_tensor(comm: Communicator, flat_values: torch.Tensor, flat: FlatParam, index: int) -> torch.Tensor:
    """Return a parameter-shaped full tensor, by summing flattened tensors that are zero outside each rank's shard."""
    if comm.shard_axis.size > 1:
        comm.all_reduce(flat_values, comm.shard_axis, f"assemble {flat.names[index]!r}").wait()
    return gather_tp_shards(comm, flat_values.as_strided(flat.shapes[index], flat.strides[index]), flat, index)


def gather_tp_shards(comm: Communicator, tp_shard: torch.Tensor, flat: FlatParam, index: int) -> torch.Tensor:
    """Return a full tensor from the TP shards of all ranks of the tensor axis."""
    spec = flat.tp_shards[index]
    if spec is None:
        return tp_shard
    full = torch.zeros(spec.full_shape, dtype=tp_shard.dtype, device=tp_shard.device)
    spec.write(tp_shard, spec.rank, full)
    comm.all_reduce(full, comm.tensor_axis, f"assemble {flat.names[index]!r}").wait()
    return full
