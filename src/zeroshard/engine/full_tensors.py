"""Read and write full parameters and gradients between steps. All ranks call these functions together."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.engine.engine import Engine, engine_of
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.param_data import get_autograd_grad
from zeroshard.engine.sharded_gradient import assemble_full_grad
from zeroshard.engine.unit import Unit, unit_of
from zeroshard.engine.unit_values import (
    assemble_full_tensor,
    check_param_data,
    drop_copy,
    gather_copy,
    gather_exact,
    gather_tp_shards,
    write_back,
)


def find_units(module: nn.Module) -> tuple[Engine, list[Unit]]:
    """Return the engine of a model or of one of its modules, and the units of the module's parameters."""
    units: dict[Unit, None] = {}
    engine = None
    for name, parameter in module.named_parameters():
        unit = unit_of(parameter)
        if unit is None:
            raise ValueError(
                f"{name!r} belongs to no sharded model: gathered() takes a sharded model or its modules, and a "
                "parameter must not be replaced after zeroshard.shard() (by load_state_dict(assign=True), setattr)"
            )
        engine = engine_of(parameter)
        units[unit] = None
    if engine is None:
        raise ValueError(f"this {type(module).__name__} has no sharded parameters")
    return engine, [unit for unit in engine.units if unit in units]


def find_parameter(units: list[Unit], name: str) -> tuple[FlatParam, int]:
    """Return the flat and the index of the parameter with this name; raise KeyError if there is none."""
    for unit in units:
        for flat in unit.flats:
            if name in flat.names:
                return flat, flat.names.index(name)
    known = [name for unit in units for flat in unit.flats for name in flat.names]
    close = difflib.get_close_matches(name, known, n=1)
    raise KeyError(f"no parameter {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))


def full_parameter(engine: Engine, name: str) -> torch.Tensor:
    """Return a copy of one full parameter, from the master if there is one. All ranks call it together."""
    flat, index = find_parameter(engine.units, name)
    what = f"read the parameter {name!r}"
    engine.state_guard.prepare_read(what, "weights")
    full = _assemble_parameter(engine, flat, index)
    engine.comm.check_results(what)
    return full


def _assemble_parameter(engine: Engine, flat: FlatParam, index: int) -> torch.Tensor:
    name = flat.names[index]
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
    engine.comm.check_results(what)
    return full.float() if engine.state_guard.has_loss_scale else full


@contextmanager
def gathered_copies(engine: Engine, units: list[Unit], write_rank: int | None) -> Iterator[None]:
    """Give the units' parameters full values in separate memory inside the block; see :func:`zeroshard.gathered`."""
    guard = engine.state_guard
    guard.check_states_reloaded()
    if write_rank is not None:
        guard.check_not_averaged("gathered(write_rank=…)")
    if write_rank is not None and engine.is_running:
        raise RuntimeError(
            "gathered(write_rank=…) inside a forward or backward would change parameters that it is computing with: "
            "write between steps"
        )
    if not engine.is_running:
        engine.order.begin_pass("gathered")
        guard.wait_updates()
    copied: list[Unit] = []
    written = False
    try:
        for unit in units:
            if unit.has_gathered_copy:  # an outer block has it
                continue
            if unit.is_partitioned:
                engine.order.check(unit.gather_copy_label)
            else:  # inside a forward its update may still be pending
                guard.gather_updated_unit(unit)
                unit.wait_for_unshard()
            gather_copy(unit, engine.comm)
            copied.append(unit)
        engine.comm.check_results("gather full parameters")
        yield
        if write_rank is not None:
            written = True  # some of it, if it raises
            written = _write_back_units(engine, units, write_rank)
    finally:
        for unit in copied:
            drop_copy(unit)
            if not unit.is_partitioned:
                edits = unit.replicated_edits
                edits.accept_values() if written else edits.record_versions()
        if written:
            engine.release_retained()


def _write_back_units(engine: Engine, units: list[Unit], src_rank: int) -> bool:
    """Write the parameters, as rank ``src_rank`` of the mesh has them, into all shards; return whether any changed."""
    for unit in units:
        check_param_data(unit)
    engine.state_guard.wait_readers()
    engine.state_guard.invalidate_speculation()
    engine.order.begin_pass("write")
    comm = engine.comm
    changed = torch.zeros(len(units), device=comm.device)
    written = units  # all of them, if it raises
    try:
        for index, unit in enumerate(units):
            engine.order.check(f"write unit {unit.name!r}")
            changed[index] = write_back(unit, comm, src_rank)
        what = "agree on what was written"
        engine.order.check(what)
        comm.all_reduce_over_mesh(changed, what)
        is_known = comm.mesh_size == 1 or comm.consistency.is_distributed
        flags = comm.read_to_host(changed, what) if is_known else [1.0] * len(units)
        written = [unit for unit, flag in zip(units, flags, strict=True) if flag]
    finally:
        for unit in written:  # no other: a graph may need the scales that its float8 weights had in forward
            unit.mark_values_changed()
    engine.state_guard.on_values_changed(parameter for unit in written for parameter in unit.parameters)
    return bool(written)


@torch.no_grad()
def full_state_dict(engine: Engine, model: nn.Module, rank: int | None, trainable_only: bool) -> dict[str, Any]:
    """Return the plain model's ``state_dict()`` in host memory; see :func:`zeroshard.state_dict`.

    The model makes it itself, with plain parameters in the place of its own, so that hooks, overridden methods, ties
    and extra states count.
    """
    is_receiver = rank is None or engine.comm.consistency.rank == rank
    what = f"read the state_dict() for {'all ranks' if rank is None else f'rank {rank}'}"
    what += " without frozen parameters" if trainable_only else ""
    engine.state_guard.prepare_read(what, "weights")
    if rank != 0 and engine.buffer_broadcaster is not None:
        engine.buffer_broadcaster.sync_buffers()  # those of rank 0 count, as in training
    plain: dict[int, nn.Parameter] = {}
    for unit in engine.units:
        for flat in unit.flats:
            is_read = flat.spec.is_trainable or not trainable_only
            is_split = engine.comm.shard_axis.size > 1 and (flat.master is not None or flat.is_partitioned)
            if is_read and (is_split or flat.has_dtensors):
                engine.order.check(f"{what}: unit {unit.name!r}")
            full = gather_exact(flat, engine.comm, unit.all_gather_label) if is_read else None
            for index, parameter in enumerate(flat.parameters):
                values = None if full is None else gather_tp_shards(engine.comm, flat.view(full, index), flat, index)
                if is_receiver:
                    plain[id(parameter)] = _plain_parameter(unit, flat, index, values)
    engine.comm.check_results(what)
    if not is_receiver:
        return {}
    with _replaced_parameters(model, plain):
        state: dict[str, Any] = model.state_dict()
    for name in [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        del state[name]
    own = {parameter.untyped_storage().data_ptr() for parameter in plain.values()}
    copies: dict[tuple[Any, ...], torch.Tensor] = {}  # one for each tensor: the same under all its names
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or not _is_in(value, own)):
            local = value.to_local() if isinstance(value, DTensor) else value
            key = (local.data_ptr(), local.dtype, local.shape, local.stride())
            copies[key] = state[name] = copies[key] if key in copies else local.detach().to("cpu", copy=True)
    return state


def _is_in(tensor: torch.Tensor, storages: set[int]) -> bool:
    return type(tensor) is not DTensor and tensor.untyped_storage().data_ptr() in storages


def _plain_parameter(unit: Unit, flat: FlatParam, index: int, values: torch.Tensor | None) -> nn.Parameter:
    """Return a parameter as it was before shard(), with these values, in host memory; without values on meta."""
    parameter, dtype = flat.parameters[index], flat.original_dtypes[index]
    with torch._C.DisableTorchFunctionSubclass():
        needs_grad = parameter.requires_grad
    if values is None:
        return nn.Parameter(torch.empty(flat.full_shapes[index], dtype=dtype, device="meta"), needs_grad)
    copy = torch.empty_strided(values.shape, values.stride(), dtype=dtype, device="cpu").copy_(values)
    if isinstance(parameter, DTensor):
        return nn.Parameter(copy, needs_grad)
    plain: nn.Parameter = torch.Tensor._make_subclass(unit.access.original_class(parameter), copy, needs_grad)
    plain.__dict__.update({key: value for key, value in vars(parameter).items() if key != "_zeroshard"})
    return plain


@contextmanager
def _replaced_parameters(model: nn.Module, replacements: dict[int, nn.Parameter]) -> Iterator[None]:
    """Put other parameters, by the id of the model's own, into the modules inside the block."""
    own = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if id(parameter) in replacements
    ]
    for parameters, key, parameter in own:
        parameters[key] = replacements[id(parameter)]
    try:
        yield
    finally:
        for parameters, key, parameter in own:
            parameters[key] = parameter
