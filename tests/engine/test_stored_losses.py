"""Losses that reach only the inside of a block, and views of parameters that a parent keeps while blocks run.

In processes: where a partitioned parameter is used after its release, the interpreter may crash.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import Step, assert_same, net_loss, token_step, tokens
from ranks import run_processes
from torch import nn
from zoo import Block, Net, built

VOCABULARY = 11  # of zoo.Net


class Gate(nn.Module):
    """A part of a block that keeps a penalty of its own, in a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x * self.scale)
        self.kept[:] = [x.square().mean()]
        return x


class Keeping(Block):
    """A block that keeps two penalties: its own, and its gate's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = Gate(width)
        self.penalty: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.gate(self.down(torch.tanh(self.up(self.norm(x)))))
        self.penalty = torch.sigmoid(inner).square().mean()
        return x + inner


class Penalised(Net):
    """Blocks that keep penalties; ``cut``: each learns from its own alone."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(7) for _ in range(4))
        self.cut = cut

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x.detach() if self.cut else x)
        return self.head(x) * self.temperature


def cut() -> Penalised:
    return Penalised(cut=True)


def penalties(model: Any) -> list[torch.Tensor]:
    return [block.penalty for block in model.blocks]


def inside_alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model(ids)
    loss = torch.stack(penalties(model)).sum()
    loss.backward()
    return loss


def first_alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model(ids)
    penalties(model)[0].backward()
    return penalties(model)[0]


def one_after_the_other(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model(ids)
    losses = [block.gate.kept[0] for block in model.blocks]
    for loss in losses:
        loss.backward(retain_graph=True)
    return torch.stack(losses).sum()


def with_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = net_loss(model, ids) + torch.stack(penalties(model)).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Penalised, inside_alone),
        (Penalised, first_alone),
        (Penalised, one_after_the_other),
        (Penalised, with_logits),
        (cut, inside_alone),
        (cut, with_logits),
    ],
)
def test_losses_that_reach_only_the_inside_of_blocks(kind: Any, step: Step) -> None:
    assert_same(built(kind), step, tokens(2, VOCABULARY), stage=3, run=run_processes)


class KeepsView(Net):
    """Makes a view of a parameter before the blocks and uses it after them; ``used``: after a first use of it."""

    def __init__(self, used: bool = False) -> None:
        super().__init__()
        self.used = used

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.used:
            x = x + nn.functional.linear(x, self.head.weight).mean(-1, keepdim=True)
        views = self.embedding.weight.t(), *self.head.weight.split(4)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) + torch.cat([x @ view.t() for view in views[1:]], -1)
        return logits + x @ views[0] * self.temperature


class KeepsDetached(Net):
    """Keeps what is not a view to autograd, but the parameter's memory all the same."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, kept = self.embedding(ids), self.embedding.weight.detach()
        for block in self.blocks:
            x = block(x)
        return self.head(x) + x @ kept.t()


class MapsRows(Net):
    """Uses a parameter under vmap, whose tensors have no memory to look at."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        return self.head(x) + torch.vmap(lambda row: nn.functional.linear(row, self.embedding.weight))(x)


def used() -> KeepsView:
    return KeepsView(used=True)


@pytest.mark.parametrize("kind", [KeepsView, used, KeepsDetached, MapsRows])
def test_a_view_of_a_parameter_outlives_the_blocks_that_run_meanwhile(kind: Any) -> None:
    assert_same(built(kind), token_step, tokens(2, VOCABULARY), stage=3, run=run_processes)
