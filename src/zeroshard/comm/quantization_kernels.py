# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
"""QuantizationKernels: the conversions of ``Quantizer`` in one pass over GPU memory. Imported on first use.

The values are those of torch's operations: divisions are rounded correctly, and ties go to the even value.
"""

from __future__ import annotations

import torch

from zeroshard.utils.kernel_loader import EXACT_FP_OPTIONS, current_device

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch do not include it
    triton = tl = None

BLOCKS_PER_PROGRAM = 32


def quantize_kernel(values, payloads, numel, row_bytes, LARGEST: tl.constexpr, FP8: tl.constexpr, BLOCKS: tl.constexpr):
    """Quantize some blocks of one part. Triton compiles this function, so it can only use ``tl``."""
    part = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_inside = block < numel // 64
    mask = is_inside[:, None] & (tl.arange(0, 64) >= 0)[None, :]
    offsets = tl.multiple_of(block * 64, 64)[:, None] + tl.arange(0, 64)[None, :]
    x = tl.load(values + part * numel + offsets, mask=mask, other=0.0).to(tl.float32)
    magnitude = tl.abs(x)
    is_finite = tl.min((magnitude < float("inf")).to(tl.int32), axis=1) != 0
    quotient = tl.div_rn(tl.max(magnitude, axis=1), LARGEST).to(tl.int32, bitcast=True)
    rounded_up = ((quotient + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    scale = tl.where(is_finite, rounded_up, float("nan"))
    divisor = tl.where(scale == 0, 1.0, scale)
    scaled = tl.div_rn(x, tl.broadcast_to(divisor[:, None], [BLOCKS, 64]))
    row = payloads + part * row_bytes
    if FP8:
        tl.store(row.to(tl.pointer_type(tl.float8e4nv)) + offsets, scaled.to(tl.float8e4nv), mask=mask)
    else:
        rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23: the sum has no bits for fractions
        tl.store(row.to(tl.pointer_type(tl.int8)) + offsets, rounded.to(tl.int8), mask=mask)
    tl.store((row + numel).to(tl.pointer_type(tl.bfloat16)) + block, scale.to(tl.bfloat16), mask=is_inside)


def dequantize_kernel(values, payloads, numel, row_bytes, limit, FP8: tl.constexpr, BLOCKS: tl.constexpr):
    """Restore some blocks of one part."""
    part = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_inside = block < numel // 64
    mask = is_inside[:, None] & (tl.arange(0, 64) >= 0)[None, :]
    offsets = tl.multiple_of(block * 64, 64)[:, None] + tl.arange(0, 64)[None, :]
    row = payloads + part * row_bytes
    scale = tl.load((row + numel).to(tl.pointer_type(tl.bfloat16)) + block, mask=is_inside, other=0.0).to(tl.float32)
    if FP8:
        x = tl.load(row.to(tl.pointer_type(tl.float8e4nv)) + offsets, mask=mask).to(tl.float32)
    else:
        x = tl.load(row.to(tl.pointer_type(tl.int8)) + offsets, mask=mask).to(tl.float32)
    x = x * scale[:, None]
    x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))  # keeps NaN
    tl.store(values + part * numel + offsets, x.to(values.dtype.element_ty), mask=mask)


def sum_kernel(output, payloads, parts, numel, row_bytes, factor, FP8: tl.constexpr, BLOCKS: tl.constexpr):
    """Sum some blocks over all parts."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_inside = block < numel // 64
    mask = is_inside[:, None] & (tl.arange(0, 64) >= 0)[None, :]
    offsets = tl.multiple_of(block * 64, 64)[:, None] + tl.arange(0, 64)[None, :]
    total = tl.zeros([BLOCKS, 64], dtype=tl.float32)
    row = payloads
    for _ in range(parts):
        scales = (row + numel).to(tl.pointer_type(tl.bfloat16)) + block
        scale = tl.load(scales, mask=is_inside, other=0.0).to(tl.float32)
        if FP8:
            x = tl.load(row.to(tl.pointer_type(tl.float8e4nv)) + offsets, mask=mask).to(tl.float32)
        else:
            x = tl.load(row.to(tl.pointer_type(tl.int8)) + offsets, mask=mask).to(tl.float32)
        total += x * scale[:, None]
        row += row_bytes
    tl.store(output + offsets, (total * factor).to(output.dtype.element_ty), mask=mask)


class QuantizationKernels:
    """The compiled kernels for one 8-bit dtype."""

    def __init__(self, device: torch.device, largest: float, is_fp8: bool) -> None:
        """``largest``: the largest 8-bit value."""
        if triton is None:
            raise ImportError("Triton is not installed")
        self._device, self._largest, self._is_fp8 = device, largest, is_fp8
        self._quantize, self._dequantize, self._sum = map(triton.jit, (quantize_kernel, dequantize_kernel, sum_kernel))

    def quantize(self, payloads: torch.Tensor, values: torch.Tensor) -> None:
        parts, row_bytes = payloads.shape
        numel = values.numel() // parts
        if not numel:
            return
        with current_device(self._device):
            self._quantize[self._grid(numel, parts)](
                values, payloads, numel, row_bytes, self._largest, self._is_fp8, BLOCKS_PER_PROGRAM, **EXACT_FP_OPTIONS
            )

    def dequantize(self, values: torch.Tensor, payloads: torch.Tensor) -> None:
        parts, row_bytes = payloads.shape
        numel, limit = values.numel() // parts, torch.finfo(values.dtype).max
        if not numel:
            return
        with current_device(self._device):
            self._dequantize[self._grid(numel, parts)](
                values, payloads, numel, row_bytes, limit, self._is_fp8, BLOCKS_PER_PROGRAM, **EXACT_FP_OPTIONS
            )

    def sum(self, output: torch.Tensor, payloads: torch.Tensor, factor: float) -> None:
        parts, row_bytes = payloads.shape
        if not output.numel():
            return
        with current_device(self._device):
            self._sum[self._grid(output.numel(), 1)](
                output,
                payloads,
                parts,
                output.numel(),
                row_bytes,
                factor,
                self._is_fp8,
                BLOCKS_PER_PROGRAM,
                **EXACT_FP_OPTIONS,
            )

    @staticmethod
    def _grid(numel: int, parts: int) -> tuple[int, int]:
        return -(-numel // (64 * BLOCKS_PER_PROGRAM)), parts
