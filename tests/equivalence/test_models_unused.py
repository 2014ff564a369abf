"""Unused parameters and branches: skipped where no rank used them, averaged where some did, as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from plain import (
    Tensors,
    adamw,
    assert_close,
    assert_same,
    copied,
    decayed,
    full_parameters,
    sharded,
    split,
    tokens,
    train_rank,
)
from ranks import RanksFailed, run_threads
from torch import nn
from torch.nn import functional as F
from zoo import Block, Net, built

import zeroshard

VOCABULARY = 11  # of zoo.Net


class Branching(Net):
    """Runs a side block when a flag in its batch says so, and uses what it gives when another flag says so."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.side = nn.ModuleList([Block(7), Block(7)])
        self.never = nn.Linear(7, 7)
        self.blocks[0].spare = nn.Parameter(torch.ones(5))

    def forward(self, batch: Tensors) -> torch.Tensor:
        x = self.embedding(batch["ids"])
        for block, side in zip(self.blocks, self.side, strict=True):
            if batch["run"].any():
                y = side(x)
                x = x + y if batch["use"].any() else x
            x = block(x)
        return self.head(x) * self.temperature + self.nothing.sum()


def branching_step(model: Any, batch: Tensors) -> torch.Tensor:
    loss = F.cross_entropy(model(batch).flatten(0, 1), batch["ids"].flatten())
    loss.backward()
    return loss


def branching_batches(run: list[list[int]], use: list[list[int]]) -> list[Tensors]:
    """Batches with each rank's flags at each step."""
    ids = tokens(len(run), VOCABULARY)
    flags = zip(ids, run, use, strict=True)
    return [{"ids": i, "run": torch.tensor(r).bool(), "use": torch.tensor(u).bool()} for i, r, u in flags]


@every_stage
@pytest.mark.parametrize("make_optimizer", [decayed, adamw])
def test_a_branch_that_changes_from_step_to_step(make_optimizer: Any, stage: int) -> None:
    """The plain optimizer skips what got no gradient: no decay, no momentum, no step counted. So does ours."""
    on_off = [[1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]
    batches = branching_batches(run=on_off, use=[[1, 1]] * 5)
    assert_same(built(Branching), branching_step, batches, stage=stage, make=make_optimizer, whole=False)


@every_stage
def test_parameters_unused_everywhere_keep_their_values_and_have_no_state(stage: int) -> None:
    model = built(Branching)
    batches = branching_batches(run=[[1, 1]] * 2, use=[[0, 0]] * 2)

    def body(rank: int) -> tuple[Tensors, list[torch.Tensor | None], list[dict[str, Any]]]:
        mine, optimizer = sharded(model, adamw, stage=stage, timeout=20)
        unused = [n for n, _ in mine.named_parameters() if n.startswith(("side", "never")) or n.endswith("spare")]
        for batch in batches:
            optimizer.zero_grad()
            branching_step(mine, split(batch, rank, 2))
            optimizer.step()
        gradients = [zeroshard.full_gradient(mine, name) for name in unused]
        states = [zeroshard.full_state(optimizer, name) for name in unused]
        return {n: p for n, p in full_parameters(mine).items() if n in unused}, gradients, states

    before = copied(model)
    for parameters, gradients, states in run_threads(2, body):
        assert len(parameters) == 2 * 5 + 2 + 1
        assert_close(parameters, {name: before[name] for name in parameters}, 0.0)
        assert all(gradient is None for gradient in gradients)
        assert not any(states)


@every_stage
@pytest.mark.parametrize("world", [2, 3])
def test_outputs_used_on_one_rank_only_are_averaged_over_all(stage: int, world: int) -> None:
    """The side blocks run on all ranks; each step another rank's loss depends on them."""
    use = [[int(rank == step % world) for rank in range(world)] for step in range(3)]
    batches = branching_batches(run=[[1] * world] * 3, use=use)
    assert_same(built(Branching), branching_step, batches, stage=stage, world=world, whole=False, make=adamw)


class Inside(Net):
    """The branch is inside a block, which is a unit as a whole."""

    class Branch(Block):
        def __init__(self) -> None:
            super().__init__(7)
            self.side = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor, run: torch.Tensor | bool = True) -> torch.Tensor:
            return super().forward(x + self.side(x) if run else x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Branch() for _ in range(3))

    def forward(self, batch: Tensors) -> torch.Tensor:
        x = self.embedding(batch["ids"])
        for block in self.blocks:
            x = block(x, batch["run"].any())
        return self.head(x) * self.temperature + self.nothing.sum()


@at_stages(1, 2, 3)
def test_branches_inside_a_unit_may_differ_from_rank_to_rank(stage: int) -> None:
    run = [[1, 0], [0, 1], [1, 1], [0, 0]]
    batches = branching_batches(run=run, use=run)
    assert_same(built(Inside), branching_step, batches, stage=stage, whole=False, make=adamw)


@at_stages(0, 1, 2)
def test_branches_around_a_unit_may_differ_from_rank_to_rank_while_parameters_are_whole(stage: int) -> None:
    run = [[1, 0], [0, 1], [1, 1], [0, 0]]
    batches = branching_batches(run=run, use=[[1, 1]] * 4)
    assert_same(built(Branching), branching_step, batches, stage=stage, whole=False, make=adamw)


def test_branches_around_a_partitioned_unit_that_differ_from_rank_to_rank_are_an_error_that_names_it() -> None:
    batches = branching_batches(run=[[1, 1], [1, 0]], use=[[1, 1]] * 2)
    options = {"stage": 3, "timeout": 1}
    with pytest.raises(RanksFailed, match=r"RanksDisagreeError: .*rank 1 .* unit 'blocks\.0'"):
        run_threads(2, train_rank, 2, built(Branching), branching_step, batches, decayed, options)
