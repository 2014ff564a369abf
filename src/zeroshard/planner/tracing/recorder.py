"""Record every operation and engine event while a model runs on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.planner.tracing.known_values import KnownValues
from zeroshard.planner.tracing.op_cost import (
    DTYPE_NAMES,
    iter_tensors,
    op_flops,
    op_kind,
    op_moved_bytes,
    op_name,
    op_scratch_bytes,
)
from zeroshard.planner.tracing.trace import EngineEvent, EngineEventKind, Op
from zeroshard.sharding import UnitSpec
from zeroshard.utils.tree import tensors_in

# Host time of torch's checkpointing per block, in operations: 1 ms where one operation took 48 µs, from the host-bound
# measurements in docs/benchmarks.md.
RECOMPUTE_HOST_OPS = 20.0


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations and the memory they allocate and free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Op | EngineEvent] = []
        self.module_name = ""
        self.is_backward = False
        self.known_values = KnownValues()
        self._live_storages: dict[int, weakref.ref[Any]] = {}  # by address
        self._freed_bytes = 0.0

    def ignore_tensors(self, *tensors: torch.Tensor) -> None:
        """Do not count these tensors' memory: parameters, buffers and the batch are counted elsewhere."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live_storages[storage._cdata] = weakref.ref(storage)

    def record_engine_event(self, kind: EngineEventKind, unit: int = -1, nbytes: float = 0) -> None:
        """Record an engine event."""
        self.events.append(EngineEvent(kind, unit, nbytes))

    def record_collective(self, collective: str, nbytes: float) -> None:
        """Record a tensor-parallel collective."""
        self._append_op(Op(collective, "nothing", "", 0, nbytes, self._pop_freed_bytes(), 0, 0, collective))

    def record_copy(self, nbytes: float) -> None:
        """Record a copy into memory that the library owns."""
        self._append_op(Op("keep", "plain", "", 0, 2 * nbytes, self._pop_freed_bytes(), 0, 0))

    def record_recompute(self) -> None:
        """Record the start of a block's recomputation."""
        self._append_op(
            Op("recompute", "nothing", "", 0, 0, self._pop_freed_bytes(), 0, 0, host_ops=RECOMPUTE_HOST_OPS)
        )

    def flush_frees(self) -> None:
        """Record the memory freed so far as freed before the next event."""
        if freed := self._pop_freed_bytes():
            self._append_op(Op("let go", "nothing", "", 0, 0, freed, 0, 0))

    def _append_op(self, op: Op) -> None:
        op.module_name, op.is_backward = self.module_name, self.is_backward
        self.events.append(op)

    def _pop_freed_bytes(self) -> float:
        freed, self._freed_bytes = self._freed_bytes, 0.0
        return freed

    def _track_allocations(self, result: Any) -> float:
        allocated = 0.0
        for tensor in iter_tensors(result):
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, float(storage.nbytes())
            if key not in self._live_storages and tensor.is_meta:
                self._live_storages[key] = weakref.ref(storage, partial(self._on_storage_freed, key, nbytes))
                allocated += nbytes
        return allocated

    def _on_storage_freed(self, key: int, nbytes: float, _: object) -> None:
        if self._live_storages.pop(key, None) is not None:
            self._freed_bytes += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and (value := self.known_values.item(args[0])) is not None
        ):
            return value
        freed = self._pop_freed_bytes()
        result = func(*args, **kwargs)
        self.known_values.propagate(func, args, kwargs, result)
        allocated = self._track_allocations(result)
        kind = op_kind(func, allocated > 0)
        if kind == "nothing" and not (allocated or freed):
            return result
        dtypes = (tensor.dtype for tensor in iter_tensors((result, args)) if tensor.is_floating_point())
        op = Op(op_name(func), kind, DTYPE_NAMES.get(next(dtypes, torch.int64), "other"), 0, 0, freed, allocated, 0)
        if kind != "nothing":
            op.flops, op.moved_bytes = op_flops(func, args, kwargs, result), op_moved_bytes(func, args, kwargs, result)
            op.scratch_bytes = op_scratch_bytes(func, args, result)
        self._append_op(op)
        return result


@dataclass(eq=False)
class _TracedModuleCall:
    """One call of a module, with the units that belong to it."""

    units: tuple[int, ...]
    enter_index: int
    exit_index: int = -1
    has_hook: bool = False
    is_reached: bool = False


class ScheduleRecorder:
    """Records the engine events of forward and backward, as in ``engine/engine.py``.

    See [Note: when a unit is done in backward] there. A unit is resharded when another module begins, and unsharded
    again in backward; its gradients are ready when backward has left all modules that use it.
    """

    def __init__(self, model: nn.Module, unit_specs: Sequence[UnitSpec], recorder: OpRecorder) -> None:
        self._recorder, self._unit_names = recorder, [spec.name for spec in unit_specs]
        self._running_calls: list[_TracedModuleCall] = []  # outermost first
        self._finished_calls: list[_TracedModuleCall] = []
        self._unsharded: list[int] = []
        self._in_backward: dict[int, int] = {}  # units in backward → enter index of the last visited call
        self._call_index = 0
        self._is_backward = False
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [[parameters[name] for name in spec.parameters] for spec in unit_specs]
        units_by_module: dict[str, tuple[int, ...]] = {"": ()}
        for index, spec in enumerate(unit_specs):
            for name in spec.modules:
                units_by_module[name] = (*units_by_module.get(name, ()), index)
        self._handles = []
        for name, units in units_by_module.items():
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(self._pre_forward_hook(units), prepend=True))
            self._handles.append(module.register_forward_hook(self._post_forward_hook))

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _pre_forward_hook(self, units: tuple[int, ...]) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            if self._is_backward:
                self._recorder.record_recompute()
                return
            self._call_index += 1
            self._running_calls.append(_TracedModuleCall(units, self._call_index))
            if any(unit not in self._unsharded for unit in units):
                self._reshard_idle()
            for unit in units:
                self._unshard(unit)

        return enter

    def _post_forward_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_backward or not self._running_calls:
            return
        call = self._running_calls.pop()
        self._call_index += 1
        call.exit_index = self._call_index
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        call.has_hook = bool(outputs) and bool(call.units or not self._running_calls)
        for tensor in outputs if call.has_hook else ():
            tensor.register_hook(partial(self._pre_backward_hook, call))  # type: ignore[no-untyped-call]
        self._finished_calls.append(call)

    def end_forward(self) -> None:
        """Record the end of forward: the loss is computed."""
        self._reshard_idle()
        self._recorder.flush_frees()
        self._recorder.record_engine_event("end forward")
        self._is_backward = self._recorder.is_backward = True

    def end_backward(self) -> None:
        """Record the end of backward: all remaining gradients are ready."""
        for unit in tuple(self._in_backward):
            self._post_backward(unit)
        for index, parameters in enumerate(self._parameters):
            if any(parameter.grad is not None for parameter in parameters):
                self._post_backward(index)
        self._reshard_idle()
        self._recorder.record_engine_event("end backward")

    def _unshard(self, unit: int) -> None:
        self._recorder.module_name = self._unit_names[unit]
        if unit not in self._unsharded:
            self._unsharded.append(unit)
            self._recorder.record_engine_event("bring", unit)

    def _reshard(self, unit: int) -> None:
        if unit in self._unsharded:
            self._unsharded.remove(unit)
            self._recorder.record_engine_event("release", unit)

    def _reshard_idle(self) -> None:
        for unit in tuple(self._unsharded):
            if not any(unit in call.units for call in self._running_calls):
                self._reshard(unit)

    def _pre_backward_hook(self, frame: _TracedModuleCall, gradient: torch.Tensor) -> None:
        self._pre_backward(frame)

    def _pre_backward(self, frame: _TracedModuleCall) -> None:
        pending = [
            other
            for other in self._finished_calls
            if other.has_hook and not other.is_reached and other.exit_index > frame.exit_index
        ]
        for other in sorted(pending, key=lambda other: -other.exit_index):
            self._advance_backward_to(other)
        self._advance_backward_to(frame)

    def _advance_backward_to(self, frame: _TracedModuleCall) -> None:
        if frame.is_reached:
            return
        frame.is_reached = True
        for unit, enter_index in tuple(self._in_backward.items()):
            if enter_index > frame.exit_index:
                if all(call.enter_index > frame.exit_index for call in self._finished_calls if unit in call.units):
                    del self._in_backward[unit]
                    self._post_backward(unit)
                if unit not in frame.units:
                    self._reshard(unit)
        for unit in frame.units:
            self._in_backward[unit] = frame.enter_index
            self._unshard(unit)

    def _post_backward(self, unit: int) -> None:
        """Take a unit's gradients from autograd: from here on the engine owns them."""
        self._recorder.flush_frees()
        nbytes = 0.0
        for parameter in self._parameters[unit]:
            if parameter.grad is not None:
                nbytes += parameter.grad.untyped_storage().nbytes()
                parameter.grad = None
        self._recorder.flush_frees()
        self._recorder.record_engine_event("finish", unit, nbytes)
