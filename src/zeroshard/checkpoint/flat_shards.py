"""Tensors as flattened sequences of elements, with this rank's shards.

[Note: flat shards]
A shard starts and ends anywhere in a parameter, so the local part of a parameter is not a rectangle. Every tensor is
therefore saved as it is in memory: flattened, with each rank writing some 1-D shards. A load intersects the saved
ranges with those it needs, so ranks, stages and buckets may differ between save and load.
``torch.distributed.checkpoint`` is not used: its planners would find the same intersections, at the price of a tensor
subclass, two planners and two storage classes around a few lines of range arithmetic.

The elements of a tensor are stored in the order of its strides. A channels-last convolution has another order of
dimensions than a contiguous one, and a tensor-parallel parameter is stored TP shard by TP shard (the next note). The
index records this element order. A tensor requested in another element order is read in full and reordered, one tensor
at a time, by the ranks that own elements of it.

[Note: element order of tensor-parallel tensors]
If a tensor is sharded over the tensor-parallel dim (see [Note: tensor-parallel shards]), data-parallel shards are
ranges of a TP shard. The flattened tensor is therefore the concatenation of the TP shards, each in its memory order. A
weight of two rows and four columns, sharded by columns over two ranks::

    full      a b c d        TP shard 0   a b        TP shard 1   c d        flattened   a b e f c d g h
              e f g h                     e f                     g h

Sharding along the outermost dimension does not change the order. It is not recorded, and such a tensor loads shard by
shard with any number of TP ranks, or without tensor parallelism. For column shards and fused matrices the index records
the TP ranges: without them the flattened tensor cannot be interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch

from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.json_codec import are_sizes
from zeroshard.sharding import Range
from zeroshard.tensor_parallel import TPShard
from zeroshard.utils.safetensors_files import TensorInfo

Shard = tuple[Range, torch.Tensor]  # range in the flattened tensor, and its values: 1-D, contiguous


@dataclass(frozen=True)
class ElementOrder:
    """The order of a tensor's elements when it is flattened.

    >>> columns = ElementOrder((0, 1), 1, ((Range(0, 2),), (Range(2, 4),)))
    >>> flat = columns.flatten(torch.arange(8).view(2, 4), Range(0, 8))
    >>> flat
    tensor([0, 1, 4, 5, 2, 3, 6, 7])
    >>> columns.unflatten(flat, (2, 4))
    tensor([[0, 1, 2, 3],
            [4, 5, 6, 7]])
    """

    dim_order: tuple[int, ...]
    """The dimensions in memory order, outermost first."""
    tp_dim: int | None = None
    """The dimension along which the tensor is split into TP shards; None: not split."""
    tp_ranges: tuple[tuple[Range, ...], ...] = ()
    """The ranges of each TP shard along ``tp_dim``. No shard is empty; ranges of one shard are not adjacent."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, tp_shard: TPShard | None = None) -> ElementOrder:
        """Return the element order of a dense tensor, or of the full tensor whose local ``tp_shard`` it is.

        >>> ElementOrder.from_tensor(torch.empty(2, 3).t()).dim_order
        (1, 0)
        >>> rows = TPShard.split_evenly((4, 3), dim=0, ranks=2, rank=0)
        >>> ElementOrder.from_tensor(torch.empty(2, 3), rows) == ElementOrder.from_tensor(torch.empty(4, 3))
        True
        """
        dims = tuple(range(tensor.dim()))
        if not tensor.is_contiguous():
            dims = tuple(sorted(dims, key=lambda dim: -tensor.stride()[dim]))
        if tp_shard is None:
            return cls(dims)
        tp_ranges = tuple(shard_ranges for shard_ranges in map(_merge_adjacent, tp_shard.rank_ranges) if shard_ranges)
        is_outermost = all(tp_shard.full_shape[dim] == 1 for dim in dims[: dims.index(tp_shard.dim)])
        is_ascending = all(a.end == b.start for a, b in pairwise(chain.from_iterable(tp_ranges)))
        keeps_order = is_ascending and (is_outermost or len(tp_ranges) == 1)
        return cls(dims) if keeps_order else cls(dims, tp_shard.dim, tp_ranges)

    @property
    def is_row_major(self) -> bool:
        return self.tp_dim is None and self.dim_order == tuple(range(len(self.dim_order)))

    def flatten(self, full_tensor: torch.Tensor, element_range: Range) -> torch.Tensor:
        """Return a range of the flattened full tensor; a view if possible."""
        tp_shard, pieces, start = self._tp_shard(full_tensor.shape), [], 0
        for rank, shape in enumerate(self._shard_shapes(full_tensor.shape)):
            common = element_range.intersect(Range(start, start + shape.numel()))
            if common is not None:
                shard = full_tensor if tp_shard is None else tp_shard.slice(full_tensor, rank)
                pieces.append(shard.permute(self.dim_order).reshape(-1)[common.start - start : common.end - start])
            start += shape.numel()
        if not pieces:
            return full_tensor.new_empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def unflatten(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the full tensor of a flattened one; a view if it is not split into TP shards."""
        tp_shard, start = self._tp_shard(shape), 0
        if tp_shard is None:
            return self._unflatten_shard(flat, shape)
        full_tensor = flat.new_empty(torch.Size(shape))
        for rank, shard_shape in enumerate(self._shard_shapes(shape)):
            end = start + shard_shape.numel()
            tp_shard.write(self._unflatten_shard(flat[start:end], shard_shape), rank, full_tensor)
            start = end
        return full_tensor

    def _tp_shard(self, shape: Sequence[int]) -> TPShard | None:
        return None if self.tp_dim is None else TPShard(tuple(shape), self.tp_dim, self.tp_ranges, 0)

    def _shard_shapes(self, shape: Sequence[int]) -> list[torch.Size]:
        """Return the shape of each TP shard; without TP, the full shape."""
        tp_shard = self._tp_shard(shape)
        if tp_shard is None:
            return [torch.Size(shape)]
        return [tp_shard.shape_on_rank(rank) for rank in range(len(self.tp_ranges))]

    def _unflatten_shard(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a flattened TP shard in its shape, as a view."""
        in_memory = flat.view([shape[dim] for dim in self.dim_order])
        return in_memory.permute([self.dim_order.index(dim) for dim in range(len(shape))])

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the tensor's index entry that describe the order; none if it is row-major."""
        if self.is_row_major:
            return {}
        ranges = [[[r.start, r.end] for r in shard_ranges] for shard_ranges in self.tp_ranges]
        tp_fields = {"tensor_parallel": {"dim": self.tp_dim, "ranges": ranges}} if ranges else {}
        return {"dim_order": list(self.dim_order), **tp_fields}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], shape: Sequence[int]) -> ElementOrder:
        """Read the order from a tensor's index entry; raise ValueError if it does not fit a tensor of this shape.

        >>> ElementOrder.from_json({"tensor_parallel": {"dim": 1, "ranges": [[[0, 2]], [[3, 4]]]}}, (2, 4))
        Traceback (most recent call last):
            ...
        ValueError: TP ranges that do not cover dimension 1 (0 to 4) exactly once: [[[0, 2]], [[3, 4]]]
        """
        all_dims = list(range(len(shape)))
        dim_order, tp_fields = entry.get("dim_order", all_dims), entry.get("tensor_parallel")
        if not are_sizes(dim_order) or sorted(dim_order) != all_dims:
            raise ValueError(f"a dim_order that is not a permutation of its {len(shape)} dimensions: {dim_order!r}")
        if tp_fields is None:
            return cls(tuple(dim_order))
        tp_dim = tp_fields.get("dim") if isinstance(tp_fields, dict) else None
        if type(tp_dim) is not int or tp_dim not in all_dims:
            raise ValueError(f"a TP dimension that is not one of its {len(shape)} dimensions: {tp_dim!r}")
        return cls(tuple(dim_order), tp_dim, _parse_tp_ranges(tp_fields.get("ranges"), tp_dim, shape[tp_dim]))


def _parse_tp_ranges(data: Any, dim: int, length: int) -> tuple[tuple[Range, ...], ...]:
    """Parse the ranges of the TP shards; raise ValueError unless they cover the dimension exactly once."""
    try:
        tp_ranges = tuple(tuple(Range(start, end) for start, end in shard_ranges) for shard_ranges in data)
        edges = sorted([r.start, r.end] for r in chain.from_iterable(tp_ranges))
    except (TypeError, ValueError):
        edges = [[-1, -1]]
    ends = [0, *(end for _, end in edges)]
    is_complete = [start for start, _ in edges] == ends[:-1] and ends[-1] == length
    if not is_complete or any(not are_sizes(edge) or edge[0] == edge[1] for edge in edges):
        raise ValueError(f"TP ranges that do not cover dimension {dim} (0 to {length}) exactly once: {data!r}")
    return tp_ranges


def _merge_adjacent(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Drop empty ranges and merge adjacent ones."""
    merged: list[Range] = []
    for r in ranges:
        if merged and merged[-1].end == r.start:
            merged[-1] = Range(merged[-1].start, r.end)
        elif r.numel:
            merged.append(r)
    return tuple(merged)


@dataclass
class TensorSpec:
    """Shape, dtype and element order of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    element_order: ElementOrder

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def shard_info(self, fqn: str, start: int, numel: int) -> TensorInfo:
        """Return the name and shape that a shard has in its file: see [Note: a checkpoint's files]."""
        name = fqn.partition("/")[2]
        if self.element_order.is_row_major and numel == self.numel:
            return TensorInfo(name, self.dtype, self.shape)
        return TensorInfo(f"{name}[{start}:{start + numel}]", self.dtype, (numel,))


@dataclass
class LocalTensor(TensorSpec):
    """A tensor, and the shards of the flattened tensor that this rank owns."""

    shards: list[Shard] = field(default_factory=list)
    is_stable_until_step: bool = False
    """Whether only an optimizer step changes the tensor, so that it can be read until the next step."""
    is_on_all_tp_ranks: bool = False
    """Whether every rank of the tensor axis has the full tensor, though the parameter is divided."""

    @classmethod
    def from_full_tensor(cls, name: str, tensor: torch.Tensor) -> LocalTensor:
        """Describe a tensor that this rank has in full."""
        tensor = tensor.detach()
        element_order = ElementOrder.from_tensor(tensor)
        try:
            flat = tensor.permute(element_order.dim_order).view(-1)  # must be a view: a load writes into it
        except RuntimeError as error:
            raise CheckpointError(
                f"{name!r} is a view with gaps or overlapping elements: replace it by a contiguous tensor"
            ) from error
        shards = [(Range(0, flat.numel()), flat)] if flat.numel() else []
        return cls(tuple(tensor.shape), tensor.dtype, element_order, shards)

    def copy_from(self, full_tensor: torch.Tensor) -> None:
        """Copy this rank's elements from the full tensor; cast dtype and device."""
        if self.shards:
            start, end = min(r.start for r, _ in self.shards), max(r.end for r, _ in self.shards)
            flat = self.element_order.flatten(full_tensor, Range(start, end))  # only the local part
            for element_range, tensor in self.shards:
                tensor.copy_(flat[element_range.start - start : element_range.end - start])
