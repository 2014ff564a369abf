"""Snapshot: a copy of this rank's states in host memory, to be written while training goes on.

[Note: when the copy is made]
Shards, master copies and optimizer states change in ``step()`` alone, so they are copied beside the forward and
backward that follow, and the next step waits until that is done: on a GPU a stream of its own copies into pinned
memory, on the CPU the saving thread does. What the user may write into at any time (parameters that every rank holds
whole, buffers, the states of a plain model) is copied before ``save`` returns, or before anything else on its stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zeroshard.checkpoint.blocks import Workers
from zeroshard.checkpoint.states import Held
from zeroshard.layout import round_up

_ALIGN = 64  # bytes
_GAP = 4096  # bytes that are copied for nothing rather than to make another copy


class Stage:
    """Host memory for snapshots, kept from one save to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.pinned = False

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory of at least ``nbytes`` bytes, the same as before where that is enough."""
        if self._memory.numel() < nbytes:
            if self.pinned:
                torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._memory, self.pinned = torch.empty(0), False  # first, so that there are never two
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory

    def pin(self, workers: Workers) -> None:
        """Pin the memory, where that is allowed, so that a GPU copies into it by itself.

        Asking for pinned memory has one thread fill it page by page: 4.8 s for 4.9 GB. Filling it with all threads
        first, and pinning it where it is, took 0.7.
        """
        if self._memory.numel() == 0:
            return
        self._memory.zero_()
        # a refusal would be told by the next kernel on this thread
        workers.submit(partial(self._register, torch.cuda.current_device())).result()

    def _register(self, device: int) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # a thread begins on the first GPU, and would open a context there
            outcome = cudart.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        self.pinned = int(outcome) == 0


@dataclass
class Span:
    """Neighbouring tensors of one allocation, which are copied as one."""

    tensors: list[torch.Tensor]
    source: torch.Tensor  # bytes
    copy: torch.Tensor  # bytes, on the host

    def copies(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The copy of each tensor, by the tensor's id: several may begin at the same address."""
        for tensor in self.tensors:
            at = tensor.data_ptr() - self.source.data_ptr()
            yield id(tensor), self.copy[at : at + tensor.nbytes].view(tensor.dtype)


class Snapshot:
    """The tensors of a checkpoint, copied: some at once, the others when :meth:`finish` is called on another thread."""

    def __init__(self, tensors: Mapping[str, Held], kept: tuple[Stage, Stage], workers: Workers) -> None:
        self._stage, self._workers = kept[1], workers
        self._begun = threading.Event()  # all copies are made, or are on the stream of ``_copied``
        self._copied: torch.cuda.Event | None = None
        now = _spans([held for held in tensors.values() if not held.steady], kept[0])
        self._later = _spans([held for held in tensors.values() if held.steady], kept[1])
        if any(span.source.is_cuda for span in now) and not kept[0].pinned:
            kept[0].pin(workers)
        for span in now:  # on a GPU, in its turn: what changes it later comes after
            span.copy.copy_(span.source, non_blocking=kept[0].pinned)
        spans = [*now, *self._later]
        copies = dict(pair for span in spans for pair in span.copies())
        self.tensors = {
            name: replace(held, parts=[(stretch, copies[id(tensor)]) for stretch, tensor in held.parts])
            for name, held in tensors.items()
        }
        self._device = next((span.source.device for span in spans if span.source.is_cuda), None)
        if self._device is not None:
            self._present = torch.cuda.current_stream(self._device).record_event()
            if self._stage.pinned:
                self._copy_on_stream(self._device)

    def _copy_on_stream(self, device: torch.device) -> None:
        """Start all copies: the GPU makes them beside what it computes."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._present)
        with torch.cuda.stream(stream):
            for span in self._later:
                span.copy.copy_(span.source, non_blocking=True)
        self._copied = stream.record_event()
        self._begun.set()

    def settle(self) -> None:
        """Make sure that the states may change: what follows on this thread and stream comes after the copy."""
        self._begun.wait()
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def finish(self) -> None:
        """Have everything copied."""
        if self._device is None:
            for span in self._later:
                span.copy.copy_(span.source)
        elif self._copied is None:  # the first time
            self._stage.pin(self._workers)
            self._copy_on_stream(self._device)
        if self._copied is not None:
            self._copied.synchronize()
        self.let_go()

    def let_go(self) -> None:
        """Have nobody wait any more: the save is over, perhaps before it had come to the copy."""
        self._later = []
        self._begun.set()


def _spans(held: Sequence[Held], stage: Stage) -> list[Span]:
    """Join what lies side by side, so that there are few copies, however many parameters there are."""
    parts = sorted((tensor for one in held for _, tensor in one.parts), key=lambda t: (str(t.device), t.data_ptr()))
    joined: list[list[torch.Tensor]] = []
    for tensor in parts:
        last = joined[-1][-1] if joined else None
        if last is not None and _adjoin(last, tensor):
            joined[-1].append(tensor)
        else:
            joined.append([tensor])
    sources = []
    for first, last in ((group[0], group[-1]) for group in joined):
        start = first.storage_offset() * first.itemsize
        nbytes = last.data_ptr() + last.nbytes - first.data_ptr()
        sources.append(first.new_empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (nbytes,), (1,)))
    memory = stage.room(sum(round_up(source.numel(), _ALIGN) for source in sources))
    spans, at = [], 0
    for group, source in zip(joined, sources, strict=True):
        spans.append(Span(group, source, memory[at : at + source.numel()]))
        at += round_up(source.numel(), _ALIGN)
    return spans


def _adjoin(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors lie in one allocation with no more than alignment between them."""
    gap = right.data_ptr() - left.data_ptr() - left.nbytes
    return 0 <= gap <= _GAP and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
