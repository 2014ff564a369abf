"""Engine: the four events of a training step, and what begins and ends a forward and a backward.

Module hooks (hooks.py) call :meth:`Engine.pre_forward` and :meth:`Engine.post_forward` around each module that has
units. Hooks on tensors call :meth:`Engine.pre_backward` when a gradient arrives at a module's outputs, and
:meth:`Engine.finalize_backward` at the end. The schedule (schedule.py) decides which units to unshard and reshard, and
when a unit's gradients are complete; the executor does it. The engine reads placements, never a stage number.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from typing import Any, NoReturn

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zeroshard.comm import RanksDisagreeError, describe_error
from zeroshard.engine.context import ShardContext
from zeroshard.engine.float8_flat import SCALES_LABEL, find_float8_scales
from zeroshard.engine.grad_scale import current_inverse_scale
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.module_buffers import BufferBroadcaster
from zeroshard.engine.out_of_module_use import OutOfModuleUse
from zeroshard.engine.parameter import PICKLE_ERROR, param_info
from zeroshard.engine.schedule import ForwardRecord, ModuleCall, Schedule
from zeroshard.engine.sharded_gradient import ParamGrads
from zeroshard.engine.state_guard import StateGuard
from zeroshard.engine.unit import Unit, UnitState
from zeroshard.engine.unit_values import drop_copy, gather_copy
from zeroshard.memory import CublasWorkspace, DiskError, SegmentPreallocator
from zeroshard.sharding import PREFETCH_SHARDS
from zeroshard.utils.profiling import label

COPY_ERROR = (
    "a sharded model cannot be deep-copied: copy it before zeroshard.shard(), or build a second model and load "
    "the state_dict() taken inside `with zeroshard.gathered(model):`"
)
NESTED_CALL_ERROR = (
    "the model was called inside its own forward in a way that zeroshard did not notice, and the units of "
    "the outer call are gone. Call the model before or after that call, or call one of its modules"
)


class Engine:
    """Run the forward and backward of one sharded model: own its units, its gradients and the progress of a pass."""

    def __init__(
        self, context: ShardContext, units: list[Unit], gradients: Gradients, buffers: BufferBroadcaster
    ) -> None:
        self.context, self.comm, self.order = context, context.comm, context.order
        self.units, self.gradients = units, gradients
        self.state_guard = StateGuard(context, units, gradients)
        self.param_grads = ParamGrads(context, gradients, self.state_guard)
        self.executor = ScheduleExecutor(context, units, gradients, self.state_guard.gather_updated_unit)
        self.schedule: Schedule[Unit] = Schedule(self.executor)
        self.out_of_module_use = OutOfModuleUse(self.schedule, self.executor)
        self.backward_count = 0  # since the last step of any optimizer
        self.total_backwards = 0  # since shard()
        self.deferred_error: RuntimeError | None = None  # of a finalizer, which cannot raise: the next forward does
        self.buffer_broadcaster = buffers if buffers.has_buffers else None
        defragments = self.comm.device.type == "cuda" and context.config.defragment
        self._defragmenter = _Defragmenter(context) if defragments else None
        self._forward_thread_id = 0  # of the last forward
        for unit in units:
            unit.access.set_owner(self)

    def __deepcopy__(self, memo: object) -> Engine:
        """Raise: a copy would share shards and collectives with the original."""
        raise RuntimeError(COPY_ERROR)

    def __reduce__(self) -> NoReturn:
        """Raise: see :data:`PICKLE_ERROR`."""
        raise RuntimeError(PICKLE_ERROR)

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is running."""
        return bool(self.schedule.forward.running_calls) or is_in_backward()

    # -- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, units: tuple[Unit, ...], name: str, is_root: bool) -> None:
        """Unshard the units of a hooked module that is about to run. ``is_root``: it is the model itself."""
        if is_in_backward():
            for unit in units:
                self._pre_recompute(unit)
            return
        schedule = self.schedule.forward
        if is_root and schedule.running_calls:  # an earlier forward raised, and no hook could see it
            self._abort_forward()
        call = schedule.begin_call(units)  # first: if anything below raises, on_forward_error() ends it
        if len(schedule.running_calls) == 1:
            self._begin_forward(name)
        schedule.enter_call(call, name)
        call.name, call.label = name, label("forward {!r}", name)
        call.label.__enter__()

    def post_forward(
        self, outputs: list[torch.Tensor], stored_tensors: list[torch.Tensor], returns_views: bool, detaches_graph: bool
    ) -> None:
        """Record the module call that has just ended, hook its outputs for backward, and guard its units.

        ``outputs`` are its differentiable output tensors, ``stored_tensors`` those it stores: see [Note: losses stored
        as attributes]. ``returns_views``: some output is a parameter or shares its storage. ``detaches_graph``: some
        input is differentiable and no output is.
        """
        schedule, record, is_training = self.schedule.forward, self.schedule.records.current, torch.is_grad_enabled()
        if not schedule.running_calls:
            raise RuntimeError(NESTED_CALL_ERROR)
        call = schedule.end_call(is_training, bool(outputs), returns_views, detaches_graph)
        if call.has_pre_backward_hook:
            PreBackwardHook(self, call, record).register((*outputs, *stored_tensors))
        if not schedule.running_calls:
            if returns_views:
                self.schedule.holds.record_returned_views(record)
                for unit in record.retained_units:
                    unit.has_returned_views = True
            self._end_forward(is_training)

    def on_forward_error(self, error: BaseException | None) -> None:
        """Handle an exception in the forward of a hooked module."""
        schedule = self.schedule.forward
        if not schedule.running_calls or schedule.fail_call():
            return
        if isinstance(error, DiskError):  # parameters could not be read: the other ranks already wait in the all-gather
            self.comm.consistency.announce("note", str(error))
        elif not isinstance(error, RanksDisagreeError) and self.state_guard.has_valid_states:
            # only with valid values to send
            self.executor.drain_collectives(self.schedule.holds.reshard_unless_retained)
            self.state_guard.gather_updated_units()
            if error is not None:
                self.comm.consistency.announce("note", f"its forward raised {describe_error(error)}")
        with suppress(RanksDisagreeError) if isinstance(error, RanksDisagreeError) else nullcontext():
            self._abort_forward()  # later failures repeat the first, which says more

    def pre_model_forward(self, inputs: Iterable[torch.Tensor]) -> None:
        """Report the input size of the root module's forward to the segment preallocator."""
        if self._defragmenter is not None and torch.is_grad_enabled() and not self.is_running:
            self._defragmenter.segments.on_forward_begin(sum(tensor.numel() for tensor in inputs))

    def _begin_forward(self, name: str) -> None:
        if self.deferred_error is not None:
            error, self.deferred_error = self.deferred_error, None
            raise error
        if self.schedule.backward.is_running:  # it ended with an exception
            self.abort_backward()
        is_training = torch.is_grad_enabled()
        self.state_guard.check_before_forward()
        if is_training:
            self.gradients.memory.make_persistent()
        if self._defragmenter is not None:
            self._defragmenter.workspace.acquire()
        self._forward_thread_id = threading.get_ident()
        self.schedule.forward.begin()
        gathered = [unit.name for unit in self.executor.partitioned_units if unit.has_gathered_copy]
        inside = f" inside gathered() of {gathered[0]!r} and {len(gathered) - 1} more" if gathered else ""
        gradients = "with" if is_training else "without"
        self.order.begin_pass(f"forward of {name or 'the model'} {gradients} gradients{inside}")
        self.state_guard.hide_reduced_grads(self.executor.unsharded)
        if self.buffer_broadcaster is not None:
            self.buffer_broadcaster.sync_buffers()

    def _end_forward(self, is_training: bool) -> None:
        if is_training:
            self.gradients.memory.record_allocated()
        self.schedule.forward.end(is_training)
        self.state_guard.gather_updated_units()
        self.schedule.holds.reshard_idle()
        for unit in self.executor.unsharded:  # retained
            unit.wait_for_unshard()
        self.schedule.holds.guard_retained()
        if not is_training:
            self.executor.detach_sharded()
        self.state_guard.expose_reduced_grads(self.executor.unsharded)

    def _abort_forward(self) -> None:
        self.schedule.forward.abort()
        self._reset_after_pass()

    # -- backward -----------------------------------------------------------------------------------------------

    def pre_backward(self, call: ModuleCall[Unit], record: ForwardRecord[Unit]) -> None:
        """Reduce the units that are done, and unshard those of a module call: a gradient has arrived at its output."""
        backward = self.schedule.backward
        backward.is_creating_graph = torch.is_grad_enabled()
        with outside_functorch(), label("pre_backward {!r}", call.name):
            if backward.is_running and torch._C._current_graph_task_id() != backward.backward_id:
                backward.visit_nested(call, record)
            else:
                self._advance_backward_to(call, record)

    def finalize_backward(self) -> None:
        """Reduce what is left, wait for all reductions and reshard: autograd has run all nodes."""
        if self.schedule.backward.is_running:
            with outside_functorch(), label("finalize_backward"):
                self.schedule.backward.visit_remaining()
                self.gradients.finalize_backward(self.executor.needs_grad_sync)
                self.schedule.backward.end()
                self._reset_after_pass()

    def _advance_backward_to(self, call: ModuleCall[Unit], record: ForwardRecord[Unit]) -> None:
        if not self.schedule.backward.is_running:
            self._begin_backward()
        self.schedule.backward.advance_to(call, record)

    def _pre_recompute(self, unit: Unit) -> None:
        """Unshard a unit whose module runs again inside backward: see [Note: recomputation]."""
        unhooked = self.schedule.backward.find_unhooked_call(unit)
        if unhooked is not None:
            self._advance_backward_to(*unhooked)
        self.executor.unshard(unit)

    def _begin_backward(self) -> None:
        self.state_guard.check_states_reloaded()
        if self.state_guard.has_averages:
            self.state_guard.check_not_averaged("a backward")
        self.state_guard.detect_forward_edits()
        backward_id = torch._C._current_graph_task_id()
        self.schedule.backward.begin(backward_id)
        self.schedule.backward.keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        torch.autograd.Variable._execution_engine.queue_callback(
            BackwardEndCallback(self, backward_id, self._forward_thread_id)
        )
        inverse_scale, needs_sync = current_inverse_scale(), self.executor.needs_grad_sync
        self.backward_count, self.total_backwards = self.backward_count + 1, self.total_backwards + 1
        if self.gradients.local_sums.is_used:
            self.gradients.local_sums.begin_backward(self.backward_count, needs_sync)
        scaled = "" if inverse_scale is None else " of a scaled loss"
        self.order.begin_pass(f"backward{scaled}{self.gradients.local_sums.hops.value}")
        if self._defragmenter is not None:
            self._defragmenter.workspace.acquire()
        self.gradients.memory.record_allocated()
        self.state_guard.hide_reduced_grads(self.executor.unsharded)
        self.gradients.begin_backward(inverse_scale)
        listeners = self.gradients.reducer.listeners
        if listeners:
            listeners.on_backward_begin(self.total_backwards) if needs_sync else listeners.invalidate()
        if self.gradients.is_partitioned and not self.gradients.reduce_queue.is_agreed and needs_sync:
            ticks = {unit: self.schedule.backward.first_use_tick(unit) for unit in self.gradients.units}
            used = sorted((unit for unit in ticks if ticks[unit] is not None), key=lambda unit: -(ticks[unit] or 0))
            self.gradients.reduce_queue.agree(used, self.context)

    def abort_backward(self) -> None:
        """End a backward that has raised."""
        self.gradients.abort_backward()
        self.schedule.backward.end()
        self._reset_after_pass()

    def _reset_after_pass(self) -> None:
        self.schedule.holds.reshard_idle()
        self.schedule.holds.guard_retained()
        self.executor.detach_sharded()
        self.state_guard.expose_reduced_grads(self.executor.unsharded)

    # -- what parameters ask for ---------------------------------------------------------------------------------

    def acquire_for_op(self, unit: Unit) -> bool:
        """Unshard a unit for an operation on a guarded parameter; return whether that is possible now.

        See [Note: parameters used outside their module]. If so, the unit is held until :meth:`release_after_op`.
        """
        self.state_guard.check_states_reloaded()
        if unit.is_partitioned and not self.is_running:
            return False
        with outside_functorch():
            self.out_of_module_use.acquire(unit, is_in_backward())
        return True

    def release_after_op(self, unit: Unit, result: object) -> None:
        """Release a unit after an operation, whose result may be a view. Call it after each acquire_for_op()."""
        hooked = self.out_of_module_use.release(unit, result, is_in_backward())
        if hooked is not None:
            tensors, use = hooked
            PreBackwardHook(self, use, self.schedule.records.current).register(tensors)

    # -- between steps ------------------------------------------------------------------------------------------

    def reduce_pending(self) -> None:
        """Reduce all pending gradients, also those that the user has set, and expose them on the parameters."""
        self.gradients.reduce_pending()
        if not self.is_running:
            self.state_guard.expose_reduced_grads(self.executor.unsharded)

    def release_retained(self) -> None:
        """Drop all retained units: the parameters have changed, and no backward may use the old values."""
        self.schedule.holds.clear()
        self.schedule.holds.reshard_idle()
        self.executor.detach_sharded()

    def finish_write(self) -> None:
        """Refresh the parameters from written shards and masters; drop retained units, which have the old values."""
        self.state_guard.sync_from_masters()
        self.release_retained()

    def close(self) -> None:
        """Wait for all background work: the model is about to be unwrapped."""
        self.state_guard.prepare_write()
        if self._defragmenter is not None:
            self._defragmenter.segments.stop_recording()


class ScheduleExecutor:
    """Performs what the schedule decides: see :class:`zeroshard.engine.schedule.UnitExecutor`."""

    def __init__(
        self,
        context: ShardContext,
        units: list[Unit],
        gradients: Gradients,
        gather_updated_unit: Callable[[Unit], None],
    ) -> None:
        self.unsharded: list[Unit] = []  # partitioned units that are unsharded or unsharding
        self.unsharded_this_pass: set[Unit] = set()  # in this forward or backward, and not resharded since
        self.needs_grad_sync = True  # False inside no_sync(): backward only sums locally
        self.partitioned_units = [unit for unit in units if unit.is_partitioned]
        self._order, self._comm, self._gradients = context.order, context.comm, gradients
        self._gather_updated_unit = gather_updated_unit
        self._has_prefetch = context.config.prefetch
        self._units_by_gather_label = {unit.all_gather_label: unit for unit in self.partitioned_units}
        self._units_by_copy_label = {unit.gather_copy_label: unit for unit in self.partitioned_units}
        self._prefetchers = {flat.prefetcher for unit in units for flat in unit.flats if flat.prefetcher is not None}
        self._float8_scales = find_float8_scales([flat for unit in units for flat in unit.flats])
        self._prefetch_depth = 1 + (PREFETCH_SHARDS if self._prefetchers else 0)

    def is_trainable(self, unit: Unit) -> bool:
        """Return whether any parameter of the unit requires a gradient."""
        return unit.is_trainable

    def unshard(self, unit: Unit, module: str | None = None) -> None:
        """Unshard a unit for one module, or for all, and prefetch the unit that is expected next."""
        if not unit.is_partitioned or (unit in self.unsharded_this_pass and unit.state is UnitState.UNSHARDED):
            if unit.state is UnitState.STALE:
                self._gather_updated_unit(unit)
            unit.wait_for_unshard(module)
        else:
            self._order.check(unit.all_gather_label)
            self._start_unshard(unit)
            unit.wait_for_unshard(module)
            self.unsharded_this_pass.add(unit)
            if self._has_prefetch:
                self._prefetch()

    def _prefetch(self) -> None:
        """Start the all-gather of the unit that is expected next, and the disk reads of those after it."""
        expected = islice(self._order.iter_expected(self._units_by_gather_label), self._prefetch_depth)
        for position, event in enumerate(expected):
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
            unit in self.unsharded_this_pass and unit.state is UnitState.UNSHARDED
        ):
            return
        if self._float8_scales is not None and self._float8_scales.are_stale:
            self._order.check(SCALES_LABEL)
            self._float8_scales.refresh(self._comm)
        unit.start_unshard()
        if unit not in self.unsharded:
            self.unsharded.append(unit)

    def reshard(self, unit: Unit) -> None:
        """Free the full parameters of a unit."""
        self.unsharded_this_pass.discard(unit)
        if unit in self.unsharded:
            self.unsharded.remove(unit)
            with label("reshard {!r}", unit.name):
                unit.reshard()

    def guard(self, unit: Unit) -> None:
        """Intercept the next use of an unsharded unit."""
        unit.guard()

    def on_grads_ready(self, unit: Unit) -> None:
        """Accumulate or reduce the gradients of a unit, which are complete on this rank."""
        self._gradients.on_unit_done(unit, self.needs_grad_sync)

    def drain_collectives(self, reshard: Callable[[Unit], None]) -> None:
        """Take part in the all-gathers that the other ranks still expect in this pass, so that they do not hang.

        Each event is an all-gather there, also of a unit that is still unsharded here.
        """
        for event in self._order.remaining_events():
            self.unsharded_this_pass.clear()
            if (unit := self._units_by_gather_label.get(event)) is not None:
                self.unshard(unit)
                reshard(unit)
            elif (unit := self._units_by_copy_label.get(event)) is not None:  # e.g. gathered() in a hook
                self._order.check(event)
                gather_copy(unit, self._comm)
                drop_copy(unit)

    def detach_sharded(self) -> None:
        """Point the parameters of sharded units at placeholders, and forget prefetched disk reads: a pass is over."""
        for unit in self.partitioned_units:
            unit.detach_storage()
        for prefetcher in self._prefetchers:
            prefetcher.discard()


class _Defragmenter:
    """What keeps a GPU's memory unfragmented (``Config.defragment``): preallocated segments, one cuBLAS workspace."""

    def __init__(self, context: ShardContext) -> None:
        self.segments = SegmentPreallocator(context.comm.device)
        self.workspace = CublasWorkspace(context.pool)


class PreBackwardHook:
    """Hook on the outputs of a module call: it runs when backward reaches one of them."""

    __slots__ = ("_call", "_engine", "_record")

    def __init__(self, engine: Engine, call: ModuleCall[Unit], record: ForwardRecord[Unit]) -> None:
        self._engine, self._call, self._record = engine, call, record

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hook tensors, before their other hooks: these may run a backward that needs the unit's parameters."""
        for tensor in tensors:
            tensor.register_hook(self)  # type: ignore[no-untyped-call]
            hooks = tensor._backward_hooks
            if hooks is not None and len(hooks) > 1:
                *others, own = hooks.items()
                hooks.clear()
                hooks.update([own, *others])

    def __call__(self, gradient: torch.Tensor) -> None:
        self._engine.pre_backward(self._call, self._record)


class BackwardEndCallback:
    """Callback that autograd runs at the end of a backward, and drops without a call if the backward raises.

    In the second case the finalizer ends the backward. Without it, parameters would stay as autograd knows them: code
    that clears or reads gradients after the exception would miss those of earlier backwards.
    """

    def __init__(self, engine: Engine, backward_id: int, forward_thread_id: int) -> None:
        self._engine, self._backward_id, self._forward_thread_id = weakref.ref(engine), backward_id, forward_thread_id

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.finalize_backward()

    def __del__(self) -> None:
        """Abort the backward, unless it has ended.

        An autograd thread may be the last to drop it, while the user's thread continues: then the next forward aborts.
        """
        engine = self._engine()
        if engine is None or threading.get_ident() != self._forward_thread_id:
            return
        backward = engine.schedule.backward
        if backward.is_running and backward.backward_id == self._backward_id:
            try:
                with outside_functorch():
                    engine.abort_backward()
            except RuntimeError as error:  # a finalizer cannot raise: the next forward raises it
                engine.deferred_error = error.with_traceback(None)


def engine_of(parameter: torch.Tensor) -> Engine | None:
    """Return the engine of a managed parameter's model, None for any other tensor."""
    info = param_info(parameter)
    owner = info.owner() if info is not None else None
    return owner if isinstance(owner, Engine) else None


def has_pre_backward_hook(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a :class:`PreBackwardHook`."""
    return any(type(hook) is PreBackwardHook for hook in (tensor._backward_hooks or {}).values())


def is_in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


_NULL_CONTEXT = nullcontext()


def outside_functorch() -> AbstractContextManager[Any]:
    """Return a context outside all torch.func transforms: an active one would wrap every tensor created in it."""
    is_inactive = torch._C._functorch.peek_interpreter_stack() is None
    return _NULL_CONTEXT if is_inactive else temporarily_clear_interpreter_stack()
