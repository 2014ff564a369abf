"""Gradients: take gradients from autograd, sum them over backwards, and have them reduced over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist

from zeroshard.engine.context import ShardContext
from zeroshard.engine.flat_grad import FlatGrad, GradMemory
from zeroshard.engine.grad_norms import GradNorms
from zeroshard.engine.grad_scale import UNSCALED, GradScaling
from zeroshard.engine.last_backward import LocalSums
from zeroshard.engine.param_data import has_autograd_grads
from zeroshard.engine.reduce import NO_HISTORY, GradReducer, Hops, ReduceQueue
from zeroshard.engine.unit import Unit
from zeroshard.utils.profiling import label


class Gradients:
    """All gradients of one model.

    Partitioned gradients (stages 2 and 3) are reduced when each unit's backward is done, in place or packed into a
    ring of buckets, in the same fixed order on every rank. Replicated gradients (stages 0 and 1) are summed in place
    over any number of backwards and reduced in place, once: in the last backward, unit by unit, or when the optimizer
    needs them (see [Note: reducing in the last backward]). None of this is recorded in an autograd graph, even if the
    backward creates one.
    """

    def __init__(self, context: ShardContext, units: list[Unit]) -> None:
        flats = [flat for unit in units for flat in unit.flats if flat.spec.is_trainable]
        self.flat_grads = {flat: FlatGrad(flat, flat.spec.reduce_dtype) for flat in flats}
        self.units = [unit for unit in units if unit.is_trainable]
        self._unit_grads = {
            unit: [self.flat_grads[flat] for flat in unit.flats if flat.spec.is_trainable] for unit in units
        }
        self._context = context
        self.is_partitioned = context.placement.gradients
        self.memory = GradMemory(self.flat_grads.values(), context)
        self.reducer = GradReducer(self.flat_grads.values(), self.memory, context)
        self.norms = GradNorms(self.flat_grads, context.comm, context.order)
        self.scaling = GradScaling(self.flat_grads, self.norms)
        self.reduce_queue = ReduceQueue(self.units)
        self.local_sums = LocalSums(self._unit_grads, self.reduce_queue, self.reducer, context)
        self.has_unreduced = False  # whether a backward has only summed locally
        self._has_accumulated = False  # whether a backward has added gradients since they were cleared
        # the inverse loss scale of a backward that has not visited any module yet
        self._unhooked_inverse_scale: torch.Tensor | None = None
        self._is_usage_synced = False  # whether ``is_param_used`` holds the result of all ranks
        self._cleared: set[FlatGrad] = set()  # cleared since a backward has added gradients

    # -- inside backward ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_unit_done(self, unit: Unit, needs_grad_sync: bool) -> None:
        """Take the gradients of a unit whose backward is done on this rank."""
        if not unit.is_trainable:
            return
        if self.is_partitioned and needs_grad_sync:
            for done in self.reduce_queue.add(unit):
                self._start_reduce(done)
        elif self.is_partitioned or not self.local_sums.is_reducing(unit):
            self._accumulate_local(unit)
            self.local_sums.on_accumulated(unit)

    @torch.no_grad()
    def finalize_backward(self, needs_grad_sync: bool) -> None:
        """Reduce the remaining units; those without a gradient on this rank contribute zeros."""
        is_reducing = needs_grad_sync if self.is_partitioned else self.local_sums.is_last_backward
        if self.is_partitioned and needs_grad_sync:
            for unit in self.reduce_queue.drain():
                self._start_reduce(unit)
        elif is_reducing:
            self.local_sums.start_remaining()
        self.has_unreduced = bool(self.units) and not is_reducing
        for unit in self._units_with_autograd_grads():  # gradients that arrived after their unit was done
            self._start_reduce(unit) if self.is_partitioned and needs_grad_sync else self._add_untracked_grads()
        self.reducer.wait()

    def abort_backward(self) -> None:
        """Finish the reductions of a backward that raised; see also :class:`ReduceQueue`."""
        self.wait_reductions()
        self.reduce_queue.abort(keeps_position=not self.is_partitioned)
        with torch.no_grad():
            self._add_untracked_grads()
            self.has_unreduced &= not self.local_sums.finish_aborted()
        if not self.reduce_queue.is_partial:
            self.has_unreduced |= any(gradient.has_local_sum for gradient in self.flat_grads.values())
        if not self.memory.has_grads:
            self.scaling.scale, self._has_accumulated = UNSCALED, False

    def wait_reductions(self) -> None:
        """Finish the pending reductions, if there are any."""
        if self.reducer.is_busy:
            self.reducer.wait()

    def clear_if_empty(self) -> None:
        """Clear all gradients and free their memory if the last one was cleared individually.

        With several ranks, do so only if their usage is synced: a parameter without a gradient on this rank may have
        one on another.
        """
        is_synced = self._is_usage_synced or not self._context.comm.consistency.is_distributed
        if is_synced and not self.has_used_params and not self._units_with_autograd_grads():
            self.clear(set_to_none=True)

    # -- between backward and step ------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_pending(self) -> None:
        """Reduce the gradients that this rank has only summed locally."""
        if self.scaling.deferred:
            self.scaling.apply_deferred()
        self.add_unhooked_scaled_grads()
        if self.scaling.scale.inv_scale is not None:
            _check_no_manual_grads(self._units_with_autograd_grads())
        self._add_untracked_grads()
        if self.is_partitioned:
            for unit in self.reduce_queue.drain() if self.has_unreduced else ():
                self._start_reduce(unit, Hops.BOTH)
            if self.local_sums.is_used:
                self.local_sums.reduce_inner_sums()
        elif self.has_unreduced or self.reduce_queue.is_partial:
            self.local_sums.reduce_all(self.has_unreduced)
        if self.reducer.is_busy:
            self.reducer.wait()
        self.has_unreduced = False

    def _add_untracked_grads(self) -> None:
        """Add gradients that no hook has reported: set by the user, or left by a backward that raised."""
        for unit in self._units_with_autograd_grads():
            self.wait_reductions()
            self.scaling.apply()
            self._accumulate_local(unit)
            self.has_unreduced |= not self.reduce_queue.is_partial or self.reduce_queue.is_ahead_of(unit)
            self._has_accumulated, self.memory.has_unstepped, self._is_usage_synced = True, True, False
            self._cleared.clear()
            self.norms.cache.clear()

    @torch.no_grad()
    def begin_backward(self, inverse_scale: torch.Tensor | None) -> None:
        """Prepare for a backward whose loss scale has the inverse ``inverse_scale`` (None: its loss is not scaled)."""
        if inverse_scale is not None or self.scaling.scale is not UNSCALED or self.scaling.deferred:
            self.scaling.begin_backward(inverse_scale, self._has_accumulated and self.has_used_params)
        self.norms.cache.clear()
        self._cleared.clear()
        self._is_usage_synced, self._has_accumulated, self._unhooked_inverse_scale = False, True, None
        self.memory.has_unstepped = True

    @torch.no_grad()
    def on_scaled_backward(self, inverse_scale: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record that a backward starts from a scaled loss; it may not visit any module."""
        self.add_unhooked_scaled_grads()
        _check_no_manual_grads(self._units_with_autograd_grads())
        self._unhooked_inverse_scale = inverse_scale

    def add_unhooked_scaled_grads(self) -> None:
        """Add the gradients of a scaled backward that visited no module, if there was one."""
        if self._unhooked_inverse_scale is not None and self._units_with_autograd_grads():
            self.begin_backward(self._unhooked_inverse_scale)
            self._add_untracked_grads()
        self._unhooked_inverse_scale = None

    @property
    def has_used_params(self) -> bool:
        """Return whether any parameter has a gradient."""
        return any(True in gradient.is_param_used for gradient in self.flat_grads.values())

    def prepare_write(self, flat_grad: FlatGrad) -> None:
        """Prepare a reduced gradient for being written: wait for its readers and clear cached norms."""
        flat_grad.flat.wait_for_update()  # a pending update may still read the gradient
        flat_grad.wait_copy()
        self.scaling.clear_norms()  # all: the user may have read other gradients before, and change them

    def wait_offloaded(self) -> None:
        """Wait until all offloaded gradients are copied off the device."""
        for gradient in self.flat_grads.values():
            gradient.wait_copy()

    @property
    def scaled_suffix(self) -> str:
        """Return a suffix for pass names: ranks with and without a loss scale must not use gradients together."""
        return "" if self.scaling.scale.inv_scale is None else " of scaled losses"

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
        self.scaling.apply_deferred()
        if self._is_usage_synced:
            return
        self.reduce_pending()
        if self._context.comm.consistency.is_distributed:
            flags = [flag for gradient in self.flat_grads.values() for flag in gradient.is_param_used]
            merged = torch.tensor(flags, dtype=torch.uint8, device=self._context.comm.device)
            what = "agree on unused parameters"
            self._context.order.check(what)
            self._context.comm.all_reduce_over_mesh(merged, what, dist.ReduceOp.MAX)
            self.set_used_params([bool(flag) for flag in merged.tolist()], self.flat_grads.values())
        self._is_usage_synced = True

    def set_used_params(self, flags: Sequence[bool], flat_grads: Iterable[FlatGrad]) -> None:
        """Record which parameters have a gradient on any rank; raise if one is frozen on this rank alone."""
        remaining = iter(flags)
        for gradient in flat_grads:
            for index, was_used in enumerate(gradient.is_param_used):
                is_used = gradient.is_param_used[index] = next(remaining)
                if is_used and not was_used and not gradient.flat.parameters[index].requires_grad:
                    text = f"{gradient.flat.names[index]!r} is frozen on this rank, and has a gradient on others"
                    self._context.comm.consistency.announce("note", text)
                    raise RuntimeError(f"{text}: set requires_grad to the same value on all ranks")

    def clear(self, set_to_none: bool) -> None:
        """Set all gradients to None, or to zero."""
        self.wait_reductions()
        if self.scaling.scale is not UNSCALED or self.scaling.deferred:
            self.scaling.clear(set_to_none)
        self.norms.cache.clear()
        if self._has_accumulated:
            self.memory.discards_unstepped, self.memory.has_unstepped = self.memory.has_unstepped, False
        self._has_accumulated, self._unhooked_inverse_scale = False, None
        if set_to_none:
            self._is_usage_synced = False
        for gradient in self.flat_grads.values():
            self.memory.clear(gradient, set_to_none)
        if set_to_none:
            self.has_unreduced = False
            if not self.is_partitioned:
                self.local_sums.cancel()
            self.memory.free()
        self.reduce_queue.history = NO_HISTORY

    def clear_flats(self, flat_grads: Iterable[FlatGrad], set_to_none: bool) -> None:
        """Set the gradients of some flats to None, or to zero; all memory is freed with the last of them."""
        self.wait_reductions()
        if self._has_accumulated:
            self.memory.discards_unstepped = self.memory.has_unstepped
        self.scaling.apply()
        self.norms.cache.clear()
        for gradient in flat_grads:
            self.memory.clear(gradient, set_to_none)
        if set_to_none:
            self._cleared.update(flat_grads)
            is_empty = len(self._cleared) == len(self.flat_grads) and not self.memory.has_grads
            if is_empty and not self._units_with_autograd_grads():
                self.clear(set_to_none=True)

    # -- units --------------------------------------------------------------------------------------------------

    def _accumulate_local(self, unit: Unit) -> None:
        """Add autograd's gradients of a unit to this rank's local sum."""
        with label("accumulate gradients {!r}", unit.name):
            for gradient in self._unit_grads[unit]:
                self.memory.accumulate(gradient)

    def _start_reduce(self, unit: Unit, hops: Hops | None = None) -> None:
        """Start to reduce a unit's gradients, concurrently with compute; by default as far as the backward does."""
        self._context.order.check(unit.reduce_label)
        self.reducer.begin_unit()
        flat_grads = self._unit_grads[unit]
        if any(map(attrgetter("has_local_sum"), flat_grads)):
            self._accumulate_local(unit)
        with label("reduce gradients {!r}", unit.name):
            for flat_grad in flat_grads:
                self.reducer.start(flat_grad, unit.reduce_label, hops or self.local_sums.hops)

    def _units_with_autograd_grads(self) -> list[Unit]:
        return [
            unit
            for unit in self.units
            if True in [has_autograd_grads(flat_grad.flat.parameters) for flat_grad in self._unit_grads[unit]]
        ]


def _check_no_manual_grads(units: Iterable[Unit]) -> None:
    """Raise if the user has set gradients of these units: they carry no loss scale, and the others do or will."""
    with torch._C.DisableTorchFunctionSubclass():
        for unit in units:
            for flat in unit.flats:
                for name, parameter in flat.named_parameters:
                    if parameter._grad is not None and bool(parameter._grad.any()):  # zeros need no scale
                        raise RuntimeError(
                            f"the gradient of {name!r} was set by hand, and the others come from a loss that is "
                            "multiplied by optimizer.scale(loss): they cannot be used together. Clear it "
                            "(parameter.grad = None), and add the term to the loss"
                        )
