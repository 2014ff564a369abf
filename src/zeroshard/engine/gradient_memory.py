"""GradientMemory: the device memory that gradients lie in, from a backward to zero_grad().

[Note: gradients that come and go]
Between zero_grad() and the first reduction of a backward no gradient has a value, and there lies the loss, where a step
holds most. So zero_grad() gives the memory back, and backward takes it again, where the loss has just been. It does so
at once for all gradients: flat by flat they would stand among the temporaries of backward (GPT 1.4B on one rank: 35.0
GB were reserved so, of 31.6). Tensors over it stay what they are (:meth:`Arena.close`), unless somebody was given one,
as ``parameter.grad``: as in plain PyTorch it is theirs then, and other memory is taken.

Where gradients are there when a training forward begins, they are there at the loss: several backwards make a step, or
zero_grad() comes between forward and backward. They are then moved into the pool, once ([Note: memory apart]), and keep
their memory from then on, which the next backward fills anew whoever holds a part of it. So they do where states rest
outside the device, whose updates read them while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from zeroshard.engine.flat_gradient import FlatGradient
from zeroshard.memory.arena import Arena
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool


class GradientMemory:
    """Where the gradients of one model lie on the device: see [Note: gradients that come and go]."""

    def __init__(
        self, gradients: Collection[FlatGradient], partitioned: bool, pool: Pool, ledger: Ledger, stays: bool
    ) -> None:
        self.stays = stays
        self.shown = False  # somebody may hold a gradient of those that are there
        self._gradients, self._partitioned, self._pool, self._ledger = gradients, partitioned, pool, ledger

    @property
    def held(self) -> bool:
        """Whether there are gradients, of this rank or reduced."""
        return any(gradient.has_local or gradient.has_shard for gradient in self._gradients)

    def open(self, gradient: FlatGradient) -> None:
        """Have places for all flats of a dtype, in one arena and in their order, so that runs can join them."""
        if gradient.arena is not None:
            gradient.arena.open()
            return
        group = [other for other in self._gradients if other.dtype == gradient.dtype and not other.far]
        layouts = [other.flat.layout for other in group]
        sizes = [layout.shard_numel if self._partitioned else layout.numel for layout in layouts]
        arena = self._arena(sum(sizes), gradient.dtype, apart=self.stays)
        for other, numel in zip(group, sizes, strict=True):
            other.arena = arena
            (other.keep if self._partitioned else other.sum_in)(arena.take(numel))

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

    def _arena(self, numel: int, dtype: torch.dtype, apart: bool) -> Arena:
        return Arena("gradients", numel, dtype, self._pool, self._ledger, apart)

    def _arenas(self) -> set[Arena]:
        return {gradient.arena for gradient in self._gradients if gradient.arena is not None}
