"""Edits of parameters through .data, and gradients that loops assign: the plain run's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import plain
import pytest
import torch
from core_runs import api, assert_same
from core_runs import tested_core as tested_core
from plain import batches, net_loss
from torch import nn
from zoo import TokenNet, built, make_net

NET = make_net()


def clip_weights(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


class ClipsInForward(TokenNet):
    """Clips a weight of a block in its own forward, and one of another block from outside."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.head.weight.data.clamp_(-0.3, 0.3)
        return super().forward(tokens)


TIMES = "before forward|after forward|after backward|after step|after zero_grad|after evaluation".split("|")


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_weights_are_clipped_through_data(precision: str | None, time: str, first: int) -> None:
    """At any time of a step, also if the loop begins late with it."""

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        def train(batch: torch.Tensor) -> Iterator[str]:
            yield "before forward"
            loss = net_loss(model, batch)
            yield "after forward"
            loss.backward()
            yield "after backward"
            optimizer.step()
            yield "after step"
            optimizer.zero_grad()
            yield "after zero_grad"
            with torch.no_grad():
                net_loss(model, batch)
            yield "after evaluation"

        for number, batch in enumerate(data):
            for now in train(batch):
                if now == time and number >= first:
                    clip_weights(model)

    assert_same(NET, loop, data=batches(7), precision=precision, stages=(0, 1, 2))


def test_a_weight_is_clipped_in_the_forward() -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            plain.train_step(model, optimizer, batch)

    assert_same(built(ClipsInForward), loop, data=batches(7), precision="bf16", stages=(0, 1, 2))


def local_gradients(model: Any, batch: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(net_loss(model, batch), list(model.parameters())))


def assign(model: Any, batch: torch.Tensor) -> None:
    for parameter, gradient in zip(model.parameters(), local_gradients(model, batch), strict=True):
        parameter.grad = gradient


def assign_with_decay(model: Any, batch: torch.Tensor) -> None:
    for parameter, gradient in zip(model.parameters(), local_gradients(model, batch), strict=True):
        parameter.grad = gradient
        if not api.is_sharded(model) or model._zeroshard_core.context.config.stage < 3:
            parameter.grad = gradient + 0 * parameter.detach()


def assign_and_add(model: Any, batch: torch.Tensor) -> None:
    for half in batch.chunk(2):
        for parameter, gradient in zip(model.parameters(), local_gradients(model, half), strict=True):
            if parameter.grad is None:
                parameter.grad = gradient / 2
            else:
                parameter.grad += gradient / 2


def add_to_a_backward(model: Any, batch: torch.Tensor) -> None:
    net_loss(model, batch).backward()
    buffer = [torch.zeros_like(gradient) for gradient in local_gradients(model, batch)]
    for _ in range(2):
        for parameter, gradient, kept in zip(
            model.parameters(), local_gradients(model, batch.flip(1)), buffer, strict=True
        ):
            parameter.grad.add_(kept.copy_(gradient), alpha=0.5)


def assign_one(model: Any, batch: torch.Tensor) -> None:
    gradients = local_gradients(model, batch)
    net_loss(model, batch.flip(1)).backward()
    for parameter, gradient in list(zip(model.parameters(), gradients, strict=True))[::3]:
        parameter.grad = gradient


def norm_by_hand(model: Any, optimizer: Any) -> float:
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad.mul_(0.05 / norm)
    return norm.item()


def clip_by_torch(model: Any, optimizer: Any) -> float:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()


@pytest.mark.parametrize("clip", [clip_by_torch, norm_by_hand])
@pytest.mark.parametrize("make", [assign, assign_with_decay, assign_and_add, add_to_a_backward, assign_one])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_that_a_loop_assigns_are_clipped(precision: str | None, make: Any, clip: Any) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
        norms = []
        for batch in data:
            make(model, batch)
            norms.append(clip(model, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    assert_same(NET, loop, data=batches(4, rows=24), precision=precision, identical=False)
