"""GradientMemory: the device memory that gradients lie in, from a backward to zero_grad().

[Note: gradients that come and go]
Between zero_grad() and the first reduction of a backward no gradient has a value, and there lies the loss, where a step
holds most. So zero_grad() gives the memory back, and backward takes it again, where the loss has just been. It does so
in a few pieces where gradients are partitioned, each of neighbouring flats and taken with the first of them that is
reduced: while most activations are still there, a part of the gradients has memory. Whole gradients are taken at once:
in pieces they would stand among the temporaries of backward (GPT 1.4B on one rank: of 31.6 GB 33.2 were reserved with
four, and 35.0 flat by flat). Tensors over it stay what they are (:meth:`Arena.close`), unless somebody was given one,
as ``parameter.grad``: as in plain PyTorch it is theirs then, and other memory is taken.

Where gradients are there when a training forward begins, they are there at the loss: several backwards make a step, or
zero_grad() comes between forward and backward. They are then moved into the pool, once ([Note: memory apart]), and keep
their memory from then on, which the next backward fills anew whoever holds a part of it. So they do where states rest
outside the device, whose updates read them while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch

from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import FlatGradient
from zeroshard.memory.arena import Arena
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool

PIECES = 4  # that the partitioned gradients of a dtype lie in, at most


def piece_numbers(sizes: Sequence[int], partitioned: bool) -> list[int]:
    """Which of the pieces each of neighbouring gradients of so many elements lies in: where the middle of it does.

    >>> piece_numbers([100, 10, 10, 10, 10, 100], partitioned=True)
    [0, 1, 1, 2, 2, 3]
    """
    pieces, twice = PIECES if partitioned else 1, 2 * sum(sizes) or 1
    middles = [2 * end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]  # twice as far
    return [min(pieces * middle // twice, pieces - 1) for middle in middles]


class GradientMemory:
    """Where the gradients of one model lie on the device: see [Note: gradients that come and go]."""

    def __init__(
        self, gradients: Collection[FlatGradient], partitioned: bool, pool: Pool, ledger: Ledger, stays: bool
    ) -> None:
        self.stays = stays
        self.shown = False  # somebody may hold a gradient of those that are there
        self._gradients, self._partitioned, self._pool, self._ledger = gradients, partitioned, pool, ledger
        near = [gradient for gradient in gradients if not gradient.far]
        self.pieces: dict[Flat, tuple[torch.dtype, int]] = {}  # that the gradients of flats lie in
        for dtype in {gradient.dtype: None for gradient in near}:
            alike = [gradient for gradient in near if gradient.dtype == dtype]
            numbers = piece_numbers([self._numel(one) for one in alike], partitioned)
            self.pieces |= {one.flat: (dtype, number) for one, number in zip(alike, numbers, strict=True)}

    @property
    def held(self) -> bool:
        """Whether there are gradients, of this rank or reduced."""
        return any(gradient.has_local or gradient.has_shard for gradient in self._gradients)

    def open(self, gradient: FlatGradient) -> None:
        """Have places for all flats of its piece, in one arena and in their order, so that runs can join them."""
        if gradient.arena is not None:
            gradient.arena.open()
            return
        number = self.pieces[gradient.flat]
        piece = [other for other in self._gradients if self.pieces.get(other.flat) == number]
        arena = self._arena(sum(map(self._numel, piece)), gradient.dtype, apart=self.stays)
        for other in piece:
            other.arena = arena
            (other.keep if self._partitioned else other.sum_in)(arena.take(self._numel(other)))

    def open_sum(self, gradient: FlatGradient) -> None:
        """Have a place for what this rank sums of a partitioned gradient, for as long as ``no_sync`` lasts."""
        if gradient.local is None:
            gradient.sum_in(self._arena(gradient.flat.layout.numel, gradient.dtype, apart=True).tensor)

    def let_go(self) -> None:
        """All gradients are forgotten: give their memory back."""
        if not self.stays:
            for arena in self._arenas():
                arena.drop() if self.shown else arena.close()
            for gradient in self._gradients if self.shown else ():
                gradient.leave_arena()
        self.shown = False

    def abide(self) -> None:
        """A training forward begins: what is there now is there at the loss, and keeps its memory from now on."""
        if not self.stays and self.held:
            self.stays = True
            for arena in self._arenas():
                arena.move_apart()

    def _numel(self, gradient: FlatGradient) -> int:
        layout = gradient.flat.layout
        return layout.shard_numel if self._partitioned else layout.numel

    def _arena(self, numel: int, dtype: torch.dtype, apart: bool) -> Arena:
        return Arena("gradients", numel, dtype, self._pool, self._ledger, apart)

    def _arenas(self) -> set[Arena]:
        return {gradient.arena for gradient in self._gradients if gradient.arena is not None}
