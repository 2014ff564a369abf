"""Hooks: how module events reach the engine. The model's code and classes stay as they are.

The hooks are hidden from torch.compile: a compiled block is gathered before and released after its compiled code, which
sees plain parameters.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import torch._compile
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.engine.engine import Engine, in_backward
from zeroshard.engine.frames import outside_transforms
from zeroshard.engine.guards import Planted, Watch, guard, refuse_wrapped
from zeroshard.engine.kept import Keeper, keepers
from zeroshard.engine.parameter import card_of, is_absent
from zeroshard.engine.unit import Unit
from zeroshard.precision import cast_floats

P = ParamSpec("P")
T = TypeVar("T")


def _eager(hook: Callable[P, T]) -> Callable[P, T]:
    """Hide a hook from compilers. (torch's own decorator imports the compiler at the first call, not here.)"""
    hidden: Callable[P, T] = torch._compile._disable_dynamo(hook)
    return hidden


def tensors_in(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """Find the tensors in nested containers, dataclasses and plain objects.

    >>> [t.item() for t in tensors_in({"a": (torch.ones(()), None), "b": [torch.zeros(())]})]
    [1.0, 0.0]
    """
    found: list[torch.Tensor] = []
    _find(value, depth, found)
    return found


def _find(value: Any, depth: int, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth and value is not None and not isinstance(value, (int, float, str, bytes, type, nn.Module)):
        for item in _items(value):
            _find(item, depth - 1, found)


def _items(value: Any) -> Iterable[Any]:
    """What a container or an object holds."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return (vars(value),) if hasattr(value, "__dict__") else ()


def _is_running(module: nn.Module) -> bool:
    """Whether this call of a module is inside another one of the same: in its own forward, or in a hook of it."""
    frame: FrameType | None = sys._getframe()
    calls = 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


class _Before:
    """Runs before a hooked module's forward."""

    def __init__(
        self,
        engine: Engine,
        units: tuple[Unit, ...],
        name: str,
        watch: Watch | None,
        layer_casts: _LayerCasts | None,
        after: RemovableHandle,
    ) -> None:
        self._engine, self._units, self._name, self._watch = engine, units, name, watch
        self._outermost = watch is not None
        self._layer_casts = layer_casts
        self._after = after.id

    @_eager
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        if self._watch is not None:
            refuse_wrapped(module)
            self._watch.look(module)
            self._engine.about_to_run(given)
        with outside_transforms():
            outermost = self._outermost and not (self._engine.in_forward and _is_running(module))
            self._engine.enter((*self._units, *lenders(given, self._units)), self._name, outermost)
        hooks = module._forward_hooks
        if next(reversed(hooks), self._after) != self._after:  # hooks that came later use the parameters, too
            hooks.move_to_end(self._after)  # type: ignore[attr-defined]
        if self._layer_casts is not None and self._layer_casts.are_needed(given):
            casts, self._layer_casts = self._layer_casts, None
            return casts.install(module, args, kwargs)
        return None


def lenders(given: list[torch.Tensor], known: tuple[Unit, ...]) -> list[Unit]:
    """The units, beside the known ones, that a module is given views of: it reads their parameters' own memory."""
    found: list[Unit] = []
    for tensor in given:
        base = tensor._base if type(tensor) is torch.Tensor and tensor._is_view() else None
        card = card_of(base) if isinstance(base, nn.Parameter) else None
        unit = card.unit() if card is not None else None
        if unit is not None and unit.partitioned and unit not in known and unit not in found:
            found.append(unit)
    return found


class _After:
    """Runs after a hooked module's forward, also when it raised."""

    def __init__(self, engine: Engine, keepers: list[Keeper]) -> None:
        self._engine, self._keepers = engine, keepers

    @_eager
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if output is None and (error := sys.exc_info()[1]) is not None:
            with outside_transforms():
                self._engine.fail(error)
            return
        outputs, lent = [], False
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                outputs.append(tensor)
            base = tensor._base if tensor._is_view() else tensor
            lent = lent or (isinstance(base, nn.Parameter) and card_of(base) is not None)
            lent = lent or (tensor.grad_fn is None and self._engine.lends(tensor))  # detached: autograd knows no view
        hides = not outputs and any(tensor.requires_grad for tensor in tensors_in(args))
        graph = bool(outputs) and torch.is_grad_enabled() and not in_backward()
        kept = [tensor for keeper in self._keepers for tensor in keeper.kept()] if graph else []
        with outside_transforms():
            self._engine.leave(outputs, kept, lent, hides)


class _CastInputs:
    """Casts a module's floating-point inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)


class _CastLayerInputs(_CastInputs):
    """The same for a layer that mostly needs no cast."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dtype is self._dtype:
            return None
        return super().__call__(module, args, kwargs)


class _LayerCasts:
    """Casts of the inputs of torch's own layers in 16 bits, made when a module is first given other floats.

    Such a layer would raise. A module with code of its own gets what it is given: tables in fp32, say, stay exact.
    """

    def __init__(self, dtype: torch.dtype, handles: list[RemovableHandle | Planted]) -> None:
        self._dtype, self._handles = dtype, handles
        self._others = {torch.float16, torch.bfloat16, torch.float32, torch.float64} - {dtype}

    def are_needed(self, given: list[torch.Tensor]) -> bool:
        return any(tensor.dtype in self._others for tensor in given)

    def install(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook the layers of a module that is about to run; return its own inputs cast where it is such a layer."""
        layers = [layer for layer in module.modules() if self._is_strict(layer)]
        for layer in layers:
            cast = _CastLayerInputs(self._dtype)
            self._handles.append(layer.register_forward_pre_hook(cast, with_kwargs=True))
        return cast(module, args, kwargs) if module in layers else None  # hooked while its hooks run: not called yet

    def _is_strict(self, layer: nn.Module) -> bool:
        own = [parameter.dtype for parameter in layer.parameters(recurse=False)]
        of_torch = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, nn.RMSNorm)
        return of_torch and self._dtype in own


class _CastOutputs:
    """Casts a module's floating-point outputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return cast_floats(output, self._dtype)


class _Loading:
    """Runs before ``load_state_dict`` changes anything: refuses what would go wrong in the middle."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, module: nn.Module, state: object, prefix: str, metadata: dict[str, Any], *_: object) -> None:
        self._engine.states.refuse_away()
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace the parameters of {prefix.rstrip('.') or 'the model'} by "
                "others, which nobody would train: leave assign out, or load before zeroshard.shard()"
            )
        for parameter in module.parameters():
            card = card_of(parameter)
            unit = card.unit() if card is not None else None
            if card is not None and unit is not None and unit.partitioned and is_absent(parameter):
                raise RuntimeError(
                    f"load_state_dict() cannot write into {card.name!r}, whose values are not there: load inside `with "
                    "zeroshard.gathered(model, write_rank=0):`, or call zeroshard.load(path, model)"
                )


class _Loaded:
    """Runs after ``load_state_dict``: the loaded values go into shards and master copies too."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine, self._watch = engine, watch

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        self._watch.look(module)
        self._engine.states.absorb_resident()


def install(
    model: nn.Module,
    engine: Engine,
    homes: dict[str, tuple[Unit, ...]],
    fp32_modules: list[str],
    compute_dtype: torch.dtype | None,
    cast_inputs: bool,
) -> list[RemovableHandle | Planted]:
    """Hook the model and the modules that units belong to; return the handles that undo it."""
    handles: list[RemovableHandle | Planted] = list(guard(model))
    watch = Watch(model)
    for name in fp32_modules:  # the casts come before the unit's hook registered below, which is put first
        module = model.get_submodule(name)
        if compute_dtype is not None:
            handles.append(module.register_forward_pre_hook(_CastInputs(torch.float32), with_kwargs=True))
            handles.append(module.register_forward_hook(_CastOutputs(compute_dtype)))
    hooked = {model.get_submodule(name) for name in homes}
    casts = _LayerCasts(compute_dtype, handles) if cast_inputs and engine.config.has_master and compute_dtype else None
    for name, units in ({"": ()} | homes).items():
        module = model.get_submodule(name)
        for unit in units:
            unit.attend(name, module)
        of_model = module is model
        leave = _After(engine, keepers(module, hooked) if units else [])
        after = module.register_forward_hook(leave, always_call=True)
        enter = _Before(engine, units, name, watch if of_model else None, None if of_model else casts, after)
        handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        handles.append(after)
    if cast_inputs and compute_dtype is not None:
        handles.append(model.register_forward_pre_hook(_CastInputs(compute_dtype), with_kwargs=True))
    for module in model.modules():
        if module is model or next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_load_state_dict_pre_hook(_Loading(engine)))  # type: ignore[no-untyped-call]
    handles.append(model.register_load_state_dict_post_hook(_Loaded(engine, watch)))  # type: ignore[no-untyped-call]
    return handles
