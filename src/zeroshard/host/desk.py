"""Desk: how updates on the host get at gradients, and send new parameters away."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroshard.engine.gradients import Gradients
from zeroshard.host.granule import StateChunk
from zeroshard.memory.lane import record_blocking_event
from zeroshard.memory.tiers import STAGING_SLOTS, TierAllocator
from zeroshard.runs import OptimizerSlice


class StagingSlot:
    """A buffer that new parameters of one granule wait in until the device has fetched them."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.copy_done: torch.cuda.Event | None = None  # when the last copy from it is over

    def param_view(self, chunk: StateChunk) -> torch.Tensor:
        """The buffer, as the granule's parameters in computation."""
        return self._buffer[: chunk.numel * chunk.flat.dtype.itemsize].view(chunk.flat.dtype)


class PinnedStaging:
    """On a GPU a few pinned buffers and two streams; where the device is the host itself, nothing.

    ``now`` is everywhere the moment of the step: before it, the device may still read the old parameters.
    """

    def __init__(self, device: torch.device, tiers: TierAllocator, chunks: Iterable[StateChunk]) -> None:
        self._device, self._tiers = device, tiers
        self._is_cuda = device.type == "cuda"
        # Two, since what is sent waits for the step on the device, and what is fetched before it must not.
        self._h2d_stream = _new_stream(device)
        self._d2h_stream = _new_stream(device)
        found = list(chunks)
        self._slot_bytes = max((g.numel * g.flat.dtype.itemsize for g in found), default=0)
        self._max_chunk_numel = max((g.numel for g in found), default=0)
        self._slots: list[StagingSlot] = []
        self._next_slot = 0
        self._grad_buffer: torch.Tensor | None = None

    def record_event(self) -> torch.cuda.Event | None:
        """The present moment of this thread's stream."""
        return record_blocking_event(torch.cuda.current_stream()) if self._is_cuda else None

    def fetch_grad(self, slice_: OptimizerSlice, gradients: Gradients) -> torch.Tensor:
        """The reduced gradient of a run in host memory; valid until the next is asked for. It has to be complete."""
        (found,) = slice_.grad_views(gradients.flat_grads)
        if found.device.type == "cpu" or self._d2h_stream is None:
            return found
        if self._grad_buffer is None or self._grad_buffer.nbytes < found.nbytes:
            nbytes = self._max_chunk_numel * found.itemsize
            self._grad_buffer = self._tiers.zeros("buckets", "host", nbytes, torch.uint8, pinned=True)
        there = self._grad_buffer[: found.nbytes].view(found.dtype)
        with torch.cuda.stream(self._d2h_stream):
            there.copy_(found, non_blocking=True)
            record_blocking_event(self._d2h_stream).synchronize()
        return there

    def can_write_directly(self, param_shard: torch.Tensor, step_event: torch.cuda.Event | None) -> bool:
        """Whether the host may write into a place itself; if so, the device has read the old values."""
        if param_shard.device.type != "cpu":
            return False
        if step_event is not None:
            step_event.synchronize()
        return True

    def acquire_slot(self) -> StagingSlot:
        """A free buffer. Whoever has one takes no other, and two may have one: see [Note: behind the kernel]."""
        if not self._slots:
            buffers = [
                self._tiers.zeros("buckets", "host", self._slot_bytes, torch.uint8, pinned=True)
                for _ in range(STAGING_SLOTS)
            ]
            self._slots = [StagingSlot(buffer) for buffer in buffers]
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % len(self._slots)
        if slot.copy_done is not None:
            slot.copy_done.synchronize()
            slot.copy_done = None
        return slot

    def copy_to_device(
        self, param_shard: torch.Tensor, values: torch.Tensor | None, step_event: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy new parameters to their place. Returns when the device will have them, where it copies by itself."""
        if values is None:
            raise ValueError("there are no new parameters to deliver: please report this")
        if self.can_write_directly(param_shard, step_event) or self._h2d_stream is None:
            param_shard.copy_(values)
            return None
        if step_event is not None:
            self._h2d_stream.wait_event(step_event)
        with torch.cuda.stream(self._h2d_stream):
            param_shard.copy_(values, non_blocking=True)
            return record_blocking_event(self._h2d_stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
