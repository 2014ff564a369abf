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

Tensors over the memory stay what they are (:meth:`Arena.free_storage`), unless somebody was given one, as
``parameter.grad``: as in plain PyTorch it is theirs then, and other memory is taken.

Where gradients are there when a training forward begins, they are there at the loss: several backwards make a step, or
zero_grad() comes between forward and backward. They are then moved into the pool, once ([Note: memory apart]), and keep
their memory from then on, which the next backward fills anew whoever holds a part of it. So they do where states rest
outside the device, whose updates read them while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch

from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.memory.arena import Arena
from zeroshard.memory.pool import Pool
from zeroshard.memory.tracker import MemoryTracker

MIN_SEGMENTS = 4  # pieces that the gradients of a dtype lie in, where there are as many flats
MAX_SEGMENTS = 16


def assign_segments(sizes: Sequence[int], shard_count: int) -> list[int]:
    """Which of the pieces each of neighbouring gradients lies in: where the middle of it does.

    This rank has so many elements of each, one of as many ``parts``.

    >>> assign_segments([100, 10, 10, 10, 10, 100], shard_count=2)
    [0, 1, 1, 2, 2, 3]
    >>> assign_segments([10] * 8, shard_count=1)
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    whole, twice = shard_count * max(sizes, default=1) or 1, 2 * sum(sizes) or 1
    pieces = min(max(MIN_SEGMENTS, -(-sum(sizes) // whole)), MAX_SEGMENTS)
    middles = [2 * end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]  # twice as far
    return [min(pieces * middle // twice, pieces - 1) for middle in middles]


class GradMemory:
    """Where the gradients of one model lie on the device: see [Note: gradients that come and go]."""

    def __init__(
        self,
        flat_grads: Collection[FlatGrad],
        is_partitioned: bool,
        pool: Pool,
        tracker: MemoryTracker,
        is_persistent: bool,
    ) -> None:
        self.is_persistent = is_persistent
        self.is_exposed = False  # somebody may hold a gradient of those that are there
        self._has_memory = False  # some have memory
        self._is_single_allocation = is_persistent and not is_partitioned  # all have it together
        self._peak_allocated_bytes = (
            0  # bytes that were allocated at the loss, or in a forward since that nothing came back from
        )
        self._flat_grads, self._is_partitioned, self._pool, self._tracker = flat_grads, is_partitioned, pool, tracker
        near = [gradient for gradient in flat_grads if not gradient.is_offloaded]
        self.segments: dict[FlatParam, tuple[torch.dtype, int]] = {}  # that the gradients of flats lie in
        self._total_bytes = sum(self._grad_numel(one) * one.dtype.itemsize for one in near)
        for dtype in {gradient.dtype: None for gradient in near}:
            alike = [gradient for gradient in near if gradient.dtype == dtype]
            parts = alike[0].flat.layout.shard_count if is_partitioned else 1
            numbers = assign_segments([self._grad_numel(one) for one in alike], parts)
            self.segments |= {one.flat: (dtype, number) for one, number in zip(alike, numbers, strict=True)}

    @property
    def has_grads(self) -> bool:
        """Whether there are gradients, of this rank or reduced."""
        return any(gradient.has_local_sum or gradient.has_shard for gradient in self._flat_grads)

    def record_allocated(self) -> None:
        """A forward has ended, or a backward begins: note what is allocated."""
        if self._is_undecided:
            self._peak_allocated_bytes = max(self._peak_allocated_bytes, self._allocated_bytes())

    def allocate(self, flat_grad: FlatGrad) -> None:
        """Have places for all flats of its piece, in one arena and in their order, so that runs can join them."""
        if self._is_undecided:
            self._decide_single_allocation()
        if flat_grad.arena is not None:
            flat_grad.arena.alloc_storage()
            self._has_memory = True
            return
        number = self._segment_key(flat_grad)
        piece = [other for other in self._flat_grads if self._segment_key(other) == number]
        arena = self._make_arena(sum(map(self._grad_numel, piece)), flat_grad.dtype, separate_pool=self.is_persistent)
        self._has_memory = True
        for other in piece:
            other.arena = arena
            (other.set_shard if self._is_partitioned else other.set_local_sum)(arena.allocate(self._grad_numel(other)))

    def allocate_local_sum(self, flat_grad: FlatGrad) -> None:
        """Have a place for what this rank sums of a partitioned gradient, for as long as ``no_sync`` lasts."""
        if flat_grad.local_sum is None:
            flat_grad.set_local_sum(
                self._make_arena(flat_grad.flat.layout.numel, flat_grad.dtype, separate_pool=True).tensor
            )

    def free(self) -> None:
        """All gradients are forgotten: give their memory back."""
        if not self.is_persistent:
            self._has_memory = False
            for arena in self._arenas():
                arena.disown() if self.is_exposed else arena.free_storage()
            for gradient in self._flat_grads if self.is_exposed else ():
                gradient.detach_arena()
        self.is_exposed = False

    def make_persistent(self) -> None:
        """A training forward begins: what is there now is there at the loss, and keeps its memory from now on."""
        if not self.is_persistent and self.has_grads:
            self.is_persistent = True
            for arena in self._arenas():
                arena.move_to_pool()

    @property
    def _is_undecided(self) -> bool:
        """Whether it is still to be decided if the next ones come at once."""
        return not (self._has_memory or self._is_partitioned or self.is_persistent)

    def _decide_single_allocation(self) -> None:
        """None has memory, and the first is about to be taken: for all, or for a piece."""
        at_once = self._peak_allocated_bytes - self._allocated_bytes() >= self._total_bytes > 0
        self._peak_allocated_bytes = 0
        if at_once != self._is_single_allocation:
            self._is_single_allocation = at_once
            for gradient in self._flat_grads:
                gradient.detach_arena()

    def _allocated_bytes(self) -> int:
        """Bytes; 0 on a CPU, where pieces stand in nobody's way."""
        device = self._pool.device
        if device.type != "cuda":
            return 0
        held: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        return held

    def _segment_key(self, gradient: FlatGrad) -> object:
        """What gradients in one arena have in common; None for those outside the device."""
        number = self.segments.get(gradient.flat)
        return number[0] if number is not None and self._is_single_allocation else number

    def _grad_numel(self, gradient: FlatGrad) -> int:
        layout = gradient.flat.layout
        return layout.shard_numel if self._is_partitioned else layout.numel

    def _make_arena(self, numel: int, dtype: torch.dtype, separate_pool: bool) -> Arena:
        return Arena("gradients", numel, dtype, self._pool, self._tracker, separate_pool)

    def _arenas(self) -> set[Arena]:
        return {gradient.arena for gradient in self._flat_grads if gradient.arena is not None}
