"""Packer: gradients into a bucket, with the cast to the dtype they are reduced in."""

from __future__ import annotations

import torch

from zeroshard.engine.flat import Flat
from zeroshard.layout import Range


class Packer:
    """Copies the gradients of one bucket into one slot of the ring, with the cast, in a few fused kernels."""

    def __init__(self, flat: Flat, bucket: Range, packed: torch.Tensor) -> None:
        self.packed = packed  # [bucket.numel], the slot's first elements
        self._flat = flat
        self._pieces = flat.layout.pieces(bucket)
        self._parameters = [piece.parameter for piece in self._pieces]
        self._parts: list[int] = []  # positions of pieces that are not whole parameters: at most the first and the last
        self._places: list[torch.Tensor] = []
        for position, piece in enumerate(self._pieces):
            whole = piece.within.numel == flat.layout.numels[piece.parameter]
            if not whole:
                self._parts.append(position)
            shape = flat.shapes[piece.parameter] if whole else torch.Size((piece.within.numel,))
            stride = flat.strides[piece.parameter] if whole else (1,)
            self._places.append(packed.as_strided(shape, stride, packed.storage_offset() + piece.at))
        self._gaps = [packed[gap.start : gap.end] for gap in flat.layout.gaps(bucket)]

    def pack(self, gradients: list[torch.Tensor | None]) -> None:
        """Fill the slot: what has no gradient, and what belongs to no parameter, is zero."""
        taken = [gradients[parameter] for parameter in self._parameters]
        for position in self._parts:
            gradient, piece = taken[position], self._pieces[position]
            if gradient is not None:
                taken[position] = self._flat.line(gradient, piece.parameter)[piece.within.slice]
        sources = [gradient for gradient in taken if gradient is not None]
        places, empty = self._places, self._gaps
        if len(sources) < len(places):
            pairs = list(zip(taken, places, strict=True))
            empty = [*empty, *(place for gradient, place in pairs if gradient is None)]
            places = [place for gradient, place in pairs if gradient is not None]
        if empty:
            torch._foreach_zero_(empty)
        if places:
            torch._foreach_copy_(places, sources)
