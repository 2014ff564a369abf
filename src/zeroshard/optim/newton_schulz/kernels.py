"""What Newton–Schulz computes with a stack of matrices, by torch's own operations.

[Note: symmetric products]
G and bG + cG² are symmetric, but cuBLAS has no product in bf16 that makes use of it. On a Hopper GPU, a Triton kernel
computes the tiles on and below the diagonal, and writes each of the others as the transpose of one of these. It adds bG
to the sums before it rounds them, where torch copies G first. A tile takes as long as one of cuBLAS. So this is used if
there are at least as many tiles as multiprocessors: from one matrix of 2048 rows or four of 1024 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


def is_tall(stack: torch.Tensor) -> bool:
    """Return whether the matrices of a stack have more rows than columns."""
    return stack.size(1) > stack.size(2)


class StackKernels(Protocol):
    """What Newton–Schulz does with a stack of contiguous bf16 matrices, except the last product."""

    def normalize(self, stack: torch.Tensor, eps: float) -> None:
        """Divide each matrix of a stack by its norm, in place."""

    def gram(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the smaller one of XXᵀ and XᵀX for each matrix X."""

    def polynomial(self, gram: torch.Tensor, b: float, c: float) -> torch.Tensor:
        """Return bG + cG² for each Gram matrix G."""

    def start_copy(self, stack: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to copy a stack; the result waits for the copy and returns it."""


class TorchStackKernels:
    """By torch's own operations."""

    def normalize(self, stack: torch.Tensor, eps: float) -> None:
        """Divide each matrix of a stack by its norm, in place."""
        stack /= torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True).clamp(min=eps)

    def gram(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the smaller one of XXᵀ and XᵀX for each matrix X."""
        return torch.bmm(stack.mT, stack) if is_tall(stack) else torch.bmm(stack, stack.mT)

    def polynomial(self, gram: torch.Tensor, b: float, c: float) -> torch.Tensor:
        """Return bG + cG² for each Gram matrix G."""
        return gram.mul(1).baddbmm_(gram, gram, beta=b, alpha=c)  # a product copies sooner than torch's own copy

    def start_copy(self, stack: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that copies a stack."""
        return stack.clone
