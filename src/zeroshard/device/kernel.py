# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
"""Kernel: Adam in one pass over memory on a GPU, in Triton. Imported late, and only where a GPU is.

[Note: every bit of the fused kernel]
The arithmetic is that of torch's fused Adam on a GPU, as torch 2.11 compiles it: the lines "CUDA, fused" of
[Note: equal to torch to the bit] in host/native.py, in fp32 throughout. So Triton must fuse no product into a sum where
none is fused there (``enable_fp_fusion``), square root and division are the correctly rounded ones, and subnormal
numbers stay what they are (``enable_reflect_ftz``). Powers of beta are torch's own: their last bits are the GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.device.strip import Factors, Numbers, Strip
from zeroshard.device.table import ROW, Table, tables_of

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs comes without it
    triton = tl = None

BLOCK = 1024  # elements that one program updates
WARPS = 4
EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # see [Note: every bit of the fused kernel]


def one_pass(
    blocks,  # int32: which row of the table each program works at
    table,  # int64, rows as ``Table`` has them
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


class Laid:
    """What the kernel has noted of some strips."""

    def __init__(self, tables: list[Table], runs: int, device: torch.device) -> None:
        self.tables = tables
        self._betas = torch.empty(runs, 2, device=device)  # fp32
        self._filled: tuple[float, float] | None = None

    def powers(self, betas: tuple[float, float], steps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Both betas to the power of each run's step: [runs, 2], by the function that torch's fused kernel uses."""
        if betas != self._filled:
            self._betas[:, 0].fill_(betas[0])
            self._betas[:, 1].fill_(betas[1])
            self._filled = betas
        return torch.pow(self._betas, torch.stack(list(steps))[:, None])


class TritonKernel:
    """One pass, compiled at its first use: see [Note: every bit of the fused kernel]."""

    def __init__(self, device: torch.device, block: int = BLOCK, warps: int = WARPS) -> None:
        if triton is None:
            raise ImportError("Triton is not installed")
        self._device, self._block, self._warps = device, block, warps
        on_gpu = device.type == "cuda"
        self._there: AbstractContextManager[object] = torch.cuda.device(device) if on_gpu else nullcontext()
        self._compiled = triton.jit(one_pass)
        self._dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None}

    def lay(self, strips: Sequence[Strip], runs: int) -> Laid:
        """Note where strips of so many runs lie; nothing is kept alive."""
        return Laid(tables_of(strips, self._block, self._device), runs, self._device)

    def run(self, laid: Laid, steps: Sequence[torch.Tensor], numbers: Numbers, factors: Factors) -> None:
        """Update the strips. ``steps`` are the runs' counts, this update counted too."""
        powers = laid.powers(numbers.betas, steps)
        with self._there:
            for table in laid.tables:
                self._launch(table, powers, numbers, factors)

    def _launch(self, table: Table, powers: torch.Tensor, numbers: Numbers, factors: Factors) -> None:
        self._compiled[(table.blocks.numel(),)](
            table.blocks,
            table.rows,
            powers,
            factors.inverse,
            factors.coefficient,
            factors.overflow,
            numbers.lr,
            *numbers.betas,
            numbers.eps,
            numbers.weight_decay,
            ROW=ROW,
            GRADIENT=self._dtypes[table.way.gradient],
            COPY=self._dtypes[table.way.copy],
            EVEN=table.way.even,
            LR_ON_DEVICE=isinstance(numbers.lr, torch.Tensor),
            DECAYS=numbers.weight_decay != 0,
            MAXIMIZE=numbers.maximize,
            BLOCK=self._block,
            num_warps=self._warps,
            **EXACT,
        )
