"""Muon's kernels on a GPU: the bits of torch's own operations, in one pass over memory each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from zeroshard.engine import GradScale
from zeroshard.optim.muon import MuonOptions, orthogonalize_stack
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


def test_stacks_have_the_bits_of_torchs_operations_and_the_accuracy_of_its_muon() -> None:
    kernels: Any = KERNEL_LOADER.load(torch.device("cuda", torch.cuda.current_device()))
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, columns in ((64, 64), (100, 36), (512, 2048), (2048, 512)):
        stack = torch.randn(3, rows, columns, generator=generator, device="cuda").bfloat16()
        ours, wanted = stack.clone(), stack.clone()
        kernels.normalize(ours, 1e-7)
        TorchKernels().normalize(wanted, 1e-7)
        assert torch.equal(ours, wanted)  # except if the sum of squares is next to a boundary of bf16
        exact = newton_schulz(stack.double(), COEFFICIENTS, 5)
        found = orthogonalize_stack(stack.clone(), COEFFICIENTS, 5, 1e-7, kernels).double()
        torchs = torch.stack([_zeropower_via_newtonschulz(each, COEFFICIENTS, 5, 1e-7) for each in stack]).double()
        assert (found - exact).norm() < 1.5 * (torchs - exact).norm()


COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    a, b, c = coefficients
    x = x / x.norm(dim=(1, 2), keepdim=True)
    for _ in range(steps):
        gram = x @ x.mT if x.size(1) <= x.size(2) else x.mT @ x
        factor = b * gram + c * gram @ gram
        x = a * x + (factor @ x if x.size(1) <= x.size(2) else x @ factor)
    return x
