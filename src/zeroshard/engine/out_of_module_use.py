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

import torch

from zeroshard.engine.parameter import is_functorch_wrapped
from zeroshard.engine.schedule import Hold, ModuleCall, Schedule, UnitExecutor
from zeroshard.engine.unit import Unit


class OutOfModuleUse:
    """Unshards units for operations on guarded parameters: see [Note: parameters used outside their module]."""

    def __init__(self, schedule: Schedule[Unit], executor: UnitExecutor[Unit]) -> None:
        self._schedule, self._executor = schedule, executor

    def acquire(self, unit: Unit, is_in_backward: bool) -> None:
        """Unshard a unit for an operation; it is held until :meth:`release`, also if the operation acquires others."""
        holds = self._schedule.holds
        if not holds.has_hold(unit, Hold.OPERATION):
            if is_in_backward or not unit.is_partitioned:
                self._executor.unshard(unit)
            else:
                self._unshard_in_forward(unit)
        holds.hold(unit, Hold.OPERATION)

    def _unshard_in_forward(self, unit: Unit) -> None:
        if unit not in self._executor.unsharded_this_pass:
            # it may be unsharding already, as the expected next unit
            self._schedule.holds.reshard_idle(except_unit=unit)
        self._schedule.forward.add_untracked_use(unit)
        if unit.is_guarded and unit in self._executor.unsharded_this_pass:
            return  # this operation proceeds; the unit stays guarded
        self._executor.unshard(unit)

    def release(
        self, unit: Unit, result: object, is_in_backward: bool
    ) -> tuple[list[torch.Tensor], ModuleCall[Unit]] | None:
        """Release the hold of an operation. If the result is a view, keep the unit; otherwise guard it again.

        Return the tensors to hook for backward, and the use that they belong to.
        """
        forward, holds = self._schedule.forward, self._schedule.holds
        holds.drop(unit, Hold.OPERATION)
        if holds.has_hold(unit, Hold.OPERATION) or not unit.is_partitioned:
            return None
        if is_in_backward or not forward.running_calls:
            return None
        results = result if isinstance(result, (list, tuple)) else (result,)
        tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        use = self._schedule.records.current.calls_by_unit[unit][-1]
        if any(unit.owns_storage_of(tensor) for tensor in tensors):
            forward.add_view_use(unit, use)
            return None
        has_graph = torch.is_grad_enabled()
        hooked = [t for t in tensors if has_graph and t.grad_fn is not None and not is_functorch_wrapped(t)]
        if hooked:
            forward.mark_hooked(use)
        holds.guard_idle((unit,))
        return hooked, use

    def owns_storage_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the storage of a unit that the running module uses."""
        running_calls = self._schedule.forward.running_calls
        units = [unit for call in running_calls[-1:] for unit in (*call.units, *call.view_uses)]
        if len(running_calls) == 1:  # the model may return what a submodule has returned
            units += self._schedule.records.current.retained_units
        return any(unit.is_partitioned and unit.owns_storage_of(tensor) for unit in units)
