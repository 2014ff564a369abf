"""OnePass: a step of fused Adam over runs that rest on the device, in one pass over their memory.

[Note: fused Adam in one pass]
Under bf16 and fp16 torch's way is three passes: gradients are copied into a buffer in fp32, the fused kernel updates
the master, and the master is copied into the parameters: 40 bytes a parameter, and the buffer. One kernel reads the
reduced gradient where it lies, unscales and clips it on the way, updates master, momentum and variance, and writes the
parameter in 16 bits into this rank's part: 28 bytes, and no buffer; 26, where no such part is kept ([Note:
all-gathering from master weights]). The result is torch's to the bit ([Note: bit-equal to torch's fused Adam]); the
states are torch's too, under its names, in the optimizer's own ``state``.

Where things lie is noted once, in a table on the device (``table.py``), and holds as long as the addresses do. So a
step is a few launches, however many units, buckets and runs there are. Nothing waits for the device: step counts, loss
scale, clip and overflow are read there. After an overflow nothing is written, and no step counted, as by torch.

Served is what :func:`zeroshard.optim.fused_adam.kernel_inputs.fused_hyperparams_from_group` knows, on a GPU with
Triton; everything else goes torch's way, run by run: see [Note: stepping in batches].
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from zeroshard.engine.engine import Engine
from zeroshard.optim.fused_adam.kernel_inputs import (
    ADAM_STATE_KEYS,
    SUPPORTED_DTYPES,
    SUPPORTED_OPTIMIZERS,
    FusedAdamHyperparams,
    GradScale,
    SliceTensors,
    fused_hyperparams_from_group,
)
from zeroshard.optim.slices import FlatRange, OptimizerSlice

MAX_PREPARED_LAUNCHES = (
    16  # tables that are kept: gradients lie now here, now there, and some parameters are used now and then
)


class FusedAdamKernel(Protocol):
    """What updates strips."""

    def prepare(self, slice_tensors: Sequence[SliceTensors], slice_count: int) -> Any:
        """Note where strips of so many runs lie."""

    def run(
        self, launch: Any, steps: Sequence[torch.Tensor], hyperparams: FusedAdamHyperparams, grad_scale: GradScale
    ) -> None:
        """Update them. ``steps`` are the runs' counts, this update counted too."""


def kernel_for(optimizer: torch.optim.Optimizer, device: torch.device) -> FusedAdamKernel | None:
    """The kernel that may update parts of an optimizer's parameters on a device; None: torch does.

    >>> kernel_for(torch.optim.AdamW([torch.zeros(1)], fused=True), torch.device("cpu"))
    """
    if device.type != "cuda" or torch.version.cuda is None or type(optimizer) not in SUPPORTED_OPTIMIZERS:
        return None
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return _load_kernel(device) if fused else None


@functools.cache
def _load_kernel(device: torch.device) -> FusedAdamKernel | None:
    try:
        from zeroshard.optim.fused_adam.triton_kernel import TritonKernel  # late: it imports Triton

        found = TritonKernel(device)
        _self_test(found, device)
        return found
    except Exception as error:  # Triton has many, of its own and of the C compiler's that it calls
        warnings.warn(
            f"the optimizer's update in one pass could not be made, so torch's own slower one runs on {device}: "
            f"{type(error).__name__}: {error}. Install Triton, and a C compiler with Python's headers for it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _self_test(kernel: FusedAdamKernel, device: torch.device) -> None:
    """Raise where the kernel does not compile, or does something else than torch's."""
    gradient, step = torch.linspace(-1, 1, 100, device=device), torch.ones((), device=device)
    ours, theirs = ([torch.full_like(gradient, start) for start in (1.0, 0.0, 0.0)] for _ in range(2))
    copy = torch.zeros_like(gradient, dtype=torch.bfloat16)
    kernel.run(
        kernel.prepare([SliceTensors(0, gradient, ours[0], ours[1], ours[2], copy)], 1),
        [step],
        FusedAdamHyperparams(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, maximize=False),
        GradScale(),
    )
    torch._fused_adamw_(
        [theirs[0]],
        [gradient],
        [theirs[1]],
        [theirs[2]],
        [],
        [step],
        lr=0.01,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    torch.testing.assert_close([*ours, copy], [*theirs, theirs[0].bfloat16()], rtol=1e-6, atol=1e-7)


class FusedAdam:
    """Steps one optimizer's runs: see [Note: fused Adam in one pass]."""

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, kernel: FusedAdamKernel) -> None:
        self._inner, self._engine, self._kernel = inner, engine, kernel
        self._eligibility: WeakKeyDictionary[OptimizerSlice, bool] = (
            WeakKeyDictionary()
        )  # whether a run lies where the kernel can go
        self._prepared: dict[tuple[int, ...], Any] = {}  # by the addresses that it holds for

    def partition(self, slices: list[OptimizerSlice]) -> tuple[list[OptimizerSlice], list[OptimizerSlice]]:
        """The runs that are updated here, and those that torch is to update."""
        served = {id(run.param_group): run.param_group for run in slices}
        kind, device = type(self._inner), self._engine.comm.device
        served = {
            key: group for key, group in served.items() if fused_hyperparams_from_group(kind, group, device) is not None
        }
        ours = [run for run in slices if id(run.param_group) in served and self._can_update(run)]
        chosen = set(map(id, ours))
        return ours, [run for run in slices if id(run) not in chosen]

    def step(self, slices: list[OptimizerSlice], grad_scale: GradScale) -> None:
        """Update the runs, of which each has a gradient."""
        new = [run.parameter.nbytes for run in slices if not self._inner.state.get(run.parameter)]
        self._engine.pool.reserve(new * len(ADAM_STATE_KEYS))
        by_group: dict[int, list[OptimizerSlice]] = {}
        for run in slices:
            by_group.setdefault(id(run.param_group), []).append(run)
        for found in by_group.values():
            numbers = fused_hyperparams_from_group(type(self._inner), found[0].param_group, self._engine.comm.device)
            assert numbers is not None
            states = [self._get_or_init_state(run) for run in found]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            self._kernel.run(self._prepared_launch(found, states), steps, numbers, grad_scale)
            if grad_scale.overflow is not None:  # it was no step, then
                torch._foreach_sub_(steps, [grad_scale.overflow] * len(steps))

    # -- which runs --------------------------------------------------------------------------------------------------

    def _can_update(self, slice_: OptimizerSlice) -> bool:
        suits = self._eligibility.get(slice_)
        if suits is None:
            suits = self._eligibility[slice_] = self._is_eligible(slice_)
        return suits and _has_fused_adam_states(self._inner.state.get(slice_.parameter) or {}, slice_.parameter)

    def _is_eligible(self, slice_: OptimizerSlice) -> bool:
        parameter, gradients = slice_.parameter, self._engine.gradients.flat_grads
        if slice_.tier_segment is not None or parameter.dtype != torch.float32 or not parameter.is_contiguous():
            return False
        for part in slice_.flat_ranges:
            flat, gradient = part.flat, gradients[part.flat]
            if (
                flat.is_offloaded
                or gradient.is_offloaded
                or gradient.dtype not in SUPPORTED_DTYPES
                or flat.dtype not in SUPPORTED_DTYPES
            ):
                return False
        return parameter.device.type == self._engine.comm.device.type

    # -- what of them ------------------------------------------------------------------------------------------------

    def _get_or_init_state(self, slice_: OptimizerSlice) -> dict[str, Any]:
        """Create a slice's states as torch does: [Note: separate pool for long-lived tensors]."""
        state: dict[str, Any] = self._inner.state[slice_.parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=slice_.parameter.device)
            for key in ADAM_STATE_KEYS:
                with self._engine.pool:
                    state[key] = torch.zeros_like(slice_.parameter.data)
        return state

    def _prepared_launch(self, slices: list[OptimizerSlice], states: list[dict[str, Any]]) -> Any:
        """What the kernel has noted of the runs, as long as nothing has moved."""
        key = tuple(self._addresses(slices, states))
        if key not in self._prepared:
            if len(self._prepared) == MAX_PREPARED_LAUNCHES:
                self._prepared.clear()
            found = enumerate(zip(slices, states, strict=True))
            strips = [strip for number, (run, state) in found for strip in self._slice_tensors(number, run, state)]
            self._prepared[key] = self._kernel.prepare(strips, len(slices))
        return self._prepared[key]

    def _addresses(self, slices: list[OptimizerSlice], states: list[dict[str, Any]]) -> Iterator[int]:
        """Numbers that differ where anything lies elsewhere: in a flat, all places follow from the first."""
        gradients = self._engine.gradients.flat_grads
        for run, state in zip(slices, states, strict=True):
            yield run.parameter.numel()
            yield run.parameter.data_ptr()
            yield from (state[key].data_ptr() for key in ADAM_STATE_KEYS)
            for part in run.flat_ranges if run.parameter.numel() else ():
                shard = gradients[part.flat].shard
                assert shard is not None
                yield shard.data_ptr()
                yield 0 if part.flat.is_cast_from_master else part.flat.local_shards[0].data_ptr()

    def _slice_tensors(self, slice_index: int, slice_: OptimizerSlice, state: dict[str, Any]) -> Iterator[SliceTensors]:
        offset = 0
        for part in slice_.flat_ranges if slice_.parameter.numel() else ():
            for start, gradient, place in self._grad_and_param_views(part):
                here = slice(offset + start, offset + start + gradient.numel())
                master = slice_.parameter.data[here]
                copy = None if place is None or place.data_ptr() == master.data_ptr() else place
                yield SliceTensors(
                    slice_index,
                    gradient,
                    master,
                    state[ADAM_STATE_KEYS[0]][here],
                    state[ADAM_STATE_KEYS[1]][here],
                    copy,
                )
            offset += part.span.numel

    def _grad_and_param_views(self, flat_range: FlatRange) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield (first element in the part, gradient, parameter in computation, if it is kept), bucket by bucket."""
        flat, shard = flat_range.flat, self._engine.gradients.flat_grads[flat_range.flat].shard
        assert shard is not None
        for number, home in enumerate(flat.shard_ranges):
            common = home.intersect(flat_range.span)
            if common is not None:
                within = slice(common.start - home.start, common.end - home.start)
                place = None if flat.is_cast_from_master else flat.local_shards[number][within]
                yield common.start - flat_range.span.start, shard[common.slice], place


def _has_fused_adam_states(state: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether a run has no states yet, or those of a fused Adam and no others."""
    if not state:
        return True
    if state.keys() != {"step", *ADAM_STATE_KEYS} or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        return False
    step, moments = state["step"], [state[key] for key in ADAM_STATE_KEYS]
    if step.device != parameter.device or step.dtype != torch.float32 or step.dim():
        return False
    return all(
        m.device == parameter.device and m.dtype == torch.float32 and m.shape == parameter.shape and m.is_contiguous()
        for m in moments
    )
