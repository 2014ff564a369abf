"""The optimizer step for offloaded states, on a worker thread.

[Note: overlapping CPU updates]
Gradients are offloaded unit by unit during backward. ``step()`` only submits the updates and returns. A worker thread
updates one state chunk after another ([Note: order of CPU updates]) and copies the new parameters to the device.
Forward waits for each unit when it needs it. If a step is expected after this backward (``StepPredictor``), the worker
starts a speculative update in shadow buffers as soon as a gradient is ready ([Note: speculative updates use shadow
buffers]). Then ``step()`` only commits it. So the update overlaps with backward and the next forward. The semantics are
those of PyTorch: before ``step()`` nothing has changed, after it everything has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any

import torch

from zeroshard.engine import FlatParam, GradScale
from zeroshard.memory import DiskError, TierSegment, available_host_memory, local_world_size
from zeroshard.optim.cpu.apply import ChunkUpdate, ChunkUpdater, GradScaleReadback, UpdateSpec, make_update_spec
from zeroshard.optim.cpu.chunk import StateChunk
from zeroshard.optim.cpu.kernels import CpuKernels, load_kernels
from zeroshard.optim.cpu.speculation import Speculation, Speculator
from zeroshard.optim.cpu.staging import DiskStaging, PinnedStaging
from zeroshard.optim.cpu.worker import UpdateJob, UpdateWorker
from zeroshard.optim.model_optimizers import Membership
from zeroshard.optim.optimizer_copy import state_bytes_per_element
from zeroshard.optim.slices import OptimizerSlice, defer_clip

SPECULATION_MEMORY_FRACTION = 0.7  # of the free host memory


class PendingParams:
    """The pending update of one flat's parameters."""

    def __init__(
        self, futures: list[Future[torch.cuda.Event | None]], on_error: Callable[[BaseException], Exception]
    ) -> None:
        self._futures = futures
        self._on_error = weakref.WeakMethod(on_error)  # weak: the object refers to the flat

    def wait(self) -> None:
        """Block until the CPU updates are done, and make the current stream wait for the copies."""
        for future in self._futures:
            error = future.exception()  # raises if this thread is interrupted, which is not a failed update
            if error is not None:
                on_error = self._on_error()
                raise error if on_error is None else on_error(error) from error
            event = future.result()
            if event is not None:
                torch.cuda.current_stream().wait_event(event)


class CpuUpdates:
    """Update the offloaded tier segments of one model: see [Note: overlapping CPU updates]."""

    def __init__(self, inner: torch.optim.Optimizer, member: Membership) -> None:
        engine = member.shared.engine
        tiers = engine.context.tiers
        self._inner, self._engine, self._tiers, self._member = inner, engine, tiers, member
        # those of several optimizers are separate
        flats = [flat for flat in engine.gradients.flat_grads if not member.names.isdisjoint(flat.names)]
        self._chunks_by_flat: dict[FlatParam, list[StateChunk]] = {
            flat: [StateChunk(flat, segment) for segment in flat.master.segments if segment.is_offloaded]
            for flat in flats
            if flat.master is not None
        }
        self._chunk_by_segment: dict[TierSegment, StateChunk] = {
            state_chunk.segment: state_chunk for chunks in self._chunks_by_flat.values() for state_chunk in chunks
        }
        self._kernels: CpuKernels | None = load_kernels()
        self._staging = PinnedStaging(engine.comm.device, tiers, self._chunk_by_segment.values())
        self._updater = ChunkUpdater(inner, engine.gradients, tiers, self._staging, self._kernels)
        self._disk_staging = DiskStaging(tiers)
        self._chunk_order = {chunk: index for index, chunk in enumerate(self._chunk_by_segment.values())}
        # the event after which a flat's gradient is complete, if known
        self._grad_ready_events: dict[FlatParam, torch.cuda.Event | None] = {}
        self._worker = UpdateWorker()
        self._futures: list[Future[Any]] = []
        self._skipped_updates: list[ChunkUpdate] = []  # updates of a step in which a gradient overflowed
        self._speculator = Speculator(self._worker, self._updater, tiers, self._speculation_budget_bytes())

    # -- called by the optimizer and the engine ----------------------------------------------------------------------

    def set_slices(self, slices: list[OptimizerSlice]) -> None:
        """Set the current slices."""
        self.invalidate()
        slices_by_chunk = self._slices_by_chunk(slices)
        for chunk in self._chunk_by_segment.values():
            chunk.set_slices(slices_by_chunk.get(chunk, []))

    def _slices_by_chunk(self, slices: list[OptimizerSlice]) -> dict[StateChunk, list[OptimizerSlice]]:
        """Return the offloaded slices of each chunk that has some, in the order of the chunks."""
        found: dict[StateChunk, list[OptimizerSlice]] = {}
        for slice_ in slices:
            if slice_.tier_segment is not None:
                found.setdefault(self._chunk_by_segment[slice_.tier_segment], []).append(slice_)
        return {chunk: found[chunk] for chunk in self._chunk_by_segment.values() if chunk in found}

    def state_buffer(self, slice_: OptimizerSlice, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised offloaded memory for one optimizer state of an offloaded slice."""
        assert slice_.tier_segment is not None
        return self._chunk_by_segment[slice_.tier_segment].state_buffer(slice_, key, dtype, self._tiers)

    def on_backward_begin(self, total_backwards: int) -> None:
        """Start to speculate if a step is expected after this backward: see [Note: overlapping CPU updates]."""
        self.invalidate()
        backwards = total_backwards - self._member.last_step
        self._speculator.begin_backward(backwards, self._engine.gradients.scaling.scale.inv_scale)

    def on_shard_ready(self, flat: FlatParam) -> None:
        """Record that a flat's reduced gradient is ready; submit its speculative updates."""
        if flat not in self._chunks_by_flat:
            return
        gradient = self._engine.gradients.flat_grads[flat]
        ready_event = self._grad_ready_events[flat] = (
            gradient.copy_done if gradient.is_offloaded else self._staging.record_event()
        )
        for chunk in self._chunks_by_flat[flat] if self._speculator.is_active and all(gradient.is_param_used) else ():
            if chunk.is_fully_covered and chunk.tier != "disk":
                update = self._make_update(chunk, chunk.slices, is_speculative=True)
                self._speculator.submit(update, self._chunk_order[chunk], ready_event)

    def invalidate(self) -> None:
        """Discard all speculative updates."""
        for speculation in self._speculator.pop_pending().values():
            self._speculator.discard(speculation)

    def on_step(self, backwards: int) -> None:
        """Learn after how many backwards the loop calls ``step()``."""
        self._speculator.predictor.on_step(backwards)

    def select(self, slices: list[OptimizerSlice]) -> list[OptimizerSlice]:
        """Return the offloaded slices."""
        return [slice_ for slice_ in slices if slice_.tier_segment is not None]

    def step(self, slices: list[OptimizerSlice], grad_scale: GradScale) -> bool:
        """Submit the updates of these slices."""
        self.wait()
        readback, speculations = GradScaleReadback(grad_scale), self._speculator.pop_pending()
        slices_by_chunk = self._slices_by_chunk(slices)
        updates = [self._make_update(chunk, chunk_slices) for chunk, chunk_slices in slices_by_chunk.items()]
        for chunk, speculation in speculations.items():
            if chunk not in slices_by_chunk:
                self._speculator.discard(speculation)
        step_event = self._staging.record_event()
        upcoming = [update.chunk for update in updates if update.chunk.tier == "disk"]
        pending: dict[FlatParam, list[Future[Any]]] = {}
        for update in updates:
            chunk = update.chunk
            events = [self._grad_ready_events.get(chunk.flat, step_event), readback.ready_event]
            if chunk.param_shard.device.type == "cpu":  # the device must have read the old values first
                events.append(step_event)
            work = partial(self._run_update, update, readback, speculations.get(chunk), step_event, upcoming)
            job = UpdateJob((self._chunk_order[chunk], 0), events, work, update.is_exclusive, chunk.flat.spec.unit)
            future = self._worker.submit(job)
            pending.setdefault(chunk.flat, []).append(future)
            self._futures.append(future)
        self._grad_ready_events.clear()
        for flat, futures in pending.items():
            flat.pending_update = PendingParams(futures, self._fail)
        defer_clip(self._engine.gradients, slices, grad_scale)
        return True

    def write_through(self) -> None:
        """Copy to the device what the optimizer itself has just updated, in one call for all slices.

        It may have changed slices without a gradient too.
        """
        step_event = self._staging.record_event()
        for chunk in [chunk for chunk in self._chunk_by_segment.values() if chunk.slices]:
            for slice_ in chunk.slices:
                chunk.adopt_states(slice_, self._inner.state.get(slice_.parameter, {}), self._tiers)
            event = self._updater.copy_masters_to_params(chunk, chunk.slices, step_event)
            if event is not None:
                event.synchronize()

    def wait(self) -> None:
        """Wait for all pending updates and disk writes."""
        for future in self._futures:
            error = future.exception()  # as in PendingParams.wait()
            if error is not None:
                raise self._fail(error) from error
        self._futures = []
        self._speculator.wait_discarded()
        self._remove_uncommitted_states()
        try:
            self._disk_staging.wait_writes()
        except DiskError as error:
            raise self._fail(error) from error

    # -- on the thread that calls step() -----------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> Exception:
        """Wait for all pending work and mark the states as invalid until a checkpoint is loaded; return the error."""
        why = f"the update of offloaded states failed: {type(error).__name__}: {error}"
        message = f"{why}. The states are invalid now: load a checkpoint"
        invalid = dict.fromkeys(("weights", "optimizer"), message)  # loading a checkpoint resets this
        self._engine.state_guard.invalid_states |= invalid
        self._engine.comm.consistency.announce("note", why)
        wait_for(self._futures)
        self._futures = []
        self._disk_staging.reset()
        for flat in self._chunks_by_flat:
            flat.pending_update = None
        return RuntimeError(message)

    def _make_update(
        self, chunk: StateChunk, slices: list[OptimizerSlice], is_speculative: bool = False
    ) -> ChunkUpdate:
        """Return the update of a chunk.

        A speculative update uses native kernels only if the states exist, since only ``step()`` may create them.
        """
        states = tuple(self._inner.state[slice_.parameter] for slice_ in slices)
        gradient = self._engine.gradients.flat_grads[chunk.flat]
        dtypes = (chunk.segment.tensor.dtype, gradient.dtype, chunk.flat.dtype)
        is_cuda = self._engine.comm.device.type == "cuda"
        update_specs: list[UpdateSpec] = []
        for slice_, state in zip(slices, states, strict=True) if self._kernels is not None else ():
            spec = make_update_spec(self._inner, slice_.param_group, state, dtypes, is_cuda)
            if spec is None or (is_speculative and any(state.get(key) is None for key in spec.state_keys)):
                break
            update_specs.append(spec)
        if len(update_specs) == len(slices):
            for slice_, spec in zip(slices, update_specs, strict=True):
                self._init_states(chunk, slice_, spec)
            # a gradient on the device is copied through the only gradient buffer
            is_exclusive = chunk.tier == "disk" or (is_cuda and not gradient.is_offloaded)
            return ChunkUpdate(chunk, tuple(slices), states, tuple(update_specs), (), is_exclusive)
        groups = tuple(_snapshot_group(slice_.param_group) for slice_ in slices)
        return ChunkUpdate(chunk, tuple(slices), states, None, groups, is_exclusive=True)

    def _init_states(self, chunk: StateChunk, slice_: OptimizerSlice, spec: UpdateSpec) -> None:
        """Create missing states of a slice; move existing states into the chunk's tensors."""
        state = self._inner.state[slice_.parameter]
        within = chunk.range_of(slice_)
        for key in spec.state_keys:
            if state.get(key) is None:
                if key not in chunk.states:
                    chunk.states[key] = self._tiers.zeros(None, chunk.tier, chunk.numel, torch.float32)
                else:  # left from a slice whose states were removed
                    chunk.states[key][within.slice].zero_()
                state[key] = chunk.states[key][within.slice]
        if "exp_avg" in spec.state_keys and "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        chunk.adopt_states(slice_, state, self._tiers)

    def _remove_uncommitted_states(self) -> None:
        """Remove the states created for a first step that was skipped: the next step is the first again."""
        for update in self._skipped_updates:
            for state, spec in zip(update.states, update.specs or (), strict=False):
                if spec.step == 1:
                    for key in (*spec.state_keys, "step"):
                        state.pop(key, None)
        self._skipped_updates = []

    def _speculation_budget_bytes(self) -> int:
        """Return the host bytes allowed for shadow buffers: a fraction of what is free once all states exist."""
        if self._tiers.offload is None or not self._tiers.offload.speculate or self._kernels is None:
            return 0
        gradients = self._engine.gradients.flat_grads.values()
        needed = sum(
            gradient.flat.layout.shard_numel * gradient.dtype.itemsize
            for gradient in gradients
            if gradient.is_offloaded
        )
        masters = [gradient.flat.master for gradient in gradients if gradient.flat.master is not None]
        segments = [segment for master in masters for segment in master.segments if segment.is_offloaded]
        total = sum(segment.span.numel for segment in segments)
        needed += total * state_bytes_per_element(self._inner)
        free = int(SPECULATION_MEMORY_FRACTION * max(0, available_host_memory() // local_world_size() - needed))
        limit = self._tiers.spare_host_bytes
        free = free if limit is None else min(free, limit)
        return free * sum(chunk.numel for chunk in self._chunk_by_segment.values()) // max(total, 1)

    # -- on the worker thread ----------------------------------------------------------------------------------------

    def _run_update(
        self,
        update: ChunkUpdate,
        grad_scale: GradScaleReadback,
        speculation: Speculation | None,
        step_event: torch.cuda.Event | None,
        upcoming: list[StateChunk],
    ) -> Generator[None, None, torch.cuda.Event | None]:
        """Commit the speculative update, or update the chunk now."""
        scale_values, chunk = grad_scale.read(), update.chunk
        if not scale_values.is_finite:
            if speculation is not None:
                speculation.future.cancel()
            self._skipped_updates.append(update)
            return None
        # if it cannot be cancelled, it is done: two jobs of one chunk never overlap
        if speculation is not None and not speculation.future.cancel():
            if speculation.is_valid_for(update, scale_values):
                return self._updater.commit(update, step_event)
            self._speculator.predictor.on_misprediction()
        if chunk.tier == "disk":
            with self._disk_staging.staged(chunk, upcoming) as tensors:
                return (yield from self._updater.update(update, tensors, scale_values, step_event))
        return (yield from self._updater.update(update, chunk.tensors, scale_values, step_event))


def _snapshot_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group for torch to step on the host, independent of later changes by the user."""
    tensors = {key: value.detach().cpu().clone() for key, value in group.items() if isinstance(value, torch.Tensor)}
    return {**group, **tensors, **({"capturable": False} if "capturable" in group else {})}
