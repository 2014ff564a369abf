# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
"""TritonCast: scale, clamp, cast and transpose matrices in one pass over GPU memory. Imported on first use.

torch alone would write fp32 copies between the steps, and a transpose of bytes is slow. The results are bit-equal to
those of ``cast`` in cast.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zeroshard.utils.kernel_loader import current_device

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch do not include it
    triton = tl = None

TILE = 128  # rows and columns of a tile
LIMITS = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
BLOCK_NUMEL = 4096  # of a shard, per program
ROW_FIELDS = 5  # int64 values per row of a ``ShardTable``
NUM_WARPS = 8


def cast_tile(
    tile,
    matrix,  # bf16, or e4m3: then it is only transposed
    largest_value,  # one element, or None
    row_major,  # float8, row-major, or None
    column_major,  # float8, column-major, with rows of zeros up to a multiple of ALIGN; or None
    inverse,  # fp32, one element, or None
    rows,
    columns,
    LIMIT: tl.constexpr,  # the largest float8 value
    MIN: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cast one tile of a matrix."""
    tiles = tl.cdiv(columns, TILE)
    row = (tile // tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tile % tiles) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * columns + column[None, :]
    if largest_value is None:
        values = tl.load(matrix.to(tl.pointer_type(tl.uint8)) + places, mask=mask, other=0)
        column_major = column_major.to(tl.pointer_type(tl.uint8))
    else:
        bound = tl.load(largest_value).to(tl.float64)
        scale = (LIMIT / tl.where(bound < MIN, MIN, bound)).to(tl.float32)  # a NaN stays one
        values = tl.load(matrix + places, mask=mask, other=0.0).to(tl.float32)
        values = tl.clamp(values * scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        values = values.to(tl.float8e4nv if LIMIT == 448.0 else tl.float8e5)
    if row_major is not None:
        tl.store(row_major + places, values, mask=mask)
    if column_major is not None:
        padded_rows = tl.cdiv(rows, ALIGN) * ALIGN
        transposed = column[:, None].to(tl.int64) * padded_rows + row[None, :]
        inside = (column < columns)[:, None] & (row < padded_rows)[None, :]
        tl.store(column_major + transposed, tl.trans(values), mask=inside)
    # at the end: a store before the others would double the registers
    if largest_value is not None:  # noqa: SIM102
        if tile == 0:
            tl.store(inverse, tl.div_rn(1.0, scale))


if triton is not None:
    cast_tile = triton.jit(cast_tile)  # kernels can only call compiled functions


def cast_kernel(
    matrix1,
    largest1,
    row_major1,
    column_major1,
    inverse1,
    rows1,
    columns1,
    matrix2,  # None: there is one matrix
    largest2,
    row_major2,
    column_major2,
    inverse2,
    rows2,
    columns2,
    matrix3,  # None: there are one or two
    largest3,
    row_major3,
    column_major3,
    inverse3,
    rows3,
    columns3,
    LIMIT1: tl.constexpr,
    LIMIT2: tl.constexpr,
    LIMIT3: tl.constexpr,
    MIN: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cast one tile: the first programs those of matrix 1, the next those of matrix 2, the last those of matrix 3."""
    tile1 = tl.program_id(0)
    tiles1 = tl.cdiv(rows1, TILE) * tl.cdiv(columns1, TILE)
    if tile1 < tiles1:
        cast_tile(
            tile1, matrix1, largest1, row_major1, column_major1, inverse1, rows1, columns1, LIMIT1, MIN, ALIGN, TILE
        )
    if matrix2 is not None:
        tile2 = tile1 - tiles1
        tiles2 = tl.cdiv(rows2, TILE) * tl.cdiv(columns2, TILE)
        if (tile2 >= 0) & (tile2 < tiles2):
            cast_tile(
                tile2, matrix2, largest2, row_major2, column_major2, inverse2, rows2, columns2, LIMIT2, MIN, ALIGN, TILE
            )
    if matrix3 is not None:
        tile3 = tile2 - tiles2
        if tile3 >= 0:
            cast_tile(
                tile3, matrix3, largest3, row_major3, column_major3, inverse3, rows3, columns3, LIMIT3, MIN, ALIGN, TILE
            )


def cast_shards_kernel(
    blocks,  # int32: row of the table for each program
    table,  # int64: the rows of a ``ShardTable``
    largest_values,  # of the weights
    output,  # float8
    IS_FP32: tl.constexpr,  # else bf16
    EVEN: tl.constexpr,  # whether all addresses and lengths are aligned to vectors
    LIMIT: tl.constexpr,
    MIN: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast one block of a shard. Triton compiles this function, so it can only use ``tl``."""
    program = tl.program_id(0)
    row = table + tl.load(blocks + program) * ROW
    values = tl.load(row).to(tl.pointer_type(tl.float32 if IS_FP32 else tl.bfloat16))
    numel = tl.load(row + 1)
    bound = tl.load(largest_values + tl.load(row + 2)).to(tl.float64)
    offset = tl.load(row + 3)
    if EVEN:
        values, numel, offset = tl.multiple_of(values, 16), tl.multiple_of(numel, 16), tl.multiple_of(offset, 16)
    scale = (LIMIT / tl.where(bound < MIN, MIN, bound)).to(tl.float32)
    offsets = (program - tl.load(row + 4)) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    x = tl.load(values + offsets, mask=mask, other=0.0).to(tl.bfloat16).to(tl.float32)
    x = tl.clamp(x * scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(output + offset + offsets, x.to(output.dtype.element_ty), mask=mask)


class ShardTable:
    """Where some shards are: what one launch casts. Valid while they have these addresses."""

    def __init__(self, shards: Sequence[tuple[Any, ...]], addresses: list[int], device: torch.device) -> None:
        dtypes = {values.dtype for values, _, _ in shards}
        if dtypes not in ({torch.float32}, {torch.bfloat16}) or not all(s[0].is_contiguous() for s in shards):
            raise ValueError(
                f"shards of float8 weights must all be contiguous, in float32 or in bfloat16: got {dtypes}"
            )
        self.addresses, self.is_fp32 = addresses, dtypes == {torch.float32}
        rows: list[list[int]] = []
        blocks: list[int] = []
        for (values, weight, offset), address in zip(shards, addresses, strict=True):
            first, numel = len(blocks), values.numel()
            blocks += [len(rows)] * -(-numel // BLOCK_NUMEL)
            rows.append([address, numel, weight, offset, first])
        self.is_aligned = not any(row[field] % 16 for row in rows for field in (0, 1, 3))
        self.programs = len(blocks)
        # copied before this returns: later launches are on other streams
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device=device)


class TritonCast:
    """The cast in Triton, compiled on first use."""

    def __init__(self, device: torch.device, min_largest: float, align_rows: int, max_casts: int) -> None:
        if triton is None:
            raise ImportError("Triton is not installed")
        self._device, self._min_largest, self._align_rows, self._max_casts = device, min_largest, align_rows, max_casts
        self._compiled: dict[tuple[Any, ...], Any] = {}  # kernels by what they were compiled for
        self._cast, self._cast_shards = triton.jit(cast_kernel), triton.jit(cast_shards_kernel)

    def cast(self, casts: Sequence[tuple[Any, ...]]) -> list[tuple[Any, Any, Any]]:
        """Return what ``cast`` in cast.py returns."""
        device, align, programs, addresses = self._device, self._align_rows, 0, 0
        args: list[Any] = []
        limits: list[float | None] = [None] * self._max_casts
        key: tuple[Any, ...] = ("cast",)
        found = []
        for number, (matrix, largest_value, dtype, needs_rows, needs_columns) in enumerate(casts):
            if matrix.device != device:  # a kernel would read the other GPU's memory, or crash
                raise RuntimeError(
                    f"a float8 layer got tensors on {device} and {matrix.device}: move its input to the device of its "
                    "weight"
                )
            columns = matrix.shape[-1]
            rows = matrix.numel() // columns
            matrix = matrix.contiguous()
            row_major = torch.empty((rows, columns), dtype=dtype, device=device) if needs_rows else None
            column_major = scale = largest_dtype = None
            if needs_columns:
                padded = -(-rows // align) * align
                column_major = torch.empty_strided((padded, columns), (1, padded), dtype=dtype, device=device)
            if largest_value is not None:
                scale, limits[number] = torch.empty((), dtype=torch.float32, device=device), LIMITS[dtype]
                largest_dtype, addresses = largest_value.dtype, addresses | largest_value.data_ptr()
            addresses |= matrix.data_ptr()
            programs += -(-rows // TILE) * -(-columns // TILE)
            args += matrix, largest_value, row_major, column_major, scale, rows, columns
            key += matrix.dtype, largest_dtype, dtype, needs_rows, needs_columns, _kind(rows), _kind(columns)
            found.append((row_major, column_major, scale))
        args += [None] * (7 * (self._max_casts - len(casts)))
        args += *limits, self._min_largest, align, TILE
        self._launch(self._cast, programs, args, key, addresses)
        return found

    def _launch(self, kernel: Any, programs: int, args: list[Any], key: tuple[Any, ...], addresses: int) -> None:
        """Run a kernel. One that is compiled for such arguments is launched directly, without Triton's search for it.

        ``key``: all that Triton compiles for, except alignment. ``addresses``: those that may not be aligned, or-ed.
        """
        is_aligned = addresses % 16 == 0  # kernels for other addresses are left to Triton
        compiled = self._compiled.get(key) if is_aligned else None
        with current_device(self._device):
            if compiled is not None:
                compiled[programs, 1, 1](*args)
                return
            compiled = kernel[(programs,)](*args, num_warps=NUM_WARPS)
        if is_aligned:
            self._compiled[key] = compiled

    def cast_shards(self, casts: Any) -> None:
        """Do what ``ShardCasts.run`` in cast.py does."""
        if not casts.shards:
            return
        addresses = [values.data_ptr() for values, _, _ in casts.shards]  # offload_states() moves them
        if casts.table is None or casts.table.addresses != addresses:
            casts.table = ShardTable(casts.shards, addresses, self._device)
        table = casts.table
        largest_values, target, limit = casts.largest_values, casts.target, LIMITS[casts.target.dtype]
        args = [table.blocks, table.rows, largest_values, target, table.is_fp32, table.is_aligned, limit]
        args += self._min_largest, ROW_FIELDS, BLOCK_NUMEL
        key = "shards", largest_values.dtype, target.dtype, table.is_fp32, table.is_aligned
        self._launch(self._cast_shards, table.programs, args, key, largest_values.data_ptr() | target.data_ptr())


def _kind(number: int) -> tuple[bool, bool, int]:
    """Return what Triton compiles for: whether an integer is 1, a multiple of 16, or has 64 bits."""
    return number == 1, number % 16 == 0, number >> 31
