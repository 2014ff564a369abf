"""The update of one state chunk, on the worker thread."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.engine import Gradients, GradScale
from zeroshard.memory import TierAllocator, local_world_size, record_blocking_event
from zeroshard.optim.cpu.chunk import MASTER_KEY, StateChunk
from zeroshard.optim.cpu.kernels import (
    DTYPE_CODES,
    CpuKernels,
    KernelHandle,
    KernelThreads,
    Rounding,
    beta_powers_on_gpu,
    load_kernels,
)
from zeroshard.optim.cpu.rounding import detect_torch_rounding
from zeroshard.optim.cpu.staging import PinnedStaging
from zeroshard.optim.hyperparams import (
    ADAM_STATE_KEYS,
    SGD_STATE_KEYS,
    AdamHyperparams,
    SGDHyperparams,
    hyperparams_from_group,
)
from zeroshard.optim.slices import OptimizerSlice, as_plain_parameters, is_elementwise


@dataclass(frozen=True)
class GradScaleValues:
    """The gradient scale of a step, as Python numbers."""

    is_finite: bool = True
    """False if a gradient overflowed on some rank; then nothing is updated."""
    inv_scale: float | None = None
    """The inverse loss scale."""
    clip_coef: float | None = None
    """The clip coefficient."""

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors to multiply gradients by, in this order."""
        return tuple(factor for factor in (self.inv_scale, self.clip_coef) if factor is not None)


class GradScaleReadback:
    """A copy of a GradScale to the host. Started on the step's thread, read on the worker.

    >>> GradScaleReadback(GradScale(clip_coef=torch.tensor(0.5))).read()
    GradScaleValues(is_finite=True, inv_scale=None, clip_coef=0.5)
    """

    def __init__(self, grad_scale: GradScale) -> None:
        given = {field: value for field, value in vars(grad_scale).items() if value is not None}
        scalars = {field: value.detach().float().reshape(()) for field, value in given.items()}
        self._names = list(scalars)
        self._values: torch.Tensor | None = None
        self.ready_event: torch.cuda.Event | None = None  # the copy to the host
        if scalars:
            values = torch.stack(list(scalars.values()))
            on_gpu = values.device.type == "cuda"
            self._values = torch.empty(len(scalars), dtype=torch.float32, pin_memory=on_gpu, device="cpu")
            self._values.copy_(values, non_blocking=True)
            self.ready_event = record_blocking_event(torch.cuda.current_stream()) if on_gpu else None

    def read(self) -> GradScaleValues:
        """Wait for the device and return the values."""
        if self.ready_event is not None:
            self.ready_event.synchronize()
        values = dict(zip(self._names, self._values.tolist() if self._values is not None else (), strict=True))
        return GradScaleValues(not values.get("found_inf"), values.get("inv_scale"), values.get("clip_coef"))


@dataclass(frozen=True)
class UpdateSpec:
    """The hyper-parameters of a slice's next update, and its step count including this update."""

    hyperparams: AdamHyperparams | SGDHyperparams
    step: int
    beta_powers: tuple[float, float] | None = None  # of Adam's betas, to match the fused kernel of a GPU
    rounding: Rounding | None = None  # of this torch on this CPU; None to match a GPU

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The keys of the optimizer states."""
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
        """Read the ``old`` values and write the ``new`` ones, both by key.

        With ``kernel_threads`` the update is only started: see :class:`CpuKernels`.
        """
        common: dict[str, Any] = {
            "copy": copy,
            "grad_factors": grad_factors,
            "threads": threads,
            "kernel_threads": kernel_threads,
            "rounding": self.rounding,
        }
        if isinstance(self.hyperparams, AdamHyperparams):
            parameter, exp_avg, exp_avg_sq = (old[key] for key in (MASTER_KEY, *ADAM_STATE_KEYS))
            out = (new[MASTER_KEY], new[ADAM_STATE_KEYS[0]], new[ADAM_STATE_KEYS[1]])
            adam: dict[str, Any] = {"out": out, "step": self.step, "beta_powers": self.beta_powers, **common}
            return kernels.adam(parameter, exp_avg, exp_avg_sq, gradient, self.hyperparams, **adam)
        momentum = old.get(SGD_STATE_KEYS[0]) if self.step > 1 else None  # the first step sets it to the gradient
        new_states = (new[MASTER_KEY], new.get(SGD_STATE_KEYS[0]))
        return kernels.sgd(old[MASTER_KEY], momentum, gradient, self.hyperparams, out=new_states, **common)


def make_update_spec(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    state: dict[str, Any],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    is_cuda_rounding: bool = False,
) -> UpdateSpec | None:
    """Return the spec of a slice's next update; None if only torch's own update is correct.

    ``dtypes`` are those of the master weights, the gradient and the compute-dtype parameters. ``is_cuda_rounding``: the
    model computes on a GPU, and the update must give the GPU's results.
    """
    hyperparams = hyperparams_from_group(optimizer, group, is_cuda_rounding)
    if hyperparams is None or dtypes[0] != torch.float32 or any(dtype not in DTYPE_CODES for dtype in dtypes):
        return None
    rounding = None
    if not is_cuda_rounding:
        rounding = detect_torch_rounding(
            "adam" if isinstance(hyperparams, AdamHyperparams) else "sgd", hyperparams.fused
        )
        if rounding is None:
            return None  # the native kernels support no rounding that gives this torch's bits
    held = {key for key, value in state.items() if value is not None}
    if isinstance(hyperparams, AdamHyperparams):
        if held - {"step", *ADAM_STATE_KEYS}:
            return None  # from an optimizer with other hyper-parameters, earlier
        step = int(state.get("step", 0)) + 1
        powers = beta_powers_on_gpu(hyperparams.betas, step) if hyperparams.fused and is_cuda_rounding else None
        return UpdateSpec(hyperparams, step, powers, rounding)
    if held - set(SGD_STATE_KEYS):
        return None
    return UpdateSpec(hyperparams, 2 if SGD_STATE_KEYS[0] in held else 1, rounding=rounding)


@dataclass(frozen=True)
class ChunkUpdate:
    """The update of one state chunk in one step."""

    chunk: StateChunk
    slices: tuple[OptimizerSlice, ...]
    states: tuple[dict[str, Any], ...]  # of the slices; the optimizer's own may change before the update runs
    specs: tuple[UpdateSpec, ...] | None  # None: torch does the update
    param_groups: tuple[dict[str, Any], ...]  # of the slices, as they were at the step
    is_exclusive: bool  # no other job may be in flight: see [Note: overlapping Python with native kernels]

    @property
    def state_keys(self) -> list[str]:
        """The keys of the states that native kernels update."""
        return list(dict.fromkeys(key for spec in self.specs or () for key in spec.state_keys))

    def increment_steps(self) -> None:
        """Count this update in the step counts of the slices."""
        for state in self.states:
            if "step" in state:
                state["step"] += 1


class ChunkUpdater:
    """Update state chunks with native kernels or with torch. ``step_event`` is always the event recorded by the step.

    A generator method yields once its kernels run, unless its update is exclusive. When it is resumed, it waits for
    them before it returns.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        gradients: Gradients,
        tiers: TierAllocator,
        staging: PinnedStaging,
        kernels: CpuKernels | None,
    ) -> None:
        self._inner, self._gradients, self._tiers, self._staging = inner, gradients, tiers, staging
        self._kernels = kernels
        self._thread_count = (tiers.offload.threads if tiers.offload is not None else None) or default_threads()
        self._kernel_threads = None if kernels is None else kernels.make_threads()

    def speculate(self, update: ChunkUpdate, grad_scale: GradScaleValues) -> Generator[None, None, None]:
        """Update a chunk in its shadow buffers."""
        chunk = update.chunk
        yield from self._apply_native(update, chunk.tensors, chunk.shadow, chunk.shadow_params, grad_scale)

    def commit(self, update: ChunkUpdate, step_event: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Commit a speculative update and copy the new parameters to the device."""
        chunk = update.chunk
        chunk.swap(update.state_keys, dict(zip(update.slices, update.states, strict=True)))
        update.increment_steps()
        return self._staging.copy_to_device(chunk.param_shard, chunk.shadow_params, step_event)

    def update(
        self,
        update: ChunkUpdate,
        tensors: dict[str, torch.Tensor],
        grad_scale: GradScaleValues,
        step_event: torch.cuda.Event | None,
    ) -> Generator[None, None, torch.cuda.Event | None]:
        """Update a chunk whose values are in ``tensors`` by key, and copy the new parameters to the parameter shard."""
        chunk = update.chunk
        if update.specs is None:
            with self._using_buffers(update, tensors):
                self._apply_torch(update, tensors, grad_scale)
                return self.copy_masters_to_params(chunk, list(update.slices), step_event)
        if self._staging.can_write_directly(chunk.param_shard, step_event):
            yield from self._apply_native(update, tensors, tensors, chunk.param_shard, grad_scale)
            update.increment_steps()
            return None
        slot, copy = None, chunk.shadow_params
        if copy is None:  # there are few slots, and they stay in use until the device reaches the step
            slot = self._staging.acquire_slot()
            copy = slot.param_view(chunk)
        yield from self._apply_native(update, tensors, tensors, copy, grad_scale)
        update.increment_steps()
        is_complete = chunk.is_fully_covered and len(update.slices) == len(chunk.slices)
        event = None
        for span in [slice(None)] if is_complete else [chunk.range_of(slice_).slice for slice_ in update.slices]:
            event = self._staging.copy_to_device(chunk.param_shard[span], copy[span], step_event)
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
        """Update with native kernels; one slice at a time if exclusive, as the slices may share one gradient buffer."""
        handles: list[KernelHandle] = []
        assert self._kernels is not None
        try:
            for slice_, spec in zip(update.slices, update.specs or (), strict=True):
                span = update.chunk.range_of(slice_).slice
                handle = spec.apply(
                    self._kernels,
                    {key: old[key][span] for key in (MASTER_KEY, *spec.state_keys)},
                    {key: new[key][span] for key in (MASTER_KEY, *spec.state_keys)},
                    self._staging.fetch_grad(slice_, self._gradients),
                    None if copy is None else copy[span],
                    grad_scale.factors,
                    self._thread_count,
                    None if update.is_exclusive else self._kernel_threads,
                )
                handles.append(handle)
            if not update.is_exclusive:
                yield
        finally:
            for handle in handles:
                handle.wait()

    @contextlib.contextmanager
    def _using_buffers(self, update: ChunkUpdate, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """Point the slices and states of a chunk on disk at host buffers."""
        chunk = update.chunk
        if chunk.tier != "disk":
            yield
            return
        self._set_data(update, tensors)
        try:
            yield
        finally:
            self._set_data(update, chunk.tensors)

    def _set_data(self, update: ChunkUpdate, tensors: dict[str, torch.Tensor]) -> None:
        for slice_, state in zip(update.slices, update.states, strict=True):
            span = update.chunk.range_of(slice_).slice
            slice_.parameter.data = tensors[MASTER_KEY][span]
            for key in update.chunk.states:
                if is_elementwise(key, state.get(key), slice_.parameter.shape) and key in tensors:
                    state[key] = tensors[key][span]

    def _apply_torch(self, update: ChunkUpdate, tensors: dict[str, torch.Tensor], grad_scale: GradScaleValues) -> None:
        """Step a shallow copy of the user's optimizer on these slices: another thread owns the optimizer itself."""
        copied: Any = copy.copy(self._inner)
        copied.param_groups = []
        states = zip(update.slices, update.states, strict=True)
        grads: list[torch.Tensor] = []
        copied.state = defaultdict(dict, {slice_.parameter: state for slice_, state in states})
        for slice_, group in zip(update.slices, update.param_groups, strict=True):
            gradient = self._staging.fetch_grad(slice_, self._gradients)
            grad = gradient.to(slice_.parameter.dtype, copy=True)
            for factor in grad_scale.factors:
                grad.mul_(factor)
            grads.append(grad)
            copied.param_groups.append({**group, "params": [slice_.parameter]})
        with as_plain_parameters([slice_.parameter for slice_ in update.slices]):
            for slice_, grad in zip(update.slices, grads, strict=True):
                slice_.parameter.grad = grad
            type(self._inner).step(copied)
        for slice_, state in zip(update.slices, update.states, strict=True):
            update.chunk.adopt_states(slice_, state, self._tiers, tensors)

    def copy_masters_to_params(
        self, chunk: StateChunk, slices: list[OptimizerSlice], step_event: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy master weights that were updated elsewhere to the compute-dtype parameters."""
        if self._staging.can_write_directly(chunk.param_shard, step_event):
            for slice_ in slices:
                chunk.param_shard[chunk.range_of(slice_).slice].copy_(slice_.parameter.data)
            return None
        slot = self._staging.acquire_slot()
        for slice_ in slices:
            span = chunk.range_of(slice_).slice
            slot.param_view(chunk)[span].copy_(slice_.parameter.data)
            slot.copy_done = self._staging.copy_to_device(
                chunk.param_shard[span], slot.param_view(chunk)[span], step_event
            )
        return slot.copy_done


def default_threads() -> int:
    """Return this rank's share of the CPUs minus two: one launches device work, one runs backward."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors // local_world_size() - 2)


def make_adam_update(numel: int) -> Callable[[], object]:
    """Return a function that updates ``numel`` new parameters as an offloaded step with AdamW does, to be measured.

    The gradient and the copy of the parameters are in bf16.

    >>> update = make_adam_update(1000)
    """
    states = torch.randn(numel, device="cpu"), torch.zeros(numel, device="cpu"), torch.zeros(numel, device="cpu")
    kernels = load_kernels()
    if kernels is None:  # an offloaded step would use torch's AdamW
        parameter = torch.nn.Parameter(states[0])
        parameter.grad = torch.randn(numel, device="cpu")
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        return lambda: optimizer.step()
    hyperparams, threads = AdamHyperparams(lr=1e-3, weight_decay=0.1), default_threads()
    gradient = torch.randn(numel, device="cpu").bfloat16()
    copied = torch.zeros_like(gradient)
    return lambda: kernels.adam(*states, gradient, hyperparams, out=states, step=10, copy=copied, threads=threads)
