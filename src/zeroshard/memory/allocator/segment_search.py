"""SegmentSearch: finds sizes of preallocated segments with which a step reserves the least memory.

[Note: searching segment sizes]
Every candidate is simulated. The search first tries one or two segments, in multiples of the largest request, which is
usually the loss's. Then it tries one segment for nearly everything, plus several equal ones a little smaller than some
large request: small tensors that stay, such as a block's activation checkpoint, are carved from these, and unsharded
units, which are allocated and freed, leave no holes between them. Then it mutates the best candidates so far,
alternating with random ones, in small steps: add or remove a segment, merge two, or grow or shrink one by the size of a
request. A change that is not worse is kept. The search ends when almost nothing can be gained, when it finds no new
candidates, or at the time limit.

With an exact fit, a request that is slightly larger than recorded needs a new segment, perhaps the largest one. So each
candidate is also simulated with slightly larger requests, and the worse result counts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from zeroshard.memory.allocator.simulator import ROUND_LARGE_BYTES, AllocatorSimulator, AllocRequest
from zeroshard.sharding import round_up

FIRST_SEGMENT_RATIOS = (1.0, 1.125, 1.25, 2.0, 2.125, 2.25, 2.375, 3.0, 3.125, 3.25, 3.375)  # times the largest request
SECOND_SEGMENT_RATIOS = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.5625, 0.625, 1.0, 1.125, 1.25, 2.0)
LARGE_SEGMENT_RATIOS = (1.0, 0.9375, 0.875)  # times the peak bytes in use
SMALL_SEGMENT_RATIOS = (1.0, 0.85, 0.7, 0.55)  # times a request
TARGET_RATIO = 1.01  # the search ends at this multiple of the peak bytes in use, or …
TARGET_SLACK_BYTES = 4 * ROUND_LARGE_BYTES  # … at this many bytes above them
MAX_CANDIDATES = 3  # best candidates that are kept
CHANGES_PER_ROUND = 40  # mutations of one candidate before the next
MAX_IDLE_ROUNDS = 5  # rounds without a new candidate after which the search ends
MAX_SEGMENTS = 6
LARGEST_SIZES_COUNT = 6  # largest request sizes that are used
PRUNE_RATIO = 1.1  # candidates above this multiple of the best are dropped
REQUEST_GROWTH_DIVISOR = 512  # the second simulation grows each request by this fraction of it
MIN_DIFFERENCE_RATIO = 0.05  # candidates differ by this fraction of their bytes, or in their number of segments

SegmentSizes = tuple[int, ...]  # bytes, the largest first


@dataclass(frozen=True)
class SegmentCandidate:
    """Sizes of preallocated segments, and the bytes finally reserved with them."""

    sizes: SegmentSizes
    reserved_bytes: int


class SegmentSearch:
    """The sizes evaluated so far for a list of requests.

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
        self._least_reserved_bytes: float = math.inf  # of all evaluated sizes

    def search(self, seconds: float) -> list[SegmentCandidate]:
        """Return the candidates that reserve least from the second pass on, the best first; the last has no segments.

        They differ clearly from each other.
        """
        deadline = time.perf_counter() + seconds
        baseline = self._evaluate(())
        for sizes in self._initial_sizes():
            if self._is_finished(deadline):
                break
            if sum(sizes) < baseline:
                self._evaluate(sizes)
        rng = random.Random(0)
        best = sorted(self._reserved_bytes, key=self._sort_key)[:MAX_CANDIDATES]
        idle_rounds = 0  # rounds without a new candidate
        while self._request_sizes and idle_rounds < MAX_IDLE_ROUNDS and not self._is_finished(deadline):
            evaluated_before = len(self._reserved_bytes)
            start_sizes = rng.choice(best) if rng.random() < 0.5 else self._random_sizes(rng)
            best.append(self._hill_climb(start_sizes, rng, deadline))
            best = sorted(set(best), key=self._sort_key)[:MAX_CANDIDATES]
            idle_rounds = idle_rounds + 1 if len(self._reserved_bytes) == evaluated_before else 0
        return self._distinct_candidates()

    def _hill_climb(self, sizes: SegmentSizes, rng: random.Random, deadline: float) -> SegmentSizes:
        """Mutate the sizes a few times, keep the changes that are not worse, and return the result."""
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
            if self._reserved_bytes[sizes] > PRUNE_RATIO * self._least_reserved_bytes:
                break  # a lower bound only: its simulation was stopped early
            is_close = (
                len(sizes) == len(other) and abs(sum(sizes) - sum(other)) <= MIN_DIFFERENCE_RATIO * sum(sizes)
                for other in found
            )
            if not any(is_close):
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
        """Return one or two segments in multiples of the largest request; then one large and several equal small."""
        largest = self._request_sizes[-1] if self._request_sizes else 0
        parts = (
            [_round_up_to_segment(largest * part) for part in pair]
            for pair in product(FIRST_SEGMENT_RATIOS, SECOND_SEGMENT_RATIOS)
        )
        candidates = [tuple(sorted(filter(None, pair), reverse=True)) for pair in parts if largest]
        for part, size, small_ratio, count in product(
            LARGE_SEGMENT_RATIOS,
            self._request_sizes[-LARGEST_SIZES_COUNT:],
            SMALL_SEGMENT_RATIOS,
            range(2, MAX_SEGMENTS),
        ):
            small = max(ROUND_LARGE_BYTES, _round_up_to_segment(small_ratio * size) - ROUND_LARGE_BYTES)
            candidates.append((_round_up_to_segment(part * self._peak_bytes), *[small] * count))
        simplest, others = candidates[:1], candidates[1:]
        random.Random(0).shuffle(others)  # there may not be time for all, if a step makes many requests
        return simplest + others

    def _random_sizes(self, rng: random.Random) -> SegmentSizes:
        """Return a few random segments, smaller in total than the bytes reserved without any."""
        sizes = [
            rng.choice(self._request_sizes[-LARGEST_SIZES_COUNT:]) * rng.choice((1, 2))
            for _ in range(rng.randint(2, MAX_SEGMENTS))
        ]
        while sum(sizes) >= self._reserved_bytes[()]:
            sizes.pop()
        result = tuple(sorted(sizes, reverse=True))
        self._evaluate(result)
        return result

    def _mutate(self, sizes: SegmentSizes, rng: random.Random) -> SegmentSizes:
        """Return the sizes with one or two changes."""
        changed = list(sizes)
        for _ in range(rng.choice((1, 1, 2))):
            kind, index = rng.random(), rng.randrange(len(changed)) if changed else 0
            if not changed or (kind < 0.25 and len(changed) < MAX_SEGMENTS):
                changed.append(rng.choice(self._request_sizes))
            elif kind < 0.4 and len(changed) > 1:
                del changed[index]
            elif kind < 0.55 and len(changed) > 1:
                size = changed.pop(index)
                changed[rng.randrange(len(changed))] += size
            else:
                changed[index] = max(
                    ROUND_LARGE_BYTES, changed[index] + rng.choice((-1, 1)) * rng.choice(self._request_sizes)
                )
        return tuple(sorted(changed, reverse=True))

    def _evaluate(self, sizes: SegmentSizes) -> int:
        """Return the bytes finally reserved with preallocated segments of these sizes.

        If they exceed the best so far by a tenth, the candidate is dropped and its simulation stops early.
        """
        if sizes not in self._reserved_bytes:
            limit = PRUNE_RATIO * self._least_reserved_bytes
            reserved = _replayed_reserved_bytes(sizes, self._grown_requests, limit)
            self._reserved_bytes[sizes] = (
                reserved if reserved > limit else max(reserved, _replayed_reserved_bytes(sizes, self._requests, limit))
            )
            self._least_reserved_bytes = min(self._least_reserved_bytes, self._reserved_bytes[sizes])
        return self._reserved_bytes[sizes]


def _replayed_reserved_bytes(sizes: SegmentSizes, requests: Sequence[AllocRequest], max_reserved_bytes: float) -> int:
    simulator = AllocatorSimulator(sizes)
    for _ in range(2):
        simulator.replay(requests, max_reserved_bytes)
    return simulator.reserved_bytes


def _round_up_to_segment(nbytes: float) -> int:
    """Round up to the size of a segment."""
    return round_up(int(nbytes), ROUND_LARGE_BYTES)


def _peak_bytes_in_use(requests: Sequence[AllocRequest]) -> int:
    held: dict[int, int] = {}
    now = peak = 0
    for tensor, nbytes in requests:
        now += nbytes - held.pop(tensor, 0)
        if nbytes:
            held[tensor] = nbytes
            peak = max(peak, now)
    return peak
