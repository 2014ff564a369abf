"""StateChunk: an offloaded range of master weights and optimizer states, updated and moved at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.engine import FlatParam
from zeroshard.memory import TierAllocator, TierSegment
from zeroshard.optim.slices import FlatRange, OptimizerSlice, is_elementwise
from zeroshard.sharding import Range

MASTER_KEY = ""  # the key of the master weights, next to the optimizer's own state keys


class StateChunk:
    """The master weights of one tier segment, ``segment``, and their optimizer states, one tensor per state.

    [Note: speculative updates use shadow buffers]
    A speculative update may turn out to be wrong: another backward may follow, the gradients may be clipped or
    overflow, a hyper-parameter may change. So it writes to shadow buffers, ``shadow``, and keeps the old values. To
    commit it, the buffers are swapped; to discard it, nothing has to be done. So the result is exact in both cases.
    """

    def __init__(self, flat: FlatParam, segment: TierSegment) -> None:
        self.flat, self.segment = flat, segment
        shard_ranges = enumerate(flat.shard_ranges)
        self._bucket_index = next(
            index for index, shard_range in shard_ranges if shard_range.intersect(segment.span) is not None
        )
        self.states: dict[str, torch.Tensor] = {}
        self.shadow: dict[str, torch.Tensor] = {}  # by the same keys, and MASTER_KEY
        self.shadow_params: torch.Tensor | None = None  # speculative parameters, in the compute dtype
        self.slices: list[OptimizerSlice] = []
        self.is_fully_covered = False  # whether the slices cover the whole chunk, except padding

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.segment.span.numel

    @property
    def tier(self) -> str:
        """The tier that stores the chunk."""
        return self.segment.tier

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The master weights and states in their tier, by key."""
        return {MASTER_KEY: self.segment.tensor, **self.states}

    @property
    def param_shard(self) -> torch.Tensor:
        """The same range of the compute-dtype parameters."""
        shard_range = self.flat.shard_ranges[self._bucket_index]
        span = self.segment.span.shift(-shard_range.start)
        return self.flat.local_shards[self._bucket_index][span.start : span.end]

    def range_of(self, slice_: OptimizerSlice) -> Range:
        """Return the range of a slice in the chunk."""
        return slice_.flat_ranges[0].span.shift(-self.segment.span.start)

    def set_slices(self, slices: list[OptimizerSlice]) -> None:
        """Set the slices of this chunk."""
        self.slices = slices
        param_numel = sum(within.numel for _, within, _ in FlatRange(self.flat, self.segment.span).param_ranges())
        sliced_numel = sum(within.numel for slice_ in slices for _, _, within, _ in slice_.param_ranges())
        self.is_fully_covered = param_numel == sliced_numel

    def state_buffer(self, slice_: OptimizerSlice, key: str, dtype: torch.dtype, tiers: TierAllocator) -> torch.Tensor:
        """Return the memory for one state of a slice; allocate the chunk's state tensor if needed."""
        tensor = self.states.get(key)
        if tensor is None or tensor.dtype != dtype:
            tensor = self.states[key] = tiers.zeros(None, self.tier, self.numel, dtype)
        return tensor[self.range_of(slice_).slice]

    def adopt_states(
        self,
        slice_: OptimizerSlice,
        state: dict[str, Any],
        tiers: TierAllocator,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Move states of a slice that were created or loaded elsewhere into the chunk's own tensors.

        ``buffers`` are the host buffers of tensors on disk. They are written back, so states are copied there.
        """
        for key, value in state.items():
            if not is_elementwise(key, value, slice_.parameter.shape):
                continue
            buffer = None if buffers is None else buffers.get(key)
            if buffer is not None and buffer.dtype == value.dtype:
                view = buffer[self.range_of(slice_).slice]
            else:
                view = self.state_buffer(slice_, key, value.dtype, tiers)
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
                state[key] = view

    def swap(self, keys: list[str], states: dict[OptimizerSlice, dict[str, Any]]) -> None:
        """Swap the old values with the shadow buffers, and point the slices at the new values."""
        old, self.segment.tensor = self.segment.tensor, self.shadow[MASTER_KEY]
        self.shadow[MASTER_KEY] = old
        for key in keys:
            self.states[key], self.shadow[key] = self.shadow[key], self.states[key]
        for slice_, state in states.items():
            within = self.range_of(slice_).slice
            slice_.parameter.data = self.segment.tensor[within]
            for key in keys:
                state[key] = self.states[key][within]
