"""How long collectives take on paper."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zeroshard.planner.machines.collective_time import PASSES, GroupTopology, collective_seconds
from zeroshard.planner.machines.machine import Link, Machine
from zeroshard.planner.machines.presets import MACHINE_PRESETS

kinds = st.sampled_from(sorted(PASSES))
presets = st.sampled_from(sorted(MACHINE_PRESETS))
some_ranks = st.integers(1, 16384)
strides = st.sampled_from([1, 2, 3, 4, 8, 16, 32])
sizes = st.integers(0, 2**40)


def made(devices: int = 8, near: float = 100e9, far: float = 80e9, latency: float = 0.0, away: float = 0.0) -> Machine:
    links = {"inside": Link(bandwidth=near, latency=latency), "outside": Link(bandwidth=far, latency=away)}
    return Machine.resolve("h100", devices=devices, **links)


@settings(max_examples=200, deadline=None)
@given(presets, kinds, sizes, sizes, some_ranks, strides)
def test_more_bytes_never_take_less(name: str, kind: str, one: int, other: int, ranks: int, stride: int) -> None:
    machine, (less, more) = Machine.resolve(name), sorted((one, other))
    assert collective_seconds(machine, kind, less, ranks, stride) <= collective_seconds(
        machine, kind, more, ranks, stride
    )


@settings(max_examples=200, deadline=None)
@given(presets, kinds, sizes, st.integers(2, 16384), strides)
def test_no_collective_is_faster_than_its_bytes_over_its_slowest_link(
    name: str, kind: str, nbytes: int, ranks: int, stride: int
) -> None:
    machine = Machine.resolve(name)
    bandwidth = machine.inside.bandwidth
    if (ranks - 1) * stride >= machine.devices:  # then all groups of a node share its link to the others
        bandwidth = min(bandwidth, machine.outside.bandwidth / min(stride, machine.devices))
    least = PASSES[kind] * nbytes * (ranks - 1) / ranks / bandwidth
    seconds = collective_seconds(machine, kind, nbytes, ranks, stride)
    assert seconds >= least * (1 - 1e-12)
    assert math.isfinite(seconds)


@settings(max_examples=200, deadline=None)
@given(presets, kinds, sizes, st.integers(1, 16), strides)
def test_a_group_within_a_node_is_never_slower_than_one_across(
    name: str, kind: str, nbytes: int, ranks: int, stride: int
) -> None:
    machine = Machine.resolve(name)
    assume(ranks <= machine.devices)
    across = collective_seconds(machine, kind, nbytes, ranks, stride)
    assert collective_seconds(machine, kind, nbytes, ranks) <= across * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(presets, kinds, sizes, strides)
def test_one_rank_costs_nothing(name: str, kind: str, nbytes: int, stride: int) -> None:
    assert collective_seconds(Machine.resolve(name), kind, nbytes, 1, stride) == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), st.integers(1, 300), st.integers(1, 40))
def test_where_a_group_lies_is_what_counting_devices_gives(devices: int, ranks: int, stride: int) -> None:
    nodes = [place * stride // devices for place in range(ranks)]
    group = GroupTopology.from_stride(devices, ranks, stride)
    assert group.nodes == len(set(nodes))
    assert group.max_ranks_per_node == max(nodes.count(node) for node in set(nodes))


def test_a_ring_within_a_node_to_the_microsecond() -> None:
    machine = made(latency=1e-6)
    for kind, passes in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        seconds = collective_seconds(machine, kind, 8e9, 8)
        assert seconds == pytest.approx(passes * (8e9 * 7 / 8 / 100e9 + 7e-6))


def test_a_small_message_takes_the_tree() -> None:
    machine = made(latency=1e-6, away=5e-6)
    assert collective_seconds(machine, "all-gather", 0, 8) == pytest.approx(3e-6)
    assert collective_seconds(machine, "all-gather", 0, 1024) == pytest.approx(3e-6 + 7 * 5e-6)  # 128 nodes
    assert collective_seconds(machine, "all-reduce", 0, 1024) == pytest.approx(2 * (3e-6 + 7 * 5e-6))


def test_neighbouring_groups_share_a_nodes_link() -> None:
    machine = made()
    one = collective_seconds(machine, "all-gather", 16e9, 16)  # all of two nodes: the whole link of 80 GB/s
    assert one == pytest.approx(16e9 * 15 / 16 / 80e9)
    four = collective_seconds(machine, "all-gather", 16e9, 16, stride=4)  # 4 groups, of 2 ranks a node
    assert four == pytest.approx(16e9 * 15 / 16 / 20e9)
    eight = collective_seconds(machine, "all-gather", 16e9, 16, stride=8)  # 8 groups, of 1 rank a node
    assert eight == pytest.approx(16e9 * 15 / 16 / 10e9)
    assert collective_seconds(machine, "all-gather", 16e9, 16, stride=64) == eight  # no more devices share a node


def test_a_fast_way_outside_does_not_make_the_inside_faster() -> None:
    machine = made(near=10e9, far=1e12, latency=1e-5, away=1e-6)
    inside, outside = (collective_seconds(machine, "all-gather", 8e9, 8, stride) for stride in (1, 8))
    assert inside <= outside


def test_a_reduce_scatter_over_gloo_takes_half_an_all_reduce() -> None:
    machine = Machine.resolve("cpu")
    reduced = collective_seconds(machine, "reduce-scatter", 1e9, 4)
    assert reduced == collective_seconds(machine, "all-gather", 1e9, 4)
    assert 2 * reduced == collective_seconds(machine, "all-reduce", 1e9, 4)


def test_the_papers_cluster() -> None:
    """100B in stage 2 on 25 DGX-2 nodes, 16-way tensor parallel: the data axis crosses nodes at 1/16 of 100 GB/s."""
    gradients = 100e9 / 16 * 2
    seconds = collective_seconds(Machine.resolve("dgx2"), "reduce-scatter", gradients, 25, stride=16)
    assert 2.0 < seconds < 2.4  # 12.5 GB · 24/25 at 5.6 GB/s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "gather"}, "kind must be one of all-gather, .*, got 'gather'"),
        ({"ranks": 0}, "ranks must be a positive integer, got 0"),
        ({"stride": 0}, "stride must be a positive integer, got 0"),
        ({"nbytes": -1}, "nbytes must be at least 0, got -1"),
    ],
)
def test_an_unknown_collective_is_refused(changes: dict[str, object], words: str) -> None:
    asked: dict[str, object] = {"kind": "all-gather", "nbytes": 1, "ranks": 2, **changes}
    with pytest.raises(ValueError, match=words):
        collective_seconds(made(), **asked)  # type: ignore[arg-type]
