"""Update: one step of the user's optimizer over this rank's runs, through one buffer of constant size.

[Note: the update in batches]
torch's optimizers want a gradient in the dtype of its parameter. Under bf16 and fp16 gradients are kept in 16 bits and
the master is in fp32, so each run needs a copy: of this rank's whole part it would take 4Ψ/N bytes. Instead the runs,
none longer than ``bucket_size`` elements, are updated in batches of at most as many: fill the buffer with the batch's
gradients, step the optimizer, which leaves parameters without gradient alone, take the gradients away again, and go on
to the next batch. Where no copy is needed this bounds the scratch of the optimizer's own kernels. A part that fits one
batch is updated by one call.

Every element is updated once, from its own gradient and with a step count of its run's own, so the result is the same
to the bit. That holds for torch's own elementwise optimizers. One that is not torch's may count its own calls, and a
hook on the step, or a step that was replaced, is to see all gradients and one call: there the batch is everything.

Under fp16 nothing may be updated when one gradient overflowed on any rank, so that is looked for first, in 16 bits.

On a GPU fused Adam and AdamW need no copy, and no batches: see [Note: one pass]. What follows here is for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_grad import compute_norms
from zeroshard.engine.flat_param import FlatParam
from zeroshard.optim.cpu.apply import GradScaleReadback
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.fused_adam.fused_adam import FusedAdam, kernel_for
from zeroshard.optim.fused_adam.kernel_inputs import GradScale
from zeroshard.optim.slices import OptimizerSlice, SliceGuard, is_elementwise, max_slice_numel
from zeroshard.sharding.layout import ALIGN_ELEMENTS, round_up
from zeroshard.sharding.precision import LossScale

# Their step() looks at nothing but the parameters with a gradient, and counts for each of them apart.
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
    """A run that is to be updated, and its reduced gradient."""

    optimizer_slice: OptimizerSlice
    grad_views: list[torch.Tensor]  # where the gradient lies, in the dtype it was reduced in

    @property
    def needs_copy(self) -> bool:
        """Whether the optimizer needs a copy: the gradient lies in several places, elsewhere, or has another dtype."""
        first, parameter = self.grad_views[0], self.optimizer_slice.parameter
        return len(self.grad_views) > 1 or first.dtype != parameter.dtype or first.device != parameter.device

    @property
    def copy_bytes(self) -> int:
        """Bytes of the buffer that the copy takes."""
        parameter = self.optimizer_slice.parameter
        return round_up(parameter.numel(), ALIGN_ELEMENTS) * parameter.element_size() if self.needs_copy else 0


class OptimizerStep:
    """Steps one optimizer: see [Note: the update in batches]."""

    def __init__(
        self, inner: torch.optim.Optimizer, engine: Engine, loss_scale: LossScale | None, cpu_updates: CpuUpdates | None
    ) -> None:
        self._inner: Any = inner
        self._engine, self._loss_scale, self._cpu_updates = engine, loss_scale, cpu_updates
        self.slice_guard = SliceGuard(engine)
        self._max_batch_numel = max_slice_numel(engine.config.bucket_size)  # elements of a batch
        kernel = kernel_for(inner, engine.comm.device)
        self._fused_adam = None if kernel is None else FusedAdam(inner, engine, kernel)

    @property
    def max_slice_numel(self) -> int | None:
        """Elements of a run; None: as many as there are, since all are updated by one call anyway."""
        return self._max_batch_numel if type(self._inner) in ELEMENTWISE_OPTIMIZERS else None

    def _needs_single_call(self) -> bool:
        if type(self._inner) not in ELEMENTWISE_OPTIMIZERS:
            return True
        # A learning rate scheduler's replacement only notes that there was a call; of any other nothing is known.
        replaced = vars(self._inner).get("step")
        noted = hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is type(self._inner).step
        hooks = (
            self._inner._optimizer_step_pre_hooks,
            self._inner._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        return any(hooks) or not (replaced is None or noted)

    def run(self, slices: list[OptimizerSlice], backwards: int) -> list[FlatParam] | None:
        """Update the runs, which all have a gradient. None: one overflowed on some rank, and nothing was updated.

        Returned are the flats whose new values are in the master alone. What rests outside the device is only started:
        see [Note: just in time].
        """
        gradients = self._engine.gradients
        apart = self._cpu_updates is not None and not self._needs_single_call()
        if self._cpu_updates is not None:
            self._cpu_updates.wait()  # its thread may be stepping the very optimizer that is stepped here
        ours, theirs = self._split_by_backend([run for run in slices if not (apart and run.tier_segment is not None)])
        due = [SliceWithGrad(run, run.grad_views(gradients.flat_grads)) for run in theirs]
        uncopied = (
            list(dict.fromkeys(part.flat for run in theirs for part in run.flat_ranges)) if ours else self._flats()
        )
        if self._loss_scale is None:
            self._step_fused(ours, GradScale(gradients.inverse_scale, gradients.clip_coef))
            self._step_batches(due)
            self._defer_clip(ours, theirs)
            self._step_offloaded(
                slices, apart, backwards, GradScaleReadback(gradients.inverse_scale, gradients.clip_coef)
            )
            return uncopied
        self._loss_scale.check_overflow(*self._overflow_inputs(slices))
        what = "look for overflow"
        self._engine.order.check(what)
        self._engine.comm.all_reduce_over_mesh(self._loss_scale.found_inf, what, dist.ReduceOp.MAX)
        verdict = GradScaleReadback(gradients.inverse_scale, gradients.clip_coef, self._loss_scale.found_inf)
        self._step_fused(ours, GradScale(gradients.inverse_scale, gradients.clip_coef, self._loss_scale.found_inf))
        updated = self._step_unless_overflow(due, self._loss_scale)
        self._defer_clip(ours, theirs)
        self._step_offloaded(slices, apart, backwards, verdict)
        if gradients.inverse_scale is not None:
            self._loss_scale.update()
        else:  # no loss was scaled: the scale has nothing to learn from this step
            self._loss_scale.clear_overflow()
        return uncopied if updated else None

    def _step_unless_overflow(self, slices: list[SliceWithGrad], scale: LossScale) -> bool:
        """Step torch's way; False: all ranks have seen an overflow, and nothing has changed on any."""
        if self._can_skip_on_device():  # the kernel itself leaves everything as it is: no host sync
            self._inner.found_inf, self._inner.grad_scale = scale.found_inf, None
            self._step_batches(slices)
            del self._inner.found_inf, self._inner.grad_scale
            return True
        # A rank that has nothing to step here need not look: where there may be such, all go on as it does.
        some_need_not = self._cpu_updates is not None or any(group.get("fused") for group in self._inner.param_groups)
        if (slices or not some_need_not) and bool(scale.found_inf):
            return some_need_not
        self._step_batches(slices)
        return True

    def _flats(self) -> list[FlatParam]:
        return [flat for unit in self._engine.units for flat in unit.flats]

    def _split_by_backend(self, slices: list[OptimizerSlice]) -> tuple[list[OptimizerSlice], list[OptimizerSlice]]:
        """The runs that are updated in one pass, and those that the optimizer itself is to step."""
        if self._fused_adam is None or self._needs_single_call():
            return [], slices
        return self._fused_adam.partition(slices)

    def _step_fused(self, slices: list[OptimizerSlice], factors: GradScale) -> None:
        if self._fused_adam is not None and slices:
            self._fused_adam.step(slices, factors)

    def _defer_clip(self, fused: list[OptimizerSlice], stepped: list[OptimizerSlice]) -> None:
        """Note that gradients were clipped on their way only: a loop may go on without zero_grad()."""
        gradients = self._engine.gradients
        if gradients.clip_coef is None or not fused:
            return
        alone = not stepped and self._cpu_updates is None
        views = gradients.shards() if alone else [v for run in fused for v in run.grad_views(gradients.flat_grads)]
        gradients.deferred_scales.append((views, gradients.clip_coef))

    def _step_offloaded(
        self, slices: list[OptimizerSlice], apart: bool, backwards: int, verdict: GradScaleReadback
    ) -> None:
        if self._cpu_updates is None:
            return
        if not apart:
            self._cpu_updates.write_through(slices)
            return
        self._cpu_updates.step(slices, verdict, backwards)
        gradients = self._engine.gradients
        if gradients.clip_coef is not None:
            far = [
                view for run in slices if run.tier_segment is not None for view in run.grad_views(gradients.flat_grads)
            ]
            gradients.deferred_scales.append((far, gradients.clip_coef))

    def _overflow_inputs(self, slices: list[OptimizerSlice]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The runs' gradients on the device, and the largest magnitudes of those measured on their way out of it."""
        near: list[torch.Tensor] = []
        magnitudes: list[torch.Tensor] = []
        gradients = {
            part.flat: self._engine.gradients.flat_grads[part.flat] for run in slices for part in run.flat_ranges
        }
        for run in slices:
            parts = [(part, gradients[part.flat]) for part in run.flat_ranges]
            near += [part.view(g.shard) for part, g in parts if g.shard is not None and not g.is_offloaded]
        for gradient in gradients.values():
            magnitudes += [norm for norms in gradient.max_abs.values() for norm in norms]
            if gradient.is_offloaded and not gradient.max_abs and gradient.shard is not None:  # changed where it rests
                gradient.wait_copy()
                magnitudes += [norm.to(self._engine.comm.device) for norm in compute_norms([gradient.shard], math.inf)]
        return near, magnitudes

    def _can_skip_on_device(self) -> bool:
        fused = all(group.get("fused") for group in self._inner.param_groups)
        if not (getattr(self._inner, "_step_supports_amp_scaling", False) and fused):
            return False
        if not isinstance(self._inner, torch.optim.SGD):
            return True
        # Its fused kernel would leave a momentum that it has just made uninitialised.
        parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        return all(self._inner.state.get(parameter) for parameter in parameters)

    def _step_batches(self, slices: list[SliceWithGrad]) -> None:
        batches = self._split_batches(slices)
        nbytes = max(sum(one.copy_bytes for one in batch) for batch in batches)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._engine.comm.device)
        self._engine.tracker.add("step", nbytes)
        try:
            for batch in batches:
                self._step_batch(batch, buffer)
        finally:
            self._engine.tracker.add("step", -nbytes)

    def _step_batch(self, batch: list[SliceWithGrad], buffer: torch.Tensor) -> None:
        new = [
            one.optimizer_slice.parameter for one in batch if not self._inner.state.get(one.optimizer_slice.parameter)
        ]
        with self.slice_guard.allow_step(
            [one.optimizer_slice.parameter for one in batch]
        ):  # gradients are gone after it
            self._set_gradients(batch, buffer)
            self._engine.gradients.memory.is_exposed |= self._needs_single_call()  # to whom the library does not know
            self._inner.step()
            self._move_states_to_pool(new)
        coefficient = self._engine.gradients.clip_coef
        copied = [view for one in batch if one.needs_copy for view in one.grad_views]
        if coefficient is not None and copied:  # only the copy was clipped, and a loop may go on without zero_grad()
            self._engine.gradients.scale_shards(copied, coefficient)

    def _move_states_to_pool(self, parameters: list[torch.nn.Parameter]) -> None:
        """Move states that were just made, among the step's temporaries, to memory apart: [Note: memory apart]."""
        if self._engine.comm.device.type == "cpu":
            return
        self._engine.pool.reserve(
            value.nbytes for parameter in parameters for value in self._elementwise_states(parameter).values()
        )
        for parameter in parameters:
            for key in list(
                self._elementwise_states(parameter)
            ):  # the keys alone: each value goes when its copy is there
                with self._engine.pool:
                    self._inner.state[parameter][key] = self._inner.state[parameter][key].clone()

    def _elementwise_states(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Of its states, those with as many elements."""
        states = self._inner.state.get(parameter, {}).items()
        return {key: value for key, value in states if is_elementwise(key, value, parameter.shape)}

    def _split_batches(self, slices: list[SliceWithGrad]) -> list[list[SliceWithGrad]]:
        """Cut the list into batches; into one at least, since the optimizer is stepped in any case."""
        if self._needs_single_call():
            return [slices]
        batches: list[list[SliceWithGrad]] = [[]]
        left = self._max_batch_numel
        for one in slices:
            numel = round_up(one.optimizer_slice.parameter.numel(), ALIGN_ELEMENTS)
            if numel > left:
                batches.append([])
                left = self._max_batch_numel
            batches[-1].append(one)
            left -= numel
        return batches

    def _set_gradients(self, batch: list[SliceWithGrad], buffer: torch.Tensor) -> None:
        """Give each run its gradient, unscaled and clipped: the reduced one itself or a copy in the buffer."""
        taken, found = 0, []
        for one in batch:
            parameter, gradient = one.optimizer_slice.parameter, one.grad_views[0]
            if one.needs_copy:
                gradient = buffer[taken : taken + parameter.nbytes].view(parameter.dtype)
                if parameter.device != buffer.device:
                    self._engine.gradients.wait_offloaded()
                    gradient = torch.empty_like(parameter)
                places = list(torch.split(gradient, [view.numel() for view in one.grad_views]))
                torch._foreach_copy_(places, one.grad_views)
                taken += one.copy_bytes
            parameter.grad = gradient
            found.append(gradient)
        gradients = self._engine.gradients
        if gradients.inverse_scale is not None:
            gradients.scale_shards(found, gradients.inverse_scale)
            themselves = [one.grad_views[0] for one in batch if not one.needs_copy]
            if themselves:  # whoever reads or adds to them finds them scaled, as the others are
                gradients.deferred_scales.append((themselves, 1 / gradients.inverse_scale))
        if gradients.clip_coef is not None:
            gradients.scale_shards(found, gradients.clip_coef)
