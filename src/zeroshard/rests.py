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

from zeroshard.layout import ALIGN, Range, round_up
from zeroshard.offload import TIERS, Offload

PAGE = max(4096, mmap.PAGESIZE)  # bytes: what direct I/O and maps have to be aligned to, in a file and in memory
TENSORS = 4  # of a granule at most: its master and three states, as Adam with amsgrad has
GRANULES = {"host": 2**26, "disk": 2**24}  # most elements that are updated, and moved, at once: 20 ms of work


@dataclass(frozen=True)
class Body:
    """One flat, as this rank holds it."""

    homes: tuple[Range, ...]  # each bucket's place in the shard; neighbours
    trained: bool  # whether an optimizer updates it
    parameter_bytes: int  # of an element, as parameter in computation
    gradient_bytes: int  # of an element, as reduced gradient
    state_bytes: int  # of an element, of optimizer states and their master copy

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return self.homes[-1].end if self.homes else 0


@dataclass
class Rest:
    """Where the states of one flat rest."""

    parameters: str = "device"
    gradients: str = "device"
    optimizer: list[tuple[Range, str]] = field(default_factory=list)  # stretches of the shard, in order, with tiers

    @property
    def far(self) -> bool:
        """Whether any optimizer states rest outside the device."""
        return any(tier != "device" for _, tier in self.optimizer)


class _Room:
    """What is left of each tier's limit, in bytes; None: no limit."""

    def __init__(self, offload: Offload, buffers: int, pages: int) -> None:
        self._left = {tier: offload.limit(tier) for tier in TIERS}
        for tier, taken in (("host", buffers), ("disk", pages)):
            limit = self._left[tier]
            self._left[tier] = None if limit is None else max(0, limit - taken)

    def most(self, tier: str, each: int) -> int | None:
        """How many things of ``each`` bytes still fit."""
        left = self._left[tier]
        return None if left is None else left // each

    def left(self, tier: str) -> int | None:
        """Bytes."""
        return self._left[tier]

    def take(self, tier: str, nbytes: int) -> None:
        left = self._left[tier]
        if left is not None:
            self._left[tier] = left - nbytes


def place(
    bodies: Sequence[Body], offload: Offload, partitioned_gradients: bool, buffers: int = 0
) -> tuple[list[Rest], int | None]:
    """Say where each flat's states rest, and how many bytes are left under the host's limit (None: it has none).

    ``buffers`` are bytes of host memory that are taken in any case.

    >>> body = Body((Range(0, 6400),), True, 2, 2, 12)
    >>> rests, _ = place([body], Offload(optimizer=("host", 0.5)), partitioned_gradients=True)
    >>> rests[0].optimizer
    [(Range(start=0, end=3200), 'device'), (Range(start=3200, end=6400), 'host')]
    """
    tensors = sum(TENSORS * len(granules(Range(0, body.numel), body.homes, GRANULES["disk"])) + 2 for body in bodies)
    room = _Room(offload, buffers, tensors * PAGE)
    rests = [Rest() for _ in bodies]
    limit = offload.limit("host")
    reached = [tier for tier in TIERS if tier != "disk" or limit is None or buffers <= limit]  # by way of the buffers
    _place_optimizer(bodies, rests, _among(reached, offload.optimizer), room)
    if not partitioned_gradients:
        wanted: Mapping[str, float] = {}
    elif offload.gradients is None:
        _follow(bodies, rests, room)
        wanted = {}
    else:
        wanted = offload.gradients
    sizes = [body.numel * body.gradient_bytes if body.trained else 0 for body in bodies]
    for rest, tier in _whole(rests, sizes, wanted, room):
        rest.gradients = tier
    sizes = [body.numel * body.parameter_bytes for body in bodies]
    for rest, tier in _whole(rests, sizes, _among(reached, offload.parameters), room):
        rest.parameters = tier
    return rests, room.left("host")


def _among(tiers: Sequence[str], fractions: Mapping[str, float]) -> dict[str, float]:
    return {tier: fraction for tier, fraction in fractions.items() if tier in tiers}


def _place_optimizer(bodies: Sequence[Body], rests: list[Rest], fractions: Mapping[str, float], room: _Room) -> None:
    total = sum(body.numel for body in bodies if body.trained)
    quotas, whole = {}, sum(fractions.values()) > 1 - 1e-9
    left = total
    for number, (tier, fraction) in enumerate(fractions.items(), 1):
        wanted = left if whole and number == len(fractions) else round(total * fraction / ALIGN) * ALIGN
        quotas[tier] = min(wanted, left)
        left -= quotas[tier]
    for body, rest in reversed(list(zip(bodies, rests, strict=True))):
        end = body.numel if body.trained else 0
        found: list[tuple[Range, str]] = []
        for tier in quotas:
            most = room.most(tier, body.state_bytes)
            numel = min(end, quotas[tier])
            numel = numel if most is None else min(numel, most // ALIGN * ALIGN)
            if numel:
                found.append((Range(end - numel, end), tier))
                quotas[tier] -= numel
                room.take(tier, numel * body.state_bytes)
                end -= numel
        if end:
            found.append((Range(0, end), "device"))
        rest.optimizer = found[::-1]


def _follow(bodies: Sequence[Body], rests: list[Rest], room: _Room) -> None:
    """Let gradients rest on the host where optimizer states are away: they are needed there.

    Those of a flat whose states are partly near stay near: the device would have to wait for them to come back.
    """
    for body, rest in reversed(list(zip(bodies, rests, strict=True))):
        nbytes = body.numel * body.gradient_bytes
        away = rest.far and all(tier != "device" for _, tier in rest.optimizer)
        if away and nbytes and room.most("host", nbytes) != 0:
            rest.gradients = "host"
            room.take("host", nbytes)


def _whole(rests: list[Rest], sizes: list[int], fractions: Mapping[str, float], room: _Room) -> list[tuple[Rest, str]]:
    """Give whole flats to tiers, so that each tier has as nearly its fraction of the bytes as they allow."""
    quotas = {tier: fraction * sum(sizes) for tier, fraction in fractions.items()}
    placed = []
    for rest, nbytes in reversed(list(zip(rests, sizes, strict=True))):
        for tier in quotas if nbytes else ():
            if quotas[tier] >= nbytes / 2 and room.most(tier, nbytes) != 0:
                quotas[tier] -= nbytes
                room.take(tier, nbytes)
                placed.append((rest, tier))
                break
    return placed


def granules(span: Range, homes: Sequence[Range], most: int) -> list[Range]:
    """Cut a stretch of a shard where buckets end, and into even parts of at most ``most`` elements.

    >>> granules(Range(64, 448), [Range(0, 128), Range(128, 448)], most=256)
    [Range(start=64, end=128), Range(start=128, end=320), Range(start=320, end=448)]
    """
    found = []
    for home in homes:
        common = home.meet(span)
        if common is not None:
            parts = -(-common.numel // (max(most // ALIGN, 1) * ALIGN))
            step = round_up(-(-common.numel // parts), ALIGN)
            found += [Range(at, min(at + step, common.end)) for at in range(common.start, common.end, step)]
    return found
