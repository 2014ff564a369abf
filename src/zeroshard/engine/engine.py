"""Engine: what happens at each module and autograd event. It reads placements; it never looks at a stage number.

[Note: what is over in backward]
Autograd runs the nodes of a graph in the reverse of the order they were made in: a node that is not ready waits for a
consumer of its output, which was made later, so among the nodes made later one is always ready, and it has priority.
The engine numbers the moments at which a unit's module is entered and left in forward (``Frame``). When the gradient
of a unit's output arrives, every node made after that module was left has run. So each unit whose modules were all
entered after that moment is over: its gradients are complete and its parameters needed no more. No hook per parameter,
no counting of gradients, and unused parameters, side losses, shared modules and branches need no special case.

[Note: all ranks come to all frames]
A loss may depend on a module on one rank and not on another. Units are gathered by all ranks or none, so a backward
comes to every frame of its forward, in the reverse order, on every rank: when a gradient arrives, the frames in between
that got none are gone through first.

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

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol

import torch

from zeroshard.agreement import RanksDisagreeError
from zeroshard.comm import Communicator
from zeroshard.config import Config
from zeroshard.engine.buffers import Buffers
from zeroshard.engine.flat import Flat
from zeroshard.engine.frames import Frame, Reach, Trace
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.order import Order
from zeroshard.engine.parameter import Card
from zeroshard.engine.pins import Pins
from zeroshard.engine.unit import State, Unit
from zeroshard.memory.file import DiskError
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool
from zeroshard.memory.reader import AHEAD
from zeroshard.memory.segments import Segments
from zeroshard.placement import Placement
from zeroshard.precision import LossScale, Precision


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Updates(Protocol):
    """Updates of states that rest outside the device, on a thread of their own."""

    def foresee(self, backwards: int) -> None:
        """A backward begins, the how-many-eth since the last step."""

    def doubt(self) -> None:
        """Somebody may change the gradients: what was computed from them ahead of the step does not count."""

    def wait(self) -> None:
        """Return when no update is under way; raise what went wrong."""


class Engine:
    """One sharded model: its units, its gradients, and where forward and backward are."""

    def __init__(
        self,
        units: list[Unit],
        gradients: Gradients,
        buffers: Buffers,
        placement: Placement,
        comm: Communicator,
        order: Order,
        ledger: Ledger,
        pool: Pool,
        config: Config,
        precision: Precision,
    ) -> None:
        self.units = units
        self.precision = precision
        self.gradients = gradients
        self.placement = placement
        self.comm = comm
        self.order = order
        self.ledger = ledger
        self.pool = pool
        self.config = config
        self.spoilt: dict[str, str] = {}  # states that are of no use → why
        self.readers: list[Callable[[], None]] = []  # what is to be waited for before the states change
        # the optimizer's, and weak: what is updated outside the device, and which states rest on it
        self.updates: Callable[[], Updates | None] = lambda: None
        self.states_on_device: Callable[[], Callable[[], list[torch.Tensor]] | None] = lambda: None
        self.away: object | None = None  # where all states are, while they are out
        self.sync = True  # False inside no_sync(): backward only sums locally
        self._buffers = buffers
        on_gpu = comm.device.type == "cuda"
        self._segments = Segments(comm.device) if on_gpu and config.defragment else None
        self._gathers = {unit.gather_event: unit for unit in units if unit.partitioned}
        self._readers = {flat.reader for unit in units for flat in unit.flats if flat.reader is not None}
        self._frozen = [flat for unit in units for flat in unit.flats if not flat.trainable]
        self.resident = [unit for unit in units if not unit.partitioned]
        self.loss_scale: LossScale | None = None  # fp16's, set by the optimizer
        self._resting = False  # whether resident parameters show their reduced gradients
        self._brought: set[Unit] = set()  # brought in this forward or backward, and not released since
        self._live: list[Unit] = []  # partitioned units that are not released
        self._frames: list[Frame] = []  # modules being run, outermost first
        self._trace = Trace()  # of the forward under way
        self._traces: weakref.WeakSet[Trace] = weakref.WeakSet()  # of forwards that a backward may come to
        self._loose: list[Frame] = []  # uses since the last frame was entered: see [Note: loose uses]
        self._fetching: list[Unit] = []  # of parameters that operations under way were given; one may come twice
        self._pins = Pins()  # what a backward may use that no hook announces
        self.makes_graph = False  # whether this backward was asked to create a graph
        self._kept: set[Unit] = set()  # used by the graph that this backward itself makes
        self._open: dict[Unit, int] = {}  # units backward is in → when the run it came to was entered
        self._reached: list[Trace] = []  # that this backward has come to
        self._sweep: list[Frame] = []  # that backward will come to, the next one last
        self._moment = 0
        self.backwards = 0  # since the last step
        self._backward = 0  # number of the last backward that began
        self._backward_on = False
        for unit in units:
            unit.engine = weakref.ref(self)

    def __deepcopy__(self, memo: object) -> Engine:
        """Refuse: a copy would share shards and collectives with the original."""
        raise RuntimeError(
            "a sharded model cannot be deep-copied; copy it before zeroshard.shard(), or build a second model and load "
            "the state_dict() taken inside `with zeroshard.gathered(model):`"
        )

    # -- forward ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return bool(self._frames) or in_backward()

    def enter(self, units: tuple[Unit, ...], name: str, outermost: bool) -> None:
        """A hooked module is about to run. ``outermost``: it is the model itself."""
        if in_backward():
            for unit in units:
                self._reach_again(unit)
            return
        if self._frames and outermost:  # an earlier forward was left by an exception no hook could see
            self._abort_forward()
        self._moment += 1
        frame = Frame(list(units), self._moment)
        self._frames.append(frame)  # first: whatever is raised below, fail() takes it back
        if len(self._frames) == 1:
            self._begin_forward(name)
        frame.loose, self._loose = self._loose, []
        if any(unit not in self._brought for unit in units):  # execution moves on to another unit
            self._release_idle()
        else:
            self._veil_unless_at_work(self._live)
        for unit in units:
            self._bring(unit, name)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is that of a unit that the module being run uses."""
        frames = () if in_backward() else self._frames[-1:]
        units = (unit for frame in frames for unit in (*frame.units, *frame.lent))
        return any(unit.partitioned and unit.holds(tensor) for unit in units)

    def leave(self, outputs: list[torch.Tensor], kept: list[torch.Tensor], lent: bool, hides: bool) -> None:
        """The module that was entered last has run.

        ``outputs`` are its differentiable output tensors, ``kept`` those it keeps: see [Note: kept inside]; ``lent``:
        some output is a parameter, or has one's memory; ``hides``: differentiable inputs went in and nothing
        differentiable came out.
        """
        if in_backward() or not self._frames:
            return
        frame = self._frames.pop()
        self._moment += 1
        frame.left = self._moment
        for use in frame.lent.values():
            use.left = frame.left
            frame.loose.append(use)
        if not self._frames:
            frame.loose += self._loose
            self._loose = []
        frame.hooked = (
            bool(outputs) and torch.is_grad_enabled() and bool(frame.units or frame.loose or not self._frames)
        )
        if frame.hooked:
            for tensor in (*outputs, *kept):
                tensor.register_hook(Reach(self, frame, self._trace))  # type: ignore[no-untyped-call]
        else:
            self._loose = frame.loose + self._loose
        self._record(frame)
        # Who will use the values, or when, may not be known. What the outermost module used itself, also as views, may
        # be in graphs that its outputs do not show: a loss kept as an attribute, an output that tensors_in() cannot
        # look into. A frozen module that nothing differentiable went into is in no graph: it is released as ever.
        if lent or (torch.is_grad_enabled() and not self._frames):
            self._pins.add(self._trace, (unit for use in (frame, *frame.loose) for unit in use.units))
        elif torch.is_grad_enabled() and not outputs:
            self._pins.add(self._trace, (unit for unit in frame.units if hides or unit.trainable))
        self._veil_unless_at_work((*frame.units, *frame.lent))
        if not self._frames:
            self._end_forward()

    def fail(self, error: BaseException | None) -> None:
        """A hooked module has raised."""
        if in_backward() or not self._frames:
            return
        frame = self._frames.pop()
        if self._frames:  # whoever catches it may go on, with what was computed so far: no hook tells of that
            self._moment += 1
            frame.left = self._moment
            self._record(frame)
            self._loose = [*frame.loose, frame, *frame.lent.values(), *self._loose]
            self._veil_unless_at_work((*frame.units, *frame.lent))
            return
        if isinstance(error, DiskError):  # parameters could not be read, so the others wait for a gather already
            self.comm.control.tell_failure(str(error))
        elif not (isinstance(error, RanksDisagreeError) or self.spoilt):  # else there is nothing to give any more
            self._take_part_in_rest()
        self._abort_forward()

    def fetch(self, unit: Unit) -> bool:
        """Somebody touches a parameter whose values are not in place: bring them if that is right now.

        Where it is, they stay until :meth:`fetched`, also while the same operation has others fetched.
        """
        self.refuse_away()
        if unit.partitioned and not self.running:
            return False
        if unit not in self._fetching:
            self._fetch(unit)
        self._fetching.append(unit)
        return True

    def _fetch(self, unit: Unit) -> None:
        if unit.partitioned and not in_backward():
            if unit.state is State.RELEASED:
                self._release_idle()
            self._moment += 1
            use = Frame([unit], self._moment, left=self._moment)
            self._record(use)
            self._loose.append(use)
            if unit.veiled and unit in self._brought:  # whoever asks is let through; the next use is noticed too
                return
        self._bring(unit)

    def fetched(self, unit: Unit, result: object) -> None:
        """What a parameter was fetched for is done. Where it is a view the unit stays, else the next use is noticed."""
        self._fetching.remove(unit)
        if unit in self._fetching or not unit.partitioned or in_backward() or not self._frames:
            return
        results = result if isinstance(result, (list, tuple)) else (result,)
        tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        use = self._trace.uses[unit][-1]
        if any(unit.holds(tensor) for tensor in tensors):
            self._frames[-1].lent.setdefault(unit, use)
            return
        if torch.is_grad_enabled():
            self._hook_use(use, tensors)
        self._veil_unless_at_work((unit,))

    def _hook_use(self, use: Frame, results: list[torch.Tensor]) -> None:
        """Have told when backward comes to a loose use: see [Note: loose uses]."""
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # its graph is gone back through inside the forward
        hooked = [tensor for tensor in results if tensor.grad_fn is not None and not wrapped(tensor)]
        for tensor in hooked:
            tensor.register_hook(Reach(self, use, self._trace))  # type: ignore[no-untyped-call]
        if hooked:
            use.hooked = True
            self._loose = [other for other in self._loose if other is not use]

    def _record(self, frame: Frame) -> None:
        self._trace.frames.append(frame)
        for unit in frame.units:
            self._trace.uses.setdefault(unit, []).append(frame)

    def _uses(self, unit: Unit) -> Iterator[Frame]:
        return (frame for trace in self._traces for frame in trace.uses.get(unit, ()))

    def _at_work(self, unit: Unit) -> bool:
        """Whether this forward uses it now."""
        return unit in self._fetching or any(unit in frame.units or unit in frame.lent for frame in self._frames)

    def _in_use(self, unit: Unit) -> bool:
        return unit in self._pins or unit in self._kept or self._at_work(unit)

    def about_to_run(self, inputs: Iterable[torch.Tensor]) -> None:
        """The whole model is about to be given these inputs."""
        if self._segments is not None and torch.is_grad_enabled() and not self.running:
            self._segments.begin(sum(tensor.numel() for tensor in inputs))

    def _begin_forward(self, name: str) -> None:
        if self._backward_on:  # it was left by an exception
            self._abort_backward()
        self.refuse_spoilt(*self.spoilt)
        self.refuse_away()
        self._refuse_thawed()
        self._brought.clear()
        self._pins.disown()
        self._trace = Trace()
        self._veil_unless_at_work(self._live)  # those that other forwards have pinned
        self._traces.add(self._trace)
        gradients = "with" if torch.is_grad_enabled() else "without"
        self.order.begin(f"forward of {name or 'the model'} {gradients} gradients")
        self._wake()
        self._buffers.synchronise()

    def _refuse_thawed(self) -> None:
        """A parameter that was frozen at shard() has no place for a gradient: none may be computed unnoticed."""
        with torch._C.DisableTorchFunctionSubclass():
            thawed = [name for flat in self._frozen for name, p in flat.named_parameters if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{thawed[0]!r} was frozen when shard() was called and requires a gradient now: call "
                "zeroshard.unshard(), set requires_grad, and shard again"
            )

    def _end_forward(self) -> None:
        if not torch.is_grad_enabled():
            self._pins.drop(self._trace)
        self._trace = Trace()  # the hooks on the outputs keep the old one
        self._complete_rest()
        self._release_idle()
        for unit in self._live:  # pinned: whoever was given its parameters may use them
            unit.wait()
        if not torch.is_grad_enabled():
            self._park()
        self._rest()

    def _abort_forward(self) -> None:
        self._frames, self._loose = [], []
        self._traces.discard(self._trace)
        self._pins.drop(self._trace)
        self._trace = Trace()
        self._release_idle()
        self._park()
        self._rest()

    def _take_part_in_rest(self) -> None:
        """Go through the gathers the other ranks still expect of this forward, so that they need not hang."""
        for event in self.order.remaining():
            unit = self._gathers.get(event)
            if unit is not None:
                self._bring(unit)
                self._release(unit)
        self._complete_rest()

    def _bring(self, unit: Unit, module: str | None = None) -> None:
        """Make a unit's parameters usable, those of one module or all, and start to gather the unit expected next."""
        if not unit.partitioned or (unit in self._brought and unit.state is State.READY):
            self._complete(unit)
            unit.wait(module)
        else:
            self.order.check(unit.gather_event)
            self._gather(unit)
            unit.wait(module)
            self._brought.add(unit)
            if self.config.prefetch:
                self._look_ahead()

    def _look_ahead(self) -> None:
        """Start to gather the unit that is expected next, and to read from disk those after it."""
        for number, event in enumerate(islice(self.order.ahead(self._gathers), 1 + (AHEAD if self._readers else 0))):
            unit = self._gathers[event]
            if number == 0:
                self._gather(unit)
            else:
                for flat in unit.flats:
                    flat.fetch()

    def _complete(self, unit: Unit) -> None:
        """Collect the new values of a resident unit that was updated outside the device.

        All ranks collect in one order: those before it come first, though this rank may have no use for them.
        """
        if self.comm.shard.size == 1 and unit.expected:
            unit.gather()
        while unit.expected:
            first = next(other for other in self._in_order() if other.expected)
            self.order.check(first.gather_event)
            first.gather()

    def _complete_rest(self) -> None:
        """Collect what this forward had no use for, since that of another rank may have had."""
        for unit in self._in_order() if self.comm.shard.size > 1 else ():
            self._complete(unit)
            unit.wait()

    def _in_order(self) -> list[Unit]:
        """The resident units, as all ranks agree that forward comes to them."""
        queue = self.gradients.queue
        return self.resident if queue is None or not self.resident else queue[::-1]

    def _gather(self, unit: Unit) -> None:
        """Start a gather, unless under way. What an earlier pass left is gathered anew, as on ranks without it."""
        if unit.state is State.GATHERING or (unit in self._brought and unit.state is State.READY):
            return
        unit.gather()
        if unit not in self._live:
            self._live.append(unit)

    def _release(self, unit: Unit) -> None:
        self._brought.discard(unit)
        if unit in self._live:
            self._live.remove(unit)
            unit.release()

    def _release_idle(self) -> None:
        """Release the units no running module belongs to."""
        for unit in tuple(self._live):
            if not self._in_use(unit):
                self._release(unit)

    def _veil_unless_at_work(self, units: Iterable[Unit]) -> None:
        """Have the next use of units noticed that no running module belongs to: it belongs to another frame.

        Not of those that this very forward has pinned: whoever was given their parameters may use them as they are.
        """
        for unit in units:
            if not (unit.veiled or self._at_work(unit) or self._pins.has(self._trace, unit)):
                unit.veil()

    # -- backward -----------------------------------------------------------------------------------------------

    def reach(self, frame: Frame, trace: Trace) -> None:
        """A gradient has arrived at a frame's output: see [Note: all ranks come to all frames]."""
        if not self._backward_on:
            self._begin_backward()
        if trace not in self._reached:
            self._reached.append(trace)
            self._traces.add(trace)
            for unit in self._pins.renew(trace):
                self._bring(unit)
            self._sweep += [other for other in trace.frames if other.hooked]
            self._sweep.sort(key=lambda other: other.left)
        while self._sweep and self._sweep[-1].left > frame.left:
            self._come_to(self._sweep.pop())
        self._come_to(frame)

    def _come_to(self, frame: Frame) -> None:
        """Backward is at a frame: see [Note: what is over in backward]."""
        if frame.reached_in == self._backward:
            return
        frame.reached_in = self._backward
        uses = [frame, *frame.loose]
        wanted = [unit for use in uses for unit in use.units]
        for unit, entered in tuple(self._open.items()):
            if entered > frame.left:
                if all(use.entered > frame.left for use in self._uses(unit)):
                    del self._open[unit]
                    self.gradients.finish(unit, self.sync)
                if unit not in wanted and not self._in_use(unit):
                    self._release(unit)
        if self.makes_graph:  # the nodes made now save parameters, and no hook will tell of them
            self._kept.update(wanted)
        for use in uses:
            use.reached_in = self._backward
            for unit in use.units:
                self._open[unit] = use.entered
                self._bring(unit)

    def _reach_again(self, unit: Unit) -> None:
        """A module runs again inside backward: see [Note: recomputation]."""
        number = self._backward if self._backward_on else self._backward + 1
        hidden = [  # where no hook will tell
            (trace, use)
            for trace in self._traces
            for use in trace.uses.get(unit, ())
            if use.reached_in != number and not use.hooked
        ]
        if unit not in self._open and hidden:
            trace, frame = max(hidden, key=lambda pair: pair[1].left)
            self.reach(frame, trace)
        self._bring(unit)

    def _begin_backward(self) -> None:
        self._backward += 1
        self._backward_on = True
        self._kept = set()
        self._brought.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.order.begin("backward")
        self.backwards += 1
        self._wake()
        self.gradients.apply_coefficient()
        updates = self.updates()
        if updates is not None:
            updates.foresee(self.backwards) if self.sync else updates.doubt()
        if self.gradients.partitioned and self.gradients.queue is None and self.sync:
            self.gradients.queue = self._agreed_queue()

    def _agreed_queue(self) -> list[Unit]:
        """The fixed order of reductions: the reverse of rank 0's first forward, which is when units will be over."""
        units = self.gradients.units
        last = self._moment + 1
        first_use = {unit: min((use.entered for use in self._uses(unit)), default=last) for unit in units}
        order = sorted(range(len(units)), key=lambda i: (first_use[units[i]] == last, -first_use[units[i]]))
        self.order.check("agree on the order of reductions")
        agreed = torch.tensor(order, dtype=torch.int64, device=self.comm.device)
        self.comm.broadcast(agreed, 0, "agree on the order of reductions")
        return [units[i] for i in agreed.tolist()] if self.comm.control.real else [units[i] for i in order]

    def _end_backward(self) -> None:
        if not self._backward_on:
            return
        while self._sweep:
            self._come_to(self._sweep.pop())
        for unit in tuple(self._open):
            self.gradients.finish(unit, self.sync)
        self._open.clear()
        self.gradients.end_backward(self.sync)
        self._close_backward()

    def _abort_backward(self) -> None:
        self._open.clear()
        self._sweep.clear()
        self.gradients.abort()
        self._close_backward()

    def _close_backward(self) -> None:
        self._backward_on = False
        self._traces -= set(self._reached)
        self._pins.close(self._reached, self._kept)
        self._reached.clear()
        self._kept = set()
        self._release_idle()
        self._park()
        self._rest()

    def _park(self) -> None:
        for unit in self._gathers.values():
            unit.park()
        for reader in self._readers:
            reader.forget()

    def _rest(self) -> None:
        """Show resident parameters' reduced gradients; in forward and backward they are as autograd knows them."""
        if self.gradients.exist:
            for unit in self.resident:
                unit.rest()
            self._resting = True

    def _wake(self) -> None:
        if self._resting:
            for unit in self.resident:
                unit.wake()
            self._resting = False

    # -- between steps ------------------------------------------------------------------------------------------

    def drop_pins(self) -> None:
        """The parameters have changed: no backward may use the old values any more."""
        self._pins.clear()
        self._kept = set()
        self._release_idle()
        self._park()

    def resting_gradient(self, card: Card) -> torch.Tensor | None:
        """What ``parameter.grad`` gives between backward and the next forward."""
        self.refuse_away()
        flat = card.flat()
        gradient = self.gradients.of_flat.get(flat) if flat is not None else None
        if flat is None or gradient is None or not any(gradient.used):
            return None
        if self.comm.shard.size > 1:
            raise RuntimeError(
                f"the gradient of {card.name!r} is partitioned over the ranks: use optimizer.clip_grad_norm_(…) to "
                "clip, optimizer.zero_grad() to clear, zeroshard.full_gradient(model, name) to read it"
            )
        if self.loss_scale is not None:
            raise RuntimeError(
                f"the gradient of {card.name!r} carries fp16's loss scale: use optimizer.clip_grad_norm_(…) to clip, "
                "optimizer.zero_grad() to clear, zeroshard.full_gradient(model, name) to read it"
            )
        self.order.begin("read the gradients")
        self.gradients.reduce_rest()
        self.gradients.apply_coefficient()
        if not gradient.used[card.index] or gradient.shard is None:
            return None
        self.doubt()  # whoever has it may write into it
        flat.arrive()  # an update of its values may still read it
        gradient.forget_norms()
        gradient.settle()
        part, divided = flat.view(gradient.shard, card.index), flat.divided[card.index]
        return part if divided is None else divided.wrap(part)

    def clear_gradient(self, card: Card) -> None:
        """Forget the gradient of one parameter."""
        flat = card.flat()
        gradient = self.gradients.of_flat.get(flat) if flat is not None else None
        if flat is not None and gradient is not None:
            self.doubt()
            flat.arrive()  # an update of its values may still read it
            gradient.clear(card.index)

    def absorb_resident(self) -> None:
        """Take values written into resident parameters, the same on all ranks, into shards and master copies."""
        self.settle()
        self.finish_updates()
        self.doubt()
        for unit in self.resident:
            unit.absorb(None)

    def refuse_away(self) -> None:
        """Raise while the states are out."""
        if self.away is not None:
            raise RuntimeError(
                "the model's states are in host memory since zeroshard.offload_states(): call "
                "zeroshard.reload_states(model) first"
            )

    def refuse_spoilt(self, *parts: str) -> None:
        """Raise where states are of no use: of "weights", "optimizer"."""
        for part in parts:
            if part in self.spoilt:
                raise RuntimeError(self.spoilt[part])

    def close(self) -> None:
        """End what is under way beside training: the model is about to be plain again."""
        self.settle()
        self.finish_updates()
        if self._segments is not None:
            self._segments.close()

    def settle(self) -> None:
        """Wait for whoever still reads the states, before they change."""
        readers, self.readers = self.readers, []
        for reader in readers:
            reader()

    def doubt(self) -> None:
        """The gradients are no longer what an update ahead of the step may have been made from."""
        updates = self.updates()
        if updates is not None:
            updates.doubt()

    def finish_updates(self) -> None:
        """Wait for the updates and gathers that a step has started."""
        self.refuse_away()
        updates = self.updates()
        if updates is not None:
            updates.wait()
        for unit in self.resident:
            self._complete(unit)
            unit.wait()

    def copy_masters(self, flats: Iterable[Flat], near: bool = False) -> None:
        """Copy the masters' values, or those on the device, into this rank's part of the parameters in computation."""
        pairs = [flat.update_from_master(near) for flat in flats]
        places = [place for owned, _ in pairs for place in owned]
        if places:
            torch._foreach_copy_(places, [source for _, master in pairs for source in master], non_blocking=True)

    def adopt(self) -> None:
        """Bring the parameters in computation into line with shards and masters that somebody has written into."""
        self.order.begin("take in new values")
        self.finish_updates()
        self.doubt()
        self.copy_masters(flat for unit in self.units for flat in unit.flats)
        self.drop_pins()
        for unit in self.resident if self.comm.shard.size > 1 else ():
            self.order.check(unit.gather_event)
            unit.gather(frozen=True)
        self.finish_updates()

    def refresh_parameters(self) -> None:
        """Bring every rank's updated part to all, where parameters are not partitioned. Does not wait for the end.

        What is updated outside the device is brought when it is wanted: the next forward waits unit by unit.
        """
        for unit in self.resident:
            if unit.trainable and any(flat.rest.far for flat in unit.flats):
                unit.expect()
            elif unit.trainable and self.comm.shard.size > 1:
                self.order.check(unit.gather_event)
                unit.gather()
