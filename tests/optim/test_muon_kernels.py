"""The Triton kernels of Muon without a GPU, where Triton is installed: interpreted, so near to torch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroshard.engine import GradScale
from zeroshard.optim.fused_adam.triton_kernel import find_row
from zeroshard.optim.muon import MuonOptions
from zeroshard.optim.sharded_muon.kernels import MomentumPart, TorchKernels, ValuePart
from zeroshard.optim.sharded_muon.triton_kernels import TritonKernels

triton = pytest.importorskip("triton")

NUMELS = [1, 64, 100, 65]
FACTORS = {"inv_scale": torch.tensor(1 / 3), "clip_coef": torch.tensor(0.7)}


def run(kernels: Any, dtype: torch.dtype, options: MuonOptions, offset: int, factors: dict[str, Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def line(numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel + offset, generator=generator).to(kind)[offset:]

    momenta = [MomentumPart(line(n, dtype), line(n), line(n, torch.bfloat16)) for n in NUMELS]
    values = [ValuePart(part.update, line(part.update.numel())) for part in momenta]
    kernels.update_momenta(momenta, options, GradScale(**factors))
    kernels.update_values(values, options.decay, options.alpha(torch.Size([3, 2])))
    return [[part.momentum, part.update, value.values] for part, value in zip(momenta, values, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "momentum", "nesterov", "offset", "factors"),
    [
        (torch.float32, 0.95, True, 0, {}),
        (torch.bfloat16, 0.3, True, 1, FACTORS),
        (torch.float16, 0.95, False, 0, FACTORS),
        (torch.float64, 0.95, True, 0, {}),  # by torch's kernels
    ],
)
def test_both_passes_compute_what_torchs_operations_do(
    dtype: torch.dtype,
    momentum: float,
    nesterov: bool,
    offset: int,
    factors: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(
        "zeroshard.optim.sharded_muon.triton_kernels.find_row", triton.jit(find_row.fn)
    )  # compiled at import
    options = MuonOptions(0.02, 0.1, momentum, nesterov, ((1.0, 1.0, 1.0), 1, 0.0), "match_rms_adamw")
    kernels = TritonKernels(torch.device("cpu"), block=64)
    ours, wanted = (run(each, dtype, options, offset, factors) for each in (kernels, TorchKernels()))
    for (m, u, p), (other_m, other_u, other_p) in zip(ours, wanted, strict=True):
        torch.testing.assert_close(m, other_m, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(u, other_u, rtol=1e-2, atol=1e-6)
        torch.testing.assert_close(p, other_p, rtol=1e-2, atol=1e-4)


def test_a_gradient_of_another_dtype_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models of a process share the kernels, and a model gets the memory of one that was deleted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(
        "zeroshard.optim.sharded_muon.triton_kernels.find_row", triton.jit(find_row.fn)
    )  # compiled at import
    options = MuonOptions(0.02, 0.1, 0.95, False, ((1.0, 1.0, 1.0), 1, 0.0), None)
    kernels = TritonKernels(torch.device("cpu"), block=64)
    memory, momentum, update = torch.zeros(64), torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        gradient = memory.view(dtype)[:64].copy_(torch.arange(64.0))
        kernels.update_momenta([MomentumPart(gradient, momentum.zero_(), update)], options, GradScale())
        torch.testing.assert_close(momentum, 0.05 * torch.arange(64.0))
