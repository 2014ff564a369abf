"""Gradients: taken from autograd, summed over backwards, reduced over the ranks, and kept by their owners."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from zeroshard.comm.collective_order import CollectiveOrder
from zeroshard.comm.collectives import CollectiveWork, Communicator
from zeroshard.config.config import Config
from zeroshard.engine.flat_grad import FlatGrad, compute_norms
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.grad_memory import GradMemory
from zeroshard.engine.parameter import zero_autograd_grads
from zeroshard.engine.reduce import ReduceBuffers
from zeroshard.engine.unit import Unit
from zeroshard.memory.bucket_ring import BucketSlot
from zeroshard.memory.pool import Pool
from zeroshard.memory.streams import SideStream
from zeroshard.memory.tier_allocator import TierAllocator
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding.placement import Placement


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
        order: CollectiveOrder,
        tracker: MemoryTracker,
        pool: Pool,
        tiers: TierAllocator,
        config: Config,
        reduce_dtypes: dict[torch.dtype, torch.dtype],
    ) -> None:
        flats = [flat for unit in units for flat in unit.flats if flat.is_trainable]
        self.flat_grads = {flat: FlatGrad(flat, reduce_dtypes[flat.dtype]) for flat in flats}
        self.units = [unit for unit in units if unit.is_trainable]
        self._unit_grads = {unit: [self.flat_grads[flat] for flat in unit.flats if flat.is_trainable] for unit in units}
        self.is_partitioned = placement.gradients
        self.reduce_queue: list[Unit] | None = None  # the fixed order of reductions, once agreed
        self.clip_coef: torch.Tensor | None = None  # of a clip that the optimizer has not applied yet
        self.deferred_scales: list[
            tuple[list[torch.Tensor], torch.Tensor]
        ] = []  # gradients, and factors they still lack
        self.inverse_scale: torch.Tensor | None = None  # of the loss scale that they carry; None: they carry none
        self.clear_count = 0  # how often gradients were forgotten
        self._has_accumulated = False  # something was added to them since they were cleared
        self._unhooked_inverse_scale: torch.Tensor | None = (
            None  # as ``inverse``: of a backward that has passed no module so far
        )
        self._is_usage_synced = False  # ``used`` is what all ranks together have found
        self._cached_parameter_norms: dict[float, torch.Tensor] = {}  # norms, by norm type: see ``parameter_norms``
        self.has_unreduced = False  # some backward has only summed locally
        self.on_shard_ready: Callable[[], Callable[[FlatParam], None] | None] = lambda: (
            None
        )  # weak: told of each complete shard
        self.needs_overflow_check = False  # fp16: largest magnitudes are wanted too
        every, stays = self.flat_grads.values(), config.offload is not None
        self.memory = GradMemory(every, self.is_partitioned, pool, tracker, stays)
        self._comm, self._order, self._tracker, self._config, self._tiers = comm, order, tracker, config, tiers
        self._reduce_stream = SideStream(comm.device, comm.wait_timer)
        self._reduce_buffers = ReduceBuffers(every, comm, config.ring, tracker)
        self._queue_position = 0  # position in the queue
        self._done_units: set[Unit] = set()
        self._reduce_stream_inputs: list[torch.Tensor] = []  # kept until compute has waited for the lane

    # -- inside backward ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_unit_done(self, unit: Unit, needs_grad_sync: bool) -> None:
        """Take the gradients of a unit whose backward is over on this rank."""
        if not unit.is_trainable:
            return
        if not (self.is_partitioned and needs_grad_sync):
            self._accumulate_local(unit)
            return
        self._done_units.add(unit)
        queue = self._reduce_order()
        while self._queue_position < len(queue) and queue[self._queue_position] in self._done_units:
            self._start_reduce(queue[self._queue_position])
            self._queue_position += 1

    @torch.no_grad()
    def finalize_backward(self, needs_grad_sync: bool) -> None:
        """Finish the units that are left: those without gradient on this rank take part with zeros."""
        if self.is_partitioned and needs_grad_sync:
            for unit in self._reduce_order()[self._queue_position :]:
                self._start_reduce(unit)
            self._reset_queue()
            self.has_unreduced = False
        else:
            self.has_unreduced = bool(self.units)
        for unit in self._units_with_autograd_grads():  # came after its unit was finished
            self._start_reduce(unit) if self.is_partitioned and needs_grad_sync else self._accumulate_local(unit)
        self._wait_reductions()

    def abort_backward(self) -> None:
        """A backward was left by an exception: end what it has under way, and start the queue anew."""
        self.wait_reductions()
        self._reset_queue()
        with torch.no_grad():
            self._add_untracked_grads()
        if not any(gradient.has_local_sum or gradient.has_shard for gradient in self.flat_grads.values()):
            self.inverse_scale, self._has_accumulated = None, False

    def wait_reductions(self) -> None:
        """End what a backward that was left by an exception has under way."""
        if self._reduce_stream_inputs or self._reduce_buffers.is_busy:
            self._wait_reductions()

    def _reset_queue(self) -> None:
        self._queue_position = 0
        self._done_units.clear()

    def clear_if_empty(self) -> None:
        """A gradient was cleared by itself: where it was the last one, forget all, and give their memory back.

        Where there are several ranks, not unless all are known: a parameter without gradient here may have got one from
        another.
        """
        alone = self._comm.data_parallel_size == 1 and self._comm.tensor_axis.size == 1
        if (alone or self._is_usage_synced) and not self.has_used_params and not self._units_with_autograd_grads():
            self.clear(set_to_none=True)

    # -- between backward and step ------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_pending(self) -> None:
        """Reduce what this rank has only summed for itself so far."""
        self._apply_deferred_scales()
        self._add_unhooked_scaled_grads()
        if self.inverse_scale is not None:
            self._check_no_manual_grads()
        self._add_untracked_grads()
        if not self.has_unreduced:
            return
        for unit in self._reduce_order():
            if self.is_partitioned:
                self._start_reduce(unit)
                continue
            self._order.check(unit.reduce_label)
            for gradient in self._unit_grads[unit]:
                if not gradient.has_local_sum:  # no gradient on this rank: take part with zeros
                    self._allocate_local_sum(gradient).zero_()
                self._reduce_local_sum(gradient, unit.reduce_label)
        self._wait_reductions()
        self.has_unreduced = False

    def _add_untracked_grads(self) -> None:
        """Add what no hook told of: set by somebody, or left by a backward that raised."""
        for unit in self._units_with_autograd_grads():
            self._accumulate_local(unit)
            self._has_accumulated, self.has_unreduced, self._is_usage_synced = True, True, False
            self._cached_parameter_norms.clear()

    @torch.no_grad()
    def begin_backward(self, inverse_scale: torch.Tensor | None) -> None:
        """A backward begins, which adds gradients that carry a loss scale of this ``inverse``, or none."""
        self.apply_clip_coef()
        self._is_usage_synced = False
        self._cached_parameter_norms.clear()
        if self._has_accumulated and self.inverse_scale is not inverse_scale:
            if self.inverse_scale is None or inverse_scale is None:
                first, second = ("was not", "was") if self.inverse_scale is None else ("was", "was not")
                raise RuntimeError(
                    f"the gradients there are come from a loss that {first} multiplied by optimizer.scale(loss), and "
                    f"this backward's {second}: their sum would mean nothing. Scale every loss of a step or none, or "
                    "call optimizer.zero_grad() in between"
                )
            self._scale_all(
                self.inverse_scale / inverse_scale
            )  # the scale has changed in a step, and nobody cleared them
        self.inverse_scale, self._has_accumulated, self._unhooked_inverse_scale = inverse_scale, True, None

    @torch.no_grad()
    def on_scaled_backward(self, inverse_scale: torch.Tensor, gradient: torch.Tensor) -> None:
        """A backward comes to a loss that carries a loss scale of this ``inverse``; it may pass no module."""
        self._add_unhooked_scaled_grads()
        self._check_no_manual_grads()
        self._unhooked_inverse_scale = inverse_scale

    def _add_unhooked_scaled_grads(self) -> None:
        """Add the gradients of a scaled backward that passed no module, if there was one."""
        if self._unhooked_inverse_scale is not None and self._units_with_autograd_grads():
            self.begin_backward(self._unhooked_inverse_scale)
            self._add_untracked_grads()
        self._unhooked_inverse_scale = None

    def _check_no_manual_grads(self) -> None:
        """The others carry a loss scale, or are about to: raise where somebody has set gradients, which carry none."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._units_with_autograd_grads():
                for name, parameter in (pair for flat in unit.flats for pair in flat.named_parameters):
                    if parameter._grad is not None and bool(parameter._grad.any()):  # else somebody has made it zero
                        raise RuntimeError(
                            f"{name!r} was given a gradient by hand, and the others come from a loss that is "
                            "multiplied by optimizer.scale(loss): together they would mean nothing. Clear it "
                            "(parameter.grad = None), and add the term to the loss"
                        )

    def _scale_all(self, factor: torch.Tensor) -> None:
        every = self.flat_grads.values()
        sums = [g.local_sum for g in every if g.has_local_sum and g.local_sum is not None]
        self.scale_shards(
            [*self.shards(), *sums, *(g.carried_over for g in every if g.carried_over is not None)], factor
        )
        for gradient in every:
            gradient.clear_norms()

    @torch.no_grad()
    def apply_clip_coef(self) -> None:
        """Clip now what was to be clipped at the step: a backward is about to add to it."""
        self._apply_deferred_scales()
        if self.clip_coef is not None:
            self.scale_shards(self.shards(), self.clip_coef)
            self.clip_coef = None
            for gradient in self.flat_grads.values():
                gradient.clear_norms()

    def _apply_deferred_scales(self) -> None:
        """Make good what a step did to its copies alone, or to the gradients alone: nobody has cleared them since."""
        if not self.deferred_scales:
            return
        for flat in self.flat_grads:
            flat.wait_for_update()  # its update has read the gradient
        for shards, factor in self.deferred_scales:
            self.scale_shards(shards, factor)
        self.deferred_scales = []
        for gradient in self.flat_grads.values():
            gradient.clear_norms()

    def scale_shards(self, shards: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply reduced gradients, wherever they rest."""
        near = [shard for shard in shards if shard.device == factor.device]
        if near:
            torch._foreach_mul_(near, factor)
        if len(near) < len(shards):
            self.wait_offloaded()
            there = factor.cpu()
            for shard in shards:
                if shard.device != factor.device:
                    shard.mul_(there)

    def wait_offloaded(self) -> None:
        """Wait for all gradients on their way out of the device."""
        for gradient in self.flat_grads.values():
            gradient.wait_copy()

    @property
    def has_used_params(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(True in gradient.is_param_used for gradient in self.flat_grads.values())

    def shards(self) -> list[torch.Tensor]:
        """The reduced gradients this rank holds."""
        return [g.shard for g in self.flat_grads.values() if g.has_shard and g.shard is not None and g.shard.numel()]

    def shard_norms(self, norm_type: float) -> list[torch.Tensor]:
        """The norm of each bucket's part of the reduced gradients that this rank has to count, in fp32, on the device.

        What every rank of the tensor axis holds alike is counted by the first of them alone. Gradients that rest
        outside the device were measured on their way out, by the same kernel and in the same order.
        """
        everything = self._comm.tensor_axis.rank == 0
        found: list[torch.Tensor] = []
        unmeasured: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # positions of gradients among the norms
        for g in self.flat_grads.values():
            for number in range(len(g.flat.shard_ranges)) if g.has_shard and g.shard is not None else ():
                measured = g.norms.get(number) if norm_type == 2 else g.max_abs.get(number)
                if measured is None and g.shard is not None:
                    g.wait_copy()
                    measured = [g.shard[part.slice] for part in g.norm_ranges(number, everything)]
                    places = unmeasured.setdefault((g.shard.device, g.shard.dtype), [])
                    places += range(len(found), len(found) + len(measured))
                found += measured or ()
        for places in unmeasured.values():  # few kernels, however many gradients
            for place, norm in zip(places, compute_norms([found[place] for place in places], norm_type), strict=True):
                found[place] = norm.to(self._comm.device)
        return found

    def parameter_norms(self, norm_type: float) -> torch.Tensor:
        """The norm of each trainable parameter's whole gradient, in fp64, in the order of ``flat_grads``.

        All ranks call it together. One all-reduce an axis finds them all; they are kept until a gradient changes.
        """
        if norm_type not in self._cached_parameter_norms:
            self._cached_parameter_norms[norm_type] = self._compute_parameter_norms(norm_type)
        factor = self.clip_coef if self.inverse_scale is None else self.inverse_scale
        if self.clip_coef is not None and self.inverse_scale is not None:
            factor = self.clip_coef * self.inverse_scale
        found = self._cached_parameter_norms[norm_type]
        return found if factor is None or norm_type == 0 else found * factor.abs()

    def _compute_parameter_norms(self, norm_type: float) -> torch.Tensor:
        extreme, device = abs(norm_type) == math.inf, self._comm.device
        everything = self._comm.tensor_axis.rank == 0  # of what all tensor ranks hold the same, the first one's counts
        views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        offset = 0
        for gradient in self.flat_grads.values():
            for piece in gradient.flat.owned_ranges if gradient.has_shard and gradient.shard is not None else ():
                if gradient.shard is not None and (
                    everything or gradient.flat.tp_shards[piece.param_index] is not None
                ):
                    gradient.wait_copy()
                    view = gradient.shard[piece.offset : piece.offset + piece.elements.numel]
                    views.setdefault((view.device, view.dtype), []).append(view)
                    places.setdefault((view.device, view.dtype), []).append(offset + piece.param_index)
            offset += len(gradient.is_param_used)
        total = torch.full((offset,), math.inf if norm_type == -math.inf else 0.0, dtype=torch.float64, device=device)
        lost = torch.zeros_like(total)  # whether a value is NaN: a maximum over ranks may lose that
        for kind, alike in views.items():
            at = torch.tensor(places[kind], device=device)
            norms = torch.stack(compute_norms(alike, norm_type)).to(device, torch.float64)
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
        for axis in (self._comm.shard_axis, self._comm.tensor_axis):  # along the other axes, every rank has the same
            if axis.size > 1:
                self._order.check(what)
                op = dist.ReduceOp.MAX if extreme else dist.ReduceOp.SUM
                self._comm.all_reduce(both, axis, what, op).wait()
        if extreme:
            return torch.where(both[1] > 0, math.nan, sign * both[0])
        return both if norm_type == 0 else both ** (1 / norm_type)

    def prepare_write(self, flat_grad: FlatGrad) -> None:
        """Somebody is about to write into a reduced gradient."""
        flat_grad.flat.wait_for_update()  # an update of its values may still read it
        flat_grad.wait_copy()
        flat_grad.clear_norms()
        self._cached_parameter_norms.clear()

    @property
    def has_grads(self) -> bool:
        """Whether there may be gradients, of this rank or of another."""
        return self.has_unreduced or self.memory.has_grads

    @property
    def has_manual_grads(self) -> bool:
        """Whether a parameter has a gradient that no backward of the model has made: somebody has set it."""
        return bool(self._units_with_autograd_grads())

    @torch.no_grad()
    def sync_used_params(self) -> None:
        """Reduce what is not reduced yet, and find out which parameters have a gradient on any rank.

        All ranks call it together. It costs nothing until the next backward.
        """
        if self._is_usage_synced:
            return
        self.reduce_pending()
        if self._comm.data_parallel_size * self._comm.tensor_axis.size > 1 and self._comm.consistency.is_distributed:
            flags = [flag for gradient in self.flat_grads.values() for flag in gradient.is_param_used]
            merged = torch.tensor(flags, dtype=torch.uint8, device=self._comm.device)
            what = "agree on unused parameters"
            self._order.check(what)
            self._comm.all_reduce_over_mesh(merged, what, dist.ReduceOp.MAX)
            self.set_used_params([bool(flag) for flag in merged.tolist()])
        self._is_usage_synced = True

    def set_used_params(self, flags: Sequence[bool]) -> None:
        """Note which parameters have a gradient on any rank, in the order of ``flat_grads``."""
        position = iter(flags)
        for gradient in self.flat_grads.values():
            gradient.is_param_used = [next(position) for _ in gradient.is_param_used]

    def tp_replicated_square_sums(self) -> tuple[list[str], torch.Tensor]:
        """The parameters that no tensor plan has touched, and the sum of squares of this rank's part of each gradient.

        The list is the same on all ranks. Where the pieces lie is not: shares may be uneven.
        """
        plain = [
            (g, i) for g in self.flat_grads.values() for i, divided in enumerate(g.flat.tp_params) if divided is None
        ]
        numbers = {(gradient, index): number for number, (gradient, index) in enumerate(plain)}
        squares = torch.zeros(len(plain), device=self._comm.device)
        for gradient in self.flat_grads.values():
            for piece in gradient.flat.owned_ranges if gradient.has_shard and gradient.shard is not None else ():
                number = numbers.get((gradient, piece.param_index))
                if number is not None and gradient.shard is not None:
                    part = gradient.shard[piece.offset : piece.offset + piece.elements.numel]
                    gradient.wait_copy()
                    squares[number] += part.float().square().sum().to(squares.device)
        return [gradient.flat.names[index] for gradient, index in plain], squares

    def clear(self, set_to_none: bool) -> None:
        """Forget all gradients, or make them zero."""
        self.wait_reductions()
        self.clip_coef, self.deferred_scales = None, []
        self._cached_parameter_norms.clear()
        self._has_accumulated, self._unhooked_inverse_scale = False, None
        if set_to_none:
            self.inverse_scale, self._is_usage_synced = None, False
            self.clear_count += 1
        for gradient in self.flat_grads.values():
            self._free_carried_over(gradient)
            if set_to_none:
                if self.is_partitioned:  # summed inside ``no_sync``
                    self._free_local_sum(gradient)
                gradient.pop_autograd_grads()
                gradient.is_param_used = [False] * len(gradient.is_param_used)
                gradient.has_local_sum = gradient.has_shard = False
            else:
                gradient.wait_copy()
                gradient.clear_norms()
                zero_autograd_grads(gradient.flat.parameters)
                if gradient.has_local_sum and gradient.local_sum is not None:
                    gradient.local_sum.zero_()
                if gradient.has_shard and gradient.shard is not None:
                    gradient.shard.zero_()
        if set_to_none:
            self.has_unreduced = False
            self._reduce_stream_inputs.clear()  # no reduction is under way
            self.memory.free()

    # -- summing locally ----------------------------------------------------------------------------------------

    def _accumulate_local(self, unit: Unit) -> None:
        for gradient in self._unit_grads[unit]:
            taken = gradient.pop_autograd_grads()
            present = [index for index, tensor in enumerate(taken) if tensor is not None]
            if not present:
                continue
            sources = self._track([tensor for tensor in taken if tensor is not None])
            local = self._allocate_local_sum(gradient)
            views = [gradient.local_sum_views[index] for index in present]
            if gradient.has_local_sum:
                torch._foreach_add_(views, sources)
                continue
            if len(present) < len(taken) or local.numel() > sum(gradient.flat.layout.numels):
                local.zero_()
            torch._foreach_copy_(views, sources)
            gradient.has_local_sum = True

    def _allocate_local_sum(self, gradient: FlatGrad) -> torch.Tensor:
        flat = gradient.flat
        flat.wait_for_update()  # an update of its values may still read the gradient of the step before
        if self.is_partitioned:
            self.memory.allocate_local_sum(gradient)
        elif gradient.shard is not None and gradient.has_shard and not gradient.has_local_sum:
            # A backward after the reduction and before zero_grad(): the reduced part lies in ``local``, save it.
            gradient.carried_over = gradient.shard.clone()
            self._tracker.add("gradients", gradient.carried_over.nbytes)
        else:
            self.memory.allocate(gradient)
        assert gradient.local_sum is not None
        return gradient.local_sum

    def _free_carried_over(self, gradient: FlatGrad) -> None:
        if gradient.carried_over is not None:
            self._tracker.add("gradients", -gradient.carried_over.nbytes)
            gradient.carried_over = None

    def _free_local_sum(self, gradient: FlatGrad) -> None:
        if gradient.local_sum is not None:
            self._reduce_stream_inputs.append(gradient.local_sum)
            self._tracker.add("gradients", -gradient.local_sum.nbytes)
            gradient.local_sum, gradient.local_sum_views, gradient.has_local_sum = None, [], False

    def _reduce_local_sum(self, gradient: FlatGrad, what: str) -> None:
        """Reduce ``local`` bucket by bucket. The reduced parts go to its front: together they become the shard.

        The place a part goes to, ``shard_range(bucket)``, lies in buckets that are reduced already, so nothing that is
        still needed is overwritten, and stage 1 needs no memory beside its full gradients.
        """
        if gradient.local_sum is None:
            return
        local, layout = gradient.local_sum, gradient.flat.layout
        shard = local[: layout.shard_numel]
        under_way: deque[Callable[[], None]] = deque()
        for number, bucket in enumerate(layout.buckets):
            home = layout.shard_range(bucket)
            mine = shard[home.start : home.end]
            if self._comm.shard_axis.size == 1:
                under_way.append(partial(self._average, mine, what))
            else:
                reduced = self._reduce_buffers.shard_buffer(gradient.dtype, number)[: home.numel]
                pending = self._comm.reduce_scatter(reduced, local[bucket.start : bucket.end], what)
                under_way.append(partial(self._finish_reduce, pending, reduced, mine, what, add=False))
            if len(under_way) == self._config.ring:
                under_way.popleft()()
        for finish in under_way:
            finish()
        gradient.shard = shard
        if gradient.carried_over is not None:
            shard.add_(gradient.carried_over)
            self._free_carried_over(gradient)
        gradient.has_local_sum, gradient.has_shard = False, True

    # -- packing and reducing -----------------------------------------------------------------------------------

    def _start_reduce(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients bucket by bucket, beside the computation; pack what has to be."""
        self._order.check(unit.reduce_label)
        if self._reduce_buffers.is_reading_autograd_grads:  # which could not go before
            with self._reduce_stream:
                self._reduce_buffers.wait_all()
        self._wait_reduce_stream()  # the unit before: its gradients may go once the lane has read them
        if any(gradient.has_local_sum for gradient in self._unit_grads[unit]):
            self._accumulate_local(unit)
        for gradient in self._unit_grads[unit]:
            taken = gradient.pop_autograd_grads()
            ready = self._reduce_buffers.in_place_inputs(gradient, taken)
            slots = self._reduce_buffers.acquire_slots(gradient, ready)
            made = self._track([tensor for tensor in taken if tensor is not None])
            at_once = self._can_pack_on_compute_stream(gradient)
            if not at_once:
                self._reduce_stream_inputs += made
            self._allocate_shard(gradient)
            gradient.flat.wait_for_update()  # an update of its values may still read the gradient of the step before
            with nullcontext() if at_once else self._reduce_stream:
                for number, slot in enumerate(slots):
                    self._launch_reduce(gradient, slot, number, taken, ready[number], unit.reduce_label)
            gradient.has_shard = True
            self._free_local_sum(gradient)
        if self._comm.device.type != "cuda":
            self._reduce_stream_inputs.clear()

    def _can_pack_on_compute_stream(self, gradient: FlatGrad) -> bool:
        """Whether compute itself packs it: see [Note: packing at once]."""
        one = (
            len(gradient.flat.layout.buckets) == 1
            and gradient.single_param_buckets[0] is None
            and not gradient.has_local_sum
        )
        return one and not self._comm.replicate_axes and self._config.offload is None

    def _launch_reduce(
        self,
        gradient: FlatGrad,
        slot: BucketSlot,
        bucket_index: int,
        autograd_grads: list[torch.Tensor | None],
        in_place_input: torch.Tensor | None,
        what: str,
    ) -> None:
        slot.wait()
        packed = (
            self._reduce_buffers.pack(gradient, bucket_index, slot, autograd_grads)
            if in_place_input is None
            else in_place_input
        )
        mine, add = gradient.bucket_shards[bucket_index], gradient.has_shard
        # Where nothing is there yet, the result can land where it belongs.
        place = slot.output_buffers.view(mine.numel()) if gradient.needs_reduce_buffer else mine
        if gradient.is_offloaded:
            result, spare = (packed, place) if self._comm.shard_axis.size == 1 else (place, packed[: mine.numel()])
            pending = self._comm.reduce_scatter(result, packed, what)
            slot.finish_reduce = partial(
                self._finish_reduce_offloaded, pending, result, spare, gradient, bucket_index, what, add
            )
        else:
            pending = self._comm.reduce_scatter(place, packed, what)
            slot.finish_reduce = partial(
                self._finish_reduce_on_device, pending, place, gradient, bucket_index, what, add, in_place_input
            )
        if self._comm.data_parallel_size == 1:  # nobody is waited for
            slot.wait()

    def _finish_reduce(
        self, pending: CollectiveWork, result: torch.Tensor, shard: torch.Tensor, what: str, add: bool
    ) -> None:
        """End a reduction: sum over the replicas, average, and put the result where it belongs."""
        pending.wait()
        self._average(result, what)
        if add:
            shard.add_(result)
        elif result.data_ptr() != shard.data_ptr():
            shard.copy_(result)

    def _finish_reduce_on_device(
        self,
        pending: CollectiveWork,
        result: torch.Tensor,
        gradient: FlatGrad,
        bucket_index: int,
        what: str,
        add: bool,
        autograd_grad: torch.Tensor | None,
    ) -> None:
        """End the reduction of a gradient that rests on the device. ``read``: autograd's own, which it has read."""
        self._finish_reduce(pending, result, gradient.bucket_shards[bucket_index], what, add)
        if autograd_grad is not None and self._comm.device.type == "cuda":
            self._reduce_stream_inputs.append(autograd_grad)
        self._notify(gradient, bucket_index)

    def _finish_reduce_offloaded(
        self,
        pending: CollectiveWork,
        result: torch.Tensor,
        scratch: torch.Tensor,
        gradient: FlatGrad,
        bucket_index: int,
        what: str,
        add: bool,
    ) -> None:
        """End the reduction of a gradient that rests outside the device: measure it, and send it there.

        What the backwards before have left there comes back through ``spare`` to be added to.
        """
        pending.wait()
        self._average(result, what)
        mine = gradient.bucket_shards[bucket_index]
        if add:
            result.add_(mine if mine.device == result.device else scratch.copy_(mine, non_blocking=True))
        self._record_norms(gradient, bucket_index, result)
        mine.copy_(result, non_blocking=True)
        gradient.copy_done = self._reduce_stream.record_blocking_event()
        self._notify(gradient, bucket_index)

    def _record_norms(self, gradient: FlatGrad, bucket_index: int, result: torch.Tensor) -> None:
        """Take the norms of what is about to leave the device."""
        start = gradient.flat.shard_ranges[bucket_index].start
        parts = gradient.norm_ranges(bucket_index, include_replicated=self._comm.tensor_axis.rank == 0)
        views = [result[part.start - start : part.end - start] for part in parts]
        gradient.norms[bucket_index] = compute_norms(views, 2.0)
        if self.needs_overflow_check:
            gradient.max_abs[bucket_index] = compute_norms([result], math.inf)

    def _notify(self, gradient: FlatGrad, bucket_index: int) -> None:
        landed = self.on_shard_ready() if bucket_index == len(gradient.flat.shard_ranges) - 1 else None
        if landed is not None:
            landed(gradient.flat)

    def _average(self, shard: torch.Tensor, what: str) -> None:
        for axis in self._comm.replicate_axes:
            self._comm.all_reduce(shard, axis, what).wait()
        if self._comm.data_parallel_size > 1:
            shard.mul_(1 / self._comm.data_parallel_size)

    def _wait_reductions(self) -> None:
        """Finish every reduction under way, so that compute may use the results."""
        with self._reduce_stream:
            self._reduce_buffers.wait_all()
        self._wait_reduce_stream()
        self._reduce_buffers.free()

    def _wait_reduce_stream(self) -> None:
        """Have compute wait for the lane; what that has read may go."""
        self._reduce_stream.compute_wait_all()
        self._reduce_stream_inputs.clear()

    # -- memory -------------------------------------------------------------------------------------------------

    def _reduce_order(self) -> list[Unit]:
        return self.reduce_queue if self.reduce_queue is not None else self.units[::-1]

    def _units_with_autograd_grads(self) -> list[Unit]:
        return [
            unit for unit in self.units if any(gradient.has_autograd_grads() for gradient in self._unit_grads[unit])
        ]

    def _allocate_shard(self, gradient: FlatGrad) -> None:
        """Have a place for the shard."""
        if not gradient.is_offloaded:
            self.memory.allocate(gradient)
        elif gradient.shard is None:
            tier, numel = gradient.flat.tier_placement.gradients, gradient.flat.layout.shard_numel
            gradient.set_shard(self._tiers.zeros("gradients", tier, numel, gradient.dtype, pinned=True))

    def _track(self, autograd_grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Count what autograd made for one unit, at its highest; it goes at once."""
        self._tracker.record_transient("autograd", sum([tensor.nbytes for tensor in autograd_grads]))
        return autograd_grads
