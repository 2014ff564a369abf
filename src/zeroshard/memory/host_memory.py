"""Host memory: how much is available, buffers in huge pages, and pinned buffers."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIN_MMAP_BYTES = 2**22  # from this size on, use huge pages; below it, mmap costs more than it saves
CGROUP_MEMORY_FILES = (  # (limit, used), for cgroup v2 and v1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_host_memory() -> int:
    """Return the bytes available without swapping, within the container's limits; 0 if unknown.

    >>> available_host_memory() >= 0
    True
    """
    candidates: list[int] = []
    with contextlib.suppress(OSError):
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        candidates += [int(available[1]) * 1024] if available is not None else []
    for limit, used in CGROUP_MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            candidates.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(candidates, default=0)


def host_memory() -> int:
    """Return the bytes of host memory that the processes of this node can use, within the container's limits.

    >>> host_memory() > 0
    True
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, _ in CGROUP_MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def local_world_size() -> int:
    """Return how many ranks share this machine, according to torchrun."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def host_zeros(nbytes: int) -> torch.Tensor:
    """Return zeroed bytes of host memory, in huge pages if the system has them.

    From ``MIN_MMAP_BYTES`` on, forked processes do not inherit the memory.

    >>> host_zeros(3)
    tensor([0, 0, 0], dtype=torch.uint8)
    """
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu") if nbytes < MIN_MMAP_BYTES else mmap_buffer(nbytes)


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


def _run_on_new_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class PinnedBuffer:
    """Host memory that is pinned (cudaHostRegister) for the lifetime of this object, if the system allows it."""

    def __init__(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        run_on_thread: Callable[[Callable[[], None]], None] = _run_on_new_thread,
        warns: bool = True,
    ) -> None:
        """``run_on_thread`` calls a function on another thread and waits for it; ``warns``: if pinning fails."""
        self.tensor, self._device = tensor, device
        self.is_pinned = False
        run_on_thread(self._register)  # on this thread, the next kernel would report a failure
        if not self.is_pinned and warns:
            warnings.warn(
                f"could not pin {tensor.nbytes} bytes of host memory, so copies to and from the GPU are slower and do "
                "not overlap with other work: raise the limit of locked memory (ulimit -l)",
                RuntimeWarning,
                stacklevel=2,
            )

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> PinnedBuffer:
        """Allocate and pin bytes.

        torch rounds pinned memory up to a power of two and touches its pages in one thread. Touching them with all
        threads first and then pinning the memory in place takes a seventh of the time.
        """
        return cls(host_zeros(nbytes).zero_(), device)

    def _register(self) -> None:
        with torch.cuda.device(self._device):  # a new thread uses device 0 and would create a context there
            outcome = _cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.nbytes, 0)
        self.is_pinned = int(outcome) == 0

    def __del__(self) -> None:
        if getattr(self, "is_pinned", False):
            _cudart().cudaHostUnregister(self.tensor.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
