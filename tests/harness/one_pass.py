"""One pass without a GPU: a kernel made of torch's own operations, for everything around it to be tested with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from zeroshard.engine import GradScale
from zeroshard.optim import step
from zeroshard.optim.fused_adam.launch_table import SliceTensors
from zeroshard.optim.hyperparams import AdamHyperparams


class TorchKernel:
    """Updates strip by strip by torch's fused kernel, with a copy of the gradient; what it was asked for is noted."""

    def __init__(self) -> None:
        self.laid: list[list[SliceTensors]] = []
        self.runs = 0  # how often it was run

    def prepare(self, strips: Sequence[SliceTensors], runs: int) -> list[SliceTensors]:
        assert {strip.slice_index for strip in strips} <= set(range(runs))
        self.laid.append(list(strips))
        return list(strips)

    def run(
        self, laid: list[SliceTensors], steps: Sequence[torch.Tensor], numbers: AdamHyperparams, factors: GradScale
    ) -> None:
        self.runs += 1
        for strip in laid:
            gradient = strip.gradient.to(torch.float32, copy=True)
            for factor in (factors.inv_scale, factors.clip_coef):
                gradient = gradient if factor is None else gradient * factor
            torch._fused_adamw_(
                [strip.master],
                [gradient],
                [strip.exp_avg],
                [strip.exp_avg_sq],
                [],
                [steps[strip.slice_index]],
                lr=numbers.lr,
                beta1=numbers.betas[0],
                beta2=numbers.betas[1],
                weight_decay=numbers.weight_decay,
                eps=numbers.eps,
                amsgrad=False,
                maximize=numbers.maximize,
                found_inf=factors.found_inf,
            )
            if strip.compute_param is not None and not (factors.found_inf is not None and bool(factors.found_inf)):
                strip.compute_param.copy_(strip.master)


@contextmanager
def in_one_pass() -> Iterator[list[TorchKernel]]:
    """Inside, every rank's fused Adam that is sharded gets such a kernel; they are listed."""
    made: list[TorchKernel] = []

    def kernel_for(optimizer: torch.optim.Optimizer, device: torch.device) -> TorchKernel:
        made.append(TorchKernel())
        return made[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step, "kernel_for", kernel_for)
        yield made
