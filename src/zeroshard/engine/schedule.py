"""Schedule: which units a forward and its backward need, and until when. It decides; an executor performs.

:class:`ForwardSchedule` follows the module calls of a forward and records them, :class:`BackwardSchedule` visits the
records, and :class:`UnitHolds` knows why a unit must stay unsharded. They have no tensors. The engine's executor
(engine.py) all-gathers, reshards and reduces; the planner's writes down what it is asked to do.

[Note: when a unit is done in backward]
A unit's gradients can be reduced, and its parameters resharded, when backward has run all nodes that use them. Hooks on
parameters do not show this: a parameter may be unused, or used several times. The order of autograd does: it runs the
nodes of a graph in the reverse of their creation order. (A node that is not ready waits for a consumer of its output,
and that consumer was created later; so among the later nodes one is always ready, and it has priority.)
The schedule counts ticks: each start and each end of a module call in forward gets a number (``ModuleCall``). When the
gradient of a module's output arrives, every node created after the end of that call has run. So a unit whose module
calls all started after that tick is done. Unused parameters, auxiliary losses, shared modules and branches are not
special cases.

[Note: all ranks visit all module calls]
A loss may depend on a module on one rank and not on another. All ranks must take part in every all-gather, so on every
rank a backward visits every module call of its forward, in reverse order: when a gradient arrives, the calls in between
that received none are visited first.

[Note: backward inside backward]
A tensor hook, or a function's backward, may call ``torch.autograd.grad`` on a graph of the same forward, as implicit
layers (DEQ) do. Such a nested backward visits module calls in its own order, so it does not show which units are done:
it unshards the units that it visits, and they stay unsharded until they are done in the outer backward. The engine's
hook on a tensor runs before all other hooks, so that the tensor's unit is unsharded if another hook starts a backward.

[Note: recomputation]
Activation checkpointing runs a module's forward again inside backward. Recomputation records no module call and
reshards nothing: it only makes sure that the unit is unsharded. A reentrant checkpoint hides the unit's output from the
first forward; there the recomputation itself is the sign that backward has reached the unit.

[Note: holds]
Full parameters may still be used when their module has returned: by another call of it, by an operation outside it, by
a backward. So a unit is resharded only when nothing holds it. Within a pass it is held by running module calls, by
running operations that use it outside its module, and by the graph that a backward creates (:class:`Hold`). Between
passes it is *retained* by forwards whose backward may use it without a hook (:meth:`UnitHolds.retain`). An unsharded
unit that is neither held nor retained for this forward is guarded: its next use belongs to another module call, and the
guard makes it known.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

UnitT = TypeVar("UnitT", bound=Hashable)


class UnitExecutor(Protocol[UnitT]):
    """Performs what a :class:`Schedule` decides."""

    @property
    def unsharded(self) -> Collection[UnitT]:
        """Partitioned units that are unsharded, or being unsharded."""

    @property
    def unsharded_this_pass(self) -> set[UnitT]:
        """Units that this forward or backward has unsharded and not resharded since."""

    def unshard(self, unit: UnitT, module: str | None = None) -> None:
        """Make the parameters of a unit usable, by one module or by all."""

    def reshard(self, unit: UnitT) -> None:
        """Free the full parameters of a unit."""

    def guard(self, unit: UnitT) -> None:
        """Intercept the next use of an unsharded unit."""

    def on_grads_ready(self, unit: UnitT) -> None:
        """Take the gradients of a unit, which are complete."""

    def is_trainable(self, unit: UnitT) -> bool:
        """Return whether any parameter of the unit requires a gradient."""


class Hold(enum.Enum):
    """Why a unit must not be resharded in this pass: see [Note: holds]."""

    CALL = enum.auto()  # a running module call uses it, or has received a view of its storage
    OPERATION = enum.auto()  # a running operation uses it outside its module
    NEW_GRAPH = enum.auto()  # the graph that this backward creates uses it (create_graph=True)


@dataclass(eq=False)
class ModuleCall(Generic[UnitT]):
    """One forward of a unit's module, or one use of a parameter outside its module.

    See [Note: when a unit is done in backward].
    """

    units: list[UnitT]
    start_tick: int
    end_tick: int = -1
    has_pre_backward_hook: bool = False  # on its outputs
    # earlier uses without a hook: see [Note: parameters used outside their module]
    untracked_uses: list[ModuleCall[UnitT]] = field(default_factory=list)
    # uses that returned views to the module, by the unit that owns the storage
    view_uses: dict[UnitT, ModuleCall[UnitT]] = field(default_factory=dict)
    last_backward_id: int = -1  # the last backward that visited it
    name: str = ""  # of the module
    label: AbstractContextManager[Any] | None = None  # entered while the module runs: what profilers show


class ForwardRecord(Generic[UnitT]):
    """The module calls of one forward. The autograd graph owns it, through the hooks, and frees it with itself."""

    def __init__(self) -> None:
        self.calls: list[ModuleCall[UnitT]] = []  # in the order of their end
        self.calls_by_unit: dict[UnitT, list[ModuleCall[UnitT]]] = {}
        self.retained_units: list[UnitT] = []  # used by its backward, perhaps without a hook: see [Note: holds]

    def add(self, call: ModuleCall[UnitT]) -> None:
        """Add a call that has ended."""
        self.calls.append(call)
        for unit in call.units:
            self.calls_by_unit.setdefault(unit, []).append(call)


@dataclass(eq=False)
class PassRecords(Generic[UnitT]):
    """The records of one model's forwards."""

    current: ForwardRecord[UnitT] = field(default_factory=ForwardRecord)  # of the running forward
    visited: list[ForwardRecord[UnitT]] = field(default_factory=list)  # by the running backward
    # of forwards that a backward may visit
    waiting: weakref.WeakSet[ForwardRecord[UnitT]] = field(default_factory=weakref.WeakSet)


class UnitHolds(Generic[UnitT]):
    """What keeps units unsharded: see [Note: holds]. It reshards and guards those that nothing holds.

    Only the backward that visits a forward releases the units retained for it: several forwards may wait for their
    backward.
    """

    def __init__(self, executor: UnitExecutor[UnitT], records: PassRecords[UnitT]) -> None:
        self.reasons: dict[UnitT, list[Hold]] = {}  # of units held in this pass
        self._executor, self._records = executor, records
        # weak: the graph owns a record
        self._retained: dict[weakref.ref[ForwardRecord[UnitT]], list[UnitT]] = {}
        self._returned_views: dict[weakref.ref[ForwardRecord[UnitT]], list[UnitT]] = {}
        self._orphans: set[UnitT] = set()  # of forwards whose hooks are freed, though perhaps not all their graphs

    # -- in a pass ----------------------------------------------------------------------------------------------

    def hold(self, unit: UnitT, reason: Hold) -> None:
        """Keep a unit unsharded until :meth:`drop`. One reason may hold a unit several times."""
        self.reasons.setdefault(unit, []).append(reason)

    def drop(self, unit: UnitT, reason: Hold) -> None:
        """Release one hold."""
        reasons = self.reasons[unit]
        reasons.remove(reason)
        if not reasons:
            del self.reasons[unit]

    def has_hold(self, unit: UnitT, reason: Hold) -> bool:
        """Return whether a unit is held for this reason."""
        return reason in self.reasons.get(unit, ())

    def reshard_idle(self, except_unit: UnitT | None = None) -> None:
        """Reshard the units that are neither held nor retained."""
        for unit in tuple(self._executor.unsharded):
            if unit not in self.reasons and unit is not except_unit:
                self.reshard_unless_retained(unit)

    def reshard_unless_retained(self, unit: UnitT) -> None:
        """Reshard a unit that is not held, unless it is retained.

        A unit retained for another pass stays in memory. But this rank may be the only one that retains it: the forward
        failed on the others, or they have dropped its graph. So its next use all-gathers it again, as on those ranks.
        """
        if not self.is_retained(unit):
            self._executor.reshard(unit)
        elif not any(self.is_retained_for(record, unit) for record in (self._records.current, *self._records.visited)):
            self._executor.unsharded_this_pass.discard(unit)

    def guard_idle(self, units: Iterable[UnitT]) -> None:
        """Guard the units without a hold.

        Units retained for this forward are not guarded: code that has received their parameters may use them directly.
        """
        for unit in units:
            if unit not in self.reasons and not self.is_retained_for(self._records.current, unit):
                self._executor.guard(unit)

    # -- between passes -----------------------------------------------------------------------------------------

    def is_retained(self, unit: UnitT) -> bool:
        """Return whether any forward retains the unit."""
        return unit in self._orphans or any(unit in units for units in self._retained.values())

    def is_retained_for(self, record: ForwardRecord[UnitT], unit: UnitT) -> bool:
        """Return whether this forward retains the unit."""
        return unit in self._retained.get(weakref.ref(record), ())

    def retain(self, record: ForwardRecord[UnitT], units: Iterable[UnitT]) -> None:
        """Add units to those retained for a forward."""
        record.retained_units += [unit for unit in dict.fromkeys(units) if unit not in record.retained_units]
        if record.retained_units:
            self._retained[weakref.ref(record)] = record.retained_units

    def release(self, record: ForwardRecord[UnitT]) -> None:
        """Release all units retained for a forward."""
        self._retained.pop(weakref.ref(record), None)
        self._returned_views.pop(weakref.ref(record), None)

    def restore(self, record: ForwardRecord[UnitT]) -> None:
        """Unshard and retain again what an earlier backward of this forward released."""
        if record.retained_units and weakref.ref(record) not in self._retained:
            self.retain(record, ())
            for unit in record.retained_units:
                self._executor.unshard(unit)

    def record_returned_views(self, record: ForwardRecord[UnitT]) -> None:
        """Record that a forward has returned parameters of its retained units, or tensors that share their storage."""
        self._returned_views[weakref.ref(record)] = list(record.retained_units)

    def guard_retained(self) -> None:
        """Guard retained units between passes, unless a forward has returned their parameters.

        Perhaps only some ranks retain them, and writes to the unsharded values would be lost.
        """
        for unit in self._executor.unsharded:
            if unit not in self.reasons and not any(unit in units for units in self._returned_views.values()):
                self._executor.guard(unit)

    def adopt_orphans(self) -> None:
        """Merge the units of all forwards whose hooks are freed into one set: there may be many such forwards."""
        for reference in [reference for reference in self._retained if reference() is None]:
            self._orphans.update(self._retained.pop(reference))

    def end_backward(self, keeps_graph: bool) -> None:
        """Release the units of the visited forwards, except those that the graph created by this backward uses.

        The backward of that graph visits these forwards again. With ``keeps_graph``, so may another one over this
        backward's graph, which an earlier backward may have created: release nothing.
        """
        new_graph_units = [unit for unit, reasons in self.reasons.items() if Hold.NEW_GRAPH in reasons]
        self._orphans.clear()
        self._returned_views = {
            reference: units for reference, units in self._returned_views.items() if reference() is not None
        }
        for record in self._records.visited:
            if not keeps_graph:
                self.release(record)
            if new_graph_units:
                self.retain(record, new_graph_units)
        self._drop_all(Hold.NEW_GRAPH)

    def clear(self) -> None:
        """Drop all retained units: the parameters have changed, and no backward may use the old values."""
        self._retained.clear()
        self._returned_views.clear()
        self._orphans.clear()
        self._drop_all(Hold.NEW_GRAPH)

    def _drop_all(self, reason: Hold) -> None:
        for unit, reasons in tuple(self.reasons.items()):
            for _ in range(reasons.count(reason)):
                self.drop(unit, reason)


class ForwardSchedule(Generic[UnitT]):
    """The module calls of a forward, while they run.

    :meth:`begin_call`, :meth:`enter_call` and :meth:`end_call` for each module call; :meth:`begin` in the outermost
    one, before it is entered, and :meth:`end` after it.
    """

    def __init__(self, executor: UnitExecutor[UnitT], holds: UnitHolds[UnitT], records: PassRecords[UnitT]) -> None:
        self.running_calls: list[ModuleCall[UnitT]] = []  # outermost first
        self._executor, self._holds, self._records = executor, holds, records
        self._tick = 0
        # since the last call started: see [Note: parameters used outside their module]
        self._untracked_uses: list[ModuleCall[UnitT]] = []

    def begin_call(self, units: Iterable[UnitT]) -> ModuleCall[UnitT]:
        """Add a module call to the running ones. Follow it by :meth:`enter_call`."""
        self._tick += 1
        call = ModuleCall(list(units), self._tick)
        self.running_calls.append(call)
        for unit in call.units:
            self._holds.hold(unit, Hold.CALL)
        return call

    def begin(self) -> None:
        """Start the record of a forward whose outermost call has begun."""
        self._executor.unsharded_this_pass.clear()
        self._holds.adopt_orphans()
        self._records.current = ForwardRecord()
        self._holds.guard_idle(self._executor.unsharded)  # those retained for other forwards
        self._records.waiting.add(self._records.current)

    def enter_call(self, call: ModuleCall[UnitT], module: str | None = None) -> None:
        """Unshard the units of a call that begins, and reshard those that are not needed any more."""
        call.untracked_uses, self._untracked_uses = self._untracked_uses, []
        if self._executor.unsharded_this_pass.issuperset(call.units):
            self._holds.guard_idle(self._executor.unsharded)
        else:  # execution reaches another unit
            self._holds.reshard_idle()
        for unit in call.units:
            self._executor.unshard(unit, module)

    def end_call(
        self, is_training: bool, has_outputs: bool, returns_views: bool, detaches_graph: bool
    ) -> ModuleCall[UnitT]:
        """Record the innermost call, which ends, retain what backward may use without a hook, and guard the rest.

        ``has_outputs``: it returned differentiable tensors. ``returns_views``, ``detaches_graph``: see
        :meth:`Engine.post_forward`. If ``has_pre_backward_hook`` of the returned call is set, the caller hooks its
        outputs, so that backward visits it.
        """
        call = self._pop_call()
        for use in call.view_uses.values():
            use.end_tick = call.end_tick
            call.untracked_uses.append(use)
        is_outermost = not self.running_calls
        if is_outermost:
            call.untracked_uses += self._untracked_uses
            self._untracked_uses = []
        has_graph = is_training and has_outputs
        call.has_pre_backward_hook = has_graph and bool(call.units or call.untracked_uses or is_outermost)
        if not call.has_pre_backward_hook:
            self._untracked_uses = call.untracked_uses + self._untracked_uses
        record = self._records.current
        record.add(call)
        # It may be unknown what will use the values, and when. What the root module used itself, also as views, may be
        # in graphs that its outputs do not show: a loss stored as an attribute, an output that tensors_in() cannot
        # inspect. A frozen module without differentiable inputs is in no graph: it is resharded as usual.
        if returns_views or (is_training and is_outermost):
            self._holds.retain(record, (unit for use in (call, *call.untracked_uses) for unit in use.units))
        elif is_training and not has_outputs:
            is_trainable = self._executor.is_trainable
            self._holds.retain(record, (unit for unit in call.units if detaches_graph or is_trainable(unit)))
        self._holds.guard_idle((*call.units, *call.view_uses))
        return call

    def fail_call(self) -> bool:
        """Handle an exception in the innermost call; return whether a call around it goes on.

        The caller may catch the exception and continue with earlier results, which no hook covers.
        """
        call = self._pop_call()
        if not self.running_calls:
            return False
        self._records.current.add(call)
        self._untracked_uses = [*call.untracked_uses, call, *call.view_uses.values(), *self._untracked_uses]
        self._holds.guard_idle((*call.units, *call.view_uses))
        return True

    def _pop_call(self) -> ModuleCall[UnitT]:
        call = self.running_calls.pop()
        if call.label is not None:
            call.label.__exit__(None, None, None)
            call.label = None
        for unit in (*call.units, *call.view_uses):
            self._holds.drop(unit, Hold.CALL)
        self._tick += 1
        call.end_tick = self._tick
        return call

    def end(self, is_training: bool) -> None:
        """End the forward. The hooks on its outputs keep its record alive."""
        if not is_training:
            self._holds.release(self._records.current)
        self._records.current = ForwardRecord()

    def abort(self) -> None:
        """Forget a forward that has raised."""
        while self.running_calls:
            self._pop_call()
        self._untracked_uses = []
        self._records.waiting.discard(self._records.current)
        self._holds.release(self._records.current)
        self._records.current = ForwardRecord()

    # -- uses outside modules: see [Note: parameters used outside their module] ---------------------------------

    def add_untracked_use(self, unit: UnitT) -> None:
        """Record that an operation of this forward uses a unit outside its module."""
        self._tick += 1
        use = ModuleCall([unit], self._tick, end_tick=self._tick)
        self._records.current.add(use)
        self._untracked_uses.append(use)

    def add_view_use(self, unit: UnitT, use: ModuleCall[UnitT]) -> None:
        """Record that the innermost running call has received a view of the unit's storage: it holds the unit."""
        call = self.running_calls[-1]
        if unit not in call.view_uses:
            call.view_uses[unit] = use
            self._holds.hold(unit, Hold.CALL)

    def mark_hooked(self, use: ModuleCall[UnitT]) -> None:
        """Record that the results of a use outside a module have a pre-backward hook."""
        use.has_pre_backward_hook = True
        self._untracked_uses = [other for other in self._untracked_uses if other is not use]


class BackwardSchedule(Generic[UnitT]):
    """How far a backward has come over the module calls of its forwards.

    :meth:`begin`, then :meth:`advance_to` each call that a gradient arrives at, :meth:`visit_remaining`, :meth:`end`.
    """

    def __init__(self, executor: UnitExecutor[UnitT], holds: UnitHolds[UnitT], records: PassRecords[UnitT]) -> None:
        self.is_running = False
        self.backward_id = -1  # autograd's id of the last backward that started
        self.is_creating_graph = False  # this backward runs with create_graph=True
        self.keeps_graph = False  # or with retain_graph=True
        self._executor, self._holds, self._records = executor, holds, records
        self._visited_units: dict[UnitT, int] = {}  # not done yet: unit → start tick of the visited call
        self._pending_calls: list[ModuleCall[UnitT]] = []  # not visited yet; the next one is last

    def begin(self, backward_id: int) -> None:
        """Start a backward. ``backward_id`` is unique."""
        self.backward_id = backward_id
        self.is_running = True
        self._executor.unsharded_this_pass.clear()

    def advance_to(self, call: ModuleCall[UnitT], record: ForwardRecord[UnitT]) -> None:
        """Visit the pending calls up to this one, then this one: see [Note: all ranks visit all module calls]."""
        if record not in self._records.visited:
            self._records.visited.append(record)
            self._records.waiting.add(record)
            self._holds.restore(record)
            self._pending_calls += [other for other in record.calls if other.has_pre_backward_hook]
            self._pending_calls.sort(key=lambda other: other.end_tick)
        while self._pending_calls and self._pending_calls[-1].end_tick > call.end_tick:
            self._visit(self._pending_calls.pop())
        self._visit(call)

    def _visit(self, call: ModuleCall[UnitT]) -> None:
        """Finish the done units and unshard those of this call: see [Note: when a unit is done in backward]."""
        if call.last_backward_id == self.backward_id:
            return
        call.last_backward_id = self.backward_id
        uses = [call, *call.untracked_uses]
        needed = [unit for use in uses for unit in use.units]
        for unit, start_tick in tuple(self._visited_units.items()):
            if start_tick > call.end_tick:
                if all(use.start_tick > call.end_tick for use in self._calls_using(unit)):
                    del self._visited_units[unit]
                    self._executor.on_grads_ready(unit)
                if unit not in needed and unit not in self._holds.reasons:
                    self._holds.reshard_unless_retained(unit)
        for use in uses:
            use.last_backward_id = self.backward_id
            for unit in use.units:
                self._visited_units[unit] = use.start_tick
                self._unshard(unit)

    def _unshard(self, unit: UnitT) -> None:
        if self.is_creating_graph and not self._holds.has_hold(unit, Hold.NEW_GRAPH):
            # the new nodes save parameters, and no hook covers them
            self._holds.hold(unit, Hold.NEW_GRAPH)
        self._executor.unshard(unit)

    def visit_nested(self, call: ModuleCall[UnitT], record: ForwardRecord[UnitT]) -> None:
        """Unshard the units of a call that a nested backward visits: see [Note: backward inside backward]."""
        if record not in self._records.visited:
            self._records.visited.append(record)
            self._holds.restore(record)
        for use in (call, *call.untracked_uses):
            for unit in use.units:
                self._visited_units.setdefault(unit, use.start_tick)
                self._unshard(unit)

    def find_unhooked_call(self, unit: UnitT) -> tuple[ModuleCall[UnitT], ForwardRecord[UnitT]] | None:
        """Return the call whose recomputation shows that backward has reached it: see [Note: recomputation]."""
        if unit in self._visited_units:
            return None
        unhooked = [
            (call, record)
            for record in self._records.waiting
            for call in record.calls_by_unit.get(unit, ())
            if not call.has_pre_backward_hook and not (self.is_running and call.last_backward_id == self.backward_id)
        ]
        return max(unhooked, key=lambda pair: pair[0].end_tick, default=None)

    def visit_remaining(self) -> None:
        """Visit all pending calls and finish all units: autograd has run all nodes."""
        while self._pending_calls:
            self._visit(self._pending_calls.pop())
        for unit in tuple(self._visited_units):
            self._executor.on_grads_ready(unit)

    def end(self) -> None:
        """End the backward, finished or not, and release what it has held."""
        self.is_running = False
        self._visited_units.clear()
        self._pending_calls.clear()
        self._records.waiting -= set(self._records.visited)
        self._holds.end_backward(self.keeps_graph)
        self._records.visited.clear()

    def first_use_tick(self, unit: UnitT) -> int | None:
        """Return the start tick of a unit's first use in the forwards that a backward may visit."""
        return min((call.start_tick for call in self._calls_using(unit)), default=None)

    def _calls_using(self, unit: UnitT) -> Iterator[ModuleCall[UnitT]]:
        return (call for record in self._records.waiting for call in record.calls_by_unit.get(unit, ()))


class Schedule(Generic[UnitT]):
    """The schedule of one model: tells the executor what to unshard and reshard in a forward and in its backward."""

    def __init__(self, executor: UnitExecutor[UnitT]) -> None:
        self.records: PassRecords[UnitT] = PassRecords()
        self.holds = UnitHolds(executor, self.records)
        self.forward = ForwardSchedule(executor, self.holds, self.records)
        self.backward = BackwardSchedule(executor, self.holds, self.records)
