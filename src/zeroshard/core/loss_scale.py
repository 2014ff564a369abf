"""LossScale: the dynamic loss scale of fp16. It stays on the device."""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
import torch.distributed as dist

from zeroshard.core.axis import Axis, all_reduce

GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale doubles

# The inverse scale of the losses of running backwards, by autograd's number of each. One table for all models, because
# one loss may depend on several.
RUNNING: dict[int, torch.Tensor | None] = {}


class LossScale:
    """What the losses of a model are multiplied by, so that small gradients do not become zero in fp16.

    Its optimizers share it, as they would one ``torch.amp.GradScaler``. Each skips its own step if one of its gradients
    has overflowed. The scale changes when the next loss is scaled, once for all steps since the last.
    """

    def __init__(self, initial: float, device: torch.device) -> None:
        self._scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._has_overflowed = torch.zeros((), dtype=torch.float32, device=device)  # 1: a step since the last change
        self._has_stepped = False
        self._has_warned = False
        self._inverse = 1 / self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss, multiplied by the scale; gradients of its backward are divided by it where they are read."""
        if self._has_stepped:
            self._scale, self._growth_tracker = self._next()
            self._inverse = 1 / self._scale
            self._has_overflowed.zero_()
            self._has_stepped = False
        scaled = loss.float() * self._scale
        if scaled.requires_grad:
            scaled.register_hook(partial(_note_backward, self._inverse))  # type: ignore[no-untyped-call]
        return scaled

    @property
    def value(self) -> torch.Tensor:
        """The scale of the next loss."""
        return self._next()[0]

    def state(self) -> list[float]:
        """Return the scale, and the steps since the last overflow."""
        return [float(each) for each in self._next()]

    def load(self, state: list[float]) -> None:
        """Take over what :meth:`state` has returned."""
        self._scale = torch.full_like(self._scale, state[0])
        self._growth_tracker = torch.full_like(self._growth_tracker, int(state[1]))
        self._inverse = 1 / self._scale
        self._has_overflowed.zero_()
        self._has_stepped = False

    def find_overflow(self, parts: list[torch.Tensor], axes: tuple[Axis, ...], is_scaled: bool) -> torch.Tensor:
        """Return 1 if a gradient is not finite on any rank, else 0: a collective.

        ``is_scaled``: whether the losses were, so that the scale learns from it.
        """
        found = torch.zeros_like(self._has_overflowed)
        parts = [part for part in parts if part.numel()]
        if parts:  # a tensor with a NaN has the norm NaN, and NaN < inf is False
            norms = torch._foreach_norm(parts, math.inf, dtype=torch.float32)
            torch.logical_not((torch.stack(list(norms)) < math.inf).all(), out=found)
        all_reduce(found, axes, dist.ReduceOp.MAX)
        if is_scaled:
            torch.maximum(self._has_overflowed, found, out=self._has_overflowed)
            self._has_stepped = True
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                'precision="fp16": optimizer.step() after a loss that was not multiplied by optimizer.scale(loss). '
                "Gradients below 6e-8 became zero, and those below 6e-5 lost precision: call "
                "optimizer.scale(loss).backward(), or the backward of your tool, as accelerator.backward(loss)",
                stacklevel=5,  # the caller of step()
            )
        return found

    def _next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the scale and the growth tracker are after the steps since the last change."""
        scale = self._scale.clone()
        growth_tracker = self._growth_tracker.clone()
        if self._has_stepped:
            torch._amp_update_scale_(scale, growth_tracker, self._has_overflowed, 2.0, 0.5, GROWTH_INTERVAL)
        return scale, growth_tracker


def inverse_scale() -> torch.Tensor | None:
    """Return the inverse of the scale of the running backward's loss; None if it was not scaled.

    A loss that turns out to be scaled later in this backward is an error.
    """
    return _note(torch._C._current_graph_task_id(), None)


def _note_backward(inverse: torch.Tensor, gradient: torch.Tensor) -> None:
    """Note that a backward has come to a scaled loss: a hook of this loss."""
    known = _note(torch._C._current_graph_task_id(), inverse)
    if known is None or (known is not inverse and bool(known != inverse)):
        raise RuntimeError(
            "one loss of this backward was multiplied by optimizer.scale(loss), and another one was not, or by another "
            "scale: their gradients cannot be separated. Add the losses first, and call optimizer.scale() on the sum"
        )


def _note(task: int, inverse: torch.Tensor | None) -> torch.Tensor | None:
    """Note the scale of a backward, unless it is known; return it."""
    if task not in RUNNING:
        RUNNING[task] = inverse
        torch.autograd.Variable._execution_engine.queue_callback(partial(RUNNING.pop, task, None))  # type: ignore[arg-type]
    return RUNNING[task]
