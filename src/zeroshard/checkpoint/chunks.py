"""Chunks: the stretches of one tensor that this rank holds, as ``torch.distributed.checkpoint`` wants to see them.

[Note: one-dimensional chunks]
A shard begins and ends anywhere in a parameter, so what a rank holds of one is no rectangle. Every tensor is therefore
saved as what it is in memory: a line of elements, of which each rank writes some stretches. The library asks a tensor
for its chunks by a protocol of three methods (``torch/distributed/_checkpointable.py``); it finds out which saved
stretches meet which wanted ones, whatever the ranks, stages and buckets were then and are now.

The elements of a tensor lie in the order of its strides. A convolution in channels-last format has another *order* of
dimensions than a plain one, and what is divided along a tensor axis lies part by part (see [Note: lines of divided
tensors]). The index keeps the order, and a tensor that is wanted in another one than it was saved in is read whole and
turned (:class:`Turned`), one at a time, by the ranks that hold something of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeroshard.checkpoint.order import Order
from zeroshard.layout import Range

Parts = Sequence[tuple[Range, torch.Tensor]]  # elements of the line, and their values: 1-D, contiguous


class Chunks(torch.Tensor):
    """A line of ``numel`` elements, of which this rank holds ``parts``. It has no memory of its own.

    >>> chunks = Chunks(6, torch.float32, [(Range(2, 4), torch.ones(2))])
    >>> [(list(c.offsets), list(c.sizes)) for c in chunks.__create_chunk_list__()]
    [([2], [2])]
    """

    parts: dict[int, torch.Tensor]
    """The stretches by their first element."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numel: int, dtype: torch.dtype, parts: Parts) -> Chunks:
        """Make the wrapper: torch only ever asks for its size, dtype and chunks."""
        chunks: Chunks = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=dtype)
        chunks.parts = {stretch.start: tensor for stretch, tensor in parts}
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
            for start, tensor in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index.offset[0] if index.offset is not None else 0]

    def arrived(self, numel: int) -> None:
        """Take note that ``numel`` elements have been loaded."""

    def let_go(self) -> None:
        """Forget the values: torch's plans may hold the wrapper until the next collection of garbage."""
        self.parts = {}


class Turned(Chunks):
    """A tensor that was saved in another order than it is wanted in: read whole, then turned into its parts."""

    target: Parts  # what is wanted
    whole_shape: tuple[int, ...]
    saved: Order
    wanted: Order
    missing: int  # elements

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, saved: Order, wanted: Order, parts: Parts) -> Turned:
        """``parts`` are stretches of the line as it is wanted."""
        turned: Turned = Chunks.__new__(cls, torch.Size(shape).numel(), dtype, [])  # type: ignore[assignment]
        turned.target, turned.missing = parts, turned.numel()
        turned.whole_shape, turned.saved, turned.wanted = shape, saved, wanted
        return turned

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([0]), self.size())] if self.target else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if 0 not in self.parts:
            self.parts[0] = torch.empty(self.numel(), dtype=self.dtype)
        return self.parts[0]

    def arrived(self, numel: int) -> None:
        """Turn the whole tensor when all of it is there, and let it go."""
        self.missing -= numel
        if self.missing == 0:
            whole = self.saved.whole(self.parts.pop(0), self.whole_shape)
            first, last = min(s.start for s, _ in self.target), max(s.end for s, _ in self.target)
            line = self.wanted.line(whole, Range(first, last))  # of a divided tensor, this rank's part alone
            for stretch, tensor in self.target:
                tensor.copy_(line[stretch.start - first : stretch.end - first])

    def let_go(self) -> None:
        """Forget the values."""
        super().let_go()
        self.target = []
