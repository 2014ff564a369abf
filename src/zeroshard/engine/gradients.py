"""Gradients: taken from autograd, summed over backwards, reduced over the ranks, and kept by their owners."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from zeroshard.comm import Communicator, Pending
from zeroshard.config import Config
from zeroshard.engine.buckets import Buckets
from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import FlatGradient, norms_of
from zeroshard.engine.gradient_memory import GradientMemory
from zeroshard.engine.order import Order
from zeroshard.engine.parameter import zero_autograd_gradients
from zeroshard.engine.unit import Unit
from zeroshard.memory.lane import Lane
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool
from zeroshard.memory.ring import Slot
from zeroshard.memory.tiers import Tiers
from zeroshard.placement import Placement


class Gradients:
    """All gradients of one model.

    Partitioned gradients (stages 2 and 3) are reduced as each unit's backward ends, where they lie or packed into a
    ring of buckets, in one fixed order on every rank. Replicated gradients (stages 0 and 1) are summed in place over
    any number of backwards and reduced once, where they lie, when the optimizer asks. All that is no part of any graph,
    though a backward may make one.

    [Note: packing at once]
    Where a unit's gradients make one bucket, as those of most units do, compute itself packs them, and autograd's own
    are gone before the next unit's are made. Before that it ends the reduction that its slot of the ring has under way,
    which began some units ago (``Config.ring``). Of more buckets than there are slots it would have to wait for some
    that began just now; and where ending one takes more than a wait and a product, a sum over replicas or a way out of
    the device, it would wait for that too. So these are packed and ended on the lane, beside compute, and autograd's
    gradients stay until the next unit's are there.
    """

    def __init__(
        self,
        units: list[Unit],
        placement: Placement,
        comm: Communicator,
        order: Order,
        ledger: Ledger,
        pool: Pool,
        tiers: Tiers,
        config: Config,
        reduce_dtypes: dict[torch.dtype, torch.dtype],
    ) -> None:
        flats = [flat for unit in units for flat in unit.flats if flat.trainable]
        self.of_flat = {flat: FlatGradient(flat, reduce_dtypes[flat.dtype]) for flat in flats}
        self.units = [unit for unit in units if unit.trainable]
        self._of = {unit: [self.of_flat[flat] for flat in unit.flats if flat.trainable] for unit in units}
        self.partitioned = placement.gradients
        self.queue: list[Unit] | None = None  # the fixed order of reductions, once agreed
        self.coefficient: torch.Tensor | None = None  # of a clip that the optimizer has not applied yet
        self.owed: list[tuple[list[torch.Tensor], torch.Tensor]] = []  # gradients, and factors they still lack
        self.inverse: torch.Tensor | None = None  # of the loss scale that they carry; None: they carry none
        self.cleared = 0  # how often gradients were forgotten
        self._carry = False  # something was added to them since they were cleared
        self._unseen: torch.Tensor | None = None  # as ``inverse``: of a backward that has passed no module so far
        self._agreed = False  # ``used`` is what all ranks together have found
        self._by_parameter: dict[float, torch.Tensor] = {}  # norms, by norm type: see ``parameter_norms``
        self.unreduced = False  # some backward has only summed locally
        self.landed: Callable[[], Callable[[Flat], None] | None] = lambda: None  # weak: told of each complete shard
        self.look_for_overflow = False  # fp16: largest magnitudes are wanted too
        every, stays = self.of_flat.values(), config.offload is not None
        self.memory = GradientMemory(every, self.partitioned, pool, ledger, stays)
        self._comm, self._order, self._ledger, self._config, self._tiers = comm, order, ledger, config, tiers
        self._lane = Lane(comm.device, comm.stopwatch)
        self._buckets = Buckets(every, comm, config.ring, ledger)
        self._next = 0  # position in the queue
        self._finished: set[Unit] = set()
        self._read_by_lane: list[torch.Tensor] = []  # kept until compute has waited for the lane

    # -- inside backward ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, unit: Unit, sync: bool) -> None:
        """Take the gradients of a unit whose backward is over on this rank."""
        if not unit.trainable:
            return
        if not (self.partitioned and sync):
            self._add_local(unit)
            return
        self._finished.add(unit)
        queue = self._in_order()
        while self._next < len(queue) and queue[self._next] in self._finished:
            self._reduce(queue[self._next])
            self._next += 1

    @torch.no_grad()
    def end_backward(self, sync: bool) -> None:
        """Finish the units that are left: those without gradient on this rank take part with zeros."""
        if self.partitioned and sync:
            for unit in self._in_order()[self._next :]:
                self._reduce(unit)
            self._start_anew()
            self.unreduced = False
        else:
            self.unreduced = bool(self.units)
        for unit in self._with_autograd_gradients():  # came after its unit was finished
            self._reduce(unit) if self.partitioned and sync else self._add_local(unit)
        self._settle()

    def abort(self) -> None:
        """A backward was left by an exception: end what it has under way, and start the queue anew."""
        self.end_reductions()
        self._start_anew()
        with torch.no_grad():
            self._add_rest()
        if not any(gradient.has_local or gradient.has_shard for gradient in self.of_flat.values()):
            self.inverse, self._carry = None, False

    def end_reductions(self) -> None:
        """End what a backward that was left by an exception has under way."""
        if self._read_by_lane or self._buckets.busy:
            self._settle()

    def _start_anew(self) -> None:
        self._next = 0
        self._finished.clear()

    def forget_cleared(self) -> None:
        """A gradient was cleared by itself: where it was the last one, forget all, and give their memory back.

        Where there are several ranks, not unless all are known: a parameter without gradient here may have got one from
        another.
        """
        alone = self._comm.ranks == 1 and self._comm.tensor.size == 1
        if (alone or self._agreed) and not self.exist and not self._with_autograd_gradients():
            self.clear(set_to_none=True)

    # -- between backward and step ------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_rest(self) -> None:
        """Reduce what this rank has only summed for itself so far."""
        self._pay()
        self._adopt_unseen()
        if self.inverse is not None:
            self._refuse_set_by_hand()
        self._add_rest()
        if not self.unreduced:
            return
        for unit in self._in_order():
            if self.partitioned:
                self._reduce(unit)
                continue
            self._order.check(unit.reduce_event)
            for gradient in self._of[unit]:
                if not gradient.has_local:  # no gradient on this rank: take part with zeros
                    self._open_local(gradient).zero_()
                self._reduce_local(gradient, unit.reduce_event)
        self._settle()
        self.unreduced = False

    def _add_rest(self) -> None:
        """Add what no hook told of: set by somebody, or left by a backward that raised."""
        for unit in self._with_autograd_gradients():
            self._add_local(unit)
            self._carry, self.unreduced, self._agreed = True, True, False
            self._by_parameter.clear()

    @torch.no_grad()
    def begin(self, inverse: torch.Tensor | None) -> None:
        """A backward begins, which adds gradients that carry a loss scale of this ``inverse``, or none."""
        self.apply_coefficient()
        self._agreed = False
        self._by_parameter.clear()
        if self._carry and self.inverse is not inverse:
            if self.inverse is None or inverse is None:
                first, second = ("was not", "was") if self.inverse is None else ("was", "was not")
                raise RuntimeError(
                    f"the gradients there are come from a loss that {first} multiplied by optimizer.scale(loss), and "
                    f"this backward's {second}: their sum would mean nothing. Scale every loss of a step or none, or "
                    "call optimizer.zero_grad() in between"
                )
            self._multiply_all(self.inverse / inverse)  # the scale has changed in a step, and nobody cleared them
        self.inverse, self._carry, self._unseen = inverse, True, None

    @torch.no_grad()
    def expect_scaled(self, inverse: torch.Tensor, gradient: torch.Tensor) -> None:
        """A backward comes to a loss that carries a loss scale of this ``inverse``; it may pass no module."""
        self._adopt_unseen()
        self._refuse_set_by_hand()
        self._unseen = inverse

    def _adopt_unseen(self) -> None:
        """Add the gradients of a scaled backward that passed no module, if there was one."""
        if self._unseen is not None and self._with_autograd_gradients():
            self.begin(self._unseen)
            self._add_rest()
        self._unseen = None

    def _refuse_set_by_hand(self) -> None:
        """The others carry a loss scale, or are about to: raise where somebody has set gradients, which carry none."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._with_autograd_gradients():
                for name, parameter in (pair for flat in unit.flats for pair in flat.named_parameters):
                    if parameter._grad is not None and bool(parameter._grad.any()):  # else somebody has made it zero
                        raise RuntimeError(
                            f"{name!r} was given a gradient by hand, and the others come from a loss that is "
                            "multiplied by optimizer.scale(loss): together they would mean nothing. Clear it "
                            "(parameter.grad = None), and add the term to the loss"
                        )

    def _multiply_all(self, factor: torch.Tensor) -> None:
        every = self.of_flat.values()
        sums = [g.local for g in every if g.has_local and g.local is not None]
        self.multiply([*self.shards(), *sums, *(g.carried for g in every if g.carried is not None)], factor)
        for gradient in every:
            gradient.forget_norms()

    @torch.no_grad()
    def apply_coefficient(self) -> None:
        """Clip now what was to be clipped at the step: a backward is about to add to it."""
        self._pay()
        if self.coefficient is not None:
            self.multiply(self.shards(), self.coefficient)
            self.coefficient = None
            for gradient in self.of_flat.values():
                gradient.forget_norms()

    def _pay(self) -> None:
        """Make good what a step did to its copies alone, or to the gradients alone: nobody has cleared them since."""
        if not self.owed:
            return
        for flat in self.of_flat:
            flat.arrive()  # its update has read the gradient
        for shards, factor in self.owed:
            self.multiply(shards, factor)
        self.owed = []
        for gradient in self.of_flat.values():
            gradient.forget_norms()

    def multiply(self, shards: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply reduced gradients, wherever they rest."""
        near = [shard for shard in shards if shard.device == factor.device]
        if near:
            torch._foreach_mul_(near, factor)
        if len(near) < len(shards):
            self.settle_far()
            there = factor.cpu()
            for shard in shards:
                if shard.device != factor.device:
                    shard.mul_(there)

    def settle_far(self) -> None:
        """Wait for all gradients on their way out of the device."""
        for gradient in self.of_flat.values():
            gradient.settle()

    @property
    def exist(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(True in gradient.used for gradient in self.of_flat.values())

    def shards(self) -> list[torch.Tensor]:
        """The reduced gradients this rank holds."""
        return [g.shard for g in self.of_flat.values() if g.has_shard and g.shard is not None and g.shard.numel()]

    def norms(self, norm_type: float) -> list[torch.Tensor]:
        """The norm of each bucket's part of the reduced gradients that this rank has to count, in fp32, on the device.

        What every rank of the tensor axis holds alike is counted by the first of them alone. Gradients that rest
        outside the device were measured on their way out, by the same kernel and in the same order.
        """
        everything = self._comm.tensor.rank == 0
        found: list[torch.Tensor] = []
        unmeasured: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # positions of gradients among the norms
        for g in self.of_flat.values():
            for number in range(len(g.flat.homes)) if g.has_shard and g.shard is not None else ():
                measured = g.norms.get(number) if norm_type == 2 else g.largest.get(number)
                if measured is None and g.shard is not None:
                    g.settle()
                    measured = [g.shard[part.slice] for part in g.counted(number, everything)]
                    places = unmeasured.setdefault((g.shard.device, g.shard.dtype), [])
                    places += range(len(found), len(found) + len(measured))
                found += measured or ()
        for places in unmeasured.values():  # few kernels, however many gradients
            for place, norm in zip(places, norms_of([found[place] for place in places], norm_type), strict=True):
                found[place] = norm.to(self._comm.device)
        return found

    def parameter_norms(self, norm_type: float) -> torch.Tensor:
        """The norm of each trainable parameter's whole gradient, in fp64, in the order of ``of_flat``.

        All ranks call it together. One all-reduce an axis finds them all; they are kept until a gradient changes.
        """
        if norm_type not in self._by_parameter:
            self._by_parameter[norm_type] = self._norms_of_parameters(norm_type)
        factor = self.coefficient if self.inverse is None else self.inverse
        if self.coefficient is not None and self.inverse is not None:
            factor = self.coefficient * self.inverse
        found = self._by_parameter[norm_type]
        return found if factor is None or norm_type == 0 else found * factor.abs()

    def _norms_of_parameters(self, norm_type: float) -> torch.Tensor:
        extreme, device = abs(norm_type) == math.inf, self._comm.device
        everything = self._comm.tensor.rank == 0  # of what all tensor ranks hold the same, the first one's counts
        views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        offset = 0
        for gradient in self.of_flat.values():
            for piece in gradient.flat.segments if gradient.has_shard and gradient.shard is not None else ():
                if gradient.shard is not None and (everything or gradient.flat.shares[piece.parameter] is not None):
                    gradient.settle()
                    view = gradient.shard[piece.at : piece.at + piece.within.numel]
                    views.setdefault((view.device, view.dtype), []).append(view)
                    places.setdefault((view.device, view.dtype), []).append(offset + piece.parameter)
            offset += len(gradient.used)
        total = torch.full((offset,), math.inf if norm_type == -math.inf else 0.0, dtype=torch.float64, device=device)
        lost = torch.zeros_like(total)  # whether a value is NaN: a maximum over ranks may lose that
        for kind, alike in views.items():
            at = torch.tensor(places[kind], device=device)
            norms = torch.stack(norms_of(alike, norm_type)).to(device, torch.float64)
            if extreme:
                lost.index_add_(0, at, norms.isnan().double())
                total.scatter_reduce_(
                    0, at, norms.nan_to_num(nan=0.0, posinf=math.inf), "amax" if norm_type > 0 else "amin"
                )
            else:
                total.index_add_(0, at, norms if norm_type == 0 else norms**norm_type)
        sign = -1.0 if norm_type == -math.inf else 1.0
        both = torch.stack([sign * total, lost]) if extreme else total
        what = "sum the norms of gradients"
        for axis in (self._comm.shard, self._comm.tensor):  # along the other axes, every rank has the same
            if axis.size > 1:
                self._order.check(what)
                op = dist.ReduceOp.MAX if extreme else dist.ReduceOp.SUM
                self._comm.all_reduce(both, axis, what, op).wait()
        if extreme:
            return torch.where(both[1] > 0, math.nan, sign * both[0])
        return both if norm_type == 0 else both ** (1 / norm_type)

    def changed(self, gradient: FlatGradient) -> None:
        """Somebody is about to write into a reduced gradient."""
        gradient.flat.arrive()  # an update of its values may still read it
        gradient.settle()
        gradient.forget_norms()
        self._by_parameter.clear()

    @property
    def held(self) -> bool:
        """Whether there may be gradients, of this rank or of another."""
        return self.unreduced or self.memory.held

    @property
    def given(self) -> bool:
        """Whether a parameter has a gradient that no backward of the model has made: somebody has set it."""
        return bool(self._with_autograd_gradients())

    @torch.no_grad()
    def agree(self) -> None:
        """Reduce what is not reduced yet, and find out which parameters have a gradient on any rank.

        All ranks call it together. It costs nothing until the next backward.
        """
        if self._agreed:
            return
        self.reduce_rest()
        if self._comm.ranks * self._comm.tensor.size > 1 and self._comm.control.real:
            flags = [flag for gradient in self.of_flat.values() for flag in gradient.used]
            merged = torch.tensor(flags, dtype=torch.uint8, device=self._comm.device)
            what = "agree on unused parameters"
            self._order.check(what)
            self._comm.all_reduce_everywhere(merged, what, dist.ReduceOp.MAX)
            self.set_used([bool(flag) for flag in merged.tolist()])
        self._agreed = True

    def set_used(self, flags: Sequence[bool]) -> None:
        """Note which parameters have a gradient on any rank, in the order of ``of_flat``."""
        position = iter(flags)
        for gradient in self.of_flat.values():
            gradient.used = [next(position) for _ in gradient.used]

    def undivided(self) -> tuple[list[str], torch.Tensor]:
        """The parameters that no tensor plan has touched, and the sum of squares of this rank's part of each gradient.

        The list is the same on all ranks. Where the pieces lie is not: shares may be uneven.
        """
        plain = [(g, i) for g in self.of_flat.values() for i, divided in enumerate(g.flat.divided) if divided is None]
        numbers = {(gradient, index): number for number, (gradient, index) in enumerate(plain)}
        squares = torch.zeros(len(plain), device=self._comm.device)
        for gradient in self.of_flat.values():
            for piece in gradient.flat.segments if gradient.has_shard and gradient.shard is not None else ():
                number = numbers.get((gradient, piece.parameter))
                if number is not None and gradient.shard is not None:
                    part = gradient.shard[piece.at : piece.at + piece.within.numel]
                    gradient.settle()
                    squares[number] += part.float().square().sum().to(squares.device)
        return [gradient.flat.names[index] for gradient, index in plain], squares

    def clear(self, set_to_none: bool) -> None:
        """Forget all gradients, or make them zero."""
        self.end_reductions()
        self.coefficient, self.owed = None, []
        self._by_parameter.clear()
        self._carry, self._unseen = False, None
        if set_to_none:
            self.inverse, self._agreed = None, False
            self.cleared += 1
        for gradient in self.of_flat.values():
            self._drop_carried(gradient)
            if set_to_none:
                if self.partitioned:  # summed inside ``no_sync``
                    self._drop_local(gradient)
                gradient.take()
                gradient.used = [False] * len(gradient.used)
                gradient.has_local = gradient.has_shard = False
            else:
                gradient.settle()
                gradient.forget_norms()
                zero_autograd_gradients(gradient.flat.parameters)
                if gradient.has_local and gradient.local is not None:
                    gradient.local.zero_()
                if gradient.has_shard and gradient.shard is not None:
                    gradient.shard.zero_()
        if set_to_none:
            self.unreduced = False
            self._read_by_lane.clear()  # no reduction is under way
            self.memory.let_go()

    # -- summing locally ----------------------------------------------------------------------------------------

    def _add_local(self, unit: Unit) -> None:
        for gradient in self._of[unit]:
            taken = gradient.take()
            present = [index for index, tensor in enumerate(taken) if tensor is not None]
            if not present:
                continue
            sources = self._counted([tensor for tensor in taken if tensor is not None])
            local = self._open_local(gradient)
            views = [gradient.local_views[index] for index in present]
            if gradient.has_local:
                torch._foreach_add_(views, sources)
                continue
            if len(present) < len(taken) or local.numel() > sum(gradient.flat.layout.numels):
                local.zero_()
            torch._foreach_copy_(views, sources)
            gradient.has_local = True

    def _open_local(self, gradient: FlatGradient) -> torch.Tensor:
        flat = gradient.flat
        flat.arrive()  # an update of its values may still read the gradient of the step before
        if self.partitioned:
            self.memory.open_sum(gradient)
        elif gradient.shard is not None and gradient.has_shard and not gradient.has_local:
            # A backward after the reduction and before zero_grad(): the reduced part lies in ``local``, save it.
            gradient.carried = gradient.shard.clone()
            self._ledger.add("gradients", gradient.carried.nbytes)
        else:
            self.memory.open(gradient)
        assert gradient.local is not None
        return gradient.local

    def _drop_carried(self, gradient: FlatGradient) -> None:
        if gradient.carried is not None:
            self._ledger.add("gradients", -gradient.carried.nbytes)
            gradient.carried = None

    def _drop_local(self, gradient: FlatGradient) -> None:
        if gradient.local is not None:
            self._read_by_lane.append(gradient.local)
            self._ledger.add("gradients", -gradient.local.nbytes)
            gradient.local, gradient.local_views, gradient.has_local = None, [], False

    def _reduce_local(self, gradient: FlatGradient, what: str) -> None:
        """Reduce ``local`` bucket by bucket. The reduced parts go to its front: together they become the shard.

        The place a part goes to, ``in_shard(bucket)``, lies in buckets that are reduced already, so nothing that is
        still needed is overwritten, and stage 1 needs no memory beside its full gradients.
        """
        if gradient.local is None:
            return
        local, layout = gradient.local, gradient.flat.layout
        shard = local[: layout.shard_numel]
        under_way: deque[Callable[[], None]] = deque()
        for number, bucket in enumerate(layout.buckets):
            home = layout.in_shard(bucket)
            mine = shard[home.start : home.end]
            if self._comm.shard.size == 1:
                under_way.append(partial(self._average, mine, what))
            else:
                reduced = self._buckets.landing(gradient.dtype, number)[: home.numel]
                pending = self._comm.reduce_scatter(reduced, local[bucket.start : bucket.end], what)
                under_way.append(partial(self._land, pending, reduced, mine, what, add=False))
            if len(under_way) == self._config.ring:
                under_way.popleft()()
        for finish in under_way:
            finish()
        gradient.shard = shard
        if gradient.carried is not None:
            shard.add_(gradient.carried)
            self._drop_carried(gradient)
        gradient.has_local, gradient.has_shard = False, True

    # -- packing and reducing -----------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients bucket by bucket, beside the computation; pack what has to be."""
        self._order.check(unit.reduce_event)
        if self._buckets.reads_gradients:  # which could not go before
            with self._lane:
                self._buckets.settle()
        self._join_lane()  # the unit before: its gradients may go once the lane has read them
        if any(gradient.has_local for gradient in self._of[unit]):
            self._add_local(unit)
        for gradient in self._of[unit]:
            taken = gradient.take()
            ready = self._buckets.as_they_lie(gradient, taken)
            slots = self._buckets.slots(gradient, ready)
            made = self._counted([tensor for tensor in taken if tensor is not None])
            at_once = self._packs_at_once(gradient)
            if not at_once:
                self._read_by_lane += made
            self._open_shard(gradient)
            gradient.flat.arrive()  # an update of its values may still read the gradient of the step before
            with nullcontext() if at_once else self._lane:
                for number, slot in enumerate(slots):
                    self._launch(gradient, slot, number, taken, ready[number], unit.reduce_event)
            gradient.has_shard = True
            self._drop_local(gradient)
        if self._comm.device.type != "cuda":
            self._read_by_lane.clear()

    def _packs_at_once(self, gradient: FlatGradient) -> bool:
        """Whether compute itself packs it: see [Note: packing at once]."""
        one = len(gradient.flat.layout.buckets) == 1 and gradient.soles[0] is None and not gradient.has_local
        return one and not self._comm.replicas and self._config.offload is None

    def _launch(
        self,
        gradient: FlatGradient,
        slot: Slot,
        number: int,
        taken: list[torch.Tensor | None],
        ready: torch.Tensor | None,
        what: str,
    ) -> None:
        slot.settle()
        packed = self._buckets.pack(gradient, number, slot, taken) if ready is None else ready
        mine, add = gradient.parts[number], gradient.has_shard
        # Where nothing is there yet, the result can land where it belongs.
        place = slot.reduced.first(mine.numel()) if gradient.is_reduced_aside else mine
        if gradient.far:
            result, spare = (packed, place) if self._comm.shard.size == 1 else (place, packed[: mine.numel()])
            pending = self._comm.reduce_scatter(result, packed, what)
            slot.finish = partial(self._land_far, pending, result, spare, gradient, number, what, add)
        else:
            pending = self._comm.reduce_scatter(place, packed, what)
            slot.finish = partial(self._land_near, pending, place, gradient, number, what, add, ready)
        if self._comm.ranks == 1:  # nobody is waited for
            slot.settle()

    def _land(self, pending: Pending, result: torch.Tensor, shard: torch.Tensor, what: str, add: bool) -> None:
        """End a reduction: sum over the replicas, average, and put the result where it belongs."""
        pending.wait()
        self._average(result, what)
        if add:
            shard.add_(result)
        elif result.data_ptr() != shard.data_ptr():
            shard.copy_(result)

    def _land_near(
        self,
        pending: Pending,
        result: torch.Tensor,
        gradient: FlatGradient,
        number: int,
        what: str,
        add: bool,
        read: torch.Tensor | None,
    ) -> None:
        """End the reduction of a gradient that rests on the device. ``read``: autograd's own, which it has read."""
        self._land(pending, result, gradient.parts[number], what, add)
        if read is not None and self._comm.device.type == "cuda":
            self._read_by_lane.append(read)
        self._tell(gradient, number)

    def _land_far(
        self,
        pending: Pending,
        result: torch.Tensor,
        spare: torch.Tensor,
        gradient: FlatGradient,
        number: int,
        what: str,
        add: bool,
    ) -> None:
        """End the reduction of a gradient that rests outside the device: measure it, and send it there.

        What the backwards before have left there comes back through ``spare`` to be added to.
        """
        pending.wait()
        self._average(result, what)
        mine = gradient.parts[number]
        if add:
            result.add_(mine if mine.device == result.device else spare.copy_(mine, non_blocking=True))
        self._measure(gradient, number, result)
        mine.copy_(result, non_blocking=True)
        gradient.landing = self._lane.moment()
        self._tell(gradient, number)

    def _measure(self, gradient: FlatGradient, number: int, result: torch.Tensor) -> None:
        """Take the norms of what is about to leave the device."""
        start = gradient.flat.homes[number].start
        parts = gradient.counted(number, everything=self._comm.tensor.rank == 0)
        views = [result[part.start - start : part.end - start] for part in parts]
        gradient.norms[number] = norms_of(views, 2.0)
        if self.look_for_overflow:
            gradient.largest[number] = norms_of([result], math.inf)

    def _tell(self, gradient: FlatGradient, number: int) -> None:
        landed = self.landed() if number == len(gradient.flat.homes) - 1 else None
        if landed is not None:
            landed(gradient.flat)

    def _average(self, shard: torch.Tensor, what: str) -> None:
        for axis in self._comm.replicas:
            self._comm.all_reduce(shard, axis, what).wait()
        if self._comm.ranks > 1:
            shard.mul_(1 / self._comm.ranks)

    def _settle(self) -> None:
        """Finish every reduction under way, so that compute may use the results."""
        with self._lane:
            self._buckets.settle()
        self._join_lane()
        self._buckets.close()

    def _join_lane(self) -> None:
        """Have compute wait for the lane; what that has read may go."""
        self._lane.join_all()
        self._read_by_lane.clear()

    # -- memory -------------------------------------------------------------------------------------------------

    def _in_order(self) -> list[Unit]:
        return self.queue if self.queue is not None else self.units[::-1]

    def _with_autograd_gradients(self) -> list[Unit]:
        return [unit for unit in self.units if any(gradient.pending() for gradient in self._of[unit])]

    def _open_shard(self, gradient: FlatGradient) -> None:
        """Have a place for the shard."""
        if not gradient.far:
            self.memory.open(gradient)
        elif gradient.shard is None:
            tier, numel = gradient.flat.rest.gradients, gradient.flat.layout.shard_numel
            gradient.keep(self._tiers.zeros("gradients", tier, numel, gradient.dtype, pinned=True))

    def _counted(self, made_by_autograd: list[torch.Tensor]) -> list[torch.Tensor]:
        """Count what autograd made for one unit, at its highest; it goes at once."""
        self._ledger.pass_through("autograd", sum([tensor.nbytes for tensor in made_by_autograd]))
        return made_by_autograd
