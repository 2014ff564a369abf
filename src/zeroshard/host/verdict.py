"""Verdict: what a step decides for all gradients, as the host reads it without keeping the device waiting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.memory.lane import record_blocking_event


@dataclass(frozen=True)
class GradScaleValues:
    """A verdict in plain numbers."""

    is_finite: bool = True
    """False: a gradient overflowed on some rank, and nothing is updated."""
    inv_scale: float | None = None
    """Of the loss scale."""
    clip_coef: float | None = None
    """Of a clip."""

    @property
    def factors(self) -> tuple[float, ...]:
        """What gradients are multiplied by, one after the other."""
        return tuple(factor for factor in (self.inv_scale, self.clip_coef) if factor is not None)


class GradScaleReadback:
    """A ruling that the device may still have to find. Made on the thread of the step, read on another.

    >>> GradScaleReadback(None, torch.tensor(0.5), None).read()
    GradScaleValues(is_finite=True, inv_scale=None, clip_coef=0.5)
    """

    def __init__(
        self,
        inv_scale: torch.Tensor | None = None,
        clip_coef: torch.Tensor | None = None,
        overflow: torch.Tensor | None = None,
    ) -> None:
        given = {"inverse": inv_scale, "coefficient": clip_coef, "overflow": overflow}
        found = {name: value.detach().float().reshape(()) for name, value in given.items() if value is not None}
        self._names = list(found)
        self._values: torch.Tensor | None = None
        self.ready_event: torch.cuda.Event | None = None  # when the device has found it
        if found:
            line = torch.stack(list(found.values()))
            on_gpu = line.device.type == "cuda"
            self._values = torch.empty(len(found), pin_memory=on_gpu)
            self._values.copy_(line, non_blocking=True)
            self.ready_event = record_blocking_event(torch.cuda.current_stream()) if on_gpu else None

    def read(self) -> GradScaleValues:
        """Wait for the device, and tell."""
        if self.ready_event is not None:
            self.ready_event.synchronize()
        values = dict(zip(self._names, self._values.tolist() if self._values is not None else (), strict=True))
        return GradScaleValues(not values.get("overflow"), values.get("inverse"), values.get("coefficient"))
