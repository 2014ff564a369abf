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

from zeroshard.checkpoint.block_files import CheckpointWorkers
from zeroshard.checkpoint.train_state import LocalTensor
from zeroshard.sharding.layout import round_up

_ALIGNMENT_BYTES = 64  # bytes
_MAX_GAP_BYTES = 4096  # bytes that are copied for nothing rather than to make another copy


class HostStaging:
    """Host memory for snapshots, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.is_pinned = False

    def get_buffer(self, nbytes: int) -> torch.Tensor:
        """Memory of at least ``nbytes`` bytes, the same as before where that is enough."""
        if self._buffer.numel() < nbytes:
            if self.is_pinned:
                torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())  # type: ignore[no-untyped-call]
            self._buffer, self.is_pinned = torch.empty(0), False  # first, so that there are never two
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer

    def pin(self, workers: CheckpointWorkers) -> None:
        """Pin the memory, where that is allowed, so that a GPU copies into it by itself.

        Asking for pinned memory has one thread fill it page by page: 4.8 s for 4.9 GB. Filling it with all threads
        first, and pinning it where it is, took 0.7.
        """
        if self._buffer.numel() == 0:
            return
        self._buffer.zero_()
        # a refusal would be told by the next kernel on this thread
        workers.submit(partial(self._cuda_host_register, torch.cuda.current_device())).result()

    def _cuda_host_register(self, device: int) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # a thread begins on the first GPU, and would open a context there
            outcome = cudart.cudaHostRegister(self._buffer.data_ptr(), self._buffer.numel(), 0)
        self.is_pinned = int(outcome) == 0


@dataclass
class CopySpan:
    """Neighbouring tensors of one allocation, which are copied as one."""

    tensors: list[torch.Tensor]
    source: torch.Tensor  # bytes
    host_copy: torch.Tensor  # bytes, on the host

    def host_copies(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The copy of each tensor, by the tensor's id: several may begin at the same address."""
        for tensor in self.tensors:
            at = tensor.data_ptr() - self.source.data_ptr()
            yield id(tensor), self.host_copy[at : at + tensor.nbytes].view(tensor.dtype)


class Snapshot:
    """The tensors of a checkpoint, copied: some at once, the others when :meth:`finish` is called on another thread."""

    def __init__(
        self, tensors: Mapping[str, LocalTensor], staging: tuple[HostStaging, HostStaging], workers: CheckpointWorkers
    ) -> None:
        self._staging, self._workers = staging[1], workers
        self._copies_enqueued = threading.Event()  # all copies are made, or are on the stream of ``_copied``
        self._copy_done: torch.cuda.Event | None = None
        now = _make_copy_spans([held for held in tensors.values() if not held.is_stable_until_step], staging[0])
        self._deferred_spans = _make_copy_spans(
            [held for held in tensors.values() if held.is_stable_until_step], staging[1]
        )
        if any(span.source.is_cuda for span in now) and not staging[0].is_pinned:
            staging[0].pin(workers)
        for span in now:  # on a GPU, in its turn: what changes it later comes after
            span.host_copy.copy_(span.source, non_blocking=staging[0].is_pinned)
        spans = [*now, *self._deferred_spans]
        copies = dict(pair for span in spans for pair in span.host_copies())
        self.tensors = {
            name: replace(held, shards=[(stretch, copies[id(tensor)]) for stretch, tensor in held.shards])
            for name, held in tensors.items()
        }
        self._device = next((span.source.device for span in spans if span.source.is_cuda), None)
        if self._device is not None:
            self._values_ready = torch.cuda.current_stream(self._device).record_event()
            if self._staging.is_pinned:
                self._start_copies(self._device)

    def _start_copies(self, device: torch.device) -> None:
        """Start all copies: the GPU makes them beside what it computes."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._values_ready)
        with torch.cuda.stream(stream):
            for span in self._deferred_spans:
                span.host_copy.copy_(span.source, non_blocking=True)
        self._copy_done = stream.record_event()
        self._copies_enqueued.set()

    def wait_for_copies(self) -> None:
        """Make sure that the states may change: what follows on this thread and stream comes after the copy."""
        self._copies_enqueued.wait()
        if self._copy_done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copy_done)

    def finish(self) -> None:
        """Have everything copied."""
        if self._device is None:
            for span in self._deferred_spans:
                span.host_copy.copy_(span.source)
        elif self._copy_done is None:  # the first time
            self._staging.pin(self._workers)
            self._start_copies(self._device)
        if self._copy_done is not None:
            self._copy_done.synchronize()
        self.release_waiters()

    def release_waiters(self) -> None:
        """Have nobody wait any more: the save is over, perhaps before it had come to the copy."""
        self._deferred_spans = []
        self._copies_enqueued.set()


def _make_copy_spans(local_tensors: Sequence[LocalTensor], staging: HostStaging) -> list[CopySpan]:
    """Join what lies side by side, so that there are few copies, however many parameters there are."""
    parts = sorted(
        (tensor for one in local_tensors for _, tensor in one.shards), key=lambda t: (str(t.device), t.data_ptr())
    )
    joined: list[list[torch.Tensor]] = []
    for tensor in parts:
        last = joined[-1][-1] if joined else None
        if last is not None and _are_adjacent(last, tensor):
            joined[-1].append(tensor)
        else:
            joined.append([tensor])
    sources = []
    for first, last in ((group[0], group[-1]) for group in joined):
        start = first.storage_offset() * first.itemsize
        nbytes = last.data_ptr() + last.nbytes - first.data_ptr()
        sources.append(first.new_empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (nbytes,), (1,)))
    memory = staging.get_buffer(sum(round_up(source.numel(), _ALIGNMENT_BYTES) for source in sources))
    spans, at = [], 0
    for group, source in zip(joined, sources, strict=True):
        spans.append(CopySpan(group, source, memory[at : at + source.numel()]))
        at += round_up(source.numel(), _ALIGNMENT_BYTES)
    return spans


def _are_adjacent(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors lie in one allocation with no more than alignment between them."""
    gap = right.data_ptr() - left.data_ptr() - left.nbytes
    return 0 <= gap <= _MAX_GAP_BYTES and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
