"""Engine: what happens at each module and autograd event. It reads placements; it never looks at a stage number.

[Note: what is over in backward]
Autograd runs the nodes of a graph in the reverse of the order they were made in: a node that is not ready waits for a
consumer of its output, which was made later, so among the nodes made later one is always ready, and it has priority.
The engine numbers the moments at which a unit's module is entered and left in forward (``ModuleCall``). When the
gradient of a unit's output arrives, every node made after that module was left has run. So each unit whose modules were
all entered after that moment is over: its gradients are complete and its parameters needed no more. No hook per
parameter, no counting of gradients, and unused parameters, side losses, shared modules and branches need no special
case.

[Note: all ranks come to all frames]
A loss may depend on a module on one rank and not on another. Units are gathered by all ranks or none, so a backward
comes to every frame of its forward, in the reverse order, on every rank: when a gradient arrives, the frames in between
that got none are gone through first.

[Note: backward inside backward]
A tensor's hook, or a function's backward, may call ``torch.autograd.grad`` on a graph of the same forward, as implicit
layers (DEQ) do. Such a pass comes to frames in an order of its own, so it says nothing of what is over: it brings the
units it comes to, which then wait for the outer pass to be over. The engine's hook on a tensor runs before any other,
so that the tensor's own unit is there for a pass that another hook starts.

[Note: loose uses]
A forward may use a parameter outside its own module: a tied weight through ``F.linear``, a child's weight read by its
parent. The values are brought when they are touched, and stay until the operation has run. What it computed is hooked
as a module's output is: the hook brings the values in backward. Where it cannot be (the operation ran without a graph,
in a reentrant checkpoint, or inside ``torch.func``), backward comes there after the frame that was entered next, if a
gradient reaches that one, so that frame brings them too. What was computed may be a view, which the module that asked
can use until it is left: so long the values stay, and its own frame brings them in backward. So ``x @ weight.t()``,
early in a model's own forward, keeps that unit in memory through the pass, where ``F.linear(x, weight)`` does not.

[Note: kept inside]
A loss may reach only the inside of a module: a router's penalty, kept as an attribute. No gradient arrives at the
module's outputs, so tensors of its graph that it or a module below it keeps, as an attribute or in a list, tuple or
dictionary that is one, are hooked as its outputs are. (What is kept elsewhere is not found: give it back as an output.)

[Note: recomputation]
Activation checkpointing runs a module's forward again inside backward. Such a run opens no frame and releases nothing:
it only makes sure that the unit is there. A reentrant checkpoint hides the unit's output from the first forward, so
there the recomputation itself says that backward has come to the unit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from itertools import islice
from typing import NoReturn

import torch

from zeroshard.comm.collective_order import CollectiveOrder
from zeroshard.comm.collectives import Communicator
from zeroshard.comm.consistency import RanksDisagreeError
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
from zeroshard.memory.allocator.cublas_workspace import CublasWorkspace
from zeroshard.memory.allocator.segment_preallocator import SegmentPreallocator
from zeroshard.memory.disk.file import DiskError
from zeroshard.memory.disk.prefetch import PREFETCH_SHARDS
from zeroshard.memory.pool import Pool
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding.placement import Placement
from zeroshard.sharding.precision import Precision, current_inverse_scale


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Engine:
    """One sharded model: its units, its gradients, and where forward and backward are."""

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
        self._unsharded_this_pass: set[Unit] = set()  # brought in this forward or backward, and not released since
        self._unsharded: list[Unit] = []  # partitioned units that are not released
        self._running_calls: list[ModuleCall] = []  # modules being run, outermost first
        self._forward_record = ForwardRecord()  # of the forward under way
        self._forward_records: weakref.WeakSet[ForwardRecord] = (
            weakref.WeakSet()
        )  # of forwards that a backward may come to
        self._untracked_uses: list[ModuleCall] = []  # uses since the last frame was entered: see [Note: loose uses]
        self._op_holds: list[Unit] = []  # of parameters that operations under way were given; one may come twice
        self._retained = RetainedUnits()  # what a backward may use that no hook announces
        self.is_creating_graph = False  # whether this backward was asked to create a graph
        self._held_by_grad_graph: set[Unit] = set()  # used by the graph that this backward itself makes
        self._units_in_backward: dict[Unit, int] = {}  # units backward is in → when the run it came to was entered
        self._backward_records: list[ForwardRecord] = []  # that this backward has come to
        self._pending_calls: list[ModuleCall] = []  # that backward will come to, the next one last
        self._tick = 0
        self.backward_count = 0  # since the last step
        self._backward_id = 0  # number of the last backward that began
        self._has_active_backward = False
        self.deferred_error: RuntimeError | None = (
            None  # found when autograd dropped a backward, where nothing can raise
        )
        self._forward_thread_id = 0  # which forward ran on
        self._graph_task_id = -1  # autograd's number of the backward under way
        for unit in units:
            unit.engine = weakref.ref(self)

    def __deepcopy__(self, memo: object) -> Engine:
        """Refuse: a copy would share shards and collectives with the original."""
        raise RuntimeError(
            "a sharded model cannot be deep-copied; copy it before zeroshard.shard(), or build a second model and load "
            "the state_dict() taken inside `with zeroshard.gathered(model):`"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse: see :data:`PICKLE_ERROR`."""
        raise RuntimeError(PICKLE_ERROR)

    # -- forward ------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return bool(self._running_calls) or is_in_backward()

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward is under way, or was left by an exception that no hook could see."""
        return bool(self._running_calls)

    def pre_forward(self, units: tuple[Unit, ...], name: str, is_root: bool) -> None:
        """A hooked module is about to run. ``outermost``: it is the model itself."""
        if is_in_backward():
            for unit in units:
                self._pre_recompute(unit)
            return
        if self._running_calls and is_root:  # an earlier forward was left by an exception no hook could see
            self._abort_forward()
        self._tick += 1
        frame = ModuleCall(list(units), self._tick)
        self._running_calls.append(frame)  # first: whatever is raised below, fail() takes it back
        if len(self._running_calls) == 1:
            self._begin_forward(name)
        frame.untracked_uses, self._untracked_uses = self._untracked_uses, []
        if any(unit not in self._unsharded_this_pass for unit in units):  # execution moves on to another unit
            self._reshard_idle()
        else:
            self._guard_idle(self._unsharded)
        for unit in units:
            self._unshard(unit, name)

    def owns_storage_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is that of a unit that the module being run uses."""
        frames = () if is_in_backward() else self._running_calls[-1:]
        units = [unit for frame in frames for unit in (*frame.units, *frame.view_uses)]
        if len(self._running_calls) == 1:  # the model's own outputs may also be what a module inside has returned
            units += self._forward_record.retained_units
        return any(unit.is_partitioned and unit.owns_storage_of(tensor) for unit in units)

    def post_forward(
        self, outputs: list[torch.Tensor], stored_tensors: list[torch.Tensor], returns_views: bool, detaches_graph: bool
    ) -> None:
        """The module that was entered last has run.

        ``outputs`` are its differentiable output tensors, ``kept`` those it keeps: see [Note: kept inside]; ``lent``:
        some output is a parameter, or has one's memory; ``hides``: differentiable inputs went in and nothing
        differentiable came out.
        """
        if is_in_backward():
            return
        if not self._running_calls:
            raise RuntimeError(
                "the model was called inside its own forward in a way that zeroshard did not notice: the units of the "
                "outer call are gone. Call it before or after, or call a module of it"
            )
        frame = self._running_calls.pop()
        self._tick += 1
        frame.end_tick = self._tick
        for use in frame.view_uses.values():
            use.end_tick = frame.end_tick
            frame.untracked_uses.append(use)
        if not self._running_calls:
            frame.untracked_uses += self._untracked_uses
            self._untracked_uses = []
        frame.has_pre_backward_hook = (
            bool(outputs)
            and torch.is_grad_enabled()
            and bool(frame.units or frame.untracked_uses or not self._running_calls)
        )
        if frame.has_pre_backward_hook:
            for tensor in (*outputs, *stored_tensors):
                prepend_hook(tensor, PreBackwardHook(self, frame, self._forward_record))
        else:
            self._untracked_uses = frame.untracked_uses + self._untracked_uses
        self._record_call(frame)
        # Who will use the values, or when, may not be known. What the outermost module used itself, also as views, may
        # be in graphs that its outputs do not show: a loss kept as an attribute, an output that tensors_in() cannot
        # look into. A frozen module that nothing differentiable went into is in no graph: it is released as ever.
        if returns_views or (torch.is_grad_enabled() and not self._running_calls):
            self._retained.retain(
                self._forward_record, (unit for use in (frame, *frame.untracked_uses) for unit in use.units)
            )
        elif torch.is_grad_enabled() and not outputs:
            self._retained.retain(
                self._forward_record, (unit for unit in frame.units if detaches_graph or unit.is_trainable)
            )
        self._guard_idle((*frame.units, *frame.view_uses))
        if not self._running_calls:
            if returns_views:
                self._retained.record_returned_views(self._forward_record, self._forward_record.retained_units)
                for unit in self._forward_record.retained_units:
                    unit.has_returned_views = True
            self._end_forward()

    def on_forward_error(self, error: BaseException | None) -> None:
        """A hooked module has raised."""
        if is_in_backward() or not self._running_calls:
            return
        frame = self._running_calls.pop()
        if self._running_calls:  # whoever catches it may go on, with what was computed so far: no hook tells of that
            self._tick += 1
            frame.end_tick = self._tick
            self._record_call(frame)
            self._untracked_uses = [*frame.untracked_uses, frame, *frame.view_uses.values(), *self._untracked_uses]
            self._guard_idle((*frame.units, *frame.view_uses))
            return
        if isinstance(error, DiskError):  # parameters could not be read, so the others wait for a gather already
            self.comm.consistency.announce_failure(str(error))
        elif not (
            isinstance(error, RanksDisagreeError)
            or self.state_guard.invalid_states
            or self.state_guard.offloaded_states is not None
        ):
            self._drain_collectives()  # else there is nothing to give
            if error is not None:
                self.comm.consistency.announce_failure(f"its forward raised {type(error).__name__}: {error}")
        with suppress(RanksDisagreeError) if isinstance(error, RanksDisagreeError) else nullcontext():
            self._abort_forward()  # what is still under way fails like the first, which says more

    def acquire_for_op(self, unit: Unit) -> bool:
        """Somebody touches a parameter whose values are not in place: bring them if that is right now.

        Where it is, they stay until :meth:`fetched`, also while the same operation has others fetched.
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
                self._reshard_idle(except_unit=unit)  # it may be on its way: it was expected next
            self._tick += 1
            use = ModuleCall([unit], self._tick, end_tick=self._tick)
            self._record_call(use)
            self._untracked_uses.append(use)
            if (
                unit.is_guarded and unit in self._unsharded_this_pass
            ):  # whoever asks is let through; the next use is noticed too
                return
        self._unshard(unit)

    def release_after_op(self, unit: Unit, result: object) -> None:
        """What a parameter was fetched for is done. Where it is a view the unit stays, else the next use is noticed."""
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
        """Have told when backward comes to a loose use: see [Note: loose uses]."""
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
        return (frame for trace in self._forward_records for frame in trace.calls_by_unit.get(unit, ()))

    def _is_used_in_forward(self, unit: Unit) -> bool:
        """Whether this forward uses it now."""
        return unit in self._op_holds or any(
            unit in frame.units or unit in frame.view_uses for frame in self._running_calls
        )

    def _is_held(self, unit: Unit) -> bool:
        """Whether this forward or backward uses it, other than by pins."""
        return unit in self._held_by_grad_graph or self._is_used_in_forward(unit)

    def pre_model_forward(self, inputs: Iterable[torch.Tensor]) -> None:
        """The whole model is about to be given these inputs."""
        if self._segment_preallocator is not None and torch.is_grad_enabled() and not self.is_running:
            self._segment_preallocator.on_forward_begin(sum(tensor.numel() for tensor in inputs))

    def _begin_forward(self, name: str) -> None:
        if self.deferred_error is not None:
            error, self.deferred_error = self.deferred_error, None
            raise error
        if self._has_active_backward:  # it was left by an exception
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
        self._guard_idle(self._unsharded)  # those that other forwards have pinned
        self._forward_records.add(self._forward_record)
        gradients = "with" if torch.is_grad_enabled() else "without"
        copied = [unit.name for unit in self._units_by_gather_label.values() if unit.has_gathered_copy]
        inside = f" inside gathered() of {copied[0]!r} and {len(copied) - 1} more" if copied else ""
        self.order.begin_pass(f"forward of {name or 'the model'} {gradients} gradients{inside}")
        self.state_guard.hide_reduced_grads(self._unsharded)
        self._buffer_broadcaster.sync_buffers()

    def _end_forward(self) -> None:
        if torch.is_grad_enabled():
            self.gradients.memory.record_allocated()
        else:
            self._retained.release(self._forward_record)
        self._forward_record = ForwardRecord()  # the hooks on the outputs keep the old one
        self.state_guard.gather_updated_units()
        self._reshard_idle()
        for unit in self._unsharded:  # pinned
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
        """Go through the gathers the other ranks still expect of this forward, so that they need not hang."""
        for event in self.order.remaining_events():
            if (unit := self._units_by_gather_label.get(event)) is not None:
                self._unshard(unit)
                self._reshard_unless_retained(unit)
            elif (unit := self._units_by_copy_label.get(event)) is not None:  # gathered() in a hook, say
                self.order.check(event)
                unit.gather_copy()
                unit.drop_copy()
        self.state_guard.gather_updated_units()

    def _unshard(self, unit: Unit, module: str | None = None) -> None:
        """Make a unit's parameters usable, those of one module or all, and start to gather the unit expected next."""
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
        """Start to gather the unit that is expected next, and to read from disk those after it."""
        for number, event in enumerate(
            islice(
                self.order.iter_expected(self._units_by_gather_label), 1 + (PREFETCH_SHARDS if self._prefetchers else 0)
            )
        ):
            unit = self._units_by_gather_label[event]
            if number == 0:
                self._start_unshard(unit)
            else:
                for flat in unit.flats:
                    flat.prefetch()

    def _start_unshard(self, unit: Unit) -> None:
        """Start a gather, unless under way. What an earlier pass left is gathered anew, as on ranks without it."""
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
        """Release the units no running module belongs to."""
        for unit in tuple(self._unsharded):
            if unit is not except_unit and not self._is_held(unit):
                self._reshard_unless_retained(unit)

    def _reshard_unless_retained(self, unit: Unit) -> None:
        """Release a unit that nobody uses now.

        Pins of another pass keep it in memory, but this rank may be the only one that has them: the forward failed on
        the others, or they have dropped its graph. So its next use is gathered as it is there.
        """
        if unit not in self._retained:
            self._reshard(unit)
        elif not any(
            self._retained.is_retained_for(trace, unit) for trace in (self._forward_record, *self._backward_records)
        ):
            self._unsharded_this_pass.discard(unit)

    def _guard_idle(self, units: Iterable[Unit]) -> None:
        """Have the next use of units noticed that no running module belongs to: it belongs to another frame.

        Not of those that this very forward has pinned: whoever was given their parameters may use them as they are.
        """
        for unit in units:
            if not (
                unit.is_guarded
                or self._is_used_in_forward(unit)
                or self._retained.is_retained_for(self._forward_record, unit)
            ):
                unit.guard()

    def _guard_retained(self) -> None:
        """Have every use of pinned units noticed between passes, unless a forward has given out their parameters.

        Only some ranks may have pinned them, and what is written into the gathered values would be lost.
        """
        for unit in self._unsharded:
            if not (self._is_used_in_forward(unit) or self._retained.has_returned_views(unit)):
                unit.guard()

    # -- backward -----------------------------------------------------------------------------------------------

    def pre_backward(self, call: ModuleCall, record: ForwardRecord) -> None:
        """A gradient has arrived at a frame's output."""
        if self._has_active_backward and torch._C._current_graph_task_id() != self._graph_task_id:
            self._pre_nested_backward(call, record)
        else:
            self._advance_backward_to(call, record)

    def _advance_backward_to(self, call: ModuleCall, record: ForwardRecord) -> None:
        """Backward has come to a frame: see [Note: all ranks come to all frames]."""
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
        """Backward is at a frame: see [Note: what is over in backward]."""
        if call.last_backward_id == self._backward_id:
            return
        call.last_backward_id = self._backward_id
        uses = [call, *call.untracked_uses]
        wanted = [unit for use in uses for unit in use.units]
        for unit, entered in tuple(self._units_in_backward.items()):
            if entered > call.end_tick:
                if all(use.start_tick > call.end_tick for use in self._calls_using(unit)):
                    del self._units_in_backward[unit]
                    self.gradients.on_unit_done(unit, self.needs_grad_sync)
                if unit not in wanted and not self._is_held(unit):
                    self._reshard_unless_retained(unit)
        if self.is_creating_graph:  # the nodes made now save parameters, and no hook will tell of them
            self._held_by_grad_graph.update(wanted)
        for use in uses:
            use.last_backward_id = self._backward_id
            for unit in use.units:
                self._units_in_backward[unit] = use.start_tick
                self._unshard(unit)

    def _pre_nested_backward(self, call: ModuleCall, record: ForwardRecord) -> None:
        """A backward inside this one has come to a frame: see [Note: backward inside backward]."""
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
        """A module runs again inside backward: see [Note: recomputation]."""
        number = self._backward_id if self._has_active_backward else self._backward_id + 1
        hidden = [  # where no hook will tell
            (trace, use)
            for trace in self._forward_records
            for use in trace.calls_by_unit.get(unit, ())
            if use.last_backward_id != number and not use.has_pre_backward_hook
        ]
        if unit not in self._units_in_backward and hidden:
            trace, frame = max(hidden, key=lambda pair: pair[1].end_tick)
            self._advance_backward_to(frame, trace)
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
        inverse = current_inverse_scale()
        self.order.begin_pass("backward" if inverse is None else "backward of a scaled loss")
        self.backward_count += 1
        if self._cublas_workspace is not None:
            self._cublas_workspace.acquire()
        self.gradients.memory.record_allocated()
        self.state_guard.hide_reduced_grads(self._unsharded)
        self.gradients.begin_backward(inverse)
        updates = self.state_guard.backward_listener()
        if updates is not None:
            updates.on_backward_begin(self.backward_count) if self.needs_grad_sync else updates.invalidate()
        if self.gradients.is_partitioned and self.gradients.reduce_queue is None and self.needs_grad_sync:
            self.gradients.reduce_queue = self._agree_on_reduce_queue()

    def _agree_on_reduce_queue(self) -> list[Unit]:
        """The fixed order of reductions: the reverse of rank 0's first forward, which is when units will be over."""
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
        """Autograd has run all nodes."""
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
        """Autograd has dropped a backward, which ended or was left by an exception.

        A thread of autograd's own may be the last to drop it, while the user's goes on: then the next forward aborts.
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
        for reader in self._prefetchers:
            reader.discard()

    # -- between steps ------------------------------------------------------------------------------------------

    def reduce_pending(self) -> None:
        """Reduce what is not reduced yet; the parameters show it from then on, also what somebody has set."""
        self.gradients.reduce_pending()
        if not self.is_running:
            self.state_guard.expose_reduced_grads(self._unsharded)

    def release_retained(self) -> None:
        """The parameters have changed: no backward may use the old values any more."""
        self._retained.clear()
        self._held_by_grad_graph = set()
        self._reshard_idle()
        self._detach_sharded()

    def write_back(self, units: list[Unit], src_rank: int) -> bool:
        """Keep what rank ``source`` of the mesh has written into the units' parameters inside gathered().

        Returns whether that is something else than before.
        """
        for unit in units:
            unit.check_param_data()
        self.state_guard.wait_readers()
        self.state_guard.invalidate_speculation()
        self.order.begin_pass("write")
        changed = torch.zeros(len(units), device=self.comm.device)
        for number, unit in enumerate(units):
            self.order.check(f"write unit {unit.name!r}")
            changed[number] = unit.write_back(src_rank)
        what = "agree on what was written"
        self.order.check(what)
        self.comm.all_reduce_over_mesh(changed, what)
        alone = self.comm.data_parallel_size * self.comm.tensor_axis.size == 1
        known = alone or self.comm.consistency.is_distributed
        flags = self.comm.read_to_host(changed, what) if known else [1.0] * len(units)
        written = [unit for unit, flag in zip(units, flags, strict=True) if flag]
        self.state_guard.on_values_changed(parameter for unit in written for parameter in unit.parameters)
        return bool(written)

    def close(self) -> None:
        """End what is under way beside training: the model is about to be plain again."""
        self.state_guard.wait_readers()
        self.state_guard.wait_updates()
        if self._segment_preallocator is not None:
            self._segment_preallocator.stop_recording()
