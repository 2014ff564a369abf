"""Habits of users' loops around gradients, gathered() and errors: the plain run's numbers, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plain
import pytest
import torch
from core_runs import api, assert_same, in_processes, no_sync, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages
from plain import batches, net_loss, sharded, square_loss
from ranks import RanksFailed, seeded
from torch import nn
from zoo import InOrder, Mlp, built, make_net

NET = make_net()


def penalized(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Use parameters before their modules run: their gradients arrive after those of the modules."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return net_loss(model, batch) + 0.1 * penalty


def clip_by_torch(model: Any, optimizer: Any) -> list[float]:
    return [nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()]


def test_gradients_that_arrive_after_their_unit_was_reduced_are_clipped() -> None:
    assert_same(NET, "F0 B0 H S Z", data=batches(5), loss_of=penalized, habit=clip_by_torch, stages=(0, 1, 2))


class SharedGradient(nn.Module):
    """Autograd gives both parameters of the sum the same tensor, and the last one an expanded scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.linspace(-1, k, 128).view(16, 8)) for k in (1, 2))
        self.last = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.first + self.second).t()).tanh() + self.last.sum()


@pytest.mark.parametrize("options", [{}, {"bucket_size": 8, "ring": 1}], ids=str)
@pytest.mark.parametrize("program", ["F0 B0 F1 N1 F2 N2 S Z", "F0 B0 F1 B1 F2 B2 S Z", "F0 N0 C F1 N1 F2 N2 S Z"])
def test_parameters_that_get_the_same_tensor_as_gradient(program: str, options: dict[str, Any]) -> None:
    data = plain.numbers(4, 12, 8)
    assert_same(SharedGradient(), program, data=data, loss_of=square_loss, identical=False, **options)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, is_rare: bool) -> torch.Tensor:
        y = self.used(x)
        return self.rare(y) if is_rare else y


@at_stages(0, 1, 2)
def test_gradients_of_one_rank_are_cleared_and_made_again(stage: int) -> None:
    data = plain.numbers(4, 12, 8)
    base = Uneven()

    def train(model: Any, optimizer: Any, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for batch in data:
            loss_of(batch).backward()
            optimizer.zero_grad()
            plain.take_step(optimizer, loss_of(batch))

    def body(rank: int) -> plain.Tensors:
        model, optimizer = sharded(base, plain.sgd, stage=stage, timeout=20)
        train(model, optimizer, lambda x: model(x.chunk(2)[rank], rank == 0).square().mean())
        return plain.full_parameters(model)

    found = on_ranks(2, body)

    def loop(model: Any, optimizer: Any, data: Any) -> None:
        def mean(x: torch.Tensor) -> torch.Tensor:
            return sum(model(part, rank == 0).square().mean() for rank, part in enumerate(x.chunk(2))) / 2

        train(model, optimizer, mean)

    wanted = plain.run_plain(base, plain.sgd, data, loop)
    for ours in found:
        plain.assert_close(ours, wanted)


def assign_detached(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.detach()


def multiply_by_a_neighbour(model: Any, optimizer: Any) -> None:
    weight = model.blocks[0].up.weight
    weight.grad.mul_(weight.grad)
    bias = model.blocks[0].up.bias
    bias.grad.mul_(model.blocks[1].up.bias.grad)


@pytest.mark.parametrize("habit", [assign_detached, multiply_by_a_neighbour])
def test_gradients_meet_each_other(habit: Any) -> None:
    assert_same(NET, "F0 B0 H S Z", habit=habit)


def views_of_nan(model: Any, optimizer: Any) -> None:
    views = [parameter.grad[0] for parameter in model.parameters()]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not norm.isfinite():
        optimizer.zero_grad()
    del views


def test_a_view_of_a_gradient_that_is_nan_was_not_changed() -> None:
    data = plain.numbers(3, 12, 8)
    data[1] *= float("nan")
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    assert_same(base, "F0 B0 H S Z", data=data, loss_of=square_loss, habit=views_of_nan)


def test_a_hook_adds_a_multiple_to_gradients() -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        def decay(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=0.1)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(decay)
        for batch in data:
            for half in batch.chunk(2):
                net_loss(model, half).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same(NET, loop, plain.sgd, data=batches(3))


def assert_all_raise(body: Callable[[int], Any], text: str) -> None:
    with pytest.raises(RanksFailed, match=text):
        on_ranks(2, body)


@at_stages(1, 3)
def test_a_gradient_whose_graph_is_lost_is_not_differentiated(stage: int) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(NET, plain.sgd, stage=stage, timeout=20)
        net_loss(model, batches(1)[0]).backward(create_graph=True)
        sum(parameter.grad.square().sum() for parameter in model.parameters())

    assert_all_raise(body, "create_graph=True, of which parameter.grad does not keep")


@at_stages(1, 3)
def test_a_gradient_of_another_parameter_is_not_assigned(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, timeout=20)
        net_loss(model, batches(1)[0]).backward()
        model.blocks[0].up.weight.grad = model.blocks[1].up.weight.grad
        optimizer.step()

    assert_all_raise(body, "assign a clone")


@at_stages(0, 1, 3)
@pytest.mark.parametrize("write_rank", [None, 0])
def test_a_step_inside_gathered_raises(write_rank: int | None, stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, timeout=20)
        net_loss(model, batches(1)[0]).backward()
        with api.gathered(model, write_rank=write_rank):
            optimizer.step()

    assert_all_raise(body, "a step inside gathered")


def test_a_penalty_is_computed_inside_gathered() -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            if api.is_sharded(model):
                with api.gathered(model):
                    penalty = sum(parameter.square().sum() for parameter in model.parameters())
            else:
                penalty = sum(parameter.square().sum() for parameter in model.parameters())
            plain.take_step(optimizer, net_loss(model, batch) + 0.1 * penalty)

    assert_same(NET, loop)


class Boom(Exception):
    pass


def boom(*_: Any) -> None:
    raise Boom


def norms(model: Any, optimizer: Any) -> list[float]:
    return [parameter.grad.norm().item() for parameter in model.parameters()]


def test_after_an_error_a_backward_of_an_earlier_forward() -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
        found = []
        for batch in data:
            first, second = net_loss(model, batch), net_loss(model, batch.flip(1))
            handle = model.blocks[1].up.weight.register_hook(boom)
            with pytest.raises(Boom):
                second.backward()
            handle.remove()
            model.zero_grad()
            first.backward()
            found += norms(model, optimizer)
            optimizer.step()
            model.zero_grad()
        return found

    assert_same(NET, loop, data=batches(4), identical=False)


def test_after_an_error_in_a_backward_that_no_module_saw() -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
        found = []
        for batch in data:
            handle = model.blocks[1].up.weight.register_hook(boom)
            with pytest.raises(Boom):
                sum(parameter.square().sum() for parameter in model.parameters()).backward()
            handle.remove()
            optimizer.zero_grad()
            (batch.float().mean() * sum(parameter.square().sum() for parameter in model.parameters())).backward()
            found += norms(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert_same(NET, loop, plain.sgd, batches(2), stages=(0, 1, 2))


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.layer = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.gain


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam])
def test_states_of_a_parameter_without_dimensions_are_loaded(kind: Any) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            plain.take_step(optimizer, square_loss(model, batch))
            optimizer.load_state_dict(optimizer.state_dict())

    assert_same(Gain(), loop, plain.of(kind, lr=0.01), plain.numbers(4, 12, 8))


def test_states_of_other_parameters_are_not_loaded() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.adamw, stage=1, timeout=20)
        states = torch.optim.AdamW(list(NET.parameters())[:2]).state_dict()
        with pytest.raises(ValueError, match="numbers of parameters"):
            optimizer.load_state_dict(states)
        with no_sync(model):
            net_loss(model, batches(1)[0]).backward()
        optimizer.step()

    on_ranks(2, body)


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)) for _ in range(2)])


def penalty_first(model: Any, x: torch.Tensor, is_used: bool) -> torch.Tensor:
    penalty = model[1][0].weight.square().mean() if is_used else 0
    return model(x).square().mean() + penalty


def penalty_last(model: Any, x: torch.Tensor, is_used: bool) -> torch.Tensor:
    loss = model(x).square().mean()
    return loss + model[1][0].weight.square().mean() if is_used else loss


def first_and_between(model: Any, x: torch.Tensor, is_used: bool) -> torch.Tensor:
    """Use a weight before its module, which runs between two calls of the other one."""
    penalty = model[1][0].weight.square().mean() if is_used else 0
    return model[0](model[1](model[0](x))).square().mean() + penalty


def of_an_unused_module(model: Any, x: torch.Tensor, is_used: bool) -> torch.Tensor:
    y = model[1](x)
    return nn.functional.linear(y, model[0][0].weight).square().mean() if is_used else y.square().mean()


@pytest.mark.parametrize("loss_of", [penalty_first, penalty_last, first_and_between, of_an_unused_module])
@pytest.mark.parametrize("order", ["F0 B0", "F0 B0 F1 B1", "F0 F1 B0 B1"])
@at_stages(0, 1, 2)
def test_one_rank_uses_a_weight_outside_its_module(stage: int, order: str, loss_of: Any) -> None:
    data = plain.numbers(5, 8, 6)
    base = built(layers)

    def train(model: Any, optimizer: Any, mean_of: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        for number, batch in enumerate(data):
            losses = {}
            for event in order.split():
                part = int(event[1])
                if event[0] == "F":
                    losses[part] = mean_of(batch.chunk(2)[part], number)
                else:
                    losses[part].backward()
            optimizer.step()
            optimizer.zero_grad()

    def body(rank: int) -> plain.Tensors:
        model, optimizer = sharded(base, plain.sgd, stage=stage, timeout=20)
        train(model, optimizer, lambda x, number: loss_of(model, x.chunk(2)[rank], (number + rank) % 2 == 0))
        return plain.full_parameters(model)

    def loop(model: Any, optimizer: Any, data: Any) -> None:
        def mean(x: torch.Tensor, number: int) -> torch.Tensor:
            parts = enumerate(x.chunk(2))
            return sum(loss_of(model, part, (number + rank) % 2 == 0) for rank, part in parts) / 2

        train(model, optimizer, mean)

    wanted = plain.run_plain(base, plain.sgd, data, loop)
    for ours in on_ranks(2, body):
        plain.assert_close(ours, wanted)


class Opaque:
    """What a model returns, with tensors where nobody looks for them."""

    __slots__ = ("read",)

    def __init__(self, value: torch.Tensor) -> None:
        self.read = lambda: value


class ReturnsOpaque(nn.Module):
    def __init__(self, is_nested: bool) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(8, 8), nn.Parameter(torch.full((8, 8), 0.1))
        self.inner = ReturnsOpaque(False) if is_nested else None

    def forward(self, x: torch.Tensor) -> Opaque:
        y = torch.tanh(self.first(x)) @ self.gain
        return Opaque(y if self.inner is None else torch.tanh(self.inner(y).read()) @ self.gain)


@pytest.mark.parametrize("program", ["F0 B0 S Z", "F0 F1 B0 B1 S Z", "F0 E1 B0 F1 B1 S Z", "F0 F1 B01 S Z"])
@pytest.mark.parametrize("units", [None, ("inner",)])
def test_a_model_returns_an_object_that_hides_its_tensors(units: Any, program: str) -> None:
    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).read().square().mean()

    base, data = built(lambda: ReturnsOpaque(True)), plain.numbers(4, 8, 8)
    assert_same(base, program, plain.sgd, data, loss_of=loss_of, units=units, identical=False)


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.layer.weight[:3]


@pytest.mark.parametrize("units", [None, ("layer",)])
def test_a_view_that_a_model_has_returned_is_used_after_another_forward(units: Any) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            y, view = model(batch)
            with torch.no_grad():
                model(batch.flip(1))
            plain.take_step(optimizer, y.square().mean() + (view @ view.t()).square().mean())

    assert_same(built(ReturnsView), loop, data=plain.numbers(4, 8, 8), units=units, identical=False)


class PartlyUsed(InOrder):
    """Blocks, whose first one may have no gradient."""

    uses_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self.blocks
        y = first(x)
        x = y if self.uses_first else x
        for block in rest:
            x = block(x)
        return x


def in_one_loss(rank: int, world: int, stage: int | None) -> list[torch.Tensor]:
    """Train two models behind each other; the ranks use other blocks of the second. A plain run is all ranks."""
    with seeded(5):
        models: list[Any] = [PartlyUsed([Mlp(6, 6), Mlp(6, 6), Mlp(6, 6)]) for _ in range(2)]
    optimizers: list[Any] = [plain.adamw(model) for model in models]
    if stage is not None:
        pairs = zip(models, optimizers, strict=True)
        optimizers = [api.shard(each, own, stage=stage, units=(Mlp,), timeout=20)[1] for each, own in pairs]
    for step in range(5):
        for part in [rank] if stage is not None else range(world):
            models[1].uses_first = part == 0 or step < 3
            batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + part))
            loss = models[1](models[0](batch)).square().mean()
            (loss if stage is not None else loss / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if stage is None:
        return [parameter.detach() for model in models for parameter in model.parameters()]
    return [api.full_parameter(model, name) for model in models for name, _ in model.named_parameters()]


@at_stages(0, 1, 2)  # in stage 3 a gather of a unit that another rank does not use raises
def test_reductions_of_two_models_in_one_loss_are_not_mixed_up(stage: int) -> None:
    """A rank that has no gradient of a unit reduces it after units of the other model that are as large."""
    for found in in_processes(2, in_one_loss, 2, stage):
        for ours, wanted in zip(found, in_one_loss(0, 2, None), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
