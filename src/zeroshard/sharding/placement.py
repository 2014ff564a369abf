"""The table: which training states each ZeRO stage partitions. The one place that looks at a stage number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroshard.config.offload import Offload


@dataclass(frozen=True)
class Placement:
    """Which states are partitioned over the shard axis; the others are replicated on every rank.

    Where they rest, on the device or further away, is ``tier_placement.py``'s.

    >>> Placement.from_stage(2, ranks=4)
    Placement(parameters=False, gradients=True, optimizer=True)

    Over one rank there is nothing to partition:

    >>> Placement.from_stage(3, ranks=1)
    Placement(parameters=False, gradients=False, optimizer=False)

    unless states rest outside the device: then units come and go, and gradients leave during backward, as over many.

    >>> Placement.from_stage(3, ranks=1, offload=Offload(optimizer="host"))
    Placement(parameters=False, gradients=True, optimizer=False)

    or a unit is cast from its master whenever it is brought: then units come and go.

    >>> Placement.from_stage(3, ranks=1, casts_master=True)
    Placement(parameters=True, gradients=False, optimizer=False)
    """

    parameters: bool  # partitioned: a unit is gathered for its computation and released after it
    gradients: bool  # partitioned: reduced inside backward; replicated: summed locally, reduced once per step
    optimizer: bool  # partitioned: each rank updates its shard, and parameters are gathered from all

    @classmethod
    def from_stage(
        cls, stage: int, ranks: int, offload: Offload | None = None, replicas: int = 1, casts_master: bool = False
    ) -> Placement:
        """Look the stage up, and refuse to offload what its ranks hold whole.

        ``ranks`` are those of the shard axis, of which there are ``replicas``. ``cast``: gathers cast masters.
        """
        row = _STAGE_TABLE[stage] if ranks > 1 else _STAGE_TABLE[0]
        if offload is None:
            alone = ranks * replicas == 1
            return replace(row, parameters=_STAGE_TABLE[stage].parameters) if casts_master and alone else row
        if offload.parameters and not _STAGE_TABLE[stage].parameters:
            raise ValueError(f"stage {stage} computes with whole parameters: to offload them, take stage=3")
        leave = _STAGE_TABLE[stage].gradients or ranks * replicas == 1  # one by one in backward
        if offload.gradients and not leave:
            raise ValueError(f"stage {stage} sums whole gradients on each rank: to offload them, take stage=2 or 3")
        return row if ranks > 1 else cls(parameters=bool(offload.parameters), gradients=leave, optimizer=False)


_STAGE_TABLE = {
    # stage        parameters  gradients  optimizer states
    0: Placement(False, False, False),
    1: Placement(False, False, True),  # P_os
    2: Placement(False, True, True),  # P_os+g
    3: Placement(True, True, True),  # P_os+g+p
}
