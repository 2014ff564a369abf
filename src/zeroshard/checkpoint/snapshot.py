"""Snapshot: a copy of this rank's states in host memory, to be written while training goes on.

[Note: when the copy is made]
Shards, master copies and optimizer states change in ``step()`` alone, so they are copied beside the forward and
backward that follow, and the next step waits until that is done: on a GPU a stream of its own copies into pinned
memory, on the CPU the saving thread does. What the user may write into at any time (parameters that every rank holds
whole, buffers, the states of a plain model) is copied before ``save`` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import torch

from zeroshard.checkpoint.states import Held
from zeroshard.layout import Range, round_up

_ALIGN = 64  # bytes


class Stage:
    """Host memory for snapshots, kept from one save to the next: pinning memory anew takes longer than the copy."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def room(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """Memory of at least ``nbytes`` bytes."""
        kept = self._memory
        if kept is None or kept.numel() < nbytes or (pinned and not kept.is_pinned()):
            self._memory = None  # first, so that there are never two
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        assert self._memory is not None
        return self._memory


class Snapshot:
    """The tensors of a checkpoint, copied. ``finish`` copies what is left, on whichever thread calls it."""

    def __init__(self, tensors: Mapping[str, Held], stage: Stage) -> None:
        parts = [tensor for held in tensors.values() for _, tensor in held.parts]
        device = next((tensor.device for tensor in parts if tensor.is_cuda), None)
        memory = stage.room(sum(round_up(tensor.nbytes, _ALIGN) for tensor in parts), device is not None)
        self.tensors: dict[str, Held] = {}
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied: torch.cuda.Event | None = None
        self._done = threading.Event()
        at = 0
        now: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, held in tensors.items():
            copies: list[tuple[Range, torch.Tensor]] = []
            for stretch, tensor in held.parts:
                copy = memory[at : at + tensor.nbytes].view(tensor.dtype)
                at += round_up(tensor.nbytes, _ALIGN)
                copies.append((stretch, copy))
                (self._later if held.steady else now).append((copy, tensor))
            self.tensors[name] = replace(held, parts=copies)
        for copy, tensor in now:
            copy.copy_(tensor, non_blocking=True)
        if device is not None:
            self._copy_on_stream(device)

    def _copy_on_stream(self, device: torch.device) -> None:
        """Start all copies: the GPU makes them beside what it computes."""
        present, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(present)  # also for what is copied on the present one already
        with torch.cuda.stream(stream):
            for copy, tensor in self._later:
                copy.copy_(tensor, non_blocking=True)
        self._later = []
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(stream)

    def settle(self) -> None:
        """Make sure that the states may change: what follows on this thread and stream comes after the copy."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        else:
            self._done.wait()

    def finish(self) -> None:
        """Have everything copied."""
        try:
            if self._copied is not None:
                self._copied.synchronize()
            for copy, tensor in self._later:
                copy.copy_(tensor)
        finally:
            self._later = []
            self._done.set()
