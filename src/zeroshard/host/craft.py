"""Craft: how one granule is updated, on the thread of updates."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.engine.gradients import Gradients
from zeroshard.host.crew import KernelHandle
from zeroshard.host.desk import PinnedStaging
from zeroshard.host.granule import MASTER_KEY, StateChunk
from zeroshard.host.native import CpuKernels
from zeroshard.host.recipe import UpdateSpec
from zeroshard.host.verdict import GradScaleValues
from zeroshard.memory.tiers import TierAllocator
from zeroshard.runs import OptimizerSlice, as_plain_parameters, is_elementwise


@dataclass(frozen=True)
class ChunkUpdate:
    """The update of one granule in one step."""

    chunk: StateChunk
    slices: tuple[OptimizerSlice, ...]
    states: tuple[dict[str, Any], ...]  # of the runs; the optimizer may have others by the time they are updated
    specs: tuple[UpdateSpec, ...] | None  # None: by torch
    param_groups: tuple[dict[str, Any], ...]  # of the runs, as they were at the step
    is_exclusive: bool  # whether nothing else may be under way meanwhile: see [Note: behind the kernel]


class ChunkUpdater:
    """Updates granules by the native update or by torch. ``now`` is everywhere the moment of the step.

    Whatever yields does so once its kernels run, unless its task is to be alone; what it returns is there when it goes
    on after that.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        gradients: Gradients,
        tiers: TierAllocator,
        staging: PinnedStaging,
        kernels: CpuKernels | None,
        threads: int,
    ) -> None:
        self._inner, self._gradients, self._tiers, self._staging = inner, gradients, tiers, staging
        self._kernels, self._thread_count = kernels, threads
        self._kernel_threads = None if kernels is None else kernels.make_threads()

    def speculate(self, update: ChunkUpdate, grad_scale: GradScaleValues) -> Generator[None, None, None]:
        """Update a granule beside its old values."""
        granule = update.chunk
        yield from self._apply_native(update, granule.tensors, granule.shadow, granule.shadow_params, grad_scale)

    def commit(self, update: ChunkUpdate, step_event: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Let what was made ahead of the step count."""
        granule = update.chunk
        states = dict(zip(update.slices, update.states, strict=True))
        keys = dict.fromkeys(key for recipe in update.specs or () for key in recipe.state_keys)
        granule.swap(list(keys), states)
        self._increment_steps(update)
        return self._staging.copy_to_device(granule.param_shard, granule.shadow_params, step_event)

    def update(
        self,
        update: ChunkUpdate,
        tensors: dict[str, torch.Tensor],
        grad_scale: GradScaleValues,
        step_event: torch.cuda.Event | None,
    ) -> Generator[None, None, torch.cuda.Event | None]:
        """Update a granule, whose values are in ``lines`` by key, and send the new parameters to their place."""
        granule = update.chunk
        if update.specs is None:
            with self._using_buffers(update, tensors):
                self._apply_torch(update, tensors, grad_scale)
                return self.copy_masters_to_params(granule, list(update.slices), step_event)
        if self._staging.can_write_directly(granule.param_shard, step_event):
            yield from self._apply_native(update, tensors, tensors, granule.param_shard, grad_scale)
            self._increment_steps(update)
            return None
        slot, copy = None, granule.shadow_params
        if copy is None:  # slots are few: until the device is at the step, they stay taken
            slot = self._staging.acquire_slot()
            copy = slot.param_view(granule)
        yield from self._apply_native(update, tensors, tensors, copy, grad_scale)
        self._increment_steps(update)
        whole = granule.is_fully_covered and len(update.slices) == len(granule.slices)
        event = None
        for span in [slice(None)] if whole else [granule.range_of(run).slice for run in update.slices]:
            event = self._staging.copy_to_device(granule.param_shard[span], copy[span], step_event)
        if slot is not None:
            slot.copy_done = event
        return event

    def _apply_native(
        self,
        update: ChunkUpdate,
        old: dict[str, torch.Tensor],
        new: dict[str, torch.Tensor],
        copy: torch.Tensor | None,
        grad_scale: GradScaleValues,
    ) -> Generator[None, None, None]:
        """Update by the native update. Alone, run after run, as all may find their gradients in one buffer."""
        running: list[KernelHandle] = []
        try:
            for run, recipe in zip(update.slices, update.specs or (), strict=True):
                span = update.chunk.range_of(run).slice
                begun = recipe.apply(
                    self._required_kernels,
                    {key: old[key][span] for key in (MASTER_KEY, *recipe.state_keys)},
                    {key: new[key][span] for key in (MASTER_KEY, *recipe.state_keys)},
                    self._staging.fetch_grad(run, self._gradients),
                    None if copy is None else copy[span],
                    grad_scale.factors,
                    self._thread_count,
                    None if update.is_exclusive else self._kernel_threads,
                )
                running.append(begun)
            if not update.is_exclusive:
                yield
        finally:
            for begun in running:
                begun.wait()

    @property
    def _required_kernels(self) -> CpuKernels:
        if self._kernels is None:
            raise RuntimeError("the native update is not there: please report this")
        return self._kernels

    def _increment_steps(self, update: ChunkUpdate) -> None:
        for state in update.states:
            if "step" in state:
                state["step"] += 1

    @contextlib.contextmanager
    def _using_buffers(self, update: ChunkUpdate, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """Let runs and their states point at lines in memory, where they rest on disk."""
        granule = update.chunk
        if granule.tier != "disk":
            yield
            return
        self._set_data(update, tensors)
        try:
            yield
        finally:
            self._set_data(update, granule.tensors)

    def _set_data(self, update: ChunkUpdate, tensors: dict[str, torch.Tensor]) -> None:
        for run, state in zip(update.slices, update.states, strict=True):
            span = update.chunk.range_of(run).slice
            run.parameter.data = tensors[MASTER_KEY][span]
            for key in update.chunk.states:
                if is_elementwise(key, state.get(key), run.parameter.shape) and key in tensors:
                    state[key] = tensors[key][span]

    def _apply_torch(self, update: ChunkUpdate, tensors: dict[str, torch.Tensor], grad_scale: GradScaleValues) -> None:
        """Step a twin of the user's optimizer on these runs alone: the optimizer itself belongs to another thread."""
        twin: Any = copy.copy(self._inner)
        twin.param_groups = []
        states = zip(update.slices, update.states, strict=True)
        wides: list[torch.Tensor] = []
        twin.state = defaultdict(dict, {run.parameter: state for run, state in states})
        for run, group in zip(update.slices, update.param_groups, strict=True):
            gradient = self._staging.fetch_grad(run, self._gradients)
            wide = gradient.to(run.parameter.dtype, copy=True)
            for factor in grad_scale.factors:
                wide.mul_(factor)
            wides.append(wide)
            twin.param_groups.append({**group, "params": [run.parameter]})
        with as_plain_parameters([run.parameter for run in update.slices]):
            for run, wide in zip(update.slices, wides, strict=True):
                run.parameter.grad = wide
            type(self._inner).step(twin)
        for run, state in zip(update.slices, update.states, strict=True):
            update.chunk.adopt_states(run, state, self._tiers, tensors)

    def copy_masters_to_params(
        self, chunk: StateChunk, slices: list[OptimizerSlice], step_event: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Send values that were updated elsewhere to the parameters in computation."""
        if self._staging.can_write_directly(chunk.param_shard, step_event):
            for run in slices:
                chunk.param_shard[chunk.range_of(run).slice].copy_(run.parameter.data)
            return None
        slot = self._staging.acquire_slot()
        for run in slices:
            span = chunk.range_of(run).slice
            slot.param_view(chunk)[span].copy_(run.parameter.data)
            slot.copy_done = self._staging.copy_to_device(
                chunk.param_shard[span], slot.param_view(chunk)[span], step_event
            )
        return slot.copy_done
