"""GradScale: the factors that stored gradients still need, and the loss scale of each running backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch


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
    torch.autograd.Variable._execution_engine.queue_callback(partial(_remove_backward, task_id))


def _remove_backward(task_id: int) -> None:
    _running_backwards.pop(task_id, None)
