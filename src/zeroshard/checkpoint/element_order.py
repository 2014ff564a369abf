"""Order: in which order the elements of a tensor make a line.

[Note: lines of divided tensors]
Every tensor is saved as a line of elements, of which a rank holds stretches (see [Note: one-dimensional chunks]).
Where the tensor is divided along a tensor axis (see [Note: shares]), shards are cut from what each tensor rank has. Its
line is therefore the ranks' parts, one behind the other, each in the order it has in memory. A weight of two rows and
four columns, divided by columns over two ranks::

    whole     a b c d        rank 0's part   a b        rank 1's part   c d        line   a b e f c d g h
              e f g h                        e f                        g h

A division along the outermost dimension leaves the line as it was. Nothing is recorded of it, and such a tensor loads
stretch by stretch wherever it is divided so, by however many ranks, or not at all. Of columns and of fused matrices the
order records the division: without it their line means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from zeroshard.sharding.layout import Range
from zeroshard.tensor_parallel.tp_shard import TPShard


@dataclass(frozen=True)
class ElementOrder:
    """The order of a tensor's elements in its line.

    >>> columns = ElementOrder((0, 1), 1, ((Range(0, 2),), (Range(2, 4),)))
    >>> line = columns.flatten(torch.arange(8).view(2, 4))
    >>> line
    tensor([0, 1, 4, 5, 2, 3, 6, 7])
    >>> columns.unflatten(line, (2, 4))
    tensor([[0, 1, 2, 3],
            [4, 5, 6, 7]])
    """

    dim_order: tuple[int, ...]
    """The dimensions as they lie in memory, outermost first."""
    tp_dim: int | None = None
    """The dimension along which the tensor is divided into parts; None: the line is one part, the whole."""
    tp_ranges: tuple[tuple[Range, ...], ...] = ()
    """Of each part, its stretches along that dimension. No part is empty, and no two stretches of one adjoin."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, tp_shard: TPShard | None = None) -> ElementOrder:
        """The order of a dense tensor's line, or of the whole of which the tensor is this rank's ``share``.

        >>> ElementOrder.from_tensor(torch.empty(2, 3).t()).dim_order
        (1, 0)
        >>> rows = TPShard.split_evenly((4, 3), dim=0, ranks=2, rank=0)
        >>> ElementOrder.from_tensor(torch.empty(2, 3), rows) == ElementOrder.from_tensor(torch.empty(4, 3))
        True
        """
        dims = tuple(range(tensor.dim()))
        if not tensor.is_contiguous():
            dims = tuple(sorted(dims, key=lambda dimension: -tensor.stride()[dimension]))
        if tp_shard is None:
            return cls(dims)
        spans = tuple(part for part in map(_merge_adjacent, tp_shard.rank_ranges) if part)
        outermost = all(tp_shard.full_shape[dimension] == 1 for dimension in dims[: dims.index(tp_shard.dim)])
        ascending = all(a.end == b.start for a, b in pairwise(span for part in spans for span in part))
        in_line = ascending and (outermost or len(spans) == 1)
        return cls(dims) if in_line else cls(dims, tp_shard.dim, spans)

    @property
    def is_row_major(self) -> bool:
        """Whether the line is the elements as the tensor's indices count them."""
        return self.tp_dim is None and self.dim_order == tuple(range(len(self.dim_order)))

    def flatten(self, full_tensor: torch.Tensor, element_range: Range | None = None) -> torch.Tensor:
        """The line of a whole tensor, or its elements ``within``; a view where it can be one."""
        element_range = Range(0, full_tensor.numel()) if element_range is None else element_range
        share, found, at = self._tp_shard(full_tensor.shape), [], 0
        for number, shape in enumerate(self._shard_shapes(full_tensor.shape)):
            common = element_range.intersect(Range(at, at + shape.numel()))
            if common is not None:
                part = full_tensor if share is None else share.slice(full_tensor, number)
                found.append(part.permute(self.dim_order).reshape(-1)[common.start - at : common.end - at])
            at += shape.numel()
        if not found:
            return full_tensor.new_empty(0)
        return found[0] if len(found) == 1 else torch.cat(found)

    def unflatten(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of a line; a view of it where the tensor is not divided."""
        share, at = self._tp_shard(shape), 0
        if share is None:
            return self._unflatten_shard(flat, shape)
        whole = flat.new_empty(torch.Size(shape))
        for number, part in enumerate(self._shard_shapes(shape)):
            share.write(self._unflatten_shard(flat[at : at + part.numel()], part), number, whole)
            at += part.numel()
        return whole

    def _tp_shard(self, shape: Sequence[int]) -> TPShard | None:
        return None if self.tp_dim is None else TPShard(tuple(shape), self.tp_dim, self.tp_ranges, 0)

    def _shard_shapes(self, shape: Sequence[int]) -> list[torch.Size]:
        """Of the parts."""
        share = self._tp_shard(shape)
        return (
            [torch.Size(shape)]
            if share is None
            else [share.shape_on_rank(number) for number in range(len(self.tp_ranges))]
        )

    def _unflatten_shard(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A part of the line in its shape."""
        in_memory = flat.view([shape[dimension] for dimension in self.dim_order])
        return in_memory.permute([self.dim_order.index(dimension) for dimension in range(len(shape))])

    def to_json(self) -> list[int] | dict[str, Any]:
        """What stands in the index: the dimensions alone where the tensor is not divided."""
        if self.tp_dim is None:
            return list(self.dim_order)
        spans = [[[span.start, span.end] for span in part] for part in self.tp_ranges]
        return {"dims": list(self.dim_order), "divided": self.tp_dim, "spans": spans}

    @classmethod
    def from_json(cls, data: Any, shape: Sequence[int]) -> ElementOrder:
        """Read what :meth:`to_json` gave, of a tensor of this shape; raises ValueError where it cannot be one of it.

        >>> ElementOrder.from_json({"dims": [0, 1], "divided": 1, "spans": [[[0, 2]], [[3, 4]]]}, (2, 4))
        Traceback (most recent call last):
            ...
        ValueError: parts that are not all of its dimension 1, 0 to 4: [[[0, 2]], [[3, 4]]]
        """
        entry = data if isinstance(data, dict) else {"dims": data}
        dims, divided, count = entry.get("dims"), entry.get("divided", -1), len(shape)
        if not isinstance(dims, list) or not _are_nonnegative_ints(dims) or sorted(dims) != list(range(count)):
            raise ValueError(f"an order that is not one of its {count} dimensions: {dims!r}")
        if entry is not data:
            return cls(tuple(dims))
        if not _are_nonnegative_ints([divided]) or divided not in range(count):
            raise ValueError(f"a division along dimension {divided!r}, of {count}")
        return cls(tuple(dims), divided, _parse_tp_ranges(entry.get("spans"), divided, shape[divided]))


def _parse_tp_ranges(data: Any, dimension: int, length: int) -> tuple[tuple[Range, ...], ...]:
    """Read parts which together are all of a dimension, each element once."""
    try:
        parts = tuple(tuple(Range(start, end) for start, end in part) for part in data)
        edges = sorted((span.start, span.end) for part in parts for span in part)
    except (TypeError, ValueError):
        edges = [(-1, -1)]
    ends = [0, *(end for _, end in edges)]
    adjoin = [start for start, _ in edges] == ends[:-1] and ends[-1] == length
    if not adjoin or any(not _are_nonnegative_ints(edge) or edge[0] == edge[1] for edge in edges):
        raise ValueError(f"parts that are not all of its dimension {dimension}, 0 to {length}: {data!r}")
    return parts


def _merge_adjacent(spans: Sequence[Range]) -> tuple[Range, ...]:
    """Stretches of one part without the empty ones, and with those in one that adjoin."""
    joined: list[Range] = []
    for span in spans:
        if joined and joined[-1].end == span.start:
            joined[-1] = Range(joined[-1].start, span.end)
        elif span.numel:
            joined.append(span)
    return tuple(joined)


def _are_nonnegative_ints(values: Sequence[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
