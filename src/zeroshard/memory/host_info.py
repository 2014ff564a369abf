"""Host memory and ranks of this machine, as this rank sees them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

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


def local_world_size() -> int:
    """Return how many ranks share this machine, according to torchrun."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
