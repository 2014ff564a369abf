"""The plain, unsharded runs that sharded runs are compared with, and small models for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ranks import run_threads, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    """A residual block with sizes that are not divisible by the number of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head, and parameters with one and with zero elements."""

    def __init__(self, width: int = 7, blocks: int = 3, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.temperature = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature + self.nothing.sum()


def make_net(seed: int = 0, **sizes: int) -> Net:
    """Build a net from a seed, without changing the state of the global generator."""
    with seeded(seed):  # ranks are threads, and share the generator
        return Net(**sizes)


def net_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Predict each token from itself."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def batches(steps: int, rows: int = 12, length: int = 5, vocabulary: int = 11, seed: int = 1) -> list[torch.Tensor]:
    """Return global batches; 12 rows can be split over 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(steps)]


def split(batch: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return one rank's rows of a global batch."""
    return batch.chunk(world)[rank]


def adamw_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with two groups of parameters, and an epsilon above the rounding of gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor], loss_of: Loss = net_loss
) -> list[float]:
    """Run one step per batch; return the losses. Like every loop here, it works for plain and for sharded models."""
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_plain(
    model: nn.Module, make_optimizer: MakeOptimizer, data: list[torch.Tensor], loss_of: Loss = net_loss
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train without sharding on global batches; return losses and final parameters."""
    losses = train_steps(model, make_optimizer(model), data, loss_of)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_sharded(
    rank: int,
    world: int,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    data: list[torch.Tensor],
    loss_of: Loss = net_loss,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train one rank's part of each batch; return this rank's losses and the full final parameters."""
    model = copy.deepcopy(model)
    model, optimizer = zeroshard.shard(model, make_optimizer(model), **options)
    losses = train_steps(model, optimizer, [split(batch, rank, world) for batch in data], loss_of)
    return losses, full_parameters(model)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the full parameters of a sharded model."""
    with zeroshard.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], relative: float = 1e-6) -> None:
    """Assert that each tensor equals the plain one within ``relative`` of its largest value.

    A tensor that started at zero is as small as the steps it took, and Adam amplifies the summation order of gradients
    that nearly cancel. So the largest value counts as at least 0.25.
    """
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        largest = max(value.abs().max().item(), 0.25) if value.numel() else 1.0
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=relative * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that the tensors are bitwise equal."""
    assert ours.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(ours[name], value), name


Loop = Callable[[nn.Module, torch.optim.Optimizer, list[torch.Tensor]], Any]


def run_plain(
    base: nn.Module, make_optimizer: MakeOptimizer, data: list[torch.Tensor], loop: Loop = train_steps
) -> dict[str, torch.Tensor]:
    """Run a loop without sharding on global batches; return the final parameters."""
    model = copy.deepcopy(base)
    loop(model, make_optimizer(model), data)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_rank(
    rank: int,
    world: int,
    base: nn.Module,
    make_optimizer: MakeOptimizer,
    data: list[torch.Tensor],
    loop: Loop = train_steps,
    mesh_shape: tuple[int, ...] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Run a loop on one rank's part of each batch; return the full final parameters."""
    model = copy.deepcopy(base)
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape)
    model, optimizer = zeroshard.shard(model, make_optimizer(model), mesh=mesh, **options)
    loop(model, optimizer, [split(batch, rank, world) for batch in data])
    return full_parameters(model)


def run_stages(
    world: int,
    base: nn.Module,
    make_optimizer: MakeOptimizer,
    data: list[torch.Tensor],
    loop: Loop = train_steps,
    stages: tuple[int, ...] = (0, 1, 2, 3),
    **options: Any,
) -> dict[int, dict[str, torch.Tensor]]:
    """Run a loop in each stage, with threads as ranks; return the final parameters, equal on all ranks, by stage."""
    results = {}
    for stage in stages:
        body = partial(
            run_rank,
            world=world,
            base=base,
            make_optimizer=make_optimizer,
            data=data,
            loop=loop,
            stage=stage,
            **options,
        )
        first, *others = run_threads(world, body)
        for other in others:
            assert_equal(other, first)
        results[stage] = first
    return results


def assert_same_training(
    world: int,
    base: nn.Module,
    make_optimizer: MakeOptimizer,
    data: list[torch.Tensor],
    loop: Loop = train_steps,
    identical: bool = True,
    relative: float = 1e-6,
    **options: Any,
) -> None:
    """Assert that every stage ends with the plain run's parameters, and that stages 1, 2 and 3 are bitwise equal."""
    plain = run_plain(base, make_optimizer, data, loop)
    moved = [name for name, value in base.named_parameters() if not torch.equal(value, plain[name])]
    assert moved, "the plain run trains nothing: the comparison would say nothing"
    results = run_stages(world, base, make_optimizer, data, loop, **options)
    for stage, result in results.items():
        try:
            assert_close(result, plain, relative)
        except AssertionError as error:
            raise AssertionError(f"stage {stage} differs from the plain run: {error}") from error
    for stage in (2, 3) if identical else ():
        assert_equal(results[stage], results[1])


class Skips(nn.Module):
    """Three layers; only some batches use the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if use or number != 1 else x
        return x
