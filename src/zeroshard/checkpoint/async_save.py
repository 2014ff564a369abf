"""Asynchronous saves: the handle, and a copy of this rank's states in host memory that is written during training.

[Note: when a snapshot copies]
Only ``step()`` changes shards, master weights and optimizer states. So they are copied concurrently with the next
forward and backward, and the next step waits for the copy. On a GPU a separate stream copies into pinned memory; on the
CPU the saving thread copies. Tensors that the user may change at any time (replicated parameters, buffers, the states
of an unsharded model) are copied before ``save`` returns; on a GPU the copy is enqueued on the current stream, before
any later work.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zeroshard.checkpoint.block_files import CheckpointWorkers
from zeroshard.checkpoint.flat_shards import LocalTensor
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.memory import PinnedBuffer
from zeroshard.sharding import round_up
from zeroshard.utils.profiling import label

_ALIGNMENT_BYTES = 64
_MAX_GAP_BYTES = 4096  # gaps up to this size are copied too, to save a separate copy


class Save:
    """The handle of a save, in progress or done.

    >>> import tempfile, torch, zeroshard
    >>> handle = zeroshard.save(tempfile.mkdtemp() + "/step-1", torch.nn.Linear(2, 1), wait=False)
    >>> handle.wait().name
    'step-1'
    """

    def __init__(self, path: Path, is_done: bool = False) -> None:
        self.path = path
        self.has_been_awaited = False  # whether a caller has received the result
        self._error: BaseException | None = None
        self._done = threading.Event()
        if is_done:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._done.is_set()

    def wait(self) -> Path:
        """Wait for the save and return its path; raise :class:`CheckpointError` if it failed."""
        self._done.wait()
        self.has_been_awaited = True
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error
        return self.path

    def run(self, write: Callable[[], None]) -> None:
        """Call ``write`` on the current thread; keep its error for :meth:`wait`."""
        try:
            write()
        except BaseException as error:
            self._error = error
        self._done.set()


pending_saves: list[Save] = []  # the last asynchronous save of this process


def wait_for_pending_save() -> None:
    """Wait for an earlier asynchronous save; raise if it failed."""
    while pending_saves:
        handle = pending_saves.pop()
        if not handle.has_been_awaited:
            handle.wait()


@atexit.register
def _print_unseen_errors() -> None:
    for handle in pending_saves:
        if handle._error is not None and not handle.has_been_awaited:
            print(f"zeroshard: {handle._error}", file=sys.stderr)


class HostStaging:
    """A host staging buffer for snapshots, reused by later saves."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned: PinnedBuffer | None = None

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None and self._pinned.is_pinned

    def get_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least ``nbytes`` bytes; reuse the current one if it is large enough."""
        if self._buffer.numel() < nbytes:
            # unpin and free the old buffer first, so that there are never two
            self._pinned, self._buffer = None, torch.empty(0, device="cpu")
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._buffer

    def pin(self, workers: CheckpointWorkers) -> None:
        """Pin the buffer, if allowed, so that GPU copies into it are asynchronous."""
        if self._buffer.numel():
            device = torch.device("cuda", torch.cuda.current_device())
            # zeroed first, by all threads: pinning touches pages in one. 0.7 s instead of 4.8 s for 4.9 GB
            self._pinned = PinnedBuffer(
                self._buffer.zero_(), device, lambda pin: workers.submit(pin).result(), warns=False
            )


@dataclass
class CopySpan:
    """Adjacent tensors of one allocation that are copied together."""

    tensors: list[torch.Tensor]
    source: torch.Tensor  # bytes
    host_copy: torch.Tensor  # bytes, on the host

    def host_copies(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (id, host copy) of each tensor. Addresses cannot be keys: tensors may share one."""
        for tensor in self.tensors:
            offset = tensor.data_ptr() - self.source.data_ptr()
            yield id(tensor), self.host_copy[offset : offset + tensor.nbytes].view(tensor.dtype)


class Snapshot:
    """Host copies of a checkpoint's tensors: some made immediately, others by :meth:`finish` on another thread."""

    def __init__(
        self, tensors: Mapping[str, LocalTensor], staging: tuple[HostStaging, HostStaging], workers: CheckpointWorkers
    ) -> None:
        self._staging, self._workers = staging[1], workers
        self._copies_enqueued = threading.Event()  # all copies are done, or are enqueued before ``_copy_done``
        self._copy_done: torch.cuda.Event | None = None
        deferred = [local for local in tensors.values() if local.is_stable_until_step]
        immediate = [local for local in tensors.values() if not local.is_stable_until_step]
        immediate_spans = _make_copy_spans(immediate, staging[0])
        self._deferred_spans = _make_copy_spans(deferred, staging[1])
        if any(span.source.is_cuda for span in immediate_spans) and not staging[0].is_pinned:
            staging[0].pin(workers)
        with label("save: copy parameters and buffers"):
            for span in immediate_spans:  # on a GPU, in stream order: later changes come after the copy
                span.host_copy.copy_(span.source, non_blocking=staging[0].is_pinned)
        spans = [*immediate_spans, *self._deferred_spans]
        copies = dict(pair for span in spans for pair in span.host_copies())
        self.tensors = {
            name: replace(local, shards=[(element_range, copies[id(tensor)]) for element_range, tensor in local.shards])
            for name, local in tensors.items()
        }
        self._device = next((span.source.device for span in spans if span.source.is_cuda), None)
        if self._device is not None:
            self._values_ready = torch.cuda.current_stream(self._device).record_event()
            if self._staging.is_pinned:
                self._start_copies(self._device)

    def _start_copies(self, device: torch.device) -> None:
        """Enqueue the deferred copies on a side stream; they overlap with compute."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._values_ready)
        with label("save: copy states"), torch.cuda.stream(stream):
            for span in self._deferred_spans:
                span.host_copy.copy_(span.source, non_blocking=True)
        self._copy_done = stream.record_event()
        self._copies_enqueued.set()

    def wait_for_copies(self) -> None:
        """Order later work of this thread and its current stream after the copies, so that states may change."""
        with label("wait for the copies of a save"):
            self._copies_enqueued.wait()
        if self._copy_done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copy_done)

    def finish(self) -> None:
        """Make the deferred copies and wait for them."""
        if self._device is None:
            with label("save: copy states"):
                for span in self._deferred_spans:
                    span.host_copy.copy_(span.source)
        elif self._copy_done is None:  # the first save: the buffer is not pinned yet
            self._staging.pin(self._workers)
            self._start_copies(self._device)
        if self._copy_done is not None:
            self._copy_done.synchronize()
        self.release_waiters()

    def release_waiters(self) -> None:
        """Release :meth:`wait_for_copies`: the save is over, possibly before it started the copies."""
        self._deferred_spans = []
        self._copies_enqueued.set()


def _make_copy_spans(local_tensors: Sequence[LocalTensor], staging: HostStaging) -> list[CopySpan]:
    """Merge adjacent tensors, so that the number of copies does not grow with the number of parameters."""
    tensors = sorted(
        (tensor for local in local_tensors for _, tensor in local.shards),
        key=lambda shard: (str(shard.device), shard.data_ptr()),
    )
    groups: list[list[torch.Tensor]] = []
    for tensor in tensors:
        last = groups[-1][-1] if groups else None
        if last is not None and _are_adjacent(last, tensor):
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    sources = []
    for first, last in ((group[0], group[-1]) for group in groups):
        start = first.storage_offset() * first.itemsize
        nbytes = last.data_ptr() + last.nbytes - first.data_ptr()
        sources.append(first.new_empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (nbytes,), (1,)))
    buffer = staging.get_buffer(sum(round_up(source.numel(), _ALIGNMENT_BYTES) for source in sources))
    spans, offset = [], 0
    for group, source in zip(groups, sources, strict=True):
        spans.append(CopySpan(group, source, buffer[offset : offset + source.numel()]))
        offset += round_up(source.numel(), _ALIGNMENT_BYTES)
    return spans


def _are_adjacent(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are in one allocation with at most a small gap between them."""
    gap = right.data_ptr() - left.data_ptr() - left.nbytes
    return 0 <= gap <= _MAX_GAP_BYTES and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
