"""Pulse: the few numbers that all ranks share after every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Beat:
    """What all ranks know of a step."""

    step: int
    loss: float
    """The mean over the ranks."""
    norm: float | None
    """Of the gradients; None where it was not asked for."""
    stop: bool
    """Whether any rank was told to stop."""
    seconds: float
    """How long the step took on this rank: on a GPU, by the device's clock."""


class Pulse:
    """Shares loss, norm and the wish to stop in one small all-reduce, so that all ranks decide alike.

    On a GPU the result is read one step late, when the device is done with it anyway: the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: deque[tuple[int, bool, torch.Tensor, _Moment, _Moment]] = deque()
        self._since = _Moment(device)

    def restart(self) -> None:
        """Begin to time the next step here: what came before (an evaluation, say) is no part of it."""
        self._since = _Moment(self._device)

    def send(self, step: int, loss: torch.Tensor, norm: torch.Tensor | None, stop: bool) -> None:
        """Share what this rank knows of a step it has begun to run."""
        known = norm if norm is not None else torch.zeros((), device=self._device)
        values = torch.stack([loss.detach().float(), known.float(), torch.full((), float(stop), device=self._device)])
        dist.all_reduce(values)
        values /= dist.get_world_size()
        if self._device.type == "cuda":
            values = torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
        now = _Moment(self._device)
        self._under_way.append((step, norm is not None, values, self._since, now))
        self._since = now

    def read(self, all_of_them: bool = False) -> Iterator[Beat]:
        """The steps whose numbers are there: on a GPU, all but the last unless all are asked for."""
        kept = 1 if self._device.type == "cuda" and not all_of_them else 0
        while len(self._under_way) > kept:
            step, has_norm, values, since, now = self._under_way.popleft()
            seconds = now.after(since)
            loss, norm, stop = values.tolist()
            yield Beat(step, loss, norm if has_norm else None, stop > 0, seconds)


class _Moment:
    """When the device came here."""

    def __init__(self, device: torch.device) -> None:
        self._host = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def after(self, earlier: _Moment) -> float:
        """Seconds since an earlier moment. Waits until the device has come here."""
        if self._event is None or earlier._event is None:
            return self._host - earlier._host
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
