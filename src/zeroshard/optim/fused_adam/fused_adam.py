"""FusedAdam: step the optimizer slices on the device with Adam, in one pass over their memory.

[Note: fused Adam in one pass]
With bf16 and fp16, torch needs three passes: it copies gradients into an fp32 buffer, updates the master weights with
the fused kernel, and copies them into the parameters. This moves 40 bytes per parameter and needs the buffer. Here one
kernel reads the reduced gradient in place, unscales and clips it, updates master weight, momentum and variance, and
writes the 16-bit parameter into the local shard. This moves 28 bytes per parameter without a buffer, or 26 if no 16-bit
shard is kept ([Note: all-gathering from master weights]). The result is bit-equal to torch's
([Note: bit-equal to torch's fused Adam]). The states are also torch's: same names, in the optimizer's own ``state``.

A table on the device (``launch_table.py``) lists the addresses of all tensors. It is built once and stays valid until
an address changes, so a step is a few launches for any number of units, buckets and slices. The host never waits for
the device: the kernel reads step counts, loss scale, clip coefficient and overflow flag there. After an overflow,
nothing is written and the step is not counted, as in torch.

The kernel handles the groups that :func:`fused_hyperparams_from_group` supports, on a GPU with Triton. Torch updates
all other slices: see [Note: stepping in batches].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from zeroshard.engine import Engine, GradScale
from zeroshard.optim.fused_adam.launch_table import SliceTensors
from zeroshard.optim.hyperparams import ADAM_CLASSES, ADAM_STATE_KEYS, AdamHyperparams, fused_hyperparams_from_group
from zeroshard.optim.muon import MuonWithAdamW
from zeroshard.optim.slices import FlatRange, OptimizerSlice, defer_clip
from zeroshard.utils.kernel_loader import KernelLoader

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of gradients and of compute parameters
# cached launches: gradient addresses alternate between steps, and some parameters are not used in every step
MAX_PREPARED_LAUNCHES = 16


class FusedAdamKernel(Protocol):
    """A kernel that updates slices with Adam."""

    def prepare(self, slice_tensors: Sequence[SliceTensors], slice_count: int) -> Any:
        """Record the addresses of the tensors of ``slice_count`` slices."""

    def run(
        self, launch: Any, steps: Sequence[torch.Tensor], hyperparams: AdamHyperparams, grad_scale: GradScale
    ) -> None:
        """Update the slices. ``steps`` are their step counts, including this update."""


def kernel_for(optimizer: torch.optim.Optimizer, device: torch.device) -> FusedAdamKernel | None:
    """Return the kernel that can update slices of an optimizer on a device, or None if torch must update them.

    >>> kernel_for(torch.optim.AdamW([torch.zeros(1)], fused=True), torch.device("cpu"))
    """
    is_known = type(optimizer) in (*ADAM_CLASSES, MuonWithAdamW)
    fused = is_known and any(group.get("fused") for group in optimizer.param_groups)
    return KERNEL_LOADER.load(device) if fused else None


def _build_kernel(device: torch.device) -> FusedAdamKernel:
    from zeroshard.optim.fused_adam.triton_kernel import TritonKernel  # imported here because it imports Triton

    return TritonKernel(device)


def _self_test(kernel: FusedAdamKernel, device: torch.device) -> None:
    """Raise if the kernel does not compile, or its result differs from torch's."""
    gradient = torch.linspace(-1, 1, 100, dtype=torch.float32, device=device)
    step = torch.ones((), dtype=torch.float32, device=device)
    ours, expected = ([torch.full_like(gradient, start) for start in (1.0, 0.0, 0.0)] for _ in range(2))
    compute_param = torch.zeros_like(gradient, dtype=torch.bfloat16)
    kernel.run(
        kernel.prepare([SliceTensors(0, gradient, ours[0], ours[1], ours[2], compute_param)], 1),
        [step],
        AdamHyperparams(lr=0.01, weight_decay=0.1, fused=True, is_cuda_rounding=True),
        GradScale(),
    )
    torch._fused_adamw_(
        [expected[0]],
        [gradient],
        [expected[1]],
        [expected[2]],
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
    torch.testing.assert_close([*ours, compute_param], [*expected, expected[0].bfloat16()], rtol=1e-6, atol=1e-7)


KERNEL_LOADER = KernelLoader("fused Adam", _build_kernel, _self_test)


class FusedAdam:
    """Step the slices of one optimizer: see [Note: fused Adam in one pass]."""

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, kernel: FusedAdamKernel) -> None:
        self._inner, self._engine, self._kernel = inner, engine, kernel
        # whether the kernel can update a slice: dtypes, devices, layout
        self._eligibility: WeakKeyDictionary[OptimizerSlice, bool] = WeakKeyDictionary()
        self._prepared: dict[tuple[int, ...], Any] = {}  # launches by the addresses they are valid for

    def select(self, slices: list[OptimizerSlice]) -> list[OptimizerSlice]:
        """Return the slices that this kernel can update."""
        groups = {id(slice_.param_group): slice_.param_group for slice_ in slices}
        supported = {key for key, group in groups.items() if self._hyperparams(group) is not None}
        return [slice_ for slice_ in slices if id(slice_.param_group) in supported and self._can_update(slice_)]

    def step(self, slices: list[OptimizerSlice], grad_scale: GradScale) -> bool:
        """Update the slices. Each must have a gradient."""
        new_state_bytes = [slice_.parameter.nbytes for slice_ in slices if not self._inner.state.get(slice_.parameter)]
        self._engine.context.pool.reserve(new_state_bytes * len(ADAM_STATE_KEYS))
        by_group: dict[int, list[OptimizerSlice]] = {}
        for slice_ in slices:
            by_group.setdefault(id(slice_.param_group), []).append(slice_)
        for group_slices in by_group.values():
            hyperparams = self._hyperparams(group_slices[0].param_group)
            assert hyperparams is not None
            states = [self._get_or_init_state(slice_) for slice_ in group_slices]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            self._kernel.run(self._prepared_launch(group_slices, states), steps, hyperparams, grad_scale)
            if grad_scale.found_inf is not None:  # an overflow (1) does not count as a step
                torch._foreach_sub_(steps, [grad_scale.found_inf] * len(steps))
        defer_clip(self._engine.gradients, slices, grad_scale)
        return True

    def _hyperparams(self, group: dict[str, Any]) -> AdamHyperparams | None:
        rule = torch.optim.AdamW if group.get("rule") == "adamw" else type(self._inner)  # of MuonWithAdamW
        return fused_hyperparams_from_group(rule, group, self._engine.comm.device)

    # -- eligibility -------------------------------------------------------------------------------------------------

    def _can_update(self, slice_: OptimizerSlice) -> bool:
        is_eligible = self._eligibility.get(slice_)
        if is_eligible is None:
            is_eligible = self._eligibility[slice_] = self._is_eligible(slice_)
        return is_eligible and _has_fused_adam_states(self._inner.state.get(slice_.parameter) or {}, slice_.parameter)

    def _is_eligible(self, slice_: OptimizerSlice) -> bool:
        parameter, flat_grads = slice_.parameter, self._engine.gradients.flat_grads
        if slice_.tier_segment is not None or parameter.dtype != torch.float32 or not parameter.is_contiguous():
            return False
        for flat_range in slice_.flat_ranges:
            flat, gradient = flat_range.flat, flat_grads[flat_range.flat]
            if (
                flat.spec.has_offloaded_params
                or gradient.is_offloaded
                or gradient.dtype not in SUPPORTED_DTYPES
                or flat.dtype not in SUPPORTED_DTYPES
            ):
                return False
        return parameter.device.type == self._engine.comm.device.type

    # -- kernel inputs -----------------------------------------------------------------------------------------------

    def _get_or_init_state(self, slice_: OptimizerSlice) -> dict[str, Any]:
        """Return a slice's states; create them as torch does: [Note: separate pool for long-lived tensors]."""
        state: dict[str, Any] = self._inner.state[slice_.parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=slice_.parameter.device)
            for key in ADAM_STATE_KEYS:
                with self._engine.context.pool:
                    state[key] = torch.zeros_like(slice_.parameter.data)
        return state

    def _prepared_launch(self, slices: list[OptimizerSlice], states: list[dict[str, Any]]) -> Any:
        """Return the prepared launch for the slices; prepare it again if an address has changed."""
        key = tuple(self._addresses(slices, states))
        if key not in self._prepared:
            if len(self._prepared) == MAX_PREPARED_LAUNCHES:
                self._prepared.clear()
            numbered = enumerate(zip(slices, states, strict=True))
            slice_tensors = [
                tensors for index, (slice_, state) in numbered for tensors in self._slice_tensors(index, slice_, state)
            ]
            self._prepared[key] = self._kernel.prepare(slice_tensors, len(slices))
        return self._prepared[key]

    def _addresses(self, slices: list[OptimizerSlice], states: list[dict[str, Any]]) -> Iterator[int]:
        """Yield a key that changes if any tensor moves. In a flat, the first address determines the others."""
        flat_grads = self._engine.gradients.flat_grads
        for slice_, state in zip(slices, states, strict=True):
            yield slice_.parameter.numel()
            yield slice_.parameter.data_ptr()
            yield from (state[key].data_ptr() for key in ADAM_STATE_KEYS)
            for flat_range in slice_.flat_ranges if slice_.parameter.numel() else ():
                shard = flat_grads[flat_range.flat].shard
                assert shard is not None
                yield shard.data_ptr()
                yield 0 if flat_range.flat.spec.is_cast_from_master else flat_range.flat.local_shards[0].data_ptr()

    def _slice_tensors(self, slice_index: int, slice_: OptimizerSlice, state: dict[str, Any]) -> Iterator[SliceTensors]:
        offset = 0
        for flat_range in slice_.flat_ranges if slice_.parameter.numel() else ():
            for start, gradient, param_view in self._grad_and_param_views(flat_range):
                span = slice(offset + start, offset + start + gradient.numel())
                master = slice_.parameter.data[span]
                compute_param = None if param_view is None or param_view.data_ptr() == master.data_ptr() else param_view
                yield SliceTensors(
                    slice_index,
                    gradient,
                    master,
                    state[ADAM_STATE_KEYS[0]][span],
                    state[ADAM_STATE_KEYS[1]][span],
                    compute_param,
                )
            offset += flat_range.span.numel

    def _grad_and_param_views(self, flat_range: FlatRange) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield (offset in the range, gradient, compute parameter or None if none is kept), bucket by bucket."""
        flat, shard = flat_range.flat, self._engine.gradients.flat_grads[flat_range.flat].shard
        assert shard is not None
        for bucket_index, shard_range in enumerate(flat.shard_ranges):
            overlap = shard_range.intersect(flat_range.span)
            if overlap is not None:
                within = slice(overlap.start - shard_range.start, overlap.end - shard_range.start)
                param_view = None if flat.spec.is_cast_from_master else flat.local_shards[bucket_index][within]
                yield overlap.start - flat_range.span.start, shard[overlap.slice], param_view


def _has_fused_adam_states(state: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Return whether a slice has no states yet, or exactly those of fused Adam."""
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
