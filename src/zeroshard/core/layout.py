"""Layout: which elements of a flat a rank has, and how a state gets from some placements to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache

import torch

from zeroshard.core.axis import Axis
from zeroshard.core.placement import Placement, Placements


@dataclass(frozen=True)
class Hop:
    """One collective of a redistribution: over one axis, from some elements of the flat to others."""

    axis: Axis
    is_gather: bool
    source: slice
    target: slice


class Layout:
    """How the elements of a flat are divided: over the innermost axis first, each part over the next one.

    Two nodes (outer axis) of two ranks::

        flat    |     rank 0 of each node     |     rank 1 of each node     |
        part    |   node 0     |   node 1     |   node 0     |   node 1     |

    So the ranks that communicate over slow links have neighbouring parts, and each hop is one collective over
    neighbouring elements: an all-gather goes from the outermost axis to the innermost, a reduction back.
    """

    def __init__(self, axes: tuple[Axis, ...], numel: int) -> None:
        """``numel`` is divisible by the number of ranks."""
        self.axes = axes
        self.numel = numel
        self.ranks = math.prod(axis.size for axis in axes)
        self.part_numel = numel // self.ranks
        self.replicated: Placements = (Placement.REPLICATE,) * len(axes)
        self.partial: Placements = (Placement.PARTIAL,) * len(axes)
        # the elements that this rank has, by placements
        self.span: Callable[[Placements], slice] = cache(self._find_span)
        # the collectives that bring a state from some placements to others
        self.hops: Callable[[Placements, Placements], list[Hop]] = cache(self._find_hops)

    def _find_span(self, placements: Placements) -> slice:
        start = 0
        size = self.numel
        for axis, placement in zip(reversed(self.axes), reversed(placements), strict=True):
            if placement is Placement.SHARD:
                size //= axis.size
                start += axis.rank * size
        return slice(start, start + size)

    def counts(self, placements: Placements) -> bool:
        """Return whether this rank adds its elements to a sum over all ranks that counts every element once."""
        pairs = zip(self.axes, placements, strict=True)
        return all(axis.rank == 0 or placement is Placement.SHARD for axis, placement in pairs)

    def _find_hops(self, placements: Placements, to: Placements) -> list[Hop]:
        now = list(placements)
        found = []
        dims = range(len(self.axes))
        gathers = [dim for dim in dims if now[dim] is Placement.SHARD and to[dim] is Placement.REPLICATE]
        reductions = [dim for dim in reversed(dims) if now[dim] is Placement.PARTIAL and to[dim] is not now[dim]]
        for dim in gathers + reductions:
            is_gather = now[dim] is Placement.SHARD
            source = self.span(tuple(now))
            now[dim] = to[dim]
            if self.axes[dim].size > 1:
                found.append(Hop(self.axes[dim], is_gather, source, self.span(tuple(now))))
        return found

    def redistribute(
        self,
        buffer: torch.Tensor,
        placements: Placements,
        to: Placements,
        *,
        origin: int = 0,
        part: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        is_averaged: bool = False,
    ) -> Generator[None, None, torch.Tensor]:
        """Bring values to other placements, in place: a generator that yields while a collective is under way.

        ``buffer`` begins at element ``origin`` of the flat. ``part``: this rank's values, which are not there yet. With
        ``output``, the result of a reduce-scatter goes there. Return where a reduction has left its result.
        """
        if part is not None:
            own = self.span(placements)
            buffer[own.start - origin : own.stop - origin].copy_(part)
        hops = self.hops(placements, to)
        values = buffer
        for hop in hops:
            axis = hop.axis
            target = buffer[hop.target.start - origin : hop.target.stop - origin]
            complete = None
            if hop.is_gather:
                work = axis.start_all_gather(target, buffer[hop.source.start - origin : hop.source.stop - origin])
            elif hop.source == hop.target:
                work = axis.start_all_reduce(values, is_averaged)
            else:
                if output is not None and hop.target == hops[-1].target:
                    target = output
                work, complete = axis.start_reduce_scatter(target, values, is_averaged)
                values = target
            yield
            axis.wait(work)
            if complete is not None:
                complete()
        return values
