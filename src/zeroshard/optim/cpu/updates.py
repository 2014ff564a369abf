"""HostUpdates: the optimizer's step for states that rest outside the device, on a thread of its own.

[Note: just in time]
Gradients leave the device unit by unit while backward runs. ``step()`` only decides what is to be done and returns; a
thread of the host updates one granule after the other ([Note: what the host does next]) and sends the new
parameters to the device; forward waits for each unit as it comes to it. Where the loop is expected to step after this
backward (``StepPredictor``), the thread begins as soon as a gradient is there, and writes beside the old values
([Note: beside the old values]); ``step()`` then has only to confirm it. So the update hides behind backward and the
next forward, and the semantics are PyTorch's: before ``step()`` nothing has changed, after it everything.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_param import FlatParam
from zeroshard.memory.disk.disk import DiskError
from zeroshard.memory.host_info import available_host_memory, local_world_size
from zeroshard.memory.tier_allocator import TierAllocator
from zeroshard.memory.tiered_tensor import TierSegment
from zeroshard.optim.cpu.apply import (
    ChunkUpdate,
    ChunkUpdater,
    GradScaleReadback,
    GradScaleValues,
    UpdateSpec,
    make_update_spec,
)
from zeroshard.optim.cpu.chunk import MASTER_KEY, StateChunk
from zeroshard.optim.cpu.kernels import CpuKernels, load_kernels
from zeroshard.optim.cpu.staging import DiskStaging, PinnedStaging
from zeroshard.optim.cpu.worker import UpdateJob, UpdateWorker
from zeroshard.optim.slices import OptimizerSlice, state_bytes_per_element

HOLD_OFF_STEPS = 8  # steps that nothing is done ahead, after a guess was wrong


class StepPredictor:
    """Learns from the loop how many backwards it runs for a step.

    >>> foresight = StepPredictor()
    >>> foresight.on_step(backwards=2)
    >>> foresight.on_step(backwards=2)
    >>> foresight.expects_step(1), foresight.expects_step(2)
    (False, True)
    >>> foresight.on_misprediction()
    >>> foresight.expects_step(2)
    False
    """

    def __init__(self) -> None:
        self._backwards_per_step = 0
        self._is_steady = False
        self._hold_off_steps_left = 0

    def expects_step(self, backward: int) -> bool:
        """Whether the step is expected after this backward, the how-many-eth since the last step."""
        return self._is_steady and not self._hold_off_steps_left and backward == self._backwards_per_step

    def on_step(self, backwards: int) -> None:
        """A step has come."""
        self._is_steady = backwards == self._backwards_per_step
        self._backwards_per_step = backwards
        self._hold_off_steps_left = max(0, self._hold_off_steps_left - 1)

    def on_misprediction(self) -> None:
        """What was done ahead was for nothing."""
        self._hold_off_steps_left = HOLD_OFF_STEPS


class PendingParams:
    """New parameters of one flat, on their way."""

    def __init__(
        self, futures: list[Future[torch.cuda.Event | None]], on_error: Callable[[BaseException], Exception]
    ) -> None:
        self._futures = futures
        self._on_error = weakref.WeakMethod(on_error)  # weak: its object refers to the flat

    def wait(self) -> None:
        """Block until the host has made them, and let the current stream wait for their copy."""
        for job in self._futures:
            error = job.exception()  # raises where this thread is interrupted, which is no failure of the update
            if error is not None:
                failed = self._on_error()
                raise error if failed is None else failed(error) from error
            event = job.result()
            if event is not None:
                torch.cuda.current_stream().wait_event(event)


SPECULATION_MEMORY_FRACTION = 0.7  # of the memory that is left: for what is made ahead of a step


@dataclass(frozen=True)
class Speculation:
    """An update that was begun before the step."""

    update: ChunkUpdate
    future: Future[GradScaleValues]


class CpuUpdates:
    """Updates the far stretches of one model: see [Note: just in time]."""

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, tiers: TierAllocator) -> None:
        self._inner, self._engine, self._tiers = inner, engine, tiers
        flats = list(engine.gradients.flat_grads)
        self._chunks_by_flat: dict[FlatParam, list[StateChunk]] = {
            flat: [StateChunk(flat, stretch) for stretch in flat.master.segments if stretch.is_offloaded]
            for flat in flats
            if flat.master is not None
        }
        self._chunk_by_segment: dict[TierSegment, StateChunk] = {
            g.segment: g for found in self._chunks_by_flat.values() for g in found
        }
        self._kernels: CpuKernels | None = load_kernels()
        self._staging = PinnedStaging(engine.comm.device, tiers, self._chunk_by_segment.values())
        threads = (tiers.offload.threads if tiers.offload is not None else None) or default_threads()
        self._updater = ChunkUpdater(inner, engine.gradients, tiers, self._staging, self._kernels, threads)
        self._disk_staging = DiskStaging(tiers)
        self._chunk_order = {granule: number for number, granule in enumerate(self._chunk_by_segment.values())}
        self._grad_ready_events: dict[
            FlatParam, torch.cuda.Event | None
        ] = {}  # when a flat's gradient is complete, where that is told
        self._worker = UpdateWorker()
        self._futures: list[Future[Any]] = []
        self._discarded_futures: list[Future[Any]] = []  # begun ahead, of no use, and perhaps still under way
        self._skipped_updates: list[ChunkUpdate] = []  # of a step in which a gradient overflowed
        self._predictor = StepPredictor()
        self._speculations: dict[StateChunk, Speculation] = {}
        self._is_speculating = False
        self._speculative_scale = GradScaleReadback()
        self._speculation_bytes_left = self._speculation_budget_bytes()  # bytes for what is made ahead

    # -- told by the optimizer and the engine ------------------------------------------------------------------------

    def set_slices(self, slices: list[OptimizerSlice]) -> None:
        """Take note of the runs there are."""
        self.invalidate()
        for granule in self._chunk_by_segment.values():
            granule.slices = []
        for run in slices:
            if run.tier_segment is not None:
                self._chunk_by_segment[run.tier_segment].slices.append(run)
        for granule in self._chunk_by_segment.values():
            granule.is_fully_covered = granule.is_covered_by(granule.slices)

    def state_buffer(self, segment: TierSegment, slice_: OptimizerSlice, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Where a state of a run in a far stretch belongs, in its tier; what is there now has no meaning."""
        return self._chunk_by_segment[segment].state_buffer(slice_, key, dtype, self._tiers)

    def on_backward_begin(self, backwards: int) -> None:
        """A backward begins: see [Note: just in time]."""
        self.invalidate()
        self._is_speculating = (
            self._predictor.expects_step(backwards) and self._speculation_bytes_left > 0 and self._kernels is not None
        )
        if self._is_speculating:
            self._speculative_scale = GradScaleReadback(inv_scale=self._engine.gradients.inverse_scale)

    def on_shard_ready(self, flat: FlatParam) -> None:
        """Begin to update what a flat's gradient is there for, ahead of the step."""
        if flat not in self._chunks_by_flat:
            return
        gradient = self._engine.gradients.flat_grads[flat]
        there = self._grad_ready_events[flat] = (
            gradient.copy_done if gradient.is_offloaded else self._staging.record_event()
        )
        if not (self._is_speculating and all(gradient.is_param_used)):
            return
        for granule in self._chunks_by_flat[flat]:
            if not granule.is_fully_covered or granule.tier == "disk":
                continue
            task = self._make_update(granule, granule.slices, is_speculative=True)
            if task.specs is not None and self._try_allocate_shadow(granule, task.specs):
                moments, work = (
                    [there, self._speculative_scale.ready_event],
                    partial(self._run_speculative, task, self._speculative_scale),
                )
                job = UpdateJob((self._chunk_order[granule], 1), moments, work, task.is_exclusive)
                self._speculations[granule] = Speculation(task, self._worker.submit(job))

    def invalidate(self) -> None:
        """What was begun ahead of the step does not count."""
        self._is_speculating = False
        if self._speculations:
            for ahead in self._speculations.values():
                self._discard(ahead)
            self._speculations.clear()

    def step(self, slices: list[OptimizerSlice], grad_scale: GradScaleReadback, backwards: int) -> None:
        """Start the update of these runs."""
        self.wait()
        self._predictor.on_step(backwards)
        self._is_speculating = False
        ahead, self._speculations = self._speculations, {}
        due: dict[StateChunk, list[OptimizerSlice]] = {}
        for run in slices:
            if run.tier_segment is not None:
                due.setdefault(self._chunk_by_segment[run.tier_segment], []).append(run)
        tasks = [
            self._make_update(granule, due[granule]) for granule in self._chunk_by_segment.values() if granule in due
        ]
        for granule, vain in ahead.items():
            if granule not in due:
                self._discard(vain)
        now = self._staging.record_event()
        following = [task.chunk for task in tasks if task.chunk.tier == "disk"]
        coming: dict[FlatParam, list[Future[Any]]] = {}
        for task in tasks:
            granule = task.chunk
            moments = [self._grad_ready_events.get(granule.flat, now), grad_scale.ready_event]
            if granule.param_shard.device.type == "cpu":  # the device has to have read the old values
                moments.append(now)
            work = partial(self._run_update, task, grad_scale, ahead.get(granule), now, following)
            done = self._worker.submit(UpdateJob((self._chunk_order[granule], 0), moments, work, task.is_exclusive))
            coming.setdefault(granule.flat, []).append(done)
            self._futures.append(done)
        self._grad_ready_events.clear()
        for flat, jobs in coming.items():
            flat.pending_update = PendingParams(jobs, self._fail)

    def write_through(self, slices: list[OptimizerSlice]) -> None:
        """Bring about what the optimizer itself has just updated, in one call for all runs."""
        now = self._staging.record_event()
        due: dict[StateChunk, list[OptimizerSlice]] = {}
        for run in slices:
            if run.tier_segment is not None:
                granule = self._chunk_by_segment[run.tier_segment]
                granule.adopt_states(run, self._inner.state.get(run.parameter, {}), self._tiers)
                due.setdefault(granule, []).append(run)
        for granule, found in due.items():
            event = self._updater.copy_masters_to_params(granule, found, now)
            if event is not None:
                event.synchronize()

    def wait(self) -> None:
        """Return when no update is under way."""
        for job in self._futures:
            error = job.exception()  # as in Coming.wait()
            if error is not None:
                raise self._fail(error) from error
        self._futures = []
        wait_for(self._discarded_futures)
        self._discarded_futures = []
        self._remove_uncommitted_states()
        try:
            self._disk_staging.wait_writes()
        except DiskError as error:
            raise self._fail(error) from error

    # -- on the thread of the step -----------------------------------------------------------------------------------

    def _discard(self, speculation: Speculation) -> None:
        if not speculation.future.cancel():
            self._discarded_futures.append(speculation.future)
        self._predictor.on_misprediction()

    def _fail(self, error: BaseException) -> Exception:
        """Let everything that is under way end, and say so to whoever wants to go on without a load."""
        why = f"the update outside the device failed: {type(error).__name__}: {error}"
        told = f"{why}. The states are of no use any more: load a checkpoint"
        self._engine.state_guard.invalid_states |= dict.fromkeys(
            ("weights", "optimizer"), told
        )  # what a load makes good
        self._engine.comm.consistency.announce_failure(why)
        wait_for(self._futures)
        self._futures = []
        self._disk_staging.reset()
        for flat in self._chunks_by_flat:
            flat.pending_update = None
        return RuntimeError(told)

    def _make_update(
        self, chunk: StateChunk, slices: list[OptimizerSlice], is_speculative: bool = False
    ) -> ChunkUpdate:
        """What is to be done. ``ahead``: by the native update only where there are states, since a step makes them."""
        states = tuple(self._inner.state[run.parameter] for run in slices)
        gradient = self._engine.gradients.flat_grads[chunk.flat]
        dtypes = (chunk.segment.tensor.dtype, gradient.dtype, chunk.flat.dtype)
        recipes: list[UpdateSpec] = []
        for run, state in zip(slices, states, strict=True) if self._kernels is not None else ():
            recipe = make_update_spec(
                self._inner, run.param_group, state, dtypes, self._engine.comm.device.type == "cuda"
            )
            if recipe is None or (is_speculative and any(state.get(key) is None for key in recipe.state_keys)):
                break
            recipes.append(recipe)
        if len(recipes) == len(slices):
            for run, recipe in zip(slices, recipes, strict=True):
                self._init_states(chunk, run, recipe)
            fetched = (
                self._engine.comm.device.type == "cuda" and not gradient.is_offloaded
            )  # into the one buffer there is
            return ChunkUpdate(chunk, tuple(slices), states, tuple(recipes), (), fetched or chunk.tier == "disk")
        return ChunkUpdate(
            chunk,
            tuple(slices),
            states,
            None,
            tuple(_snapshot_group(run.param_group) for run in slices),
            is_exclusive=True,
        )

    def _init_states(self, chunk: StateChunk, slice_: OptimizerSlice, spec: UpdateSpec) -> None:
        """Make the states of a run that has none yet, or bring them into the granule."""
        state = self._inner.state[slice_.parameter]
        within = chunk.range_of(slice_)
        for key in spec.state_keys:
            if state.get(key) is None:
                if key not in chunk.states:
                    chunk.states[key] = self._tiers.zeros(None, chunk.tier, chunk.numel, torch.float32)
                else:  # of a run whose states were forgotten
                    chunk.states[key][within.slice].zero_()
                state[key] = chunk.states[key][within.slice]
        if "exp_avg" in spec.state_keys and "step" not in state:
            state["step"] = torch.tensor(0.0)
        chunk.adopt_states(slice_, state, self._tiers)

    def _remove_uncommitted_states(self) -> None:
        """Take back the states that were made for a first step which then did not count: it will be the first again."""
        for task in self._skipped_updates:
            for state, recipe in zip(task.states, task.specs or (), strict=False):
                if recipe.step == 1:
                    for key in (*recipe.state_keys, "step"):
                        state.pop(key, None)
        self._skipped_updates = []

    def _speculation_budget_bytes(self) -> int:
        """Bytes of host memory that may be taken to work ahead: a part of what is left once all states are there."""
        if self._tiers.offload is None or not self._tiers.offload.speculate:
            return 0
        gradients = self._engine.gradients.flat_grads.values()
        coming = sum(g.flat.layout.shard_numel * g.dtype.itemsize for g in gradients if g.is_offloaded)
        coming += sum(granule.numel for granule in self._chunk_by_segment.values()) * state_bytes_per_element(
            self._inner
        )
        left = int(SPECULATION_MEMORY_FRACTION * max(0, available_host_memory() // local_world_size() - coming))
        limit = self._tiers.spare_host_bytes
        return left if limit is None else min(left, limit)

    def _try_allocate_shadow(self, chunk: StateChunk, specs: tuple[UpdateSpec, ...]) -> bool:
        """Whether there is room to update a granule ahead of the step."""
        keys = list(dict.fromkeys(key for recipe in specs for key in recipe.state_keys))
        missing = [key for key in (MASTER_KEY, *keys) if key not in chunk.shadow]
        nbytes = chunk.numel * (4 * len(missing) + (chunk.flat.dtype.itemsize if chunk.shadow_params is None else 0))
        if nbytes > self._speculation_bytes_left:
            return False
        self._speculation_bytes_left -= nbytes
        if missing:
            chunk.allocate_shadow(self._tiers, keys)
        return True

    # -- on the thread of updates ------------------------------------------------------------------------------------

    def _run_speculative(
        self, update: ChunkUpdate, grad_scale: GradScaleReadback
    ) -> Generator[None, None, GradScaleValues]:
        """Update a granule beside its old values."""
        ruling = grad_scale.read()
        yield from self._updater.speculate(update, ruling)
        return ruling

    def _run_update(
        self,
        update: ChunkUpdate,
        grad_scale: GradScaleReadback,
        speculation: Speculation | None,
        step_event: torch.cuda.Event | None,
        upcoming: list[StateChunk],
    ) -> Generator[None, None, torch.cuda.Event | None]:
        """Confirm what was made ahead, or update a granule now."""
        ruling, granule = grad_scale.read(), update.chunk
        if not ruling.is_finite:
            if speculation is not None:
                speculation.future.cancel()
            self._skipped_updates.append(update)
            return None
        if speculation is not None and not speculation.future.cancel():  # it is over: no two of one granule overlap
            made, same = (
                speculation.future.result(),
                speculation.update.slices == update.slices and speculation.update.specs == update.specs,
            )
            if same and made.inv_scale == ruling.inv_scale and ruling.clip_coef in (None, 1.0):
                return self._updater.commit(update, step_event)
            self._predictor.on_misprediction()
        if granule.tier == "disk":
            with self._disk_staging.staged(granule, upcoming) as lines:
                return (yield from self._updater.update(update, lines, ruling, step_event))
        return (yield from self._updater.update(update, granule.tensors, ruling, step_event))


def _snapshot_group(group: dict[str, Any]) -> dict[str, Any]:
    """A group for torch to step on the host, which nothing that is done to the user's own changes any more."""
    numbers = {key: value.detach().cpu().clone() for key, value in group.items() if isinstance(value, torch.Tensor)}
    return {**group, **numbers, **({"capturable": False} if "capturable" in group else {})}


def default_threads() -> int:
    """This rank's share of the processors, less two: one launches the device's work, one runs backward."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors // local_world_size() - 2)
