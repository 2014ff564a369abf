"""Making a large segment first, on an allocator that works as torch's does on a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from zeroshard.memory.allocator import segment_search
from zeroshard.memory.allocator.segment_preallocator import WARMUP_PASSES, SegmentPreallocator
from zeroshard.memory.allocator.segment_search import SegmentCandidate, SegmentSearch
from zeroshard.memory.allocator.simulator import ROUND_LARGE_BYTES, AllocatorSimulator, AllocRequest


class Block:
    """What stands for a tensor: it gives its bytes back when it goes."""

    def __init__(self, allocator: Allocator, segment: list[list[int]], place: list[int]) -> None:
        self._allocator, self._segment, self._place = allocator, segment, place
        allocator.note("alloc", self, place[1] - place[0])

    def __del__(self) -> None:
        self._allocator.note("free_completed", self, 0)
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
        self.emptied = self.retries = 0
        self.noted: list[dict[str, Any]] = []
        self.most = 0  # events that are noted
        self.pooled: list[dict[str, Any]] = []  # segments of a pool

    def empty(self, size: int, **_: Any) -> Block:
        free = [(p[1] - p[0], s, p) for s in self.segments for p in s if not p[2] and p[1] - p[0] >= size]
        if not free:
            if self.reserved() + size > self.capacity:
                self.retries += 1
                self.give_back()
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
        self.give_back()

    def give_back(self) -> None:
        self.segments = [s for s in self.segments if any(place[2] for place in s)]

    def reserved(self) -> int:
        return sum(segment[-1][1] for segment in self.segments)

    def stats(self) -> dict[str, Any]:
        return {"reserved_bytes": {"all": {"current": self.reserved()}}, "num_alloc_retries": self.retries}

    def record(self, enabled: str | None, max_entries: int, **_: Any) -> None:
        self.noted, self.most = [], max_entries if enabled else 0

    def snapshot(self) -> dict[str, Any]:
        return {"device_traces": [self.noted], "segments": self.pooled}

    def note(self, action: str, block: Block, size: int) -> None:
        if len(self.noted) < self.most:
            self.noted.append({"action": action, "addr": id(block), "size": size})


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch, "empty", made.empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: made.stats())
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", made.snapshot)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", made.record)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: bool(made.most), raising=False)
    return made


MB = 1 << 20


def train(segments: SegmentPreallocator, allocator: Allocator, passes: int, length: float = 1.0) -> None:
    """Small temporaries first, then, when they are gone, the large ones of a loss, three of them at once."""

    def tensor(megabytes: int) -> Block:
        return allocator.empty(int(megabytes * length) * MB)

    for _ in range(passes):
        segments.on_forward_begin(int(1024 * length))
        small = [tensor(256) for _ in range(9)]
        del small[1:]
        kept = [tensor(64) for _ in range(2)]  # the last block's output, made while others are still there
        del small
        half = tensor(1572)
        large = [tensor(3144) for _ in range(2)]
        del half
        large.append(tensor(3144))
        del kept, large


NEEDED = (3 * 3144 + 2 * 64) * MB


def test_small_temporaries_are_carved_from_what_the_large_ones_need(allocator: Allocator) -> None:
    segments = SegmentPreallocator(torch.device("cuda", 0))
    train(segments, allocator, 3)
    assert allocator.reserved() > 1.3 * NEEDED
    train(segments, allocator, 3)
    assert NEEDED <= allocator.reserved() < 1.1 * NEEDED
    assert not allocator.most  # and nothing is noted any more


def test_the_order_is_found_again_when_the_cache_was_emptied_and_left_alone_otherwise(allocator: Allocator) -> None:
    segments = SegmentPreallocator(torch.device("cuda", 0))
    train(segments, allocator, 6)
    settled, emptied = allocator.reserved(), allocator.emptied
    train(segments, allocator, 5)
    train(segments, allocator, 5, length=0.5)
    assert (allocator.reserved(), allocator.emptied) == (settled, emptied)
    allocator.empty_cache()
    train(segments, allocator, 1)
    assert allocator.reserved() == settled


@pytest.mark.parametrize("passes", range(1, 7))
def test_an_emptied_cache_is_not_mistaken_for_a_candidate_that_reserves_little(
    allocator: Allocator, passes: int
) -> None:
    segments = SegmentPreallocator(torch.device("cuda", 0))
    train(segments, allocator, passes)
    allocator.empty_cache()
    train(segments, allocator, 7 - passes)
    assert NEEDED <= allocator.reserved() < 1.1 * NEEDED


def test_larger_inputs_restart_it(allocator: Allocator) -> None:
    segments = SegmentPreallocator(torch.device("cuda", 0))
    train(segments, allocator, 6, length=0.5)
    assert allocator.reserved() < 0.6 * NEEDED
    train(segments, allocator, 6)
    assert allocator.reserved() < 1.1 * NEEDED


def test_with_memory_nearly_full_and_lengths_that_vary_every_pass_fits(allocator: Allocator) -> None:
    allocator.capacity = int(NEEDED / 0.95)
    segments = SegmentPreallocator(torch.device("cuda", 0))
    lengths = random.Random(0).choices([part / 16 for part in range(4, 17)], k=100)
    for length in lengths:
        train(segments, allocator, 1, length)
    assert allocator.retries  # or memory was not full


def test_inputs_that_grow_and_grow_are_looked_at_only_a_few_times(allocator: Allocator) -> None:
    segments = SegmentPreallocator(torch.device("cuda", 0))
    for length in range(100, 200):
        train(segments, allocator, 1, length / 100)
    assert allocator.emptied < 20


def test_a_full_memory_is_forgotten_when_it_was_full_long_ago(allocator: Allocator) -> None:
    segments = SegmentPreallocator(torch.device("cuda", 0))
    train(segments, allocator, 6)
    allocator.retries += 1
    train(segments, allocator, 1)
    emptied = allocator.emptied
    train(segments, allocator, 300)
    assert emptied < allocator.emptied < emptied + 120


def test_a_model_without_large_temporaries_is_left_alone(allocator: Allocator) -> None:
    segments = SegmentPreallocator(torch.device("cuda", 0))
    for _ in range(8):
        segments.on_forward_begin(1)
        allocator.empty(MB // 2)
    assert allocator.reserved() == MB // 2


def test_what_is_taken_from_a_pool_needs_no_segment(allocator: Allocator) -> None:
    pool = {"address": 1 << 60, "total_size": 40 * MB, "segment_pool_id": (0, 1)}
    model = {"address": (1 << 60) + 40 * MB, "total_size": 40 * MB, "segment_pool_id": (0, 0)}
    allocator.pooled = [model, pool]  # in no order
    segments = SegmentPreallocator(torch.device("cuda", 0))
    segments._is_recording = True
    places = [(1 << 60) - 1, 1 << 60, (1 << 60) + 40 * MB - 1, (1 << 60) + 40 * MB]
    allocator.noted = [{"action": "alloc", "addr": place, "size": 32 * MB} for place in places]
    assert segments._recorded_requests() == [(places[0], 32 * MB), (places[3], 32 * MB)]


def test_a_step_that_is_too_long_to_be_noted_is_left_alone(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.memory.allocator.segment_preallocator.MAX_TRACE_EVENTS", 5)
    segments = SegmentPreallocator(torch.device("cuda", 0))
    train(segments, allocator, 8)
    assert allocator.reserved() > 1.3 * NEEDED


def test_what_the_user_has_noted_is_left_alone(allocator: Allocator) -> None:
    allocator.record("all", max_entries=10_000)
    train(SegmentPreallocator(torch.device("cuda", 0)), allocator, 8)
    assert len(allocator.noted) == 8 * 2 * 15
    assert allocator.emptied == WARMUP_PASSES


def carved(sizes: list[int], made_first: list[int]) -> int:
    allocator = Allocator()
    first = [allocator.empty(size) for size in made_first]
    del first
    held = {}
    for number, size in enumerate(sizes):
        held[number] = allocator.empty(size)
        if number % 3 == 2:
            del held[number - 1]
    return allocator.reserved()


def test_a_rehearsal_places_as_the_allocator_does() -> None:
    draw = random.Random(1)
    for _ in range(30):
        sizes = [draw.randrange(10, 400) * ROUND_LARGE_BYTES for _ in range(40)]
        first = [draw.randrange(10, 900) * ROUND_LARGE_BYTES for _ in range(draw.randrange(3))]
        requests: list[tuple[int, int]] = []
        for number, size in enumerate(sizes):
            requests.append((number, size))
            if number % 3 == 2:
                requests.append((number - 1, 0))
        rehearsal = AllocatorSimulator(first)
        rehearsal.replay(requests)
        assert rehearsal.reserved_bytes == carved(sizes, first)


# ------------------------------------------------------------------------------------------------ arrangements


def requests_of_a_net(layers: int = 12) -> list[AllocRequest]:
    """Blocks that keep something each, a loss, and the way back."""
    found: list[AllocRequest] = []

    def take(*sizes: int) -> list[int]:
        numbers = range(len(found), len(found) + len(sizes))
        found.extend((number, size * MB) for number, size in zip(numbers, sizes, strict=True))
        return list(numbers)

    def free(numbers: list[int]) -> None:
        found.extend((number, 0) for number in numbers)

    kept = []
    for _ in range(layers):
        passing = take(256, 64)
        kept.append(take(128, 128, 32))
        free(passing)
    half = take(786)
    logits = take(1572, 1572)
    free(half)
    loss = take(1572)
    free(logits[:1])
    gradient = take(786)
    free(logits[1:] + loss)
    for each in reversed(kept):
        passing = take(256, 64, 128, 128, 32)
        free(each)
        free(take(128) + passing + gradient)
        gradient = []
    return found


def test_sizes_are_changed_until_little_more_is_reserved_than_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of_a_net()
    in_use = 8172 * MB
    first = SegmentSearch(requests)
    assert min(first._evaluate(sizes) for sizes in first._initial_sizes()) > 1.12 * in_use
    monkeypatch.setattr(segment_search, "TARGET_RATIO", 1.06)  # it ends there, so that no clock decides
    found = SegmentSearch(requests).search(seconds=120)[0].sizes
    for grown in (1.0, 1.001):  # it does not fit to the byte
        rehearsal = AllocatorSimulator(found)
        for _ in range(2):
            rehearsal.replay([(tensor, int(nbytes * grown)) for tensor, nbytes in requests])
        assert in_use <= rehearsal.reserved_bytes <= 1.06 * in_use


def requests_of_gathered_blocks(layers: int = 24) -> list[AllocRequest]:
    """Forward of blocks that are gathered one ahead and keep little, and a loss, as a GPT of 1.4B asks at batch 2."""
    found: list[AllocRequest] = []

    def take(size: int) -> int:
        found.append((len(found), size * MB))
        return len(found) - 1

    def free(*numbers: int) -> None:
        found.extend((number, 0) for number in numbers)

    table, gathered = take(200), take(96)
    take(8)
    free(table)
    for layer in range(layers):
        ahead = take(96 if layer < layers - 1 else 200)
        norm, projected, queries, attended = take(8), take(24), take(8), take(8)
        free(projected, queries, norm)
        between = take(8)
        free(attended)
        norm, wide, active = take(8), take(32), take(32)
        free(wide)
        narrow = take(8)
        free(active, norm)
        take(8)  # what the block returns, and what is kept of it
        free(narrow, between, gathered)
        gathered = ahead
    half, logits, exact = take(196), take(393), take(393)
    free(logits, half, gathered)
    free(take(393), take(393), exact)
    return found


def test_what_is_small_and_stays_is_kept_apart_from_gathered_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_search, "TARGET_RATIO", 1.11)
    requests, in_use = requests_of_gathered_blocks(), (25 * 8 + 200 + 196 + 2 * 393) * MB
    best = SegmentSearch(requests).search(seconds=120)[0]
    assert (
        in_use <= best.reserved_bytes <= 1.115 * in_use
    )  # two units' places more, 1.14, where small ones are between them


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.3])  # for the first guess alone, for a few, for many
def test_a_guess_needs_what_it_promises_however_short_the_time(seconds: float) -> None:
    requests = requests_of_gathered_blocks()
    for guess in SegmentSearch(requests).search(seconds):
        needed = 0
        for grown in (0, 1):
            rehearsal = AllocatorSimulator(guess.sizes)
            for _ in range(2):
                rehearsal.replay(
                    [
                        (tensor, nbytes + grown * nbytes // segment_search.REQUEST_GROWTH_DIVISOR)
                        for tensor, nbytes in requests
                    ]
                )
            needed = max(needed, rehearsal.reserved_bytes)
        assert guess.reserved_bytes == needed, guess


@pytest.mark.parametrize(("sizes", "most"), [([1.5] * 4, 14), ([18.5, 1.5, 1.5], 24), ([9, 9, 6, 6], 38)])
def test_what_a_small_model_needs_is_not_a_share_of_20_mb(sizes: list[float], most: int) -> None:
    requests = [(number, int(size * MB)) for number, size in enumerate(sizes)]
    best, *_, without = SegmentSearch(requests).search(seconds=4)
    assert best.reserved_bytes <= most * MB < without.reserved_bytes, best


def test_nothing_is_made_for_what_fits_as_it_comes() -> None:
    assert SegmentSearch([]).search(seconds=1) == [SegmentCandidate((), 0)]
    assert SegmentSearch([(1, 512 * MB), (1, 0), (2, 256 * MB), (2, 0)]).search(seconds=1)[0].sizes == ()


@pytest.mark.parametrize("sizes", [[3], [100], [30] * 20], ids=lambda sizes: f"{len(sizes)} of {sizes[0]}")
@pytest.mark.parametrize("freed", [False, True])
def test_where_nothing_can_be_gained_the_search_ends_by_itself(sizes: list[int], freed: bool) -> None:
    requests = [(number, size * MB) for number, size in enumerate(sizes)]
    requests += [(number, 0) for number in range(len(sizes))] if freed else []
    found = SegmentSearch(requests).search(seconds=3600)
    assert found[-1].sizes == () and max(guess.reserved_bytes for guess in found) == found[-1].reserved_bytes


@pytest.mark.parametrize("right", [0, 1, 2, None])  # which guess needs what it promises
def test_guesses_that_need_more_than_they_promised_are_left(
    right: int | None, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(3144 * MB,), (2 * 3144 * MB, 64 * MB), (64 * MB,)]
    guesses = [SegmentCandidate(each, 1 << 40 if number == right else MB) for number, each in enumerate(sizes)]
    monkeypatch.setattr(SegmentSearch, "search", lambda self, seconds: list(guesses))
    segments = SegmentPreallocator(torch.device("cuda", 0))
    train(segments, allocator, WARMUP_PASSES + 1)  # the last is noted
    reserved = []
    for _ in range(5):
        train(segments, allocator, 1)
        reserved.append(allocator.reserved())
    assert segments._segment_sizes == sizes[reserved.index(min(reserved)) if right is None else right]
    assert len(set(reserved[:3])) == (3 if right is None else right + 1)  # as many as were tried differ
    emptied = allocator.emptied
    train(segments, allocator, 2)
    assert allocator.emptied == emptied
