"""Measure a node apart from its devices: host memory, CPU optimizer updates, disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path

import torch

from zeroshard.memory import CGROUP_MEMORY_FILES, Disk, DiskError, aligned_buffer, available_host_memory
from zeroshard.optim import AdamHyperparams, default_threads, load_kernels
from zeroshard.planner.calibration.timing import host_seconds

UPDATE_NUMEL = 25_000_000  # parameters in the timed update: 28 bytes each, much more than the caches hold
DISK_FILE_BYTES = 2**28  # bytes written and read
MIN_DISK_FILE_BYTES = 2**20  # fewer bytes say nothing about a disk's speed


def host_memory() -> int:
    """Return the bytes of host memory that processes of this node can use, within a container's limits.

    >>> host_memory() > 0
    True
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, _ in CGROUP_MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number and means no limit
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def update_rate(seconds: float, max_numel: int = UPDATE_NUMEL) -> float:
    """Return how many parameters/s this process updates with AdamW as in an offloaded step, with bf16 in and out."""
    numel = max(1000, min(max_numel, UPDATE_NUMEL, available_host_memory() // (4 * 28) or UPDATE_NUMEL))
    states = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    kernels = load_kernels()
    if kernels is None:  # an offloaded step would use torch's AdamW
        parameter = torch.nn.Parameter(states[0])
        parameter.grad = torch.randn(numel)
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        return numel / host_seconds(lambda: optimizer.step(), seconds)
    hyperparams, threads = AdamHyperparams(lr=1e-3, weight_decay=0.1), default_threads()
    gradient, copy = torch.randn(numel).bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    return numel / host_seconds(
        lambda: kernels.adam(*states, gradient, hyperparams, out=states, step=10, copy=copy, threads=threads), seconds
    )


def disk_rates(directory: str | os.PathLike[str], seconds: float, max_bytes: int = DISK_FILE_BYTES) -> dict[str, float]:
    """Measure free bytes and bytes/s of a directory's disk: a machine's ``disk``, ``disk_read`` and ``disk_write``.

    The file has no name, so nothing is left behind. Raises DiskError if the file cannot be created or would be too
    small for a measurement. If transfers go through the page cache, the rates are left out with a warning.
    """
    disk = Disk(directory)
    try:
        free = shutil.disk_usage(directory).free
        nbytes = min(max_bytes, DISK_FILE_BYTES, free // 4)
        if nbytes < MIN_DISK_FILE_BYTES:
            raise DiskError(f"{free} bytes are free in {directory}: choose a directory on a disk with more space")
        on_disk, buffer = disk.zeros(nbytes, torch.uint8), aligned_buffer(nbytes)
        buffer.random_()  # random data, because some disks compress
        write = host_seconds(lambda: disk.start_write(buffer, to=on_disk).wait(), seconds / 2)
        read = host_seconds(lambda: disk.start_read(on_disk, into=buffer).wait(), seconds / 2)
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
