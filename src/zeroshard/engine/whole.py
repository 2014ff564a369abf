"""Whole: a parameter or a gradient put together of what the ranks hold of it. All ranks call these together."""

from __future__ import annotations

import difflib

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import FlatGradient
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.parameter import autograd_gradient
from zeroshard.engine.unit import Unit


def find(units: list[Unit], name: str) -> tuple[Flat, int]:
    """Find a parameter by its plain name."""
    for unit in units:
        for flat in unit.flats:
            if name in flat.names:
                return flat, flat.names.index(name)
    known = [name for unit in units for flat in unit.flats for name in flat.names]
    near = difflib.get_close_matches(name, known, n=1)
    raise KeyError(f"no parameter {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def assemble(comm: Communicator, line: torch.Tensor, flat: Flat, index: int) -> torch.Tensor:
    """Make a whole tensor of one parameter's, of flattened parts that each rank filled where it owns them."""
    if comm.shard.size > 1:
        comm.all_reduce(line, comm.shard, f"assemble {flat.names[index]!r}").wait()
    return undivided(comm, line.as_strided(flat.shapes[index], flat.strides[index]), flat, index)


def undivided(comm: Communicator, part: torch.Tensor, flat: Flat, index: int) -> torch.Tensor:
    """Make a whole tensor of what each rank of the tensor axis has of it."""
    share = flat.shares[index]
    if share is None:
        return part
    whole = torch.zeros(share.shape, dtype=part.dtype, device=part.device)
    share.put(part, share.rank, whole)
    comm.all_reduce(whole, comm.tensor, f"assemble {flat.names[index]!r}").wait()
    return whole


def full_parameter(engine: Engine, name: str) -> torch.Tensor:
    """A copy of one whole parameter, the master's where there is one. All ranks call it together."""
    flat, index = find(engine.units, name)
    engine.states.refuse_edited()
    engine.order.begin(f"to read the parameter {name!r}")
    engine.states.finish_updates()
    engine.states.refuse_spoilt("weights")
    if flat.master is None and not flat.partitioned:  # every rank has all of it
        if flat.shares[index] is not None:
            engine.order.check(f"assemble {name!r}")
        return undivided(engine.comm, flat.view(flat.full, index).clone(), flat, index)
    dtype = flat.dtype if flat.master is None else flat.master.dtype
    line = torch.zeros(flat.layout.numels[index], dtype=dtype, device=flat.device)
    for number, within, values in flat.held():
        if number == index:
            line[within.start : within.end] = values
    if engine.comm.shard.size > 1 or flat.shares[index] is not None:
        engine.order.check(f"assemble {name!r}")
    return assemble(engine.comm, line, flat, index)


def full_gradient(engine: Engine, name: str) -> torch.Tensor | None:
    """The whole reduced gradient of one parameter, or None where it has none. All ranks call it together."""
    engine.states.refuse_away()
    flat, index = find(engine.units, name)
    gradient = engine.gradients.of_flat.get(flat)
    if gradient is None:  # frozen: what somebody has set is where it was set
        return autograd_gradient(flat.parameters[index])
    engine.order.begin(f"to read the gradient of {name!r}")
    engine.reduce_rest()
    used, what = torch.tensor(float(gradient.used[index]), device=engine.comm.device), f"read the gradient of {name!r}"
    engine.order.check(what)
    engine.comm.all_reduce_everywhere(used, what)
    if not engine.comm.on_host(used, what)[0] or gradient.shard is None or not gradient.has_shard:
        return None
    whole = assembled_gradient(engine.comm, engine.gradients, gradient, index)
    return whole if engine.states.loss_scale is None else whole.float()


def assembled_gradient(comm: Communicator, gradients: Gradients, gradient: FlatGradient, index: int) -> torch.Tensor:
    """The whole reduced gradient of one parameter, clipped, and without the loss scale it may carry."""
    flat = gradient.flat
    gradient.settle()
    line = torch.zeros(flat.layout.numels[index], dtype=gradient.dtype, device=flat.device)
    for within, part in gradient.parts_of(index):
        line[within.slice] = part
    if gradients.inverse is not None:
        line = line.float()
    for factor in (gradients.inverse, gradients.coefficient):
        if factor is not None:
            line *= factor
    return assemble(comm, line, flat, index)
