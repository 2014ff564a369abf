"""Recorder: notes every operation and every moment of the engine while a model without memory runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.engine.hooks import tensors_in
from zeroshard.engine.units import Plan
from zeroshard.planner.traces.trace import Mark, Moment, Op
from zeroshard.planner.traces.values import Values
from zeroshard.planner.traces.work import DTYPES, flops_of, kind_of, moved_by, name_of, scratch_of, tensors_of

# What torch's checkpointing takes of the host for one block, in operations: 1 ms where one took 48 µs, by the floors in
# docs/benchmarks.md that the host was the limit of.
RECOMPUTED = 20.0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations, and the memory that comes and goes with them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Op | Mark] = []
        self.where = ""
        self.backward = False
        self.values = Values()
        self._known: dict[int, weakref.ref[Any]] = {}  # storages that are alive, by address
        self._freed = 0.0

    def known(self, *tensors: torch.Tensor) -> None:
        """Take memory for granted: parameters, buffers and the batch are counted elsewhere."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def mark(self, moment: Moment, unit: int = -1, nbytes: float = 0) -> None:
        """Note what the engine does now."""
        self.events.append(Mark(moment, unit, nbytes))

    def communicate(self, collective: str, nbytes: float) -> None:
        """Note a collective over the tensor axis."""
        self._note(Op(collective, "nothing", "", 0, nbytes, self._taken(), 0, 0, collective))

    def copied(self, nbytes: float) -> None:
        """Note a copy into memory of the library's."""
        self._note(Op("keep", "plain", "", 0, 2 * nbytes, self._taken(), 0, 0))

    def recompute(self) -> None:
        """Note that a block begins to run again."""
        self._note(Op("recompute", "nothing", "", 0, 0, self._taken(), 0, 0, host=RECOMPUTED))

    def let_go(self) -> None:
        """Note that what was freed up to now was freed before what comes next."""
        if freed := self._taken():
            self._note(Op("let go", "nothing", "", 0, 0, freed, 0, 0))

    def _note(self, op: Op) -> None:
        op.where, op.backward = self.where, self.backward
        self.events.append(op)

    def _taken(self) -> float:
        freed, self._freed = self._freed, 0.0
        return freed

    def _made(self, result: Any) -> float:
        made = 0.0
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, float(storage.nbytes())
            if key not in self._known and tensor.is_meta:
                self._known[key] = weakref.ref(storage, partial(self._gone, key, nbytes))
                made += nbytes
        return made

    def _gone(self, key: int, nbytes: float, _: object) -> None:
        if self._known.pop(key, None) is not None:
            self._freed += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and (value := self.values.item(args[0])) is not None:
            return value
        freed = self._taken()
        result = func(*args, **kwargs)
        self.values.follow(func, args, kwargs, result)
        made = self._made(result)
        kind = kind_of(func, made > 0)
        if kind == "nothing" and not (made or freed):
            return result
        dtypes = (tensor.dtype for tensor in tensors_of((result, args)) if tensor.is_floating_point())
        op = Op(name_of(func), kind, DTYPES.get(next(dtypes, torch.int64), "other"), 0, 0, freed, made, 0)
        if kind != "nothing":
            op.flops, op.moved = flops_of(func, args, kwargs, result), moved_by(func, args, kwargs, result)
            op.scratch = scratch_of(func, args, result)
        self._note(op)
        return result


@dataclass(eq=False)
class _Frame:
    """One run of a module that units belong to."""

    units: tuple[int, ...]
    entered: int
    left: int = -1
    hooked: bool = False
    reached: bool = False


class Walk:
    """Where forward and backward are, and what the engine does there: the moments of ``engine/engine.py``, on paper.

    See [Note: what is over in backward] there. A unit is let go when another module begins, and brought again in
    backward; its gradients are complete when backward has left all modules that use it.
    """

    def __init__(self, model: nn.Module, plans: Sequence[Plan], recorder: Recorder) -> None:
        self._recorder, self._names = recorder, [plan.name for plan in plans]
        self._frames: list[_Frame] = []  # being run, outermost first
        self._all: list[_Frame] = []  # that have been run
        self._live: list[int] = []
        self._open: dict[int, int] = {}  # units that backward is in → when the run it came to was entered
        self._moment = 0
        self._backward = False
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [[parameters[name] for name in plan.parameters] for plan in plans]
        homes: dict[str, tuple[int, ...]] = {"": ()}
        for number, plan in enumerate(plans):
            for name in plan.modules:
                homes[name] = (*homes.get(name, ()), number)
        self._handles = []
        for name, units in homes.items():
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(self._entering(units), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _entering(self, units: tuple[int, ...]) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            if self._backward:
                self._recorder.recompute()
                return
            self._moment += 1
            self._frames.append(_Frame(units, self._moment))
            if any(unit not in self._live for unit in units):
                self._release_idle()
            for unit in units:
                self._bring(unit)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._backward or not self._frames:
            return
        frame = self._frames.pop()
        self._moment += 1
        frame.left = self._moment
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        frame.hooked = bool(outputs) and bool(frame.units or not self._frames)
        for tensor in outputs if frame.hooked else ():
            tensor.register_hook(partial(self._reached, frame))  # type: ignore[no-untyped-call]
        self._all.append(frame)

    def end_forward(self) -> None:
        """The loss is there."""
        self._release_idle()
        self._recorder.let_go()
        self._recorder.mark("end forward")
        self._backward = self._recorder.backward = True

    def end_backward(self) -> None:
        """Backward is over: what is left is complete."""
        for unit in tuple(self._open):
            self._finish(unit)
        for number, parameters in enumerate(self._parameters):
            if any(parameter.grad is not None for parameter in parameters):
                self._finish(number)
        self._release_idle()
        self._recorder.mark("end backward")

    def _bring(self, unit: int) -> None:
        self._recorder.where = self._names[unit]
        if unit not in self._live:
            self._live.append(unit)
            self._recorder.mark("bring", unit)

    def _release(self, unit: int) -> None:
        if unit in self._live:
            self._live.remove(unit)
            self._recorder.mark("release", unit)

    def _release_idle(self) -> None:
        for unit in tuple(self._live):
            if not any(unit in frame.units for frame in self._frames):
                self._release(unit)

    def _reached(self, frame: _Frame, gradient: torch.Tensor) -> None:
        self._reach(frame)

    def _reach(self, frame: _Frame) -> None:
        sweep = [other for other in self._all if other.hooked and not other.reached and other.left > frame.left]
        for other in sorted(sweep, key=lambda other: -other.left):
            self._come_to(other)
        self._come_to(frame)

    def _come_to(self, frame: _Frame) -> None:
        if frame.reached:
            return
        frame.reached = True
        for unit, entered in tuple(self._open.items()):
            if entered > frame.left:
                if all(use.entered > frame.left for use in self._all if unit in use.units):
                    del self._open[unit]
                    self._finish(unit)
                if unit not in frame.units:
                    self._release(unit)
        for unit in frame.units:
            self._open[unit] = frame.entered
            self._bring(unit)

    def _finish(self, unit: int) -> None:
        """Take what autograd has made for a unit: from here on it is the engine's."""
        self._recorder.let_go()
        nbytes = 0.0
        for parameter in self._parameters[unit]:
            if parameter.grad is not None:
                nbytes += parameter.grad.untyped_storage().nbytes()
                parameter.grad = None
        self._recorder.let_go()
        self._recorder.mark("finish", unit, nbytes)
