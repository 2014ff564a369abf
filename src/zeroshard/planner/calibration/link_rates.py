"""Measure the bandwidth and latency of the links between the ranks of a job."""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroshard.comm import MeshAxis, all_gather_sync
from zeroshard.planner.machines.machine import Link, Machine

REPEATS = 5
SMALL_BYTES = 2**12  # of the all-gather output on each rank: latency dominates
LARGE_BYTES = {"cuda": 2**28, "cpu": 2**22}  # bandwidth dominates


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
        """Return the text of every rank."""
        texts = [text] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(texts, text)
        return texts

    def broadcast_text(self, text: str) -> str:
        """Return the first rank's text, so that all ranks compute the same plans from it."""
        if self.world_size == 1:
            return text
        texts = [text]
        dist.broadcast_object_list(texts, src=0)
        return texts[0]


def measure_links(
    ranks: CalibrationRanks, device: torch.device, base: Machine, max_bytes: int | None = None
) -> dict[str, Link]:
    """Measure the links that this job uses; return them as a machine's ``inside`` and ``outside``.

    Links that the job does not use are left out.
    """
    links: dict[str, Link] = {}
    if ranks.world_size == 1:
        return links
    large = min(LARGE_BYTES[device.type], max_bytes or LARGE_BYTES[device.type])
    inside = base.inside
    if len(ranks.local_ranks) > 1:
        is_single_node = len(ranks.local_ranks) == ranks.world_size
        group = (
            dist.group.WORLD
            if is_single_node
            else dist.new_group(list(ranks.local_ranks), use_local_synchronization=True)
        )
        small_time, large_time = _time_small_and_large(MeshAxis.from_group(group), device, large)
        inside = links["inside"] = fit_link(len(ranks.local_ranks), small_time, large_time)
    if len(ranks.local_ranks) < ranks.world_size:
        nodes = -(-ranks.world_size // len(ranks.local_ranks))
        small_time, large_time = _time_small_and_large(MeshAxis.from_group(dist.group.WORLD), device, large)
        local_seconds = (ranks.world_size - nodes) * inside.latency
        links["outside"] = fit_link(
            ranks.world_size, small_time, large_time, hops=nodes - 1, local_seconds=local_seconds
        )
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
    return Link(bandwidth=float(f"{sent_fraction / slope:.6g}"), latency=float(f"{latency:.6g}"))


def _time_small_and_large(
    axis: MeshAxis, device: torch.device, large: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (bytes, seconds) of a small and a large all-gather. Every rank runs the same number of repeats."""
    small = _time_all_gather(axis, device, SMALL_BYTES)
    return small, _time_all_gather(axis, device, max(large, 4 * SMALL_BYTES))


def _time_all_gather(axis: MeshAxis, device: torch.device, nbytes: int) -> tuple[float, float]:
    shard = torch.zeros(max(1, nbytes // axis.size), dtype=torch.uint8, device=device)
    full = torch.zeros(shard.numel() * axis.size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier(group=axis.group)
        begin = time.perf_counter()
        all_gather_sync(full, shard, axis)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return float(full.nbytes), statistics.median(times[1:])  # the first one sets up the connections
