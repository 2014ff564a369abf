"""Named values of a sharded model: whole parameters, gradients and state dicts. All ranks call these together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.core.axis import broadcast
from zeroshard.core.engine import Engine
from zeroshard.core.flat import Flat
from zeroshard.core.order import Kind


@contextmanager
def gathered(engine: Engine, module: nn.Module, write_rank: int | None) -> Iterator[None]:
    """Have all parameters of a module whole: see :func:`zeroshard.gathered`."""
    ranks = math.prod(axis.size for axis in engine.axes)
    if write_rank is not None and write_rank not in range(ranks):
        raise ValueError(f"write_rank is one of {ranks} ranks, got {write_rank}")
    engine.observers.on_masters_used(engine)
    engine.order.record(Kind.VALUES)
    places = {engine.place[id(parameter)][0] for parameter in module.parameters()}
    units = [unit for unit in engine.units if not places.isdisjoint(unit.flats)]
    flats = [flat for unit in units for flat in unit.flats]
    with engine.using(units), _counted(engine), saved_tensors_hooks(_with_version, _check_memory):
        before = [
            (flat, flat.full.clone())
            for unit in units
            for flat in unit.flats
            if write_rank is None or not flat.is_sharded or unit.users > 1  # others keep it in memory
        ]
        try:
            try:
                yield
            finally:
                _take_over_data(flats)
            if write_rank is not None:
                _write_back(engine, flats, write_rank)
                before.clear()
        finally:
            with torch.no_grad():
                for flat, values in before:
                    _replace(flat, values)
                for unit in units:
                    unit.leave_used_memory()
            for unit in units:
                engine.observers.on_unsharded(unit)  # what has changed is known
    engine.observers.on_masters_used(engine)  # of other units
    engine.observers.on_values_changed(engine)


@contextmanager
def _counted(engine: Engine) -> Iterator[None]:
    engine.gathered_count += 1
    try:
        yield
    finally:
        engine.gathered_count -= 1


def _with_version(saved: torch.Tensor) -> tuple[torch.Tensor, int]:
    return saved, saved._version


def _check_memory(found: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Raise if a backward needs what was freed after gathered(), or changed: autograd does not look, for hooks."""
    saved, version = found
    if saved.numel() and not saved.untyped_storage().nbytes():
        raise RuntimeError(
            "a backward needs parameters that were used inside gathered(), which has freed them: run the backward "
            "inside it, too, or use them in the model's forward"
        )
    if saved._version != version:
        raise RuntimeError("a backward needs a tensor that was modified by an inplace operation, inside gathered()")
    return saved


@torch.no_grad()
def _take_over_data(flats: list[Flat]) -> None:
    """Copy what the block has assigned to ``parameter.data`` to where parameters are."""
    pairs = [pair for flat in flats for pair in zip(flat.parameters, flat.views, strict=True)]
    moved = [(parameter, view) for parameter, view in pairs if not parameter.is_set_to(view)]
    values = [parameter.detach().clone() for parameter, _ in moved]
    for parameter, view in moved:
        parameter.data = view
    for (_, view), new in zip(moved, values, strict=True):
        if new.shape != view.shape or new.dtype != view.dtype:
            raise RuntimeError(
                f"gathered() cannot keep data of another kind, {new.dtype} of shape {tuple(new.shape)}: change the "
                "model's dtype and shapes before zeroshard.shard()"
            )
        view.copy_(new)


@torch.no_grad()
def _write_back(engine: Engine, flats: list[Flat], write_rank: int) -> None:
    """Keep the values of one rank."""
    if any(flat.layout.axes is not engine.axes for flat in flats):
        raise NotImplementedError("gathered(write_rank=…) does not know yet which rank of another mesh that is")
    engine.order.record(Kind.VALUES)  # a rank whose block has raised does not
    for flat in flats:
        values = flat.full.clone()
        broadcast(values, engine.axes, write_rank)
        _replace(flat, values)
        flat.adopt(flat.full)


def _replace(flat: Flat, values: torch.Tensor) -> None:
    """Write full values. If they are new, a graph of the old ones is stale."""
    if not torch.equal(flat.full.view(torch.uint8), values.view(torch.uint8)):
        flat.full.copy_(values)
        torch.autograd.graph.increment_version(flat.parameters)


def _begin_read(engine: Engine) -> None:
    if engine.gathered_count:
        raise RuntimeError("inside gathered(model) the parameters are whole, and may be edited: read them directly")
    engine.observers.on_masters_used(engine)
    engine.order.record(Kind.VALUES)


@torch.no_grad()
def full_parameter(engine: Engine, name: str) -> torch.Tensor:
    """Return one parameter whole, in the precision of its master."""
    parameter = engine.model.get_parameter(name)
    _begin_read(engine)
    flat, index = engine.place[id(parameter)]
    return flat.gather_one(flat.master[flat.part(flat.state_span, index)], index)


@torch.no_grad()
def full_gradient(engine: Engine, name: str) -> torch.Tensor | None:
    """Return one gradient whole; None if there is none on any rank."""
    engine.finish_gradients()
    gradient = engine.model.get_parameter(name).grad
    return None if gradient is None else gradient.clone()


@torch.no_grad()
def state_dict(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the whole model in host memory."""
    _begin_read(engine)
    places = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        places[name] = engine.place[id(parameter)]
    found: dict[str, torch.Tensor] = {}
    wholes = {}
    for flat in engine.flats:
        whole = flat.gather(flat.master, flat.state_placements)
        for index in range(len(flat.parameters)):
            wholes[flat, index] = flat.shaped(whole, index).cpu().clone()
    for name in keys_of(engine.model):
        if name in places:
            found[name] = wholes[places[name]]
        else:
            found[name] = engine.model.get_buffer(name).detach().cpu().clone()
    return found


@torch.no_grad()
def make_plain(engine: Engine) -> None:
    """Make parameters plain: whole, in memory of their own and their first dtype, without gradients and hooks."""
    engine.abort_backward()
    _begin_read(engine)
    for unit in engine.units:
        for parameter, kind in zip(unit.parameters, unit.classes, strict=True):
            parameter.__class__ = kind
            parameter.grad = None
            del parameter._zeroshard_core, parameter.share_memory_  # type: ignore[attr-defined]
        for flat in unit.flats:
            whole = flat.gather(flat.master, flat.state_placements)
            for index, parameter in enumerate(flat.parameters):
                parameter.data = flat.shaped(whole, index).to(flat.original_dtypes[index], copy=True)
    for hook in engine.hooks:
        hook.remove()
    engine.context.checker.close()


def keys_of(model: nn.Module) -> list[str]:
    """Return the names of the parameters and persistent buffers of a model, in the order of its state dict."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        names = [name for name, value in module._parameters.items() if value is not None]
        names += [
            name
            for name, value in module._buffers.items()
            if value is not None and name not in module._non_persistent_buffers_set
        ]
        found += [f"{prefix}.{name}" if prefix else name for name in names]
    return found
