"""TensorLayout: flatten a tensor in storage order, so that it can be partitioned and restored with its strides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch


@dataclass(frozen=True)
class TensorLayout:
    """Shape, strides and dtype of a tensor.

    Recomputation gets inputs with their original strides: other strides may select other kernels, with other bits.

    >>> tensor = torch.arange(6.0).view(2, 3).t()
    >>> layout = TensorLayout.from_tensor(tensor)
    >>> layout.flatten(tensor)
    tensor([0., 1., 2., 3., 4., 5.])
    >>> layout.unflatten(layout.flatten(tensor)).stride()
    (1, 3)
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorLayout:
        """Return the layout of a tensor."""
        return _cached_layout(tensor.shape, tensor.stride(), tensor.dtype)

    @cached_property
    def unexpanded_shape(self) -> tuple[int, ...]:
        """The shape before ``expand``: an expanded dimension has one element."""
        return tuple(1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True))

    @cached_property
    def unexpanded_numel(self) -> int:
        """Number of elements before ``expand``."""
        return math.prod(self.unexpanded_shape)

    @cached_property
    def _storage_extent(self) -> int | None:
        """Elements from the first to the last in storage; None if several indices share one element."""
        extent = 1
        for step, size in sorted(zip(self.stride, self.unexpanded_shape, strict=True)):
            if size > 1 and step < extent:
                return None
            extent += (size - 1) * step
        return extent

    @cached_property
    def is_dense(self) -> bool:
        """Whether the elements fill the storage from the first to the last, without gaps or overlap."""
        return self.unexpanded_shape == self.shape and self._storage_extent == self.unexpanded_numel

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements as a 1-D tensor: a view if the tensor has no gaps, otherwise a copy."""
        unexpanded = (
            tensor
            if self.unexpanded_shape == self.shape
            else tensor[tuple(slice(0, size) for size in self.unexpanded_shape)]
        )
        if self._storage_extent == self.unexpanded_numel:
            return unexpanded.as_strided((self.unexpanded_numel,), (1,), tensor.storage_offset())
        return unexpanded.reshape(-1)

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this layout with the elements of ``flat``."""
        extent = self._storage_extent
        if extent == self.unexpanded_numel:
            unexpanded = flat.as_strided(self.unexpanded_shape, self.stride, flat.storage_offset())
        else:
            unexpanded = flat.view(self.unexpanded_shape)
            if extent is not None:  # there are gaps between the elements
                unexpanded = flat.new_empty(extent).as_strided(self.unexpanded_shape, self.stride).copy_(unexpanded)
        return unexpanded.expand(self.shape)


_cached_layout = lru_cache(maxsize=64)(TensorLayout)  # the blocks of a model share a few layouts
