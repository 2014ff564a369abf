"""Newton–Schulz: orthogonalize matrices in bf16, as torch's Muon does; on a GPU those of one shape at once.

[Note: Muon in batches]
torch's Muon orthogonalizes one matrix after the other, by about 20 kernels each. On a GPU, kernels for small matrices
leave most of it idle, and the host cannot start them fast enough. So on a GPU the matrices of one shape are stacked,
and each product of the Newton–Schulz iteration is one kernel for all of them.

The operations are torch's, in the same order and dtypes; only the rounding inside a product may differ, and how the
squares of a norm are summed. Of X ← aX + (bG + cG²)X with G = XXᵀ, torch copies X before the last product, whose kernel
adds to its output. Here a side stream copies it during the products before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from zeroshard.optim.newton_schulz.kernels import StackKernels, TorchStackKernels, is_tall
from zeroshard.utils.kernel_loader import KernelLoader


def newton_schulz_flops(shape: torch.Size, steps: int = 5) -> int:
    """Return the FLOPs of the products that orthogonalize a matrix.

    >>> newton_schulz_flops(torch.Size([8, 2]))
    720
    """
    short, long = sorted(shape)
    return steps * (4 * short**2 * long + 2 * short**3)


def orthogonalize(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[torch.Tensor]:
    """Orthogonalize matrices of one shape by a Newton–Schulz iteration in bf16.

    >>> left, right = orthogonalize([torch.eye(4), 2 * torch.eye(4)], (2.0, -1.5, 0.5), 8, 1e-7)
    >>> bool((left.float() - torch.eye(4)).abs().max() < 0.02), torch.equal(left, right)
    (True, True)
    """
    rows, columns = matrices[0].shape
    stack = torch.empty((len(matrices), rows, columns), dtype=torch.bfloat16, device=matrices[0].device)
    torch._foreach_copy_(list(stack.unbind()), list(matrices))
    return list(orthogonalize_stack(stack, coefficients, steps, eps).unbind())


def _build_kernels(device: torch.device) -> StackKernels:
    from zeroshard.optim.newton_schulz.triton_kernels import TritonStackKernels  # imports Triton

    return TritonStackKernels(device)


def _self_test(kernels: StackKernels, device: torch.device) -> None:
    """Raise if kernels do not compile, or their results differ from torch's."""
    stack = torch.linspace(0.5, 2, 50, device=device).bfloat16().view(2, 5, 5)
    found = []
    for each in (kernels, TorchStackKernels()):
        normalized = stack.clone()
        each.normalize(normalized, 1e-7)
        found.append([normalized, each.start_copy(stack)()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)
    count = torch.cuda.get_device_properties(device).multi_processor_count // 2  # enough for symmetric products
    for shape in ((count, 256, 320), (count, 320, 256)):
        stack = torch.arange(count * 256 * 320, device=device).sin().bfloat16().view(shape) / 16
        grams = [each.gram(stack) for each in (kernels, TorchStackKernels())]
        factors = [each.polynomial(grams[1], -5.0, 2.0) for each in (kernels, TorchStackKernels())]
        torch.testing.assert_close([grams[0], factors[0]], [grams[1], factors[1]], rtol=2e-2, atol=1e-2)


KERNEL_LOADER = KernelLoader("Newton–Schulz", _build_kernels, _self_test)


def load_stack_kernels(device: torch.device) -> StackKernels:
    """Return the fastest kernels that work on a device.

    >>> type(load_stack_kernels(torch.device("cpu"))).__name__
    'TorchStackKernels'
    """
    return KERNEL_LOADER.load(device) or TorchStackKernels()


def orthogonalize_stack(
    stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Orthogonalize a stack of contiguous bf16 matrices, which may be changed: see [Note: Muon in batches]."""
    a, b, c = coefficients
    kernels = load_stack_kernels(stack.device)
    kernels.normalize(stack, eps)
    for _ in range(steps):
        wait_copy = kernels.start_copy(stack)
        # torch transposes tall matrices; the products in the other order are the transposes of its own.
        factor = kernels.polynomial(kernels.gram(stack), b, c)
        factors = (stack, factor) if is_tall(stack) else (factor, stack)
        stack = wait_copy().baddbmm_(*factors, beta=a)
    return stack


def orthogonalize_bf16(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[torch.Tensor]:
    """Orthogonalize bf16 matrices of one shape, which may be changed: on a GPU at once, without a copy if adjacent."""
    if matrices[0].device.type != "cuda":  # it gains nothing, and this way has torch's bits
        return [_orthogonalize_one(matrix, coefficients, steps, eps) for matrix in matrices]
    first = matrices[0]
    is_stack = all(matrix.is_contiguous() for matrix in matrices) and all(
        left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.numel() == right.storage_offset()
        for left, right in pairwise(matrices)
    )
    if not is_stack:
        return orthogonalize(matrices, coefficients, steps, eps)
    stack = first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))
    return list(orthogonalize_stack(stack, coefficients, steps, eps).unbind())


def _orthogonalize_one(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Orthogonalize a bf16 matrix, which is changed, by torch's operations in its order."""
    a, b, c = coefficients
    has_more_rows = matrix.size(0) > matrix.size(1)
    x = matrix.T if has_more_rows else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if has_more_rows else x
