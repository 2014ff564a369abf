"""StepStats: a few numbers that are all-reduced after every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class StepStats:
    """Numbers of a step that are the same on all ranks, except its duration."""

    step: int
    loss: float
    """Mean over the ranks."""
    grad_norm: float | None
    """Norm of the gradients; None if it was not requested."""
    has_stop_request: bool
    """Whether any rank received a stop signal."""
    seconds: float
    """Duration of the step on this rank; on a GPU, by the device's clock."""


class StepStatsReducer:
    """All-reduces loss, norm and stop request in one small collective, so that all ranks decide the same.

    On a GPU the result is read one step later, when the device has finished it anyway, so the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[int, bool, torch.Tensor, _DeviceTimestamp, _DeviceTimestamp]] = deque()
        self._step_start = _DeviceTimestamp(device)

    def restart_timer(self) -> None:
        """Start timing the next step now, to exclude preceding work such as an evaluation."""
        self._step_start = _DeviceTimestamp(self._device)

    def start_reduce(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None, stop_requested: bool) -> None:
        """Start the all-reduce of this rank's numbers for a step that is in progress."""
        norm = grad_norm if grad_norm is not None else torch.zeros((), device=self._device)
        values = torch.stack(
            [loss.detach().float(), norm.float(), torch.full((), float(stop_requested), device=self._device)]
        )
        dist.all_reduce(values)
        values /= dist.get_world_size()
        if self._device.type == "cuda":
            values = torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
        now = _DeviceTimestamp(self._device)
        self._pending.append((step, grad_norm is not None, values, self._step_start, now))
        self._step_start = now

    def read_ready(self, flush: bool = False) -> Iterator[StepStats]:
        """Yield the steps whose numbers are ready: on a GPU all but the last, unless ``flush``."""
        num_pending = 1 if self._device.type == "cuda" and not flush else 0
        while len(self._pending) > num_pending:
            step, has_norm, values, start, end = self._pending.popleft()
            seconds = end.seconds_since(start)
            loss, norm, stop = values.tolist()
            yield StepStats(step, loss, norm if has_norm else None, stop > 0, seconds)


class _DeviceTimestamp:
    """The time at which the device reaches this point of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_since(self, start: _DeviceTimestamp) -> float:
        """Return the seconds since an earlier timestamp. Waits until the device reaches this one."""
        if self._event is None or start._event is None:
            return self._host_seconds - start._host_seconds
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3
