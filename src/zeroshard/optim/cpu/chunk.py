"""Granule: a stretch of optimizer states outside the device, updated and brought back at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.engine.flat_param import FlatParam
from zeroshard.memory.tier_allocator import TierAllocator
from zeroshard.memory.tiered_tensor import TierSegment
from zeroshard.optim.slices import OptimizerSlice, is_elementwise
from zeroshard.sharding.layout import Range

MASTER_KEY = ""  # the key of the values that are updated, beside the optimizer's own names of its states


class StateChunk:
    """The master's values of one stretch, in ``stretch``, and the states that belong to them, each in one tensor.

    [Note: beside the old values]
    An update ahead of ``step()`` may turn out to be wrong: another backward may come, the gradients may be clipped or
    overflow, a hyper-parameter may change. So it is written to tensors of its own, ``beside``, and leaves the old
    values as they are. To confirm it, old and new change places; to drop it, nothing has to be done: so it is exact.
    """

    def __init__(self, flat: FlatParam, segment: TierSegment) -> None:
        self.flat, self.segment = flat, segment
        homes = enumerate(flat.shard_ranges)
        self._bucket_index = next(number for number, home in homes if home.intersect(segment.span) is not None)
        self.states: dict[str, torch.Tensor] = {}
        self.shadow: dict[str, torch.Tensor] = {}  # by the same keys, and MASTER
        self.shadow_params: torch.Tensor | None = None  # new parameters in the dtype of computation, ahead of the step
        self.slices: list[OptimizerSlice] = []
        self.is_fully_covered = False  # whether these are all it holds

    @property
    def numel(self) -> int:
        """Elements."""
        return self.segment.span.numel

    @property
    def tier(self) -> str:
        """Where it rests."""
        return self.segment.tier

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The values and their states where they rest, by key."""
        return {MASTER_KEY: self.segment.tensor, **self.states}

    @property
    def param_shard(self) -> torch.Tensor:
        """The same stretch of the parameters in computation."""
        home = self.flat.shard_ranges[self._bucket_index]
        span = self.segment.span.shift(-home.start)
        return self.flat.local_shards[self._bucket_index][span.start : span.end]

    def range_of(self, slice_: OptimizerSlice) -> Range:
        """Where a run lies in the granule."""
        return slice_.flat_ranges[0].span.shift(-self.segment.span.start)

    def is_covered_by(self, slices: list[OptimizerSlice]) -> bool:
        """Whether these runs are all that the granule holds, alignment aside."""
        span = self.segment.span
        pieces = [
            Range(piece.offset, piece.offset + piece.elements.numel).intersect(span) for piece in self.flat.owned_ranges
        ]
        wanted = sum(piece.numel for piece in pieces if piece is not None)
        return wanted == sum(within.numel for run in slices for _, _, within, _ in run.param_ranges())

    def state_buffer(self, slice_: OptimizerSlice, key: str, dtype: torch.dtype, tiers: TierAllocator) -> torch.Tensor:
        """Where a state of a run belongs."""
        line = self.states.get(key)
        if line is None or line.dtype != dtype:
            line = self.states[key] = tiers.zeros(None, self.tier, self.numel, dtype)
        return line[self.range_of(slice_).slice]

    def adopt_states(
        self,
        slice_: OptimizerSlice,
        state: dict[str, Any],
        tiers: TierAllocator,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Bring states of a run that were made or loaded elsewhere into the granule's own tensors.

        ``lines`` are the buffers that tensors on disk were read into and will be written from: what is in them counts.
        """
        for key, value in state.items():
            if not is_elementwise(key, value, slice_.parameter.shape):
                continue
            line = None if buffers is None else buffers.get(key)
            if line is not None and line.dtype == value.dtype:
                view = line[self.range_of(slice_).slice]
            else:
                view = self.state_buffer(slice_, key, value.dtype, tiers)
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
                state[key] = view

    def allocate_shadow(self, tiers: TierAllocator, keys: list[str]) -> None:
        """Make room beside the old values, and for the parameters in computation."""
        for key in (MASTER_KEY, *keys):
            if key not in self.shadow:
                dtype = self.segment.tensor.dtype if key == MASTER_KEY else self.states[key].dtype
                self.shadow[key] = tiers.zeros("ahead of the step", "host", self.numel, dtype)
        if self.shadow_params is None:
            self.shadow_params = tiers.zeros("ahead of the step", "host", self.numel, self.flat.dtype, pinned=True)

    def swap(self, keys: list[str], states: dict[OptimizerSlice, dict[str, Any]]) -> None:
        """Let old and new values change places."""
        old, self.segment.tensor = self.segment.tensor, self.shadow[MASTER_KEY]
        self.shadow[MASTER_KEY] = old
        for key in keys:
            self.states[key], self.shadow[key] = self.shadow[key], self.states[key]
        for run, state in states.items():
            within = self.range_of(run)
            run.parameter.data = self.segment.tensor[within.start : within.end]
            for key in keys:
                state[key] = self.states[key][within.start : within.end]
