"""LossScale: the dynamic loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from zeroshard.engine import on_scaled_loss

GROWTH_INTERVAL = 2000  # steps without overflow after which the loss scale doubles


class LossScale:
    """The dynamic loss scale of fp16. It stays on the device: using or changing it needs no host sync."""

    def __init__(self, initial: float, device: torch.device) -> None:
        self.scale = torch.full((), initial, device=device)  # fp32
        self.inverse_scale = 1 / self.scale  # fp32
        self.found_inf = torch.zeros((), device=device)  # fp32, 1 if a gradient was not finite on any rank
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale, and hook its backward to record that."""
        scaled = loss.float() * self.scale
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
        return [float(self.scale), float(self._growth_tracker)]

    def load(self, state: list[float]) -> None:
        """Restore the result of :meth:`state`."""
        self.scale.fill_(state[0])
        self._growth_tracker.fill_(int(state[1]))
        self.inverse_scale = 1 / self.scale

    def finish_step(self, is_scaled: bool) -> None:
        """Clear ``found_inf``; halve the scale after an overflow, and double it after many steps without.

        If no loss was scaled (``is_scaled`` is False), the scale does not change.
        """
        if is_scaled:
            torch._amp_update_scale_(self.scale, self._growth_tracker, self.found_inf, 2.0, 0.5, GROWTH_INTERVAL)
            self.inverse_scale = 1 / self.scale
        self.found_inf.zero_()
