"""The core trains as the plain run does: stages, ranks, buckets, units, dtypes, and models of all kinds."""

from __future__ import annotations

import copy
from typing import Any

import plain
import pytest
import torch
from core_runs import BUCKETS, MAX_NORM, api, assert_same, on_ranks
from core_runs import tested_core as tested_core
from pairs import every_stage
from plain import adamw, adamw_in_groups, assert_close, assert_equal, batches, decayed, net_loss, sharded, shares
from torch import nn
from zoo import InOrder, Mlp, Net, Tied, TokenNet, built, make_net

NET = make_net()


@pytest.mark.parametrize("make", [adamw, adamw_in_groups, decayed])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_equals_the_plain_run(world: int, make: plain.MakeOptimizer) -> None:
    assert_same(NET, make=make, world=world)


def test_all_bucket_sizes_and_stages_give_the_same_bits() -> None:
    wanted = plain.run_ranks(2, NET, adamw, batches(3), stage=1)
    for stage in (1, 2, 3):
        for size in BUCKETS:
            assert_equal(plain.run_ranks(2, NET, adamw, batches(3), stage=stage, bucket_size=size), wanted)


@pytest.mark.parametrize("units", [("0",), (nn.Linear,), ("0.blocks.1", "*.head"), ("0.blocks.*",)])
def test_any_choice_of_units_trains_the_same(units: Any) -> None:
    assert_same(nn.Sequential(NET), units=units, bucket_size=64)


SCALE = 1024.0  # of losses in fp16


def trained_in_16_bits(
    dtype: torch.dtype, make: plain.MakeOptimizer, world: int, norms: list[torch.Tensor]
) -> tuple[plain.Tensors, plain.Tensors]:
    """Train by hand: a 16-bit copy computes gradients of each rank's part, fp32 masters are updated.

    Gradients with one of the given norms are clipped.
    """
    masters, computed = copy.deepcopy(NET), copy.deepcopy(NET).to(dtype)
    scale = SCALE if dtype is torch.float16 else 1.0
    optimizer = make(masters)
    for step, batch in enumerate(batches(3)):
        total: list[torch.Tensor] = []
        for rank in range(world):
            computed.zero_grad()
            (net_loss(computed, plain.split(batch, rank, world)).float() * scale).backward()
            gradients = [p.grad for p in computed.parameters() if p.grad is not None]
            total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
        for parameter, gradient in zip(masters.parameters(), total, strict=True):
            parameter.grad = (gradient / world).float() / scale
        if norms:
            gradients = [parameter.grad for parameter in masters.parameters() if parameter.grad is not None]
            torch.testing.assert_close(torch.nn.utils.get_total_norm(gradients), norms[step])
            torch.nn.utils.clip_grads_with_norm_(masters.parameters(), MAX_NORM, norms[step])
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(computed.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
    return plain.copied(computed), plain.copied(masters)


@every_stage
@pytest.mark.parametrize("make", [adamw, decayed])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_equal_masters_by_hand_to_the_bit(
    precision: str, world: int, clips: bool, make: plain.MakeOptimizer, stage: int
) -> None:
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def body(rank: int) -> tuple[plain.Tensors, plain.Tensors, list[torch.Tensor]]:
        options = {"precision": precision, "bucket_size": 100, "loss_scale": SCALE}
        model, optimizer = sharded(NET, make, stage=stage, **options)
        norms = []
        for batch in shares(batches(3), rank, world):
            optimizer.scale(net_loss(model, batch)).backward()
            norms += [optimizer.clip_grad_norm_(MAX_NORM)] if clips else []
            optimizer.step()
            optimizer.zero_grad()
        return plain.full_parameters(model), plain.masters(model), norms

    for *found, norms in on_ranks(world, body):
        for ours, wanted in zip(found, trained_in_16_bits(dtype, make, world, norms), strict=True):
            assert_equal(ours, wanted)


class Mixed(TokenNet):
    """A layer in fp64, a frozen one in bf16, and a bf16 parameter whose gradient needs no rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(7, 7).double()
        self.short = nn.Linear(7, 7).bfloat16().requires_grad_(False)
        self.exact = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        x = x + self.long(x.double()).float() + self.short(x.detach().bfloat16()).float()
        return self.head(x) + self.exact.float().sum()


def mixed_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)  # what is added to all of them has no gradient but that of their mean
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + logits.mean() * 0.5


class WeightsElsewhere(Net):
    """Uses weights of its blocks itself, one as another layer's, and runs its blocks twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        for block in reversed(self.blocks):
            x = block(x)
        logits = self.head(x) * self.temperature + nn.functional.linear(self.embedding(ids), self.head.weight)
        return logits * (1 + sum(block.up.weight.square().mean() for block in self.blocks)) + self.nothing.sum()


def frozen() -> nn.Module:
    model = Net()
    model.blocks[1].requires_grad_(False)
    model.embedding.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


MODELS: dict[str, Any] = {
    "tied, unused, frozen, empty": lambda: Tied().eval(),  # a batch norm makes rows depend on each other
    "weights used elsewhere": WeightsElsewhere,
    "frozen, tied blocks": frozen,
    "one parameter": lambda: nn.Embedding(11, 11),
}


@pytest.mark.parametrize("program", ["F0 B0 S Z", "F0 F1 B0 B1 C S Z"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_all_kinds_train_as_the_plain_run_does(kind: str, program: str) -> None:
    assert_same(built(MODELS[kind]), program, bucket_size=64)


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_of_mixed_dtypes(world: int) -> None:
    assert_same(built(Mixed), loss_of=mixed_loss, world=world)


def skipping_step(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, use = batch
    model[0].order = (0, 1, 2) if use[0] else (0, 2)
    loss = model(x).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(("stage", "units"), [(0, None), (1, None), (2, None), (1, ("0",)), (3, ("0",))])
@pytest.mark.parametrize("used", [(1, 0), (0, 1), (0, 0)])
def test_a_layer_that_only_some_ranks_use(used: tuple[int, int], stage: int, units: Any) -> None:
    """In the steps between it is used by all; the others' part of its gradient is zero."""
    uses = [torch.tensor(who).repeat_interleave(3) for who in ((1, 1), used, used, (1, 1))]
    data = list(zip(plain.numbers(4, 6, 16), uses, strict=True))
    options: dict[str, Any] = {"units": units, "stage": stage, "make": plain.momentum}
    net = built(lambda: nn.Sequential(InOrder(Mlp(16, 9) for _ in range(3))))
    plain.assert_same(net, skipping_step, data, whole=False, **options)


def changing(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    """Freeze a block for a step, train the head from the second one on, change a weight, change a learning rate."""
    for number, batch in enumerate(data):
        model.blocks[1].requires_grad_(number != 1)
        model.head.requires_grad_(number > 0)
        if number == 1:
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.3})
        plain.train_step(model, optimizer, batch)
        with api.gathered(model, write_rank=0) if api.is_sharded(model) else torch.no_grad(), torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)
        optimizer.param_groups[-1]["lr"] *= 0.5


def without_head(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for n, p in model.named_parameters() if "head" not in n], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_loops_do_between_steps(precision: str | None) -> None:
    assert_same(NET, changing, without_head, precision=precision, identical=True)


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_training_goes_on_from_state_dicts_of_the_plain_run(precision: str | None, stage: int) -> None:
    reference = copy.deepcopy(NET)
    reference_optimizer = adamw(reference)
    data = batches(4)
    plain.train_steps(reference, reference_optimizer, data[:3])

    def body(rank: int) -> None:
        model, optimizer = sharded(NET, adamw, stage=stage, precision=precision)
        plain.train_steps(model, optimizer, shares(data[:3], rank, 2))
        assert bool(api.state_dict(model)) == (rank == 0)
        weights, states = api.state_dict(model, rank=None), optimizer.state_dict()
        expected = reference_optimizer.state_dict()
        assert weights.keys() == reference.state_dict().keys()
        assert states["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items() if precision is None else ():
            assert_close(weights, dict(reference.state_dict()))
            assert_close({k: torch.as_tensor(v) for k, v in states["state"][index].items()}, state)
        loaded = make_net(seed=1)
        loaded.load_state_dict(weights)
        again, other = sharded(loaded, adamw, stage=stage and stage % 3 + 1, precision=precision)
        other.load_state_dict(states)
        for pair in ((model, optimizer), (again, other)):
            plain.train_steps(*pair, shares(data[3:], rank, 2))
        assert_equal(plain.masters(again), plain.masters(model))

    on_ranks(2, body)


def test_blocks_in_another_order_in_each_step() -> None:
    orders = [(0, 1, 2), (2, 0, 1), (2, 0, 1), (1, 1), (0, 1, 2)]
    net = built(lambda: InOrder(Mlp(6, 9) for _ in range(3)))

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for x, order in zip(data, orders, strict=True):
            plain.take_step(optimizer, model(x, order).square().mean())

    assert_same(net, loop, data=plain.numbers(5, 12, 6), identical=True)
