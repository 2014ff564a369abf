"""Pool and Arena: device memory for the library's long-lived tensors, apart from the model's temporaries (M_D).

[Note: separate pool for long-lived tensors]
PyTorch's allocator carves blocks from large segments. If long-lived tensors (an activation checkpoint, an optimizer
state created in the first step, the cuBLAS workspace) share segments with the model's temporaries, they end up in the
middle of a segment. The next large temporary (the logits) then needs a new segment although most of the old one is
free. So tensors that are alive when the loss is computed go into a separate pool, and the segments of the default pool
are completely free by then. Tensors allocated and freed within one forward or backward (unsharded units, the bucket
ring) stay in the default pool, which has free memory for them: in a separate pool they took 0.4 GB more of 6.3 GB (GPT
7.6B, batch 4, one rank of 64 on an H200).

[Note: one segment for several]
A tensor of 10 MiB or more gets its own segment, rounded up to 2 MiB; smaller ones share segments of 20 MiB, and those
up to 1 MiB share segments of 2 MiB. Tensors in the pool are never freed, so the unused end of a segment is lost. If
several tensors follow each other, as optimizer states do, reserve memory for all of them first: one segment of their
total size, at least 10 MiB, from which the allocator then carves them.

The pool is the allocator's own (``torch.cuda.MemPool``): its statistics stay correct, and when memory runs out the
allocator may still use the pool for other tensors. On the CPU, where the system allocator does not have this problem,
the pool does nothing.

[Note: when a pool is freed]
torch ends the process if a ``MemPool`` is freed while any thread allocates from one, or captures a graph. The garbage
collector may free the pool of a model that was dropped at any time, also then. So a pool that nothing needs any more is
handed to ``_PoolReleases``. That frees it at once if no thread is inside ``with pool:`` and this one captures no graph,
else when the last one leaves. Pools and captures of the user's code in other threads are not known here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any

import torch

from zeroshard.memory.allocator.simulator import LARGE_BUFFER_BYTES, SMALL_SIZE_BYTES
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding import round_up

MIN_LARGE_ALLOC_BYTES = LARGE_BUFFER_BYTES // 2  # smallest tensor that gets its own segment
MIN_BLOCK_BYTES = 512  # tensor sizes are rounded up to a multiple of this


def segment_bytes_for(sizes: Iterable[int]) -> int:
    """Return the bytes of one segment for tensors of these sizes; 0 if none is needed.

    See [Note: one segment for several].

    >>> segment_bytes_for([3 << 20, 3 << 20]) >> 20, segment_bytes_for([7 << 20, 1 << 20, (8 << 20) - 4]) >> 20
    (10, 15)
    >>> segment_bytes_for([1000, 1000]), segment_bytes_for([30 << 20])
    (0, 0)
    """
    large = [round_up(size, MIN_BLOCK_BYTES) for size in sizes if size > SMALL_SIZE_BYTES]
    if not large or large[0] == sum(large) >= MIN_LARGE_ALLOC_BYTES:
        return 0
    return max(sum(large), MIN_LARGE_ALLOC_BYTES)


class _PoolReleases:
    """Frees pools of torch while no thread allocates from one: see [Note: when a pool is freed]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0  # calls of enter() without leave()
        self._retired: list[Any] = []

    def enter(self) -> None:
        """Free no pool until :meth:`leave`."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Undo one :meth:`enter`."""
        with self._lock:
            self._users -= 1
            self._free()

    def retire(self, pools: list[Any]) -> None:
        """Empty the list, and free its pools now or later. The garbage collector may call this anywhere."""
        self._retired += pools
        pools.clear()
        if self._lock.acquire(blocking=False):  # else its holder may be the code that the garbage collector interrupts
            try:
                self._free()
            finally:
                self._lock.release()

    def _free(self) -> None:
        if self._retired and not self._users and not torch.cuda.is_current_stream_capturing():
            self._retired.clear()


_RELEASES = _PoolReleases()  # of the process, like torch's allocator


class Pool:
    """Inside ``with pool:``, this thread allocates device memory from the pool.

    >>> with Pool(torch.device("cpu")):
    ...     torch.zeros(1)
    tensor([0.])
    """

    def __init__(self, device: torch.device, is_separate: bool = True) -> None:
        """``is_separate=False``: the default pool of the allocator."""
        self.device, self.is_separate = device, is_separate
        self._pools: list[Any] = []  # torch's pool, if there is one; nothing else refers to it
        self._guards: list[Any] = []
        if is_separate and device.type == "cuda":
            self._pools.append(torch.cuda.MemPool(use_on_oom=True))
            weakref.finalize(self, _RELEASES.retire, self._pools).atexit = False

    def __enter__(self) -> Pool:
        if self._pools:
            _RELEASES.enter()
            guard = torch.cuda.use_mem_pool(self._pools[0], self.device)
            try:
                guard.__enter__()
            except BaseException:
                _RELEASES.leave()
                raise
            self._guards.append(guard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pools:
            try:
                self._guards.pop().__exit__(kind, error, trace)
            finally:
                _RELEASES.leave()

    def reserve(self, sizes: Iterable[int]) -> None:
        """Reserve memory for the tensors that follow, given their sizes: see [Note: one segment for several]."""
        nbytes = segment_bytes_for(sizes) if self._pools else 0
        if nbytes:
            with self, suppress(torch.OutOfMemoryError):  # each tensor may still fit on its own
                torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def reset(self) -> None:
        """Start a new pool. Memory of the old one returns to the device once nothing uses it."""
        if self._pools:
            _RELEASES.retire(self._pools)
            self._pools.append(torch.cuda.MemPool(use_on_oom=True))
            torch.cuda.empty_cache()


class Arena:
    """One contiguous allocation for long-lived tensors: each gets a range of it, once.

    Adjacent ranges can be viewed as one tensor, so that one fused kernel steps the shards of many units.

    >>> arena = Arena("parameters", 8, torch.float32, Pool(torch.device("cpu")), MemoryTracker())
    >>> a, b = arena.allocate(3), arena.allocate(5)
    >>> arena.tensor.numel() == a.numel() + b.numel()
    True

    Its storage can be freed and allocated again: the ranges become valid again, with undefined values.

    >>> arena.free_storage()
    >>> arena.alloc_storage()
    >>> a.zero_()
    tensor([0., 0., 0.])
    """

    def __init__(self, kind: str, numel: int, dtype: torch.dtype, pool: Pool, tracker: MemoryTracker) -> None:
        self._kind, self._pool, self._tracker = kind, pool, tracker
        with self._allocation_context(numel * dtype.itemsize):
            self.tensor = torch.zeros(numel, dtype=dtype, device=pool.device)  # zeros: padding must not contain NaN
        self._allocated_numel = 0
        self._has_storage = True
        tracker.add(kind, self.tensor.nbytes)

    def allocate(self, numel: int) -> torch.Tensor:
        """Return the next ``numel`` elements."""
        if self._allocated_numel + numel > self.tensor.numel():
            raise ValueError(
                f"the arena has {self.tensor.numel()} elements, but {self._allocated_numel + numel} were requested"
            )
        view = self.tensor[self._allocated_numel : self._allocated_numel + numel]
        self._allocated_numel += numel
        return view

    def alloc_storage(self) -> None:
        """Allocate the storage, if there is none."""
        if not self._has_storage:
            with self._allocation_context(self.tensor.nbytes):
                self.tensor.untyped_storage().resize_(self.tensor.nbytes)
            self._tracker.add(self._kind, self.tensor.nbytes)
            self._has_storage = True

    def free_storage(self) -> None:
        """Free the storage until the next :meth:`alloc_storage`. Until then no range may be accessed."""
        if self._has_storage:
            self.tensor.untyped_storage().resize_(0)
        self.disown()

    def disown(self) -> None:
        """Stop tracking the memory: it now belongs to the holders of its ranges."""
        if self._has_storage:
            self._tracker.add(self._kind, -self.tensor.nbytes)
            self._has_storage = False

    def move_to(self, pool: Pool) -> None:
        """Move the tensor into another pool, if memory allows. Ranges already returned move with it."""
        if self._pool is pool or not self._has_storage or pool.device.type != "cuda":
            self._pool = pool
            return
        try:
            values = self.tensor.clone()
        except torch.OutOfMemoryError:
            return
        self.free_storage()
        old_pool, self._pool = self._pool, pool
        try:
            self.alloc_storage()
        except torch.OutOfMemoryError:
            self._pool = old_pool
            self.alloc_storage()
        self.tensor.copy_(values)

    def _allocation_context(self, nbytes: int) -> AbstractContextManager[object]:
        if not self._pool.is_separate:
            return nullcontext()
        self._pool.reserve([nbytes])
        return self._pool


class CublasWorkspace:
    """One cuBLAS workspace on the device, shared by all threads.

    [Note: one workspace]
    PyTorch allocates a cuBLAS workspace for each thread that multiplies, 32 MiB on Hopper, and never frees it: one for
    the forward thread, one for the autograd thread, which do not run at the same time. So when a forward or a backward
    starts on another thread than the last one, all workspaces are cleared, and one is allocated for this thread, in the
    pool: if the first multiplication allocated it, it would lie in the middle of the model's largest segments. Kernels
    that still use a cleared workspace were launched on the same stream before those that reuse its memory.

    This does not hold for threads that multiply on one stream at the same time, nor for a graph that was captured after
    a workspace had been allocated: ``Config.defragment=False`` leaves the workspaces to PyTorch.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._thread_id = 0  # thread of the last allocation

    def acquire(self) -> None:
        """Make the workspace available to this thread."""
        thread = threading.get_ident()
        if thread != self._thread_id and not torch.cuda.is_current_stream_capturing():
            self.clear_all()
            with self._pool, torch.cuda.device(self._pool.device):
                self.allocate()
            self._thread_id = thread

    @staticmethod
    def clear_all() -> None:
        """Free the workspaces of all threads. Each is allocated again when its thread multiplies."""
        torch._C._cuda_clearCublasWorkspaces()

    @staticmethod
    def allocate() -> None:
        """Allocate the workspace of this thread, on the current device and stream, unless it exists."""
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
