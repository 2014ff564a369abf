"""Casts of bf16 matrices to float8, with one scale for each: see [Note: the float8 recipe]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from zeroshard.utils.kernel_loader import KernelLoader

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_LARGEST = 1e-12  # of a matrix of zeros
ALIGN_ROWS = 16  # a GPU multiplies matrices whose inner dimension is a multiple of this
MAX_CASTS = 3  # of one call: gradient, input and weight


# A float8 matrix: row-major, as the left operand of a product; column-major, as the right one, with rows of zeros up to
# a multiple of ``ALIGN_ROWS``; and what its values are to be multiplied by, in fp32. Each is None if it is not needed.
Float8Matrix = tuple[Any, Any, Any]


class MatrixCast(NamedTuple):
    """What a product needs of a matrix."""

    matrix: torch.Tensor  # bf16, the last dimension has its columns; or float8, of which only columns can be needed
    largest: torch.Tensor | None  # the largest absolute value of a bf16 matrix
    dtype: torch.dtype
    needs_rows: bool = True  # row-major
    needs_columns: bool = False  # column-major


def largest(matrix: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of a tensor, NaN if it has one; in one pass over it, without a copy."""
    found: torch.Tensor = torch.linalg.vector_norm(matrix, float("inf"))
    return found


def cast(*casts: MatrixCast) -> list[Float8Matrix]:
    """Cast up to ``MAX_CASTS`` matrices of one device, on a GPU in one launch.

    >>> ((values, _, scale),) = cast(MatrixCast(torch.tensor([[1.0, -0.5]]), torch.tensor(1.0), E4M3))
    >>> values.float() * scale
    tensor([[ 1.0000, -0.5000]])
    """
    found: list[Float8Matrix] = _casts_for(casts[0].matrix).cast(casts)
    return found


class ShardCast(NamedTuple):
    """A part of a bf16 weight that is to be cast."""

    values: torch.Tensor  # 1-D, bf16 or the fp32 master weights
    weight: int  # index of the largest value of the whole weight
    offset: int  # in the float8 tensor


class ShardCasts:
    """Parts of bf16 weights that are cast into one float8 tensor together, on a GPU in one launch.

    The result for a part is that of :func:`cast` for the whole weight.

    >>> largest_values, target = torch.tensor([1.0, 2.0]).bfloat16(), torch.empty(2, dtype=E4M3)
    >>> shards = [ShardCast(torch.tensor([0.5]), 0, 0), ShardCast(torch.tensor([0.5]), 1, 1)]
    >>> ShardCasts(shards, largest_values, target).run()
    >>> target
    tensor([224., 112.], dtype=torch.float8_e4m3fn)
    """

    def __init__(self, shards: list[ShardCast], largest_values: torch.Tensor, target: torch.Tensor) -> None:
        self.shards, self.largest_values, self.target = shards, largest_values, target
        self.table: Any = None  # of the kernel

    def run(self) -> None:
        """Cast the values that the shards have now."""
        _casts_for(self.target).cast_shards(self)


def float8_scale(largest_value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a tensor is multiplied by before it is cast; in fp64 first, so that compiled code gives the same."""
    return (torch.finfo(dtype).max / largest_value.double().clamp(min=MIN_LARGEST)).float()


class TorchCast:
    """The casts by torch's operations."""

    def cast(self, casts: tuple[MatrixCast, ...]) -> list[Float8Matrix]:
        """Return what :func:`cast` returns."""
        return [self._cast_one(each) for each in casts]

    def _cast_one(self, cast: MatrixCast) -> Float8Matrix:
        matrix = cast.matrix.reshape(-1, cast.matrix.shape[-1]).contiguous()
        scale = None
        if cast.largest is None:
            values = matrix
        elif matrix.is_meta:  # one operation reads the matrix and writes the result, as on a GPU
            values, scale = matrix.to(cast.dtype), torch.empty((), dtype=torch.float32, device="meta")
        else:
            factor, limit = float8_scale(cast.largest, cast.dtype), torch.finfo(cast.dtype).max
            values = (matrix.float() * factor).clamp(-limit, limit).to(cast.dtype)
            scale = factor.reciprocal()
        columns = _pad_rows(values).t().contiguous().t() if cast.needs_columns else None
        return values if cast.needs_rows else None, columns, scale

    def cast_shards(self, casts: ShardCasts) -> None:
        """Do what :meth:`ShardCasts.run` does."""
        dtype = casts.target.dtype
        limit, factors = torch.finfo(dtype).max, float8_scale(casts.largest_values, dtype)
        for values, weight, offset in casts.shards:
            scaled = (values.to(torch.bfloat16).float() * factors[weight]).clamp(-limit, limit)
            casts.target[offset : offset + values.numel()].copy_(scaled.to(dtype))


def _pad_rows(values: torch.Tensor) -> torch.Tensor:
    missing = -values.shape[0] % ALIGN_ROWS
    if not missing:
        return values
    return F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)  # the bits of 0.0 are 0


def load_casts(device: torch.device) -> None:
    """Compile and test the kernels for a device, before a layer needs them."""
    KERNEL_LOADER.load(device)


def _casts_for(tensor: torch.Tensor) -> Any:
    """Return the casts in Triton for a tensor on a GPU that can run them, else torch's."""
    if tensor.is_cuda and not torch.compiler.is_compiling():
        return KERNEL_LOADER.load(tensor.device) or _TORCH_CAST
    return _TORCH_CAST


def _build_kernels(device: torch.device) -> Any:
    from zeroshard.float8.triton_cast import TritonCast  # imported here because it imports Triton

    return TritonCast(device, MIN_LARGEST, ALIGN_ROWS, MAX_CASTS)


def _self_test(kernels: Any, device: torch.device) -> None:
    """Raise if kernels do not compile, or their results differ from torch's."""
    # order and sizes (multiples of 16) are those of layers: what is compiled here is what they use
    matrix = torch.linspace(-1, 2, 48 * 32, device=device).bfloat16().view(48, 32)
    bound = largest(matrix)
    forward = (MatrixCast(matrix, bound, E4M3), MatrixCast(matrix, bound, E4M3))
    backward = (
        MatrixCast(matrix, bound, E4M3, needs_rows=False, needs_columns=True),
        MatrixCast(matrix.to(E4M3), None, E4M3, needs_rows=False, needs_columns=True),
        MatrixCast(matrix, bound, E5M2, needs_columns=True),
    )
    found = []
    for each in (kernels, _TORCH_CAST):
        shards = torch.zeros(2 * matrix.numel(), dtype=E4M3, device=device)
        parts = [ShardCast(matrix.float().flatten()[16:], 0, 80), ShardCast(matrix[0].float(), 1, 16)]
        shard_casts = ShardCasts(parts, torch.stack([bound, 2 * bound]), shards)
        for _ in range(2):  # the first call compiles a kernel, the second one reuses it
            each.cast_shards(shard_casts)
            results = [shards, *(part for casts in (forward, backward) for cast in each.cast(casts) for part in cast)]
        found.append([part.view(torch.uint8) if part.itemsize == 1 else part for part in results if part is not None])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


_TORCH_CAST = TorchCast()
KERNEL_LOADER = KernelLoader("float8 casts", _build_kernels, _self_test)
