"""GradScale: the factors that stored gradients still need, and the loss scale of each running backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.grad_norms import GradNorms


@dataclass(frozen=True)
class GradScale:
    """The factors that stored gradients have not been multiplied by: 0-dim fp32 tensors on the device.

    A step multiplies each gradient by them in fp32 when it reads it. So unscaling and clipping take no pass over
    memory, small fp16 values do not underflow, and the host does not wait for the device.

    >>> GradScale(clip_coef=torch.tensor(0.5)).factors
    [tensor(0.5000)]
    """

    inv_scale: torch.Tensor | None = None  # inverse of the loss scale; None: the loss was not scaled
    clip_coef: torch.Tensor | None = None  # of a clip that no step has applied yet
    found_inf: torch.Tensor | None = None  # not 0: a gradient overflowed on some rank, so the step must be skipped

    @property
    def factors(self) -> list[torch.Tensor]:
        """Return the factors to multiply by, in this order."""
        return [factor for factor in (self.inv_scale, self.clip_coef) if factor is not None]


UNSCALED = GradScale()  # no factors


class GradScaling:
    """Multiplies the stored gradients of one model by their factors, as late as possible."""

    def __init__(self, flat_grads: dict[FlatParam, FlatGrad], norms: GradNorms) -> None:
        self._flat_grads, self._norms = flat_grads, norms
        self.scale = UNSCALED  # factors that no gradient has been multiplied by yet
        self.has_edits = False  # whether the user's code, or a GradScaler, has ever changed a gradient
        # some gradients, and a factor that only these have not been multiplied by yet
        self.deferred: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def clip(self, coefficient: torch.Tensor) -> None:
        """Multiply all gradients by a coefficient, at the next step or before they change."""
        earlier = self.scale.clip_coef
        self.scale = replace(self.scale, clip_coef=coefficient if earlier is None else earlier * coefficient)

    def drop_clip(self) -> None:
        """Forget the clip coefficient, because a step has applied or deferred it."""
        self.scale = replace(self.scale, clip_coef=None)

    def defer(self, shards: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply these gradients by a factor before they are read again: a step has multiplied only copies of them.

        Most loops clear the gradients first, and then nothing is multiplied.
        """
        if shards:
            self.deferred.append((shards, factor))

    @torch.no_grad()
    def apply(self) -> None:
        """Apply the clip and the deferred factors, because the gradients are about to change."""
        if self.scale.clip_coef is not None:
            self.defer(self.shards(), self.scale.clip_coef)
            self.drop_clip()
        self.apply_deferred()

    def apply_deferred(self) -> None:
        """Apply the factors of :meth:`defer`."""
        if not self.deferred:
            return
        for flat in self._flat_grads:
            flat.wait_for_update()  # afterwards, its update has read the gradient
        for shards_and_factor in self.deferred:
            self.multiply(*shards_and_factor)
        self.deferred = []
        self.clear_norms()

    def begin_backward(self, inverse_scale: torch.Tensor | None, has_grads: bool) -> None:
        """Prepare for a backward that adds gradients with another loss scale, perhaps to existing ones."""
        self.apply()
        earlier = self.scale.inv_scale
        if has_grads and earlier is not inverse_scale:
            if earlier is None or inverse_scale is None:
                first, second = ("was not", "was") if earlier is None else ("was", "was not")
                raise RuntimeError(
                    f"the loss of the existing gradients {first} multiplied by optimizer.scale(loss), and the loss of "
                    f"this backward {second}: the gradients cannot be added. Scale every loss of a step or none, or "
                    "call optimizer.zero_grad() in between"
                )
            # a step has changed the scale, and the gradients were not cleared
            flat_grads = self._flat_grads.values()
            sums = [pending_sum for g in flat_grads for pending_sum in g.pending_sums]
            carried_over = [g.carried_over for g in flat_grads if g.carried_over is not None]
            self.multiply([*self.shards(), *sums, *carried_over], earlier / inverse_scale)
            self.clear_norms()
        self.scale = UNSCALED if inverse_scale is None else GradScale(inverse_scale)

    def clear(self, set_to_none: bool) -> None:
        """Forget all factors of gradients that are cleared; zeros keep their loss scale."""
        inv_scale = None if set_to_none else self.scale.inv_scale
        self.scale, self.deferred = UNSCALED if inv_scale is None else GradScale(inv_scale), []

    def multiply(self, shards: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply gradients by ``factor`` now, on the device or offloaded."""
        on_device = [shard for shard in shards if shard.device == factor.device]
        if on_device:
            torch._foreach_mul_(on_device, factor)
        if len(on_device) < len(shards):
            for flat_grad in self._flat_grads.values():
                flat_grad.wait_copy()
            host_factor = factor.cpu()
            for shard in shards:
                if shard.device != factor.device:
                    shard.mul_(host_factor)

    def shards(self) -> list[torch.Tensor]:
        """Return the reduced gradient shards of this rank."""
        return [g.shard for g in self._flat_grads.values() if g.has_shard and g.shard is not None and g.shard.numel()]

    def parameter_norms(self, norm_type: float) -> torch.Tensor:
        """Return the norm of each trainable parameter's full gradient, unscaled and clipped: see :class:`GradNorms`."""
        norms, factors = self._norms.per_parameter(norm_type), self.scale.factors
        return norms * math.prod(factors[1:], start=factors[0]).abs() if factors and norm_type != 0 else norms

    def clear_norms(self) -> None:
        """Clear all cached norms, because gradients have changed."""
        self._norms.cache.clear()
        for flat_grad in self._flat_grads.values():
            flat_grad.clear_norms()


# Running backwards: autograd's graph task id → inverse of the scale of their loss; None: not scaled.
# One table for all models, because a loss may depend on several models.
_running_backwards: dict[int, torch.Tensor | None] = {}


def current_inverse_scale() -> torch.Tensor | None:
    """Return the inverse of the running backward's loss scale; None if its loss was not scaled.

    This fixes the scale: a loss found to be scaled later in the same backward is an error.
    """
    task_id = torch._C._current_graph_task_id()
    if task_id not in _running_backwards:
        _record_backward(task_id, None)
    return _running_backwards[task_id]


def on_scaled_loss(inverse_scale: torch.Tensor, gradient: torch.Tensor) -> None:
    """Record that the running backward starts from a scaled loss; raise if another of its losses differs."""
    task_id = torch._C._current_graph_task_id()
    if task_id not in _running_backwards:
        _record_backward(task_id, inverse_scale)
        return
    known = _running_backwards[task_id]
    if known is None or (known is not inverse_scale and bool(known != inverse_scale)):
        other = "is not scaled" if known is None else "has another scale"
        raise RuntimeError(
            f"one loss of this backward was multiplied by optimizer.scale(loss), and another one {other}: their "
            "gradients cannot be separated. Add the losses first, and call optimizer.scale() on the sum"
        )


def _record_backward(task_id: int, inverse_scale: torch.Tensor | None) -> None:
    _running_backwards[task_id] = inverse_scale
    torch.autograd.Variable._execution_engine.queue_callback(partial(_running_backwards.pop, task_id, None))  # type: ignore[arg-type]
