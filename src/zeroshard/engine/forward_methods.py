"""Methods other than ``forward`` that run as a forward: see :func:`zeroshard.register_forward_method`.

A registered method is replaced by a :class:`ForwardMethod` in the instance's dictionary. It runs zeroshard's own hooks
of the module around the method, those that a call of the module would run: parameters are unsharded, inputs cast,
outputs hooked for backward. The user's hooks on the module belong to its forward and do not run.

[Note: generate()]
``generate()`` of Hugging Face models calls the model once per token, until its own sequences have ended. Where
parameters are partitioned, every call needs all ranks, so those whose sequences end early have to go on.
transformers does so (its option ``synced_gpus``) for a model with the attribute ``_is_fsdp_managed_module``.
"""

from __future__ import annotations

import difflib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from zeroshard.engine.engine import Engine, engine_of
from zeroshard.engine.hooks import ModuleHooks
from zeroshard.engine.parameter import param_info
from zeroshard.engine.unit import Unit, unit_of
from zeroshard.engine.unsupported_calls import AttributeOverride

_NAMES = "_zeroshard_forward_methods"  # attribute of a module: the registered names, for this and the next shard()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method of a module run as a forward, now if the module is sharded, and after each later ``shard()``."""
    _check_method(module, name)
    vars(module)[_NAMES] = vars(module).get(_NAMES, frozenset()) | {name}
    if any(engine_of(parameter) is not None for parameter in module.parameters()):
        _install(module, name)


def install_forward_methods(model: nn.Module) -> ForwardMethodsHandle:
    """Install the methods that were registered before ``shard()``; return the handle that removes all of them."""
    for module in model.modules():
        for name in sorted(vars(module).get(_NAMES, ())):
            _install(module, name)
    return ForwardMethodsHandle(model)


class ForwardMethodsHandle:
    """Removes the registered methods of a model, also those that were registered after ``shard()``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def remove(self) -> None:
        """Make all registered methods plain again."""
        model = self._model()
        for module in model.modules() if model is not None else ():
            for name, value in list(vars(module).items()):
                if isinstance(value, ForwardMethod):
                    value.remove(module, name)


def mark_generating_modules(model: nn.Module, engine: Engine) -> list[AttributeOverride]:
    """Let transformers' ``generate()`` keep the ranks in step: see [Note: generate()]. Return the overrides.

    Not if the model's ranks are only a part of the process group, all of which transformers would ask.
    """
    comm = engine.comm
    is_split = comm.shard_axis.size > 1 and any(unit.is_partitioned for unit in engine.units)
    if not is_split or comm.mesh_size != dist.get_world_size():
        return []
    generating = [module for module in model.modules() if callable(getattr(type(module), "generate", None))]
    return [AttributeOverride(module, "_is_fsdp_managed_module", True) for module in generating]


class ForwardMethod:
    """A method that runs as a forward of its module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        method = getattr(module, name)
        is_own = getattr(method, "__self__", None) is module
        self._module = weakref.ref(module)
        self._function: Callable[..., Any] = method.__func__ if is_own else method  # without a cycle to the module
        self._is_own, self._previous = is_own, vars(module).get(name)
        self.__name__, self.__doc__, self.__signature__ = name, inspect.getdoc(method), inspect.signature(method)
        # of a module that has no hooks: all its parameters are in modules inside it, or in a unit around it
        self._hooks = None if _find_hooks(module) is not None else _make_hooks(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise RuntimeError(f"the module of {self.__name__!r} is gone")
        hooks = self._hooks or _find_hooks(module)
        if hooks is None:  # the caller has kept the method, and unwrap() has removed the hooks
            return self.bound_to(module)(*args, **kwargs)
        return hooks.run_method(module, self.bound_to(module), args, kwargs)

    def bound_to(self, module: nn.Module) -> Callable[..., Any]:
        """Return the method as it was, of ``module``."""
        return types.MethodType(self._function, module) if self._is_own else self._function

    def remove(self, module: nn.Module, name: str) -> None:
        """Make the method plain again."""
        if self._previous is None:
            del vars(module)[name]
        else:
            vars(module)[name] = self._previous


def _check_method(module: nn.Module, name: str) -> None:
    """Raise unless the module has such a method, and it may run as a forward."""
    if not isinstance(name, str):
        raise TypeError(f"the method is given by its name, a string, got {type(name).__name__}")
    kind = type(module).__name__
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        close = difflib.get_close_matches(
            name, [key for key in dir(type(module)) if callable(getattr(module, key, None))]
        )
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{kind} has no method {name!r}{hint}")
    if name == "forward" or hasattr(nn.Module, name):
        what = "runs as a forward already" if name == "forward" else "is a method of nn.Module, not one that trains"
        raise ValueError(f"{name!r} {what}: register the methods that your training loop calls instead of the model")
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ValueError(
            f"{kind}.{name} is a generator or a coroutine, whose code runs when the call has ended and the parameters "
            "are sharded again: register a method that returns its result"
        )


def _install(module: nn.Module, name: str) -> None:
    if not isinstance(vars(module).get(name), ForwardMethod):
        _check_method(module, name)
        vars(module)[name] = ForwardMethod(module, name)


def _find_hooks(module: nn.Module) -> ModuleHooks | None:
    """Return the hooks of a module that has units, or of the model."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, ModuleHooks)), None)


def _make_hooks(module: nn.Module) -> ModuleHooks | None:
    """Return hooks for a module that has none; None if it has no sharded parameters."""
    engine: Engine | None = None
    units: dict[Unit, None] = {}
    name = type(module).__name__
    for key, parameter in module.named_parameters():
        engine, info = engine or engine_of(parameter), param_info(parameter)
        if info is not None and info.name.endswith(f".{key}"):
            name = info.name.removesuffix(f".{key}")
    for inner in _modules_without_hooks(module):
        units |= {
            unit: None for parameter in inner.parameters(recurse=False) if (unit := unit_of(parameter)) is not None
        }
    return None if engine is None else ModuleHooks(engine, name, tuple(units), None, None)


def _modules_without_hooks(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if _find_hooks(child) is None:
            yield from _modules_without_hooks(child)
