"""What collectives reach between the ranks of a job, measured."""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import MeshAxis, all_gather_sync
from zeroshard.planner.machines.machine import Link, Machine

REPEATS = 5
SMALL_BYTES = 2**12  # bytes of the result on each rank: all latency
LARGE_BYTES = {"cuda": 2**28, "cpu": 2**22}  # nearly all bandwidth


@dataclass(frozen=True)
class CalibrationRanks:
    """The ranks that measure together, and which of them share this rank's node."""

    world_size: int = 1
    rank: int = 0
    local_ranks: tuple[int, ...] = (0,)

    @classmethod
    def current(cls) -> CalibrationRanks:
        """As the job has them; nodes are told apart by their names. Of one rank, where there is no job."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return cls()
        rank, names = dist.get_rank(), cls(dist.get_world_size()).gather_text(platform.node())
        return cls(len(names), rank, tuple(other for other, name in enumerate(names) if name == names[rank]))

    @property
    def is_first_local(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.rank == self.local_ranks[0]

    def barrier(self) -> None:
        """Begin together: what ranks of a node share is measured with all of them at it."""
        if self.world_size > 1:
            dist.barrier()

    def gather_text(self, text: str) -> list[str]:
        """What each rank has."""
        found = [text] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, text)
        return found

    def broadcast_text(self, text: str) -> str:
        """What the first rank has: plans made of it are the same on all."""
        if self.world_size == 1:
            return text
        told = [text]
        dist.broadcast_object_list(told, src=0)
        return told[0]


def measure_links(
    ranks: CalibrationRanks, device: torch.device, base: Machine, max_bytes: int | None = None
) -> dict[str, Link]:
    """The links that this job shows, as a machine's ``inside`` and ``outside``; others stay as they are."""
    links: dict[str, Link] = {}
    if ranks.world_size == 1:
        return links
    large = min(LARGE_BYTES[device.type], max_bytes or LARGE_BYTES[device.type])
    inside = base.inside
    if len(ranks.local_ranks) > 1:
        alone = len(ranks.local_ranks) == ranks.world_size
        group = dist.group.WORLD if alone else dist.new_group(list(ranks.local_ranks), use_local_synchronization=True)
        small, whole = _time_small_and_large(MeshAxis.from_group(group), device, large)
        inside = links["inside"] = fit_link(len(ranks.local_ranks), small, whole)
    if len(ranks.local_ranks) < ranks.world_size:
        nodes = -(-ranks.world_size // len(ranks.local_ranks))
        small, whole = _time_small_and_large(MeshAxis.from_group(dist.group.WORLD), device, large)
        near = (ranks.world_size - nodes) * inside.latency
        links["outside"] = fit_link(ranks.world_size, small, whole, hops=nodes - 1, local_seconds=near)
    return links


def fit_link(
    ranks: int,
    small: tuple[float, float],
    large: tuple[float, float],
    hops: int | None = None,
    local_seconds: float = 0.0,
) -> Link:
    """The link whose ring of ``ranks`` gathers two results, of (bytes, seconds) each, in these times.

    ``hops``: those that the latency is spread over, without those that take ``near`` seconds in all.

    >>> fit_link(5, small=(0, 4e-5), large=(1e9, 8e-3 + 4e-5))
    Link(bandwidth=100000000000.0, latency=1e-05)
    """
    share = (ranks - 1) / ranks
    slope = (large[1] - small[1]) / (large[0] - small[0])
    if slope <= 0:  # too noisy to tell the two apart
        slope = large[1] / large[0]
    latency = max(0.0, small[1] - small[0] * slope - local_seconds) / (hops or ranks - 1)
    return Link(bandwidth=float(f"{share / slope:.6g}"), latency=float(f"{latency:.6g}"))


def _time_small_and_large(
    axis: MeshAxis, device: torch.device, large: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(bytes, seconds) of a small and of a large all-gather. Every rank repeats as often."""
    small = _time_all_gather(axis, device, SMALL_BYTES)
    return small, _time_all_gather(axis, device, max(large, 4 * SMALL_BYTES))


def _time_all_gather(axis: MeshAxis, device: torch.device, nbytes: int) -> tuple[float, float]:
    part = torch.zeros(max(1, nbytes // axis.size), dtype=torch.uint8, device=device)
    whole = torch.zeros(part.numel() * axis.size, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier(group=axis.group)
        begin = time.perf_counter()
        all_gather_sync(whole, part, axis)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return float(whole.nbytes), statistics.median(taken[1:])  # the first connects the ranks
