"""What the host's update does to follow a GPU's fused Adam, as far as it can be seen without a GPU."""

from __future__ import annotations

import pytest
import torch

from zeroshard.optim.cpu import kernels
from zeroshard.optim.cpu.kernels import CpuKernels
from zeroshard.optim.hyperparams import AdamHyperparams, hyperparams_from_group

LENGTHS = (1, 37, 1025, 40_003)  # within a vector, a block, several blocks, several threads
FUSED = {"fused": True, "is_cuda_rounding": True}


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """One rounding, but for one in 2^29, where the sum in double lies half-way between two numbers."""
    return (a.double() * b.double() + c.double()).float()


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("decoupled", [True, False])
def test_an_update_is_rounded_as_it_is_said(native_kernels: CpuKernels, decoupled: bool, decay: float) -> None:
    torch.manual_seed(0)
    lr, beta1, beta2, eps, wd = (torch.tensor(value) for value in (1e-2, 0.8, 0.99, 1e-8, decay))
    raised = float(beta1**7), float(beta2**7)
    options = AdamHyperparams(lr=1e-2, betas=(0.8, 0.99), weight_decay=decay, decoupled_weight_decay=decoupled, **FUSED)
    for numel in LENGTHS:
        p, m, v, g = torch.randn(numel), torch.randn(numel), torch.rand(numel), torch.randn(numel)
        out = torch.empty(numel), torch.empty(numel), torch.empty(numel)
        native_kernels.adam(p, m, v, g, options, out=out, step=7, beta_powers=raised, threads=2)
        if decay and decoupled:
            p = fma(-(lr * wd), p, p)
        elif decay:
            g = g + p * wd  # two roundings
        first = fma(beta1, m, fma(-beta1, g, g))
        second = fma(beta2, v, fma(-beta2, g * g, g * g))
        correction1, correction2 = (1 - torch.tensor(power) for power in raised)
        root = (
            second.double().sqrt().float() / correction2.sqrt()
        ) + eps  # some square roots of torch's are not rounded
        wanted = p - (lr / correction1) * first / root
        for ours, theirs in zip(out, (wanted, first, second), strict=True):
            assert torch.equal(ours, theirs)


def test_an_infinite_parameter_that_does_not_decay_stays(native_kernels: CpuKernels) -> None:
    lines = torch.full((3,), torch.inf), torch.zeros(3), torch.zeros(3)
    native_kernels.adam(
        *lines, torch.ones(3), AdamHyperparams(lr=0.1, **FUSED), out=lines, step=1, beta_powers=(0.9, 0.999)
    )
    assert lines[0].tolist() == [torch.inf] * 3


def test_powers_are_wanted(native_kernels: CpuKernels) -> None:
    lines = torch.ones(3), torch.zeros(3), torch.zeros(3)
    with pytest.raises(ValueError, match="needs beta_powers: both betas to the power of step"):
        native_kernels.adam(*lines, torch.ones(3), AdamHyperparams(lr=0.1, **FUSED), out=lines, step=1)


def test_powers_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    table = kernels._beta_power_table
    monkeypatch.setattr(kernels, "_beta_power_table", lambda beta, span: table(beta, span, device="cpu"))
    for step in (1, kernels.STEPS_PER_TABLE - 1, kernels.STEPS_PER_TABLE, 2 * kernels.STEPS_PER_TABLE + 5):
        found = kernels.beta_powers_on_gpu((0.9, 0.9999), step)
        assert found == pytest.approx((0.9**step, 0.9999**step), rel=1e-3, abs=1e-37)


def test_what_a_gpu_fuses() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.AdamW([parameter], lr=0.5, fused=True)
    found = hyperparams_from_group(adam, adam.param_groups[0], is_cuda_rounding=True)
    assert found == AdamHyperparams(lr=0.5, weight_decay=0.01, **FUSED)
    sgd = torch.optim.SGD([parameter], lr=0.5, fused=True)
    assert hyperparams_from_group(sgd, sgd.param_groups[0], is_cuda_rounding=True) == hyperparams_from_group(
        sgd, {**sgd.param_groups[0], "fused": None}
    )
