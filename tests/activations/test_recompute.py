"""Lean recomputation: the same gradients to the bit as without it, nothing kept, nothing computed for nothing."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard


class Block(nn.Module):
    """Two layers with what a run may depend on in between."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)
        self.runs = 0
        self.made: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        hidden = self.dropout(torch.tanh(self.first(x)))
        self.made.append(weakref.ref(hidden))
        return x + self.second(hidden)


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def model(dropout: float = 0.0, recomputed: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*[Block(dropout) for _ in range(3)]))
    return zeroshard.checkpoint_activations(made) if recomputed else made  # type: ignore[return-value]


def gradients(made: nn.Module, **options: Any) -> list[torch.Tensor]:
    made.zero_grad()
    with torch.autocast("cpu", **options) if options else torch.enable_grad():
        loss = made(torch.linspace(-1, 1, 12).view(3, 4)).square().sum()
    loss.backward()
    return [p.grad for p in made.parameters() if p.grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}])
def test_gradients_are_those_of_the_plain_run(dropout: float, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    wanted = gradients(plain := model(dropout, recomputed=False), **options)
    after = torch.rand(2)
    torch.manual_seed(1)
    found = gradients(again := model(dropout), **options)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert [block.runs for block in again[1]] == [2] * 3 and [block.runs for block in plain[1]] == [1] * 3
    assert torch.equal(torch.rand(2), after)  # what is drawn again in backward is drawn for nobody else


def test_casts_of_forward_hold_in_the_second_run_whatever_holds_in_backward() -> None:
    found = []
    for made in (model(recomputed=False), model()):
        loss = made(torch.linspace(-1, 1, 12).view(3, 4)).square().sum()
        with torch.autocast("cpu", torch.bfloat16):  # backward's own products are cast, in both
            loss.backward()
        found.append([p.grad for p in made.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_between_forward_and_backward_nothing_of_a_block_is_there() -> None:
    made = model()
    loss = made(torch.ones(3, 4)).sum()
    gc.collect()
    assert all(hidden() is None for block in made[1] for hidden in block.made)
    loss.backward()
    assert all(hidden() is None for block in made[1] for hidden in block.made)


def test_what_backward_does_not_ask_for_is_not_computed_again() -> None:
    """Of a block's last layer backward needs the input alone."""
    loss = model()(torch.ones(3, 4)).sum()
    with Counted() as counted:
        loss.backward()
    assert counted.names["addmm"] == 3, counted.names  # the first layer of each block; of the second there is no need


def test_a_graph_that_is_kept_is_gone_through_again() -> None:
    made = model(dropout=0.5)
    loss = made(torch.ones(3, 4)).sum()
    first = torch.autograd.grad(loss, list(made.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(made.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [block.runs for block in made[1]] == [3] * 3


def test_a_graph_of_the_gradients_is_that_of_the_plain_run() -> None:
    def penalty(made: nn.Module) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(made(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in made.parameters() if p.grad is not None]

    wanted, found = penalty(model(recomputed=False)), penalty(model())
    assert len(found) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Peculiar(Block):
    """Does inside what a block seldom does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "draws and puts back":
            with torch.random.fork_rng():
                return x + self.second(torch.dropout(torch.tanh(self.first(x)), 0.5, True))
        if self.how == "computes gradients":
            inner = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.first(inner)).sum(), inner, create_graph=True)
            return x + self.second(torch.tanh(self.first(slope)))
        try:  # falls back on whatever happens
            return torch.tanh(x + self.second(self.first(x)))
        except Exception:
            return x


@pytest.mark.parametrize("how", ["draws and puts back", "computes gradients", "falls back"])
def test_what_blocks_seldom_do_changes_no_bit(how: str) -> None:
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        made: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*[Peculiar(how) for _ in range(3)]))
        found.append(gradients(zeroshard.checkpoint_activations(made) if recomputed else made))
    assert len(found[0]) == 14 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Fickle(Block):
    """Computes something else when it runs again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.how == "less" and self.runs > 1:
            return x
        return x + (self.second(self.first(x))[: 1 if self.runs > 1 else 3].square()).sum()


@pytest.mark.parametrize(("how", "words"), [("less", "is now missing"), ("other", r"shape \(3, 8\).*shape \(1, 8\)")])
def test_a_block_that_does_something_else_the_second_time_is_refused(how: str, words: str) -> None:
    made = zeroshard.checkpoint_activations(nn.Sequential(nn.Linear(8, 8), Fickle(how)), ["1"])
    loss = made(torch.ones(3, 8)).sum()
    with pytest.raises(RuntimeError, match=f"block '1' was not recomputed as in forward.*{words}"):
        loss.backward()
