"""Which units a model falls into: small blocks go together, and that changes no number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain import sharded, take_step
from ranks import run_threads
from torch import nn

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.models.gpt import Block
from zeroshard.sharding.units import plan_units

DEEP = GPTConfig(vocab_size=64, context=8, layers=33, heads=2, width=8)


def units_of(model: nn.Module, units: Any = None) -> list[str]:
    return [plan.name for plan in plan_units(model, units, 2**27)]


def sizes_of(model: nn.Module) -> list[int]:
    """Blocks of each unit that has any."""
    return [name.count("+") + 1 for name in units_of(model) if "blocks" in name]


def deep(layers: int, width: int = 8) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=64, context=8, layers=layers, heads=2, width=width))


def test_neighbouring_blocks_go_together_while_they_are_a_sixteenth_of_all() -> None:
    assert units_of(deep(31))[1:32] == [f"blocks.{number}" for number in range(31)]
    assert units_of(deep(33))[1] == "blocks.0"  # none is left to go with it
    assert units_of(deep(33))[2:4] == ["blocks.1+blocks.2", "blocks.3+blocks.4"]
    assert max(sizes_of(deep(48))) == 3


@pytest.mark.parametrize(("blocks", "most", "units"), [(96, 4, 35), (192, 6, 46)])
def test_groups_grow_with_the_square_root_of_the_blocks(blocks: int, most: int, units: int) -> None:
    """From three of 48 on: of four times as many blocks, twice as many go together."""
    sizes = sizes_of(deep(blocks))
    assert (max(sizes), len(sizes), sum(sizes)) == (most, units, blocks)


def test_behind_a_group_are_six_times_as_many_blocks() -> None:
    """The last ones run backward while all activations are in memory."""
    sizes = sizes_of(deep(192))
    assert sizes[-12:] == [1] * 12 and sizes[-16:-12] == [3, 2, 2, 2]
    assert all(6 * size <= sum(sizes[number + 1 :]) for number, size in enumerate(sizes) if size > 1)


def test_blocks_with_many_parameters_stay_alone() -> None:
    assert 12 * 1024**2 < 2**24 < 2 * 12 * 1024**2
    assert units_of(deep(40, width=1024))[1:41] == [f"blocks.{number}" for number in range(40)]


def test_blocks_of_two_containers_do_not_go_together() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = deep(33).blocks, deep(33).blocks

    names = units_of(Two())
    assert {"left.30+left.31+left.32", "right.0+right.1+right.2", "right.32"} <= set(names)
    assert not any("left" in name and "right" in name for name in names)


def test_members_of_a_root_container_are_units_though_they_hold_blocks_themselves() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4))

    assert units_of(nn.Sequential(Experts(), Experts())) == ["0", "1"]
    assert units_of(nn.Sequential(nn.Embedding(9, 6), Experts())) == ["0", *(f"1.experts.{n}" for n in range(4))]


def test_units_that_are_asked_for_are_left_as_they_are() -> None:
    assert units_of(deep(33), (Block,))[1:3] == ["blocks.0", "blocks.1"]


def losses(rank: int, plain: GPT, units: Any) -> tuple[list[float], int]:
    model: nn.Module = zeroshard.checkpoint_activations(copy.deepcopy(plain))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = zeroshard.shard(model, optimizer, stage=3, units=units)
    tokens = torch.arange(16).view(2, 8) + rank
    found = []
    for _ in range(2):
        found.append(take_step(optimizer, model(tokens, tokens)))
    return found, zeroshard.report(model).collectives["all-gather"].count


def test_blocks_that_go_together_give_the_same_numbers_with_fewer_collectives() -> None:
    plain = GPT(DEEP)
    together, alone = (run_threads(2, losses, plain, units) for units in (None, (Block,)))
    assert [found for found, _ in together] == [found for found, _ in alone]
    assert together[0][1] < 0.8 * alone[0][1]


class Borrowing(nn.Module):
    """A block that uses a weight which its parent has from another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(nn.functional.linear(x, weight)) + self.second(torch.tanh(self.first(x)))


class Lending(nn.Module):
    def __init__(self, blocks: int, as_view: bool) -> None:
        super().__init__()
        self.lent, self.as_view = nn.Linear(8, 8, bias=False), as_view
        self.blocks = nn.ModuleList(Borrowing() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, view = self.lent(x), self.lent.weight.t() if self.as_view else None
        for block in self.blocks:
            x = block(x, self.lent.weight if view is None else view)
        return x.square().mean()


@pytest.mark.parametrize(("blocks", "as_view"), [(64, False), (3, True), (64, True)])
def test_a_weight_that_all_blocks_borrow_is_there_for_each_of_them(blocks: int, as_view: bool) -> None:
    plain = Lending(blocks, as_view)
    plain(torch.ones(2, 8)).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def body(rank: int) -> None:
        model, _ = sharded(plain, stage=3)
        model(torch.ones(2, 8)).backward()
        for name in ("lent.weight", "blocks.0.first.weight", f"blocks.{blocks - 1}.second.bias"):
            torch.testing.assert_close(zeroshard.full_gradient(model, name), wanted[name])

    run_threads(2, body)
