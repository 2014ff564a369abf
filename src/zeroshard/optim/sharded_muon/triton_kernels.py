# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
"""TritonKernels: the elementwise parts of Muon, each in one pass over GPU memory. Imported on first use.

[Note: bit-equal to torch's Muon]
The arithmetic is that of torch's ``lerp``, ``mul`` and ``add`` on a GPU, all in fp32. nvcc fuses ``a + w * (b - a)``
and ``a + alpha * b`` into one multiply-add each, so these are written as ``fma``, and Triton must fuse nothing else.

The first pass moves 8 bytes of momentum, a gradient and 2 bytes of update per element, the second one 10 bytes; by
torch's kernels they move 36 and 26 bytes with a gradient of 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.engine import GradScale
from zeroshard.optim.fused_adam.launch_table import ROW_FIELDS, LaunchTable, SliceTensors, make_tables
from zeroshard.optim.fused_adam.triton_kernel import BLOCK_NUMEL, NUM_WARPS, find_row
from zeroshard.optim.muon import MuonOptions
from zeroshard.optim.sharded_muon.kernels import SUPPORTED_DTYPES, MomentumPart, TorchKernels, ValuePart
from zeroshard.utils.kernel_loader import EXACT_FP_OPTIONS, current_device

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch do not include it
    triton = tl = None

MAX_PREPARED_LAUNCHES = 64  # gradient addresses alternate between steps, and there are several batches


def momentum_kernel(
    blocks,  # int32: row of the table for each program
    table,  # int64: the rows of a ``LaunchTable``
    inverse,  # fp32 or None: inverse loss scale
    coefficient,  # fp32 or None: clip coefficient
    weight,  # of the gradient in the momentum
    momentum,
    ROW: tl.constexpr,
    GRADIENT: tl.constexpr,  # dtype of the gradient
    EVEN: tl.constexpr,  # whether all addresses and lengths are aligned to vectors
    SMALL_WEIGHT: tl.constexpr,  # whether torch's lerp starts from the momentum
    SMALL_MOMENTUM: tl.constexpr,  # whether torch's lerp starts from the gradient
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the momentum of one block of a row, and write its update in bf16."""
    row, first, remaining = find_row(blocks, table, ROW, EVEN, BLOCK)
    gradient = tl.load(row).to(tl.pointer_type(GRADIENT)) + first
    buffer = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + first
    update = tl.load(row + 4).to(tl.pointer_type(tl.bfloat16)) + first
    if EVEN:  # four elements per load: 16 bytes in fp32, 8 in 16-bit dtypes
        gradient = tl.multiple_of(gradient, 16 if tl.float32 == GRADIENT else 8)
        buffer, update = tl.multiple_of(buffer, 16), tl.multiple_of(update, 8)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < remaining
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(buffer + offsets, mask=mask, other=0.0)
    if inverse is not None:
        g = g * tl.load(inverse)
    if coefficient is not None:
        g = g * tl.load(coefficient)
    m = tl.fma(g - m, weight, m) if SMALL_WEIGHT else tl.fma(m - g, 1.0 - weight, g)
    u = m
    if NESTEROV:
        u = tl.fma(m - g, momentum, g) if SMALL_MOMENTUM else tl.fma(g - m, 1.0 - momentum, m)
    tl.store(buffer + offsets, m, mask=mask)
    tl.store(update + offsets, u.to(tl.bfloat16), mask=mask)


def value_kernel(
    blocks,  # int32: row of the table for each program
    table,  # int64: the rows of a ``LaunchTable``
    decay,
    alpha,
    ROW: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decay the values of one block of a row, and add its update."""
    row, first, remaining = find_row(blocks, table, ROW, EVEN, BLOCK)
    update = tl.load(row).to(tl.pointer_type(tl.bfloat16)) + first
    values = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + first
    if EVEN:
        update, values = tl.multiple_of(update, 8), tl.multiple_of(values, 16)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < remaining
    u = tl.load(update + offsets, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(values + offsets, mask=mask, other=0.0)
    tl.store(values + offsets, tl.fma(u, alpha, p * decay), mask=mask)


class TritonKernels:
    """The passes in Triton, compiled on first use: see [Note: bit-equal to torch's Muon]."""

    def __init__(self, device: torch.device, block: int = BLOCK_NUMEL, warps: int = NUM_WARPS) -> None:
        if triton is None:
            raise ImportError("Triton is not installed")
        self._device, self._block_numel, self._num_warps = device, block, warps
        self._momentum_kernel, self._value_kernel = triton.jit(momentum_kernel), triton.jit(value_kernel)
        self._prepared: dict[tuple[object, ...], list[LaunchTable]] = {}  # launch tables by dtypes and addresses
        self._triton_dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        self._fallback = TorchKernels()

    def update_momenta(self, parts: Sequence[MomentumPart], options: MuonOptions, grad_scale: GradScale) -> int:
        """Update the momenta, write the updates in bf16; return the bytes of temporary memory."""
        if any(p.momentum.dtype != torch.float32 or p.gradient.dtype not in SUPPORTED_DTYPES for p in parts):
            return self._fallback.update_momenta(parts, options, grad_scale)
        weight, momentum = float(1 - options.momentum), float(options.momentum)
        rows = [SliceTensors(0, p.gradient, p.momentum, p.momentum, p.momentum, p.update) for p in parts]
        with current_device(self._device):
            for table in self._tables(rows):
                self._momentum_kernel[(table.program_rows.numel(),)](
                    table.program_rows,
                    table.rows,
                    grad_scale.inv_scale,
                    grad_scale.clip_coef,
                    weight,
                    momentum,
                    ROW=ROW_FIELDS,
                    GRADIENT=self._triton_dtypes[table.spec.grad_dtype],
                    EVEN=table.spec.is_aligned,
                    SMALL_WEIGHT=abs(weight) < 0.5,
                    SMALL_MOMENTUM=abs(momentum) < 0.5,
                    NESTEROV=bool(options.nesterov),
                    BLOCK=self._block_numel,
                    num_warps=self._num_warps,
                    **EXACT_FP_OPTIONS,
                )
        return 0

    def update_values(self, parts: Sequence[ValuePart], decay: float, alpha: float) -> None:
        """Multiply the values by ``decay``, and add ``alpha`` times the updates."""
        if any(part.values.dtype != torch.float32 for part in parts):
            return self._fallback.update_values(parts, decay, alpha)
        rows = [SliceTensors(0, p.update, p.values, p.values, p.values, None) for p in parts]
        with current_device(self._device):
            for table in self._tables(rows):
                self._value_kernel[(table.program_rows.numel(),)](
                    table.program_rows,
                    table.rows,
                    decay,
                    alpha,
                    ROW=ROW_FIELDS,
                    EVEN=table.spec.is_aligned,
                    BLOCK=self._block_numel,
                    num_warps=self._num_warps,
                    **EXACT_FP_OPTIONS,
                )
        return None

    def _tables(self, rows: list[SliceTensors]) -> list[LaunchTable]:
        """Return launch tables; those of earlier steps if all addresses are the same, and the gradients' dtypes."""
        key: tuple[object, ...] = tuple(
            part
            for row in rows
            for part in (row.gradient.dtype, row.gradient.data_ptr(), row.master.data_ptr(), row.master.numel())
        ) + tuple(row.compute_param.data_ptr() for row in rows if row.compute_param is not None)
        if key not in self._prepared:
            if len(self._prepared) == MAX_PREPARED_LAUNCHES:
                self._prepared.clear()
            self._prepared[key] = make_tables(rows, self._block_numel, self._device)
        return self._prepared[key]
