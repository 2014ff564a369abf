"""Compute the traffic of a step on each rank from a model's shapes and the options, without a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zeroshard.config.config import Config
from zeroshard.planner.state_sizes import state_sizes
from zeroshard.planner.step_time import ALL_HOPS, INNER_HOP, Hop, Mesh, StepConditions
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.whole_params import find_whole_params


@dataclass(frozen=True)
class PredictedTraffic:
    """Bytes of collectives by kind, as :func:`zeroshard.report` counts them for one step.

    The collectives of tensor parallelism and of activation checkpointing are not included, nor are all-reduces of a few
    numbers.
    """

    step: dict[str, int]
    """Of every step."""
    average: dict[str, int] = field(default_factory=dict)
    """Of an average of replicas that train alone (``Config.local_steps``), in addition."""


def predict_traffic(
    model: nn.Module,
    *,
    ranks: int,
    tensor: int = 1,
    replicas: int = 1,
    accumulate: int = 1,
    optimizer: str = "adamw",
    on_gpu: bool = True,
    **options: Any,
) -> PredictedTraffic:
    """Predict the traffic of each of ``ranks`` after :func:`zeroshard.shard` with ``options``.

    The arguments are those of :func:`zeroshard.planner.predict_memory`; ``accumulate`` is the number of backwards per
    step. With Muon, the result is for the rank that owns the most. Every parameter is assumed to be used once in each
    forward and backward.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = nn.Linear(1024, 1024, bias=False)
    >>> predict_traffic(model, ranks=4, stage=3, precision="bf16").step == {
    ...     "all-gather": 2 * 2 * 1024**2, "reduce-scatter": 2 * 1024**2}
    True
    """
    config = Config(**options)
    strategy = Strategy(stage=config.stage, replicas=replicas, local_steps=config.local_steps)
    conditions = StepConditions(
        ranks=ranks,
        replicas=replicas,
        tensor=tensor,
        accumulate=accumulate,
        local_steps=config.local_steps,
        average_ranks=strategy.average_ranks(ranks // tensor),
    )
    whole = find_whole_params(model, optimizer)
    sizes = state_sizes(
        model, config, ranks=ranks // replicas, tensor=tensor, replicas=replicas, on_gpu=on_gpu, whole=whole
    )
    mesh, placement = Mesh(sizes, conditions), sizes.placement
    gathers, reductions = placement.collectives_per_step(accumulate)
    hops: list[Hop] = []
    for unit in sizes.units:
        if placement.parameters:
            hops += mesh.gather_hops(unit, is_stale=unit.trained_numel > 0)
            hops += (gathers - 1) * mesh.gather_hops(unit, is_stale=False)
        hops += mesh.refresh_hops(unit)
        outer_reductions = placement.outer_collectives_per_step(accumulate)[1]
        hops += outer_reductions * mesh.reduce_hops(unit, ALL_HOPS)
        hops += (reductions - outer_reductions) * mesh.reduce_hops(unit, INNER_HOP)
    if sizes.whole is not None:
        hops += mesh.whole_hops(sizes.whole)
    average = mesh.average_hops() if conditions.average_ranks > 1 else []
    return PredictedTraffic(_count_bytes(hops), _count_bytes(average))


def _count_bytes(hops: Iterable[Hop]) -> dict[str, int]:
    counted = Counter[str]()
    for hop in hops:
        counted[hop.name] += round(hop.counted_bytes)
    return {kind: nbytes for kind, nbytes in counted.items() if nbytes}
