"""Host: what of this machine is left to this rank."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

CGROUP_MEMORY_FILES = (  # (limit, used), of version 2 and of version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_host_memory() -> int:
    """Bytes of memory that can be taken without swapping, within the limits of a container; 0 where nobody tells.

    >>> available_host_memory() >= 0
    True
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found += [int(available[1]) * 1024] if available is not None else []
    for limit, used in CGROUP_MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(found, default=0)


def local_world_size() -> int:
    """How many ranks share this machine, as torchrun tells them."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
