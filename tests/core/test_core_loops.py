"""Loops: accumulation, orders of forwards and backwards, recomputation, second derivatives, errors on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import plain
import pytest
import torch
from core_runs import BUCKETS, assert_same, in_processes, no_sync, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages
from plain import batches, net_loss, sharded
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import Net, built, make_net

NET = make_net()
ORDERS = {
    "accumulation": "F0 B0 F1 B1 F2 B2 F3 B3 S Z",
    "GPipe": "F0 F1 F2 F3 B0 B1 B2 B3 S Z",
    "1F1B": "F0 F1 B0 F2 B1 F3 B2 B3 S Z",
    "LIFO": "F0 F1 F2 F3 B3 B2 B1 B0 S Z",
    "four forwards in one loss": "F0 F1 F2 F3 B0123 S Z",
    "no_sync": "F0 N0 F1 N1 F2 B2 S Z",
    "all in no_sync": "F0 N0 F1 N1 S Z",
    "no_sync last": "F0 B0 F1 N1 S Z",
    "one graph twice": "F0 R0 B0 S Z",
    "one graph twice, others between": "F0 R0 F1 B1 E2 B0 S Z",
    "gradients kept": "F0 B0 S F1 B1 S Z F2 B2 S",
    "two steps": "F0 B0 S S Z S",
    "zeros": "F0 B0 S z S Z",
    "a graph of the backward": "F0 G0 S Z",
    "cleared before a step": "F0 B0 Z F1 B1 S Z",
    "evaluations anywhere": "E0 F0 E1 B0 E1 S E0 Z E1",
    "a loss that is dropped": "F0 F1 D0 B1 S Z F2 D2",
    "uneven": "F0 B0 S Z F0 B0 F1 B1 S Z F2 B2 S Z",
    "clip and go on": "F0 B0 C F1 B1 C S F2 B2 V S Z",
    "clip twice": "F0 B0 C C V S Z",
    "clip in the middle of no_sync": "F0 N0 C F1 B1 C S Z",
}


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_forwards_and_backwards(order: str) -> None:
    data = batches(3, rows=24)
    assert_same(NET, ORDERS[order], data=data, bucket_size=BUCKETS[len(order) % 2])


@pytest.mark.parametrize("order", ["1F1B", "no_sync", "clip and go on"])
@pytest.mark.parametrize("options", [{"world": 3, "bucket_size": 100}, {"precision": "bf16"}], ids=str)
def test_orders_on_three_ranks_and_in_bf16(options: dict[str, Any], order: str) -> None:
    assert_same(NET, ORDERS[order], data=batches(3, rows=36), **options)


def test_accumulation_in_processes() -> None:
    assert_same(NET, "F0 F1 N1 B0 C S Z", run=in_processes)


class Recomputed(Net):
    """Recomputes its blocks; nested: all of them in a recomputation of their own, too."""

    def __init__(self, reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.options, self.nested = {"use_reentrant": reentrant}, nested

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return checkpoint(self.inside, x, **self.options) if self.nested else self.inside(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


RECOMPUTED = ["accumulation", "LIFO", "1F1B", "four forwards in one loss", "no_sync"]


@pytest.mark.parametrize("order", RECOMPUTED)
@pytest.mark.parametrize(("reentrant", "nested"), [(False, False), (False, True), (True, False), (True, True)])
def test_activation_checkpoints(reentrant: bool, nested: bool, order: str) -> None:
    options = {"identical": False} if reentrant else {}  # a reentrant one runs backwards of its own
    assert_same(built(lambda: Recomputed(reentrant, nested)), ORDERS[order], stages=(1, 3), **options)


def smooth() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)) for _ in range(2)]
    return nn.Sequential(*layers).double()


def rows_of_a_hessian(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.hessian(lambda x: model(x).sin().sum(), x)


def rows_by_hand(model: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    rows = [torch.autograd.grad(value, x, create_graph=True)[0] for value in slope]
    third = [torch.autograd.grad(row.sum(), x, retain_graph=True)[0] for row in rows]
    return torch.stack([*rows, *third]).detach()


@at_stages(0, 1, 3)
@pytest.mark.parametrize("how", [rows_of_a_hessian, rows_by_hand])
def test_a_graph_that_a_backward_made_is_used_several_times(how: Any, stage: int) -> None:
    def inputs() -> torch.Tensor:
        return torch.linspace(0, 1, 6, dtype=torch.float64)

    wanted = how(built(smooth), inputs())

    def body(rank: int) -> None:
        model, _ = sharded(built(smooth), plain.sgd, stage=stage, timeout=20)
        for _ in range(2):
            torch.testing.assert_close(how(model, inputs()), wanted, rtol=0, atol=1e-12)

    on_ranks(2, body)


def penalties(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a loss of several gradients over one graph."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    rows = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
    return slope.square().mean() + sum(row.square().mean() for row in rows)


@pytest.mark.parametrize("program", ["F0 B0 S Z", "F0 B0 F1 B1 S Z", "F0 F1 B01 S Z"])
def test_losses_of_gradients(program: str) -> None:
    data = [x.double() for x in plain.numbers(3, 12, 6)]
    assert_same(built(smooth), program, plain.momentum, data, loss_of=penalties, identical=False)


class Boom(Exception):
    pass


def boom(*_: Any) -> None:
    raise Boom


HOOKS: dict[str, Callable[[Any], Any]] = {
    "in forward": lambda model: model.blocks[1].up.register_forward_hook,
    "forward pre-hook": lambda model: model.blocks[1].register_forward_pre_hook,
    "forward hook": lambda model: model.blocks[1].register_forward_hook,
    "backward pre-hook": lambda model: model.blocks[1].register_full_backward_pre_hook,
    "backward hook": lambda model: model.blocks[1].register_full_backward_hook,
    "hook of a gradient": lambda model: model.blocks[1].up.weight.register_hook,
}


def broken_pass(place: str, model: Any, batch: torch.Tensor) -> None:
    if place == "loss":
        net_loss(model, batch)
        raise Boom
    before = net_loss(model, batch)
    handle = HOOKS["backward hook" if place == "second backward" else place](model)(boom)
    try:
        loss = net_loss(model, batch)
        if place == "second backward":
            before.backward()
        loss.backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("place", ["loss", "second backward", *HOOKS])
def test_training_goes_on_after_an_error(place: str, silent: bool) -> None:
    """The same error on all ranks, in any of the steps; what was summed until then is cleared."""

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for number, batch in enumerate(data):
            if number != 1:
                net_loss(model, batch).backward()
                with no_sync(model) if silent else contextlib.nullcontext(), pytest.raises(Boom):
                    broken_pass(place, model, batch)
                optimizer.zero_grad()
            plain.train_step(model, optimizer, batch)

    assert_same(NET, loop, data=batches(4), stages=(0, 1, 3) if silent else (0, 1, 2, 3))


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_training_goes_on_after_an_error_in_the_optimizer(register: str) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            net_loss(model, batch).backward()
            handle = getattr(optimizer, register)(boom)
            with pytest.raises(Boom):
                optimizer.step()
            handle.remove()
            plain.take_step(optimizer, net_loss(model, batch))

    assert_same(NET, loop, plain.momentum)
