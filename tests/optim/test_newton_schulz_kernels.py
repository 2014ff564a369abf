"""The Triton kernels of Newton–Schulz without a GPU, where Triton is installed: interpreted, near to torch."""

from __future__ import annotations

import os

import pytest
import torch

from zeroshard.optim.newton_schulz.kernels import TorchStackKernels
from zeroshard.optim.newton_schulz.triton_kernels import TritonStackKernels

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="sums need it when Triton is imported"
)


def random_stack(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_matrices_are_divided_by_their_norms() -> None:
    stack = random_stack(3, 9, 7)
    stack[1] = 0
    ours, wanted = stack.clone(), stack.clone()
    kernels = TritonStackKernels(torch.device("cpu"), block=32)
    kernels.normalize(ours, 1e-7)
    TorchStackKernels().normalize(wanted, 1e-7)
    torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=0)
    assert torch.equal(kernels.start_copy(ours)(), ours)


@pytest.mark.parametrize("shape", [(2, 16, 32), (1, 64, 48), (3, 80, 80)])
def test_symmetric_products_are_those_of_torch(shape: tuple[int, int, int]) -> None:
    stack = random_stack(*shape).float()  # Triton's interpreter cannot multiply bf16
    kernels = TritonStackKernels(torch.device("cpu"), tile=16, min_tiles=0)
    assert kernels._is_symmetric_faster(stack)
    gram, wanted = kernels.gram(stack), TorchStackKernels().gram(stack)
    torch.testing.assert_close(gram, wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(gram, gram.mT)
    found, wanted = (each.polynomial(wanted / 64, -4.775, 2.0315) for each in (kernels, TorchStackKernels()))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_torch_computes_what_the_kernel_cannot_and_what_is_too_small() -> None:
    kernels = TritonStackKernels(torch.device("cpu"), tile=16, min_tiles=6)
    assert kernels._is_symmetric_faster(random_stack(1, 48, 64)) and kernels._is_symmetric_faster(
        random_stack(6, 16, 16)
    )
    for shape in ((5, 16, 16), (1, 32, 64), (9, 40, 64), (9, 48, 50)):
        assert not kernels._is_symmetric_faster(random_stack(*shape))
    assert not TritonStackKernels(torch.device("cpu"), tile=16)._is_symmetric_faster(random_stack(9, 64, 64))
