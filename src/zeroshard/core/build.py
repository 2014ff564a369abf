"""Build: the units of a model, filled one at a time, and its engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.axis import Axis
from zeroshard.core.context import Context
from zeroshard.core.defragment import Defragmenter
from zeroshard.core.engine import Engine
from zeroshard.core.flat import Flat, FlatSpec
from zeroshard.core.placement import rows_of
from zeroshard.core.transfers import TransferQueue
from zeroshard.core.unit import Unit, allocate_together
from zeroshard.sharding.precision import Precision
from zeroshard.sharding.units import UnitSpec, find_cast_blocks, plan_units
from zeroshard.utils.tree import cast_floats, tensors_in

AxesOf = Callable[[str], tuple[Axis, ...]]  # the axes of a parameter, by its name


class Builder:
    """Makes the engine of one model."""

    def __init__(self, model: nn.Module, context: Context, axes_of: AxesOf) -> None:
        self._model = model
        self._context = context
        self._config = context.config
        self._axes_of = axes_of
        self._precision = Precision(model, context.config)
        self._parameters = dict(model.named_parameters())

    def build(self) -> Engine:
        """Shard the model. Memory never exceeds what is kept and one full unit."""
        specs = plan_units(self._model, self._config.units, self._config.bucket_size)
        gathers = TransferQueue(self._context.device)
        units = []
        units_of: dict[nn.Module, list[Unit]] = {self._model: []}
        flats_of = [self._flats_of(spec) for spec in specs]
        self._context.pool.reserve(size for flats in flats_of for flat in flats for size in flat.kept_sizes)
        for spec, flats in zip(specs, flats_of, strict=True):
            self._initialize(spec)
            self._allocate(flats)
            unit = Unit(spec.name, flats, gathers)
            if unit.is_sharded:
                unit.reshard()
            units.append(unit)
            for name in spec.modules:
                units_of.setdefault(self._model.get_submodule(name), []).append(unit)
        self._move_buffers()
        engine = Engine(self._model, units, units_of, self._context)
        self._install_casts(engine.hooks, units_of.keys())
        if self._context.device.type == "cuda" and self._config.defragment:
            torch.cuda.empty_cache()  # of what building needed
            defragmenter = Defragmenter(engine)
            engine.observers.add(defragmenter)
            hook = self._model.register_forward_pre_hook(defragmenter.pre_forward, prepend=True, with_kwargs=True)
            engine.hooks.append(hook)
        return engine

    def _flats_of(self, spec: UnitSpec) -> list[Flat]:
        """Group the parameters of a unit into flats."""
        groups: dict[Any, dict[str, nn.Parameter]] = {}
        for name in spec.parameters:
            parameter = self._parameters[name]
            compute_dtype = self._precision.compute_dtype(name, parameter)
            is_large = 3 * parameter.numel() >= self._config.bucket_size  # its gradient is reduced as it is
            key = (compute_dtype, parameter.requires_grad, self._axes_of(name), name if is_large else "")
            groups.setdefault(key, {})[name] = parameter
        divisor = math.prod(axis.size for axis in self._context.axes)
        flats = []
        for (compute_dtype, _, axes, _), named in groups.items():
            rows = rows_of(self._config.stage, self._config.partition, len(axes))
            has_master = self._precision.has_master(compute_dtype)
            master_dtype = torch.float32 if has_master else compute_dtype
            flats.append(Flat(named, FlatSpec(axes, rows, compute_dtype, master_dtype, divisor)))
        return flats

    def _allocate(self, flats: list[Flat]) -> None:
        pool = self._context.pool
        sharded = [flat for flat in flats if flat.is_sharded]
        kept = [flat for flat in flats if not flat.is_sharded]
        with pool:
            fulls = allocate_together(kept, self._context.device)
        fulls += allocate_together(sharded, self._context.device)
        for flat, full in zip(kept + sharded, fulls, strict=True):
            flat.allocate(full, pool)

    def _initialize(self, spec: UnitSpec) -> None:
        """Give values to the modules of a unit that were built on the meta device."""
        inside = set(spec.parameters)
        absent = {key for key in inside if self._parameters[key].is_meta}
        for key in absent:
            meta = self._parameters[key]
            real = nn.Parameter(torch.empty_like(meta, device=self._context.device), meta.requires_grad)
            torch.utils.swap_tensors(meta, real)  # type: ignore[no-untyped-call]  # the optimizer knows this object
        for name, module in self._model.named_modules() if absent else ():
            own = {key for key, _ in module.named_parameters(name, recurse=False)}
            if own.isdisjoint(absent):
                continue
            if not own <= inside:
                raise ValueError(
                    f"{name!r} shares {sorted(own - inside)} with another unit, so it cannot be initialised alone from "
                    "the meta device: build the model on a real device"
                )
            self._reset(name, module)

    def _reset(self, name: str, module: nn.Module) -> None:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=self._context.device)
        initialize = self._config.init_fn or getattr(type(module), "reset_parameters", None)
        if initialize is None:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters(): pass "
                "shard(init_fn=…), which is called on each such module"
            )
        initialize(module)

    def _move_buffers(self) -> None:
        for prefix, module in self._model.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                self._reset(prefix, module)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._context.device:
                    module._buffers[name] = buffer.to(self._context.device)

    def _install_casts(self, hooks: list[RemovableHandle], hooked: Collection[nn.Module]) -> None:
        """Cast the inputs of the model, of its blocks, and of modules that stay in fp32, which return 16 bits."""
        dtype = self._config.compute_dtype
        if dtype is None:
            return
        for name in self._precision.fp32_modules:
            module = self._model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(partial(_cast, torch.float32), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(_cast_outputs, dtype)))
        if self._config.cast_inputs:
            blocks = {self._model, *find_cast_blocks(self._model, self._config)}
            watched = blocks.union(hooked) - {self._model}
            hook = partial(_cast_others, dtype, blocks, watched, hooks)
            for module in (self._model, *watched):
                hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _cast_others(
    dtype: torch.dtype,
    casting: set[nn.Module],
    watched: set[nn.Module],
    hooks: list[RemovableHandle],
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> Any:
    """Cast the inputs of a module in ``casting``, if they have another dtype.

    A ``watched`` module that is given others may pass them on: from then on, torch's own layers in it cast theirs.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dtype is dtype:
        return None  # soon, in the usual case
    if all(tensor.dtype is dtype or not tensor.is_floating_point() for tensor in tensors_in((args, kwargs))):
        return None
    if module in watched:
        watched.remove(module)
        for layer in module.modules():
            has_dtype = any(parameter.dtype is dtype for parameter in layer.parameters(recurse=False))
            if has_dtype and type(layer).__module__.startswith("torch.nn.") and layer not in casting:
                casting.add(layer)
                hook = partial(_cast_others, dtype, casting, watched, hooks)
                hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    return _cast(dtype, module, args, kwargs) if module in casting else None


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


def axes_by_prefix(axes: tuple[Axis, ...], others: Mapping[str, tuple[Axis, ...]]) -> AxesOf:
    """Return what tells the axes of a parameter: those of the first prefix that its name has, else ``axes``."""

    def axes_of(name: str) -> tuple[Axis, ...]:
        return next((found for prefix, found in others.items() if name.startswith(prefix)), axes)

    return axes_of
