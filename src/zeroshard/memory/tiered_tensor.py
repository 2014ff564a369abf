"""Spread: one line of elements whose stretches rest in different tiers of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zeroshard.sharding.layout import Range


@dataclass(eq=False)
class TierSegment:
    """Neighbouring elements of a line, in one tensor."""

    span: Range
    tier: str
    tensor: torch.Tensor

    @property
    def is_offloaded(self) -> bool:
        """Whether it rests outside the device."""
        return self.tier != "device"


class TieredTensor:
    """Stretches that lie end to end.

    >>> halves = [TierSegment(Range(0, 2), "device", torch.zeros(2)), TierSegment(Range(2, 5), "host", torch.ones(3))]
    >>> spread = TieredTensor(halves)
    >>> spread.write(Range(1, 3), torch.tensor([7.0, 8.0]))
    >>> spread.read(Range(0, 4), torch.device("cpu"))
    tensor([0., 7., 8., 1.])
    """

    def __init__(self, segments: Sequence[TierSegment]) -> None:
        self.segments = list(segments)

    @property
    def dtype(self) -> torch.dtype:
        """Of all stretches."""
        return self.segments[0].tensor.dtype

    def views_in(self, span: Range) -> Iterator[tuple[Range, torch.Tensor]]:
        """Yield what of each stretch lies in ``span``: its elements on the line, and a view of their values."""
        for stretch, common in self.segments_in(span):
            yield common, stretch.tensor[common.start - stretch.span.start : common.end - stretch.span.start]

    def segments_in(self, span: Range) -> Iterator[tuple[TierSegment, Range]]:
        """Yield the stretches that ``span`` meets, each with the elements they have in common."""
        for stretch in self.segments:
            common = stretch.span.intersect(span)
            if common is not None:
                yield stretch, common

    def read(self, span: Range, device: torch.device) -> torch.Tensor:
        """The values of ``span`` on a device: a view where they lie there in one stretch, else a copy."""
        found = list(self.views_in(span))
        if len(found) == 1 and found[0][1].device == device:
            return found[0][1]
        values = torch.empty(span.numel, dtype=self.dtype, device=device)
        for common, view in found:
            values[common.start - span.start : common.end - span.start].copy_(view)
        return values

    def write(self, span: Range, values: torch.Tensor) -> None:
        """Put values into ``span``."""
        for common, view in self.views_in(span):
            view.copy_(values[common.start - span.start : common.end - span.start])
