"""The batched step of torch.optim.Muon gives what torch's own step gives, to the rounding of its bf16 products."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.optim.muon import is_known_muon, step_muon
from zeroshard.optim.sharded_muon.kernels import TorchKernels
from zeroshard.optim.sharded_muon.updater import KERNEL_LOADER

SHAPES = [(12, 20), (20, 12), (12, 20), (16, 16), (20, 12), (1, 8), (12, 20)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("max_numel", [1, 500, 10**6])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5},
        {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"lr": torch.tensor(0.03)},
    ],
)
def test_a_batched_step_is_that_of_torch(options: dict[str, Any], max_numel: int) -> None:
    ours, theirs = parameters(), parameters()
    groups = [{"params": ours[:4]}, {"params": ours[4:], "lr": 0.01}]
    others = [{"params": theirs[:4]}, {"params": theirs[4:], "lr": 0.01}]
    optimizer, wanted = torch.optim.Muon(groups, **options), torch.optim.Muon(others, **options)
    assert is_known_muon(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            other.grad = torch.randn(other.shape, generator=generator)
            mine.grad = other.grad.clone()
            if index == 2 and step == 1:
                mine.grad = other.grad = None
        before = copy.deepcopy(theirs)
        step_muon(optimizer, max_numel)
        wanted.step()
        for mine, other, old in zip(ours, theirs, before, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0.02 * float((other - old).detach().abs().max()))
            mine.data.copy_(other.data)
    assert optimizer.state_dict()["state"].keys() == wanted.state_dict()["state"].keys()
    for index, state in wanted.state_dict()["state"].items():
        torch.testing.assert_close(optimizer.state_dict()["state"][index], state, rtol=0, atol=0)


def test_a_scheduler_takes_a_batched_step_for_a_step() -> None:
    optimizer = torch.optim.Muon(parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    step_muon(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_class_made_from_muon_steps_itself() -> None:
    class Own(torch.optim.Muon):
        pass

    assert not is_known_muon(Own(parameters()))


def test_a_kernel_with_other_numbers_fails_its_test() -> None:
    class Wrong(TorchKernels):
        def update_values(self, parts: Any, decay: float, alpha: float) -> None:
            super().update_values(parts, 1.0, alpha)

    KERNEL_LOADER.self_test(TorchKernels(), torch.device("cpu"))
    with pytest.raises(AssertionError, match="not close"):
        KERNEL_LOADER.self_test(Wrong(), torch.device("cpu"))
