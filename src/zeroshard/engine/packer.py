"""Packer: gradients into a bucket, with the cast to the dtype they are reduced in."""

from __future__ import annotations

import torch

from zeroshard.engine.flat import Flat
from zeroshard.layout import Piece, Range


class Packer:
    """Copies the gradients of one bucket into one slot of the ring, with the cast, in a few fused kernels."""

    def __init__(self, flat: Flat, bucket: Range, packed: torch.Tensor) -> None:
        self._flat = flat
        self._pieces: list[tuple[Piece, bool]] = []
        self._places: list[torch.Tensor] = []
        for piece in flat.layout.pieces(bucket):
            whole = piece.within.numel == flat.layout.numels[piece.parameter]
            shape = flat.shapes[piece.parameter] if whole else torch.Size((piece.within.numel,))
            stride = flat.strides[piece.parameter] if whole else (1,)
            self._places.append(packed.as_strided(shape, stride, packed.storage_offset() + piece.at))
            self._pieces.append((piece, whole))
        self._gaps = [packed[gap.start : gap.end] for gap in flat.layout.gaps(bucket)]

    def pack(self, gradients: list[torch.Tensor | None]) -> None:
        """Fill the slot: what has no gradient, and what belongs to no parameter, is zero."""
        places, sources, empty = [], [], list(self._gaps)
        for (piece, whole), place in zip(self._pieces, self._places, strict=True):
            gradient = gradients[piece.parameter]
            if gradient is None:
                empty.append(place)
                continue
            if not whole:
                gradient = self._flat.line(gradient, piece.parameter)[piece.within.start : piece.within.end]
            places.append(place)
            sources.append(gradient)
        if empty:
            torch._foreach_zero_(empty)
        if places:
            torch._foreach_copy_(places, sources)
