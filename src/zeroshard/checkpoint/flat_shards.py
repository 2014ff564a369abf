"""The local shards of one tensor, as a tensor subclass for ``torch.distributed.checkpoint`` (DCP).

[Note: flat shards]
A shard starts and ends anywhere in a parameter, so the local part of a parameter is not a rectangle. Every tensor is
therefore saved as it is in memory: flattened, with each rank writing some 1-D shards. DCP asks a tensor for its chunks
with a protocol of three methods (``torch/distributed/_checkpointable.py``). It finds the overlaps of saved and
requested shards, so ranks, stages and buckets may differ between save and load.

The elements of a tensor are stored in the order of its strides. A channels-last convolution has another order of
dimensions than a contiguous one, and a tensor-parallel parameter is stored TP shard by TP shard: see [Note: element
order of tensor-parallel tensors]. The index records this element order. A tensor requested in another element order is
read in full and reordered (:class:`ReorderedTensor`), one tensor at a time, by the ranks that own elements of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeroshard.checkpoint.element_order import ElementOrder
from zeroshard.sharding import Range

ShardList = Sequence[tuple[Range, torch.Tensor]]  # range in the flattened tensor, and its values: 1-D, contiguous


class FlatShards(torch.Tensor):
    """A flattened tensor of ``numel`` elements, with this rank's ``shards``. It has no storage of its own.

    >>> chunks = FlatShards(6, torch.float32, [(Range(2, 4), torch.ones(2))])
    >>> [(list(c.offsets), list(c.sizes)) for c in chunks.__create_chunk_list__()]
    [([2], [2])]
    """

    shards_by_start: dict[int, torch.Tensor]
    """The shards by their first element."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numel: int, dtype: torch.dtype, shards: ShardList) -> FlatShards:
        """Create the wrapper; DCP only reads its size, dtype and chunks."""
        wrapper: FlatShards = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=dtype)
        wrapper.shards_by_start = {element_range.start: tensor for element_range, tensor in shards}
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: the wrapper has no data to compute with."""
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
        """Called after ``numel`` elements have been read."""

    def release(self) -> None:
        """Drop the references to the values: DCP's plans may keep the wrapper alive until garbage collection."""
        self.shards_by_start = {}


class ReorderedTensor(FlatShards):
    """A tensor that was saved in another element order: read in full, then reordered into the target shards."""

    target_shards: ShardList  # in ``target_order``
    full_shape: tuple[int, ...]
    saved_order: ElementOrder
    target_order: ElementOrder
    remaining_numel: int  # elements not read yet

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        saved_order: ElementOrder,
        target_order: ElementOrder,
        shards: ShardList,
    ) -> ReorderedTensor:
        """Create the wrapper; ``shards`` are in ``target_order``."""
        tensor: ReorderedTensor = FlatShards.__new__(cls, torch.Size(shape).numel(), dtype, [])  # type: ignore[assignment]
        tensor.target_shards, tensor.remaining_numel = shards, tensor.numel()
        tensor.full_shape, tensor.saved_order, tensor.target_order = shape, saved_order, target_order
        return tensor

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([0]), self.size())] if self.target_shards else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if 0 not in self.shards_by_start:
            self.shards_by_start[0] = torch.empty(self.numel(), dtype=self.dtype)
        return self.shards_by_start[0]

    def on_elements_read(self, numel: int) -> None:
        """When all elements are read, copy them into the target shards in the new order, and free the buffer."""
        self.remaining_numel -= numel
        if self.remaining_numel == 0:
            full_tensor = self.saved_order.unflatten(self.shards_by_start.pop(0), self.full_shape)
            start, end = min(r.start for r, _ in self.target_shards), max(r.end for r, _ in self.target_shards)
            flat = self.target_order.flatten(full_tensor, Range(start, end))  # only the local part
            for element_range, tensor in self.target_shards:
                tensor.copy_(flat[element_range.start - start : element_range.end - start])

    def release(self) -> None:
        """Drop the references to the values and targets."""
        super().release()
        self.target_shards = []
