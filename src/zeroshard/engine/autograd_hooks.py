"""Autograd hooks: how the engine learns that backward reaches a module call, ends, or is dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zeroshard.engine.schedule import ForwardRecord, ModuleCall
from zeroshard.engine.unit import Unit

_NULL_CONTEXT = nullcontext()


def is_in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def outside_functorch() -> AbstractContextManager[Any]:
    """Return a context outside all torch.func transforms: an active one would wrap every tensor created in it."""
    is_inactive = torch._C._functorch.peek_interpreter_stack() is None
    return _NULL_CONTEXT if is_inactive else temporarily_clear_interpreter_stack()


class PreBackwardHook:
    """Hook on a module call's output: it runs when backward reaches the output."""

    __slots__ = ("_call", "_pre_backward", "_record")

    def __init__(
        self,
        pre_backward: Callable[[ModuleCall[Unit], ForwardRecord[Unit]], None],
        call: ModuleCall[Unit],
        record: ForwardRecord[Unit],
    ) -> None:
        self._pre_backward, self._call, self._record = pre_backward, call, record

    def __call__(self, gradient: torch.Tensor) -> None:
        self._pre_backward(self._call, self._record)


def has_pre_backward_hook(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a :class:`PreBackwardHook`."""
    return any(type(hook) is PreBackwardHook for hook in (tensor._backward_hooks or {}).values())


def prepend_hook(tensor: torch.Tensor, hook: PreBackwardHook) -> None:
    """Register a hook on a tensor before its other hooks: they may run a backward that needs the unit's parameters."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        *others, own = hooks.items()
        hooks.clear()
        hooks.update([own, *others])


class BackwardOwner(Protocol):
    """The engine, as :class:`BackwardEndCallback` calls it."""

    def finalize_backward(self) -> None:
        """Autograd has run all nodes of the backward."""

    def on_backward_dropped(self, backward_id: int) -> None:
        """Autograd has dropped the backward, finished or not."""


class BackwardEndCallback:
    """Callback that autograd runs at the end of a backward, and drops without a call if the backward raises.

    In the second case the finalizer ends the backward. Without it, parameters would stay as autograd knows them: code
    that clears or reads gradients after the exception would miss those of earlier backwards.
    """

    def __init__(self, engine: BackwardOwner, backward_id: int) -> None:
        self._engine, self._backward_id = weakref.ref(engine), backward_id

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.finalize_backward()

    def __del__(self) -> None:
        """Tell the engine that autograd has dropped the backward, finished or not."""
        engine = self._engine()
        if engine is not None:
            engine.on_backward_dropped(self._backward_id)
