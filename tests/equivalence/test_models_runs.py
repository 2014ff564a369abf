"""Recomputation, modes, and two sharded models in one process: as the plain run in each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import at_stages, pairwise
from plain import (
    Tensors,
    assert_close,
    assert_same,
    copied,
    decayed,
    full_parameters,
    net_loss,
    numbers,
    sharded,
    split,
    take_step,
    token_step,
    tokens,
)
from ranks import run_processes, run_threads
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import Net, built

import zeroshard

VOCABULARY = 11  # of zoo.Net


# ------------------------------------------------------------------------------------------------------- recomputation


class Recomputing(Net):
    """Recomputes its blocks in backward, cut in one of several ways, and counts how often a block runs."""

    def __init__(self, cut: str, reentrant: bool) -> None:
        super().__init__()
        self.cut, self.reentrant, self.runs = cut, reentrant, 0
        self.blocks[0].register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.runs += 1

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.cut == "each block":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.cut == "some blocks":
            x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
            x = self.blocks[2](self.blocks[1](x))
        elif self.cut == "all blocks at once":
            x = checkpoint(self._run_blocks, x, use_reentrant=self.reentrant)
        elif self.cut == "segments":
            x = checkpoint_sequential([*self.blocks, nn.Tanh()], 2, x, use_reentrant=self.reentrant)
        elif self.cut == "a block twice":
            for index in (0, 1, 0, 2, 0):
                x = checkpoint(self.blocks[index], x, use_reentrant=self.reentrant)
        else:  # "one in another"
            x = checkpoint(
                lambda y: checkpoint(self._run_blocks, y, use_reentrant=self.reentrant), x, use_reentrant=self.reentrant
            )
        return self.head(x) * self.temperature + self.nothing.sum()

    def _run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


CUTS = ["each block", "some blocks", "all blocks at once", "segments", "a block twice", "one in another"]


@pytest.mark.parametrize(("reentrant", "cut", "stage"), pairwise([True, False], CUTS, [1, 2, 3]))
def test_activation_checkpointing_of_both_kinds(reentrant: bool, cut: str, stage: int) -> None:
    model = built(lambda: Recomputing(cut, reentrant))
    probe = copy.deepcopy(model)
    token_step(probe, tokens(1, VOCABULARY)[0])
    assert probe.runs > (3 if cut == "a block twice" else 1)
    assert_same(model, token_step, tokens(3, VOCABULARY), stage=stage)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_with_several_forwards_before_one_backward(reentrant: bool) -> None:
    def two_forwards(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = net_loss(model, ids) + net_loss(model, ids.flip(1))
        loss.backward()
        return loss

    assert_same(built(lambda: Recomputing("each block", reentrant)), two_forwards, tokens(2, VOCABULARY), stage=3)


def test_activation_checkpointing_in_processes() -> None:
    for reentrant in (True, False):
        model = built(lambda reentrant=reentrant: Recomputing("each block", reentrant))
        assert_same(model, token_step, tokens(2, VOCABULARY), stage=3, run=run_processes)


# --------------------------------------------------------------------------------------------------------------- modes


def all_modes(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Every mode before, between and after two accumulated backwards; what they all say counts as the loss."""
    said = []
    with torch.inference_mode():
        said.append(net_loss(model, ids).clone())
    model.eval()
    net_loss(model, ids).backward()  # evaluation mode has gradients too
    with torch.no_grad():
        said.append(net_loss(model, ids))
    model.train()
    with torch.no_grad(), torch.enable_grad():
        loss = net_loss(model, ids.flip(1))
    with torch.inference_mode():
        said.append(net_loss(model, ids).clone())
    loss.backward()
    model.eval()
    said.append(net_loss(model, ids).detach())
    model.train()
    return torch.stack([*(float(s) * torch.ones(()) for s in said), loss.detach()]).sum()


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
def test_train_eval_no_grad_and_inference_mode_in_any_order(stage: int, world: int) -> None:
    assert_same(built(Net), all_modes, tokens(3, VOCABULARY), stage=stage, world=world)


@at_stages(1, 3)
def test_batch_norm_with_two_forwards_before_one_backward(stage: int) -> None:
    """As a discriminator sees true and false: the second forward's statistics must not spoil the first's graph."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(3)))

    def two(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + (model(x + 1) - 1).square().mean()
        loss.backward()
        return loss

    assert_same(built(make), two, numbers(3, 8, 5), stage=stage, whole=False, relative=5e-6)


# ---------------------------------------------------------------------------------------------- two models in a process


def adversaries() -> nn.ModuleDict:
    maker = nn.Sequential(
        nn.Linear(4, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 5)
    )
    judge = nn.Sequential(
        nn.Linear(5, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 1)
    )
    return nn.ModuleDict({"maker": maker, "judge": judge})


def play(maker: Any, judge: Any, make: Any, judging: Any, noise: torch.Tensor, true: torch.Tensor) -> list[float]:
    """One round: the judge learns from true and made rows, then the maker learns through the judge."""
    made = maker(noise)
    caught = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(true)).mean()
    take_step(judging, caught)
    fooled = F.softplus(-judge(made)).mean()
    take_step(make, fooled)
    judging.zero_grad()  # what went through it on the way to the maker
    return [caught.item(), fooled.item()]


@pytest.mark.parametrize("stages", [(3, 3), (1, 3), (3, 2), (0, 3)])
def test_two_sharded_models_train_against_each_other(stages: tuple[int, int]) -> None:
    models = built(adversaries)
    data = list(zip(numbers(3, 6, 4), numbers(3, 6, 5, seed=7), strict=True))

    def body(rank: int) -> tuple[list[list[float]], Tensors]:
        mine = copy.deepcopy(models)
        maker, make = zeroshard.shard(mine["maker"], decayed(mine["maker"]), stage=stages[0], timeout=20)
        judge, judging = zeroshard.shard(mine["judge"], decayed(mine["judge"]), stage=stages[1], timeout=20)
        losses = [play(maker, judge, make, judging, *split(batch, rank, 2)) for batch in data]
        made = {f"maker.{name}": value for name, value in full_parameters(maker).items()}
        return losses, made | {f"judge.{name}": value for name, value in full_parameters(judge).items()}

    plain = copy.deepcopy(models)
    make, judging = decayed(plain["maker"]), decayed(plain["judge"])
    expected = torch.tensor([play(plain["maker"], plain["judge"], make, judging, *batch) for batch in data])
    results = run_threads(2, body)
    torch.testing.assert_close(torch.tensor([r[0] for r in results]).mean(0), expected, rtol=1e-6, atol=1e-6)
    for _, parameters in results:
        assert_close(parameters, copied(plain), 2e-6)


@at_stages(1, 3)
def test_a_sharded_teacher_without_optimizer_and_its_student(stage: int) -> None:
    teacher, student = built(Net, seed=3), built(Net)
    data = tokens(3, VOCABULARY)

    def distil(teacher: Any, student: Any, optimizer: Any, ids: torch.Tensor) -> None:
        with torch.no_grad():
            wanted = teacher(ids)
        take_step(optimizer, F.mse_loss(student(ids), wanted))

    def body(rank: int) -> tuple[Tensors, Tensors]:
        master, _ = sharded(teacher, stage=stage, timeout=20)
        mine, optimizer = sharded(student, decayed, stage=stage, timeout=20)
        for batch in data:
            distil(master, mine, optimizer, split(batch, rank, 2))
        return full_parameters(master), full_parameters(mine)

    plain = copy.deepcopy(student)
    optimizer = decayed(plain)
    for batch in data:
        distil(teacher, plain, optimizer, batch)
    for unchanged, taught in run_threads(2, body):
        assert_close(unchanged, copied(teacher), 0.0)
        assert_close(taught, copied(plain))
