"""Whole: a parameter or a gradient put together of what the ranks hold of it. All ranks call these together."""

from __future__ import annotations

import difflib

import torch

from zeroshard.comm.collectives import Communicator
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.parameter import get_autograd_grad
from zeroshard.engine.unit import Unit


def find_parameter(units: list[Unit], name: str) -> tuple[FlatParam, int]:
    """Find a parameter by its plain name."""
    for unit in units:
        for flat in unit.flats:
            if name in flat.names:
                return flat, flat.names.index(name)
    known = [name for unit in units for flat in unit.flats for name in flat.names]
    near = difflib.get_close_matches(name, known, n=1)
    raise KeyError(f"no parameter {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def assemble_full_tensor(comm: Communicator, flat_values: torch.Tensor, flat: FlatParam, index: int) -> torch.Tensor:
    """Make a whole tensor of one parameter's, of flattened parts that each rank filled where it owns them."""
    if comm.shard_axis.size > 1:
        comm.all_reduce(flat_values, comm.shard_axis, f"assemble {flat.names[index]!r}").wait()
    return gather_tp_shards(comm, flat_values.as_strided(flat.shapes[index], flat.strides[index]), flat, index)


def gather_tp_shards(comm: Communicator, tp_shard: torch.Tensor, flat: FlatParam, index: int) -> torch.Tensor:
    """Make a whole tensor of what each rank of the tensor axis has of it."""
    share = flat.tp_shards[index]
    if share is None:
        return tp_shard
    whole = torch.zeros(share.full_shape, dtype=tp_shard.dtype, device=tp_shard.device)
    share.write(tp_shard, share.rank, whole)
    comm.all_reduce(whole, comm.tensor_axis, f"assemble {flat.names[index]!r}").wait()
    return whole


def full_parameter(engine: Engine, name: str) -> torch.Tensor:
    """A copy of one whole parameter, the master's where there is one. All ranks call it together."""
    flat, index = find_parameter(engine.units, name)
    engine.state_guard.check_no_pending_edits()
    engine.order.begin_pass(f"to read the parameter {name!r}")
    engine.state_guard.wait_updates()
    engine.state_guard.check_valid("weights")
    if flat.master is None and not flat.is_partitioned:  # every rank has all of it
        if flat.tp_shards[index] is not None:
            engine.order.check(f"assemble {name!r}")
        return gather_tp_shards(engine.comm, flat.view(flat.full, index).clone(), flat, index)
    dtype = flat.dtype if flat.master is None else flat.master.dtype
    line = torch.zeros(flat.layout.numels[index], dtype=dtype, device=flat.device)
    for number, within, values in flat.owned_slices():
        if number == index:
            line[within.start : within.end] = values
    if engine.comm.shard_axis.size > 1 or flat.tp_shards[index] is not None:
        engine.order.check(f"assemble {name!r}")
    return assemble_full_tensor(engine.comm, line, flat, index)


def full_gradient(engine: Engine, name: str) -> torch.Tensor | None:
    """The whole reduced gradient of one parameter, or None where it has none. All ranks call it together."""
    engine.state_guard.check_states_reloaded()
    flat, index = find_parameter(engine.units, name)
    gradient = engine.gradients.flat_grads.get(flat)
    if gradient is None:  # frozen: what somebody has set is where it was set
        return get_autograd_grad(flat.parameters[index])
    engine.order.begin_pass(f"to read the gradient of {name!r}")
    engine.reduce_pending()
    used, what = (
        torch.tensor(float(gradient.is_param_used[index]), device=engine.comm.device),
        f"read the gradient of {name!r}",
    )
    engine.order.check(what)
    engine.comm.all_reduce_over_mesh(used, what)
    if not engine.comm.read_to_host(used, what)[0] or gradient.shard is None or not gradient.has_shard:
        return None
    whole = assemble_full_grad(engine.comm, engine.gradients, gradient, index)
    return whole if engine.state_guard.loss_scale is None else whole.float()


def assemble_full_grad(comm: Communicator, gradients: Gradients, gradient: FlatGrad, index: int) -> torch.Tensor:
    """The whole reduced gradient of one parameter, clipped, and without the loss scale it may carry."""
    flat = gradient.flat
    gradient.wait_copy()
    line = torch.zeros(flat.layout.numels[index], dtype=gradient.dtype, device=flat.device)
    for within, part in gradient.param_shards(index):
        line[within.slice] = part
    if gradients.inverse_scale is not None:
        line = line.float()
    for factor in (gradients.inverse_scale, gradients.clip_coef):
        if factor is not None:
            line *= factor
    return assemble_full_tensor(comm, line, flat, index)
