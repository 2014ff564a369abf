"""Making the largest segments first, on an allocator that works as torch's does on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zeroshard.memory.segments import LARGE, Segments


class Block:
    """What stands for a tensor: it gives its bytes back when it goes."""

    def __init__(self, allocator: Allocator, segment: list[list[int]], place: list[int]) -> None:
        self._allocator, self._segment, self._place = allocator, segment, place

    def __del__(self) -> None:
        self._place[2] = 0
        merged: list[list[int]] = []
        for place in self._segment:
            if merged and not merged[-1][2] and not place[2]:
                merged[-1][1] = place[1]
            else:
                merged.append(place)
        self._segment[:] = merged


class Allocator:
    """Segments of [start, end, taken]; a request is carved from the smallest free place that is large enough."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.segments: list[list[list[int]]] = []
        self.capacity = capacity
        self.emptied = 0

    def empty(self, size: int, **_: Any) -> Block:
        free = [(p[1] - p[0], s, p) for s in self.segments for p in s if not p[2] and p[1] - p[0] >= size]
        if not free:
            if self.reserved() + size > self.capacity:
                raise torch.OutOfMemoryError
            self.segments.append([[0, size, 0]])
            free = [(size, self.segments[-1], self.segments[-1][0])]
        _, segment, place = min(free, key=lambda found: found[0])
        rest = [place[0] + size, place[1], 0]
        place[1], place[2] = place[0] + size, 1
        if rest[0] < rest[1]:
            segment.insert(segment.index(place) + 1, rest)
        return Block(self, segment, place)

    def empty_cache(self) -> None:
        self.emptied += 1
        self.segments = [s for s in self.segments if any(place[2] for place in s)]

    def reserved(self) -> int:
        return sum(segment[-1][1] for segment in self.segments)

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "device": 0,
                "segment_pool_id": (0, 0),
                "total_size": segment[-1][1],
                "allocated_size": sum(end - start for start, end, taken in segment if taken),
            }
            for segment in self.segments
        ]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    made = Allocator()
    monkeypatch.setattr(torch, "empty", made.empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", made.snapshot)
    stats = {"reserved_bytes": {"all": {}}}
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda _: stats | {"reserved_bytes": {"all": {"current": made.reserved()}}},
    )
    yield made


MB = 1 << 20


def train(segments: Segments, allocator: Allocator, passes: int) -> None:
    """Small temporaries first, then, when they are gone, the large ones of a loss, three of them at once."""
    for _ in range(passes):
        segments.begin()
        small = [allocator.empty(256 * MB) for _ in range(9)]
        del small
        kept = [allocator.empty(64 * MB) for _ in range(2)]
        half = allocator.empty(1572 * MB)
        large = [allocator.empty(3144 * MB) for _ in range(2)]
        del half
        large.append(allocator.empty(3144 * MB))
        del kept, large


def test_small_temporaries_are_carved_from_the_large_ones_segments(allocator: Allocator) -> None:
    train(Segments(torch.device("cuda", 0)), allocator, 3)
    natural = allocator.reserved()
    assert natural > (3 * 3144 + 9 * 256) * MB
    segments = Segments(torch.device("cuda", 0))
    train(segments, allocator, 20)
    needed = (3 * 3144 + 2 * 64) * MB
    assert needed <= allocator.reserved() < 1.03 * needed


def test_the_order_is_found_again_when_the_cache_was_emptied_and_left_alone_otherwise(allocator: Allocator) -> None:
    segments = Segments(torch.device("cuda", 0))
    train(segments, allocator, 20)
    settled, emptied = allocator.reserved(), allocator.emptied
    train(segments, allocator, 5)
    assert (allocator.reserved(), allocator.emptied) == (settled, emptied)
    allocator.empty_cache()
    train(segments, allocator, 1)
    assert allocator.reserved() == settled


def test_what_is_tried_never_takes_more_than_is_there(allocator: Allocator) -> None:
    segments = Segments(torch.device("cuda", 0))
    train(segments, allocator, 3)
    others = allocator.empty(LARGE)
    allocator.capacity = allocator.reserved()
    train(segments, allocator, 20)
    assert others is not None
    assert allocator.reserved() <= allocator.capacity


def test_a_model_without_large_temporaries_is_left_alone(allocator: Allocator) -> None:
    segments = Segments(torch.device("cuda", 0))
    for _ in range(8):
        segments.begin()
        allocator.empty(LARGE)
    assert allocator.reserved() == LARGE
