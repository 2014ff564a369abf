"""Schedule: the module calls that backward visits: see [Note: when a unit is done in backward] in engine.py.

Units retained for a forward are released by the backward that visits this forward, and by no other: several forwards
may be waiting for their backward.
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
    """Return a context outside all torch.func transforms: an active one would wrap every tensor created in it."""
    is_inactive = torch._C._functorch.peek_interpreter_stack() is None
    return _NULL_CONTEXT if is_inactive else temporarily_clear_interpreter_stack()


_NULL_CONTEXT = nullcontext()


class ForwardRecord:
    """The module calls of one forward. The autograd graph owns it, through the hooks, and frees it with itself."""

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []  # in the order of their end
        self.calls_by_unit: dict[Unit, list[ModuleCall]] = {}
        self.retained_units: list[Unit] = []  # used by its backward, perhaps without a hook: see RetainedUnits


@dataclass(eq=False)
class ModuleCall:
    """One forward of a unit's module, or one use of a parameter outside its module.

    See [Note: when a unit is done in backward].
    """

    units: list[Unit]
    start_tick: int
    end_tick: int = -1
    has_pre_backward_hook: bool = False  # on its outputs
    # earlier uses without a hook: see [Note: parameters used outside their module]
    untracked_uses: list[ModuleCall] = field(default_factory=list)
    # uses that returned views to the module, by the unit that owns the storage
    view_uses: dict[Unit, ModuleCall] = field(default_factory=dict)
    last_backward_id: int = -1  # the last backward that visited it


class BackwardEndCallback:
    """Callback that autograd runs at the end of a backward, and drops without a call if the backward raises.

    In the second case the finalizer ends the backward. Without it, parameters would stay as autograd knows them: code
    that clears or reads gradients after the exception would miss those of earlier backwards.
    """

    def __init__(self, engine: Engine, backward_id: int) -> None:
        self._engine, self._backward_id = weakref.ref(engine), backward_id

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.finalize_backward()

    def __del__(self) -> None:
        """Notify the engine that autograd has dropped the backward, finished or not."""
        engine = self._engine()
        if engine is not None:
            try:
                engine.on_backward_dropped(self._backward_id)
            except RuntimeError as error:  # a finalizer cannot raise: the next forward raises it
                engine.deferred_error = error.with_traceback(None)


def has_pre_backward_hook(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a :class:`PreBackwardHook`."""
    return any(type(hook) is PreBackwardHook for hook in (tensor._backward_hooks or {}).values())


class PreBackwardHook:
    """Hook on a unit's output: it runs when backward reaches the output."""

    __slots__ = ("_call", "_engine", "_record")

    def __init__(self, engine: Engine, call: ModuleCall, record: ForwardRecord) -> None:
        self._engine, self._call, self._record = engine, call, record

    def __call__(self, gradient: torch.Tensor) -> None:
        self._engine.is_creating_graph = torch.is_grad_enabled()
        with outside_functorch():
            self._engine.pre_backward(self._call, self._record)


def prepend_hook(tensor: torch.Tensor, hook: PreBackwardHook) -> None:
    """Register a hook on a tensor before its other hooks: they may run a backward that needs the unit's parameters."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        *others, own = hooks.items()
        hooks.clear()
        hooks.update([own, *others])


class RetainedUnits:
    """The units that must stay unsharded, and the forwards whose backward needs them."""

    def __init__(self) -> None:
        self._units_by_record: dict[weakref.ref[ForwardRecord], list[Unit]] = {}  # weak: the graph owns a record
        self._returned_views: dict[weakref.ref[ForwardRecord], list[Unit]] = {}
        self._orphans: set[Unit] = set()  # of forwards whose hooks are freed, though perhaps not all their graphs

    def __contains__(self, unit: Unit) -> bool:
        """Return whether any forward retains the unit."""
        return unit in self._orphans or any(unit in units for units in self._units_by_record.values())

    def is_retained_for(self, record: ForwardRecord, unit: Unit) -> bool:
        """Return whether this forward retains the unit."""
        return unit in self._units_by_record.get(weakref.ref(record), ())

    def record_returned_views(self, record: ForwardRecord, units: Iterable[Unit]) -> None:
        """Record that a forward has returned parameters of these units, or tensors that share their storage."""
        self._returned_views[weakref.ref(record)] = list(units)

    def has_returned_views(self, unit: Unit) -> bool:
        """Return whether a forward has returned parameters of the unit and its backward has not run yet."""
        return any(unit in units for units in self._returned_views.values())

    def retain(self, record: ForwardRecord, units: Iterable[Unit]) -> None:
        """Add units to those retained for a forward."""
        record.retained_units += [unit for unit in dict.fromkeys(units) if unit not in record.retained_units]
        if record.retained_units:
            self._units_by_record[weakref.ref(record)] = record.retained_units

    def release(self, record: ForwardRecord) -> None:
        """Release all units retained for a forward."""
        self._units_by_record.pop(weakref.ref(record), None)
        self._returned_views.pop(weakref.ref(record), None)

    def restore(self, record: ForwardRecord) -> list[Unit]:
        """Retain again what an earlier backward of this forward released; return the units to unshard."""
        if not record.retained_units or weakref.ref(record) in self._units_by_record:
            return []
        self.retain(record, ())
        return record.retained_units

    def finish(self, records: Iterable[ForwardRecord], held_by_grad_graph: Iterable[Unit]) -> None:
        """End a backward through these forwards. ``held_by_grad_graph``: units used by the graph that it created."""
        held_by_grad_graph = list(held_by_grad_graph)
        self._orphans.clear()
        self._returned_views = {
            reference: units for reference, units in self._returned_views.items() if reference() is not None
        }
        for record in records:
            self.release(record)
            if held_by_grad_graph:  # the backward of that graph visits these forwards again
                self.retain(record, held_by_grad_graph)

    def adopt_orphans(self) -> None:
        """Merge the units of all forwards whose hooks are freed into one set: there may be many such forwards."""
        for reference in [reference for reference in self._units_by_record if reference() is None]:
            self._orphans.update(self._units_by_record.pop(reference))

    def clear(self) -> None:
        """Release all units."""
        self._units_by_record.clear()
        self._returned_views.clear()
        self._orphans.clear()
