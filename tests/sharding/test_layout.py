"""The arithmetic of partitioning, against a model that visits every element."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.sharding.layout import ALIGN_ELEMENTS, FlatLayout, ParamRange, Range, round_up

sizes = st.one_of(st.sampled_from([0, 1, ALIGN_ELEMENTS - 1, ALIGN_ELEMENTS, ALIGN_ELEMENTS + 1]), st.integers(0, 500))
cuts = {"numels": st.lists(sizes, max_size=7), "bucket_size": st.integers(1, 700), "parts": st.integers(1, 9)}

settings.register_profile("no timing", deadline=None)  # a slow machine is not a failure
settings.load_profile("no timing")


class Visited:
    """A layout walked through element by element: who owns each place of the flat, and whose element lies there."""

    def __init__(self, layout: FlatLayout) -> None:
        self.content: list[tuple[int, int] | None] = [None] * layout.numel  # (parameter, its element)
        for parameter, (start, numel) in enumerate(zip(layout.starts, layout.numels, strict=True)):
            for element in range(numel):
                assert self.content[start + element] is None, "two parameters overlap"
                self.content[start + element] = (parameter, element)
        self.shards: list[list[int]] = [
            [] for _ in range(layout.shard_count)
        ]  # places in the flat, in the shard's order
        for bucket in layout.buckets:
            share = bucket.numel // layout.shard_count
            for place in range(bucket.start, bucket.end):
                self.shards[(place - bucket.start) // share].append(place)


def elements(pieces: list[ParamRange], length: int) -> list[tuple[int, int] | None]:
    """What pieces say lies at each place of a bucket or shard."""
    said: list[tuple[int, int] | None] = [None] * length
    for piece in pieces:
        assert piece.elements.numel > 0
        for offset in range(piece.elements.numel):
            assert said[piece.offset + offset] is None, "two pieces overlap"
            said[piece.offset + offset] = (piece.param_index, piece.elements.start + offset)
    return said


@given(**cuts)
def test_every_element_is_owned_exactly_once(numels: list[int], bucket_size: int, parts: int) -> None:
    layout = FlatLayout.build(numels, bucket_size, parts)
    owned = [
        (piece.param_index, element)
        for rank in range(parts)
        for piece in layout.owned_ranges(rank)
        for element in range(piece.elements.start, piece.elements.end)
    ]
    assert sorted(owned) == [(index, element) for index, numel in enumerate(numels) for element in range(numel)]


@given(**cuts)
def test_buckets_tile_the_flat_and_respect_their_size(numels: list[int], bucket_size: int, parts: int) -> None:
    layout = FlatLayout.build(numels, bucket_size, parts)
    quantum = ALIGN_ELEMENTS * parts
    end = 0
    for bucket in layout.buckets:
        assert bucket.start == end
        assert 0 < bucket.numel <= max(bucket_size, quantum)
        assert bucket.numel % quantum == 0
        end = bucket.end
    assert end == layout.numel
    shared = [bucket.numel for bucket in layout.buckets if layout.single_param(bucket) is None]
    assert len(set(shared[:-1])) <= 1


@given(**cuts)
def test_no_more_is_padded_than_alignment_asks_for(numels: list[int], bucket_size: int, parts: int) -> None:
    layout = FlatLayout.build(numels, bucket_size, parts)
    assert all(start % ALIGN_ELEMENTS == 0 for start in layout.starts)
    assert layout.numel == round_up(sum(round_up(numel, ALIGN_ELEMENTS) for numel in numels), ALIGN_ELEMENTS * parts)


@given(**cuts)
def test_shards_are_equally_long_and_hold_the_ranks_parts(numels: list[int], bucket_size: int, parts: int) -> None:
    layout = FlatLayout.build(numels, bucket_size, parts)
    for rank, places in enumerate(Visited(layout).shards):
        assert len(places) == layout.shard_numel
        for bucket in layout.buckets:
            owned, home = layout.bucket_shard(bucket, rank), layout.shard_range(bucket)
            assert places[home.start : home.end] == list(range(owned.start, owned.end))


@given(**cuts)
def test_segments_say_what_lies_in_a_shard(numels: list[int], bucket_size: int, parts: int) -> None:
    layout = FlatLayout.build(numels, bucket_size, parts)
    visited = Visited(layout)
    for rank, places in enumerate(visited.shards):
        segments = layout.owned_ranges(rank)
        assert elements(segments, layout.shard_numel) == [visited.content[place] for place in places]
        assert [segment.offset for segment in segments] == sorted(segment.offset for segment in segments)


@given(**cuts)
def test_pieces_and_gaps_fill_each_bucket(numels: list[int], bucket_size: int, parts: int) -> None:
    layout = FlatLayout.build(numels, bucket_size, parts)
    content = Visited(layout).content
    for bucket in layout.buckets:
        expected = content[bucket.start : bucket.end]
        assert elements(layout.params_in_bucket(bucket), bucket.numel) == expected
        empty = [place for gap in layout.padding(bucket) for place in range(gap.start, gap.end)]
        assert empty == [place for place, element in enumerate(expected) if element is None]


@given(value=st.integers(0, 10_000), multiple=st.integers(1, 500))
def test_round_up_gives_the_next_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@given(*[st.integers(0, 40)] * 4)
def test_ranges_meet_in_their_common_elements(a: int, b: int, c: int, d: int) -> None:
    first, second = Range(min(a, b), max(a, b)), Range(min(c, d), max(c, d))
    common = set(range(first.start, first.end)) & set(range(second.start, second.end))
    met = first.intersect(second)
    assert (set(range(met.start, met.end)) if met else set()) == common


def test_a_parameter_larger_than_a_bucket_is_cut_over_buckets() -> None:
    layout = FlatLayout.build([1000], bucket_size=256, shard_count=2)
    assert [bucket.numel for bucket in layout.buckets] == [256, 256, 256, 256]
    assert [piece.elements for bucket in layout.buckets for piece in layout.params_in_bucket(bucket)] == [
        Range(0, 256),
        Range(256, 512),
        Range(512, 768),
        Range(768, 1000),
    ]


@given(**cuts)
def test_a_large_parameter_that_divides_evenly_has_buckets_of_its_own(
    numels: list[int], bucket_size: int, parts: int
) -> None:
    layout = FlatLayout.build(numels, bucket_size, parts)
    within: dict[int, int] = {}  # elements of each parameter that lie in buckets of no other
    for bucket in layout.buckets:
        sole = layout.single_param(bucket)
        assert layout.params_in_bucket(bucket) == [sole] or sole is None
        if sole is not None:
            within[sole.param_index] = within.get(sole.param_index, 0) + sole.elements.numel
    for index, numel in enumerate(numels):
        if numel and 3 * numel >= bucket_size and numel % (ALIGN_ELEMENTS * parts) == 0:
            assert within[index] == numel


def test_large_parameters_lie_behind_the_others_and_cost_no_bucket_more_than_they_fill() -> None:
    layout = FlatLayout.build([512, 10, 256, 10], bucket_size=512, shard_count=2)
    assert layout.param_order == (1, 3, 0, 2)
    assert layout.starts == (128, 0, 640, 64)
    assert layout.buckets == (Range(0, 128), Range(128, 640), Range(640, 896))
    assert [layout.single_param(bucket) is not None for bucket in layout.buckets] == [False, True, True]


def test_with_more_ranks_than_elements_the_first_rank_owns_all() -> None:
    layout = FlatLayout.build([3], bucket_size=2**25, shard_count=8)
    assert [len(layout.owned_ranges(rank)) for rank in range(8)] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert layout.shard_numel == ALIGN_ELEMENTS


@pytest.mark.parametrize("numels", [[], [0], [0, 0]])
def test_nothing_takes_no_room(numels: list[int]) -> None:
    layout = FlatLayout.build(numels, bucket_size=100, shard_count=3)
    assert (layout.numel, layout.shard_numel, layout.buckets) == (0, 0, ())
    assert layout.owned_ranges(0) == []


def test_one_element_parameters_each_start_on_a_boundary() -> None:
    layout = FlatLayout.build([1, 0, 1], bucket_size=1, shard_count=1)
    assert layout.starts == (0, ALIGN_ELEMENTS, ALIGN_ELEMENTS)
    assert layout.owned_ranges(0) == [ParamRange(0, Range(0, 1), 0), ParamRange(2, Range(0, 1), ALIGN_ELEMENTS)]
