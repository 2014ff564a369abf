"""One step of the user's optimizer over this rank's slices, through one buffer of constant size.

[Note: stepping in batches]
torch's optimizers need the gradient in the dtype of the parameter. With bf16 and fp16, gradients have 16 bits and the
master weights are fp32, so each slice needs an fp32 copy of its gradient. For the full shard that would take 4Ψ/N
bytes. Instead, slices are updated in batches. A slice and a batch have at most ``bucket_size`` elements each. For each
batch: copy its gradients into the buffer, step the optimizer, which skips parameters without a gradient, and remove the
gradients again. If no copy is needed, batching still bounds the scratch memory of the optimizer's own kernels. A shard
that fits in one batch is updated by one call.

Every element is updated once, from its own gradient and with the step count of its slice, so the result is bitwise
equal to one call. This holds for torch's own elementwise optimizers. Any other optimizer may count its calls, and a
step hook or a replaced step() must see all gradients in one call: in these cases one batch holds all slices.

With fp16, nothing may be updated if a gradient overflowed on any rank, so gradients are checked first, in 16 bits.

On a GPU, fused Adam and AdamW need no copy and no batches: see [Note: fused Adam in one pass]. This file handles all
other cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zeroshard.engine import Engine, FlatParam, compute_norms
from zeroshard.optim.cpu.apply import GradScaleReadback
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.fused_adam.fused_adam import FusedAdam, kernel_for
from zeroshard.optim.fused_adam.kernel_inputs import GradScale
from zeroshard.optim.slices import OptimizerSlice, SliceGuard, is_elementwise, max_slice_numel
from zeroshard.sharding import ALIGN_ELEMENTS, LossScale, round_up

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


@dataclass(frozen=True)
class SliceWithGrad:
    """A slice to update, and its reduced gradient."""

    optimizer_slice: OptimizerSlice
    grad_views: list[torch.Tensor]  # views of the reduced gradient, in its own dtype

    @property
    def needs_copy(self) -> bool:
        """Whether the gradient must be copied: it is not contiguous, on another device, or of another dtype."""
        first, parameter = self.grad_views[0], self.optimizer_slice.parameter
        return len(self.grad_views) > 1 or first.dtype != parameter.dtype or first.device != parameter.device

    @property
    def copy_bytes(self) -> int:
        """Bytes of the gradient copy in the buffer; 0 if no copy is needed."""
        parameter = self.optimizer_slice.parameter
        return round_up(parameter.numel(), ALIGN_ELEMENTS) * parameter.element_size() if self.needs_copy else 0


class OptimizerStep:
    """Step one optimizer: see [Note: stepping in batches]."""

    def __init__(
        self, inner: torch.optim.Optimizer, engine: Engine, loss_scale: LossScale | None, cpu_updates: CpuUpdates | None
    ) -> None:
        self._inner: Any = inner
        self._engine, self._loss_scale, self._cpu_updates = engine, loss_scale, cpu_updates
        self.slice_guard = SliceGuard(engine)
        self._max_batch_numel = max_slice_numel(engine.config.bucket_size)
        kernel = kernel_for(inner, engine.comm.device)
        self._fused_adam = None if kernel is None else FusedAdam(inner, engine, kernel)

    @property
    def max_slice_numel(self) -> int | None:
        """Maximum elements of a slice; None: no limit, since one call updates all slices anyway."""
        return self._max_batch_numel if type(self._inner) in ELEMENTWISE_OPTIMIZERS else None

    def _needs_single_call(self) -> bool:
        if type(self._inner) not in ELEMENTWISE_OPTIMIZERS:
            return True
        # A learning rate scheduler's replacement of step() only records the call; any other may do anything.
        replaced = vars(self._inner).get("step")
        is_scheduler_step = hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is type(self._inner).step
        hooks = (
            self._inner._optimizer_step_pre_hooks,
            self._inner._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        return any(hooks) or not (replaced is None or is_scheduler_step)

    def run(self, slices: list[OptimizerSlice], backwards: int) -> list[FlatParam] | None:
        """Update the slices, which all have a gradient.

        Return the flats whose new values are only in the master weights; None if a gradient overflowed on some rank
        and nothing was updated. Updates of offloaded slices are only started here: see [Note: overlapping CPU updates].
        """
        gradients = self._engine.gradients
        is_async = self._cpu_updates is not None and not self._needs_single_call()
        if self._cpu_updates is not None:
            self._cpu_updates.wait()  # its worker thread may still step the same optimizer
        fused, stepped = self._split_by_backend(
            [slice_ for slice_ in slices if not (is_async and slice_.tier_segment is not None)]
        )
        pending = [SliceWithGrad(slice_, slice_.grad_views(gradients.flat_grads)) for slice_ in stepped]
        master_only_flats = (
            list(dict.fromkeys(flat_range.flat for slice_ in stepped for flat_range in slice_.flat_ranges))
            if fused
            else self._flats()
        )
        if self._loss_scale is None:
            self._step_fused(fused, GradScale(gradients.inverse_scale, gradients.clip_coef))
            self._step_batches(pending)
            self._defer_clip(fused, stepped)
            self._step_offloaded(slices, is_async, backwards)
            return master_only_flats
        self._loss_scale.check_overflow(*self._overflow_inputs(slices))
        what = "look for overflow"
        self._engine.order.check(what)
        self._engine.comm.all_reduce_over_mesh(self._loss_scale.found_inf, what, dist.ReduceOp.MAX)
        self._step_fused(fused, GradScale(gradients.inverse_scale, gradients.clip_coef, self._loss_scale.found_inf))
        updated = self._step_unless_overflow(pending, self._loss_scale)
        self._defer_clip(fused, stepped)
        self._step_offloaded(slices, is_async, backwards, self._loss_scale.found_inf)
        if gradients.inverse_scale is not None:
            self._loss_scale.update()
        else:  # no loss was scaled, so this step must not change the scale
            self._loss_scale.clear_overflow()
        return master_only_flats if updated else None

    def _step_unless_overflow(self, slices: list[SliceWithGrad], scale: LossScale) -> bool:
        """Step with torch's optimizer; return False if all ranks saw an overflow and no rank changed anything."""
        if self._can_skip_on_device():  # the kernel itself skips the update: no host sync
            self._inner.found_inf, self._inner.grad_scale = scale.found_inf, None
            self._step_batches(slices)
            del self._inner.found_inf, self._inner.grad_scale
            return True
        # A rank with nothing to step here does not read found_inf and returns True. If such ranks are possible, all
        # ranks must return True.
        can_be_idle = self._cpu_updates is not None or any(group.get("fused") for group in self._inner.param_groups)
        if (slices or not can_be_idle) and bool(scale.found_inf):
            return can_be_idle
        self._step_batches(slices)
        return True

    def _flats(self) -> list[FlatParam]:
        return [flat for unit in self._engine.units for flat in unit.flats]

    def _split_by_backend(self, slices: list[OptimizerSlice]) -> tuple[list[OptimizerSlice], list[OptimizerSlice]]:
        """Return the slices for the fused Adam kernel, and those that the optimizer itself steps."""
        if self._fused_adam is None or self._needs_single_call():
            return [], slices
        return self._fused_adam.partition(slices)

    def _step_fused(self, slices: list[OptimizerSlice], factors: GradScale) -> None:
        if self._fused_adam is not None and slices:
            self._fused_adam.step(slices, factors)

    def _defer_clip(self, fused: list[OptimizerSlice], stepped: list[OptimizerSlice]) -> None:
        """Record that the kernel clipped values, not the stored gradients: a loop may skip zero_grad()."""
        gradients = self._engine.gradients
        if gradients.clip_coef is None or not fused:
            return
        all_fused = not stepped and self._cpu_updates is None
        views = (
            gradients.shards()
            if all_fused
            else [v for slice_ in fused for v in slice_.grad_views(gradients.flat_grads)]
        )
        gradients.deferred_scales.append((views, gradients.clip_coef))

    def _step_offloaded(
        self, slices: list[OptimizerSlice], is_async: bool, backwards: int, found_inf: torch.Tensor | None = None
    ) -> None:
        if self._cpu_updates is None:
            return
        if not is_async:
            self._cpu_updates.write_through(slices)
            return
        gradients = self._engine.gradients
        readback = GradScaleReadback(gradients.inverse_scale, gradients.clip_coef, found_inf)
        self._cpu_updates.step(slices, readback, backwards)
        if gradients.clip_coef is not None:
            offloaded = [
                view
                for slice_ in slices
                if slice_.tier_segment is not None
                for view in slice_.grad_views(gradients.flat_grads)
            ]
            gradients.deferred_scales.append((offloaded, gradients.clip_coef))

    def _overflow_inputs(self, slices: list[OptimizerSlice]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients on the device, and the max-abs norms of offloaded gradients."""
        on_device: list[torch.Tensor] = []
        magnitudes: list[torch.Tensor] = []
        gradients = {
            flat_range.flat: self._engine.gradients.flat_grads[flat_range.flat]
            for slice_ in slices
            for flat_range in slice_.flat_ranges
        }
        for slice_ in slices:
            ranges = [(flat_range, gradients[flat_range.flat]) for flat_range in slice_.flat_ranges]
            on_device += [
                flat_range.view(g.shard) for flat_range, g in ranges if g.shard is not None and not g.is_offloaded
            ]
        for gradient in gradients.values():
            magnitudes += [norm for norms in gradient.max_abs.values() for norm in norms]
            if (
                gradient.is_offloaded and not gradient.max_abs and gradient.shard is not None
            ):  # changed after it was offloaded
                gradient.wait_copy()
                magnitudes += [norm.to(self._engine.comm.device) for norm in compute_norms([gradient.shard], math.inf)]
        return on_device, magnitudes

    def _can_skip_on_device(self) -> bool:
        fused = all(group.get("fused") for group in self._inner.param_groups)
        if not (getattr(self._inner, "_step_supports_amp_scaling", False) and fused):
            return False
        if not isinstance(self._inner, torch.optim.SGD):
            return True
        # On overflow, its fused kernel would leave a new momentum buffer uninitialised.
        parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        return all(self._inner.state.get(parameter) for parameter in parameters)

    def _step_batches(self, slices: list[SliceWithGrad]) -> None:
        batches = self._split_batches(slices)
        nbytes = max(sum(entry.copy_bytes for entry in batch) for batch in batches)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._engine.comm.device)
        self._engine.tracker.add("step", nbytes)
        try:
            for batch in batches:
                self._step_batch(batch, buffer)
        finally:
            self._engine.tracker.add("step", -nbytes)

    def _step_batch(self, batch: list[SliceWithGrad], buffer: torch.Tensor) -> None:
        new_params = [
            entry.optimizer_slice.parameter
            for entry in batch
            if not self._inner.state.get(entry.optimizer_slice.parameter)
        ]
        with self.slice_guard.allow_step(
            [entry.optimizer_slice.parameter for entry in batch]
        ):  # clears the gradients on exit
            self._set_gradients(batch, buffer)
            self._engine.gradients.memory.is_exposed |= (
                self._needs_single_call()
            )  # hooks and custom steps may keep a reference
            self._inner.step()
            self._move_states_to_pool(new_params)
        coefficient = self._engine.gradients.clip_coef
        copied = [view for entry in batch if entry.needs_copy for view in entry.grad_views]
        if coefficient is not None and copied:  # only the copy was clipped, and a loop may skip zero_grad()
            self._engine.gradients.scale_shards(copied, coefficient)

    def _move_states_to_pool(self, parameters: list[torch.nn.Parameter]) -> None:
        """Move new states out of the step's temporaries: [Note: separate pool for long-lived tensors]."""
        if self._engine.comm.device.type == "cpu":
            return
        self._engine.pool.reserve(
            value.nbytes for parameter in parameters for value in self._elementwise_states(parameter).values()
        )
        for parameter in parameters:
            for key in list(
                self._elementwise_states(parameter)
            ):  # only the keys: each value is freed once it is copied
                with self._engine.pool:
                    self._inner.state[parameter][key] = self._inner.state[parameter][key].clone()

    def _elementwise_states(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the elementwise states of a parameter, by key."""
        states = self._inner.state.get(parameter, {}).items()
        return {key: value for key, value in states if is_elementwise(key, value, parameter.shape)}

    def _split_batches(self, slices: list[SliceWithGrad]) -> list[list[SliceWithGrad]]:
        """Split the slices into batches; at least one, since the optimizer is stepped in any case."""
        if self._needs_single_call():
            return [slices]
        batches: list[list[SliceWithGrad]] = [[]]
        left = self._max_batch_numel
        for entry in slices:
            numel = round_up(entry.optimizer_slice.parameter.numel(), ALIGN_ELEMENTS)
            if numel > left:
                batches.append([])
                left = self._max_batch_numel
            batches[-1].append(entry)
            left -= numel
        return batches

    def _set_gradients(self, batch: list[SliceWithGrad], buffer: torch.Tensor) -> None:
        """Set the gradient of each slice, unscaled and clipped: the reduced gradient itself or a copy in the buffer."""
        offset, found = 0, []
        for entry in batch:
            parameter, gradient = entry.optimizer_slice.parameter, entry.grad_views[0]
            if entry.needs_copy:
                gradient = buffer[offset : offset + parameter.nbytes].view(parameter.dtype)
                if parameter.device != buffer.device:
                    self._engine.gradients.wait_offloaded()
                    gradient = torch.empty_like(parameter)
                copies = list(torch.split(gradient, [view.numel() for view in entry.grad_views]))
                torch._foreach_copy_(copies, entry.grad_views)
                offset += entry.copy_bytes
            parameter.grad = gradient
            found.append(gradient)
        gradients = self._engine.gradients
        if gradients.inverse_scale is not None:
            gradients.scale_shards(found, gradients.inverse_scale)
            uncopied = [entry.grad_views[0] for entry in batch if not entry.needs_copy]
            if uncopied:  # later readers expect scaled values, as in all other gradients
                gradients.deferred_scales.append((uncopied, 1 / gradients.inverse_scale))
        if gradients.clip_coef is not None:
            gradients.scale_shards(found, gradients.clip_coef)
