"""Form: how a tensor lies in memory, so that its elements can be laid in a line, divided, and put back as they were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch


@dataclass(frozen=True)
class Form:
    """Shape, strides and dtype of a tensor.

    Recomputation is given inputs in the strides they had: other strides may choose other kernels, and those other bits.

    >>> tensor = torch.arange(6.0).view(2, 3).t()
    >>> form = Form.of(tensor)
    >>> form.line(tensor)
    tensor([0., 1., 2., 3., 4., 5.])
    >>> form.shaped(form.line(tensor)).stride()
    (1, 3)
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Describe a tensor."""
        return _known(tensor.shape, tensor.stride(), tensor.dtype)

    @cached_property
    def core(self) -> tuple[int, ...]:
        """The shape without what is repeated: a dimension that was expanded has one element."""
        return tuple(1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True))

    @cached_property
    def numel(self) -> int:
        """Elements that differ."""
        return math.prod(self.core)

    @cached_property
    def _extent(self) -> int | None:
        """Elements from the first to the last in memory; None where several indices mean one element."""
        extent = 1
        for step, size in sorted(zip(self.stride, self.core, strict=True)):
            if size > 1 and step < extent:
                return None
            extent += (size - 1) * step
        return extent

    @cached_property
    def dense(self) -> bool:
        """Whether its elements fill the memory from the first to the last, each once."""
        return self.core == self.shape and self._extent == self.numel

    def line(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in one dimension: the tensor's own memory where they fill it, else a copy."""
        first = tensor if self.core == self.shape else tensor[tuple(slice(0, size) for size in self.core)]
        if self._extent == self.numel:
            return first.as_strided((self.numel,), (1,), tensor.storage_offset())
        return first.reshape(-1)

    def shaped(self, line: torch.Tensor) -> torch.Tensor:
        """The tensor that has these elements."""
        extent = self._extent
        if extent == self.numel:
            first = line.as_strided(self.core, self.stride, line.storage_offset())
        else:
            first = line.view(self.core)
            if extent is not None:  # there are gaps between its elements
                first = line.new_empty(extent).as_strided(self.core, self.stride).copy_(first)
        return first.expand(self.shape)


_known = lru_cache(maxsize=64)(Form)  # all blocks of a model have the same few
