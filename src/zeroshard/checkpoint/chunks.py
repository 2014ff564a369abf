"""Chunks: the stretches of one tensor that this rank holds, as ``torch.distributed.checkpoint`` wants to see them.

[Note: one-dimensional chunks]
A shard begins and ends anywhere in a parameter, so what a rank holds of one is no rectangle. Every tensor is therefore
saved as what it is in memory: a line of elements, of which each rank writes some stretches. The library asks a tensor
for its chunks by a protocol of three methods (``torch/distributed/_checkpointable.py``); it finds out which saved
stretches meet which wanted ones, whatever the ranks, stages and buckets were then and are now.

The elements of a tensor lie in the order of its strides. A convolution in channels-last format has another *order* of
dimensions than a plain one: the index keeps it, and a tensor that is wanted in another order than it was saved in is
read whole and turned (:class:`Turned`), one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

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
    """A tensor that was saved in another order of dimensions: read whole, then turned into its parts."""

    target: Parts  # what is wanted
    shape_then: tuple[int, ...]  # of the line as it was saved
    turn: list[int]  # how that shape is turned
    missing: int  # elements

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        saved: tuple[int, ...],
        wanted: tuple[int, ...],
        parts: Parts,
    ) -> Turned:
        """``saved`` and ``wanted`` are orders of dimensions, outermost first; ``parts`` are stretches as wanted."""
        turned: Turned = Chunks.__new__(cls, torch.Size(shape).numel(), dtype, [])  # type: ignore[assignment]
        turned.target, turned.missing = parts, turned.numel()
        turned.shape_then = tuple(shape[dimension] for dimension in saved)
        turned.turn = [saved.index(dimension) for dimension in wanted]
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
            line = self.parts.pop(0).view(self.shape_then).permute(self.turn).contiguous().view(-1)
            for stretch, tensor in self.target:
                tensor.copy_(line[stretch.start : stretch.end])

    def let_go(self) -> None:
        """Forget the values."""
        super().let_go()
        self.target = []


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of a dense tensor's dimensions in memory, outermost first.

    >>> order_of(torch.empty(2, 3)), order_of(torch.empty(2, 3).t())
    ((0, 1), (1, 0))
    """
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    return tuple(sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride()[dimension]))


def line_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory; a view."""
    return tensor.permute(order_of(tensor)).view(-1)
