"""Desk: how updates on the host get at gradients, and send new parameters away."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroshard.engine.gradients import Gradients
from zeroshard.host.granule import Granule
from zeroshard.memory.lane import moment
from zeroshard.memory.tiers import SLOTS, Tiers
from zeroshard.runs import Run


class Slot:
    """A buffer that new parameters of one granule wait in until the device has fetched them."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.event: torch.cuda.Event | None = None  # when the last copy from it is over

    def copy_of(self, granule: Granule) -> torch.Tensor:
        """The buffer, as the granule's parameters in computation."""
        return self._buffer[: granule.numel * granule.flat.dtype.itemsize].view(granule.flat.dtype)


class Desk:
    """On a GPU a few pinned buffers and two streams; where the device is the host itself, nothing.

    ``now`` is everywhere the moment of the step: before it, the device may still read the old parameters.
    """

    def __init__(self, device: torch.device, tiers: Tiers, granules: Iterable[Granule]) -> None:
        self._device, self._tiers = device, tiers
        self._on_gpu = device.type == "cuda"
        # Two, since what is sent waits for the step on the device, and what is fetched before it must not.
        self._sending = _stream(device)
        self._fetching = _stream(device)
        found = list(granules)
        self._bytes = max((g.numel * g.flat.dtype.itemsize for g in found), default=0)
        self._numel = max((g.numel for g in found), default=0)
        self._slots: list[Slot] = []
        self._turn = 0
        self._gradient: torch.Tensor | None = None

    def mark(self) -> torch.cuda.Event | None:
        """The present moment of this thread's stream."""
        return moment(torch.cuda.current_stream()) if self._on_gpu else None

    def gradient(self, run: Run, gradients: Gradients) -> torch.Tensor:
        """The reduced gradient of a run in host memory; valid until the next is asked for. It has to be complete."""
        (found,) = run.reduced(gradients.of_flat)
        if found.device.type == "cpu" or self._fetching is None:
            return found
        if self._gradient is None or self._gradient.nbytes < found.nbytes:
            nbytes = self._numel * found.itemsize
            self._gradient = self._tiers.zeros("buckets", "host", nbytes, torch.uint8, pinned=True)
        there = self._gradient[: found.nbytes].view(found.dtype)
        with torch.cuda.stream(self._fetching):
            there.copy_(found, non_blocking=True)
            moment(self._fetching).synchronize()
        return there

    def direct(self, place: torch.Tensor, now: torch.cuda.Event | None) -> bool:
        """Whether the host may write into a place itself; if so, the device has read the old values."""
        if place.device.type != "cpu":
            return False
        if now is not None:
            now.synchronize()
        return True

    def take(self) -> Slot:
        """A free buffer. Whoever has one takes no other, and two may have one: see [Note: behind the kernel]."""
        if not self._slots:
            buffers = [
                self._tiers.zeros("buckets", "host", self._bytes, torch.uint8, pinned=True) for _ in range(SLOTS)
            ]
            self._slots = [Slot(buffer) for buffer in buffers]
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        if slot.event is not None:
            slot.event.synchronize()
            slot.event = None
        return slot

    def deliver(
        self, place: torch.Tensor, values: torch.Tensor | None, now: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy new parameters to their place. Returns when the device will have them, where it copies by itself."""
        if values is None:
            raise ValueError("there are no new parameters to deliver: please report this")
        if self.direct(place, now) or self._sending is None:
            place.copy_(values)
            return None
        if now is not None:
            self._sending.wait_event(now)
        with torch.cuda.stream(self._sending):
            place.copy_(values, non_blocking=True)
            return moment(self._sending)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
