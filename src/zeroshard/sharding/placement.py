"""Which training states each ZeRO stage partitions. The only place that depends on a stage number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroshard.config.config import PARTITIONS
from zeroshard.config.offload import Offload


@dataclass(frozen=True)
class Placement:
    """Which states are partitioned over the shard axis; the others are replicated on every rank.

    ``tier_placement.py`` decides in which tier they are placed.

    >>> Placement.from_stage(2, ranks=4)
    Placement(parameters=False, gradients=True, optimizer=True, keeps_inner_shards=False, keeps_inner_sums=False)

    With one rank there is nothing to partition:

    >>> Placement.from_stage(3, ranks=1)
    Placement(parameters=False, gradients=False, optimizer=False, keeps_inner_shards=False, keeps_inner_sums=False)

    unless states are offloaded: then gradients are offloaded during backward, unit by unit. If parameters are
    offloaded, units are unsharded and resharded too, as with several ranks.

    >>> Placement.from_stage(3, ranks=1, offload=Offload(optimizer="host"))
    Placement(parameters=False, gradients=True, optimizer=False, keeps_inner_shards=False, keeps_inner_sums=False)

    or unsharding casts a unit from its master: then units are unsharded and resharded too.

    >>> Placement.from_stage(3, ranks=1, casts_master=True)
    Placement(parameters=True, gradients=False, optimizer=False, keeps_inner_shards=False, keeps_inner_sums=False)

    On a mesh with two data axes, some states may be partitioned over the inner axis only:

    >>> Placement.from_stage(3, ranks=4, partition="hierarchical-gradients")
    Placement(parameters=True, gradients=True, optimizer=True, keeps_inner_shards=True, keeps_inner_sums=True)
    """

    parameters: bool  # partitioned: a unit is unsharded for its computation and resharded after it
    gradients: bool  # partitioned: reduced inside backward; replicated: summed locally, reduced once per step
    optimizer: bool  # partitioned: each rank updates its shard, and parameters are all-gathered
    keeps_inner_shards: bool = False  # partitioned parameters are so over the inner axis only: see [Note: two hops]
    keeps_inner_sums: bool = False  # partitioned gradients are so until the last backward: see [Note: inner sums]

    @classmethod
    def from_stage(
        cls,
        stage: int,
        ranks: int,
        offload: Offload | None = None,
        replicas: int = 1,
        casts_master: bool = False,
        partition: str = "hybrid",
    ) -> Placement:
        """Return the placement of a stage; raise if states that it does not partition should be offloaded.

        ``ranks``: size of the shard axis. ``replicas``: how many such groups of ranks there are. ``casts_master``:
        unsharding casts from the masters. ``partition``: of :class:`zeroshard.Config`, if the shard axis is a product.
        """
        row = _STAGE_TABLE[stage] if ranks > 1 else _STAGE_TABLE[0]
        params_axes, grads_axes, optimizer_axes = PARTITIONS[partition]
        has_inner_params, has_inner_grads = params_axes != optimizer_axes, grads_axes != optimizer_axes
        row = replace(
            row,
            keeps_inner_shards=has_inner_params and row.parameters,
            keeps_inner_sums=has_inner_grads and row.gradients,
        )
        if has_inner_params and offload is not None and offload.parameters:
            other = "inner-gradients" if has_inner_grads else "full"
            raise ValueError(
                f"partition={partition!r} keeps parameters on the device, to gather them inside the inner axis: use "
                f"partition={other!r} to offload them"
            )
        if offload is None:
            is_single_rank = ranks * replicas == 1
            return replace(row, parameters=_STAGE_TABLE[stage].parameters) if casts_master and is_single_rank else row
        if offload.parameters and not _STAGE_TABLE[stage].parameters:
            raise ValueError(f"stage {stage} keeps full parameters on every rank: use stage=3 to offload them")
        can_offload_grads = _STAGE_TABLE[stage].gradients or ranks * replicas == 1  # unit by unit during backward
        if offload.gradients and not can_offload_grads:
            raise ValueError(f"stage {stage} keeps full gradients on every rank: use stage=2 or 3 to offload them")
        return (
            row if ranks > 1 else cls(parameters=bool(offload.parameters), gradients=can_offload_grads, optimizer=False)
        )

    def collectives_per_step(self, backwards: int) -> tuple[int, int]:
        """Return how often a step gathers each parameter, and reduces each gradient, after ``backwards`` backwards.

        Partitioned parameters are gathered in each forward and backward, others once, after the update (in an
        all-reduce, its second half). Partitioned gradients are reduced in each backward, others once.

        >>> [Placement.from_stage(stage, ranks=4).collectives_per_step(backwards=5) for stage in range(4)]
        [(1, 1), (1, 1), (1, 5), (10, 5)]
        """
        return 2 * backwards if self.parameters else 1, backwards if self.gradients else min(backwards, 1)

    def outer_collectives_per_step(self, backwards: int) -> tuple[int, int]:
        """Return the same for the outer axis of a shard axis that is a product: see [Note: two hops].

        >>> [Placement.from_stage(3, 4, partition=name).outer_collectives_per_step(5) for name in PARTITIONS]
        [(10, 5), (1, 5), (10, 5), (1, 1), (10, 1)]
        """
        gathers, reductions = self.collectives_per_step(backwards)
        return 1 if self.keeps_inner_shards else gathers, min(backwards, 1) if self.keeps_inner_sums else reductions


_STAGE_TABLE = {
    # stage        parameters  gradients  optimizer states
    0: Placement(False, False, False),
    1: Placement(False, False, True),  # P_os
    2: Placement(False, True, True),  # P_os+g
    3: Placement(True, True, True),  # P_os+g+p
}
