"""Frames: where forward has been, for backward to come back to: see [Note: what is over in backward] in engine.py.

A forward's pins go with the backward that comes to it, and with no other one: several forwards may wait for theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zeroshard.engine.unit import Unit

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine


def outside_functorch() -> AbstractContextManager[Any]:
    """Leave torch.func's transforms for a while, where one is under way: it would wrap every tensor made meanwhile."""
    none = torch._C._functorch.peek_interpreter_stack() is None
    return _NULL_CONTEXT if none else temporarily_clear_interpreter_stack()


_NULL_CONTEXT = nullcontext()


class ForwardRecord:
    """The frames of one forward. The autograd graph owns it, through the hooks: it goes when the graph goes."""

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []  # in the order they were left
        self.calls_by_unit: dict[Unit, list[ModuleCall]] = {}
        self.retained_units: list[Unit] = []  # that its backward may use without a hook to tell: see pins.py


@dataclass(eq=False)
class ModuleCall:
    """One run of a unit's module in forward, or one loose use: see [Note: what is over in backward]."""

    units: list[Unit]
    start_tick: int
    end_tick: int = -1
    has_pre_backward_hook: bool = False  # whether a hook on its outputs tells when backward comes to it
    untracked_uses: list[ModuleCall] = field(
        default_factory=list
    )  # uses before it that no hook tells of: see [Note: loose uses]
    view_uses: dict[Unit, ModuleCall] = field(
        default_factory=dict
    )  # uses that gave the module views, by whose memory they are
    last_backward_id: int = -1  # the backward that has come to it


class BackwardEndCallback:
    """What autograd calls when a backward is over. One that is left by an exception is never told of: autograd only
    drops the callback, and with it this object. Until then parameters are as autograd knows them, and whoever clears or
    reads gradients after the exception would miss those of the backwards before."""

    def __init__(self, engine: Engine, backward_id: int) -> None:
        self._engine, self._backward_id = weakref.ref(engine), backward_id

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.finalize_backward()

    def __del__(self) -> None:
        """Say that autograd is done with it, however it ended."""
        engine = self._engine()
        if engine is not None:
            try:
                engine.on_backward_dropped(self._backward_id)
            except RuntimeError as error:  # a finalizer cannot raise: the next forward does
                engine.deferred_error = error.with_traceback(None)


def has_pre_backward_hook(tensor: torch.Tensor) -> bool:
    """Whether some hook tells when backward comes to a tensor."""
    return any(type(hook) is PreBackwardHook for hook in (tensor._backward_hooks or {}).values())


class PreBackwardHook:
    """The hook on a unit's output: it runs when backward comes there."""

    __slots__ = ("_call", "_engine", "_record")

    def __init__(self, engine: Engine, call: ModuleCall, record: ForwardRecord) -> None:
        self._engine, self._call, self._record = engine, call, record

    def __call__(self, gradient: torch.Tensor) -> None:
        self._engine.is_creating_graph = torch.is_grad_enabled()
        with outside_functorch():
            self._engine.pre_backward(self._call, self._record)


def prepend_hook(tensor: torch.Tensor, hook: PreBackwardHook) -> None:
    """Register a hook on a tensor, before those it has: they may run a backward that needs the unit's parameters."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        *others, own = hooks.items()
        hooks.clear()
        hooks.update([own, *others])


class RetainedUnits:
    """The units that are to stay, and for which forwards."""

    def __init__(self) -> None:
        self._units_by_record: dict[weakref.ref[ForwardRecord], list[Unit]] = {}  # weak: the graph owns a trace
        self._returned_views: dict[weakref.ref[ForwardRecord], list[Unit]] = {}
        self._orphans: set[Unit] = set()  # of forwards whose hooks are gone, though perhaps not all of their graphs

    def __contains__(self, unit: Unit) -> bool:
        """Whether some forward holds it."""
        return unit in self._orphans or any(unit in units for units in self._units_by_record.values())

    def is_retained_for(self, record: ForwardRecord, unit: Unit) -> bool:
        """Whether this forward holds it."""
        return unit in self._units_by_record.get(weakref.ref(record), ())

    def record_returned_views(self, record: ForwardRecord, units: Iterable[Unit]) -> None:
        """A forward has returned parameters of these units, or what has their memory."""
        self._returned_views[weakref.ref(record)] = list(units)

    def has_returned_views(self, unit: Unit) -> bool:
        """Whether a forward whose backward is still to come has given out its parameters."""
        return any(unit in units for units in self._returned_views.values())

    def retain(self, record: ForwardRecord, units: Iterable[Unit]) -> None:
        """Hold these units for a forward, too."""
        record.retained_units += [unit for unit in dict.fromkeys(units) if unit not in record.retained_units]
        if record.retained_units:
            self._units_by_record[weakref.ref(record)] = record.retained_units

    def release(self, record: ForwardRecord) -> None:
        """Nothing is held for this forward any more."""
        self._units_by_record.pop(weakref.ref(record), None)
        self._returned_views.pop(weakref.ref(record), None)

    def restore(self, record: ForwardRecord) -> list[Unit]:
        """A backward has come to a forward. Where an earlier one has had its pins: the units to be brought again."""
        if not record.retained_units or weakref.ref(record) in self._units_by_record:
            return []
        self.retain(record, ())
        return record.retained_units

    def finish(self, records: Iterable[ForwardRecord], held_by_grad_graph: Iterable[Unit]) -> None:
        """A backward through these forwards is over. ``kept``: used by the graph that it has made itself."""
        held_by_grad_graph = list(held_by_grad_graph)
        self._orphans.clear()
        self._returned_views = {
            reference: units for reference, units in self._returned_views.items() if reference() is not None
        }
        for trace in records:
            self.release(trace)
            if held_by_grad_graph:  # whose backward comes to these forwards again
                self.retain(trace, held_by_grad_graph)

    def adopt_orphans(self) -> None:
        """Make one of those that were held for forwards whose hooks are gone: there may be any number of them."""
        for reference in [reference for reference in self._units_by_record if reference() is None]:
            self._orphans.update(self._units_by_record.pop(reference))

    def clear(self) -> None:
        """Hold nothing."""
        self._units_by_record.clear()
        self._returned_views.clear()
        self._orphans.clear()
