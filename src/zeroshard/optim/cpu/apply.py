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
from zeroshard.memory.streams import record_blocking_event
from zeroshard.memory.tier_allocator import TierAllocator
from zeroshard.optim.cpu.chunk import MASTER_KEY, StateChunk
from zeroshard.optim.cpu.kernels import (
    DTYPE_CODES,
    AdamHyperparams,
    CpuKernels,
    KernelHandle,
    KernelThreads,
    Rounding,
    SGDHyperparams,
    beta_powers_on_gpu,
    hyperparams_from_group,
)
from zeroshard.optim.cpu.rounding import detect_torch_rounding
from zeroshard.optim.cpu.staging import PinnedStaging
from zeroshard.optim.slices import OptimizerSlice, as_plain_parameters, is_elementwise


@dataclass(frozen=True)
class GradScaleValues:
    """A verdict in plain numbers."""

    is_finite: bool = True
    """False: a gradient overflowed on some rank, and nothing is updated."""
    inv_scale: float | None = None
    """Of the loss scale."""
    clip_coef: float | None = None
    """Of a clip."""

    @property
    def factors(self) -> tuple[float, ...]:
        """What gradients are multiplied by, one after the other."""
        return tuple(factor for factor in (self.inv_scale, self.clip_coef) if factor is not None)


class GradScaleReadback:
    """A ruling that the device may still have to find. Made on the thread of the step, read on another.

    >>> GradScaleReadback(None, torch.tensor(0.5), None).read()
    GradScaleValues(is_finite=True, inv_scale=None, clip_coef=0.5)
    """

    def __init__(
        self,
        inv_scale: torch.Tensor | None = None,
        clip_coef: torch.Tensor | None = None,
        overflow: torch.Tensor | None = None,
    ) -> None:
        given = {"inverse": inv_scale, "coefficient": clip_coef, "overflow": overflow}
        found = {name: value.detach().float().reshape(()) for name, value in given.items() if value is not None}
        self._names = list(found)
        self._values: torch.Tensor | None = None
        self.ready_event: torch.cuda.Event | None = None  # when the device has found it
        if found:
            line = torch.stack(list(found.values()))
            on_gpu = line.device.type == "cuda"
            self._values = torch.empty(len(found), pin_memory=on_gpu)
            self._values.copy_(line, non_blocking=True)
            self.ready_event = record_blocking_event(torch.cuda.current_stream()) if on_gpu else None

    def read(self) -> GradScaleValues:
        """Wait for the device, and tell."""
        if self.ready_event is not None:
            self.ready_event.synchronize()
        values = dict(zip(self._names, self._values.tolist() if self._values is not None else (), strict=True))
        return GradScaleValues(not values.get("overflow"), values.get("inverse"), values.get("coefficient"))


ADAM_STATE_KEYS = ("exp_avg", "exp_avg_sq")
SGD_STATE_KEYS = ("momentum_buffer",)


@dataclass(frozen=True)
class UpdateSpec:
    """The options of a run's group, and how many updates it has had, this one included."""

    hyperparams: AdamHyperparams | SGDHyperparams
    step: int
    beta_powers: tuple[float, float] | None = None  # of Adam's betas, where a GPU's fused kernel is followed
    rounding: Rounding | None = None  # of this torch on this processor; None where a GPU is followed

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The names of the states it keeps."""
        if isinstance(self.hyperparams, AdamHyperparams):
            return ADAM_STATE_KEYS
        return SGD_STATE_KEYS if self.hyperparams.momentum else ()

    def apply(
        self,
        kernels: CpuKernels,
        old: dict[str, torch.Tensor],
        new: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        copy: torch.Tensor | None,
        grad_factors: tuple[float, ...],
        threads: int,
        kernel_threads: KernelThreads | None = None,
    ) -> KernelHandle:
        """Update: read ``old`` values, by key and under "" the parameter's, and write ``new`` ones.

        With a ``crew`` it is only begun: see :class:`CpuKernels`.
        """
        if isinstance(self.hyperparams, AdamHyperparams):
            states = (old[""], old[ADAM_STATE_KEYS[0]], old[ADAM_STATE_KEYS[1]])
            out = (new[""], new[ADAM_STATE_KEYS[0]], new[ADAM_STATE_KEYS[1]])
            return kernels.adam(
                *states,
                gradient,
                self.hyperparams,
                out=out,
                step=self.step,
                copy=copy,
                grad_factors=grad_factors,
                threads=threads,
                beta_powers=self.beta_powers,
                kernel_threads=kernel_threads,
                rounding=self.rounding,
            )
        momentum = old.get(SGD_STATE_KEYS[0]) if self.step > 1 else None  # the first time it becomes the gradient
        return kernels.sgd(
            old[""],
            momentum,
            gradient,
            self.hyperparams,
            out=(new[""], new.get(SGD_STATE_KEYS[0])),
            copy=copy,
            grad_factors=grad_factors,
            threads=threads,
            kernel_threads=kernel_threads,
            rounding=self.rounding,
        )


def make_update_spec(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    state: dict[str, Any],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    is_cuda_rounding: bool = False,
) -> UpdateSpec | None:
    """The recipe of a run's next update; None where only torch's own update will do.

    ``dtypes`` are those of the master, the gradient, and the parameters in computation; ``cuda``: these compute on a
    GPU, whose numbers the update is to give.
    """
    options = hyperparams_from_group(optimizer, group, is_cuda_rounding)
    if options is None or dtypes[0] != torch.float32 or any(dtype not in DTYPE_CODES for dtype in dtypes):
        return None
    rounding = None
    if not is_cuda_rounding:
        rounding = detect_torch_rounding("adam" if isinstance(options, AdamHyperparams) else "sgd", options.fused)
        if rounding is None:
            return None  # no rounding that the native update knows gives this torch's bits
    held = {key for key, value in state.items() if value is not None}
    if isinstance(options, AdamHyperparams):
        if held - {"step", *ADAM_STATE_KEYS}:
            return None  # of an optimizer with other options, before
        step = int(state.get("step", 0)) + 1
        powers = beta_powers_on_gpu(options.betas, step) if options.fused and is_cuda_rounding else None
        return UpdateSpec(options, step, powers, rounding)
    if held - set(SGD_STATE_KEYS):
        return None
    return UpdateSpec(options, 2 if SGD_STATE_KEYS[0] in held else 1, rounding=rounding)


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
