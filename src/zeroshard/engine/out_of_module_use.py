"""Parameters that a forward uses outside the modules they belong to.

[Note: parameters used outside their module]
A forward may use a parameter outside its module: a tied weight through ``F.linear``, a child's weight read by its
parent. The access unshards the unit, which stays unsharded until the operation has run. The operation's result gets the
same hook as a module's output: the hook unshards the unit in backward. If the result cannot be hooked (no graph,
reentrant checkpoint, ``torch.func``), the next module call's pre-backward hook also unshards this unit, because
backward visits that call first, if a gradient reaches it. If the result is a view, the calling module can use it until
its forward ends: the unit stays unsharded until then, and the hook of that module call unshards it in backward. So
``x @ weight.t()`` early in the root module's forward keeps the unit in memory for the whole pass;
``F.linear(x, weight)`` does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroshard.engine.autograd_hooks import PreBackwardHook, is_in_backward, outside_functorch, prepend_hook
from zeroshard.engine.parameter import is_functorch_wrapped
from zeroshard.engine.schedule import ForwardRecord, Hold, ModuleCall, Schedule, UnitExecutor
from zeroshard.engine.unit import Unit


class OutOfModuleUse:
    """Unshards units for operations on guarded parameters: see [Note: parameters used outside their module]."""

    def __init__(self, schedule: Schedule[Unit], executor: UnitExecutor[Unit]) -> None:
        self._schedule, self._executor = schedule, executor

    def acquire(self, unit: Unit) -> None:
        """Unshard a unit for an operation; it is held until :meth:`release`, also if the operation acquires others."""
        if not self._schedule.has_hold(unit, Hold.OPERATION):
            with outside_functorch():
                self._acquire(unit)
        self._schedule.hold(unit, Hold.OPERATION)

    def _acquire(self, unit: Unit) -> None:
        if unit.is_partitioned and not is_in_backward():
            if unit not in self._executor.unsharded_this_pass:
                # it may be unsharding already, as the expected next unit
                self._schedule.reshard_idle(except_unit=unit)
            self._schedule.add_untracked_use(unit)
            if unit.is_guarded and unit in self._executor.unsharded_this_pass:
                return  # this operation proceeds; the unit stays guarded
        self._executor.unshard(unit)

    def release(
        self,
        unit: Unit,
        result: object,
        pre_backward: Callable[[ModuleCall[Unit], ForwardRecord[Unit]], None],
    ) -> None:
        """Release the hold of an operation. If the result is a view, keep the unit; otherwise guard it again."""
        schedule = self._schedule
        schedule.drop(unit, Hold.OPERATION)
        if schedule.has_hold(unit, Hold.OPERATION) or not unit.is_partitioned:
            return
        if is_in_backward() or not schedule.running_calls:
            return
        results = result if isinstance(result, (list, tuple)) else (result,)
        tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        use = schedule.last_use(unit)
        if any(unit.owns_storage_of(tensor) for tensor in tensors):
            schedule.add_view_use(unit, use)
            return
        if torch.is_grad_enabled():
            hooked = [tensor for tensor in tensors if tensor.grad_fn is not None and not is_functorch_wrapped(tensor)]
            for tensor in hooked:
                prepend_hook(tensor, PreBackwardHook(pre_backward, use, schedule.record))
            if hooked:
                schedule.mark_hooked(use)
        schedule.guard_idle((unit,))

    def owns_storage_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the storage of a unit that the running module uses."""
        schedule = self._schedule
        calls = () if is_in_backward() else schedule.running_calls[-1:]
        units = [unit for call in calls for unit in (*call.units, *call.view_uses)]
        if len(schedule.running_calls) == 1:  # the model may return what a submodule has returned
            units += schedule.record.retained_units
        return any(unit.is_partitioned and unit.owns_storage_of(tensor) for unit in units)
