"""Form: how a tensor lies in memory, so that its elements can be laid in a line, divided, and put back as they were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch


@dataclass(frozen=True)
class TensorLayout:
    """Shape, strides and dtype of a tensor.

    Recomputation is given inputs in the strides they had: other strides may choose other kernels, and those other bits.

    >>> tensor = torch.arange(6.0).view(2, 3).t()
    >>> form = TensorLayout.from_tensor(tensor)
    >>> form.flatten(tensor)
    tensor([0., 1., 2., 3., 4., 5.])
    >>> form.unflatten(form.flatten(tensor)).stride()
    (1, 3)
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorLayout:
        """Describe a tensor."""
        return _cached_layout(tensor.shape, tensor.stride(), tensor.dtype)

    @cached_property
    def unexpanded_shape(self) -> tuple[int, ...]:
        """The shape without what is repeated: a dimension that was expanded has one element."""
        return tuple(1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True))

    @cached_property
    def unexpanded_numel(self) -> int:
        """Elements that differ."""
        return math.prod(self.unexpanded_shape)

    @cached_property
    def _storage_extent(self) -> int | None:
        """Elements from the first to the last in memory; None where several indices mean one element."""
        extent = 1
        for step, size in sorted(zip(self.stride, self.unexpanded_shape, strict=True)):
            if size > 1 and step < extent:
                return None
            extent += (size - 1) * step
        return extent

    @cached_property
    def is_dense(self) -> bool:
        """Whether its elements fill the memory from the first to the last, each once."""
        return self.unexpanded_shape == self.shape and self._storage_extent == self.unexpanded_numel

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in one dimension: the tensor's own memory where they fill it, else a copy."""
        first = (
            tensor
            if self.unexpanded_shape == self.shape
            else tensor[tuple(slice(0, size) for size in self.unexpanded_shape)]
        )
        if self._storage_extent == self.unexpanded_numel:
            return first.as_strided((self.unexpanded_numel,), (1,), tensor.storage_offset())
        return first.reshape(-1)

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor that has these elements."""
        extent = self._storage_extent
        if extent == self.unexpanded_numel:
            first = flat.as_strided(self.unexpanded_shape, self.stride, flat.storage_offset())
        else:
            first = flat.view(self.unexpanded_shape)
            if extent is not None:  # there are gaps between its elements
                first = flat.new_empty(extent).as_strided(self.unexpanded_shape, self.stride).copy_(first)
        return first.expand(self.shape)


_cached_layout = lru_cache(maxsize=64)(TensorLayout)  # all blocks of a model have the same few
