"""Assemble full parameters and gradients from the shards of all ranks. All ranks call these together."""

from __future__ import annotations

import difflib

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.parameter import get_autograd_grad
from zeroshard.engine.unit import Unit


def find_parameter(units: list[Unit], name: str) -> tuple[FlatParam, int]:
    """Return the flat and the index of the parameter with this name; raise KeyError if there is none."""
    for unit in units:
        for flat in unit.flats:
            if name in flat.names:
                return flat, flat.names.index(name)
    known = [name for unit in units for flat in unit.flats for name in flat.names]
    close = difflib.get_close_matches(name, known, n=1)
    raise KeyError(f"no parameter {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))


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


def full_parameter(engine: Engine, name: str) -> torch.Tensor:
    """Return a copy of one full parameter, from the master if there is one. All ranks call it together."""
    flat, index = find_parameter(engine.units, name)
    engine.state_guard.check_no_pending_edits()
    engine.order.begin_pass(f"to read the parameter {name!r}")
    engine.state_guard.wait_updates()
    engine.state_guard.check_valid("weights")
    if flat.master is None and not flat.is_partitioned:  # every rank has the full values
        if flat.tp_shards[index] is not None:
            engine.order.check(f"assemble {name!r}")
        return gather_tp_shards(engine.comm, flat.view(flat.full, index).clone(), flat, index)
    dtype = flat.dtype if flat.master is None else flat.master.dtype
    flat_values = torch.zeros(flat.layout.numels[index], dtype=dtype, device=flat.device)
    for param_index, elements, values in flat.owned_slices():
        if param_index == index:
            flat_values[elements.start : elements.end] = values
    if engine.comm.shard_axis.size > 1 or flat.tp_shards[index] is not None:
        engine.order.check(f"assemble {name!r}")
    return assemble_full_tensor(engine.comm, flat_values, flat, index)


def full_gradient(engine: Engine, name: str) -> torch.Tensor | None:
    """Return the full reduced gradient of one parameter, or None. All ranks call it together."""
    engine.state_guard.check_states_reloaded()
    flat, index = find_parameter(engine.units, name)
    gradient = engine.gradients.flat_grads.get(flat)
    if gradient is None:  # frozen: only the user can have set a gradient
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
    full = assemble_full_grad(engine.comm, engine.gradients, gradient, index)
    return full if engine.state_guard.loss_scale is None else full.float()


def assemble_full_grad(comm: Communicator, gradients: Gradients, gradient: FlatGrad, index: int) -> torch.Tensor:
    """Return the full reduced gradient of one parameter, clipped, and without a loss scale."""
    flat = gradient.flat
    gradient.wait_copy()
    flat_values = torch.zeros(flat.layout.numels[index], dtype=gradient.dtype, device=flat.device)
    for elements, values in gradient.param_shards(index):
        flat_values[elements.slice] = values
    if gradients.inverse_scale is not None:
        flat_values = flat_values.float()
    for factor in (gradients.inverse_scale, gradients.clip_coef):
        if factor is not None:
            flat_values *= factor
    return assemble_full_tensor(comm, flat_values, flat, index)
