"""What a node has beside its devices, measured: host memory, its processors' updates, its disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path

import torch

from zeroshard.host.native import kernels
from zeroshard.host.options import AdamOptions
from zeroshard.host.updates import default_threads
from zeroshard.memory.disk import Disk, DiskError, buffer
from zeroshard.memory.host import CGROUPS, host_memory_left
from zeroshard.planner.calibration.timing import host_seconds

PARAMETERS = 25_000_000  # that an update is timed with: 28 bytes each, far more than caches hold
FILE = 2**28  # bytes that are written and read
LEAST = 2**20  # bytes that say anything of a disk


def host_memory() -> int:
    """Bytes of this node that its processes can have, within the limits of a container.

    >>> host_memory() > 0
    True
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, _ in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(int(Path(limit).read_text()))
    return min(found)


def update_rate(seconds: float, most: int = PARAMETERS) -> float:
    """Parameters/s that this process updates: AdamW as an offloaded step runs it, bf16 in and out."""
    numel = max(1000, min(most, PARAMETERS, host_memory_left() // (4 * 28) or PARAMETERS))
    states = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    native = kernels()
    if native is None:  # torch's own is what would run
        parameter = torch.nn.Parameter(states[0])
        parameter.grad = torch.randn(numel)
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        return numel / host_seconds(lambda: optimizer.step(), seconds)
    options, threads = AdamOptions(lr=1e-3, weight_decay=0.1), default_threads()
    gradient, copy = torch.randn(numel).bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    return numel / host_seconds(
        lambda: native.adam(*states, gradient, options, out=states, step=10, copy=copy, threads=threads), seconds
    )


def disk_rates(directory: str | os.PathLike[str], seconds: float, most: int = FILE) -> dict[str, float]:
    """Free bytes and bytes/s of the disk under a directory, as a machine's ``disk``, ``disk_read`` and ``disk_write``.

    The file has no name, so nothing is left behind. DiskError where it cannot be made or is too small to say anything;
    the rates are left out, with a warning, where they are only the page cache's.
    """
    disk = Disk(directory)
    try:
        free = shutil.disk_usage(directory).free
        nbytes = min(most, FILE, free // 4)
        if nbytes < LEAST:
            raise DiskError(f"{free} bytes are free in {directory}: choose a directory on a disk with more space")
        far, near = disk.empty(nbytes, torch.uint8), buffer(nbytes)
        near.random_()  # some disks compress
        write = host_seconds(lambda: disk.write(near, to=far).wait(), seconds / 2)
        read = host_seconds(lambda: disk.read(far, into=near).wait(), seconds / 2)
        if disk.direct:
            return {"disk": free, "disk_read": nbytes / read, "disk_write": nbytes / write}
        warnings.warn(
            f"transfers in {directory} go through the page cache, so its disk's speed is not known: "
            "choose a directory on a local disk",
            RuntimeWarning,
            stacklevel=4,
        )
        return {"disk": free}
    finally:
        disk.close()
