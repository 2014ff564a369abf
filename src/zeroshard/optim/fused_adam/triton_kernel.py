# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
"""TritonKernel: fused Adam in one pass over GPU memory. Imported on first use, and only if there is a GPU.

[Note: bit-equal to torch's fused Adam]
The arithmetic is that of torch's fused Adam on a GPU, as torch 2.11 compiles it: the lines "CUDA, fused" of
[Note: equal to torch to the bit] in optim/cpu/kernels.py, all in fp32. Triton must therefore not fuse a multiply and an
add unless torch does (``enable_fp_fusion``), must round square root and division correctly, and must not flush
subnormal numbers to zero (``enable_reflect_ftz``). Torch computes the powers of beta, because their last bits depend on
the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.engine import GradScale
from zeroshard.optim.fused_adam.launch_table import ROW_FIELDS, LaunchTable, SliceTensors, make_tables
from zeroshard.optim.hyperparams import AdamHyperparams
from zeroshard.utils.kernel_loader import EXACT_FP_OPTIONS, current_device

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch do not include it
    triton = tl = None

BLOCK_NUMEL = 1024  # elements per program
NUM_WARPS = 4


def find_row(blocks, table, ROW: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's row of a launch table, its first element in the row, and how many are left from there."""
    program = tl.program_id(0)
    row = table + tl.load(blocks + program) * ROW
    first = (program - tl.load(row + 7)) * BLOCK
    remaining = tl.load(row + 5) - first
    if EVEN:  # here: a caller's hint for a result is lost when the call is inlined
        remaining = tl.multiple_of(remaining, 4)
    return row, first, remaining


if triton is not None:
    find_row = triton.jit(find_row)  # kernels can only call compiled functions


def fused_adam_kernel(
    blocks,  # int32: row of the table for each program
    table,  # int64: the rows of a ``LaunchTable``
    powers,  # fp32: beta1**step and beta2**step of each slice
    inverse,  # fp32 or None: inverse loss scale
    coefficient,  # fp32 or None: clip coefficient
    overflow,  # fp32 or None: nonzero if the update must be skipped
    lr,  # a number, or an fp32 tensor on the device
    beta1,
    beta2,
    eps,
    weight_decay,
    ROW: tl.constexpr,
    GRADIENT: tl.constexpr,  # dtype of the gradient
    COPY: tl.constexpr,  # dtype of the compute parameter; None: no copy besides the master weight
    EVEN: tl.constexpr,  # whether all addresses and lengths are aligned to vectors
    LR_ON_DEVICE: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of a row. Triton compiles this function, so it can only use ``tl``."""
    row, first, remaining = find_row(blocks, table, ROW, EVEN, BLOCK)
    if overflow is not None:
        remaining = tl.where(tl.load(overflow) == 0, remaining, 0)
        remaining = tl.multiple_of(remaining, 4) if EVEN else remaining
    gradient = tl.load(row).to(tl.pointer_type(GRADIENT)) + first
    master = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + first
    exp_avg = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + first
    exp_avg_sq = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + first
    if EVEN:  # four elements per load: 16 bytes in fp32, 8 in 16-bit dtypes
        gradient = tl.multiple_of(gradient, 16 if tl.float32 == GRADIENT else 8)
        master, exp_avg = tl.multiple_of(master, 16), tl.multiple_of(exp_avg, 16)
        exp_avg_sq = tl.multiple_of(exp_avg_sq, 16)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < remaining

    slice_index = tl.load(row + 6)
    correction1 = 1.0 - tl.load(powers + 2 * slice_index)
    correction2 = tl.sqrt_rn(1.0 - tl.load(powers + 2 * slice_index + 1))
    base_lr = tl.load(lr) if LR_ON_DEVICE else lr
    step_size = tl.div_rn(base_lr, correction1)

    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(master + offsets, mask=mask, other=0.0)
    m = tl.load(exp_avg + offsets, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)
    if inverse is not None:
        g = g * tl.load(inverse)
    if coefficient is not None:
        g = g * tl.load(coefficient)
    if MAXIMIZE:
        g = -g
    if DECAYS:
        p = tl.fma(-(base_lr * weight_decay), p, p)
    m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
    square = g * g
    v = tl.fma(beta2, v, tl.fma(-beta2, square, square))
    denom = tl.div_rn(tl.sqrt_rn(v), correction2) + eps
    p = p - tl.div_rn(step_size * m, denom)
    tl.store(master + offsets, p, mask=mask)
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if COPY is not None:
        compute_param = tl.load(row + 4).to(tl.pointer_type(COPY)) + first
        if EVEN:
            compute_param = tl.multiple_of(compute_param, 8)
        tl.store(compute_param + offsets, p.to(COPY), mask=mask)


class PreparedLaunch:
    """Launch tables of some slices, and buffers for their powers of beta."""

    def __init__(self, tables: list[LaunchTable], slice_count: int, device: torch.device) -> None:
        self.tables = tables
        self._betas = torch.empty(slice_count, 2, dtype=torch.float32, device=device)
        self._filled_betas: tuple[float, float] | None = None

    def beta_powers(self, betas: tuple[float, float], steps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return both betas to the power of each slice's step, [slices, 2], computed as in torch's fused kernel."""
        if betas != self._filled_betas:
            self._betas[:, 0].fill_(betas[0])
            self._betas[:, 1].fill_(betas[1])
            self._filled_betas = betas
        return torch.pow(self._betas, torch.stack(list(steps))[:, None])


class TritonKernel:
    """Fused Adam in Triton, compiled on first use: see [Note: bit-equal to torch's fused Adam]."""

    def __init__(self, device: torch.device, block: int = BLOCK_NUMEL, warps: int = NUM_WARPS) -> None:
        if triton is None:
            raise ImportError("Triton is not installed")
        self._device, self._block_numel, self._num_warps = device, block, warps
        self._compiled = triton.jit(fused_adam_kernel)
        self._triton_dtypes = {
            torch.float32: tl.float32,
            torch.bfloat16: tl.bfloat16,
            torch.float16: tl.float16,
            None: None,
        }

    def prepare(self, slice_tensors: Sequence[SliceTensors], slice_count: int) -> PreparedLaunch:
        """Record the addresses of the tensors of ``slice_count`` slices; keeps no tensor alive."""
        return PreparedLaunch(make_tables(slice_tensors, self._block_numel, self._device), slice_count, self._device)

    def run(
        self,
        launch: PreparedLaunch,
        steps: Sequence[torch.Tensor],
        hyperparams: AdamHyperparams,
        grad_scale: GradScale,
    ) -> None:
        """Update the slices. ``steps`` are their step counts, including this update."""
        beta_powers = launch.beta_powers(hyperparams.betas, steps)
        with current_device(self._device):
            for table in launch.tables:
                self._launch(table, beta_powers, hyperparams, grad_scale)

    def _launch(
        self, table: LaunchTable, beta_powers: torch.Tensor, hyperparams: AdamHyperparams, grad_scale: GradScale
    ) -> None:
        self._compiled[(table.program_rows.numel(),)](
            table.program_rows,
            table.rows,
            beta_powers,
            grad_scale.inv_scale,
            grad_scale.clip_coef,
            grad_scale.found_inf,
            hyperparams.lr,
            *hyperparams.betas,
            hyperparams.eps,
            hyperparams.weight_decay,
            ROW=ROW_FIELDS,
            GRADIENT=self._triton_dtypes[table.spec.grad_dtype],
            COPY=self._triton_dtypes[table.spec.compute_dtype],
            EVEN=table.spec.is_aligned,
            LR_ON_DEVICE=isinstance(hyperparams.lr, torch.Tensor),
            DECAYS=hyperparams.weight_decay != 0,
            MAXIMIZE=hyperparams.maximize,
            BLOCK=self._block_numel,
            num_warps=self._num_warps,
            **EXACT_FP_OPTIONS,
        )
