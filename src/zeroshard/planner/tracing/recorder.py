"""Record every operation and engine event while a model runs on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.engine import ForwardRecord, ModuleCall, Schedule
from zeroshard.planner.tracing.meta_device import KnownValues, RepeatedOps
from zeroshard.planner.tracing.op_cost import (
    DTYPE_NAMES,
    FLOAT8_PRODUCTS,
    iter_tensors,
    op_flops,
    op_kind,
    op_moved_bytes,
    op_name,
    op_scratch_bytes,
)
from zeroshard.planner.tracing.trace import EngineEvent, EngineEventKind, Op, OpKind
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
        self._repeated_ops = RepeatedOps()

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
        self._append_op(collective, "nothing", moved_bytes=nbytes, collective=collective)

    def record_copy(self, nbytes: float) -> None:
        """Record a copy into memory that the library owns."""
        self._append_op("keep", "plain", moved_bytes=2 * nbytes)

    def record_recompute(self) -> None:
        """Record the start of a block's recomputation."""
        self._append_op("recompute", "nothing", host_ops=RECOMPUTE_HOST_OPS)

    def flush_frees(self) -> None:
        """Record the memory freed so far as freed before the next event."""
        if self._freed_bytes:
            self._append_op("free", "nothing")

    def _append_op(self, name: str, kind: OpKind, freed_bytes: float | None = None, **fields: Any) -> None:
        """Record an operation; ``freed_bytes`` is by default what was freed since the previous one."""
        freed = self._pop_freed_bytes() if freed_bytes is None else freed_bytes
        op = Op(name, kind, freed_bytes=freed, module_name=self.module_name, is_backward=self.is_backward, **fields)
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
        result = self._repeated_ops.run(func, args, kwargs)
        self.known_values.propagate(func, args, kwargs, result)
        allocated = self._track_allocations(result)
        kind = op_kind(func, allocated > 0)
        if kind == "nothing" and not (allocated or freed):
            return result
        dtypes = (tensor.dtype for tensor in iter_tensors((result, args)) if tensor.is_floating_point())
        dtype = "fp8" if func in FLOAT8_PRODUCTS else DTYPE_NAMES.get(next(dtypes, torch.int64), "other")
        cost: dict[str, float] = {}
        if kind != "nothing":
            cost["flops"] = op_flops(func, args, kwargs, result)
            cost["moved_bytes"] = op_moved_bytes(func, args, kwargs, result)
            cost["scratch_bytes"] = op_scratch_bytes(func, args, result)
        self._append_op(op_name(func), kind, freed, dtype=dtype, allocated_bytes=allocated, **cost)
        return result


class RecordingExecutor:
    """Records what the engine's schedule decides; units are indices."""

    def __init__(self, model: nn.Module, unit_specs: Sequence[UnitSpec], recorder: OpRecorder) -> None:
        self.unsharded: list[int] = []
        self.unsharded_this_pass: set[int] = set()
        self._recorder, self._unit_names = recorder, [spec.name for spec in unit_specs]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [[parameters[name] for name in spec.parameters] for spec in unit_specs]

    def unshard(self, unit: int, module: str | None = None) -> None:
        """Record that a unit is all-gathered, unless it is unsharded."""
        self._recorder.module_name = self._unit_names[unit]
        self.unsharded_this_pass.add(unit)
        if unit not in self.unsharded:
            self.unsharded.append(unit)
            self._recorder.record_engine_event("unshard", unit)

    def reshard(self, unit: int) -> None:
        """Record that a unit's full parameters are freed."""
        self.unsharded_this_pass.discard(unit)
        if unit in self.unsharded:
            self.unsharded.remove(unit)
            self._recorder.record_engine_event("reshard", unit)

    def guard(self, unit: int) -> None:
        """Do nothing: the traced model's parameters are plain."""

    def is_trainable(self, unit: int) -> bool:
        """Return whether any parameter of the unit requires a gradient."""
        return any(parameter.requires_grad for parameter in self._parameters[unit])

    def on_grads_ready(self, unit: int) -> None:
        """Take a unit's gradients from autograd: from here on the engine owns them."""
        self._recorder.flush_frees()
        nbytes = 0.0
        for parameter in self._parameters[unit]:
            if parameter.grad is not None:
                nbytes += parameter.grad.untyped_storage().nbytes()
                parameter.grad = None
        self._recorder.flush_frees()
        self._recorder.record_engine_event("reduce", unit, nbytes)

    def finish_remaining_grads(self) -> None:
        """Take the gradients that arrived after their unit was done."""
        for unit, parameters in enumerate(self._parameters):
            if any(parameter.grad is not None for parameter in parameters):
                self.on_grads_ready(unit)


class ScheduleRecorder:
    """Runs the engine's schedule over one forward and backward of a traced model, and records what it decides."""

    def __init__(self, model: nn.Module, unit_specs: Sequence[UnitSpec], recorder: OpRecorder) -> None:
        self._recorder = recorder
        self._executor = RecordingExecutor(model, unit_specs, recorder)
        self._schedule: Schedule[int] = Schedule(self._executor)
        units_by_module: dict[str, tuple[int, ...]] = {"": ()}
        for index, spec in enumerate(unit_specs):
            for name in spec.modules:
                units_by_module[name] = (*units_by_module.get(name, ()), index)
        self._handles = []
        for name, units in units_by_module.items():
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(partial(self._pre_forward, units), prepend=True))
            self._handles.append(module.register_forward_hook(self._post_forward))

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _pre_forward(self, units: tuple[int, ...], module: nn.Module, args: Any) -> None:
        if self._schedule.backward.is_running:
            self._recorder.record_recompute()
            for unit in units:
                self._executor.unshard(unit)
            return
        forward = self._schedule.forward
        call = forward.begin_call(units)
        if len(forward.running_calls) == 1:
            forward.begin()
        forward.enter_call(call)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        forward = self._schedule.forward
        if self._schedule.backward.is_running or not forward.running_calls:
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        detaches_graph = not outputs and any(tensor.requires_grad for tensor in tensors_in(args))
        call = forward.end_call(True, bool(outputs), returns_views=False, detaches_graph=detaches_graph)
        pre_backward = partial(self._pre_backward, call, self._schedule.records.current)
        for tensor in outputs if call.has_pre_backward_hook else ():
            tensor.register_hook(pre_backward)  # type: ignore[no-untyped-call]
        if not forward.running_calls:
            forward.end(is_training=True)
            self._schedule.holds.reshard_idle()

    def _pre_backward(self, call: ModuleCall[int], record: ForwardRecord[int], gradient: torch.Tensor) -> None:
        self._schedule.backward.advance_to(call, record)

    def begin_backward(self) -> None:
        """Record that the loss is computed."""
        self._recorder.flush_frees()
        self._recorder.record_engine_event("end forward")
        self._recorder.is_backward = True
        self._schedule.backward.begin(backward_id=0)

    def end_backward(self) -> None:
        """Record the end of backward: all remaining gradients are ready."""
        self._schedule.backward.visit_remaining()
        self._executor.finish_remaining_grads()
        self._schedule.backward.end()
        self._schedule.holds.reshard_idle()
        self._recorder.record_engine_event("end backward")
