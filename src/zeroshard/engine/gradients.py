"""Take gradients from autograd, sum them over backwards, reduce them over the ranks, and keep each rank's shard."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from zeroshard.comm import CollectiveOrder, CollectiveWork, Communicator
from zeroshard.config.config import Config
from zeroshard.engine.flat_grad import FlatGrad, compute_norms
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.grad_memory import GradMemory
from zeroshard.engine.grad_scale import GradScale
from zeroshard.engine.parameter import zero_autograd_grads
from zeroshard.engine.reduce import ReduceBuffers
from zeroshard.engine.unit import Unit
from zeroshard.memory import BucketSlot, MemoryTracker, Pool, SideStream, TierAllocator
from zeroshard.sharding import Placement


class Gradients:
    """All gradients of one model.

    Partitioned gradients (stages 2 and 3) are reduced when each unit's backward is done, in place or packed into a
    ring of buckets, in the same fixed order on every rank. Replicated gradients (stages 0 and 1) are summed in place
    over any number of backwards and reduced in place, once, when the optimizer needs them. None of this is recorded in
    an autograd graph, even if the backward creates one.

    [Note: packing on the compute stream]
    If a unit's gradients fit in one bucket, as for most units, the compute stream packs them, and autograd's gradients
    are freed before the next unit's are computed. It first waits for the pending reduction of its ring slot, which
    started some units ago (``Config.ring``). With more buckets than slots, it would have to wait for reductions that
    have just started. If finishing a reduction takes more than a wait and a multiplication (an all-reduce over
    replicas, a copy off the device), it would wait for that too. In these cases the side stream packs the gradients and
    finishes the reductions, concurrently with compute, and autograd's gradients stay until the next unit's are ready.
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
        self.reduce_queue: list[Unit] | None = None  # the fixed reduce order, once all ranks have confirmed it
        self.scale = GradScale()  # factors that no gradient has been multiplied by yet
        # some gradients, and a factor that only these have not been multiplied by yet
        self._deferred_scales: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self.clear_count = 0  # how often gradients were set to None
        self._has_accumulated = False  # whether a backward has added gradients since they were cleared
        # the inverse loss scale of a backward that has not visited any module yet
        self._unhooked_inverse_scale: torch.Tensor | None = None
        self._is_usage_synced = False  # whether ``is_param_used`` holds the result of all ranks
        self._cached_parameter_norms: dict[float, torch.Tensor] = {}  # norms, by norm type: see ``parameter_norms``
        self.has_unreduced = False  # whether a backward has only summed locally
        # weak; called with each FlatParam whose shard is complete
        self.on_shard_ready: Callable[[], Callable[[FlatParam], None] | None] = lambda: None
        self.needs_overflow_check = False  # fp16: the largest magnitudes are needed too
        flat_grads, is_persistent = self.flat_grads.values(), config.offload is not None
        self.memory = GradMemory(flat_grads, self.is_partitioned, pool, tracker, is_persistent)
        self._comm, self._order, self._tracker, self._config, self._tiers = comm, order, tracker, config, tiers
        self._reduce_stream = SideStream(comm.device, comm.wait_timer)
        self._reduce_buffers = ReduceBuffers(flat_grads, comm, config.ring, tracker)
        self._queue_position = 0  # index in the reduce order of the next unit to reduce
        self._done_units: set[Unit] = set()
        self._reduce_stream_inputs: list[torch.Tensor] = []  # kept until compute has waited for the side stream

    # -- inside backward ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_unit_done(self, unit: Unit, needs_grad_sync: bool) -> None:
        """Take the gradients of a unit whose backward is done on this rank."""
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
        """Reduce the remaining units; those without a gradient on this rank contribute zeros."""
        if self.is_partitioned and needs_grad_sync:
            for unit in self._reduce_order()[self._queue_position :]:
                self._start_reduce(unit)
            self._reset_queue()
            self.has_unreduced = False
        else:
            self.has_unreduced = bool(self.units)
        for unit in self._units_with_autograd_grads():  # gradients that arrived after their unit was done
            self._start_reduce(unit) if self.is_partitioned and needs_grad_sync else self._accumulate_local(unit)
        self._wait_reductions()

    def abort_backward(self) -> None:
        """Finish the pending reductions of a backward that raised, and restart the reduce queue."""
        self.wait_reductions()
        self._reset_queue()
        with torch.no_grad():
            self._add_untracked_grads()
        if not any(gradient.has_local_sum or gradient.has_shard for gradient in self.flat_grads.values()):
            self.scale, self._has_accumulated = GradScale(), False

    def wait_reductions(self) -> None:
        """Finish the pending reductions of a backward that raised."""
        if self._reduce_stream_inputs or self._reduce_buffers.is_busy:
            self._wait_reductions()

    def _reset_queue(self) -> None:
        self._queue_position = 0
        self._done_units.clear()

    def clear_if_empty(self) -> None:
        """Clear all gradients and free their memory if the last one was cleared individually.

        With several ranks, do so only if their usage is synced: a parameter without a gradient on this rank may have
        one on another.
        """
        is_single_rank = self._comm.data_parallel_size == 1 and self._comm.tensor_axis.size == 1
        if (
            (is_single_rank or self._is_usage_synced)
            and not self.has_used_params
            and not self._units_with_autograd_grads()
        ):
            self.clear(set_to_none=True)

    # -- between backward and step ------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_pending(self) -> None:
        """Reduce the gradients that this rank has only summed locally."""
        self._apply_deferred_scales()
        self._add_unhooked_scaled_grads()
        if self.scale.inv_scale is not None:
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
                if not gradient.has_local_sum:  # no gradient on this rank: contribute zeros
                    self._allocate_local_sum(gradient).zero_()
                self._reduce_local_sum(gradient, unit.reduce_label)
        self._wait_reductions()
        self.has_unreduced = False

    def _add_untracked_grads(self) -> None:
        """Add gradients that no hook has reported: set by the user, or left by a backward that raised."""
        for unit in self._units_with_autograd_grads():
            self._accumulate_local(unit)
            self._has_accumulated, self.has_unreduced, self._is_usage_synced = True, True, False
            self._cached_parameter_norms.clear()

    @torch.no_grad()
    def begin_backward(self, inverse_scale: torch.Tensor | None) -> None:
        """Prepare for a backward whose loss scale has the inverse ``inverse_scale`` (None: its loss is not scaled)."""
        self.apply_clip_coef()
        self._is_usage_synced = False
        self._cached_parameter_norms.clear()
        earlier = self.scale.inv_scale
        if self._has_accumulated and earlier is not inverse_scale:
            if earlier is None or inverse_scale is None:
                first, second = ("was not", "was") if earlier is None else ("was", "was not")
                raise RuntimeError(
                    f"the loss of the existing gradients {first} multiplied by optimizer.scale(loss), and the loss of "
                    f"this backward {second}: the gradients cannot be added. Scale every loss of a step or none, or "
                    "call optimizer.zero_grad() in between"
                )
            # a step has changed the scale, and the gradients were not cleared
            self._scale_all(earlier / inverse_scale)
        self.scale, self._has_accumulated, self._unhooked_inverse_scale = GradScale(inverse_scale), True, None

    @torch.no_grad()
    def on_scaled_backward(self, inverse_scale: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record that a backward starts from a scaled loss; it may not visit any module."""
        self._add_unhooked_scaled_grads()
        self._check_no_manual_grads()
        self._unhooked_inverse_scale = inverse_scale

    def _add_unhooked_scaled_grads(self) -> None:
        """Add the gradients of a scaled backward that visited no module, if there was one."""
        if self._unhooked_inverse_scale is not None and self._units_with_autograd_grads():
            self.begin_backward(self._unhooked_inverse_scale)
            self._add_untracked_grads()
        self._unhooked_inverse_scale = None

    def _check_no_manual_grads(self) -> None:
        """Raise if the user has set gradients: those carry no loss scale, while the others do or are about to."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._units_with_autograd_grads():
                for name, parameter in (pair for flat in unit.flats for pair in flat.named_parameters):
                    if parameter._grad is not None and bool(parameter._grad.any()):  # zeros need no scale
                        raise RuntimeError(
                            f"the gradient of {name!r} was set by hand, and the others come from a loss that is "
                            "multiplied by optimizer.scale(loss): they cannot be used together. Clear it "
                            "(parameter.grad = None), and add the term to the loss"
                        )

    def _scale_all(self, factor: torch.Tensor) -> None:
        flat_grads = self.flat_grads.values()
        sums = [g.local_sum for g in flat_grads if g.has_local_sum and g.local_sum is not None]
        self.scale_shards(
            [*self.shards(), *sums, *(g.carried_over for g in flat_grads if g.carried_over is not None)], factor
        )
        self.clear_norms()

    def clip(self, coefficient: torch.Tensor) -> None:
        """Multiply all gradients by a coefficient, at the next step or before they change."""
        earlier = self.scale.clip_coef
        self.scale = replace(self.scale, clip_coef=coefficient if earlier is None else earlier * coefficient)

    def defer_scale(self, shards: list[torch.Tensor], factor: torch.Tensor | None) -> None:
        """Multiply these gradients by a factor before they are read again: a step has multiplied only copies of them.

        Most loops clear the gradients first, and then nothing is multiplied.
        """
        if shards and factor is not None:
            self._deferred_scales.append((shards, factor))

    @torch.no_grad()
    def apply_clip_coef(self) -> None:
        """Apply the clipping that was deferred to the step, because the gradients are about to change."""
        self._apply_deferred_scales()
        if self.scale.clip_coef is not None:
            self.scale_shards(self.shards(), self.scale.clip_coef)
            self.scale = replace(self.scale, clip_coef=None)
            self.clear_norms()

    def _apply_deferred_scales(self) -> None:
        """Apply the factors of :meth:`defer_scale`."""
        if not self._deferred_scales:
            return
        for flat in self.flat_grads:
            flat.wait_for_update()  # afterwards, its update has read the gradient
        for shards, factor in self._deferred_scales:
            self.scale_shards(shards, factor)
        self._deferred_scales = []
        self.clear_norms()

    def clear_norms(self) -> None:
        """Clear all cached norms, because gradients have changed."""
        self._cached_parameter_norms.clear()
        for gradient in self.flat_grads.values():
            gradient.clear_norms()

    def scale_shards(self, shards: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply reduced gradients by ``factor``, on the device or offloaded."""
        on_device = [shard for shard in shards if shard.device == factor.device]
        if on_device:
            torch._foreach_mul_(on_device, factor)
        if len(on_device) < len(shards):
            self.wait_offloaded()
            host_factor = factor.cpu()
            for shard in shards:
                if shard.device != factor.device:
                    shard.mul_(host_factor)

    def wait_offloaded(self) -> None:
        """Wait until all offloaded gradients are copied off the device."""
        for gradient in self.flat_grads.values():
            gradient.wait_copy()

    @property
    def has_used_params(self) -> bool:
        """Return whether any parameter has a gradient."""
        return any(True in gradient.is_param_used for gradient in self.flat_grads.values())

    def shards(self) -> list[torch.Tensor]:
        """Return the reduced gradient shards of this rank."""
        return [g.shard for g in self.flat_grads.values() if g.has_shard and g.shard is not None and g.shard.numel()]

    def shard_norms(self, norm_type: float) -> list[torch.Tensor]:
        """Return the norms of the gradient ranges that this rank counts, bucket by bucket, in fp32, on the device.

        Gradients that are replicated over the tensor axis are counted by its first rank only. The norms of offloaded
        gradients were computed before the copy off the device, by the same kernel and in the same order.
        """
        include_replicated = self._comm.tensor_axis.rank == 0
        norms: list[torch.Tensor] = []
        # positions in ``norms`` that still hold gradients
        pending: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for g in self.flat_grads.values():
            for bucket_index in range(len(g.flat.shard_ranges)) if g.has_shard and g.shard is not None else ():
                bucket_norms = g.norms.get(bucket_index) if norm_type == 2 else g.max_abs.get(bucket_index)
                if bucket_norms is None and g.shard is not None:
                    g.wait_copy()
                    bucket_norms = [g.shard[span.slice] for span in g.norm_ranges(bucket_index, include_replicated)]
                    positions = pending.setdefault((g.shard.device, g.shard.dtype), [])
                    positions += range(len(norms), len(norms) + len(bucket_norms))
                norms += bucket_norms or ()
        for positions in pending.values():  # few kernels for any number of gradients
            for i, norm in zip(positions, compute_norms([norms[i] for i in positions], norm_type), strict=True):
                norms[i] = norm.to(self._comm.device)
        return norms

    def parameter_norms(self, norm_type: float) -> torch.Tensor:
        """Return the norm of each trainable parameter's full gradient, in fp64, in the order of ``flat_grads``.

        All ranks call it together. It takes one all-reduce per axis; the norms are cached until a gradient changes.
        """
        if norm_type not in self._cached_parameter_norms:
            self._cached_parameter_norms[norm_type] = self._compute_parameter_norms(norm_type)
        norms, factors = self._cached_parameter_norms[norm_type], self.scale.factors
        return norms * math.prod(factors[1:], start=factors[0]).abs() if factors and norm_type != 0 else norms

    def _compute_parameter_norms(self, norm_type: float) -> torch.Tensor:
        is_inf_norm, device = abs(norm_type) == math.inf, self._comm.device
        include_replicated = self._comm.tensor_axis.rank == 0  # the first tensor rank counts what is replicated
        views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        param_positions: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        offset = 0
        for gradient in self.flat_grads.values():
            for param_range in gradient.flat.owned_ranges if gradient.has_shard and gradient.shard is not None else ():
                if gradient.shard is not None and (
                    include_replicated or gradient.flat.tp_shards[param_range.param_index] is not None
                ):
                    gradient.wait_copy()
                    view = gradient.shard[param_range.offset : param_range.offset + param_range.elements.numel]
                    views.setdefault((view.device, view.dtype), []).append(view)
                    param_positions.setdefault((view.device, view.dtype), []).append(offset + param_range.param_index)
            offset += len(gradient.is_param_used)
        total = torch.full((offset,), math.inf if norm_type == -math.inf else 0.0, dtype=torch.float64, device=device)
        has_nan = torch.zeros_like(total)  # > 0 where a value is NaN: a maximum over ranks may drop NaN
        for key, group in views.items():
            positions = torch.tensor(param_positions[key], device=device)
            norms = torch.stack(compute_norms(group, norm_type)).to(device, torch.float64)
            if is_inf_norm:
                has_nan.index_add_(0, positions, norms.isnan().double())
                total.scatter_reduce_(
                    0, positions, norms.nan_to_num(nan=0.0, posinf=math.inf), "amax" if norm_type > 0 else "amin"
                )
            else:
                total.index_add_(0, positions, norms if norm_type == 0 else norms**norm_type)
        sign = -1.0 if norm_type == -math.inf else 1.0
        reduced = torch.stack([sign * total, has_nan]) if is_inf_norm else total
        what = "sum the norms of gradients"
        # along the other axes, all ranks have the same values
        for axis in (self._comm.shard_axis, self._comm.tensor_axis):
            if axis.size > 1:
                self._order.check(what)
                op = dist.ReduceOp.MAX if is_inf_norm else dist.ReduceOp.SUM
                self._comm.all_reduce(reduced, axis, what, op).wait()
        if is_inf_norm:
            return torch.where(reduced[1] > 0, math.nan, sign * reduced[0])
        return reduced if norm_type == 0 else reduced ** (1 / norm_type)

    def prepare_write(self, flat_grad: FlatGrad) -> None:
        """Prepare a reduced gradient for being written: wait for its readers and clear its cached norms."""
        flat_grad.flat.wait_for_update()  # a pending update may still read the gradient
        flat_grad.wait_copy()
        flat_grad.clear_norms()
        self._cached_parameter_norms.clear()

    @property
    def scaled_suffix(self) -> str:
        """Return a suffix for pass names: ranks with and without a loss scale must not reduce together."""
        return "" if self.scale.inv_scale is None else " of scaled losses"

    @property
    def has_grads(self) -> bool:
        """Return whether there may be gradients, on this rank or another."""
        return self.has_unreduced or self.memory.has_grads

    @property
    def has_manual_grads(self) -> bool:
        """Return whether a parameter has a gradient that the user has set, not a backward of the model."""
        return bool(self._units_with_autograd_grads())

    @torch.no_grad()
    def sync_used_params(self) -> None:
        """Reduce pending gradients, and find out which parameters have a gradient on any rank.

        All ranks call it together. Further calls before the next backward cost nothing.
        """
        self._apply_deferred_scales()
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
        """Record which parameters have a gradient on any rank, in the order of ``flat_grads``."""
        remaining = iter(flags)
        for gradient in self.flat_grads.values():
            gradient.is_param_used = [next(remaining) for _ in gradient.is_param_used]

    def tp_replicated_square_sums(self) -> tuple[list[str], torch.Tensor]:
        """Return the parameters that are not tensor-parallel, and the sum of squares of this rank's shard of each.

        The list is the same on all ranks. The positions of the parameter ranges differ, because TP shards may be
        uneven.
        """
        replicated = [
            (g, i) for g in self.flat_grads.values() for i, tp_param in enumerate(g.flat.tp_params) if tp_param is None
        ]
        positions = {(gradient, index): position for position, (gradient, index) in enumerate(replicated)}
        squares = torch.zeros(len(replicated), device=self._comm.device)
        for gradient in self.flat_grads.values():
            for param_range in gradient.flat.owned_ranges if gradient.has_shard and gradient.shard is not None else ():
                position = positions.get((gradient, param_range.param_index))
                if position is not None and gradient.shard is not None:
                    values = gradient.shard[param_range.offset : param_range.offset + param_range.elements.numel]
                    gradient.wait_copy()
                    squares[position] += values.float().square().sum().to(squares.device)
        return [gradient.flat.names[index] for gradient, index in replicated], squares

    def clear(self, set_to_none: bool) -> None:
        """Set all gradients to None, or to zero."""
        self.wait_reductions()
        self.scale, self._deferred_scales = GradScale(None if set_to_none else self.scale.inv_scale), []
        self._cached_parameter_norms.clear()
        self._has_accumulated, self._unhooked_inverse_scale = False, None
        if set_to_none:
            self._is_usage_synced = False
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
            self._reduce_stream_inputs.clear()  # no reduction is pending
            self.memory.free()

    # -- summing locally ----------------------------------------------------------------------------------------

    def _accumulate_local(self, unit: Unit) -> None:
        for gradient in self._unit_grads[unit]:
            autograd_grads = gradient.pop_autograd_grads()
            present = [index for index, tensor in enumerate(autograd_grads) if tensor is not None]
            if not present:
                continue
            sources = self._track([tensor for tensor in autograd_grads if tensor is not None])
            local_sum = self._allocate_local_sum(gradient)
            views = [gradient.local_sum_views[index] for index in present]
            if gradient.has_local_sum:
                torch._foreach_add_(views, sources)
                continue
            if len(present) < len(autograd_grads) or local_sum.numel() > sum(gradient.flat.layout.numels):
                local_sum.zero_()
            torch._foreach_copy_(views, sources)
            gradient.has_local_sum = True

    def _allocate_local_sum(self, gradient: FlatGrad) -> torch.Tensor:
        flat = gradient.flat
        flat.wait_for_update()  # a pending update may still read the previous step's gradient
        if self.is_partitioned:
            self.memory.allocate_local_sum(gradient)
        elif gradient.shard is not None and gradient.has_shard and not gradient.has_local_sum:
            # A backward after the reduction and before zero_grad(): the reduced shard is inside ``local_sum``, save it.
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
        """Reduce ``local_sum`` bucket by bucket, and write the reduced shards to its front, where they form the shard.

        The target of a bucket, ``shard_range(bucket)``, is inside buckets that are already reduced. So nothing that is
        still needed is overwritten, and stage 1 needs no memory in addition to its full gradients.
        """
        if gradient.local_sum is None:
            return
        local_sum, layout = gradient.local_sum, gradient.flat.layout
        shard = local_sum[: layout.shard_numel]
        unfinished: deque[Callable[[], None]] = deque()
        for bucket_index, bucket in enumerate(layout.buckets):
            span = layout.shard_range(bucket)
            bucket_shard = shard[span.start : span.end]
            if self._comm.shard_axis.size == 1:
                unfinished.append(partial(self._average, bucket_shard, what))
            else:
                reduced = self._reduce_buffers.shard_buffer(gradient.dtype, bucket_index)[: span.numel]
                pending = self._comm.reduce_scatter(reduced, local_sum[bucket.start : bucket.end], what)
                unfinished.append(partial(self._finish_reduce, pending, reduced, bucket_shard, what, add=False))
            if len(unfinished) == self._config.ring:
                unfinished.popleft()()
        for finish in unfinished:
            finish()
        gradient.shard = shard
        if gradient.carried_over is not None:
            shard.add_(gradient.carried_over)
            self._free_carried_over(gradient)
        gradient.has_local_sum, gradient.has_shard = False, True

    # -- packing and reducing -----------------------------------------------------------------------------------

    def _start_reduce(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients bucket by bucket, concurrently with compute; pack them if necessary."""
        self._order.check(unit.reduce_label)
        if self._reduce_buffers.is_reading_autograd_grads:  # these could not be freed before
            with self._reduce_stream:
                self._reduce_buffers.wait_all()
        self._wait_reduce_stream()  # frees the previous unit's gradients, which the side stream has read
        if any(gradient.has_local_sum for gradient in self._unit_grads[unit]):
            self._accumulate_local(unit)
        for gradient in self._unit_grads[unit]:
            autograd_grads = gradient.pop_autograd_grads()
            in_place_inputs = self._reduce_buffers.in_place_inputs(gradient, autograd_grads)
            slots = self._reduce_buffers.acquire_slots(gradient, in_place_inputs)
            tracked = self._track([tensor for tensor in autograd_grads if tensor is not None])
            on_compute_stream = self._can_pack_on_compute_stream(gradient)
            if not on_compute_stream:
                self._reduce_stream_inputs += tracked
            self._allocate_shard(gradient)
            gradient.flat.wait_for_update()  # a pending update may still read the previous step's gradient
            with nullcontext() if on_compute_stream else self._reduce_stream:
                for bucket_index, slot in enumerate(slots):
                    self._launch_reduce(
                        gradient, slot, bucket_index, autograd_grads, in_place_inputs[bucket_index], unit.reduce_label
                    )
            gradient.has_shard = True
            self._free_local_sum(gradient)
        if self._comm.device.type != "cuda":
            self._reduce_stream_inputs.clear()

    def _can_pack_on_compute_stream(self, gradient: FlatGrad) -> bool:
        """Return whether the compute stream packs the gradient: see [Note: packing on the compute stream]."""
        is_one_bucket = (
            len(gradient.flat.layout.buckets) == 1
            and gradient.single_param_buckets[0] is None
            and not gradient.has_local_sum
        )
        return is_one_bucket and not self._comm.replicate_axes and self._config.offload is None

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
        bucket_shard, add = gradient.bucket_shards[bucket_index], gradient.has_shard
        # If the shard holds no values yet, reduce directly into it.
        output = slot.output_buffers.view(bucket_shard.numel()) if gradient.needs_reduce_buffer else bucket_shard
        if gradient.is_offloaded:
            result, scratch = (
                (packed, output) if self._comm.shard_axis.size == 1 else (output, packed[: bucket_shard.numel()])
            )
            pending = self._comm.reduce_scatter(result, packed, what)
            slot.finish_reduce = partial(
                self._finish_reduce_offloaded, pending, result, scratch, gradient, bucket_index, what, add
            )
        else:
            pending = self._comm.reduce_scatter(output, packed, what)
            slot.finish_reduce = partial(
                self._finish_reduce_on_device, pending, output, gradient, bucket_index, what, add, in_place_input
            )
        if self._comm.data_parallel_size == 1:  # there are no other ranks to wait for
            slot.wait()

    def _finish_reduce(
        self, pending: CollectiveWork, result: torch.Tensor, shard: torch.Tensor, what: str, add: bool
    ) -> None:
        """Finish a reduction: sum over the replicas, average, and write the result to ``shard``."""
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
        """Finish the reduction of a gradient on the device. ``autograd_grad``: the tensor that was reduced in place."""
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
        """Finish the reduction of an offloaded gradient: record its norms, and copy it off the device.

        The sum of earlier backwards is copied back to the device through ``scratch``, and added.
        """
        pending.wait()
        self._average(result, what)
        bucket_shard = gradient.bucket_shards[bucket_index]
        if add:
            result.add_(
                bucket_shard if bucket_shard.device == result.device else scratch.copy_(bucket_shard, non_blocking=True)
            )
        self._record_norms(gradient, bucket_index, result)
        bucket_shard.copy_(result, non_blocking=True)
        gradient.copy_done = self._reduce_stream.record_blocking_event()
        self._notify(gradient, bucket_index)

    def _record_norms(self, gradient: FlatGrad, bucket_index: int, result: torch.Tensor) -> None:
        """Record the norms of a reduced bucket that is about to be offloaded."""
        start = gradient.flat.shard_ranges[bucket_index].start
        spans = gradient.norm_ranges(bucket_index, include_replicated=self._comm.tensor_axis.rank == 0)
        views = [result[span.start - start : span.end - start] for span in spans]
        gradient.norms[bucket_index] = compute_norms(views, 2.0)
        if self.needs_overflow_check:
            gradient.max_abs[bucket_index] = compute_norms([result], math.inf)

    def _notify(self, gradient: FlatGrad, bucket_index: int) -> None:
        callback = self.on_shard_ready() if bucket_index == len(gradient.flat.shard_ranges) - 1 else None
        if callback is not None:
            callback(gradient.flat)

    def _average(self, shard: torch.Tensor, what: str) -> None:
        for axis in self._comm.replicate_axes:
            self._comm.all_reduce(shard, axis, what).wait()
        if self._comm.data_parallel_size > 1:
            shard.mul_(1 / self._comm.data_parallel_size)

    def _wait_reductions(self) -> None:
        """Finish all pending reductions, so that compute may use the results."""
        with self._reduce_stream:
            self._reduce_buffers.wait_all()
        self._wait_reduce_stream()
        self._reduce_buffers.free()

    def _wait_reduce_stream(self) -> None:
        """Make compute wait for the side stream, and free the tensors that it has read."""
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
        """Allocate memory for the shard, unless it has some."""
        if not gradient.is_offloaded:
            self.memory.allocate(gradient)
        elif gradient.shard is None:
            tier, numel = gradient.flat.tier_placement.gradients, gradient.flat.layout.shard_numel
            gradient.set_shard(self._tiers.zeros("gradients", tier, numel, gradient.dtype, pinned=True))

    def _track(self, autograd_grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Track the bytes of one unit's autograd gradients as a transient peak: they are freed right away."""
        self._tracker.record_transient("autograd", sum([tensor.nbytes for tensor in autograd_grads]))
        return autograd_grads
