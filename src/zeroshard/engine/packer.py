"""Packer: gradients into a bucket, with the cast to the dtype they are reduced in."""

from __future__ import annotations

import torch

from zeroshard.engine.flat import FlatParam
from zeroshard.layout import Range


class GradPacker:
    """Copies the gradients of one bucket into one slot of the ring, with the cast, in a few fused kernels."""

    def __init__(self, flat: FlatParam, bucket: Range, packed: torch.Tensor) -> None:
        self.packed = packed  # [bucket.numel], the slot's first elements
        self._flat = flat
        self._param_ranges = flat.layout.params_in_bucket(bucket)
        self._param_indices = [piece.param_index for piece in self._param_ranges]
        self._partial_positions: list[
            int
        ] = []  # positions of pieces that are not whole parameters: at most the first and the last
        self._target_views: list[torch.Tensor] = []
        for position, piece in enumerate(self._param_ranges):
            whole = piece.elements.numel == flat.layout.numels[piece.param_index]
            if not whole:
                self._partial_positions.append(position)
            shape = flat.shapes[piece.param_index] if whole else torch.Size((piece.elements.numel,))
            stride = flat.strides[piece.param_index] if whole else (1,)
            self._target_views.append(packed.as_strided(shape, stride, packed.storage_offset() + piece.offset))
        self._padding_views = [packed[gap.start : gap.end] for gap in flat.layout.padding(bucket)]

    def pack(self, autograd_grads: list[torch.Tensor | None]) -> None:
        """Fill the slot: what has no gradient, and what belongs to no parameter, is zero."""
        taken = [autograd_grads[parameter] for parameter in self._param_indices]
        for position in self._partial_positions:
            gradient, piece = taken[position], self._param_ranges[position]
            if gradient is not None:
                taken[position] = self._flat.flatten(gradient, piece.param_index)[piece.elements.slice]
        sources = [gradient for gradient in taken if gradient is not None]
        places, empty = self._target_views, self._padding_views
        if len(sources) < len(places):
            pairs = list(zip(taken, places, strict=True))
            empty = [*empty, *(place for gradient, place in pairs if gradient is None)]
            places = [place for gradient, place in pairs if gradient is not None]
        if empty:
            torch._foreach_zero_(empty)
        if places:
            torch._foreach_copy_(places, sources)
