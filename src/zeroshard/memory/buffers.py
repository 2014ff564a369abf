"""Buffers with their own allocation: in a separate device pool, or in pinned host memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
import warnings
from typing import Any

import torch

from zeroshard.memory.pool import Pool

MIN_MMAP_BYTES = 2**22  # from this size on, use huge pages; below it, mmap costs more than it saves


def host_zeros(nbytes: int) -> torch.Tensor:
    """Return zeroed bytes of host memory, in huge pages if the system has them.

    From ``MIN_MMAP_BYTES`` on, forked processes do not inherit the memory.

    >>> host_zeros(3)
    tensor([0, 0, 0], dtype=torch.uint8)
    """
    return torch.zeros(nbytes, dtype=torch.uint8) if nbytes < MIN_MMAP_BYTES else mmap_buffer(nbytes)


def mmap_buffer(nbytes: int) -> torch.Tensor:
    """Return zeroed, page-aligned bytes of host memory.

    Forked processes do not inherit it: while a child is alive, every page written would be copied, and before Linux 6.3
    a fork during a direct read could lose the data read. With small pages, moving a byte to disk takes 5 times as much
    CPU time.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, AttributeError):  # not supported by this kernel or system
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


class PoolBuffer:
    """Device memory in its own pool: [Note: separate pool for long-lived tensors]. Activations are allocated here.

    The pool is freed together with the memory: a pool that outlives it would keep the segment.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pool = Pool(device)
        with pool:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._pool = pool  # set last, so that it is deleted last


class PinnedRegistration:
    """Pins host memory (cudaHostRegister) for the lifetime of this object, if the system allows it."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self.is_pinned = False
        thread = threading.Thread(target=self._register)  # the next kernel on this thread would report a failure
        thread.start()
        thread.join()
        if not self.is_pinned:
            warnings.warn(
                f"could not pin {memory.nbytes} bytes of host memory, so copies to and from the GPU are slower and do "
                "not overlap with other work: raise the limit of locked memory (ulimit -l)",
                RuntimeWarning,
                stacklevel=2,
            )

    def _register(self) -> None:
        with torch.cuda.device(self._device):  # a new thread uses device 0 and would create a context there
            outcome = _cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
        self.is_pinned = int(outcome) == 0

    def __del__(self) -> None:
        if getattr(self, "is_pinned", False):
            _cudart().cudaHostUnregister(self._memory.data_ptr())


class PinnedBuffer(PoolBuffer):
    """Pinned host memory.

    torch rounds pinned memory up to a power of two and touches its pages in one thread. Touching them with all threads
    first and then pinning the memory in place takes a seventh of the time.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = host_zeros(nbytes)
        self.tensor.zero_()  # touches all pages, with all threads
        self._registration = PinnedRegistration(self.tensor, device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
