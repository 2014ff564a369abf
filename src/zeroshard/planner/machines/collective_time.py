"""Links: how long a collective takes on a machine.

[Note: collectives on paper]
Ranks lie side by side on the devices of one node after the other. A group takes every ``stride``-th of them: the tensor
axis is innermost and has stride 1, the data axis has the tensor degree as its stride. With D devices a node and stride
s, a group within one node uses the devices' own links, B bytes/s. One that leaves it also uses its nodes' links to the
outside, of O bytes/s a node, and shares each with the other groups that lie beside it and communicate at the same
moment, min(s, D) with it. So a rank sends and receives at

    rate = min(B, O / min(s, D))

and, as every algorithm must bring (n - 1)/n of an all-gather's result to every rank, no collective is faster than its
bytes over that rate. What comes on top is latency. A ring passes n - 1 hops, of which one fewer than there are nodes
lead outside; a tree passes log2 of the nodes and log2 of the members within one, and moves bytes at half the rate,
since its inner ranks receive, combine and send on what a ring keeps apart. Large messages so take the ring and small
ones the tree, whichever is faster, as NCCL chooses. The half is an assumption; the rest follows from the machine.

An all-reduce is a reduce-scatter and an all-gather in both. Over gloo (kind "cpu") a reduce-scatter is an all-reduce
whose result is cut, and costs as much. What the host takes to launch a collective is no part of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from zeroshard.planner.machines.machine import Machine

PASSES: Final = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
TREE_RATE_FRACTION = 0.5  # of a ring's: [Note: collectives on paper]


@dataclass(frozen=True)
class GroupTopology:
    """Where the ranks of a group lie.

    >>> GroupTopology.from_stride(devices=8, ranks=4, stride=4)  # the data axis with 4 tensor ranks, on two nodes
    GroupTopology(ranks=4, nodes=2, max_ranks_per_node=2, concurrent_groups=4)
    """

    ranks: int
    nodes: int  # that it lies on
    max_ranks_per_node: int  # the most of it on one node
    concurrent_groups: int  # groups that share a node's link to the outside

    @classmethod
    def from_stride(cls, devices: int, ranks: int, stride: int) -> GroupTopology:
        """The group that takes every ``stride``-th device from the first of a node on."""
        nodes = ranks if stride >= devices else (ranks - 1) * stride // devices + 1
        return cls(ranks, nodes, min(ranks, ceil(devices / stride)), min(stride, devices))

    @property
    def ring_hops(self) -> tuple[int, int]:
        """Hops of a ring, inside and outside of nodes."""
        return self.ranks - self.nodes, self.nodes - 1

    @property
    def tree_hops(self) -> tuple[int, int]:
        """The same of a tree."""
        return ceil(log2(self.max_ranks_per_node)), ceil(log2(self.nodes))


def collective_seconds(machine: Machine, kind: str, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds on the wire of one collective: [Note: collectives on paper].

    ``nbytes`` is an all-gather's output, a reduce-scatter's input, and the tensor's length of an all-reduce, which
    moves it twice.

    >>> from zeroshard.planner.machines.machine import Link, Machine
    >>> inside, outside = Link(bandwidth=100e9, latency=0), Link(bandwidth=80e9, latency=0)
    >>> machine = Machine.resolve("h100", inside=inside, outside=outside)
    >>> collective_seconds(machine, "all-gather", 1e9, ranks=8)
    0.00875
    >>> collective_seconds(machine, "all-reduce", 1e9, ranks=2, stride=8)  # 8 such groups share a node's link
    0.1
    """
    if kind not in PASSES:
        raise ValueError(f"a collective is one of {', '.join(PASSES)}, got {kind!r}")
    for name, value in (("ranks", ranks), ("stride", stride)):
        if value < 1:
            raise ValueError(f"{name} is a whole number from 1 up, got {value!r}")
    if nbytes < 0:
        raise ValueError(f"nbytes is a number from 0 up, got {nbytes!r}")
    if ranks == 1:
        return 0.0
    group = GroupTopology.from_stride(machine.devices, ranks, stride)
    passes = 2 if kind == "reduce-scatter" and machine.kind == "cpu" else PASSES[kind]
    wire = nbytes * (ranks - 1) / ranks / link_rate(machine, group)
    return passes * min(
        wire + latency_seconds(machine, group.ring_hops),
        wire / TREE_RATE_FRACTION + latency_seconds(machine, group.tree_hops),
    )


def link_rate(machine: Machine, group: GroupTopology) -> float:
    """Bytes/s that a rank of the group sends and receives, all groups beside it at work.

    >>> from zeroshard.planner.machines.machine import Machine
    >>> dgx2 = Machine.resolve("dgx2")
    >>> link_rate(dgx2, GroupTopology.from_stride(16, ranks=64, stride=16)) == dgx2.outside.bandwidth / 16
    True
    """
    inside, outside = machine.inside.bandwidth, machine.outside.bandwidth
    return inside if group.nodes == 1 else min(inside, outside / group.concurrent_groups)


def latency_seconds(machine: Machine, hops: tuple[int, int]) -> float:
    """What hops inside and outside of nodes take; a way outside is never shorter than one inside."""
    near = machine.inside.latency
    return hops[0] * near + hops[1] * max(near, machine.outside.latency)
