"""Which tier each range of this rank's states is placed in. Pure arithmetic, from fractions and limits.

[Note: which units stay on the device]
Backward visits last the units that forward visits first. Their gradients are the last to be ready, and the next forward
needs them first, so it has to wait for any of their states that are offloaded. Therefore the offload tiers are filled
from the last unit to the first, the slowest tier first. Optimizer states are split anywhere (on vector boundaries), so
their fraction is met exactly. Gradients and parameters are offloaded by whole flats, so their fraction is met as
closely as the flats allow.

A limit counts everything that the library keeps in that tier, including buffers. States that do not fit under it stay
on the device.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroshard.config.offload import TIERS, Offload
from zeroshard.sharding.layout import ALIGN_ELEMENTS, Range, round_up

PAGE_BYTES = max(4096, mmap.PAGESIZE)  # alignment of direct I/O and mmap, in a file and in memory
MAX_TENSORS_PER_CHUNK = 4  # at most: the master and three states, as Adam with amsgrad has
STAGING_SLOTS = 3  # staging buffers for offloaded states: one is read, one is updated, one is written
PREFETCH_SHARDS = 2  # shards of parameters read from disk ahead of use; one more is in use
MAX_CHUNK_ELEMENTS = {"host": 2**26, "disk": 2**24}  # elements of a state chunk, at most: 20 ms of work


@dataclass(frozen=True)
class FlatSizes:
    """The sizes of one flat's states on this rank."""

    shard_ranges: tuple[Range, ...]  # each bucket's range in the shard; contiguous
    is_trained: bool  # whether an optimizer updates it
    param_bytes_per_element: int  # of compute-dtype parameters
    grad_bytes_per_element: int  # of reduced gradients
    state_bytes_per_element: int  # of optimizer states and the master

    @property
    def numel(self) -> int:
        return self.shard_ranges[-1].end if self.shard_ranges else 0


@dataclass
class TierPlacement:
    """The tiers of one flat's states."""

    parameters: str = "device"
    gradients: str = "device"
    optimizer: list[tuple[Range, str]] = field(default_factory=list)  # ranges of the shard, in order, with tiers

    @property
    def has_offloaded_optimizer(self) -> bool:
        return any(tier != "device" for _, tier in self.optimizer)

    @property
    def main_optimizer_tier(self) -> str:
        """The tier of most of the optimizer states, and of all states of whole parameters."""
        numels: Counter[str] = Counter()
        for span, tier in self.optimizer:
            numels[tier] += span.numel
        return max(numels, key=lambda tier: numels[tier], default="device")


TierBudget = dict[str, float]  # bytes left under each tier's limit; inf: no limit


def assign_tiers(
    flats: Sequence[FlatSizes], offload: Offload, partitioned_gradients: bool, buffers: int = 0
) -> tuple[list[TierPlacement], int | None]:
    """Return each flat's tier placement, and the bytes left under the host's limit (None: no limit).

    ``buffers`` are bytes of host memory that are used in any case.

    >>> sizes = FlatSizes((Range(0, 6400),), True, 2, 2, 12)
    >>> placements, _ = assign_tiers([sizes], Offload(optimizer=("host", 0.5)), partitioned_gradients=True)
    >>> placements[0].optimizer
    [(Range(start=0, end=3200), 'device'), (Range(start=3200, end=6400), 'host')]
    """
    tensor_count = sum(
        MAX_TENSORS_PER_CHUNK * len(split_chunks(Range(0, flat.numel), flat.shard_ranges, MAX_CHUNK_ELEMENTS["disk"]))
        + 2
        for flat in flats
    )
    limits = {tier: math.inf if (limit := offload.byte_limit(tier)) is None else limit for tier in TIERS}
    used_bytes = {"device": 0, "host": buffers, "disk": tensor_count * PAGE_BYTES}
    budget: TierBudget = {tier: max(0, limits[tier] - used_bytes[tier]) for tier in TIERS}
    placements = [TierPlacement() for _ in flats]
    # the disk is staged through the host buffers
    usable_tiers = [tier for tier in TIERS if tier != "disk" or buffers <= limits["host"]]
    _assign_optimizer_states(flats, placements, _select_tiers(usable_tiers, offload.optimizer), budget)
    if partitioned_gradients and offload.gradients is None:
        _offload_matching_grads(flats, placements, budget)
    grad_fractions = (offload.gradients or {}) if partitioned_gradients else {}
    flat_bytes = [flat.numel * flat.grad_bytes_per_element if flat.is_trained else 0 for flat in flats]
    for placement, tier in _assign_whole_flats(placements, flat_bytes, grad_fractions, budget):
        placement.gradients = tier
    flat_bytes = [flat.numel * flat.param_bytes_per_element for flat in flats]
    param_fractions = _select_tiers(usable_tiers, offload.parameters)
    for placement, tier in _assign_whole_flats(placements, flat_bytes, param_fractions, budget):
        placement.parameters = tier
    return placements, None if math.isinf(budget["host"]) else int(budget["host"])


def staging_bytes(offload: Offload, flats: Sequence[FlatSizes], on_gpu: bool) -> int:
    """Return the bytes of host memory that stage offloaded states to and from the device and the disk.

    They do not grow with the model.
    """
    max_numel, nbytes = max((flat.numel for flat in flats), default=0), 0
    if on_gpu:
        bytes_per_element = max(
            (flat.param_bytes_per_element + flat.grad_bytes_per_element for flat in flats), default=0
        )
        nbytes += STAGING_SLOTS * min(max_numel, MAX_CHUNK_ELEMENTS["host"]) * bytes_per_element
    if offload.needs_disk:
        bytes_per_element = max((flat.state_bytes_per_element for flat in flats), default=0)
        chunk_bytes = min(max_numel, MAX_CHUNK_ELEMENTS["disk"]) * bytes_per_element
        nbytes += STAGING_SLOTS * (chunk_bytes + MAX_TENSORS_PER_CHUNK * PAGE_BYTES)  # each tensor fills its last page
        if "disk" in offload.parameters:
            bytes_per_element = max(flat.param_bytes_per_element for flat in flats)
            nbytes += (PREFETCH_SHARDS + 1) * (max_numel * bytes_per_element + PAGE_BYTES)
    return nbytes


def _select_tiers(tiers: Sequence[str], fractions: Mapping[str, float]) -> dict[str, float]:
    return {tier: fraction for tier, fraction in fractions.items() if tier in tiers}


def _assign_optimizer_states(
    flats: Sequence[FlatSizes], placements: list[TierPlacement], fractions: Mapping[str, float], budget: TierBudget
) -> None:
    total = sum(flat.numel for flat in flats if flat.is_trained)
    quotas, is_everything = {}, sum(fractions.values()) > 1 - 1e-9
    left = total
    for position, (tier, fraction) in enumerate(fractions.items(), 1):
        is_remainder = is_everything and position == len(fractions)
        wanted = left if is_remainder else round(total * fraction / ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        quotas[tier] = min(wanted, left)
        left -= quotas[tier]
    for flat, placement in reversed(list(zip(flats, placements, strict=True))):
        end = flat.numel if flat.is_trained else 0
        ranges: list[tuple[Range, str]] = []
        for tier in quotas:
            numel = min(end, quotas[tier])
            if numel * flat.state_bytes_per_element > budget[tier]:
                numel = min(numel, int(budget[tier]) // flat.state_bytes_per_element // ALIGN_ELEMENTS * ALIGN_ELEMENTS)
            if numel:
                ranges.append((Range(end - numel, end), tier))
                quotas[tier] -= numel
                budget[tier] -= numel * flat.state_bytes_per_element
                end -= numel
        if end:
            ranges.append((Range(0, end), "device"))
        placement.optimizer = ranges[::-1]


def _offload_matching_grads(flats: Sequence[FlatSizes], placements: list[TierPlacement], budget: TierBudget) -> None:
    """Place gradients on the host if all optimizer states of their flat are offloaded: the update there needs them.

    If some of the states are on the device, the gradients stay there: the device would have to wait for their return.
    """
    for flat, placement in reversed(list(zip(flats, placements, strict=True))):
        nbytes = flat.numel * flat.grad_bytes_per_element
        is_offloaded = placement.has_offloaded_optimizer and all(tier != "device" for _, tier in placement.optimizer)
        if is_offloaded and 0 < nbytes <= budget["host"]:
            placement.gradients = "host"
            budget["host"] -= nbytes


def _assign_whole_flats(
    placements: list[TierPlacement], sizes: list[int], fractions: Mapping[str, float], budget: TierBudget
) -> list[tuple[TierPlacement, str]]:
    """Assign whole flats to tiers, so that each tier gets its fraction of the bytes as closely as possible."""
    quotas = {tier: fraction * sum(sizes) for tier, fraction in fractions.items()}
    placed = []
    for placement, nbytes in reversed(list(zip(placements, sizes, strict=True))):
        for tier in quotas if nbytes else ():
            if quotas[tier] >= nbytes / 2 and budget[tier] >= nbytes:
                quotas[tier] -= nbytes
                budget[tier] -= nbytes
                placed.append((placement, tier))
                break
    return placed


def split_chunks(span: Range, shard_ranges: Sequence[Range], max_numel: int) -> list[Range]:
    """Split a range of a shard at the ends of buckets, and into even chunks of at most ``max_numel`` elements.

    >>> split_chunks(Range(64, 448), [Range(0, 128), Range(128, 448)], max_numel=256)
    [Range(start=64, end=128), Range(start=128, end=320), Range(start=320, end=448)]
    """
    chunks = []
    for bucket_range in shard_ranges:
        common = bucket_range.intersect(span)
        if common is not None:
            count = -(-common.numel // (max(max_numel // ALIGN_ELEMENTS, 1) * ALIGN_ELEMENTS))
            step = round_up(-(-common.numel // count), ALIGN_ELEMENTS)
            chunks += [Range(start, min(start + step, common.end)) for start in range(common.start, common.end, step)]
    return chunks
