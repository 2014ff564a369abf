"""Chunks: the stretches of one tensor that this rank holds, as ``torch.distributed.checkpoint`` wants to see them.

[Note: one-dimensional chunks]
A shard begins and ends anywhere in a parameter, so what a rank holds of one is no rectangle. Every tensor is therefore
saved as what it is in memory: a line of elements, of which each rank writes some stretches. The library asks a tensor
for its chunks by a protocol of three methods (``torch/distributed/_checkpointable.py``); it finds out which saved
stretches meet which wanted ones, whatever the ranks, stages and buckets were then and are now.

The elements of a tensor lie in the order of its strides. A convolution in channels-last format has another *order* of
dimensions than a plain one, and what is divided along a tensor axis lies part by part (see [Note: lines of divided
tensors]). The index keeps the order, and a tensor that is wanted in another one than it was saved in is read whole and
turned (:class:`ReorderedTensor`), one at a time, by the ranks that hold something of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeroshard.checkpoint.element_order import ElementOrder
from zeroshard.sharding.layout import Range

ShardList = Sequence[tuple[Range, torch.Tensor]]  # elements of the line, and their values: 1-D, contiguous


class FlatShards(torch.Tensor):
    """A line of ``numel`` elements, of which this rank holds ``parts``. It has no memory of its own.

    >>> chunks = FlatShards(6, torch.float32, [(Range(2, 4), torch.ones(2))])
    >>> [(list(c.offsets), list(c.sizes)) for c in chunks.__create_chunk_list__()]
    [([2], [2])]
    """

    shards_by_start: dict[int, torch.Tensor]
    """The stretches by their first element."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numel: int, dtype: torch.dtype, shards: ShardList) -> FlatShards:
        """Make the wrapper: torch only ever asks for its size, dtype and chunks."""
        chunks: FlatShards = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=dtype)
        chunks.shards_by_start = {stretch.start: tensor for stretch, tensor in shards}
        return chunks

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: there is nothing to compute with."""
        raise NotImplementedError(f"a tensor's stretches in a checkpoint are only saved and loaded, not {func}")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([start]), torch.Size([tensor.numel()]))
            for start, tensor in self.shards_by_start.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.shards_by_start[index.offset[0] if index.offset is not None else 0]

    def on_elements_read(self, numel: int) -> None:
        """Take note that ``numel`` elements have been loaded."""

    def release(self) -> None:
        """Forget the values: torch's plans may hold the wrapper until the next collection of garbage."""
        self.shards_by_start = {}


class ReorderedTensor(FlatShards):
    """A tensor that was saved in another order than it is wanted in: read whole, then turned into its parts."""

    target_shards: ShardList  # what is wanted
    full_shape: tuple[int, ...]
    saved_order: ElementOrder
    target_order: ElementOrder
    remaining_numel: int  # elements

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        saved_order: ElementOrder,
        target_order: ElementOrder,
        shards: ShardList,
    ) -> ReorderedTensor:
        """``parts`` are stretches of the line as it is wanted."""
        turned: ReorderedTensor = FlatShards.__new__(cls, torch.Size(shape).numel(), dtype, [])  # type: ignore[assignment]
        turned.target_shards, turned.remaining_numel = shards, turned.numel()
        turned.full_shape, turned.saved_order, turned.target_order = shape, saved_order, target_order
        return turned

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([0]), self.size())] if self.target_shards else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if 0 not in self.shards_by_start:
            self.shards_by_start[0] = torch.empty(self.numel(), dtype=self.dtype)
        return self.shards_by_start[0]

    def on_elements_read(self, numel: int) -> None:
        """Turn the whole tensor when all of it is there, and let it go."""
        self.remaining_numel -= numel
        if self.remaining_numel == 0:
            whole = self.saved_order.unflatten(self.shards_by_start.pop(0), self.full_shape)
            first, last = min(s.start for s, _ in self.target_shards), max(s.end for s, _ in self.target_shards)
            line = self.target_order.flatten(whole, Range(first, last))  # of a divided tensor, this rank's part alone
            for stretch, tensor in self.target_shards:
                tensor.copy_(line[stretch.start - first : stretch.end - first])

    def release(self) -> None:
        """Forget the values."""
        super().release()
        self.target_shards = []
