"""Rests: in which tier each stretch of this rank's states rests. Pure arithmetic, from fractions and limits.

[Note: what stays near]
Backward comes last to the units that forward begins with. Their gradients are the last to arrive, and the next forward
wants them first, so whatever of them rests far away is waited for. The far tiers are therefore filled from the last
unit to the first, the farthest tier first. Optimizer states are cut anywhere (on vector boundaries), so a fraction is
met exactly; gradients and parameters go by whole flats, so it is met as nearly as they allow.

A limit counts everything the library keeps in that tier, buffers included. What does not fit under it stays on the
device.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroshard.config.offload import TIERS, Offload
from zeroshard.sharding.layout import ALIGN_ELEMENTS, Range, round_up

PAGE_BYTES = max(4096, mmap.PAGESIZE)  # bytes: what direct I/O and maps have to be aligned to, in a file and in memory
MAX_TENSORS_PER_CHUNK = 4  # of a granule at most: its master and three states, as Adam with amsgrad has
MAX_CHUNK_ELEMENTS = {"host": 2**26, "disk": 2**24}  # most elements that are updated, and moved, at once: 20 ms of work


@dataclass(frozen=True)
class FlatSizes:
    """One flat, as this rank holds it."""

    shard_ranges: tuple[Range, ...]  # each bucket's place in the shard; neighbours
    is_trained: bool  # whether an optimizer updates it
    param_bytes_per_element: int  # of an element, as parameter in computation
    grad_bytes_per_element: int  # of an element, as reduced gradient
    state_bytes_per_element: int  # of an element, of optimizer states and their master copy

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return self.shard_ranges[-1].end if self.shard_ranges else 0


@dataclass
class TierPlacement:
    """Where the states of one flat rest."""

    parameters: str = "device"
    gradients: str = "device"
    optimizer: list[tuple[Range, str]] = field(default_factory=list)  # stretches of the shard, in order, with tiers

    @property
    def has_offloaded_optimizer(self) -> bool:
        """Whether any optimizer states rest outside the device."""
        return any(tier != "device" for _, tier in self.optimizer)


class _TierBudget:
    """What is left of each tier's limit, in bytes; None: no limit."""

    def __init__(self, offload: Offload, buffers: int, pages: int) -> None:
        self._bytes_left = {tier: offload.byte_limit(tier) for tier in TIERS}
        for tier, taken in (("host", buffers), ("disk", pages)):
            limit = self._bytes_left[tier]
            self._bytes_left[tier] = None if limit is None else max(0, limit - taken)

    def max_count(self, tier: str, nbytes: int) -> int | None:
        """How many things of ``each`` bytes still fit."""
        left = self._bytes_left[tier]
        return None if left is None else left // nbytes

    def bytes_left(self, tier: str) -> int | None:
        """Bytes."""
        return self._bytes_left[tier]

    def reserve(self, tier: str, nbytes: int) -> None:
        left = self._bytes_left[tier]
        if left is not None:
            self._bytes_left[tier] = left - nbytes


def assign_tiers(
    flats: Sequence[FlatSizes], offload: Offload, partitioned_gradients: bool, buffers: int = 0
) -> tuple[list[TierPlacement], int | None]:
    """Say where each flat's states rest, and how many bytes are left under the host's limit (None: it has none).

    ``buffers`` are bytes of host memory that are taken in any case.

    >>> body = FlatSizes((Range(0, 6400),), True, 2, 2, 12)
    >>> rests, _ = assign_tiers([body], Offload(optimizer=("host", 0.5)), partitioned_gradients=True)
    >>> rests[0].optimizer
    [(Range(start=0, end=3200), 'device'), (Range(start=3200, end=6400), 'host')]
    """
    tensors = sum(
        MAX_TENSORS_PER_CHUNK * len(split_chunks(Range(0, body.numel), body.shard_ranges, MAX_CHUNK_ELEMENTS["disk"]))
        + 2
        for body in flats
    )
    room = _TierBudget(offload, buffers, tensors * PAGE_BYTES)
    rests = [TierPlacement() for _ in flats]
    limit = offload.byte_limit("host")
    reached = [tier for tier in TIERS if tier != "disk" or limit is None or buffers <= limit]  # by way of the buffers
    _assign_optimizer_states(flats, rests, _select_tiers(reached, offload.optimizer), room)
    if not partitioned_gradients:
        wanted: Mapping[str, float] = {}
    elif offload.gradients is None:
        _offload_matching_grads(flats, rests, room)
        wanted = {}
    else:
        wanted = offload.gradients
    sizes = [body.numel * body.grad_bytes_per_element if body.is_trained else 0 for body in flats]
    for rest, tier in _assign_whole_flats(rests, sizes, wanted, room):
        rest.gradients = tier
    sizes = [body.numel * body.param_bytes_per_element for body in flats]
    for rest, tier in _assign_whole_flats(rests, sizes, _select_tiers(reached, offload.parameters), room):
        rest.parameters = tier
    return rests, room.bytes_left("host")


def _select_tiers(tiers: Sequence[str], fractions: Mapping[str, float]) -> dict[str, float]:
    return {tier: fraction for tier, fraction in fractions.items() if tier in tiers}


def _assign_optimizer_states(
    flats: Sequence[FlatSizes], placements: list[TierPlacement], fractions: Mapping[str, float], budget: _TierBudget
) -> None:
    total = sum(body.numel for body in flats if body.is_trained)
    quotas, whole = {}, sum(fractions.values()) > 1 - 1e-9
    left = total
    for number, (tier, fraction) in enumerate(fractions.items(), 1):
        wanted = (
            left if whole and number == len(fractions) else round(total * fraction / ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        )
        quotas[tier] = min(wanted, left)
        left -= quotas[tier]
    for body, rest in reversed(list(zip(flats, placements, strict=True))):
        end = body.numel if body.is_trained else 0
        found: list[tuple[Range, str]] = []
        for tier in quotas:
            most = budget.max_count(tier, body.state_bytes_per_element)
            numel = min(end, quotas[tier])
            numel = numel if most is None else min(numel, most // ALIGN_ELEMENTS * ALIGN_ELEMENTS)
            if numel:
                found.append((Range(end - numel, end), tier))
                quotas[tier] -= numel
                budget.reserve(tier, numel * body.state_bytes_per_element)
                end -= numel
        if end:
            found.append((Range(0, end), "device"))
        rest.optimizer = found[::-1]


def _offload_matching_grads(flats: Sequence[FlatSizes], placements: list[TierPlacement], budget: _TierBudget) -> None:
    """Let gradients rest on the host where optimizer states are away: they are needed there.

    Those of a flat whose states are partly near stay near: the device would have to wait for them to come back.
    """
    for body, rest in reversed(list(zip(flats, placements, strict=True))):
        nbytes = body.numel * body.grad_bytes_per_element
        away = rest.has_offloaded_optimizer and all(tier != "device" for _, tier in rest.optimizer)
        if away and nbytes and budget.max_count("host", nbytes) != 0:
            rest.gradients = "host"
            budget.reserve("host", nbytes)


def _assign_whole_flats(
    placements: list[TierPlacement], sizes: list[int], fractions: Mapping[str, float], budget: _TierBudget
) -> list[tuple[TierPlacement, str]]:
    """Give whole flats to tiers, so that each tier has as nearly its fraction of the bytes as they allow."""
    quotas = {tier: fraction * sum(sizes) for tier, fraction in fractions.items()}
    placed = []
    for rest, nbytes in reversed(list(zip(placements, sizes, strict=True))):
        for tier in quotas if nbytes else ():
            if quotas[tier] >= nbytes / 2 and budget.max_count(tier, nbytes) != 0:
                quotas[tier] -= nbytes
                budget.reserve(tier, nbytes)
                placed.append((rest, tier))
                break
    return placed


def split_chunks(span: Range, shard_ranges: Sequence[Range], max_numel: int) -> list[Range]:
    """Cut a stretch of a shard where buckets end, and into even parts of at most ``most`` elements.

    >>> split_chunks(Range(64, 448), [Range(0, 128), Range(128, 448)], max_numel=256)
    [Range(start=64, end=128), Range(start=128, end=320), Range(start=320, end=448)]
    """
    found = []
    for home in shard_ranges:
        common = home.intersect(span)
        if common is not None:
            parts = -(-common.numel // (max(max_numel // ALIGN_ELEMENTS, 1) * ALIGN_ELEMENTS))
            step = round_up(-(-common.numel // parts), ALIGN_ELEMENTS)
            found += [Range(at, min(at + step, common.end)) for at in range(common.start, common.end, step)]
    return found
