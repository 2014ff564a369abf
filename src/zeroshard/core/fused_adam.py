"""FusedAdam: step slices with Adam on a GPU, in one pass over memory, by a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.core.engine import Engine
from zeroshard.core.slices import Slice
from zeroshard.engine import GradScale
from zeroshard.optim.fused_adam.fused_adam import FusedAdamKernel, kernel_for
from zeroshard.optim.fused_adam.launch_table import SliceTensors
from zeroshard.optim.hyperparams import ADAM_STATE_KEYS, fused_hyperparams_from_group

MAX_PREPARED_LAUNCHES = 16  # gradient addresses alternate between steps


class FusedAdam:
    """Reads reduced gradients, updates masters and states, and writes 16-bit parameters: to the bit as torch does."""

    def __init__(self, inner: Optimizer, engine: Engine, kernel: FusedAdamKernel) -> None:
        self._inner = inner
        self._engine = engine
        self._kernel: Any = kernel
        self._launches: dict[Any, Any] = {}  # by the addresses they are valid for

    @classmethod
    def of(cls, inner: Optimizer, engine: Engine) -> FusedAdam | None:
        """Return what steps an optimizer, or None if torch must."""
        kernel = kernel_for(inner, engine.device)
        is_fp32 = all(flat.master_dtype is torch.float32 for flat in engine.flats if flat.is_trainable)
        return cls(inner, engine, kernel) if kernel is not None and is_fp32 else None

    def can_step(self) -> bool:
        """Return whether the kernel supports the options of all groups."""
        return all(
            fused_hyperparams_from_group(type(self._inner), group, self._engine.device) is not None
            for group in self._inner.param_groups
        )

    def step(self, slices: list[Slice], found_inf: torch.Tensor | None) -> None:
        """Update slices, which all have a gradient, if ``found_inf`` is 0."""
        missing = [each.values.nbytes for each in slices if not self._inner.state.get(each.values)]
        self._engine.context.pool.reserve(missing * len(ADAM_STATE_KEYS))
        by_group: dict[int, list[Slice]] = {}
        for each in slices:
            by_group.setdefault(each.group, []).append(each)
        for number, group_slices in by_group.items():
            group = self._inner.param_groups[number]
            hyperparams = fused_hyperparams_from_group(type(self._inner), group, self._engine.device)
            states = [self._state(each) for each in group_slices]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            self._kernel.run(
                self._launch(group_slices, states), steps, hyperparams, self._factors(group_slices, found_inf)
            )
            if found_inf is not None:  # an overflow does not count as a step
                torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _factors(self, slices: list[Slice], found_inf: torch.Tensor | None) -> GradScale:
        """Return what the kernel multiplies the gradients of all slices with."""
        gradients = [self._engine.gradient_of[each.flat] for each in slices]
        factor = gradients[0].factor
        if any(gradient.factor is not factor for gradient in gradients):
            for gradient in gradients:
                gradient.set_factor(None)
        return GradScale(clip_coef=gradients[0].factor, found_inf=found_inf)

    def _state(self, each: Slice) -> dict[str, Any]:
        state: dict[str, Any] = self._inner.state[each.values]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=each.values.device)
            for key in ADAM_STATE_KEYS:
                with self._engine.context.pool:
                    state[key] = torch.zeros_like(each.values.data)
        return state

    def _launch(self, slices: list[Slice], states: list[dict[str, Any]]) -> Any:
        tensors = list(self._tensors(slices, states))
        rows = [(row.slice_index, row.master.numel(), *map(_address, row[1:])) for row in tensors]
        key = (len(slices), *rows)
        if key not in self._launches:
            if len(self._launches) == MAX_PREPARED_LAUNCHES:
                self._launches.clear()
            self._launches[key] = self._kernel.prepare(tensors, len(slices))
        return self._launches[key]

    def _tensors(self, slices: list[Slice], states: list[dict[str, Any]]) -> Iterator[SliceTensors]:
        for number, (each, state) in enumerate(zip(slices, states, strict=True)):
            flat = each.flat
            gradient = each.gradient(self._engine.gradient_of)
            exp_avg = state[ADAM_STATE_KEYS[0]]
            exp_avg_sq = state[ADAM_STATE_KEYS[1]]
            written = flat.kept_master[each.span_of(flat.state_span, each.indices)] if flat.copies_master else None
            if gradient.numel():
                yield SliceTensors(number, gradient, each.values.data, exp_avg, exp_avg_sq, written)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
