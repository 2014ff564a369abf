"""Kinds of networks: transformer, convolution with batch norm, recurrent, routed experts; and their buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from plain import (
    assert_close,
    assert_same,
    copied,
    copied_buffers,
    decayed,
    full_parameters,
    numbers,
    split,
    take_step,
    token_step,
    tokens,
)
from ranks import run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zoo import Block, built

import zeroshard
from zeroshard.models import GPT, GPTConfig


def squared_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


# ------------------------------------------------------------------------------------------------ the reference GPT


def gpt_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(ids, ids)
    loss.backward()
    return loss


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_reference_gpt_trains_as_plain(tied: bool, stage: int, world: int) -> None:
    model = built(lambda: GPT(GPTConfig(vocab_size=17, context=8, layers=3, heads=2, width=16, tied=tied)))
    assert_same(model, gpt_step, tokens(3, 17), stage=stage, world=world)


@at_stages(2, 3)
def test_reference_gpt_with_checkpointing_trains_as_plain_in_processes(stage: int) -> None:
    model = built(lambda: GPT(GPTConfig(vocab_size=17, context=8, layers=3, heads=2, width=16, checkpoint=True)))
    assert_same(model, gpt_step, tokens(3, 17), stage=stage, run=run_processes)


def test_reference_gpt_with_many_small_buckets_trains_as_plain() -> None:
    model = built(lambda: GPT(GPTConfig(vocab_size=17, context=8, layers=2, heads=2, width=16)))
    assert_same(model, gpt_step, tokens(2, 17), stage=3, world=3, bucket_size=400)


# --------------------------------------------------------------------------------------- convolution and batch norm


class ConvNet(nn.Module):
    """Residual convolutions with batch norm, weights in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(6, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (3, 2), (3, 3)])
def test_convolutions_with_batch_norm_train_as_plain_and_their_statistics_follow_rank_0(stage: int, world: int) -> None:
    """Part by part: each rank normalises over its own rows, as under DDP.

    Looser, because a normalisation divides by the spread of few values, which enlarges what rounding there is.
    """
    model = built(ConvNet)
    assert_same(model, squared_step, numbers(3, 6, 3, 5, 5), stage=stage, world=world, whole=False, relative=5e-6)


class ReplacingBuffer(nn.Module):
    """Keeps a running mean in a buffer that it replaces, where batch norm writes into its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.inner(x - self.mean)


def modes(model: Any, optimizer: Any, rank: int, world: int, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Train, and evaluate in every mode between; return all outputs, and the buffers after each training forward."""
    outputs = []
    for number, batch in enumerate(batches):
        x = split(batch, rank, world)
        model.eval()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            outputs.append(model(x).clone())
        outputs.append(model(x).detach())  # differentiable, and nobody asks for the gradients
        model.train()
        loss = model(x).square().mean()
        outputs += [buffer.clone() for buffer in model.buffers()]
        take_step(optimizer, loss)
        model.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad():
            outputs.append(model(x).clone())
    return [output.clone() for output in outputs]


def modes_sharded(rank: int, world: int, model: nn.Module, batches: list[torch.Tensor], stage: int) -> Any:
    model, optimizer = zeroshard.shard(model, decayed(model), stage=stage, timeout=20)
    outputs = modes(model, optimizer, rank, world, batches)
    return outputs, full_parameters(model), copied_buffers(model)


def modes_ddp(rank: int, world: int, model: nn.Module, batches: list[torch.Tensor]) -> Any:
    wrapped = DistributedDataParallel(model)
    outputs = modes(wrapped, decayed(model), rank, world, batches)
    return outputs, copied(model), copied_buffers(model)


def hooked_gradients(rank: int, world: int, model: nn.Module, batch: torch.Tensor, stage: int | None) -> Any:
    """What hooks of parameters see, and what comes of the gradients they give back."""
    seen: dict[str, torch.Tensor] = {}

    def halved(name: str) -> Any:
        return lambda gradient: seen.setdefault(name, gradient.clone()) / 2

    names = dict(model.named_parameters())
    run: Any = DistributedDataParallel(model) if stage is None else zeroshard.shard(model, stage=stage)[0]
    for name, parameter in names.items():
        parameter.register_hook(halved(name))
    run(split(batch, rank, world)).square().mean().backward()
    read = (lambda name: names[name].grad) if stage is None else (lambda name: zeroshard.full_gradient(run, name))
    return seen, {name: read(name) for name in names}


@every_stage
def test_hooks_of_parameters_see_and_change_what_they_do_under_ddp(stage: int) -> None:
    model, batch = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))), numbers(1, 6, 4)[0]
    theirs = run_processes(2, hooked_gradients, 2, model, batch, None)
    for ours, ddp in zip(run_processes(2, hooked_gradients, 2, model, batch, stage), theirs, strict=True):
        torch.testing.assert_close(ours, ddp)


@at_stages(1, 3)
@pytest.mark.parametrize("kind", [ConvNet, ReplacingBuffer])
def test_buffers_and_outputs_are_ddps_on_every_rank_in_every_mode(kind: Any, stage: int) -> None:
    model = built(kind)
    batches = numbers(3, 6, 3, 5, 5) if kind is ConvNet else numbers(3, 6, 4)
    theirs = run_processes(2, modes_ddp, 2, model, batches)
    ours = run_processes(2, modes_sharded, 2, model, batches, stage)
    for (outputs, parameters, buffers), (ddp_outputs, ddp_parameters, ddp_buffers) in zip(ours, theirs, strict=True):
        names = [str(number) for number in range(len(outputs))]
        assert_close(buffers, ddp_buffers, 5e-6)
        assert_close(dict(zip(names, outputs, strict=True)), dict(zip(names, ddp_outputs, strict=True)), 5e-6)
        assert_close(parameters, ddp_parameters, 5e-6)


# -------------------------------------------------------------------------------------------------------- recurrent


class Recurrent(nn.Module):
    """An LSTM of two layers in both directions, then a cell called once a step of time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.cell = nn.LSTMCell(12, 7)
        self.head = nn.Linear(7, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embedding(ids))
        state = None
        outputs = []
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (2, 2), (3, 2), (3, 3)])
def test_recurrent_network_trains_as_plain(stage: int, world: int) -> None:
    assert_same(built(Recurrent), token_step, tokens(3, 13), stage=stage, world=world)


# --------------------------------------------------------------------------------------------------- routed experts


class Experts(nn.Module):
    """Each row goes to one expert; an expert no row chose does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(7, 4)
        self.experts = nn.ModuleList(Block(7) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + y


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@at_stages(1, 2, 3)
def test_experts_that_run_on_some_ranks_only_train_as_plain(stage: int) -> None:
    """Few rows, so that the ranks choose different experts; an expert nobody chose is left alone by the optimizer."""
    model = built(Routed)
    batches = numbers(4, 4, 7)
    hidden = copy.deepcopy(model).layers[0].gate(torch.stack(batches)).argmax(-1)  # the first layer's choices
    assert any(set(rows[:2].tolist()) != set(rows[2:].tolist()) for rows in hidden)
    assert any(len(set(rows.tolist())) < 4 for rows in hidden)
    assert_same(model, squared_step, batches, stage=stage, whole=False)
