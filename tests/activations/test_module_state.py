"""Blocks that update buffers, or whose mode changes before backward, are recomputed as in forward, and update once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import at_stages, pairwise
from plain import copied_buffers, full_parameters, sgd, square_loss, train_steps
from ranks import run_threads
from torch import nn
from zoo import built

import zeroshard


class Normalized(nn.Module):
    """A batch norm, which changes its statistics without incrementing their version."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


class Spectral(nn.Module):
    """A spectral norm, whose weight depends on vectors that each forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Counting(nn.Module):
    """A buffer that is changed in place, in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.layer.register_buffer("calls", self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(self.layer(x) * self.layer.calls)


class Centred(nn.Module):
    """A buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + torch.tanh(self.layer(x - self.mean))


class Mode(nn.Module):
    """Computes something else outside of training, with the same saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x) * (1 if self.training else 2))


BLOCKS = [Normalized, Spectral, Counting, Centred, Mode]


def make_model(block: type[nn.Module]) -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Sequential(*[block() for _ in range(3)])))


def data(steps: int = 3) -> list[torch.Tensor]:
    return [torch.randn(6, 4, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


def eval_between(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Change the mode between forward and backward."""
    model.train()
    loss = square_loss(model, batch)
    model.eval()
    return loss


@pytest.mark.guarantee("Buffers of recomputed blocks")
@pytest.mark.parametrize(
    ("how", "block", "loss"), pairwise(["whole", "nested", "policy"], BLOCKS, [square_loss, eval_between])
)
def test_training_gives_the_bits_of_the_run_without_recomputation(block: Any, loss: Any, how: str) -> None:
    plain = make_model(block)
    ours = copy.deepcopy(plain)
    inner = [module for part in ours[1] for module in (part, part.layer)]
    policy = [torch.ops.aten.addmm.default] if how == "policy" else None
    zeroshard.checkpoint_activations(ours, inner if how == "nested" else None, policy=policy)
    for model in (plain, ours):
        train_steps(model, sgd(model), data(), loss)
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())


@at_stages(0, 2, 3)
@pytest.mark.parametrize("block", BLOCKS)
def test_sharded_training_gives_the_bits_of_the_run_without_recomputation(block: Any, stage: int) -> None:
    def run(rank: int, is_recomputed: bool) -> dict[str, torch.Tensor]:
        model = make_model(block)
        if is_recomputed:
            zeroshard.checkpoint_activations(model)
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        train_steps(model, optimizer, [batch.chunk(2)[rank] for batch in data()], eval_between)
        return {**full_parameters(model), **copied_buffers(model)}

    for expected, ours in zip(run_threads(2, run, False), run_threads(2, run, True), strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in ours.items())


def test_a_graph_that_is_kept_is_recomputed_from_the_same_buffers() -> None:
    model = make_model(Spectral)
    plain = copy.deepcopy(model)
    zeroshard.checkpoint_activations(model)
    for batch in data(2):
        loss, expected = square_loss(model, batch), square_loss(plain, batch)
        wanted = torch.autograd.grad(expected, list(plain.parameters()))
        for _ in range(2):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_buffers_are_those_of_the_module_after_a_recomputation_that_raises() -> None:
    class Failing(Normalized):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            y = super().forward(x)
            if self.runs == 2:
                raise ValueError("no")
            return y.square()

    model = zeroshard.checkpoint_activations(nn.Sequential(nn.Linear(4, 8), Failing()), ["1"])
    buffers = list(model.buffers())
    loss = square_loss(model, data(1)[0])
    values = [buffer.clone() for buffer in buffers]
    with pytest.raises(ValueError, match="no"):
        loss.backward()
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, values, strict=True))
