"""Muon's kernels on a GPU: the bits of torch's own operations, in one pass over memory each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from zeroshard.engine import GradScale
from zeroshard.optim.muon import MuonOptions
from zeroshard.optim.newton_schulz.kernels import TorchStackKernels
from zeroshard.optim.newton_schulz.orthogonalize import load_stack_kernels, orthogonalize_stack
from zeroshard.optim.sharded_muon.kernels import MomentumPart, TorchKernels, ValuePart
from zeroshard.optim.sharded_muon.updater import KERNEL_LOADER

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NUMELS = [1, 64, 1000, 4096, 5000]


def run(kernels: Any, dtype: torch.dtype, options: MuonOptions, offset: int, factors: dict[str, Any]) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(0)

    def line(numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel + offset, generator=generator, device="cuda").to(kind)[offset:]

    momenta = [MomentumPart(line(n, dtype), line(n), line(n, torch.bfloat16)) for n in NUMELS]
    values = [ValuePart(part.update, line(part.update.numel())) for part in momenta]
    kernels.update_momenta(momenta, options, GradScale(**factors))
    kernels.update_values(values, options.decay, options.alpha(torch.Size([3, 2])))
    return [
        [part.gradient, part.momentum, part.update, value.values] for part, value in zip(momenta, values, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.95, 0.3, 0.0])
@pytest.mark.parametrize("nesterov", [True, False])
def test_both_passes_have_the_bits_of_torchs_operations(dtype: torch.dtype, momentum: float, nesterov: bool) -> None:
    kernels: Any = KERNEL_LOADER.load(torch.device("cuda", torch.cuda.current_device()))
    assert type(kernels).__name__ == "TritonKernels"
    options = MuonOptions(0.02, 0.1, momentum, nesterov, ((1.0, 1.0, 1.0), 1, 0.0), "match_rms_adamw")
    scaled = {"inv_scale": torch.tensor(1 / 3, device="cuda"), "clip_coef": torch.tensor(0.7, device="cuda")}
    for offset, factors in ((0, {}), (1, scaled)):
        ours, wanted = (run(each, dtype, options, offset, factors) for each in (kernels, TorchKernels()))
        for mine, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_stacks_are_divided_by_their_norms_with_the_bits_of_torchs_operations() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for shape in ((3, 64, 64), (3, 100, 36), (3, 2048, 512)):
        stack = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        ours, wanted = stack.clone(), stack.clone()
        load_stack_kernels(stack.device).normalize(ours, 1e-7)
        TorchStackKernels().normalize(wanted, 1e-7)
        assert torch.equal(ours, wanted)  # except if the sum of squares is next to a boundary of bf16


@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 100, 36), (3, 512, 2048), (8, 1024, 1152), (1, 4096, 2048)])
def test_stacks_have_the_accuracy_of_torchs_muon(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    exact = newton_schulz(stack.double(), COEFFICIENTS, 5)
    found = orthogonalize_stack(stack.clone(), COEFFICIENTS, 5, 1e-7).double()
    torchs = torch.stack([_zeropower_via_newtonschulz(each, COEFFICIENTS, 5, 1e-7) for each in stack]).double()
    assert (found - exact).norm() < 1.5 * (torchs - exact).norm()


@pytest.mark.parametrize("shape", [(1, 2048, 2048), (1, 2176, 4096), (2, 4160, 1536), (9, 640, 640)])
def test_symmetric_products_are_those_of_torch_to_rounding(shape: tuple[int, int, int]) -> None:
    kernels: Any = load_stack_kernels(torch.device("cuda"))
    assert type(kernels).__name__ == "TritonStackKernels"
    stack = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    assert kernels._is_symmetric_faster(stack) == (torch.cuda.get_device_capability()[0] == 9)
    gram, wanted = kernels.gram(stack), TorchStackKernels().gram(stack)
    assert torch.equal(gram, gram.mT)
    assert (gram.double() - wanted.double()).norm() < 1e-3 * wanted.double().norm()
    small = wanted / max(shape)
    found, wanted = (each.polynomial(small, -4.775, 2.0315).double() for each in (kernels, TorchStackKernels()))
    assert (found - wanted).norm() < 1e-3 * wanted.norm()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(kernels.gram(stack), gram)


COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    a, b, c = coefficients
    x = x / x.norm(dim=(1, 2), keepdim=True)
    for _ in range(steps):
        gram = x @ x.mT if x.size(1) <= x.size(2) else x.mT @ x
        factor = b * gram + c * gram @ gram
        x = a * x + (factor @ x if x.size(1) <= x.size(2) else x @ factor)
    return x
