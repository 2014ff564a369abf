"""Arrangement: the sizes of segments to make beforehand, with which a step's requests take least memory.

[Note: how sizes are looked for]
Every guess is rehearsed. First come one or two segments of a few multiples of the largest request, which is the loss's
as a rule. Then one that has room for nearly all, and some that are alike and a little smaller than some large request:
what is small and stays, a block's checkpoint, is carved from these, and no gathered unit, which comes and goes, leaves
a hole between two of them. Then the best so far, and in turn with them some that are drawn at random, are changed a
little at a time: a segment more or less, two made one, one larger or smaller by the size of some request. A change that
does not make it worse is kept. It ends when almost nothing is left to be gained, when it comes to nothing new, or after
a time.

Where all fits to the byte, a request that is a little larger than it was takes a segment of its own, perhaps the
largest. So a guess is rehearsed with requests that are a little larger too, and the worse of the two counts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from zeroshard.memory.allocator.simulator import ROUND_LARGE_BYTES, AllocatorSimulator, AllocRequest

FIRST_SEGMENT_RATIOS = (1.0, 1.125, 1.25, 2.0, 2.125, 2.25, 2.375, 3.0, 3.125, 3.25, 3.375)  # times the largest request
SECOND_SEGMENT_RATIOS = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.5625, 0.625, 1.0, 1.125, 1.25, 2.0)
LARGE_SEGMENT_RATIOS = (1.0, 0.9375, 0.875)  # times the bytes that are in use at once
SMALL_SEGMENT_RATIOS = (1.0, 0.85, 0.7, 0.55)  # times a request
TARGET_RATIO = 1.01  # times the bytes that are in use at once, or …
TARGET_SLACK_BYTES = 4 * ROUND_LARGE_BYTES  # … so many bytes more than these
MAX_CANDIDATES = 3  # of the guesses so far, the best
CHANGES_PER_ROUND = 40  # changes that are tried before another has its turn
MAX_IDLE_ROUNDS = 5  # turns without a new guess, after which it ends
MAX_SEGMENTS = 6  # segments
LARGEST_SIZES_COUNT = 6  # sizes, the largest
PRUNE_RATIO = 1.1  # times the least, from which on a guess is out of the running
REQUEST_GROWTH_DIVISOR = 512  # a request is larger by this part of it, the second time
MIN_DIFFERENCE_RATIO = 0.05  # of its bytes: by so much another guess differs, or by its number of segments

SegmentSizes = tuple[int, ...]  # bytes, the largest first


@dataclass(frozen=True)
class SegmentCandidate:
    """Sizes of segments, and the bytes that are reserved in the end where these are made first."""

    sizes: SegmentSizes
    reserved_bytes: int


class SegmentSearch:
    """The sizes that were found so far for a list of requests.

    >>> steps = [(1, 60 << 20), (2, 60 << 20), (1, 0), (2, 0), (3, 120 << 20), (3, 0)]
    >>> [size >> 20 for size in SegmentSearch(steps).search(seconds=1)[0].sizes]
    [122]
    """

    def __init__(self, requests: Sequence[AllocRequest]) -> None:
        self._requests = requests
        self._grown_requests = [(tensor, nbytes + nbytes // REQUEST_GROWTH_DIVISOR) for tensor, nbytes in requests]
        self._peak_bytes = _peak_bytes_in_use(self._grown_requests)
        self._target_bytes = max(TARGET_RATIO * self._peak_bytes, self._peak_bytes + TARGET_SLACK_BYTES)
        rounded = {_round_up_to_segment(nbytes) for _, nbytes in self._grown_requests}
        self._request_sizes = sorted(size for size in rounded if size)
        self._reserved_bytes: dict[SegmentSizes, int] = {}
        self._least_reserved_bytes: float = math.inf  # of what was needed so far

    def search(self, seconds: float) -> list[SegmentCandidate]:
        """The guesses with which least is reserved from the second pass on, the best first; the last makes none.

        They differ plainly from each other.
        """
        end = time.perf_counter() + seconds
        without = self._evaluate(())
        for sizes in self._initial_sizes():
            if self._is_finished(end):
                break
            if sum(sizes) < without:
                self._evaluate(sizes)
        draw = random.Random(0)
        leading = sorted(self._reserved_bytes, key=self._sort_key)[:MAX_CANDIDATES]
        idle = 0  # turns that came to nothing new
        while self._request_sizes and idle < MAX_IDLE_ROUNDS and not self._is_finished(end):
            known = len(self._reserved_bytes)
            begin = draw.choice(leading) if draw.random() < 0.5 else self._random_sizes(draw)
            leading.append(self._hill_climb(begin, draw, end))
            leading = sorted(set(leading), key=self._sort_key)[:MAX_CANDIDATES]
            idle = idle + 1 if len(self._reserved_bytes) == known else 0
        return self._distinct_candidates()

    def _hill_climb(self, sizes: SegmentSizes, rng: random.Random, deadline: float) -> SegmentSizes:
        """The same after a few changes, those of them that did not make it worse."""
        for _ in range(CHANGES_PER_ROUND):
            changed = self._mutate(sizes, rng)
            if changed not in self._reserved_bytes and sum(changed) < self._reserved_bytes[sizes]:
                if self._evaluate(changed) <= self._reserved_bytes[sizes]:
                    sizes = changed
                if self._is_finished(deadline):
                    break
        return sizes

    def _distinct_candidates(self) -> list[SegmentCandidate]:
        found: list[SegmentSizes] = []
        for sizes in sorted(self._reserved_bytes, key=self._sort_key):
            if (
                self._reserved_bytes[sizes] > PRUNE_RATIO * self._least_reserved_bytes
            ):  # it may need more: it was not rehearsed to its end
                break
            near = (
                len(sizes) == len(other) and abs(sum(sizes) - sum(other)) <= MIN_DIFFERENCE_RATIO * sum(sizes)
                for other in found
            )
            if not any(near):
                found.append(sizes)
            if len(found) == MAX_CANDIDATES or sizes == ():
                break
        if found[-1] != ():
            found.append(())
        return [SegmentCandidate(sizes, self._reserved_bytes[sizes]) for sizes in found]

    def _is_finished(self, deadline: float) -> bool:
        return self._least_reserved_bytes <= self._target_bytes or time.perf_counter() > deadline

    def _sort_key(self, sizes: SegmentSizes) -> tuple[int, int]:
        return self._reserved_bytes[sizes], len(sizes)

    def _initial_sizes(self) -> list[SegmentSizes]:
        """One or two segments, in multiples of the largest request; then one and some smaller ones that are alike."""
        largest = self._request_sizes[-1] if self._request_sizes else 0
        parts = (
            [_round_up_to_segment(largest * part) for part in pair]
            for pair in product(FIRST_SEGMENT_RATIOS, SECOND_SEGMENT_RATIOS)
        )
        found = [tuple(sorted(filter(None, pair), reverse=True)) for pair in parts if largest]
        for part, size, below, count in product(
            LARGE_SEGMENT_RATIOS,
            self._request_sizes[-LARGEST_SIZES_COUNT:],
            SMALL_SEGMENT_RATIOS,
            range(2, MAX_SEGMENTS),
        ):
            alike = max(ROUND_LARGE_BYTES, _round_up_to_segment(below * size) - ROUND_LARGE_BYTES)
            found.append((_round_up_to_segment(part * self._peak_bytes), *[alike] * count))
        simplest, others = found[:1], found[1:]
        random.Random(0).shuffle(others)  # time may be short for all, where a step makes many requests
        return simplest + others

    def _random_sizes(self, rng: random.Random) -> SegmentSizes:
        """A few segments at random, smaller together than all that are needed without any."""
        sizes = [
            rng.choice(self._request_sizes[-LARGEST_SIZES_COUNT:]) * rng.choice((1, 2))
            for _ in range(rng.randint(2, MAX_SEGMENTS))
        ]
        while sum(sizes) >= self._reserved_bytes[()]:
            sizes.pop()
        drawn = tuple(sorted(sizes, reverse=True))
        self._evaluate(drawn)
        return drawn

    def _mutate(self, sizes: SegmentSizes, rng: random.Random) -> SegmentSizes:
        """Sizes with one thing changed, or two."""
        changed = list(sizes)
        for _ in range(rng.choice((1, 1, 2))):
            kind, at = rng.random(), rng.randrange(len(changed)) if changed else 0
            if not changed or (kind < 0.25 and len(changed) < MAX_SEGMENTS):
                changed.append(rng.choice(self._request_sizes))
            elif kind < 0.4 and len(changed) > 1:
                del changed[at]
            elif kind < 0.55 and len(changed) > 1:
                size = changed.pop(at)
                changed[rng.randrange(len(changed))] += size
            else:
                changed[at] = max(
                    ROUND_LARGE_BYTES, changed[at] + rng.choice((-1, 1)) * rng.choice(self._request_sizes)
                )
        return tuple(sorted(changed, reverse=True))

    def _evaluate(self, sizes: SegmentSizes) -> int:
        """Bytes that are reserved in the end, with segments of these sizes made first.

        Where they are a tenth more than with the best so far, it is out of the running, and not rehearsed to its end.
        """
        if sizes not in self._reserved_bytes:
            most = PRUNE_RATIO * self._least_reserved_bytes
            needed = _replayed_reserved_bytes(sizes, self._grown_requests, most)
            self._reserved_bytes[sizes] = (
                needed if needed > most else max(needed, _replayed_reserved_bytes(sizes, self._requests, most))
            )
            self._least_reserved_bytes = min(self._least_reserved_bytes, self._reserved_bytes[sizes])
        return self._reserved_bytes[sizes]


def _replayed_reserved_bytes(sizes: SegmentSizes, requests: Sequence[AllocRequest], max_reserved_bytes: float) -> int:
    rehearsal = AllocatorSimulator(sizes)
    for _ in range(2):
        rehearsal.replay(requests, max_reserved_bytes)
    return rehearsal.reserved_bytes


def _round_up_to_segment(nbytes: float) -> int:
    """As a segment would have them."""
    return -(-int(nbytes) // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _peak_bytes_in_use(requests: Sequence[AllocRequest]) -> int:
    """The most bytes that are in use at a time."""
    held: dict[int, int] = {}
    now = most = 0
    for tensor, nbytes in requests:
        now += nbytes - held.pop(tensor, 0)
        if nbytes:
            held[tensor] = nbytes
            most = max(most, now)
    return most
