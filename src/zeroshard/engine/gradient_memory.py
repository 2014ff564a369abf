"""GradientMemory: the device memory that gradients lie in, from a backward to zero_grad().

[Note: gradients that come and go]
Between zero_grad() and the first reduction of a backward no gradient has a value, and there lies the loss, where a step
holds most. So zero_grad() gives the memory back, and backward takes it again, where the loss has just been. It does so
in up to 16 pieces, each of neighbouring flats, about as large as a unit's whole gradient where that makes enough of
them, and taken with the first of these flats that has one: while most activations are there, few gradients have memory.

Whole gradients, of stages 0 and 1 or of one rank alone, are taken at once instead where what the loss has given back
has room for all: in pieces they would stand among the temporaries of backward for nothing (GPT 1.4B on one rank: of
31.6 GB 33.2 were reserved with four, and 35.0 flat by flat). What was given back is what is allocated less than when
forward ended or backward began.

Tensors over the memory stay what they are (:meth:`Arena.close`), unless somebody was given one, as ``parameter.grad``:
as in plain PyTorch it is theirs then, and other memory is taken.

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

FEWEST = 4  # pieces that the gradients of a dtype lie in, where there are as many flats
MOST = 16


def piece_numbers(sizes: Sequence[int], parts: int) -> list[int]:
    """Which of the pieces each of neighbouring gradients lies in: where the middle of it does.

    This rank has so many elements of each, one of as many ``parts``.

    >>> piece_numbers([100, 10, 10, 10, 10, 100], parts=2)
    [0, 1, 1, 2, 2, 3]
    >>> piece_numbers([10] * 8, parts=1)
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    whole, twice = parts * max(sizes, default=1) or 1, 2 * sum(sizes) or 1
    pieces = min(max(FEWEST, -(-sum(sizes) // whole)), MOST)
    middles = [2 * end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]  # twice as far
    return [min(pieces * middle // twice, pieces - 1) for middle in middles]


class GradientMemory:
    """Where the gradients of one model lie on the device: see [Note: gradients that come and go]."""

    def __init__(
        self, gradients: Collection[FlatGradient], partitioned: bool, pool: Pool, ledger: Ledger, stays: bool
    ) -> None:
        self.stays = stays
        self.shown = False  # somebody may hold a gradient of those that are there
        self._taken = False  # some have memory
        self._at_once = stays and not partitioned  # all have it together
        self._high = 0  # bytes that were allocated at the loss, or in a forward since that nothing came back from
        self._gradients, self._partitioned, self._pool, self._ledger = gradients, partitioned, pool, ledger
        near = [gradient for gradient in gradients if not gradient.far]
        self.pieces: dict[Flat, tuple[torch.dtype, int]] = {}  # that the gradients of flats lie in
        self._nbytes = sum(self._numel(one) * one.dtype.itemsize for one in near)
        for dtype in {gradient.dtype: None for gradient in near}:
            alike = [gradient for gradient in near if gradient.dtype == dtype]
            parts = alike[0].flat.layout.parts if partitioned else 1
            numbers = piece_numbers([self._numel(one) for one in alike], parts)
            self.pieces |= {one.flat: (dtype, number) for one, number in zip(alike, numbers, strict=True)}

    @property
    def held(self) -> bool:
        """Whether there are gradients, of this rank or reduced."""
        return any(gradient.has_local or gradient.has_shard for gradient in self._gradients)

    def look(self) -> None:
        """A forward has ended, or a backward begins: note what is allocated."""
        if self._undecided:
            self._high = max(self._high, self._allocated())

    def open(self, gradient: FlatGradient) -> None:
        """Have places for all flats of its piece, in one arena and in their order, so that runs can join them."""
        if self._undecided:
            self._decide()
        if gradient.arena is not None:
            gradient.arena.open()
            self._taken = True
            return
        number = self._piece(gradient)
        piece = [other for other in self._gradients if self._piece(other) == number]
        arena = self._arena(sum(map(self._numel, piece)), gradient.dtype, apart=self.stays)
        self._taken = True
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
            self._taken = False
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

    @property
    def _undecided(self) -> bool:
        """Whether it is still to be decided if the next ones come at once."""
        return not (self._taken or self._partitioned or self.stays)

    def _decide(self) -> None:
        """None has memory, and the first is about to be taken: for all, or for a piece."""
        at_once = self._high - self._allocated() >= self._nbytes > 0
        self._high = 0
        if at_once != self._at_once:
            self._at_once = at_once
            for gradient in self._gradients:
                gradient.leave_arena()

    def _allocated(self) -> int:
        """Bytes; 0 on a CPU, where pieces stand in nobody's way."""
        device = self._pool.device
        if device.type != "cuda":
            return 0
        held: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        return held

    def _piece(self, gradient: FlatGradient) -> object:
        """What gradients in one arena have in common; None for those outside the device."""
        number = self.pieces.get(gradient.flat)
        return number[0] if number is not None and self._at_once else number

    def _numel(self, gradient: FlatGradient) -> int:
        layout = gradient.flat.layout
        return layout.shard_numel if self._partitioned else layout.numel

    def _arena(self, numel: int, dtype: torch.dtype, apart: bool) -> Arena:
        return Arena("gradients", numel, dtype, self._pool, self._ledger, apart)

    def _arenas(self) -> set[Arena]:
        return {gradient.arena for gradient in self._gradients if gradient.arena is not None}
