"""Pulse: the few numbers that all ranks share after every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class StepStats:
    """What all ranks know of a step."""

    step: int
    loss: float
    """The mean over the ranks."""
    grad_norm: float | None
    """Of the gradients; None where it was not asked for."""
    has_stop_request: bool
    """Whether any rank was told to stop."""
    seconds: float
    """How long the step took on this rank: on a GPU, by the device's clock."""


class StepStatsReducer:
    """Shares loss, norm and the wish to stop in one small all-reduce, so that all ranks decide alike.

    On a GPU the result is read one step late, when the device is done with it anyway: the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[int, bool, torch.Tensor, _DeviceTimestamp, _DeviceTimestamp]] = deque()
        self._step_start = _DeviceTimestamp(device)

    def restart_timer(self) -> None:
        """Begin to time the next step here: what came before (an evaluation, say) is no part of it."""
        self._step_start = _DeviceTimestamp(self._device)

    def start_reduce(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None, stop_requested: bool) -> None:
        """Share what this rank knows of a step it has begun to run."""
        known = grad_norm if grad_norm is not None else torch.zeros((), device=self._device)
        values = torch.stack(
            [loss.detach().float(), known.float(), torch.full((), float(stop_requested), device=self._device)]
        )
        dist.all_reduce(values)
        values /= dist.get_world_size()
        if self._device.type == "cuda":
            values = torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
        now = _DeviceTimestamp(self._device)
        self._pending.append((step, grad_norm is not None, values, self._step_start, now))
        self._step_start = now

    def read_ready(self, flush: bool = False) -> Iterator[StepStats]:
        """The steps whose numbers are there: on a GPU, all but the last unless all are asked for."""
        kept = 1 if self._device.type == "cuda" and not flush else 0
        while len(self._pending) > kept:
            step, has_norm, values, since, now = self._pending.popleft()
            seconds = now.seconds_since(since)
            loss, norm, stop = values.tolist()
            yield StepStats(step, loss, norm if has_norm else None, stop > 0, seconds)


class _DeviceTimestamp:
    """When the device came here."""

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_since(self, start: _DeviceTimestamp) -> float:
        """Seconds since an earlier moment. Waits until the device has come here."""
        if self._event is None or start._event is None:
            return self._host_seconds - start._host_seconds
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3
