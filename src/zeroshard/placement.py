"""The table: which training states each ZeRO stage partitions. The one place that looks at a stage number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Which states are partitioned over the shard axis; the others are replicated on every rank.

    >>> Placement.of_stage(2, ranks=4)
    Placement(parameters=False, gradients=True, optimizer=True)

    Over one rank there is nothing to partition:

    >>> Placement.of_stage(3, ranks=1)
    Placement(parameters=False, gradients=False, optimizer=False)
    """

    parameters: bool  # partitioned: a unit is gathered for its computation and released after it
    gradients: bool  # partitioned: reduced inside backward; replicated: summed locally, reduced once per step
    optimizer: bool  # partitioned: each rank updates its shard, and parameters are gathered from all

    @classmethod
    def of_stage(cls, stage: int, ranks: int) -> Placement:
        """Look the stage up."""
        return _TABLE[stage] if ranks > 1 else _TABLE[0]


_TABLE = {
    # stage        parameters  gradients  optimizer states
    0: Placement(False, False, False),
    1: Placement(False, False, True),  # P_os
    2: Placement(False, True, True),  # P_os+g
    3: Placement(True, True, True),  # P_os+g+p
}
