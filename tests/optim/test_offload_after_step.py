"""What a loop may do after ``step()``, while the host is still at the update: it leaves the same numbers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from offloaded import Case, assert_same, everything
from plain import batches, net_loss, token_step

import zeroshard
from zeroshard.optim.cpu.apply import ChunkUpdater


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every update begin late: a use that does not wait for it is surely too early."""
    update = ChunkUpdater.update

    def later(*arguments: Any) -> Any:
        time.sleep(0.02)
        return update(*arguments)

    monkeypatch.setattr(ChunkUpdater, "update", later)


def no_gradients(model, optimizer, batch) -> None:
    model.zero_grad()


def zero_gradients(model, optimizer, batch) -> None:
    for parameter in model.parameters():
        parameter.grad.zero_()


def zeroed_by_the_model(model, optimizer, batch) -> None:
    model.zero_grad(set_to_none=False)


def one_without(model, optimizer, batch) -> None:
    model.head.weight.grad = None
    optimizer.step()
    optimizer.zero_grad()


def slower(model, optimizer, batch) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.5)  # as schedulers do where it is a tensor
    optimizer.zero_grad()


def gathered_in_forward(model, optimizer, batch) -> None:
    optimizer.zero_grad()

    def look(module, inputs) -> None:
        with zeroshard.gathered(model):
            model.head.weight.sum()

    handle = model.embedding.register_forward_pre_hook(look)
    with torch.no_grad():
        net_loss(model, batch)
    handle.remove()


@pytest.mark.parametrize(
    "then",
    [no_gradients, zero_gradients, zeroed_by_the_model, one_without, slower, gathered_in_forward],
    ids=lambda then: then.__name__,
)
@pytest.mark.parametrize(
    "offload",
    [{"optimizer": "host"}, {"optimizer": "host", "gradients": "device"}],
    ids=["grads on host", "grads on device"],
)
def test_what_comes_after_a_step_does_not_reach_into_it(then, offload: Any, late: None) -> None:
    def run(offload: Any) -> Any:
        model, optimizer = Case(optimizer="amsgrad" if then is slower else "Adam", options={"stage": 2}).make(offload)
        if then is slower:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        for batch in batches(2):
            token_step(model, batch)
            optimizer.step()
            then(model, optimizer, batch)
        return everything(model, optimizer)

    assert_same(run(offload and {**offload, "speculate": False}), run(None))
