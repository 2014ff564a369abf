"""Share: which elements of a parameter each rank of the tensor axis holds.

[Note: shares]
Tensor parallelism divides a parameter along one of its dimensions. Mostly each rank has one stretch of it. Matrices
that a model has fused (query, key and value as one) are divided within each of the fused pieces instead, because a
rank wants its heads' part of all three; its share is then several stretches, laid one behind the other::

    whole, 6 heads' rows     | q0 q1 | k0 k1 | v0 v1 |
    rank 0 of 2 holds        | q0 k0 v0 |
    rank 1 of 2 holds        | q1 k1 v1 |

ZeRO never looks at this: to it, what the rank holds is the parameter. What leaves the rank does (checkpoints, whole
parameters, the values a model begins with).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeroshard.sharding.layout import Range


@dataclass(frozen=True)
class TPShard:
    """How one parameter is divided along the tensor axis.

    >>> share = TPShard.split_evenly((4, 2), dim=0, ranks=2, rank=1)
    >>> share.slice(torch.arange(8).view(4, 2))
    tensor([[4, 5],
            [6, 7]])
    >>> fused = TPShard.split_evenly((6, 1), dim=0, ranks=2, rank=0, num_fused=3)
    >>> fused.slice(torch.arange(6).view(6, 1)).flatten()
    tensor([0, 2, 4])
    """

    full_shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    """The dimension that is divided."""
    rank_ranges: tuple[tuple[Range, ...], ...]
    """Per rank, its stretches along ``dim``, in the order they lie in its part."""
    rank: int
    """On the tensor axis."""

    @classmethod
    def split_evenly(cls, shape: Sequence[int], dim: int, ranks: int, rank: int, num_fused: int = 1) -> TPShard:
        """Divide each of ``pieces`` equal parts of ``dim`` as ``torch.chunk`` does: the last ranks may get less."""
        dim %= len(shape)
        length, rest = divmod(shape[dim], num_fused)
        if rest:
            raise ValueError(f"a dimension of {shape[dim]} elements is not made of {num_fused} equal pieces")
        most = -(-length // ranks)
        cuts = [min(number * most, length) for number in range(ranks + 1)]
        spans = tuple(
            tuple(Range(piece * length + cuts[r], piece * length + cuts[r + 1]) for piece in range(num_fused))
            for r in range(ranks)
        )
        return cls(tuple(shape), dim, spans, rank)

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's part."""
        return self.shape_on_rank(self.rank)

    def shape_on_rank(self, rank: int) -> torch.Size:
        """The shape of a rank's part."""
        length = sum(span.numel for span in self.rank_ranges[rank])
        return torch.Size((*self.full_shape[: self.dim], length, *self.full_shape[self.dim + 1 :]))

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks' parts, one behind the other, are the elements of the whole in their order."""
        outermost = all(length == 1 for length in self.full_shape[: self.dim])
        ends = [span for spans in self.rank_ranges for span in spans]
        return outermost and all(a.end == b.start for a, b in pairwise(ends))

    def offset_of_rank(self, rank: int) -> int:
        """How many elements the ranks before this one hold."""
        return sum(self.shape_on_rank(other).numel() for other in range(rank))

    def slice(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """A rank's part of a whole tensor, this one's without ``rank``."""
        spans = self.rank_ranges[self.rank if rank is None else rank]
        parts = [full.narrow(self.dim, span.start, span.numel) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def write(self, shard: torch.Tensor, rank: int, full: torch.Tensor) -> None:
        """Copy a rank's part to where it belongs in a whole tensor."""
        at = 0
        for span in self.rank_ranges[rank]:
            full.narrow(self.dim, span.start, span.numel).copy_(shard.narrow(self.dim, at, span.numel))
            at += span.numel
