"""The small models that tests share. A model that one test needs for its own oddity stands in that test's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from ranks import seeded
from torch import nn


class Mlp(nn.Module):
    """Two layers and a residual: the smallest block that is a unit."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """A residual block with a norm, and by default with sizes that are not divisible by the number of ranks."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 2 * width + 3 if hidden is None else hidden
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TokenNet(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, width: int = 7, blocks: int = 3, vocabulary: int = 11, hidden: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))


class Net(TokenNet):
    """The model of most tests: also has parameters with one and with zero elements."""

    def __init__(self, width: int = 7, blocks: int = 3, vocabulary: int = 11) -> None:
        super().__init__(width, blocks, vocabulary)
        self.temperature = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.temperature + self.nothing.sum()


def built(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Build a model from a seed, without changing the state of the global generator."""
    with seeded(seed):  # ranks are threads, and share the generator
        return make()


def make_net(seed: int = 0, **sizes: int) -> Net:
    """Build a net from a seed."""
    return built(partial(Net, **sizes), seed)


class InOrder(nn.Module):
    """Blocks that run in an order that may differ between steps and ranks: skipped, repeated or swapped."""

    def __init__(self, blocks: Iterable[nn.Module], order: Sequence[int] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.order = range(len(self.blocks)) if order is None else order

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        for index in self.order if order is None else order:
            x = self.blocks[index](x)
        return x


class Skips(nn.Module):
    """Three layers; only some batches use the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if use or number != 1 else x
        return x


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as LoRA makes it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Tied(nn.Module):
    """A tied embedding, a frozen layer, a batch norm, an unused layer and an empty parameter around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Mlp(8, 14) for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.flatten())
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(self.frozen(x))) + self.empty.sum()
        return logits.view(*tokens.shape, -1)
