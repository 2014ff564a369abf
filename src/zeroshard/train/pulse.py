"""Pulse: the few numbers that all ranks share after every step."""

from __future__ import annotations

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


class Pulse:
    """Shares loss, norm and the wish to stop in one small all-reduce, so that all ranks decide alike.

    On a GPU the result is read one step late, when the device is done with it anyway: the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._under_way: deque[tuple[int, bool, torch.Tensor, torch.cuda.Event | None]] = deque()

    def send(self, step: int, loss: torch.Tensor, norm: torch.Tensor | None, stop: bool) -> None:
        """Share what this rank knows of a step it has begun to run."""
        known = norm if norm is not None else torch.zeros((), device=self._device)
        values = torch.stack([loss.detach().float(), known.float(), torch.full((), float(stop), device=self._device)])
        dist.all_reduce(values)
        values /= dist.get_world_size()
        event = None
        if self._on_gpu:
            host = torch.empty(3, pin_memory=True)
            host.copy_(values, non_blocking=True)
            values, event = host, torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._under_way.append((step, norm is not None, values, event))

    def read(self, all_of_them: bool = False) -> Iterator[Beat]:
        """The steps whose numbers are there: on a GPU, all but the last unless all are asked for."""
        while len(self._under_way) > (1 if self._on_gpu and not all_of_them else 0):
            step, has_norm, values, event = self._under_way.popleft()
            if event is not None:
                event.synchronize()
            loss, norm, stop = values.tolist()
            yield Beat(step, loss, norm if has_norm else None, stop > 0)
