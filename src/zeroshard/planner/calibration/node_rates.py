"""What a node has beside its devices, measured: host memory, its processors' updates, its disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path

import torch

from zeroshard.memory.disk.disk import Disk, DiskError, aligned_buffer
from zeroshard.memory.host_info import CGROUP_MEMORY_FILES, available_host_memory
from zeroshard.optim.cpu.kernels import AdamHyperparams, load_kernels
from zeroshard.optim.cpu.updates import default_threads
from zeroshard.planner.calibration.timing import host_seconds

UPDATE_NUMEL = 25_000_000  # that an update is timed with: 28 bytes each, far more than caches hold
DISK_FILE_BYTES = 2**28  # bytes that are written and read
MIN_DISK_FILE_BYTES = 2**20  # bytes that say anything of a disk


def host_memory() -> int:
    """Bytes of this node that its processes can have, within the limits of a container.

    >>> host_memory() > 0
    True
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, _ in CGROUP_MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(int(Path(limit).read_text()))
    return min(found)


def update_rate(seconds: float, max_numel: int = UPDATE_NUMEL) -> float:
    """Parameters/s that this process updates: AdamW as an offloaded step runs it, bf16 in and out."""
    numel = max(1000, min(max_numel, UPDATE_NUMEL, available_host_memory() // (4 * 28) or UPDATE_NUMEL))
    states = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    native = load_kernels()
    if native is None:  # torch's own is what would run
        parameter = torch.nn.Parameter(states[0])
        parameter.grad = torch.randn(numel)
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        return numel / host_seconds(lambda: optimizer.step(), seconds)
    options, threads = AdamHyperparams(lr=1e-3, weight_decay=0.1), default_threads()
    gradient, copy = torch.randn(numel).bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    return numel / host_seconds(
        lambda: native.adam(*states, gradient, options, out=states, step=10, copy=copy, threads=threads), seconds
    )


def disk_rates(directory: str | os.PathLike[str], seconds: float, max_bytes: int = DISK_FILE_BYTES) -> dict[str, float]:
    """Free bytes and bytes/s of the disk under a directory, as a machine's ``disk``, ``disk_read`` and ``disk_write``.

    The file has no name, so nothing is left behind. DiskError where it cannot be made or is too small to say anything;
    the rates are left out, with a warning, where they are only the page cache's.
    """
    disk = Disk(directory)
    try:
        free = shutil.disk_usage(directory).free
        nbytes = min(max_bytes, DISK_FILE_BYTES, free // 4)
        if nbytes < MIN_DISK_FILE_BYTES:
            raise DiskError(f"{free} bytes are free in {directory}: choose a directory on a disk with more space")
        far, near = disk.zeros(nbytes, torch.uint8), aligned_buffer(nbytes)
        near.random_()  # some disks compress
        write = host_seconds(lambda: disk.start_write(near, to=far).wait(), seconds / 2)
        read = host_seconds(lambda: disk.start_read(far, into=near).wait(), seconds / 2)
        if disk.is_direct_io:
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
