"""Room: one allocation apart: on a device in a pool of its own, or pinned in host memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
import warnings
from typing import Any

import torch

from zeroshard.memory.pool import Pool

MIN_MMAP_BYTES = (
    2**22
)  # bytes from which on memory of the host is taken in large pages: finding small ones takes its time


def host_zeros(nbytes: int) -> torch.Tensor:
    """Bytes of host memory, all zero, in large pages where the system has them.

    Processes forked from this one do not have what is so large.

    >>> host_zeros(3)
    tensor([0, 0, 0], dtype=torch.uint8)
    """
    return torch.zeros(nbytes, dtype=torch.uint8) if nbytes < MIN_MMAP_BYTES else mmap_buffer(nbytes)


def mmap_buffer(nbytes: int) -> torch.Tensor:
    """Bytes of host memory, all zero, that begin with a page.

    Forked processes do not have it: while one lives, each page written would be copied, and before Linux 6.3 a fork
    during a direct read could lose what was read. In small pages it takes 5 times the CPU to move a byte to disk.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


class PoolBuffer:
    """Memory on a device, in a pool of its own: [Note: memory apart]. All device memory for activations is taken here.

    The pool goes with the memory: a pool that stays would keep it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pool = Pool(device)
        with pool:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._pool = pool  # named last, so that it goes last


class PinnedRegistration:
    """Lets a GPU copy into and from host memory by itself, where the system allows it, for as long as the pin lives."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self.is_pinned = False
        thread = threading.Thread(target=self._register)  # a refusal would be told by the next kernel on this thread
        thread.start()
        thread.join()
        if not self.is_pinned:
            warnings.warn(
                f"{memory.nbytes} bytes of host memory could not be pinned, so copies to and from the GPU take longer "
                "and nothing runs beside them: raise the limit of locked memory (ulimit -l)",
                RuntimeWarning,
                stacklevel=2,
            )

    def _register(self) -> None:
        with torch.cuda.device(self._device):  # a thread begins on the first GPU, and would open a context there
            outcome = _cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
        self.is_pinned = int(outcome) == 0

    def __del__(self) -> None:
        if getattr(self, "is_pinned", False):
            _cudart().cudaHostUnregister(self._memory.data_ptr())


class PinnedBuffer(PoolBuffer):
    """Host memory that is pinned.

    Pinned memory from torch is rounded up to a power of two and filled page by page by one thread. Filling it with all
    threads first and pinning it where it is takes a seventh of the time.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = host_zeros(nbytes)
        self.tensor.zero_()  # takes the memory, with all threads
        self._registration = PinnedRegistration(self.tensor, device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
