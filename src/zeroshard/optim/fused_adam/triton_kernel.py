# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
"""Kernel: Adam in one pass over memory on a GPU, in Triton. Imported late, and only where a GPU is.

[Note: bit-equal to torch's fused Adam]
The arithmetic is that of torch's fused Adam on a GPU, as torch 2.11 compiles it: the lines "CUDA, fused" of [Note:
equal to torch to the bit] in optim/cpu/kernels.py, in fp32 throughout. So Triton must fuse no product into a sum where
none is fused there (``enable_fp_fusion``), square root and division are the correctly rounded ones, and subnormal
numbers stay what they are (``enable_reflect_ftz``). Powers of beta are torch's own: their last bits are the GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.optim.fused_adam.kernel_inputs import FusedAdamHyperparams, GradScale, SliceTensors
from zeroshard.optim.fused_adam.launch_table import ROW_FIELDS, LaunchTable, make_tables

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs comes without it
    triton = tl = None

BLOCK_NUMEL = 1024  # elements that one program updates
NUM_WARPS = 4
EXACT_FP_OPTIONS = {
    "enable_fp_fusion": False,
    "enable_reflect_ftz": False,
}  # see [Note: bit-equal to torch's fused Adam]


def fused_adam_kernel(
    blocks,  # int32: which row of the table each program works at
    table,  # int64, rows as ``LaunchTable`` has them
    powers,  # fp32: beta1 and beta2 to the power of the step, of each run
    inverse,  # fp32 or None: of the loss scale
    coefficient,  # fp32 or None: of a clip
    overflow,  # fp32 or None: not 0 where nothing is to be updated
    lr,  # a number, or fp32 on the device
    beta1,
    beta2,
    eps,
    weight_decay,
    ROW: tl.constexpr,
    GRADIENT: tl.constexpr,  # its dtype
    COPY: tl.constexpr,  # dtype of the parameter in computation, or None: it is the master itself
    EVEN: tl.constexpr,  # whether all addresses and lengths suit vectors
    LR_ON_DEVICE: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of a strip. Triton compiles it: its names are those of ``tl``."""
    program = tl.program_id(0)
    row = table + tl.load(blocks + program) * ROW
    first = (program - tl.load(row + 7)) * BLOCK
    left = tl.load(row + 5) - first
    if overflow is not None:
        left = tl.where(tl.load(overflow) == 0, left, 0)
    gradient = tl.load(row).to(tl.pointer_type(GRADIENT)) + first
    master = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + first
    momentum = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + first
    variance = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + first
    if EVEN:  # four elements a load: 16 bytes in fp32, 8 in 16 bits
        left = tl.multiple_of(left, 4)
        gradient = tl.multiple_of(gradient, 16 if tl.float32 == GRADIENT else 8)
        master, momentum = tl.multiple_of(master, 16), tl.multiple_of(momentum, 16)
        variance = tl.multiple_of(variance, 16)
    at = tl.arange(0, BLOCK)
    mask = at < left

    run = tl.load(row + 6)
    correction1 = 1.0 - tl.load(powers + 2 * run)
    correction2 = tl.sqrt_rn(1.0 - tl.load(powers + 2 * run + 1))
    pace = tl.load(lr) if LR_ON_DEVICE else lr
    rate = tl.div_rn(pace, correction1)

    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(master + at, mask=mask, other=0.0)
    m = tl.load(momentum + at, mask=mask, other=0.0)
    v = tl.load(variance + at, mask=mask, other=0.0)
    if inverse is not None:
        g = g * tl.load(inverse)
    if coefficient is not None:
        g = g * tl.load(coefficient)
    if MAXIMIZE:
        g = -g
    if DECAYS:
        p = tl.fma(-(pace * weight_decay), p, p)
    m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
    square = g * g
    v = tl.fma(beta2, v, tl.fma(-beta2, square, square))
    root = tl.div_rn(tl.sqrt_rn(v), correction2) + eps
    p = p - tl.div_rn(rate * m, root)
    tl.store(master + at, p, mask=mask)
    tl.store(momentum + at, m, mask=mask)
    tl.store(variance + at, v, mask=mask)
    if COPY is not None:
        copy = tl.load(row + 4).to(tl.pointer_type(COPY)) + first
        if EVEN:
            copy = tl.multiple_of(copy, 8)
        tl.store(copy + at, p.to(COPY), mask=mask)


class PreparedLaunch:
    """What the kernel has noted of some strips."""

    def __init__(self, tables: list[LaunchTable], slice_count: int, device: torch.device) -> None:
        self.tables = tables
        self._betas = torch.empty(slice_count, 2, device=device)  # fp32
        self._filled_betas: tuple[float, float] | None = None

    def beta_powers(self, betas: tuple[float, float], steps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Both betas to the power of each run's step: [runs, 2], by the function that torch's fused kernel uses."""
        if betas != self._filled_betas:
            self._betas[:, 0].fill_(betas[0])
            self._betas[:, 1].fill_(betas[1])
            self._filled_betas = betas
        return torch.pow(self._betas, torch.stack(list(steps))[:, None])


class TritonKernel:
    """One pass, compiled at its first use: see [Note: bit-equal to torch's fused Adam]."""

    def __init__(self, device: torch.device, block: int = BLOCK_NUMEL, warps: int = NUM_WARPS) -> None:
        if triton is None:
            raise ImportError("Triton is not installed")
        self._device, self._block_numel, self._num_warps = device, block, warps
        on_gpu = device.type == "cuda"
        self._device_context: AbstractContextManager[object] = torch.cuda.device(device) if on_gpu else nullcontext()
        self._compiled = triton.jit(fused_adam_kernel)
        self._triton_dtypes = {
            torch.float32: tl.float32,
            torch.bfloat16: tl.bfloat16,
            torch.float16: tl.float16,
            None: None,
        }

    def prepare(self, slice_tensors: Sequence[SliceTensors], slice_count: int) -> PreparedLaunch:
        """Note where strips of so many runs lie; nothing is kept alive."""
        return PreparedLaunch(make_tables(slice_tensors, self._block_numel, self._device), slice_count, self._device)

    def run(
        self,
        launch: PreparedLaunch,
        steps: Sequence[torch.Tensor],
        hyperparams: FusedAdamHyperparams,
        grad_scale: GradScale,
    ) -> None:
        """Update the strips. ``steps`` are the runs' counts, this update counted too."""
        powers = launch.beta_powers(hyperparams.betas, steps)
        with self._device_context:
            for table in launch.tables:
                self._launch(table, powers, hyperparams, grad_scale)

    def _launch(
        self, table: LaunchTable, beta_powers: torch.Tensor, hyperparams: FusedAdamHyperparams, grad_scale: GradScale
    ) -> None:
        self._compiled[(table.program_rows.numel(),)](
            table.program_rows,
            table.rows,
            beta_powers,
            grad_scale.inv_scale,
            grad_scale.clip_coef,
            grad_scale.overflow,
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
