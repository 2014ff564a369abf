"""Speculator: updates of offloaded states that start in backward, before ``step()``, in shadow buffers."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zeroshard.engine import GradScale, StepPredictor
from zeroshard.memory import TierAllocator
from zeroshard.optim.cpu.apply import ChunkUpdate, ChunkUpdater, GradScaleReadback, GradScaleValues
from zeroshard.optim.cpu.chunk import MASTER_KEY, StateChunk
from zeroshard.optim.cpu.worker import UpdateJob, UpdateWorker


@dataclass(frozen=True)
class Speculation:
    """A speculative update, submitted before ``step()``."""

    update: ChunkUpdate
    future: Future[GradScaleValues]

    def is_valid_for(self, update: ChunkUpdate, grad_scale: GradScaleValues) -> bool:
        """Whether it has computed this update. It must be done."""
        is_same_update = self.update.slices == update.slices and self.update.specs == update.specs
        is_same_scale = self.future.result().inv_scale == grad_scale.inv_scale and grad_scale.clip_coef in (None, 1.0)
        return is_same_update and is_same_scale


class Speculator:
    """Submits speculative updates: see [Note: speculative updates use shadow buffers].

    ``budget_bytes`` of host memory may be used for shadow buffers.
    """

    def __init__(self, worker: UpdateWorker, updater: ChunkUpdater, tiers: TierAllocator, budget_bytes: int) -> None:
        self._worker, self._updater, self._tiers, self._bytes_left = worker, updater, tiers, budget_bytes
        self.predictor = StepPredictor()
        self.is_active = False  # whether a step is expected after this backward
        self.pending: dict[StateChunk, Speculation] = {}
        self._discarded_futures: list[Future[Any]] = []  # discarded updates that may still run
        self._grad_scale = GradScaleReadback(GradScale())

    def begin_backward(self, backwards: int, inverse_scale: torch.Tensor | None) -> None:
        """Become active if a step is expected after this backward."""
        self.is_active = self._bytes_left > 0 and self.predictor.expects_step(backwards)
        if self.is_active:
            self._grad_scale = GradScaleReadback(GradScale(inverse_scale))

    def submit(self, update: ChunkUpdate, chunk_index: int, grad_ready: torch.cuda.Event | None) -> None:
        """Submit an update, unless its states do not exist yet or memory for shadow buffers is missing."""
        if update.specs is not None and self._try_allocate_shadow(update):
            work = partial(self._run_speculative, update, self._grad_scale)
            events = [grad_ready, self._grad_scale.ready_event]
            job = UpdateJob((chunk_index, 1), events, work, update.is_exclusive, update.chunk.flat.spec.unit)
            self.pending[update.chunk] = Speculation(update, self._worker.submit(job))

    def pop_pending(self) -> dict[StateChunk, Speculation]:
        """Return the submitted updates, for ``step()`` to commit or discard them."""
        self.is_active = False
        pending, self.pending = self.pending, {}
        return pending

    def discard(self, speculation: Speculation) -> None:
        """Discard a submitted update: a misprediction."""
        if not speculation.future.cancel():
            self._discarded_futures.append(speculation.future)
        self.predictor.on_misprediction()

    def wait_discarded(self) -> None:
        """Wait for discarded updates that had already started."""
        wait_for(self._discarded_futures)
        self._discarded_futures = []

    def _try_allocate_shadow(self, update: ChunkUpdate) -> bool:
        """Allocate shadow buffers; return False if the budget is too small."""
        chunk, tensors = update.chunk, update.chunk.tensors
        missing = [key for key in (MASTER_KEY, *update.state_keys) if key not in chunk.shadow]
        nbytes = sum(tensors[key].nbytes for key in missing)
        nbytes += chunk.numel * chunk.flat.dtype.itemsize if chunk.shadow_params is None else 0
        if nbytes > self._bytes_left:
            return False
        self._bytes_left -= nbytes
        new_tensor = partial(self._tiers.zeros, "ahead of the step", "host", chunk.numel)
        for key in missing:
            chunk.shadow[key] = new_tensor(tensors[key].dtype)
        if chunk.shadow_params is None:
            chunk.shadow_params = new_tensor(chunk.flat.dtype, pinned=True)
        return True

    def _run_speculative(
        self, update: ChunkUpdate, grad_scale: GradScaleReadback
    ) -> Generator[None, None, GradScaleValues]:
        """Update a chunk in its shadow buffers, on the worker thread."""
        values = grad_scale.read()
        yield from self._updater.speculate(update, values)
        return values
