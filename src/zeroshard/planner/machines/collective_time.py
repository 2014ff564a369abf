"""Predict how long a collective takes on a machine.

[Note: predicting collective time]
Ranks fill the devices of one node after the other. A group consists of every ``stride``-th rank: the tensor axis is
innermost and has stride 1, the data axis has the tensor degree as its stride. With D devices per node and stride s, a
group within one node uses the devices' links of B bytes/s. A group across nodes also uses the inter-node links of O
bytes/s per node, and shares each with the other groups that communicate at the same time; these are min(s, D) groups,
including itself. So a rank sends and receives at

    rate = min(B, O / min(s, D))

Every algorithm must send (n - 1)/n of an all-gather's result to every rank, so no collective is faster than these bytes
over that rate. Latency is added. A ring has n - 1 hops; (nodes - 1) of them are inter-node. A tree has log2(nodes)
inter-node hops and log2(ranks per node) intra-node hops, and moves bytes at half the rate, because its inner ranks
receive, combine and forward data that a ring keeps separate. The faster of the two is used, as in NCCL: the ring for
large messages, the tree for small ones. The factor of one half is an assumption; everything else follows from the
machine.

With both algorithms, an all-reduce is a reduce-scatter and an all-gather. In an all-to-all, every rank sends 1/n of its
input directly to each other rank; what it sends to other nodes shares the node's link with all ranks there. The host
time to launch a collective is not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from zeroshard.planner.machines.machine import Machine

PASSES: Final = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}
TREE_RATE_FRACTION = 0.5  # relative to a ring: [Note: predicting collective time]


@dataclass(frozen=True)
class GroupTopology:
    """How the ranks of a group are distributed over nodes.

    >>> GroupTopology.from_stride(devices=8, ranks=4, stride=4)  # the data axis with 4 tensor ranks, on two nodes
    GroupTopology(ranks=4, nodes=2, max_ranks_per_node=2, concurrent_groups=4)
    """

    ranks: int
    nodes: int  # that it spans
    max_ranks_per_node: int  # largest number of its ranks on one node
    concurrent_groups: int  # groups that share a node's inter-node link

    @classmethod
    def from_stride(cls, devices: int, ranks: int, stride: int) -> GroupTopology:
        """Return the group of every ``stride``-th device, starting at the first device of a node."""
        nodes = ranks if stride >= devices else (ranks - 1) * stride // devices + 1
        return cls(ranks, nodes, min(ranks, ceil(devices / stride)), min(stride, devices))

    @property
    def ring_hops(self) -> tuple[int, int]:
        """Intra-node and inter-node hops of a ring."""
        return self.ranks - self.nodes, self.nodes - 1

    @property
    def tree_hops(self) -> tuple[int, int]:
        """Intra-node and inter-node hops of a tree."""
        return ceil(log2(self.max_ranks_per_node)), ceil(log2(self.nodes))


def collective_seconds(machine: Machine, kind: str, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Return the network time of one collective in seconds: [Note: predicting collective time].

    ``nbytes`` is the size of an all-gather's output, a reduce-scatter's or all-to-all's input, or an all-reduce's
    tensor, which is moved twice.

    >>> from zeroshard.planner.machines.machine import Link, Machine
    >>> inside, outside = Link(bandwidth=100e9, latency=0), Link(bandwidth=80e9, latency=0)
    >>> machine = Machine.resolve("h100", inside=inside, outside=outside)
    >>> collective_seconds(machine, "all-gather", 1e9, ranks=8)
    0.00875
    >>> collective_seconds(machine, "all-reduce", 1e9, ranks=2, stride=8)  # 8 such groups share a node's link
    0.1
    """
    if kind not in PASSES:
        raise ValueError(f"kind must be one of {', '.join(PASSES)}, got {kind!r}")
    for name, value in (("ranks", ranks), ("stride", stride)):
        if value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if nbytes < 0:
        raise ValueError(f"nbytes must be at least 0, got {nbytes!r}")
    if ranks == 1:
        return 0.0
    group = GroupTopology.from_stride(machine.devices, ranks, stride)
    if kind == "all-to-all":
        return _all_to_all_seconds(machine, group, nbytes)
    transfer = nbytes * (ranks - 1) / ranks / link_rate(machine, group)
    return PASSES[kind] * min(
        transfer + latency_seconds(machine, group.ring_hops),
        transfer / TREE_RATE_FRACTION + latency_seconds(machine, group.tree_hops),
    )


def _all_to_all_seconds(machine: Machine, group: GroupTopology, nbytes: float) -> float:
    local = group.max_ranks_per_node
    seconds = nbytes * (group.ranks - 1) / group.ranks / machine.inside.bandwidth
    if group.nodes > 1:
        node_bytes = group.concurrent_groups * local * nbytes * (group.ranks - local) / group.ranks
        seconds = max(seconds, node_bytes / machine.outside.bandwidth)
    return seconds + latency_seconds(machine, group.tree_hops)


def link_rate(machine: Machine, group: GroupTopology) -> float:
    """Return the bytes/s that a rank of the group sends and receives while all concurrent groups communicate.

    >>> from zeroshard.planner.machines.machine import Machine
    >>> dgx2 = Machine.resolve("dgx2")
    >>> link_rate(dgx2, GroupTopology.from_stride(16, ranks=64, stride=16)) == dgx2.outside.bandwidth / 16
    True
    """
    inside, outside = machine.inside.bandwidth, machine.outside.bandwidth
    return inside if group.nodes == 1 else min(inside, outside / group.concurrent_groups)


def latency_seconds(machine: Machine, hops: tuple[int, int]) -> float:
    """Return the latency of intra-node and inter-node hops; inter-node hops are never the faster ones."""
    intra_node = machine.inside.latency
    return hops[0] * intra_node + hops[1] * max(intra_node, machine.outside.latency)
