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

from zeroshard.agreement import RanksDisagreeError
from zeroshard.comm import Communicator
from zeroshard.config import Config
from zeroshard.engine.buffers import Buffers
from zeroshard.engine.frames import EndOfBackward, Frame, Reach, Trace, hook_first, outside_transforms
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.order import Order
from zeroshard.engine.parameter import NOT_PICKLED, is_functorch_wrapped
from zeroshard.engine.pins import Pins
from zeroshard.engine.states import States
from zeroshard.engine.unit import State, Unit
from zeroshard.memory.file import DiskError
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool
from zeroshard.memory.reader import AHEAD
from zeroshard.memory.segments import Segments
from zeroshard.memory.workspace import Workspace
from zeroshard.placement import Placement
from zeroshard.precision import Precision, scaled_by


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


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
        self.states = States(units, gradients, comm, order)
        self.precision = precision
        self.gradients = gradients
        self.placement = placement
        self.comm = comm
        self.order = order
        self.ledger = ledger
        self.pool = pool
        self.config = config
        self.sync = True  # False inside no_sync(): backward only sums locally
        self._buffers = buffers
        on_gpu = comm.device.type == "cuda"
        self._segments = Segments(comm.device) if on_gpu and config.defragment else None
        self._workspace = Workspace(pool) if on_gpu and config.defragment else None
        self._gathers = {unit.gather_event: unit for unit in units if unit.partitioned}
        self._copies = {unit.copy_event: unit for unit in units if unit.partitioned}
        self._readers = {flat.reader for unit in units for flat in unit.flats if flat.reader is not None}
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
        self.postponed: RuntimeError | None = None  # found when autograd dropped a backward, where nothing can raise
        self._thread = 0  # which forward ran on
        self._task = -1  # autograd's number of the backward under way
        for unit in units:
            unit.engine = weakref.ref(self)

    def __deepcopy__(self, memo: object) -> Engine:
        """Refuse: a copy would share shards and collectives with the original."""
        raise RuntimeError(
            "a sharded model cannot be deep-copied; copy it before zeroshard.shard(), or build a second model and load "
            "the state_dict() taken inside `with zeroshard.gathered(model):`"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse: see :data:`NOT_PICKLED`."""
        raise RuntimeError(NOT_PICKLED)

    # -- forward ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return bool(self._frames) or in_backward()

    @property
    def in_forward(self) -> bool:
        """Whether a forward is under way, or was left by an exception that no hook could see."""
        return bool(self._frames)

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
        units = [unit for frame in frames for unit in (*frame.units, *frame.lent)]
        if len(self._frames) == 1:  # the model's own outputs may also be what a module inside has returned
            units += self._trace.pins
        return any(unit.partitioned and unit.holds(tensor) for unit in units)

    def leave(self, outputs: list[torch.Tensor], kept: list[torch.Tensor], lent: bool, hides: bool) -> None:
        """The module that was entered last has run.

        ``outputs`` are its differentiable output tensors, ``kept`` those it keeps: see [Note: kept inside]; ``lent``:
        some output is a parameter, or has one's memory; ``hides``: differentiable inputs went in and nothing
        differentiable came out.
        """
        if in_backward():
            return
        if not self._frames:
            raise RuntimeError(
                "the model was called inside its own forward in a way that zeroshard did not notice: the units of the "
                "outer call are gone. Call it before or after, or call a module of it"
            )
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
                hook_first(tensor, Reach(self, frame, self._trace))
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
            if lent:
                self._pins.lend(self._trace, self._trace.pins)
                for unit in self._trace.pins:
                    unit.lent = True
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
        elif not (isinstance(error, RanksDisagreeError) or self.states.spoilt or self.states.away is not None):
            self._take_part_in_rest()  # else there is nothing to give
            if error is not None:
                self.comm.control.tell_failure(f"its forward raised {type(error).__name__}: {error}")
        with suppress(RanksDisagreeError) if isinstance(error, RanksDisagreeError) else nullcontext():
            self._abort_forward()  # what is still under way fails like the first, which says more

    def fetch(self, unit: Unit) -> bool:
        """Somebody touches a parameter whose values are not in place: bring them if that is right now.

        Where it is, they stay until :meth:`fetched`, also while the same operation has others fetched.
        """
        self.states.refuse_away()
        if unit.partitioned and not self.running:
            return False
        if unit not in self._fetching:
            with outside_transforms():
                self._fetch(unit)
        self._fetching.append(unit)
        return True

    def _fetch(self, unit: Unit) -> None:
        if unit.partitioned and not in_backward():
            if unit not in self._brought:
                self._release_idle(but=unit)  # it may be on its way: it was expected next
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
        hooked = [tensor for tensor in results if tensor.grad_fn is not None and not is_functorch_wrapped(tensor)]
        for tensor in hooked:
            hook_first(tensor, Reach(self, use, self._trace))
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
        """Whether this forward or backward uses it, other than by pins."""
        return unit in self._kept or self._at_work(unit)

    def about_to_run(self, inputs: Iterable[torch.Tensor]) -> None:
        """The whole model is about to be given these inputs."""
        if self._segments is not None and torch.is_grad_enabled() and not self.running:
            self._segments.begin(sum(tensor.numel() for tensor in inputs))

    def _begin_forward(self, name: str) -> None:
        if self.postponed is not None:
            error, self.postponed = self.postponed, None
            raise error
        if self._backward_on:  # it was left by an exception
            self._abort_backward()
        self.states.refuse_spoilt(*self.states.spoilt)
        self.states.refuse_away()
        self.states.refuse_thawed()
        self.states.take_in_edits()
        if torch.is_grad_enabled():
            self.gradients.memory.abide()
        if self._workspace is not None:
            self._workspace.take()
        self._thread = threading.get_ident()
        self._brought.clear()
        self._pins.disown()
        self._trace = Trace()
        self._veil_unless_at_work(self._live)  # those that other forwards have pinned
        self._traces.add(self._trace)
        gradients = "with" if torch.is_grad_enabled() else "without"
        copied = [unit.name for unit in self._gathers.values() if unit.copied]
        inside = f" inside gathered() of {copied[0]!r} and {len(copied) - 1} more" if copied else ""
        self.order.begin(f"forward of {name or 'the model'} {gradients} gradients{inside}")
        self.states.wake(self._live)
        self._buffers.synchronise()

    def _end_forward(self) -> None:
        if torch.is_grad_enabled():
            self.gradients.memory.look()
        else:
            self._pins.drop(self._trace)
        self._trace = Trace()  # the hooks on the outputs keep the old one
        self.states.complete_rest()
        self._release_idle()
        for unit in self._live:  # pinned
            unit.wait()
        self._veil_pinned()
        if not torch.is_grad_enabled():
            self._park()
        self.states.rest(self._live)

    def _abort_forward(self) -> None:
        self._frames, self._loose = [], []
        self._traces.discard(self._trace)
        self._pins.drop(self._trace)
        self._trace = Trace()
        self._release_idle()
        self._veil_pinned()
        self._park()
        self.states.rest(self._live)

    def _take_part_in_rest(self) -> None:
        """Go through the gathers the other ranks still expect of this forward, so that they need not hang."""
        for event in self.order.remaining():
            if (unit := self._gathers.get(event)) is not None:
                self._bring(unit)
                self._release_unless_pinned(unit)
            elif (unit := self._copies.get(event)) is not None:  # gathered() in a hook, say
                self.order.check(event)
                unit.gather_copy()
                unit.drop_copy()
        self.states.complete_rest()

    def _bring(self, unit: Unit, module: str | None = None) -> None:
        """Make a unit's parameters usable, those of one module or all, and start to gather the unit expected next."""
        if not unit.partitioned or (unit in self._brought and unit.state is State.READY):
            if unit.expected:
                self.states.complete(unit)
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

    def _release_idle(self, but: Unit | None = None) -> None:
        """Release the units no running module belongs to."""
        for unit in tuple(self._live):
            if unit is not but and not self._in_use(unit):
                self._release_unless_pinned(unit)

    def _release_unless_pinned(self, unit: Unit) -> None:
        """Release a unit that nobody uses now.

        Pins of another pass keep it in memory, but this rank may be the only one that has them: the forward failed on
        the others, or they have dropped its graph. So its next use is gathered as it is there.
        """
        if unit not in self._pins:
            self._release(unit)
        elif not any(self._pins.has(trace, unit) for trace in (self._trace, *self._reached)):
            self._brought.discard(unit)

    def _veil_unless_at_work(self, units: Iterable[Unit]) -> None:
        """Have the next use of units noticed that no running module belongs to: it belongs to another frame.

        Not of those that this very forward has pinned: whoever was given their parameters may use them as they are.
        """
        for unit in units:
            if not (unit.veiled or self._at_work(unit) or self._pins.has(self._trace, unit)):
                unit.veil()

    def _veil_pinned(self) -> None:
        """Have every use of pinned units noticed between passes, unless a forward has given out their parameters.

        Only some ranks may have pinned them, and what is written into the gathered values would be lost.
        """
        for unit in self._live:
            if not (self._at_work(unit) or self._pins.lent(unit)):
                unit.veil()

    # -- backward -----------------------------------------------------------------------------------------------

    def reach(self, frame: Frame, trace: Trace) -> None:
        """A gradient has arrived at a frame's output."""
        if self._backward_on and torch._C._current_graph_task_id() != self._task:
            self._reach_inside(frame, trace)
        else:
            self._reach(frame, trace)

    def _reach(self, frame: Frame, trace: Trace) -> None:
        """Backward has come to a frame: see [Note: all ranks come to all frames]."""
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
                    self._release_unless_pinned(unit)
        if self.makes_graph:  # the nodes made now save parameters, and no hook will tell of them
            self._kept.update(wanted)
        for use in uses:
            use.reached_in = self._backward
            for unit in use.units:
                self._open[unit] = use.entered
                self._bring(unit)

    def _reach_inside(self, frame: Frame, trace: Trace) -> None:
        """A backward inside this one has come to a frame: see [Note: backward inside backward]."""
        if trace not in self._reached:
            self._reached.append(trace)
            for unit in self._pins.renew(trace):
                self._bring(unit)
        for use in (frame, *frame.loose):
            for unit in use.units:
                self._open.setdefault(unit, use.entered)
                self._bring(unit)
                if self.makes_graph:
                    self._kept.add(unit)

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
            self._reach(frame, trace)
        self._bring(unit)

    def _begin_backward(self) -> None:
        self.states.refuse_away()
        for unit in self.states.resident:
            unit.watch_forward()
        self._backward += 1
        self._backward_on = True
        self._task = torch._C._current_graph_task_id()
        self._kept = set()
        self._brought.clear()
        torch.autograd.Variable._execution_engine.queue_callback(EndOfBackward(self, self._backward))
        inverse = scaled_by()
        self.order.begin("backward" if inverse is None else "backward of a scaled loss")
        self.backwards += 1
        if self._workspace is not None:
            self._workspace.take()
        self.gradients.memory.look()
        self.states.wake(self._live)
        self.gradients.begin(inverse)
        updates = self.states.updates()
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
        if self.comm.control.real:
            order = self.comm.on_host(agreed, "agree on the order of reductions")
        return [units[i] for i in order]

    def end_backward(self) -> None:
        """Autograd has run all nodes."""
        if self._backward_on:
            with outside_transforms():
                self._finish_backward()

    def _finish_backward(self) -> None:
        while self._sweep:
            self._come_to(self._sweep.pop())
        for unit in tuple(self._open):
            self.gradients.finish(unit, self.sync)
        self._open.clear()
        self.gradients.end_backward(self.sync)
        self._close_backward()

    def leave_backward(self, number: int) -> None:
        """Autograd has dropped a backward, which ended or was left by an exception.

        A thread of autograd's own may be the last to drop it, while the user's goes on: then the next forward aborts.
        """
        if self._backward_on and self._backward == number and threading.get_ident() == self._thread:
            with outside_transforms():
                self._abort_backward()

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
        self._veil_pinned()
        self._park()
        self.states.rest(self._live)

    def _park(self) -> None:
        for unit in self._gathers.values():
            unit.park()
        for reader in self._readers:
            reader.forget()

    # -- between steps ------------------------------------------------------------------------------------------

    def reduce_rest(self) -> None:
        """Reduce what is not reduced yet; the parameters show it from then on, also what somebody has set."""
        self.gradients.reduce_rest()
        if not self.running:
            self.states.rest(self._live)

    def drop_pins(self) -> None:
        """The parameters have changed: no backward may use the old values any more."""
        self._pins.clear()
        self._kept = set()
        self._release_idle()
        self._park()

    def write_back(self, units: list[Unit], source: int) -> bool:
        """Keep what rank ``source`` of the mesh has written into the units' parameters inside gathered().

        Returns whether that is something else than before.
        """
        for unit in units:
            unit.check_written()
        self.states.settle()
        self.states.doubt()
        self.order.begin("write")
        changed = torch.zeros(len(units), device=self.comm.device)
        for number, unit in enumerate(units):
            self.order.check(f"write unit {unit.name!r}")
            changed[number] = unit.absorb(source)
        what = "agree on what was written"
        self.order.check(what)
        self.comm.all_reduce_everywhere(changed, what)
        alone = self.comm.ranks * self.comm.tensor.size == 1
        known = alone or self.comm.control.real
        flags = self.comm.on_host(changed, what) if known else [1.0] * len(units)
        written = [unit for unit, flag in zip(units, flags, strict=True) if flag]
        self.states.values_changed(parameter for unit in written for parameter in unit.parameters)
        return bool(written)

    def close(self) -> None:
        """End what is under way beside training: the model is about to be plain again."""
        self.states.settle()
        self.states.finish_updates()
        if self._segments is not None:
            self._segments.close()
