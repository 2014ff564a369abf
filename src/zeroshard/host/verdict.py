"""Verdict: what a step decides for all gradients, as the host reads it without keeping the device waiting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.memory.lane import moment


@dataclass(frozen=True)
class Ruling:
    """A verdict in plain numbers."""

    counts: bool = True
    """False: a gradient overflowed on some rank, and nothing is updated."""
    inverse: float | None = None
    """Of the loss scale."""
    coefficient: float | None = None
    """Of a clip."""

    @property
    def factors(self) -> tuple[float, ...]:
        """What gradients are multiplied by, one after the other."""
        return tuple(factor for factor in (self.inverse, self.coefficient) if factor is not None)


class Verdict:
    """A ruling that the device may still have to find. Made on the thread of the step, read on another.

    >>> Verdict(None, torch.tensor(0.5), None).read()
    Ruling(counts=True, inverse=None, coefficient=0.5)
    """

    def __init__(
        self,
        inverse: torch.Tensor | None = None,
        coefficient: torch.Tensor | None = None,
        overflow: torch.Tensor | None = None,
    ) -> None:
        given = {"inverse": inverse, "coefficient": coefficient, "overflow": overflow}
        found = {name: value.detach().float().reshape(()) for name, value in given.items() if value is not None}
        self._names = list(found)
        self._values: torch.Tensor | None = None
        self.there: torch.cuda.Event | None = None  # when the device has found it
        if found:
            line = torch.stack(list(found.values()))
            on_gpu = line.device.type == "cuda"
            self._values = torch.empty(len(found), pin_memory=on_gpu)
            self._values.copy_(line, non_blocking=True)
            self.there = moment(torch.cuda.current_stream()) if on_gpu else None

    def read(self) -> Ruling:
        """Wait for the device, and tell."""
        if self.there is not None:
            self.there.synchronize()
        values = dict(zip(self._names, self._values.tolist() if self._values is not None else (), strict=True))
        return Ruling(not values.get("overflow"), values.get("inverse"), values.get("coefficient"))
