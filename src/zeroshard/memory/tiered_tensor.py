"""TieredTensor: a 1-D tensor whose segments are placed in different memory tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zeroshard.sharding import Range


@dataclass(eq=False)
class TierSegment:
    """Consecutive elements of a tiered tensor, stored in one tensor."""

    span: Range
    tier: str
    tensor: torch.Tensor

    @property
    def is_offloaded(self) -> bool:
        """Whether it is placed outside the device."""
        return self.tier != "device"


class TieredTensor:
    """Contiguous segments, in order; none if it is empty.

    >>> halves = [TierSegment(Range(0, 2), "device", torch.zeros(2)), TierSegment(Range(2, 5), "host", torch.ones(3))]
    >>> tiered = TieredTensor(halves, torch.float32)
    >>> tiered.write(Range(1, 3), torch.tensor([7.0, 8.0]))
    >>> tiered.read(Range(0, 4), torch.device("cpu"))
    tensor([0., 7., 8., 1.])
    """

    def __init__(self, segments: Sequence[TierSegment], dtype: torch.dtype) -> None:
        self.segments = list(segments)
        self.dtype = dtype

    def views_in(self, span: Range) -> Iterator[tuple[Range, torch.Tensor]]:
        """Yield the part of each segment inside ``span``: its range, and a view of its values."""
        for segment, overlap in self.segments_in(span):
            yield overlap, segment.tensor[overlap.start - segment.span.start : overlap.end - segment.span.start]

    def segments_in(self, span: Range) -> Iterator[tuple[TierSegment, Range]]:
        """Yield the segments that overlap ``span``, each with the overlapping range."""
        for segment in self.segments:
            overlap = segment.span.intersect(span)
            if overlap is not None:
                yield segment, overlap

    def read(self, span: Range, device: torch.device) -> torch.Tensor:
        """Return the values of ``span`` on a device: a view if one segment there holds them all, else a copy."""
        views = list(self.views_in(span))
        if len(views) == 1 and views[0][1].device == device:
            return views[0][1]
        values = torch.empty(span.numel, dtype=self.dtype, device=device)
        for overlap, view in views:
            values[overlap.start - span.start : overlap.end - span.start].copy_(view)
        return values

    def write(self, span: Range, values: torch.Tensor) -> None:
        for overlap, view in self.views_in(span):
            view.copy_(values[overlap.start - span.start : overlap.end - span.start])
