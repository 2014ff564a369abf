"""Ways of writing a model or a loop: modules that run twice, outputs of any shape, several losses."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage, pairwise
from plain import assert_same, backwards_in_reverse, backwards_in_turn, net_loss, token_step, tokens
from torch import nn
from torch.nn import functional as F
from zoo import Block, Net, built

VOCABULARY = 11  # of zoo.Net


# ------------------------------------------------------------------------------------- modules that run more than once


class Repeated(Net):
    """Runs its blocks in an order with repetitions, next to each other and apart."""

    order = (0, 0, 1, 2, 0, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x) * self.temperature + self.nothing.sum()


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
def test_modules_called_more_than_once_in_a_forward(stage: int, world: int) -> None:
    assert_same(built(Repeated), token_step, tokens(3, VOCABULARY), stage=stage, world=world)


@at_stages(1, 3)
def test_a_module_registered_under_two_names(stage: int) -> None:
    def make() -> nn.Module:
        model = Net()
        model.blocks.append(model.blocks[0])
        model.again = model.blocks[1]
        model.blocks.append(model.again)
        return model

    assert_same(built(make), token_step, tokens(2, VOCABULARY), stage=stage)


# -------------------------------------------------------------------------------------------------------------- outputs


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


Named = namedtuple("Named", "x extra")


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


SHAPES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"x": x, "none": None}, lambda out: out["x"]),
    "tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "list in dict in tuple": (lambda x: ("a", {"b": [x]}), lambda out: out[1]["b"][0]),
    "named tuple": (lambda x: Named(x, None), lambda out: out.x),
    "dataclass": (Record, lambda out: out.x),
    "dataclass in dataclass": (lambda x: Record(x.detach(), Record(x)), lambda out: out.extra.x),
    "slotted dataclass": (Slotted, lambda out: out.x),
    "object": (Plain, lambda out: out.x),
}


class Wrapping(Net):
    """Its blocks, and it itself, give their outputs wrapped up."""

    class Wrapped(Block):
        def __init__(self, shape: str) -> None:
            super().__init__(7)
            self.shape = shape

        def forward(self, x: Any) -> Any:
            wrap, unwrap = SHAPES[self.shape]
            return wrap(super().forward(unwrap(x)))

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(self.Wrapped(shape) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> Any:
        wrap, unwrap = SHAPES[self.shape]
        x = wrap(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return wrap(self.head(unwrap(x)) * self.temperature)


@at_stages(1, 3)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_of_any_shape(shape: str, stage: int) -> None:
    def wrapped_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = SHAPES[shape][1](model(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        return loss

    assert_same(built(lambda: Wrapping(shape)), wrapped_step, tokens(2, VOCABULARY), stage=stage)


# --------------------------------------------------------------------------------------------------------------- losses


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(7, VOCABULARY)
        self.deep = Block(7)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        for block in self.blocks[:2]:
            x = block(x)
        first = self.other(self.deep(x))
        return first, self.head(self.blocks[2](x)) * self.temperature


def several_forwards(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = sum(net_loss(model, (ids + shift) % VOCABULARY) for shift in range(3))
    loss.backward()
    return loss


def retained(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Two backwards through one graph."""
    loss = net_loss(model, ids)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    return loss


def evaluation_between(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A forward without gradients, and one whose gradients nobody asks for, between a forward and its backward."""
    loss = net_loss(model, ids)
    with torch.no_grad():
        net_loss(model, ids.flip(0))
    with torch.inference_mode():
        net_loss(model, ids.flip(0))
    net_loss(model, ids.flip(1))
    loss.backward()
    return loss


LOSSES = [several_forwards, backwards_in_turn, backwards_in_reverse, retained, evaluation_between]


@pytest.mark.parametrize(("form", "kind", "stage"), pairwise(LOSSES, [Net, Repeated], [0, 1, 2, 3]))
def test_several_forwards_and_backwards_in_one_step(form: Any, kind: Any, stage: int) -> None:
    assert_same(built(kind), form, tokens(3, VOCABULARY), stage=stage)


def both_at_once(model: Any, ids: torch.Tensor) -> torch.Tensor:
    first, second = (F.cross_entropy(logits.flatten(0, 1), ids.flatten()) for logits in model(ids))
    (first + 2 * second).backward()
    return first + second


def one_after_the_other(model: Any, ids: torch.Tensor) -> torch.Tensor:
    first, second = (F.cross_entropy(logits.flatten(0, 1), ids.flatten()) for logits in model(ids))
    first.backward(retain_graph=True)
    (2 * second).backward()
    return first + second


def one_of_two(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The second head runs and gets no gradient."""
    first, second = (F.cross_entropy(logits.flatten(0, 1), ids.flatten()) for logits in model(ids))
    first.backward()
    return first + second


@every_stage
@pytest.mark.parametrize("form", [both_at_once, one_after_the_other, one_of_two])
def test_one_forward_with_two_losses(form: Any, stage: int) -> None:
    assert_same(built(TwoHeads), form, tokens(3, VOCABULARY), stage=stage)
