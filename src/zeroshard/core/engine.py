"""Engine: follows the forwards and backwards of a model, through hooks, and moves its units."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
import torch._compile
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.axis import all_reduce
from zeroshard.core.buffers import BufferBroadcaster
from zeroshard.core.checks.steps import Groups, digest
from zeroshard.core.context import Context
from zeroshard.core.flat import Flat
from zeroshard.core.gradient import Gradient
from zeroshard.core.handle import GradientHandle, is_in_backward
from zeroshard.core.last_backward import LastBackward
from zeroshard.core.loss_scale import RUNNING, LossScale, inverse_scale
from zeroshard.core.norms import norms_over_ranks
from zeroshard.core.order import Kind, Order
from zeroshard.core.outputs import Attributes, tensors_with_graph
from zeroshard.core.passes import BackwardPass, Call, ForwardPass
from zeroshard.core.reduce import Reducer
from zeroshard.core.unit import Unit, UnitState
from zeroshard.memory.streams import record_blocking_event
from zeroshard.utils.tree import tensors_in


class Engine:
    """The states of one model, and what moves them.

    Module hooks tell when a module begins and ends; hooks on its outputs tell when backward reaches it. The engine has
    units gathered before they are used, gradients reduced when they are complete, and both forgotten afterwards.
    """

    def __init__(
        self, model: nn.Module, units: list[Unit], units_of: dict[nn.Module, list[Unit]], context: Context
    ) -> None:
        self.model = model
        self.units = units
        self.context = context
        self.axes = context.axes
        self.device = context.device
        self.observers = context.observers
        self.flats = [flat for unit in units for flat in unit.flats]
        self.gradients = [gradient for unit in units for gradient in unit.gradients]
        self.gradient_of = {gradient.flat: gradient for gradient in self.gradients}
        self.order = Order(context.checker)
        self.place: dict[int, tuple[Flat, int]] = {}  # of each parameter, by id
        for flat in self.flats:
            self.place.update({id(parameter): (flat, index) for index, parameter in enumerate(flat.parameters)})
        self._units_of = units_of
        self._attributes = {module: Attributes(module, units_of.keys()) for module in units_of}
        self._unit_of = {flat: unit for unit in units for flat in unit.flats}
        config = context.config
        self._prefetches = config.prefetch
        self._following: Unit | None = None  # what is probably gathered next
        has_buffers = config.broadcast_buffers and next(model.buffers(), None) is not None
        self._buffers = BufferBroadcaster(model, context.axes, self.order) if has_buffers else None
        # passes
        self._tick = 0
        self._running: list[Call] = []
        self._held: list[Unit] = []  # until the step: nothing tells when a graph has used them
        self._forward = ForwardPass()
        self._waiting: weakref.WeakSet[ForwardPass] = weakref.WeakSet()  # for a backward
        self._backward: BackwardPass | None = None
        self._callback: Callable[[], object] = _nothing  # ends that backward; autograd forgets it after an error
        self.gathered_count = 0  # running blocks of gathered()
        self._is_unseen = False  # a backward runs that no module has seen
        self._keeps_units = False  # create_graph: the new graph uses them
        self._is_new_graph_used = False  # a backward has gone through it
        is_fp16 = config.precision == "fp16"
        self.loss_scale = LossScale(config.loss_scale, self.device) if is_fp16 else None
        # reductions
        self.syncs = True  # False inside no_sync()
        self._last_backward = LastBackward(config.backwards)
        is_final = [gradient.flat.held_placements == gradient.flat.grad_placements for gradient in self.gradients]
        self._reduces = True  # this backward reduces some gradients
        self._is_always_last = all(is_final)  # no backward has to be the last of a step to reduce everything
        self._reduces_always = any(gradient.flat.reduces_every_backward for gradient in self.gradients)
        self._is_last = True  # this backward brings all gradients to their placements
        self._reducer = Reducer(self.gradients, config.bucket_size, config.ring, self.device)
        self._schedule: list[Unit] | None = None  # in which order units are reduced, on all ranks
        self._queue: deque[Unit] = deque()  # to be reduced in this backward
        self._ready: set[Unit] = set()
        self._used_outside: dict[int, Unit] = {}  # of parameters, by id: a gradient may arrive after those of modules
        self._arrived: set[int] = set()  # of which one has arrived in this backward
        self._has_late = False  # a gradient has arrived after its unit was done
        self._launched: list[tuple[Gradient, list[bool]]] = []  # with which parameters have a summand
        self._sent = b""  # in the last agreement on presence
        self._flags = torch.empty(0, dtype=torch.uint8, device=self.device)  # the same
        self.answers: deque[tuple[torch.Tensor, torch.Event | None]] = deque()  # whether ranks agree, and from when on
        self.groups: list[Groups] = []  # of each optimizer
        self.hooks: list[RemovableHandle] = []  # on modules and parameters
        engine = weakref.ref(self)  # a parameter owns its hooks, and the garbage collector does not see that

        def on_accumulated(number: int, parameter: torch.Tensor) -> None:
            found = engine()
            if found is None:
                return
            if found._used_outside:
                found._arrived.add(id(parameter))
            if found._backward is None:
                found._on_unseen_backward(parameter)
            elif found.units[number] in found._ready and found.units[number] not in found._queue:
                found._has_late = True

        for number, unit in enumerate(units):
            for gradient in unit.gradients:
                gradient.reduce_pending = self.finish_gradients
                gradient.before_gather = partial(self._before_gather, unit)
                gradient.norms = self.norms
            for flat in unit.flats:
                for parameter in flat.parameters:
                    parameter._zeroshard_core = self  # type: ignore[attr-defined]
                    if flat.is_trainable:
                        hook = parameter.register_post_accumulate_grad_hook(partial(on_accumulated, number))  # type: ignore[no-untyped-call]
                        self.hooks.append(hook)
        for module in units_of:
            before = torch._compile._disable_dynamo(partial(self._pre_forward, module))
            after = torch._compile._disable_dynamo(partial(self._post_forward, module))
            last = module.register_forward_hook(after, always_call=True)
            self.hooks += [module.register_forward_pre_hook(before, prepend=True), last]
            if module is model:
                self._last_hook = last.id
        self.reshard_all()
        self.observers.on_values_changed(self)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("a sharded model or optimizer cannot be copied or pickled: this rank has a part of it")

    # -- units --------------------------------------------------------------------------------------------------

    def unshard(self, units: list[Unit], is_backward: bool = False) -> None:
        """Make units usable, and start to gather the one that probably follows.

        ``is_backward``: autograd needs values, and no parameters, so replicated units stay as they are.
        """
        absent = [unit for unit in units if unit.state is not UnitState.UNSHARDED]
        if is_backward:
            absent = [unit for unit in absent if unit.is_sharded]
        if not absent:
            return
        with torch._C._DisableFuncTorch(), torch.no_grad():
            self._following = None
            for unit in absent:
                if unit.is_sharded:
                    self.order.record(Kind.GATHER, unit)
                    unit.start_unshard()
                    self._following = self.order.next_gather()
            if self._following is not None and self._prefetches:
                self._following.start_unshard()
            for unit in absent:
                unit.wait()
                self.observers.on_unsharded(unit)

    def reshard(self, unit: Unit) -> None:
        """Free a unit, if nothing uses it, and it is not the one that probably follows. Guard a replicated one."""
        if unit.users or unit.state is UnitState.SHARDED:
            return
        if not unit.is_sharded:
            if unit.state is UnitState.UNSHARDED:
                unit.keep()
        else:
            if unit.state is UnitState.UNSHARDED:
                self.observers.on_reshard(unit)
            if unit is self._following:
                unit.keep()
            else:
                unit.reshard()

    def reshard_all(self) -> None:
        """Free all units that nothing uses, also those that were prefetched in vain."""
        self._following = None
        for unit in self.units:
            self.reshard(unit)

    @contextmanager
    def using(self, units: list[Unit]) -> Iterator[None]:
        """Have units in memory inside the context."""
        self.unshard(units)
        for unit in units:
            unit.users += 1
        try:
            yield
        finally:
            self._following = None
            for unit in units:
                unit.users -= 1
                self.reshard(unit)

    @property
    def is_running(self) -> bool:
        """Whether a module call is running."""
        return bool(self._running)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter."""
        flat, index = self.place[id(parameter)]
        return flat.names[index]

    def use_outside(self, parameter: nn.Parameter) -> None:
        """Have a parameter in memory that code outside its module uses: until the running call ends."""
        unit = self._unit_of[self.place[id(parameter)][0]]
        if torch.is_grad_enabled():
            self._used_outside[id(parameter)] = unit
        if not unit.is_sharded:
            unit.wait()
            if not self._running:
                unit.keep()
            self.observers.on_used_outside(unit)
        elif self._backward is not None and is_in_backward():
            self._backward.open.add(unit)
            self.unshard([unit])
        elif self._running:
            call = self._running[-1]
            unit.users += 1
            call.units.append(unit)
            self.unshard([unit])
        else:
            raise RuntimeError(
                f"the values of {self.name_of(parameter)!r} are sharded, and no forward or backward of the model runs: "
                "use zeroshard.gathered(model) or zeroshard.full_parameter(model, name)"
            )

    @torch.no_grad()
    def write_outside(self, parameter: nn.Parameter, values: torch.Tensor) -> bool:
        """Replace the values of a sharded parameter: by the same ones on all ranks, which each takes its part of.

        Return False where the whole parameter has to be written.
        """
        flat, index = self.place[id(parameter)]
        unit = self._unit_of[flat]
        if self._running or self._backward is not None or not unit.is_sharded:
            return False
        self.order.record(Kind.WRITE, unit)
        values = values.to(flat.full).expand(parameter.shape)
        own = flat.elements(values, index).view(torch.uint8).sum(dtype=torch.int64)
        if all_reduce(torch.stack((own, -own)), self.axes, dist.ReduceOp.MAX).sum():
            raise ValueError(f"the ranks have written other values into {self.name_of(parameter)!r}: write the same")
        unit.forget_prefetched()
        flat.adopt_one(values, index)
        torch.autograd.graph.increment_version(parameter)
        return True

    # -- forward ------------------------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, *_: object) -> None:
        if is_in_backward():
            self._recompute(module)
            return
        if not self._running:
            self._begin_forward()
        self._tick += 1
        call = Call(module, list(self._units_of[module]), self._tick)
        self._running.append(call)
        for unit in call.units:
            unit.users += 1
        self.unshard(call.units)

    def _begin_forward(self) -> None:
        self.abort_backward()
        self._forward = ForwardPass()
        self._waiting.add(self._forward)
        if self._is_new_graph_used:
            self._keeps_units = False
        self.order.begin(Kind.FORWARD)
        if not self._keeps_units:
            self.reshard_all()
        self.model._forward_hooks.move_to_end(self._last_hook)  # type: ignore[attr-defined]  # others use parameters
        if self._buffers is not None:
            self._buffers.sync()
        self.observers.on_forward_begin(self)

    def _post_forward(self, module: nn.Module, _: nn.Module, args: object, output: object) -> None:
        is_own = bool(self._running) and self._running[-1].module is module
        if is_in_backward() or not is_own:
            return
        call = self._running.pop()
        self._tick += 1
        call.end = self._tick
        self._forward.calls.append(call)
        has_graph = torch.is_grad_enabled()
        if has_graph and torch._C._functorch.peek_interpreter_stack() is None:  # no hooks on what vmap and grad make
            for tensor in tensors_with_graph(output) + self._attributes[module].tensors():
                tensor.register_hook(partial(self._on_gradient, call, self._forward))  # type: ignore[no-untyped-call]
                call.is_hooked = True
        is_hidden = has_graph and not call.is_hooked and any(unit.is_trainable for unit in call.units)
        returned = self._returned_units(output) if any(unit.is_sharded for unit in call.units) else set()
        users = self._running[-1].units if self._running else self._held
        for unit in call.units:
            if unit.is_sharded and (is_hidden or unit in returned):  # a graph may use it without a hook
                users.append(unit)
            else:
                unit.users -= 1
                self.reshard(unit)

    def _returned_units(self, output: object) -> set[Unit]:
        """Return the units of which a module has returned parameters, or views of them."""
        tensors = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        bases = [tensor if tensor._base is None else tensor._base for tensor in tensors]
        return {self._unit_of[self.place[id(base)][0]] for base in bases if id(base) in self.place}

    # -- backward -----------------------------------------------------------------------------------------------

    def _on_gradient(self, call: Call, forward: ForwardPass, gradient: torch.Tensor) -> None:
        self._begin_backward().add(forward)
        self._visit(call)

    def _on_unseen_backward(self, parameter: torch.Tensor) -> None:
        """A gradient has arrived in a backward that no module has seen: keep it on this rank until it is needed."""
        if not self._is_unseen:
            self._is_unseen = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_unseen_backward)
        if RUNNING or self.loss_scale is not None:
            flat, index = self.place[id(parameter)]
            self.gradient_of[flat].set_summand_factor(inverse_scale(), arrived=index)

    def _end_unseen_backward(self) -> None:
        self._is_unseen = False
        if self._backward is None:
            for gradient in self.gradients:
                gradient.collect()

    def _begin_backward(self) -> BackwardPass:
        if self._backward is not None and self._callback() is not None:
            return self._backward
        if self._backward is not None:
            self._forget_backward()
        self._backward = BackwardPass()
        self._is_new_graph_used = self._keeps_units and not torch.is_grad_enabled()
        self._keeps_units = self._keeps_units or torch.is_grad_enabled()
        if RUNNING or self.loss_scale is not None:  # the loss may have the scale of another model
            for gradient in self.gradients:
                gradient.set_summand_factor(inverse_scale())
        self._is_last = self.syncs and (self._last_backward.begin() or self._is_always_last)
        self._reduces = self.syncs and (self._is_last or self._reduces_always)
        for forward in self._waiting:
            self._backward.expect(forward)
        self.order.begin(Kind.BACKWARD)
        self._queue = deque(self._agree_on_schedule(self._backward) if self._reduces else ())
        self._ready.clear()
        self._has_late = False
        self.observers.on_backward_begin(self)
        callback = partial(self._end_backward)
        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        return self._backward

    def _agree_on_schedule(self, backward: BackwardPass) -> list[Unit]:
        """Return the order of reductions: that in which the first rank's units are done in the first backward."""
        if self._schedule is None:
            trained = [unit for unit in self.units if unit.is_trainable]
            trained.sort(key=lambda unit: -backward.first_use.get(unit, -1))
            numbers = {unit: number for number, unit in enumerate(self.units)}
            ordered = torch.tensor([numbers[unit] for unit in trained], device=self.device)
            if any(axis.size > 1 for axis in self.axes):
                self.order.record(Kind.SCHEDULE)
                for axis in reversed(self.axes):
                    axis.broadcast(ordered)
            self._schedule = [self.units[number] for number in ordered.tolist()]
        return self._schedule

    def _visit(self, call: Call) -> None:
        assert self._backward is not None
        for each in self._backward.calls_until(call):
            for unit in self._backward.done_before(each):
                self._on_done(unit)
            self._backward.open.update(each.units)
            self.unshard(each.units, is_backward=True)

    def _recompute(self, module: nn.Module) -> None:
        """A checkpoint runs a module again, inside a backward."""
        backward = self._begin_backward()
        hidden = backward.unhooked_call(module)
        if hidden is not None:
            self._visit(hidden)
        units = self._units_of[module]
        backward.open.update(units)
        self.unshard(units)

    def _on_done(self, unit: Unit) -> None:
        """A unit's gradients are complete: reduce those of the units that are first in the agreed order."""
        if not self._keeps_units:
            self.reshard(unit)
        self._ready.add(unit)
        awaited = {late for number, late in self._used_outside.items() if number not in self._arrived}
        while self._queue and self._queue[0] in self._ready and self._queue[0] not in awaited:
            self._start_reduce(self._queue.popleft(), self._is_last)

    def _end_backward(self) -> None:
        assert self._backward is not None
        while self._queue:
            self._start_reduce(self._queue.popleft(), self._is_last)
        self._finish_reductions()
        if self._has_late or not self._is_last:
            for gradient in self.gradients:
                gradient.collect()
        if self.syncs and not self._is_last:
            own = [(gradient, gradient.presence()) for gradient in self.gradients]
            for gradient, is_present in self._agree_on_presence(own):
                gradient.expose(is_present)
        if not self._keeps_units:
            for forward in self._backward.forwards:
                self._waiting.discard(forward)
            self.reshard_all()
        self._backward = None
        self._arrived.clear()
        self.observers.on_backward_end(self)

    def abort_backward(self) -> None:
        """Forget a backward that has raised; what it has reduced stays."""
        if not is_in_backward():
            self._is_unseen = False
            if self._backward is not None:
                self._forget_backward()

    def _forget_backward(self) -> None:
        self._backward = None
        self._queue.clear()
        self._reducer.wait()  # before anything is freed
        for gradient in self.gradients:
            gradient.collect()
        self._finish_reductions()
        self.reshard_all()

    # -- gradients ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _start_reduce(self, unit: Unit, is_last: bool) -> None:
        """Start to reduce a unit's gradients, as far as the table says."""
        self.order.record(Kind.REDUCE, unit, is_agreed=self._backward is not None)
        self._reducer.begin_unit()
        for gradient in unit.gradients:
            flat = gradient.flat
            if not (is_last or flat.reduces_every_backward):
                continue
            gradient.collect()
            is_final = is_last or (gradient.reduced is not None and gradient.placements == flat.grad_placements)
            self._launched.append((gradient, gradient.presence()))
            self._reducer.start(gradient, flat.grad_placements if is_final else flat.held_placements)

    @torch.no_grad()
    def _finish_reductions(self) -> None:
        """Wait for the reductions, and learn which parameters have a gradient on any rank."""
        if not self._launched:
            return
        self._reducer.wait()
        for gradient, is_present in self._agree_on_presence(self._launched):
            gradient.has_grad = list(map(operator.or_, gradient.has_grad, is_present))
            if any(gradient.has_grad):
                gradient.expose(gradient.has_grad)
            else:
                gradient.clear()
        self._launched = []

    def _agree_on_presence(self, own: list[tuple[Gradient, list[bool]]]) -> list[tuple[Gradient, list[bool]]]:
        """Return which parameters have a summand on any rank, given those of this one: a collective.

        A rank that has all of them does not wait for the result. A digest of what has to be equal travels with it.
        """
        is_present = [flag for _, flags in own for flag in flags]
        if any(axis.size > 1 for axis in self.axes):
            self.order.record(Kind.FLAGS)
            is_scaled = any(gradient.summand_factor is not None for gradient, _ in own)
            sent = bytes(is_present) + digest(self.groups, [gradient.has_grad for gradient, _ in own], is_scaled)
            if sent != self._sent:
                self._sent = sent
                self._flags = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(self.device, non_blocking=True)
            found = all_reduce(self._flags.clone(), self.axes, dist.ReduceOp.MAX)
            answer = found[len(is_present) :].to("cpu", non_blocking=True)
            is_later = self.device.type == "cuda"
            event = record_blocking_event(torch.cuda.current_stream(self.device)) if is_later else None
            if self.groups:
                self.answers.append((answer, event))
            if not all(is_present):
                is_present = [bool(flag) for flag in found[: len(is_present)].tolist()]
        pairs = []
        end = 0
        for gradient, flags in own:
            start = end
            end += len(flags)
            pairs.append((gradient, is_present[start:end]))
            if flags != is_present[start:end]:
                is_foreign = list(map(operator.ne, flags, is_present[start:end]))
                self.observers.on_foreign_gradients((gradient, is_foreign))
        return pairs

    def finish_gradients(self) -> None:
        """Reduce what is pending: after no_sync(), accumulation without a known end, or an assignment."""
        self.abort_backward()
        for gradient in self.gradients:
            gradient.collect(is_exact=True)
        if any(gradient.is_pending for gradient in self.gradients):
            for unit in self._schedule or [unit for unit in reversed(self.units) if unit.is_trainable]:
                self._start_reduce(unit, is_last=True)
            self._finish_reductions()

    def collect_gradient(self, parameter: nn.Parameter) -> None:
        """Take over a gradient that the user has assigned, before it is read: a norm is that of all ranks."""
        flat, _ = self.place[id(parameter)]
        if flat.is_trainable and not is_in_backward():
            self.gradient_of[flat].collect(is_exact=True)

    def settle_gradients(self) -> None:
        """Take over what the user has written into whole gradients, and free these."""
        for gradient in self.gradients:
            gradient.settle()

    def _before_gather(self, unit: Unit) -> None:
        self.settle_gradients()
        self.order.record(Kind.READ, unit)

    def norms(self, handles: list[GradientHandle], order: float) -> list[torch.Tensor]:
        """Return the norms of whole gradients: a collective."""
        parts = []
        for handle in handles:
            flat = handle.owner.flat
            part = handle.owner.part(handle)
            parts.append(part if flat.layout.counts(flat.grad_placements) else part[:0])
        self.order.record(Kind.NORM)
        found = norms_over_ranks(parts, order, self.axes, self.device)
        return [norm.to(handle.dtype) for norm, handle in zip(found.unbind(), handles, strict=True)]

    # -- steps --------------------------------------------------------------------------------------------------

    def end_step(self, stepped: dict[Flat, bool]) -> None:
        """The optimizer has changed the masters of these flats, and also this rank's part of the parameters or not."""
        self._keeps_units = False
        while self._running:  # calls that Ctrl-C has ended: no hook has told so
            self._held += self._running.pop().units
        for unit in self._held:
            unit.users -= 1
        self._held.clear()
        self.reshard_all()
        for unit in self.units:
            unit.start_refresh(stepped)
        self.order.end_step()
        self._used_outside.clear()
        self._last_backward.end_step()
        self.observers.on_values_changed(self)


def _nothing() -> None:
    """Return None."""
