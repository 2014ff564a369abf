"""TensorLayout: flatten a tensor in storage order, to partition it and restore it with its strides; checksums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

_INT_DTYPE_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element; int64 for more
HASH_MULTIPLIER = 0x1E3779B97F4A7C15  # odd: its multiples spread widely modulo 2**64


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
        if self._storage_extent == self.unexpanded_numel:
            return tensor.as_strided((self.unexpanded_numel,), (1,), tensor.storage_offset())
        return tensor.as_strided(self.unexpanded_shape, self.stride, tensor.storage_offset()).reshape(-1)

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


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return two integers on the tensor's device that change with any bit, also in NaNs, and with the element order.

    >>> nan = torch.tensor([float("nan"), 1.0])
    >>> torch.equal(checksum(nan), checksum(nan.clone())), torch.equal(checksum(nan), checksum(nan.flip(0)))
    (True, False)
    """
    layout = TensorLayout.from_tensor(tensor)
    flat = layout.flatten(tensor)
    width = layout.unexpanded_shape[-1] if layout.unexpanded_shape else 1
    words = max(1, flat.itemsize // 8)  # 64-bit integers per element: two for complex128
    bits = flat.contiguous().view(_INT_DTYPE_BY_ITEMSIZE.get(flat.itemsize, torch.int64)).view(-1, width * words)
    sums = [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]  # of columns and rows: avoids a 64-bit copy
    numbers = [torch.arange(1, len(flat) + 1, device=flat.device) * HASH_MULTIPLIER for flat in sums]
    return torch.stack([(flat * number).sum() for flat, number in zip(sums, numbers, strict=True)])
