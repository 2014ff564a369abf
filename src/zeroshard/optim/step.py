"""One step of the user's optimizer over this rank's slices.

[Note: an optimizer step]
``OptimizerStep.run`` gets the slices that have a gradient and gives each to one of four updaters, in this order:

    FusedAdam     slices of fused Adam and AdamW on a GPU         optim/fused_adam/    [Note: fused Adam in one pass]
    MuonUpdater   slices of torch's Muon                          optim/sharded_muon/  [Note: Muon on shards]
    TorchUpdater  the other slices on the device                  this file            [Note: stepping in batches]
    CpuUpdates    offloaded slices: only submits their updates    optim/cpu/           [Note: overlapping CPU updates]

TorchUpdater also steps the parameters that have no slices: see [Note: whole parameters]. All of them unscale and clip a
gradient when they read it (``GradScale``), and with fp16 they update nothing if a gradient overflowed on any rank:
gradients are checked first, in 16 bits. If the optimizer has step hooks, is not one of torch's, or has a replaced
step(), one call of it must update all slices and parameters: TorchUpdater makes it.

[Note: stepping in batches]
torch's optimizers need the gradient in the dtype of the parameter. With bf16 and fp16, gradients have 16 bits and the
master weights are fp32, so each slice needs an fp32 copy of its gradient. For the full shard that would take 4Ψ/N
bytes. Instead, slices are updated in batches. A slice and a batch have at most ``bucket_size`` elements each. For each
batch: copy its gradients into the buffer, step the optimizer, which skips parameters without a gradient, and remove the
gradients again. If no copy is needed, batching still bounds the scratch memory of the optimizer's own kernels. A shard
that fits in one batch is updated by one call.

Every element is updated once, from its own gradient and with the step count of its slice, so the result is bitwise
equal to one call. Whole parameters are stepped in batches for the same reason; only Muon's products on a GPU may be
rounded differently in other batches ([Note: Muon in batches]). This holds for torch's own optimizers. Any other
optimizer may count its calls, and a step hook or a replaced step() must see all gradients in one call: in these cases
one batch holds all slices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroshard.engine import FlatParam, GradScale, compute_norms
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.fused_adam.fused_adam import FusedAdam, kernel_for
from zeroshard.optim.loss_scale import LossScale
from zeroshard.optim.model_optimizers import ModelOptimizers
from zeroshard.optim.muon import MuonWithAdamW, step_in_batches
from zeroshard.optim.optimizer_copy import is_scheduler_step
from zeroshard.optim.sharded_muon.updater import MuonUpdater
from zeroshard.optim.slices import OptimizerSlice, SliceGuard, is_elementwise, max_slice_numel
from zeroshard.optim.whole_params import WholeParam, WholeParams
from zeroshard.sharding import ALIGN_ELEMENTS
from zeroshard.utils.profiling import label

# Their step() only touches parameters with a gradient, and keeps a step count for each parameter.
ELEMENTWISE_OPTIMIZERS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# The same holds for these, which update each parameter, or those of some groups, as a whole.
WHOLE_PARAM_OPTIMIZERS = (torch.optim.Adafactor, torch.optim.Muon, MuonWithAdamW)


def step_without_global_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer without torch's hooks on all of them: they run around the step of the ShardedOptimizer."""
    pre_hooks = dict(_global_optimizer_pre_hooks)
    post_hooks = dict(_global_optimizer_post_hooks)
    _global_optimizer_pre_hooks.clear()
    _global_optimizer_post_hooks.clear()
    try:
        optimizer.step()
    finally:
        _global_optimizer_pre_hooks.update(pre_hooks)
        _global_optimizer_post_hooks.update(post_hooks)


class SliceUpdater(Protocol):
    """One way to update slices: see [Note: an optimizer step]."""

    def select(self, slices: list[OptimizerSlice]) -> list[OptimizerSlice]:
        """Return the slices that it can update."""

    def step(self, slices: list[OptimizerSlice], grad_scale: GradScale) -> bool:
        """Update slices, which all have a gradient; return False if no rank has changed anything."""


class RuleCheckerProtocol(Protocol):
    """Checks that the rule of slices stays elementwise: see ``RuleChecker``."""

    def check(self) -> None:
        """Raise if it does not."""

    def accept(self) -> None:
        """Accept what the optimizer itself has changed."""


class OptimizerStep:
    """One step of an optimizer, by up to four updaters: see [Note: an optimizer step]."""

    def __init__(self, inner: torch.optim.Optimizer, shared: ModelOptimizers, cpu_updates: CpuUpdates | None) -> None:
        engine = self._engine = shared.engine
        self._loss_scale, self._cpu_updates = shared.loss_scale, cpu_updates
        kernel = kernel_for(inner, engine.comm.device)
        self._fused_adam = None if kernel is None else FusedAdam(inner, engine, kernel)
        self._torch = TorchUpdater(inner, shared, cpu_updates is not None)
        self.whole = self._torch.whole
        self.muon = MuonUpdater.of(inner, engine, shared.owner_flops)
        # Updates on the CPU are submitted last: they may step a copy of the optimizer on another thread.
        updaters: tuple[SliceUpdater | None, ...] = (self._fused_adam, self.muon, self._torch, cpu_updates)
        self._updaters = [updater for updater in updaters if updater is not None]
        self._flats = [flat for unit in engine.units for flat in unit.flats]
        self.rules: RuleCheckerProtocol | None = None
        self.slice_guard = self._torch.slice_guard
        # None: no limit, since one call updates all slices anyway
        is_batchable = type(inner) in (*ELEMENTWISE_OPTIMIZERS, *WHOLE_PARAM_OPTIMIZERS)
        self.max_slice_numel = max_slice_numel(engine.context.config.bucket_size) if is_batchable else None

    def check_can_zero_grads(self) -> None:
        """Raise if the optimizer keeps gradients as states: in a plain run, zeros would be written to these too."""
        if self._torch.kept_grad_key:
            raise RuntimeError(
                f"the optimizer's state {self._torch.kept_grad_key!r} is the tensor of a gradient, and "
                "zero_grad(set_to_none=False) writes zeros to it: clone the gradient in the optimizer, or call "
                "zero_grad()"
            )

    def needs_whole_matrices(self) -> bool:
        """Return whether the next step must see matrices that Muon has on slices: see [Note: Muon on shards]."""
        if self.muon is None or not self.muon.params:
            return False
        return self._torch.decide_single_call() or not self.muon.can_step()

    def run(self, slices: list[OptimizerSlice], backwards: int) -> list[FlatParam] | None:
        """Update the slices, which all have a gradient; ``backwards`` have run since the last step.

        Return the flats whose new values are only in the master weights; None if a gradient overflowed on some rank
        and nothing was updated. Updates of offloaded slices are only started here: see [Note: overlapping CPU updates].
        """
        gradients, is_updated, left, master_only_flats = self._engine.gradients, True, slices, self._flats
        if self._cpu_updates is not None:
            self._cpu_updates.wait()  # its worker thread may still step the same optimizer
        if self.rules is not None:
            self.rules.check()
        grad_scale = gradients.scaling.scale
        if self._loss_scale is not None:
            grad_scale = self._check_overflow(slices, self._loss_scale)
            if slices and backwards and grad_scale.inv_scale is None and not gradients.scaling.has_edits:
                self._loss_scale.warn_unscaled()
        is_single_call = self._torch.decide_single_call()
        if self._cpu_updates is not None and not is_single_call:
            self._cpu_updates.on_step(backwards)
        for updater in [self._torch] if is_single_call else self._updaters:
            selected = updater.select(left)
            taken = set(selected)
            left = [slice_ for slice_ in left if slice_ not in taken]
            with label("update {} slices ({})", len(selected), type(updater).__name__):
                is_updated &= updater.step(selected, grad_scale)
            if updater is self._fused_adam and selected:  # it also writes the compute parameters
                flats = [part.flat for slice_ in left for part in slice_.flat_ranges]
                master_only_flats = list(dict.fromkeys(flats + [param.flat for param in self.whole.params]))
        if self.rules is not None:
            self.rules.accept()
        if self._cpu_updates is not None:
            if is_single_call:
                self._cpu_updates.write_through()
            if self.whole.params:
                self.whole.copy_offloaded_masters()
            if gradients.memory.is_exposed:  # the user may write into what the updates read
                self._cpu_updates.wait()
        if grad_scale.clip_coef is not None:
            gradients.scaling.drop_clip()
        if self._loss_scale is not None:
            self._loss_scale.finish_step(is_scaled=grad_scale.inv_scale is not None)
        return master_only_flats if is_updated else None

    def _check_overflow(self, slices: list[OptimizerSlice], loss_scale: LossScale) -> GradScale:
        """Return the gradients' scale, which tells whether a gradient of any rank overflowed."""
        loss_scale.check_overflow(*self._overflow_inputs(slices))
        what = "look for overflow"
        self._engine.order.check(what)
        comm = self._engine.comm
        comm.all_reduce_over_mesh(loss_scale.found_inf, what, dist.ReduceOp.MAX)
        if comm.average_axis.size > 1:  # replicas that train alone skip together: they count the same steps
            comm.all_reduce(loss_scale.found_inf, comm.average_axis, what, dist.ReduceOp.MAX).wait()
        return replace(self._engine.gradients.scaling.scale, found_inf=loss_scale.found_inf)

    def _overflow_inputs(self, slices: list[OptimizerSlice]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients on the device, and the max-abs norms of offloaded gradients."""
        on_device: list[torch.Tensor] = []
        magnitudes: list[torch.Tensor] = []
        parts = [part for slice_ in slices for part in slice_.flat_ranges]
        flat_grads = {part.flat: self._engine.gradients.flat_grads[part.flat] for part in parts}
        for param in self.whole.with_grads():
            flat_grad = flat_grads[param.flat] = self._engine.gradients.flat_grads[param.flat]
            if not flat_grad.is_offloaded:
                on_device += [shard for _, shard in flat_grad.param_shards(param.index)]
        for part in parts:
            flat_grad = flat_grads[part.flat]
            if flat_grad.shard is not None and not flat_grad.is_offloaded:
                on_device.append(part.view(flat_grad.shard))
        for flat_grad in flat_grads.values():
            max_abs = flat_grad.norms[math.inf]
            magnitudes += [norm for norms in max_abs.values() for norm in norms]
            if flat_grad.is_offloaded and not max_abs and flat_grad.shard is not None:
                flat_grad.wait_copy()  # it was changed after it was offloaded
                magnitudes += [norm.to(self._engine.comm.device) for norm in compute_norms([flat_grad.shard], math.inf)]
        return on_device, magnitudes


class SliceGrad(NamedTuple):
    """The gradient of a slice, as torch's optimizer gets it."""

    parameter: torch.nn.Parameter
    views: list[torch.Tensor]  # of the reduced gradient, in its own dtype
    needs_copy: bool  # it is not contiguous, on another device, or of another dtype
    padded_numel: int  # with padding, so that all copies in the buffer are aligned
    copy_bytes: int  # of the copy in the buffer; 0 if no copy is needed


class TorchUpdater:
    """Update slices by the optimizer's own step(): see [Note: stepping in batches]."""

    def __init__(self, inner: torch.optim.Optimizer, shared: ModelOptimizers, has_cpu_updates: bool) -> None:
        self._inner: Any = inner
        engine = self._engine = shared.engine
        self._has_cpu_updates = has_cpu_updates
        self.slice_guard = SliceGuard(engine)
        self._max_batch_numel = max_slice_numel(engine.context.config.bucket_size)
        self._is_single_call = False  # in this step, one call must update all slices
        self.kept_grad_key = ""  # of a state that the optimizer has made of a gradient's own memory
        self.whole = WholeParams(inner, engine, shared.owner_loads)

    def decide_single_call(self) -> bool:
        """Decide whether one call must update all slices in this step, offloaded ones included."""
        inner = self._inner
        self._is_single_call = (
            type(inner) not in (*ELEMENTWISE_OPTIMIZERS, *WHOLE_PARAM_OPTIMIZERS)
            or bool(inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks)
            or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
            # A learning rate scheduler's replacement of step() only records the call; any other may do anything.
            or ("step" in vars(inner) and not is_scheduler_step(inner))
        )
        return self._is_single_call

    def select(self, slices: list[OptimizerSlice]) -> list[OptimizerSlice]:
        """Return the slices that torch updates now: those on the device, or all."""
        if self._is_single_call or not self._has_cpu_updates:
            return slices
        return [slice_ for slice_ in slices if slice_.tier_segment is None]

    def step(self, slices: list[OptimizerSlice], grad_scale: GradScale) -> bool:
        """Call the optimizer's step(), also without slices; return False if no rank has changed anything."""
        if grad_scale.found_inf is None:
            self._step_batches(slices, grad_scale)
        elif self._can_skip_on_device():  # the kernel itself skips the update: no host sync
            self._inner.found_inf, self._inner.grad_scale = grad_scale.found_inf, None
            self._step_batches(slices, grad_scale)
            del self._inner.found_inf, self._inner.grad_scale
        else:
            # A rank with nothing to step here does not read found_inf and returns True. If such ranks are possible, all
            # ranks must return True. Whole parameters need all ranks.
            is_fused = any(group.get("fused") for group in self._inner.param_groups)
            can_be_idle = (self._has_cpu_updates or is_fused) and not self.whole.params
            if (slices or not can_be_idle) and bool(grad_scale.found_inf):
                return can_be_idle
            self._step_batches(slices, grad_scale)
        return True

    def _can_skip_on_device(self) -> bool:
        fused = all(group.get("fused") for group in self._inner.param_groups) and not self.whole.params
        if not (getattr(self._inner, "_step_supports_amp_scaling", False) and fused):
            return False
        if not isinstance(self._inner, torch.optim.SGD):
            return True
        # On overflow, its fused kernel would leave a new momentum buffer uninitialised.
        parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        return all(self._inner.state.get(parameter) for parameter in parameters)

    def _step_batches(self, slices: list[OptimizerSlice], grad_scale: GradScale) -> None:
        # A single call may also change parameters without a gradient: a rule may decay all, a hook may clamp all.
        whole = self.whole.params if self._is_single_call or not self.whole.params else self.whole.with_grads()
        whole_batches = self.whole.split_batches(whole) if whole and not self._is_single_call else [whole]
        batches = self._split_batches([self._slice_grad(slice_) for slice_ in slices])
        nbytes = max([sum([slice_grad.copy_bytes for slice_grad in batch]) for batch in batches])
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._engine.comm.device)
        self._engine.context.tracker.add("step", nbytes)
        try:
            for batch, whole_pair in zip_longest(batches, pairwise([*whole_batches, []]), fillvalue=()):
                self._step_batch(batch, whole_pair, buffer, grad_scale)
        finally:
            self._engine.context.tracker.add("step", -nbytes)

    def _slice_grad(self, slice_: OptimizerSlice) -> SliceGrad:
        parameter, views = slice_.parameter, slice_.grad_views(self._engine.gradients.flat_grads)
        needs_copy = len(views) > 1 or views[0].dtype != parameter.dtype or views[0].device != parameter.device
        padded_numel = -(-parameter.numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        copy_bytes = padded_numel * parameter.element_size() if needs_copy else 0
        return SliceGrad(parameter, views, needs_copy, padded_numel, copy_bytes)

    def _split_batches(self, slice_grads: list[SliceGrad]) -> list[list[SliceGrad]]:
        """Split the slices into batches; at least one, since the optimizer is stepped in any case."""
        if self._is_single_call:
            return [slice_grads]
        batches: list[list[SliceGrad]] = [[]]
        left = self._max_batch_numel
        for slice_grad in slice_grads:
            if slice_grad.padded_numel > left:
                batches.append([])
                left = self._max_batch_numel
            batches[-1].append(slice_grad)
            left -= slice_grad.padded_numel
        return batches

    def _step_batch(
        self,
        batch: Sequence[SliceGrad],
        whole_pair: Sequence[list[WholeParam]],
        buffer: torch.Tensor,
        grad_scale: GradScale,
    ) -> None:
        """Step a batch of slices and one of whole parameters; ``whole_pair`` also has the batch that follows that."""
        parameters = on_device = [slice_grad.parameter for slice_grad in batch]
        whole, following = whole_pair or ([], [])
        if whole:
            owned = self.whole.owned(whole)
            on_device = parameters + [param.parameter for param in owned if param.tier == "device"]
            parameters = parameters + [param.parameter for param in owned]
        new_params = [parameter for parameter in on_device if not self._inner.state.get(parameter)]
        with self.slice_guard.allow_step(parameters):  # clears the gradients on exit
            self._set_gradients(batch, buffer, grad_scale)
            with self.whole.gathered(whole, grad_scale, following) if whole else nullcontext():
                groups, values, grads = self._inner.param_groups, [], []
                if self._is_single_call:
                    self._engine.gradients.memory.is_exposed = True  # hooks and custom steps may keep a reference
                    values = [(parameter, parameter.data) for group in groups for parameter in group["params"]]
                    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
                    step_without_global_hooks(self._inner)
                elif type(self._inner) is torch.optim.Muon:
                    step_in_batches(self._inner)
                else:
                    self._inner.step()
                for parameter, value in values:
                    if parameter.data_ptr() != value.data_ptr():  # the rule has set p.data: write to the shard
                        parameter.data = value.copy_(parameter.data)
                if grads:
                    self._copy_kept_grads(parameters, grads)
                self._move_states_to_pool(new_params)
        if grad_scale.clip_coef is not None:
            copied = [view for slice_grad in batch if slice_grad.needs_copy for view in slice_grad.views]
            self._engine.gradients.scaling.defer(copied, grad_scale.clip_coef)

    def _copy_kept_grads(self, parameters: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
        """Replace states that share memory with a gradient by copies: the next backward may write to that memory."""
        memory = {gradient.untyped_storage().data_ptr() for gradient in grads} - {0}

        def copy_kept(value: torch.Tensor) -> torch.Tensor:
            is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            return value.clone() if is_plain and value.untyped_storage().data_ptr() in memory else value

        for parameter in parameters:
            state = self._inner.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, (torch.Tensor, list, tuple, dict, deque)):
                    copied = tree_map_only(torch.Tensor, copy_kept, value)
                    if any(new is not old for new, old in zip(tree_leaves(copied), tree_leaves(value), strict=True)):
                        state[key], self.kept_grad_key = copied, str(key)

    def _set_gradients(self, batch: Sequence[SliceGrad], buffer: torch.Tensor, grad_scale: GradScale) -> None:
        """Set the gradient of each slice, unscaled and clipped: the reduced gradient itself or a copy in the buffer."""
        offset, found, gradients = 0, [], self._engine.gradients
        copies: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        for slice_grad in batch:
            parameter, gradient = slice_grad.parameter, slice_grad.views[0]
            if slice_grad.needs_copy:
                gradient = buffer[offset : offset + parameter.nbytes].view(parameter.dtype)
                if parameter.device != buffer.device:
                    gradients.wait_offloaded()
                    gradient = torch.empty_like(parameter)
                copies += torch.split(gradient, [view.numel() for view in slice_grad.views])
                copied += slice_grad.views
                offset += slice_grad.copy_bytes
            parameter.grad = gradient
            found.append(gradient)
        if copies:  # by one kernel, unless their devices differ
            torch._foreach_copy_(copies, copied)
        uncopied = [slice_grad.views[0] for slice_grad in batch if not slice_grad.needs_copy]
        for factor in (grad_scale.inv_scale, grad_scale.clip_coef):
            if factor is not None:
                gradients.scaling.multiply(found, factor)
                if uncopied:
                    gradients.scaling.clear_norms()
        if uncopied and grad_scale.inv_scale is not None:  # later readers expect scaled values, as in all others
            gradients.scaling.defer(uncopied, 1 / grad_scale.inv_scale)

    def _move_states_to_pool(self, parameters: list[torch.nn.Parameter]) -> None:
        """Move new states out of the step's temporaries: [Note: separate pool for long-lived tensors]."""
        if self._engine.comm.device.type == "cpu":
            return
        state, pool = self._inner.state, self._engine.context.pool
        keys = [
            (parameter, key)
            for parameter in parameters
            for key, value in state.get(parameter, {}).items()
            if is_elementwise(key, value, parameter.shape)
        ]  # only the keys: each value is freed once it is copied
        pool.reserve(state[parameter][key].nbytes for parameter, key in keys)
        for parameter, key in keys:
            with pool:
                state[parameter][key] = state[parameter][key].clone()
