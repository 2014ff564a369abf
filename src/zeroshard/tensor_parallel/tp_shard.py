"""TPShard: which elements of a parameter each rank of the tensor axis holds.

[Note: tensor-parallel shards]
Tensor parallelism shards a parameter along one dimension. Usually each rank holds one range of it. Fused matrices
(query, key and value in one) are sharded within each fused matrix instead, because a rank needs its heads' rows of all
three. Its shard is then several ranges, packed contiguously::

    full, 6 heads' rows      | q0 q1 | k0 k1 | v0 v1 |
    rank 0 of 2 holds        | q0 k0 v0 |
    rank 1 of 2 holds        | q1 k1 v1 |

ZeRO does not depend on this: it treats the rank's TP shard as the parameter. Only code that exchanges values with other
ranks does (checkpoints, full parameters, initial values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeroshard.sharding import Range


@dataclass(frozen=True)
class TPShard:
    """How one parameter is sharded along the tensor axis.

    >>> shard = TPShard.split_evenly((4, 2), dim=0, ranks=2, rank=1)
    >>> shard.slice(torch.arange(8).view(4, 2))
    tensor([[4, 5],
            [6, 7]])
    >>> fused = TPShard.split_evenly((6, 1), dim=0, ranks=2, rank=0, num_fused=3)
    >>> fused.slice(torch.arange(6).view(6, 1)).flatten()
    tensor([0, 2, 4])
    """

    full_shape: tuple[int, ...]
    """Shape of the full parameter."""
    dim: int
    """The sharded dimension."""
    rank_ranges: tuple[tuple[Range, ...], ...]
    """Per rank, its ranges along ``dim``, in the order of its shard."""
    rank: int
    """This rank on the tensor axis."""

    @classmethod
    def split_evenly(cls, shape: Sequence[int], dim: int, ranks: int, rank: int, num_fused: int = 1) -> TPShard:
        """Split each of ``num_fused`` equal parts of ``dim`` like ``torch.chunk``: the last ranks may get less."""
        dim %= len(shape)
        length, remainder = divmod(shape[dim], num_fused)
        if remainder:
            raise ValueError(f"a dimension of {shape[dim]} elements cannot be split into {num_fused} equal parts")
        max_length = -(-length // ranks)
        bounds = [min(index * max_length, length) for index in range(ranks + 1)]
        ranges = tuple(
            tuple(
                Range(fused_index * length + bounds[r], fused_index * length + bounds[r + 1])
                for fused_index in range(num_fused)
            )
            for r in range(ranks)
        )
        return cls(tuple(shape), dim, ranges, rank)

    @property
    def local_shape(self) -> torch.Size:
        return self.shape_on_rank(self.rank)

    def shape_on_rank(self, rank: int) -> torch.Size:
        length = sum(range_.numel for range_ in self.rank_ranges[rank])
        return torch.Size((*self.full_shape[: self.dim], length, *self.full_shape[self.dim + 1 :]))

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks' shards, concatenated, are the full parameter's elements in order."""
        is_outermost = all(length == 1 for length in self.full_shape[: self.dim])
        ranges = [range_ for rank_ranges in self.rank_ranges for range_ in rank_ranges]
        return is_outermost and all(a.end == b.start for a, b in pairwise(ranges))

    def offset_of_rank(self, rank: int) -> int:
        """Return the number of elements that the ranks before ``rank`` hold."""
        return sum(self.shape_on_rank(other).numel() for other in range(rank))

    def slice(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return a rank's shard of a full tensor; by default this rank's."""
        ranges = self.rank_ranges[self.rank if rank is None else rank]
        parts = [full.narrow(self.dim, range_.start, range_.numel) for range_ in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def write(self, shard: torch.Tensor, rank: int, full: torch.Tensor) -> None:
        """Copy a rank's shard to its ranges in a full tensor."""
        offset = 0
        for range_ in self.rank_ranges[rank]:
            full.narrow(self.dim, range_.start, range_.numel).copy_(shard.narrow(self.dim, offset, range_.numel))
            offset += range_.numel
