"""Engine: handles each module and autograd event of a sharded model. It reads placements, never a stage number.

[Note: when a unit is done in backward]
Autograd runs the nodes of a graph in the reverse of their creation order. A node that is not ready waits for a consumer
of its output, and that consumer was created later; so among the later nodes one is always ready, and it has priority.
The engine counts ticks: each start and each end of a module call in forward gets a number (``ModuleCall``). When the
gradient of a module's output arrives, every node created after the end of that call has run. So a unit whose module
calls all started after that tick is done: its gradients are complete and its parameters are not needed any more. This
needs no hook per parameter and no counting of gradients, and unused parameters, auxiliary losses, shared modules and
branches are not special cases.

[Note: all ranks visit all module calls]
A loss may depend on a module on one rank and not on another. All ranks must take part in every all-gather, so on every
rank a backward visits every module call of its forward, in reverse order: when a gradient arrives, the calls in between
that received none are visited first.

[Note: backward inside backward]
A tensor hook, or a function's backward, may call ``torch.autograd.grad`` on a graph of the same forward, as implicit
layers (DEQ) do. Such a nested backward visits module calls in its own order, so it does not show which units are done:
it unshards the units that it visits, and they stay unsharded until they are done in the outer backward. The engine's
hook on a tensor runs before all other hooks, so that the tensor's unit is unsharded if another hook starts a backward.

[Note: parameters used outside their module]
A forward may use a parameter outside its module: a tied weight through ``F.linear``, a child's weight read by its
parent. The access unshards the unit, which stays unsharded until the operation has run. The operation's result gets the
same hook as a module's output: the hook unshards the unit in backward. If the result cannot be hooked (no graph,
reentrant checkpoint, ``torch.func``), the next module call's pre-backward hook also unshards this unit, because
backward visits that call first, if a gradient reaches it. If the result is a view, the calling module can use it until
its forward ends: the unit stays unsharded until then, and the hook of that module call unshards it in backward. So
``x @ weight.t()`` early in the root module's forward keeps the unit in memory for the whole pass;
``F.linear(x, weight)`` does not.

[Note: losses stored as attributes]
A loss may depend only on a tensor inside a module: a router's penalty, stored as an attribute. No gradient then arrives
at the module's outputs. So graph tensors that the module or one of its submodules stores, as an attribute or in a list,
tuple or dictionary that is an attribute, get the same hooks as its outputs. (Tensors stored elsewhere are not found:
return them as outputs.)

[Note: recomputation]
Activation checkpointing runs a module's forward again inside backward. Recomputation records no module call and
reshards nothing: it only makes sure that the unit is unsharded. A reentrant checkpoint hides the unit's output from the
first forward; there the recomputation itself is the sign that backward has reached the unit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from itertools import islice
from typing import NoReturn

import torch

from zeroshard.comm import CollectiveOrder, Communicator, RanksDisagreeError
from zeroshard.config.config import Config
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.module_buffers import BufferBroadcaster
from zeroshard.engine.parameter import PICKLE_ERROR, is_functorch_wrapped
from zeroshard.engine.schedule import (
    BackwardEndCallback,
    ForwardRecord,
    ModuleCall,
    PreBackwardHook,
    RetainedUnits,
    outside_functorch,
    prepend_hook,
)
from zeroshard.engine.state_guard import StateGuard
from zeroshard.engine.unit import Unit, UnitState
from zeroshard.memory import PREFETCH_SHARDS, CublasWorkspace, DiskError, MemoryTracker, Pool, SegmentPreallocator
from zeroshard.sharding import Placement, Precision, current_inverse_scale


def is_in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Engine:
    """Run the forward and backward of one sharded model: own its units, its gradients and the progress of a pass."""

    def __init__(
        self,
        units: list[Unit],
        gradients: Gradients,
        buffers: BufferBroadcaster,
        placement: Placement,
        comm: Communicator,
        order: CollectiveOrder,
        tracker: MemoryTracker,
        pool: Pool,
        config: Config,
        precision: Precision,
    ) -> None:
        self.units = units
        self.state_guard = StateGuard(units, gradients, comm, order)
        self.precision = precision
        self.gradients = gradients
        self.placement = placement
        self.comm = comm
        self.order = order
        self.tracker = tracker
        self.pool = pool
        self.config = config
        self.needs_grad_sync = True  # False inside no_sync(): backward only sums locally
        self._buffer_broadcaster = buffers
        on_gpu = comm.device.type == "cuda"
        self._segment_preallocator = SegmentPreallocator(comm.device) if on_gpu and config.defragment else None
        self._cublas_workspace = CublasWorkspace(pool) if on_gpu and config.defragment else None
        self._units_by_gather_label = {unit.all_gather_label: unit for unit in units if unit.is_partitioned}
        self._units_by_copy_label = {unit.gather_copy_label: unit for unit in units if unit.is_partitioned}
        self._prefetchers = {flat.prefetcher for unit in units for flat in unit.flats if flat.prefetcher is not None}
        self._unsharded_this_pass: set[Unit] = set()  # in this forward or backward, and not resharded since
        self._unsharded: list[Unit] = []  # partitioned units that are unsharded or unsharding
        self._running_calls: list[ModuleCall] = []  # outermost first
        self._forward_record = ForwardRecord()  # of the current forward
        # of forwards that a backward may visit
        self._forward_records: weakref.WeakSet[ForwardRecord] = weakref.WeakSet()
        self._untracked_uses: list[
            ModuleCall
        ] = []  # since the last call started: see [Note: parameters used outside their module]
        self._op_holds: list[Unit] = []  # by running operations; a unit may occur twice
        self._retained = RetainedUnits()  # units that a backward may use without a hook
        self.is_creating_graph = False  # this backward runs with create_graph=True
        self._held_by_grad_graph: set[Unit] = set()  # used by the graph that this backward creates
        self._units_in_backward: dict[Unit, int] = {}  # unit → start tick of the visited call
        self._backward_records: list[ForwardRecord] = []  # of the forwards that this backward has visited
        self._pending_calls: list[ModuleCall] = []  # not yet visited by this backward; the next one is last
        self._tick = 0
        self.backward_count = 0  # since the last step
        self._backward_id = 0  # of the last backward that started
        self._has_active_backward = False
        self.deferred_error: RuntimeError | None = None  # raised in a finalizer, which cannot propagate it
        self._forward_thread_id = 0  # of the last forward
        self._graph_task_id = -1  # autograd's id of the current backward
        for unit in units:
            unit.engine = weakref.ref(self)

    def __deepcopy__(self, memo: object) -> Engine:
        """Raise: a copy would share shards and collectives with the original."""
        raise RuntimeError(
            "a sharded model cannot be deep-copied; copy it before zeroshard.shard(), or build a second model and load "
            "the state_dict() taken inside `with zeroshard.gathered(model):`"
        )

    def __reduce__(self) -> NoReturn:
        """Raise: see :data:`PICKLE_ERROR`."""
        raise RuntimeError(PICKLE_ERROR)

    # -- forward ------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is running."""
        return bool(self._running_calls) or is_in_backward()

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward is running, or has ended with an exception that no hook could see."""
        return bool(self._running_calls)

    def pre_forward(self, units: tuple[Unit, ...], name: str, is_root: bool) -> None:
        """Unshard the units of a hooked module that is about to run. ``is_root``: it is the model itself."""
        if is_in_backward():
            for unit in units:
                self._pre_recompute(unit)
            return
        if self._running_calls and is_root:  # an earlier forward raised, and no hook could see it
            self._abort_forward()
        self._tick += 1
        call = ModuleCall(list(units), self._tick)
        self._running_calls.append(call)  # first: if anything below raises, on_forward_error() pops it
        if len(self._running_calls) == 1:
            self._begin_forward(name)
        call.untracked_uses, self._untracked_uses = self._untracked_uses, []
        if any(unit not in self._unsharded_this_pass for unit in units):  # execution reaches another unit
            self._reshard_idle()
        else:
            self._guard_idle(self._unsharded)
        for unit in units:
            self._unshard(unit, name)

    def owns_storage_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the storage of a unit that the running module uses."""
        calls = () if is_in_backward() else self._running_calls[-1:]
        units = [unit for call in calls for unit in (*call.units, *call.view_uses)]
        if len(self._running_calls) == 1:  # the model may return what a submodule has returned
            units += self._forward_record.retained_units
        return any(unit.is_partitioned and unit.owns_storage_of(tensor) for unit in units)

    def post_forward(
        self, outputs: list[torch.Tensor], stored_tensors: list[torch.Tensor], returns_views: bool, detaches_graph: bool
    ) -> None:
        """Record the module call that has just ended, and hook its outputs for backward.

        ``outputs`` are its differentiable output tensors, ``stored_tensors`` those it stores: see [Note: losses stored
        as attributes]. ``returns_views``: some output is a parameter or shares its storage. ``detaches_graph``: some
        input is differentiable and no output is.
        """
        if is_in_backward():
            return
        if not self._running_calls:
            raise RuntimeError(
                "the model was called inside its own forward in a way that zeroshard did not notice: the units of the "
                "outer call are gone. Call it before or after, or call a module of it"
            )
        call = self._running_calls.pop()
        self._tick += 1
        call.end_tick = self._tick
        for use in call.view_uses.values():
            use.end_tick = call.end_tick
            call.untracked_uses.append(use)
        if not self._running_calls:
            call.untracked_uses += self._untracked_uses
            self._untracked_uses = []
        call.has_pre_backward_hook = (
            bool(outputs)
            and torch.is_grad_enabled()
            and bool(call.units or call.untracked_uses or not self._running_calls)
        )
        if call.has_pre_backward_hook:
            for tensor in (*outputs, *stored_tensors):
                prepend_hook(tensor, PreBackwardHook(self, call, self._forward_record))
        else:
            self._untracked_uses = call.untracked_uses + self._untracked_uses
        self._record_call(call)
        # It may be unknown what will use the values, and when. What the root module used itself, also as views, may be
        # in graphs that its outputs do not show: a loss stored as an attribute, an output that tensors_in() cannot
        # inspect. A frozen module without differentiable inputs is in no graph: it is resharded as usual.
        if returns_views or (torch.is_grad_enabled() and not self._running_calls):
            self._retained.retain(
                self._forward_record, (unit for use in (call, *call.untracked_uses) for unit in use.units)
            )
        elif torch.is_grad_enabled() and not outputs:
            self._retained.retain(
                self._forward_record, (unit for unit in call.units if detaches_graph or unit.is_trainable)
            )
        self._guard_idle((*call.units, *call.view_uses))
        if not self._running_calls:
            if returns_views:
                self._retained.record_returned_views(self._forward_record, self._forward_record.retained_units)
                for unit in self._forward_record.retained_units:
                    unit.has_returned_views = True
            self._end_forward()

    def on_forward_error(self, error: BaseException | None) -> None:
        """Handle an exception in the forward of a hooked module."""
        if is_in_backward() or not self._running_calls:
            return
        call = self._running_calls.pop()
        if self._running_calls:  # the caller may catch it and continue with earlier results, which no hook covers
            self._tick += 1
            call.end_tick = self._tick
            self._record_call(call)
            self._untracked_uses = [*call.untracked_uses, call, *call.view_uses.values(), *self._untracked_uses]
            self._guard_idle((*call.units, *call.view_uses))
            return
        if isinstance(error, DiskError):  # parameters could not be read: the other ranks already wait in the all-gather
            self.comm.consistency.announce_failure(str(error))
        elif not (
            isinstance(error, RanksDisagreeError)
            or self.state_guard.invalid_states
            or self.state_guard.offloaded_states is not None
        ):
            self._drain_collectives()  # otherwise this rank has no valid values to send
            if error is not None:
                self.comm.consistency.announce_failure(f"its forward raised {type(error).__name__}: {error}")
        with suppress(RanksDisagreeError) if isinstance(error, RanksDisagreeError) else nullcontext():
            self._abort_forward()  # later failures repeat the first, which says more

    def acquire_for_op(self, unit: Unit) -> bool:
        """Unshard a unit for an operation on a guarded parameter; return whether that is possible now.

        If so, the unit is held until :meth:`release_after_op`, also while the same operation acquires other units.
        """
        self.state_guard.check_states_reloaded()
        if unit.is_partitioned and not self.is_running:
            return False
        if unit not in self._op_holds:
            with outside_functorch():
                self._acquire_for_op(unit)
        self._op_holds.append(unit)
        return True

    def _acquire_for_op(self, unit: Unit) -> None:
        if unit.is_partitioned and not is_in_backward():
            if unit not in self._unsharded_this_pass:
                self._reshard_idle(except_unit=unit)  # it may be unsharding already, as the expected next unit
            self._tick += 1
            use = ModuleCall([unit], self._tick, end_tick=self._tick)
            self._record_call(use)
            self._untracked_uses.append(use)
            if unit.is_guarded and unit in self._unsharded_this_pass:  # this operation proceeds; the unit stays guarded
                return
        self._unshard(unit)

    def release_after_op(self, unit: Unit, result: object) -> None:
        """Release the hold of an operation. If the result is a view, keep the unit; otherwise guard it again."""
        self._op_holds.remove(unit)
        if unit in self._op_holds or not unit.is_partitioned or is_in_backward() or not self._running_calls:
            return
        results = result if isinstance(result, (list, tuple)) else (result,)
        tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        use = self._forward_record.calls_by_unit[unit][-1]
        if any(unit.owns_storage_of(tensor) for tensor in tensors):
            self._running_calls[-1].view_uses.setdefault(unit, use)
            return
        if torch.is_grad_enabled():
            self._hook_untracked_use(use, tensors)
        self._guard_idle((unit,))

    def _hook_untracked_use(self, use: ModuleCall, results: list[torch.Tensor]) -> None:
        """Hook the results of an untracked use: see [Note: parameters used outside their module]."""
        hooked = [tensor for tensor in results if tensor.grad_fn is not None and not is_functorch_wrapped(tensor)]
        for tensor in hooked:
            prepend_hook(tensor, PreBackwardHook(self, use, self._forward_record))
        if hooked:
            use.has_pre_backward_hook = True
            self._untracked_uses = [other for other in self._untracked_uses if other is not use]

    def _record_call(self, call: ModuleCall) -> None:
        self._forward_record.calls.append(call)
        for unit in call.units:
            self._forward_record.calls_by_unit.setdefault(unit, []).append(call)

    def _calls_using(self, unit: Unit) -> Iterator[ModuleCall]:
        return (call for record in self._forward_records for call in record.calls_by_unit.get(unit, ()))

    def _is_used_in_forward(self, unit: Unit) -> bool:
        """Return whether the forward uses the unit now."""
        return unit in self._op_holds or any(
            unit in call.units or unit in call.view_uses for call in self._running_calls
        )

    def _is_held(self, unit: Unit) -> bool:
        """Return whether this forward or backward holds the unit, not counting retained units."""
        return unit in self._held_by_grad_graph or self._is_used_in_forward(unit)

    def pre_model_forward(self, inputs: Iterable[torch.Tensor]) -> None:
        """Report the input size of the root module's forward to the segment preallocator."""
        if self._segment_preallocator is not None and torch.is_grad_enabled() and not self.is_running:
            self._segment_preallocator.on_forward_begin(sum(tensor.numel() for tensor in inputs))

    def _begin_forward(self, name: str) -> None:
        if self.deferred_error is not None:
            error, self.deferred_error = self.deferred_error, None
            raise error
        if self._has_active_backward:  # it ended with an exception
            self._abort_backward()
        self.state_guard.check_valid(*self.state_guard.invalid_states)
        self.state_guard.check_states_reloaded()
        self.state_guard.check_frozen()
        self.state_guard.sync_user_edits()
        if torch.is_grad_enabled():
            self.gradients.memory.make_persistent()
        if self._cublas_workspace is not None:
            self._cublas_workspace.acquire()
        self._forward_thread_id = threading.get_ident()
        self._unsharded_this_pass.clear()
        self._retained.adopt_orphans()
        self._forward_record = ForwardRecord()
        self._guard_idle(self._unsharded)  # those retained for other forwards
        self._forward_records.add(self._forward_record)
        gradients = "with" if torch.is_grad_enabled() else "without"
        gathered = [unit.name for unit in self._units_by_gather_label.values() if unit.has_gathered_copy]
        inside = f" inside gathered() of {gathered[0]!r} and {len(gathered) - 1} more" if gathered else ""
        self.order.begin_pass(f"forward of {name or 'the model'} {gradients} gradients{inside}")
        self.state_guard.hide_reduced_grads(self._unsharded)
        self._buffer_broadcaster.sync_buffers()

    def _end_forward(self) -> None:
        if torch.is_grad_enabled():
            self.gradients.memory.record_allocated()
        else:
            self._retained.release(self._forward_record)
        self._forward_record = ForwardRecord()  # the hooks on the outputs keep the old one alive
        self.state_guard.gather_updated_units()
        self._reshard_idle()
        for unit in self._unsharded:  # retained
            unit.wait_for_unshard()
        self._guard_retained()
        if not torch.is_grad_enabled():
            self._detach_sharded()
        self.state_guard.expose_reduced_grads(self._unsharded)

    def _abort_forward(self) -> None:
        self._running_calls, self._untracked_uses = [], []
        self._forward_records.discard(self._forward_record)
        self._retained.release(self._forward_record)
        self._forward_record = ForwardRecord()
        self._reshard_idle()
        self._guard_retained()
        self._detach_sharded()
        self.state_guard.expose_reduced_grads(self._unsharded)

    def _drain_collectives(self) -> None:
        """Take part in the all-gathers that the other ranks still expect in this forward, so that they do not hang."""
        for event in self.order.remaining_events():
            if (unit := self._units_by_gather_label.get(event)) is not None:
                self._unshard(unit)
                self._reshard_unless_retained(unit)
            elif (unit := self._units_by_copy_label.get(event)) is not None:  # e.g. gathered() in a hook
                self.order.check(event)
                unit.gather_copy()
                unit.drop_copy()
        self.state_guard.gather_updated_units()

    def _unshard(self, unit: Unit, module: str | None = None) -> None:
        """Unshard a unit for one module, or for all, and prefetch the unit that is expected next."""
        if not unit.is_partitioned or (unit in self._unsharded_this_pass and unit.state is UnitState.UNSHARDED):
            if unit.is_stale:
                self.state_guard.gather_updated_unit(unit)
            unit.wait_for_unshard(module)
        else:
            self.order.check(unit.all_gather_label)
            self._start_unshard(unit)
            unit.wait_for_unshard(module)
            self._unsharded_this_pass.add(unit)
            if self.config.prefetch:
                self._prefetch()

    def _prefetch(self) -> None:
        """Start the all-gather of the unit that is expected next, and the disk reads of those after it."""
        for position, event in enumerate(
            islice(
                self.order.iter_expected(self._units_by_gather_label), 1 + (PREFETCH_SHARDS if self._prefetchers else 0)
            )
        ):
            unit = self._units_by_gather_label[event]
            if position == 0:
                self._start_unshard(unit)
            else:
                for flat in unit.flats:
                    flat.prefetch()

    def _start_unshard(self, unit: Unit) -> None:
        """Start to unshard a unit, unless that is under way.

        A unit that an earlier pass left unsharded is all-gathered again: other ranks may not have it any more.
        """
        if unit.state is UnitState.UNSHARDING or (
            unit in self._unsharded_this_pass and unit.state is UnitState.UNSHARDED
        ):
            return
        unit.start_unshard()
        if unit not in self._unsharded:
            self._unsharded.append(unit)

    def _reshard(self, unit: Unit) -> None:
        self._unsharded_this_pass.discard(unit)
        if unit in self._unsharded:
            self._unsharded.remove(unit)
            unit.reshard()

    def _reshard_idle(self, except_unit: Unit | None = None) -> None:
        """Reshard the units that are neither held nor retained."""
        for unit in tuple(self._unsharded):
            if unit is not except_unit and not self._is_held(unit):
                self._reshard_unless_retained(unit)

    def _reshard_unless_retained(self, unit: Unit) -> None:
        """Reshard a unit that is not in use, unless it is retained.

        A unit retained for another pass stays in memory. But this rank may be the only one that retains it: the forward
        failed on the others, or they have dropped its graph. So its next use all-gathers it again, as on those ranks.
        """
        if unit not in self._retained:
            self._reshard(unit)
        elif not any(
            self._retained.is_retained_for(record, unit) for record in (self._forward_record, *self._backward_records)
        ):
            self._unsharded_this_pass.discard(unit)

    def _guard_idle(self, units: Iterable[Unit]) -> None:
        """Guard the units that no running module uses: their next use belongs to another module call.

        Units retained for this forward are not guarded: code that has received their parameters may use them directly.
        """
        for unit in units:
            if not (
                unit.is_guarded
                or self._is_used_in_forward(unit)
                or self._retained.is_retained_for(self._forward_record, unit)
            ):
                unit.guard()

    def _guard_retained(self) -> None:
        """Guard retained units between passes, unless a forward has returned their parameters.

        Perhaps only some ranks retain them, and writes to the unsharded values would be lost.
        """
        for unit in self._unsharded:
            if not (self._is_used_in_forward(unit) or self._retained.has_returned_views(unit)):
                unit.guard()

    # -- backward -----------------------------------------------------------------------------------------------

    def pre_backward(self, call: ModuleCall, record: ForwardRecord) -> None:
        """Handle the arrival of a gradient at the output of a module call."""
        if self._has_active_backward and torch._C._current_graph_task_id() != self._graph_task_id:
            self._pre_nested_backward(call, record)
        else:
            self._advance_backward_to(call, record)

    def _advance_backward_to(self, call: ModuleCall, record: ForwardRecord) -> None:
        """Visit the pending calls up to this one, then this one: see [Note: all ranks visit all module calls]."""
        if not self._has_active_backward:
            self._begin_backward()
        if record not in self._backward_records:
            self._backward_records.append(record)
            self._forward_records.add(record)
            for unit in self._retained.restore(record):
                self._unshard(unit)
            self._pending_calls += [other for other in record.calls if other.has_pre_backward_hook]
            self._pending_calls.sort(key=lambda other: other.end_tick)
        while self._pending_calls and self._pending_calls[-1].end_tick > call.end_tick:
            self._visit_call(self._pending_calls.pop())
        self._visit_call(call)

    def _visit_call(self, call: ModuleCall) -> None:
        """Finish the done units and unshard those of this call: see [Note: when a unit is done in backward]."""
        if call.last_backward_id == self._backward_id:
            return
        call.last_backward_id = self._backward_id
        uses = [call, *call.untracked_uses]
        needed = [unit for use in uses for unit in use.units]
        for unit, start_tick in tuple(self._units_in_backward.items()):
            if start_tick > call.end_tick:
                if all(use.start_tick > call.end_tick for use in self._calls_using(unit)):
                    del self._units_in_backward[unit]
                    self.gradients.on_unit_done(unit, self.needs_grad_sync)
                if unit not in needed and not self._is_held(unit):
                    self._reshard_unless_retained(unit)
        if self.is_creating_graph:  # the new nodes save parameters, and no hook covers them
            self._held_by_grad_graph.update(needed)
        for use in uses:
            use.last_backward_id = self._backward_id
            for unit in use.units:
                self._units_in_backward[unit] = use.start_tick
                self._unshard(unit)

    def _pre_nested_backward(self, call: ModuleCall, record: ForwardRecord) -> None:
        """Unshard the units of a call that a nested backward visits: see [Note: backward inside backward]."""
        if record not in self._backward_records:
            self._backward_records.append(record)
            for unit in self._retained.restore(record):
                self._unshard(unit)
        for use in (call, *call.untracked_uses):
            for unit in use.units:
                self._units_in_backward.setdefault(unit, use.start_tick)
                self._unshard(unit)
                if self.is_creating_graph:
                    self._held_by_grad_graph.add(unit)

    def _pre_recompute(self, unit: Unit) -> None:
        """Unshard a unit whose module runs again inside backward: see [Note: recomputation]."""
        backward_id = self._backward_id if self._has_active_backward else self._backward_id + 1
        unhooked = [  # without a pre-backward hook
            (record, use)
            for record in self._forward_records
            for use in record.calls_by_unit.get(unit, ())
            if use.last_backward_id != backward_id and not use.has_pre_backward_hook
        ]
        if unit not in self._units_in_backward and unhooked:
            record, call = max(unhooked, key=lambda pair: pair[1].end_tick)
            self._advance_backward_to(call, record)
        self._unshard(unit)

    def _begin_backward(self) -> None:
        self.state_guard.check_states_reloaded()
        for unit in self.state_guard.replicated_units:
            unit.detect_forward_edits()
        self._backward_id += 1
        self._has_active_backward = True
        self._graph_task_id = torch._C._current_graph_task_id()
        self._held_by_grad_graph = set()
        self._unsharded_this_pass.clear()
        torch.autograd.Variable._execution_engine.queue_callback(BackwardEndCallback(self, self._backward_id))
        inverse_scale = current_inverse_scale()
        self.order.begin_pass("backward" if inverse_scale is None else "backward of a scaled loss")
        self.backward_count += 1
        if self._cublas_workspace is not None:
            self._cublas_workspace.acquire()
        self.gradients.memory.record_allocated()
        self.state_guard.hide_reduced_grads(self._unsharded)
        self.gradients.begin_backward(inverse_scale)
        listener = self.state_guard.backward_listener()
        if listener is not None:
            listener.on_backward_begin(self.backward_count) if self.needs_grad_sync else listener.invalidate()
        if self.gradients.is_partitioned and self.gradients.reduce_queue is None and self.needs_grad_sync:
            self.gradients.reduce_queue = self._agree_on_reduce_queue()

    def _agree_on_reduce_queue(self) -> list[Unit]:
        """Return the fixed reduce order: the reverse of rank 0's first forward, in which backward finishes units."""
        units = self.gradients.units
        last = self._tick + 1
        first_use = {unit: min((use.start_tick for use in self._calls_using(unit)), default=last) for unit in units}
        order = sorted(range(len(units)), key=lambda i: (first_use[units[i]] == last, -first_use[units[i]]))
        self.order.check("agree on the order of reductions")
        agreed = torch.tensor(order, dtype=torch.int64, device=self.comm.device)
        self.comm.broadcast(agreed, 0, "agree on the order of reductions")
        if self.comm.consistency.is_distributed:
            order = self.comm.read_to_host(agreed, "agree on the order of reductions")
        return [units[i] for i in order]

    def finalize_backward(self) -> None:
        """Finish the backward: autograd has run all nodes."""
        if self._has_active_backward:
            with outside_functorch():
                self._finalize_backward()

    def _finalize_backward(self) -> None:
        while self._pending_calls:
            self._visit_call(self._pending_calls.pop())
        for unit in tuple(self._units_in_backward):
            self.gradients.on_unit_done(unit, self.needs_grad_sync)
        self._units_in_backward.clear()
        self.gradients.finalize_backward(self.needs_grad_sync)
        self._reset_after_backward()

    def on_backward_dropped(self, backward_id: int) -> None:
        """Abort a backward that autograd has dropped before its end, because of an exception.

        An autograd thread may be the last to drop it, while the user's thread continues: then the next forward aborts.
        """
        if (
            self._has_active_backward
            and self._backward_id == backward_id
            and threading.get_ident() == self._forward_thread_id
        ):
            with outside_functorch():
                self._abort_backward()

    def _abort_backward(self) -> None:
        self._units_in_backward.clear()
        self._pending_calls.clear()
        self.gradients.abort_backward()
        self._reset_after_backward()

    def _reset_after_backward(self) -> None:
        self._has_active_backward = False
        self._forward_records -= set(self._backward_records)
        self._retained.finish(self._backward_records, self._held_by_grad_graph)
        self._backward_records.clear()
        self._held_by_grad_graph = set()
        self._reshard_idle()
        self._guard_retained()
        self._detach_sharded()
        self.state_guard.expose_reduced_grads(self._unsharded)

    def _detach_sharded(self) -> None:
        for unit in self._units_by_gather_label.values():
            unit.detach_storage()
        for prefetcher in self._prefetchers:
            prefetcher.discard()

    # -- between steps ------------------------------------------------------------------------------------------

    def reduce_pending(self) -> None:
        """Reduce all pending gradients, also those that the user has set, and expose them on the parameters."""
        self.gradients.reduce_pending()
        if not self.is_running:
            self.state_guard.expose_reduced_grads(self._unsharded)

    def release_retained(self) -> None:
        """Drop all retained units: the parameters have changed, and no backward may use the old values."""
        self._retained.clear()
        self._held_by_grad_graph = set()
        self._reshard_idle()
        self._detach_sharded()

    def write_back(self, units: list[Unit], src_rank: int) -> bool:
        """Write the units' parameters, as rank ``src_rank`` of the mesh has them inside gathered(), into all shards.

        Returns whether any value changed.
        """
        for unit in units:
            unit.check_param_data()
        self.state_guard.wait_readers()
        self.state_guard.invalidate_speculation()
        self.order.begin_pass("write")
        changed = torch.zeros(len(units), device=self.comm.device)
        for index, unit in enumerate(units):
            self.order.check(f"write unit {unit.name!r}")
            changed[index] = unit.write_back(src_rank)
        what = "agree on what was written"
        self.order.check(what)
        self.comm.all_reduce_over_mesh(changed, what)
        is_single_rank = self.comm.data_parallel_size * self.comm.tensor_axis.size == 1
        is_known = is_single_rank or self.comm.consistency.is_distributed
        flags = self.comm.read_to_host(changed, what) if is_known else [1.0] * len(units)
        written = [unit for unit, flag in zip(units, flags, strict=True) if flag]
        self.state_guard.on_values_changed(parameter for unit in written for parameter in unit.parameters)
        return bool(written)

    def close(self) -> None:
        """Wait for all background work: the model is about to be unwrapped."""
        self.state_guard.wait_readers()
        self.state_guard.wait_updates()
        if self._segment_preallocator is not None:
            self._segment_preallocator.stop_recording()
