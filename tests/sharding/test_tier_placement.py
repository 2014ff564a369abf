"""Where states rest: fractions are met, limits are kept, and what forward begins with stays nearest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.config.offload import Offload
from zeroshard.sharding.layout import ALIGN_ELEMENTS, Range
from zeroshard.sharding.tier_placement import (
    MAX_CHUNK_ELEMENTS,
    PAGE_BYTES,
    FlatSizes,
    TierPlacement,
    assign_tiers,
    split_chunks,
)

DISTANCE = {"device": 0, "host": 1, "disk": 2}


def body(numel: int, trained: bool = True, buckets: int = 1, widths: tuple[int, int, int] = (2, 2, 12)) -> FlatSizes:
    """A flat whose shard has ``numel`` elements, in about equal buckets."""
    cuts = [round(numel * number / buckets / ALIGN_ELEMENTS) * ALIGN_ELEMENTS for number in range(buckets)] + [numel]
    return FlatSizes(tuple(Range(a, b) for a, b in itertools.pairwise(cuts) if a < b), trained, *widths)


def held(bodies: list[FlatSizes], rests: list[TierPlacement], tier: str) -> dict[str, int]:
    """Elements of optimizer states, and bytes of everything, in a tier."""
    pairs = list(zip(bodies, rests, strict=True))
    spans = [(one, span) for one, rest in pairs for span, there in rest.optimizer if there == tier]
    gradients = [
        one.numel * one.grad_bytes_per_element for one, rest in pairs if one.is_trained and rest.gradients == tier
    ]
    parameters = [one.numel * one.param_bytes_per_element for one, rest in pairs if rest.parameters == tier]
    return {
        "optimizer": sum(span.numel for _, span in spans),
        "bytes": sum(span.numel * one.state_bytes_per_element for one, span in spans)
        + sum(gradients)
        + sum(parameters),
        "gradients": sum(gradients),
        "parameters": sum(parameters),
    }


fractions = st.one_of(
    st.sampled_from(["device", "host", "disk"]),
    st.tuples(st.sampled_from(["host", "disk"]), st.floats(0, 1)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda ab: {"host": ab[0], "disk": (1 - ab[0]) * ab[1]}),
)
bodies_of_a_model = st.lists(
    st.builds(
        body,
        numel=st.integers(1, 400).map(lambda n: n * ALIGN_ELEMENTS),
        trained=st.sampled_from([True, True, True, False]),
        buckets=st.integers(1, 4),
        widths=st.sampled_from([(2, 2, 12), (4, 4, 12), (2, 4, 8)]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(bodies_of_a_model, fractions)
def test_fractions_of_optimizer_states_are_met_to_a_vector(bodies: list[FlatSizes], wanted) -> None:
    offload = Offload(optimizer=wanted, directory=".")
    rests, left = assign_tiers(bodies, offload, partitioned_gradients=True)
    total = sum(one.numel for one in bodies if one.is_trained)
    for tier in ("host", "disk"):
        fraction = offload.optimizer.get(tier, 0.0)
        assert abs(held(bodies, rests, tier)["optimizer"] - fraction * total) <= ALIGN_ELEMENTS
    assert left is None


@settings(max_examples=100, deadline=None)
@given(bodies_of_a_model, fractions)
def test_stretches_cover_each_trained_shard_in_order_and_cut_between_vectors(bodies: list[FlatSizes], wanted) -> None:
    rests, _ = assign_tiers(bodies, Offload(optimizer=wanted, directory="."), partitioned_gradients=True)
    for one, rest in zip(bodies, rests, strict=True):
        ends = [0, *(span.end for span, _ in rest.optimizer)]
        assert [span.start for span, _ in rest.optimizer] == ends[:-1]
        assert ends[-1] == (one.numel if one.is_trained else 0)
        assert all(end % ALIGN_ELEMENTS == 0 for end in ends)


@settings(max_examples=100, deadline=None)
@given(bodies_of_a_model, fractions, fractions, fractions)
def test_the_first_units_stay_nearest(bodies: list[FlatSizes], optimizer, gradients, parameters) -> None:
    offload = Offload(optimizer=optimizer, gradients=gradients, parameters=parameters, directory=".")
    rests, _ = assign_tiers(bodies, offload, partitioned_gradients=True)
    tiers = [DISTANCE[tier] for rest in rests for _, tier in rest.optimizer]
    assert tiers == sorted(tiers)


@settings(max_examples=100, deadline=None)
@given(bodies_of_a_model, fractions, fractions)
def test_whole_flats_come_as_near_a_fraction_as_they_allow(bodies: list[FlatSizes], gradients, parameters) -> None:
    offload = Offload(gradients=gradients, parameters=parameters, directory=".")
    rests, _ = assign_tiers(bodies, offload, partitioned_gradients=True)
    for kind, sizes in (
        ("gradients", [one.numel * one.grad_bytes_per_element for one in bodies if one.is_trained]),
        ("parameters", [one.numel * one.param_bytes_per_element for one in bodies]),
    ):
        chosen = getattr(offload, kind)
        for tier in ("host", "disk"):
            wanted = chosen.get(tier, 0.0) * sum(sizes)
            assert abs(held(bodies, rests, tier)[kind] - wanted) <= max(sizes, default=0) * len(chosen)


@settings(max_examples=200, deadline=None)
@given(
    bodies_of_a_model,
    fractions,
    st.none() | fractions,
    fractions,
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**5),
)
def test_limits_are_kept_with_buffers_and_whole_pages(
    bodies: list[FlatSizes], optimizer, gradients, parameters, host: int, disk: int, buffers: int
) -> None:
    offload = Offload(
        optimizer=optimizer,
        gradients=gradients,
        parameters=parameters,
        directory=".",
        host_bytes=host,
        disk_bytes=disk,
    )
    rests, left = assign_tiers(bodies, offload, partitioned_gradients=True, buffers=buffers)
    on_host = held(bodies, rests, "host")["bytes"]
    assert on_host == 0 or on_host + buffers <= host
    assert left == max(0, host - buffers) - on_host
    on_disk = 0
    for one, rest in zip(bodies, rests, strict=True):
        spans = [
            split_chunks(span, one.shard_ranges, MAX_CHUNK_ELEMENTS["disk"])
            for span, tier in rest.optimizer
            if tier == "disk"
        ]
        for part in itertools.chain(*spans):  # a master and two moments of 4 bytes, or as many bytes in all
            on_disk += part.numel * one.state_bytes_per_element + 3 * PAGE_BYTES
        for tier, width in (
            (rest.gradients, one.grad_bytes_per_element),
            (rest.parameters, one.param_bytes_per_element),
        ):
            on_disk += one.numel * width + PAGE_BYTES if tier == "disk" else 0
    assert on_disk <= disk or on_disk == 0
    if host < buffers:  # there is no way to the disk
        assert not held(bodies, rests, "disk")["optimizer"]


def test_gradients_follow_the_states_they_update_by_default() -> None:
    bodies = [body(640), body(640), body(640, trained=False), body(640)]
    rests, _ = assign_tiers(bodies, Offload(optimizer=("host", 0.5)), partitioned_gradients=True)
    assert [rest.gradients for rest in rests] == ["device", "device", "device", "host"]  # the second is cut
    assert [rest.has_offloaded_optimizer for rest in rests] == [False, True, False, True]
    rests, _ = assign_tiers(bodies, Offload(optimizer="host", gradients="device"), partitioned_gradients=True)
    assert {rest.gradients for rest in rests} == {"device"}
    rests, _ = assign_tiers(bodies, Offload(optimizer="host"), partitioned_gradients=False)
    assert {rest.gradients for rest in rests} == {"device"}


def test_what_is_not_trained_has_no_states_and_may_rest_anywhere() -> None:
    bodies = [body(640, trained=False), body(640)]
    rests, _ = assign_tiers(bodies, Offload(optimizer="host", parameters="host"), partitioned_gradients=True)
    assert rests[0].optimizer == []
    assert [rest.parameters for rest in rests] == ["host", "host"]


def test_what_does_not_fit_stays_on_the_device() -> None:
    bodies = [body(640), body(640)]
    offload = Offload(optimizer="host", gradients="device", host_bytes=12 * 1000)
    rests, left = assign_tiers(bodies, offload, partitioned_gradients=True)
    assert rests[0].optimizer == [(Range(0, 320), "device"), (Range(320, 640), "host")]  # 960 of 1000 elements
    assert rests[1].optimizer == [(Range(0, 640), "host")]
    assert left == 40 * 12


@pytest.mark.parametrize("most", [1, 64, 100, 640, 10**6])
def test_granules_cover_a_stretch_and_never_cross_buckets(most: int) -> None:
    homes = [Range(0, 192), Range(192, 640), Range(640, 704)]
    found = split_chunks(Range(64, 704), homes, most)
    assert [part.start for part in found] == [64, *(part.end for part in found[:-1])]
    assert found[-1].end == 704
    assert all(any(home.start <= part.start and part.end <= home.end for home in homes) for part in found)
    assert all(part.numel <= max(most, ALIGN_ELEMENTS) for part in found)
