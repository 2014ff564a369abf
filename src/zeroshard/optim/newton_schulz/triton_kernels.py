# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
"""TritonStackKernels: the parts of Newton–Schulz that Triton computes faster than torch. Imported on first use."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from zeroshard.optim.newton_schulz.kernels import TorchStackKernels, is_tall
from zeroshard.utils.kernel_loader import EXACT_FP_OPTIONS, current_device

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch do not include it
    triton = tl = None

SUM_PARTS = 512  # programs that sum the squares of a matrix
BLOCK_NUMEL, NUM_WARPS = 8192, 8  # of the elementwise kernels
TILE, INNER_BLOCK = 128, 64  # rows and columns of a tile of a symmetric product, and how much of a sum is read at once
TILE_OPTIONS = {"num_warps": 4, "num_stages": 3}  # measured on an H200
HOPPER = 9  # major compute capability
MAX_INDEX = 2**31  # of an element in a matrix, for 32-bit arithmetic


def square_sum_kernel(
    matrices,  # bf16, contiguous
    sums,  # fp32, PARTS for each matrix
    numel,  # of a matrix
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the squares of a part of a matrix: every PARTS-th block."""
    part, matrix = tl.program_id(0), tl.program_id(1)
    values = matrices + matrix.to(tl.int64) * numel
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(part * BLOCK, numel, PARTS * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(values + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums + matrix * PARTS + part, tl.sum(total, axis=0))


def normalize_kernel(
    matrices,  # bf16, contiguous
    sums,  # fp32, PARTS for each matrix
    eps,  # least norm, as it is in bf16
    numel,  # of a matrix
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divide one block of a matrix by its norm, which is rounded to bf16 as in torch."""
    matrix = tl.program_id(1)
    square_sum = tl.sum(tl.load(sums + matrix * PARTS + tl.arange(0, PARTS)), axis=0)
    norm = tl.maximum(tl.sqrt_rn(square_sum).to(tl.bfloat16).to(tl.float32), eps)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    values = matrices + matrix.to(tl.int64) * numel
    x = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(values + offsets, tl.div_rn(x, norm).to(tl.bfloat16), mask=mask)


def symmetric_kernel(
    matrices,  # bf16 (or another dtype, which the others then have too), contiguous
    addends,  # symmetric matrices, or None
    results,
    size,  # rows of the results, a multiple of TILE
    inner,  # length of the sums, a multiple of INNER
    row_stride,  # of the matrices, in the direction of the results' rows
    inner_stride,
    alpha,
    beta,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    """Compute alpha · X · Xᵀ + beta · addend for one tile on or below the diagonal, and write its transpose above."""
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2).to(tl.int32)  # tiles count along the rows
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)  # the root is rounded
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    column = tile - row * (row + 1) // 2
    rows, columns = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    inners = tl.arange(0, INNER)
    matrices += matrix * size * inner
    left = matrices + rows[:, None] * row_stride + inners[None, :] * inner_stride
    right = matrices + columns[None, :] * row_stride + inners[:, None] * inner_stride
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, inner, INNER):
        sums = tl.dot(tl.load(left), tl.load(right), sums)
        left += INNER * inner_stride
        right += INNER * inner_stride
    results += matrix * size * size
    offsets = rows[:, None] * size + columns[None, :]
    if addends is not None:
        addend = tl.load(addends + matrix * size * size + offsets)
        sums = alpha * sums + beta * addend.to(tl.float32)
    values = sums.to(results.dtype.element_ty)
    tl.store(results + offsets, values)
    if column < row:
        tl.store(results + columns[:, None] * size + rows[None, :], tl.trans(values))


class TritonStackKernels(TorchStackKernels):
    """The kernels of this file, and torch's products where they are faster: see [Note: symmetric products]."""

    def __init__(
        self, device: torch.device, block: int = BLOCK_NUMEL, tile: int = TILE, min_tiles: float | None = None
    ) -> None:
        """``min_tiles``: of a symmetric product, unless torch computes it; None: as is best on the device."""
        if triton is None:
            raise ImportError("Triton is not installed")
        self._device, self._block_numel, self._tile = device, block, tile
        self._inner_block = min(tile, INNER_BLOCK)
        self._min_tiles = _least_tiles(device) if min_tiles is None else min_tiles
        self._square_sum_kernel, self._normalize_kernel = triton.jit(square_sum_kernel), triton.jit(normalize_kernel)
        self._symmetric_kernel = triton.jit(symmetric_kernel)
        self._copy_streams: dict[int, torch.cuda.Stream] = {}  # one for each stream that computes

    def normalize(self, stack: torch.Tensor, eps: float) -> None:
        """Divide each matrix of a stack by its norm, in place."""
        count, numel = len(stack), stack[0].numel()
        sums = torch.empty((count, SUM_PARTS), dtype=torch.float32, device=stack.device)
        block, eps = self._block_numel, float(torch.tensor(eps, dtype=torch.bfloat16, device="cpu"))
        options = {"PARTS": SUM_PARTS, "BLOCK": block, "num_warps": NUM_WARPS, **EXACT_FP_OPTIONS}
        with current_device(self._device):
            self._square_sum_kernel[(SUM_PARTS, count)](stack, sums, numel, **options)
            self._normalize_kernel[(triton.cdiv(numel, block), count)](stack, sums, eps, numel, **options)

    def gram(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the smaller one of XXᵀ and XᵀX for each matrix X."""
        return self._symmetric_product(stack) if self._is_symmetric_faster(stack) else super().gram(stack)

    def polynomial(self, gram: torch.Tensor, b: float, c: float) -> torch.Tensor:
        """Return bG + cG² for each Gram matrix G."""
        if self._is_symmetric_faster(gram):
            return self._symmetric_product(gram, addends=gram, alpha=c, beta=b)
        return super().polynomial(gram, b, c)

    def _is_symmetric_faster(self, stack: torch.Tensor) -> bool:
        count, *shape = stack.shape
        size, inner = sorted(shape)
        tiles = size // self._tile
        is_divisible = size % self._tile == 0 and inner % self._inner_block == 0
        return is_divisible and inner * size < MAX_INDEX and count * tiles * (tiles + 1) // 2 >= self._min_tiles

    def _symmetric_product(
        self, stack: torch.Tensor, addends: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> torch.Tensor:
        count, rows, columns = stack.shape
        size, inner = sorted((rows, columns))
        results = torch.empty((count, size, size), dtype=stack.dtype, device=stack.device)
        row_stride, inner_stride = (1, columns) if is_tall(stack) else (columns, 1)
        tiles = size // self._tile
        with current_device(self._device):
            self._symmetric_kernel[(tiles * (tiles + 1) // 2, count)](
                stack,
                addends,
                results,
                size,
                inner,
                row_stride,
                inner_stride,
                float(alpha),
                float(beta),
                TILE=self._tile,
                INNER=self._inner_block,
                **TILE_OPTIONS,
            )
        return results

    def start_copy(self, stack: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to copy a stack on a side stream; the result waits for the copy and returns it."""
        if self._device.type != "cuda":
            return stack.clone
        target, compute = torch.empty_like(stack), torch.cuda.current_stream(self._device)
        stream = self._copy_streams.get(compute.cuda_stream)
        if stream is None:
            stream = self._copy_streams[compute.cuda_stream] = torch.cuda.Stream(self._device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            target.copy_(stack, non_blocking=True)
        done = stream.record_event()

        def wait() -> torch.Tensor:
            compute.wait_event(done)
            return target

        return wait


def _least_tiles(device: torch.device) -> float:
    """Return from how many tiles on a symmetric product is faster here: one for each multiprocessor of a Hopper GPU."""
    if device.type != "cuda":
        return math.inf
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == HOPPER else math.inf
