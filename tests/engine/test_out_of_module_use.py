"""Parameters used outside their own module, and what must stay in memory for it, against the plain run.

In processes where the interpreter would crash without the values.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from pairs import at_stages
from plain import Step, assert_same, backwards_in_reverse, backwards_in_turn, net_loss, token_step, tokens
from ranks import run_processes, run_threads
from torch import nn
from torch.nn import functional as F
from zoo import Block, Net, built

import zeroshard
from zeroshard.engine.schedule import ForwardRecord, PassRecords, UnitExecutor, UnitHolds
from zeroshard.engine.unit import Unit

VOCABULARY = 11  # of zoo.Net


def train(kind: Any, step: Step, **options: Any) -> None:
    """Compare in float64: where gradients are large, sums in another order differ by more than the bound."""
    assert_same(built(kind).double(), step, tokens(2, VOCABULARY), stage=3, whole=False, **options)


# -- a child gives its parent a parameter ------------------------------------------------------------------------


class Table(nn.Module):
    """Gives its parameter away: itself, a view of it, or its memory without a graph."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 7))
        self.how = how

    def forward(self) -> torch.Tensor:
        ways = {"itself": self.weight, "view": self.weight.view(-1, 7), "data": self.weight.data}
        return ways[self.how] if self.how in ways else self.weight.detach()


class Given(Net):
    """Uses what a child has given, before and after other modules ran."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table = Table(how)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weight, x = self.table(), self.embedding(ids)
        for block in self.blocks:
            x = block(x) + torch.tanh(x @ weight.t()) @ weight
        return self.head(x) + x @ weight.t()


class Returned(Given):
    """Returns what a child has given, too."""

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), self.table()


class Reads(Net):
    """Uses a child's weight on top of the model."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + torch.tanh(F.linear(x, self.head.weight)) @ self.embedding.weight
        for block in self.blocks:
            x = block(x)
        mixed = F.linear(x, self.head.weight.t() @ self.embedding.weight)
        return F.linear(torch.tanh(mixed), self.head.weight, self.head.bias)


def evaluated_between(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = net_loss(model, ids)
    with torch.no_grad():
        model(ids)
    loss.backward()
    return loss


def backward_twice(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = net_loss(model, ids)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def forwards_never_gone_back(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = net_loss(model, ids)
    for _ in range(3):
        model(ids)
    loss.backward()
    return loss


STEPS = [evaluated_between, backwards_in_turn, backwards_in_reverse, backward_twice, forwards_never_gone_back]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["itself", "view", "detached", "data"])
def test_what_a_forward_was_given_stays_for_its_own_backward(how: str, step: Step) -> None:
    train(partial(Given, how), step)


@pytest.mark.parametrize("step", STEPS)
def test_loose_uses_of_several_forwards_are_kept_apart(step: Step) -> None:
    train(Reads, step)


def used_after_another_forward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits, weight = model(ids)
    with torch.no_grad():
        model.embedding(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + weight.square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("how", ["itself", "view"])
def test_a_returned_parameter_may_be_used_after_another_forward(how: str) -> None:
    train(partial(Returned, how), used_after_another_forward)


def penalty_across_another_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A gradient penalty whose graph was made before another forward and backward."""
    embedded: list[torch.Tensor] = []
    handle = model.embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
    loss = net_loss(model, ids)
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    token_step(model, ids.flip(1))
    total = loss + 10 * gradient.square().sum()
    total.backward()
    return total


@pytest.mark.parametrize("kind", [Net, partial(Given, "itself")])
def test_the_graph_that_a_backward_made_outlives_another_backward(kind: Any) -> None:
    train(kind, penalty_across_another_step)


def rows_of_a_hessian(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.hessian(lambda x: model(x).sin().sum(), x)


def rows_by_hand(model: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    rows = [torch.autograd.grad(value, x, create_graph=True)[0] for value in slope]
    third = [torch.autograd.grad(row.sum(), x, retain_graph=True)[0] for row in rows]
    return torch.stack([*rows, *third]).detach()


@at_stages(1, 3)
@pytest.mark.parametrize("how", [rows_of_a_hessian, rows_by_hand])
def test_a_graph_that_a_backward_made_may_be_used_several_times(how: Any, stage: int) -> None:
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)) for _ in range(2)]
        return nn.Sequential(*layers).double()

    wanted = how(built(make), torch.linspace(0, 1, 6, dtype=torch.float64))

    def body(rank: int) -> None:
        model, _ = zeroshard.shard(built(make), stage=stage)
        x = torch.linspace(0, 1, 6, dtype=torch.float64)
        for _ in range(2):
            torch.testing.assert_close(how(model, x.clone()), wanted)
            model(x).sum().backward()
            assert stage < 3 or zeroshard.report(model).memory["gathered", "device"].now == 0

    run_threads(2, body)


class Codes(nn.Module):
    """Returns its weight's memory with what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7, bias=False)
        self.weight = nn.Parameter(torch.randn(7, 7))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x @ self.weight), self.weight.detach()


class Quantised(Net):
    """Goes on with the memory that a child has returned without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = Codes()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, code = self.codes(self.embedding(ids))
        for block in self.blocks:
            x = block(x) + x @ code
        return self.head(x) * self.temperature


def evaluated_first(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        loss = net_loss(model, ids)
    token_step(model, ids)
    return loss


@pytest.mark.parametrize("step", [token_step, evaluated_first, backwards_in_turn])
def test_a_parameters_memory_may_be_an_output(step: Step) -> None:
    train(Quantised, step)


def test_pins_of_forwards_whose_hooks_are_gone_are_held_as_one_until_some_backward() -> None:
    holds, unit = UnitHolds(cast(UnitExecutor[Unit], object()), PassRecords()), cast(Unit, object())
    for _ in range(3):
        holds.retain(ForwardRecord(), [unit])
    holds.adopt_orphans()
    assert holds.is_retained(unit)
    holds.end_backward(keeps_graph=False)
    assert not holds.is_retained(unit)


# -- one operation with several units, one unit with several modules ----------------------------------------------


class TwoUnits(Net):
    """One operation with parameters of two units, none of whose modules is being run."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        return F.linear(x, self.embedding.weight, self.head.bias) * self.temperature


class AllUnits(Net):
    """Lists of parameters of many units."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        every = torch.cat([block.up.weight for block in self.blocks]).square().mean()
        return self.head(x) + every + torch.stack([block.norm.weight for block in self.blocks]).sum()


class Caught(TwoUnits):
    """An operation raises after its parameters were unsharded, and the model goes on."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        with pytest.raises(RuntimeError, match="dimensions"):
            torch.cat([self.blocks[0].up.weight, self.blocks[1].norm.weight.view(1, -1, 1)])
        return x + self.blocks[0].up.bias.sum()


class NormThenHead(Net):
    """A norm and a head that are one unit: the head's parameters are read when the norm has run."""

    def __init__(self) -> None:
        super().__init__()
        del self.temperature, self.nothing, self.head
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        return F.linear(self.norm(x), self.head.weight, self.head.bias)


def test_lists_of_parameters_of_many_units() -> None:
    train(AllUnits, token_step, run=run_processes)


@pytest.mark.parametrize("kind", [TwoUnits, NormThenHead])
@pytest.mark.parametrize("step", [token_step, backwards_in_turn])
def test_an_operation_has_all_the_units_it_was_given(kind: Any, step: Step) -> None:
    train(kind, step)


# -- where backward comes to a loose use --------------------------------------------------------------------------


class Probed(Net):
    """A loose use before a module that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.tail, self.probe = nn.Linear(7, 7), nn.Linear(7, 300)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + F.linear(torch.tanh(x), self.tail.weight)
        self.seen = self.probe(x.detach()).argmax(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class GivenUp(Exception):
    """Carries what was computed so far."""


class Raises(nn.Module):
    """Uses a view of another module's weight, runs a child, and raises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))

    def forward(self, x: torch.Tensor, other: nn.Linear) -> torch.Tensor:
        view = other.weight.t()
        x = x @ view * self.scale
        self.blocks[0](x)
        raise GivenUp(x)


class FallsBack(Net):
    """A loose use, then a module that raises, and a way without it; ``inside``: with what that one computed."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.bad, self.tail, self.inside = Raises(), nn.Linear(7, 7), inside

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + F.linear(torch.tanh(x), self.tail.weight)
        try:
            x = self.bad(x, self.tail)
        except GivenUp as given_up:
            x = given_up.args[0] if self.inside else x + 1
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature + self.tail(x).mean()


class InsideFunc(Net):
    """A loose use inside torch.func.grad, whose backward is none of the training's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + F.linear(x, self.head.weight).mean(-1, keepdim=True)  # a gather cannot be inside
        x = x + torch.func.grad(lambda y: F.linear(torch.tanh(y), self.head.weight).square().sum())(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


@pytest.mark.parametrize(
    "kind",
    [Probed, Caught, partial(FallsBack, inside=False), partial(FallsBack, inside=True), InsideFunc],
    ids=["before a probe", "raising operation", "raising module", "inside a raising module", "torch.func"],
)
def test_backward_unshards_what_was_used_loosely(kind: Any) -> None:
    train(kind, token_step, run=run_processes)


class KeepsLoss(Net):
    """Keeps a loss that it made of a child's weight before the blocks ran; ``view``: of a view of it."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        self.loss = (x @ self.head.weight.t() if self.view else F.linear(x, self.head.weight)).square().mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


def kept_alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model(ids)
    model.loss.backward()
    return model.loss


def kept_first(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = net_loss(model, ids)
    model.loss.backward(retain_graph=True)
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [kept_alone, kept_first])
@pytest.mark.parametrize("view", [False, True])
def test_a_loss_made_of_a_childs_weight_may_be_kept(view: bool, step: Step) -> None:
    train(partial(KeepsLoss, view), step)


def pinned_by_the_other(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of two forwards, the first keeps a view's unit to its end; the second has only loose uses of it."""
    first = net_loss(model, ids)
    model.view = False
    second = net_loss(model, ids.flip(1)) + model.loss
    model.view = True
    first.backward()
    second.backward()
    return second


def test_loose_uses_are_noticed_of_a_unit_that_another_forward_keeps() -> None:
    train(partial(KeepsLoss, view=True), pinned_by_the_other, run=run_processes)


# -- losses kept in containers ------------------------------------------------------------------------------------


class KeepsIn(Block):
    """A block that keeps a penalty in a container of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(7)
        self.kind = kind
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.down(torch.tanh(self.up(self.norm(x))))
        loss = torch.sigmoid(inner).mean()
        self.kept = {"dict": {"loss": loss}, "tuple": (loss,), "nested": [{"losses": [loss]}]}[self.kind]
        return x + inner


class Containers(Net):
    """Blocks that keep penalties."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsIn(kind) for _ in range(3))


def containers_alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model(ids)
    ways = {"dict": lambda b: b.kept["loss"], "tuple": lambda b: b.kept[0], "nested": lambda b: b.kept[0]["losses"][0]}
    loss = torch.stack([ways[block.kind](block) for block in model.blocks]).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", ["dict", "tuple", "nested"])
def test_losses_kept_in_containers_are_found(kind: str) -> None:
    train(partial(Containers, kind), containers_alone)
