"""Measure a node apart from its devices: host memory, CPU optimizer updates, disk, and the links between ranks."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroshard.comm import MeshAxis, all_gather_object, all_gather_sync
from zeroshard.memory import Disk, DiskError, aligned_buffer, available_host_memory
from zeroshard.optim import make_adam_update
from zeroshard.planner.calibration.device_rates import host_seconds
from zeroshard.planner.machines.machine import Link, Machine, round_measurement

UPDATE_NUMEL = 25_000_000  # parameters in the timed update: 28 bytes each, much more than the caches hold
DISK_FILE_BYTES = 2**28  # bytes written and read
MIN_DISK_FILE_BYTES = 2**20  # fewer bytes say nothing about a disk's speed
ALL_GATHER_REPEATS = 5
SMALL_BYTES = 2**12  # of the all-gather output on each rank: latency dominates
LARGE_BYTES = {"cuda": 2**28, "cpu": 2**22}  # bandwidth dominates


def update_rate(seconds: float, max_numel: int = UPDATE_NUMEL) -> float:
    """Return how many parameters/s this process updates with AdamW as in an offloaded step, with bf16 in and out."""
    numel = max(1000, min(max_numel, UPDATE_NUMEL, available_host_memory() // (4 * 28) or UPDATE_NUMEL))
    return numel / host_seconds(make_adam_update(numel), seconds)


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
            raise DiskError(f"only {free} bytes are free in {directory}: choose a directory on a disk with more space")
        on_disk, buffer = disk.zeros(nbytes, torch.uint8), aligned_buffer(nbytes)
        buffer.random_()  # random data, because some disks compress
        write = host_seconds(lambda: disk.start_write(buffer, to=on_disk).wait(), seconds / 2)
        read = host_seconds(lambda: disk.start_read(on_disk, into=buffer).wait(), seconds / 2)
        if disk.is_direct_io:
            return {"disk": free, "disk_read": nbytes / read, "disk_write": nbytes / write}
        warnings.warn(
            f"transfers in {directory} go through the page cache, so the disk's rates are not measured: "
            "choose a directory on a local disk",
            RuntimeWarning,
            stacklevel=4,
        )
        return {"disk": free}
    finally:
        disk.close()


@dataclass(frozen=True)
class CalibrationRanks:
    """The ranks that measure together, and which of them share this rank's node."""

    world_size: int = 1
    rank: int = 0
    local_ranks: tuple[int, ...] = (0,)

    @classmethod
    def current(cls) -> CalibrationRanks:
        """Return the ranks of the current job, or a single rank without one. Host names identify the nodes."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return cls()
        rank, names = dist.get_rank(), cls(dist.get_world_size()).gather_text(platform.node())
        return cls(len(names), rank, tuple(other for other, name in enumerate(names) if name == names[rank]))

    @property
    def is_first_local(self) -> bool:
        """Whether this is the first rank of its node, which writes the cache."""
        return self.rank == self.local_ranks[0]

    def barrier(self) -> None:
        """Wait for all ranks, so that shared resources are measured with all ranks of a node using them."""
        if self.world_size > 1:
            dist.barrier()

    def gather_text(self, text: str) -> list[str]:
        return all_gather_object(text, dist.group.WORLD, "calibrate", None)

    def broadcast_text(self, text: str) -> str:
        """Return the first rank's text, so that all ranks compute the same plans from it."""
        return self.gather_text(text)[0]


def measure_links(ranks: CalibrationRanks, device: torch.device, base: Machine, max_bytes: int) -> dict[str, Link]:
    """Measure the links that this job uses; return them as a machine's ``inside`` and ``outside``.

    Links that the job does not use are left out.
    """
    links: dict[str, Link] = {}
    if ranks.world_size == 1:
        return links
    sizes = (SMALL_BYTES, max(min(LARGE_BYTES[device.type], max_bytes), 4 * SMALL_BYTES))
    inside = base.inside
    if len(ranks.local_ranks) > 1:
        group = dist.group.WORLD
        if len(ranks.local_ranks) < ranks.world_size:
            group = dist.new_group(list(ranks.local_ranks), use_local_synchronization=True)
        axis = MeshAxis.from_group(group)
        times = [_time_all_gather(axis, device, nbytes) for nbytes in sizes]
        inside = links["inside"] = fit_link(len(ranks.local_ranks), times[0], times[1])
    if len(ranks.local_ranks) < ranks.world_size:
        nodes = -(-ranks.world_size // len(ranks.local_ranks))
        axis = MeshAxis.from_group(dist.group.WORLD)
        times = [_time_all_gather(axis, device, nbytes) for nbytes in sizes]
        local_seconds = (ranks.world_size - nodes) * inside.latency
        links["outside"] = fit_link(ranks.world_size, times[0], times[1], hops=nodes - 1, local_seconds=local_seconds)
    return links


def fit_link(
    ranks: int,
    small: tuple[float, float],
    large: tuple[float, float],
    hops: int | None = None,
    local_seconds: float = 0.0,
) -> Link:
    """Return the link on which a ring all-gather over ``ranks`` takes the measured times.

    ``small`` and ``large`` are (output bytes, seconds) of two all-gathers. The latency is divided over ``hops``, which
    excludes the intra-node hops; those take ``local_seconds`` in total.

    >>> fit_link(5, small=(0, 4e-5), large=(1e9, 8e-3 + 4e-5))
    Link(bandwidth=100000000000.0, latency=1e-05)
    """
    sent_fraction = (ranks - 1) / ranks
    slope = (large[1] - small[1]) / (large[0] - small[0])
    if slope <= 0:  # too noisy to separate latency from bandwidth
        slope = large[1] / large[0]
    latency = max(0.0, small[1] - small[0] * slope - local_seconds) / (hops or ranks - 1)
    return Link(bandwidth=round_measurement(sent_fraction / slope), latency=round_measurement(latency))


def _time_all_gather(axis: MeshAxis, device: torch.device, nbytes: int) -> tuple[float, float]:
    """Return (output bytes, seconds). Every rank runs the same number of repeats."""
    shard = torch.zeros(max(1, nbytes // axis.size), dtype=torch.uint8, device=device)
    full = torch.zeros(shard.numel() * axis.size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(ALL_GATHER_REPEATS + 1):
        dist.barrier(group=axis.group)
        begin = time.perf_counter()
        all_gather_sync(full, shard, axis)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return float(full.nbytes), statistics.median(times[1:])  # the first one sets up the connections
