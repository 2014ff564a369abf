"""Edits of parameters through .data, and gradients that loops assign: the plain run's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import plain
import pytest
import torch
from core_runs import assert_same
from core_runs import tested_core as tested_core
from plain import batches, net_loss
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
