"""LossScale: the dynamic loss scale of fp16."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial

import torch

from zeroshard.engine import on_scaled_loss

GROWTH_INTERVAL = 2000  # steps without overflow after which the loss scale doubles


class LossScale:
    """The dynamic loss scale of fp16. It stays on the device: using or changing it needs no host sync.

    [Note: one loss scale for several optimizers]
    The optimizers of one model share it, as with one ``torch.amp.GradScaler``: each skips its own step if one of its
    own gradients overflowed, and the scale is updated once for all steps. There is no ``scaler.update()`` that says
    when all have been stepped. So it is updated when the next loss is scaled, and then for all steps since the last.
    """

    def __init__(self, initial: float, device: torch.device, is_shared: bool = False) -> None:
        """``is_shared``: by several optimizers."""
        self._scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.inverse_scale = 1 / self._scale  # fp32
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # 1 if a gradient overflowed on any rank
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._is_shared = is_shared
        self._has_stepped = False  # whether a step has used scaled gradients since the last update
        self._overflow = torch.zeros((), dtype=torch.float32, device=device)  # 1 if one of these steps was skipped
        self._has_warned = False

    @property
    def scale(self) -> torch.Tensor:
        """The scale of the next loss, on the device, in fp32."""
        return self._next_update()[0] if self._has_stepped else self._scale

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale, and hook its backward to record that."""
        self._update()
        scaled = loss.float() * self._scale
        if scaled.requires_grad:
            scaled.register_hook(partial(on_scaled_loss, self.inverse_scale))  # type: ignore[no-untyped-call]
        return scaled

    def check_overflow(self, gradients: list[torch.Tensor], max_abs_values: Sequence[torch.Tensor] = ()) -> None:
        """Set ``found_inf`` if values are not finite, or would not be in fp32. Reads only, without a copy.

        ``max_abs_values`` are the largest magnitudes of gradients that are not in ``gradients``.
        """
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            if gradient.numel():
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        norms = [torch.stack(torch._foreach_norm(group, math.inf)).float() for group in by_dtype.values()]
        norms += [torch.stack(list(max_abs_values))] if max_abs_values else []
        if norms:  # a tensor with a NaN has the norm NaN, and NaN < inf is False
            torch.logical_not((torch.cat(norms) < math.inf).all(), out=self.found_inf)

    def state(self) -> list[float]:
        """Return the scale and the growth tracker (steps since the last overflow), as plain numbers."""
        return [float(value) for value in self._next_update()]

    def load(self, state: list[float]) -> None:
        """Restore the result of :meth:`state`."""
        self._has_stepped = False
        self._overflow.zero_()
        self._scale.fill_(state[0])
        self._growth_tracker.fill_(int(state[1]))
        self.inverse_scale = 1 / self._scale

    def finish_step(self, is_scaled: bool) -> None:
        """Clear ``found_inf``; halve the scale after an overflow, and double it after many steps without.

        If no loss was scaled (``is_scaled`` is False), the scale does not change. If several optimizers share it, it
        changes when the next loss is scaled.
        """
        if is_scaled:
            self._has_stepped = True
            torch.maximum(self._overflow, self.found_inf, out=self._overflow)
            if not self._is_shared:
                self._update()
        self.found_inf.zero_()

    def warn_unscaled(self) -> None:
        """Warn, once, that a step uses gradients of a loss that was not scaled. It may be what the user wants."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                'precision="fp16": optimizer.step() after a loss that was not multiplied by optimizer.scale(loss). '
                "Gradients below 6e-8 became zero, and those below 6e-5 lost precision: call "
                "optimizer.scale(loss).backward(), or the backward of your tool, as accelerator.backward(loss)",
                stacklevel=5,  # the caller of step()
            )

    def _update(self) -> None:
        """Update the scale after the steps since the last update, if there are any."""
        if self._has_stepped:
            _update_scale(self._scale, self._growth_tracker, self._overflow)
            self.inverse_scale, self._has_stepped = 1 / self._scale, False
            self._overflow.zero_()

    def _next_update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the scale and the growth tracker will be when the next loss is scaled."""
        scale, growth_tracker = self._scale.clone(), self._growth_tracker.clone()
        if self._has_stepped:
            _update_scale(scale, growth_tracker, self._overflow)
        return scale, growth_tracker


def _update_scale(scale: torch.Tensor, growth_tracker: torch.Tensor, found_inf: torch.Tensor) -> None:
    torch._amp_update_scale_(scale, growth_tracker, found_inf, 2.0, 0.5, GROWTH_INTERVAL)
