"""What autograd keeps out of the modules' sight: parameters used elsewhere, hidden losses, gradients of gradients.

In processes: where a partitioned parameter is used after its release, the interpreter may crash.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import at_stages
from plain import Step, assert_same, copied, decayed, full_parameters, net_loss, numbers, token_step, tokens
from ranks import run_processes
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from zoo import Net, built

import zeroshard

VOCABULARY = 11  # of zoo.Net


class BorrowsFromAfar(Net):
    """Uses parameters of modules that ran long before: the embedding as a second head, the first block's norm."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        x = F.layer_norm(x, x.shape[-1:], self.blocks[0].norm.weight)
        return self.head(x) + x @ self.embedding.weight.T + self.temperature


class BorrowsFromTheLast(Net):
    """Uses a parameter of the module that has just run, whose values may be there still."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = F.layer_norm(block(x), x.shape[-1:], block.norm.weight)
        return self.head(x)


class CallsInside(Net):
    """Runs a module inside a block by itself, after the block."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            x = x + block.down(torch.tanh(block.up(x)))
        return self.head(x)


@at_stages(2, 3)
@pytest.mark.parametrize("kind", [BorrowsFromAfar, BorrowsFromTheLast, CallsInside])
def test_parameters_used_outside_their_module(kind: Any, stage: int) -> None:
    assert_same(built(kind), token_step, tokens(3, VOCABULARY), stage=stage, run=run_processes)


class KeepsLoss(Net):
    """Gives nothing back: the loss is an attribute, and the last thing in its graph is a parameter of the model."""

    def forward(self, ids: torch.Tensor) -> None:
        x = super().forward(ids)
        self.loss = F.cross_entropy(x.flatten(0, 1), ids.flatten()) * self.temperature


class KeepsPenalty(Net):
    """Gives its logits back, and keeps a penalty."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.features(ids)
        self.penalty = (self.temperature * x).square().mean()
        return self.head(x)


class Opaque:
    """An output nobody can look into."""

    __slots__ = ("_x",)

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def get(self) -> torch.Tensor:
        return self._x


class GivesOpaque(Net):
    def forward(self, ids: torch.Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(ids))


class GivesFunction(Net):
    def forward(self, ids: torch.Tensor) -> Any:
        logits = super().forward(ids)
        return lambda: logits


class GivesDeep(Net):
    def forward(self, ids: torch.Tensor) -> Any:
        return [[[[[[super().forward(ids)]]]]]]


def kept_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model(ids)
    model.loss.backward()
    return model.loss


def with_penalty(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = net_loss(model, ids) + model.penalty
    loss.backward()
    return loss


def penalty_alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model(ids)
    model.penalty.backward()
    return model.penalty


def opaque_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return token_step(lambda ids: model(ids).get(), ids)


def function_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return token_step(lambda ids: model(ids)(), ids)


def deep_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return token_step(lambda ids: model(ids)[0][0][0][0][0][0], ids)


@at_stages(1, 3)
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (KeepsLoss, kept_loss),
        (KeepsPenalty, with_penalty),
        (KeepsPenalty, penalty_alone),
        (GivesOpaque, opaque_output),
        (GivesFunction, function_output),
        (GivesDeep, deep_output),
    ],
)
def test_losses_that_no_output_shows(kind: Any, step: Step, stage: int) -> None:
    assert_same(built(kind), step, tokens(2, VOCABULARY), stage=stage, run=run_processes)


class Continuous(Net):
    """Takes numbers, so that the gradient of its input can be asked for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Descends(Continuous):
    """Follows the gradient of its first block's energy within its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[0](x).square().sum(), x, create_graph=True)
        return super().forward(x - 0.1 * slope)


def squared(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def input_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Adversarial rows: the gradient of the input alone, then a step on what it shows."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x)
    return squared(model, x.detach() + slope)


def gradient_penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss on the gradient of the input, which backward goes through twice."""
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().mean()
    loss.backward()
    return loss


@at_stages(1, 3)
@pytest.mark.parametrize(
    ("kind", "step"), [(Continuous, input_gradient), (Continuous, gradient_penalty), (Descends, squared)]
)
def test_gradients_within_a_step(kind: Any, step: Step, stage: int) -> None:
    """Part by part: the mean over fewer rows has larger gradients at its input."""
    assert_same(built(kind), step, numbers(2, 6, 5, 7), stage=stage, whole=False, run=run_processes)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@at_stages(0, 2, 3)
def test_a_backward_that_makes_a_graph(stage: int) -> None:
    """What is reduced is not part of it, in the second step either, and may be written into as ever."""

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward(create_graph=True)
        engine = getattr(model, "_zeroshard", None)
        for gradient in engine.engine.gradients.flat_grads.values() if engine is not None else ():
            for tensor in (gradient.shard, gradient.local_sum):
                assert tensor is None or not tensor.requires_grad
        return loss

    assert_same(built(Continuous), step, numbers(3, 6, 5, 7), stage=stage)


# ------------------------------------------------------------------------------------- backward inside backward


class SolvesBackward(Continuous):
    """An implicit layer: a hook on each block's output solves for its gradient through a second graph of the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.solved(block, x)
        return self.head(x)

    @staticmethod
    def solved(block: Any, x: torch.Tensor) -> torch.Tensor:
        x = block(x)
        start = x.detach().requires_grad_()
        end = block(start)
        x.register_hook(lambda g: g + 0.1 * torch.autograd.grad(end, start, g, retain_graph=True)[0])
        return x


class HooksInside(SolvesBackward):
    """The same, with the hook on the very tensor that the unit's module gives back."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(self.hooked)

    @staticmethod
    def hooked(block: Any, args: Any, x: torch.Tensor) -> None:
        start = x.detach().requires_grad_()
        end = block.down(torch.tanh(block.up(start)))
        if x.requires_grad:
            x.register_hook(lambda g: g + 0.1 * torch.autograd.grad(end, start, g, retain_graph=True)[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Continuous.forward(self, x)


class ReachesAhead(Continuous):
    """A hook in the middle goes back through blocks that the outer backward is still to come to, and adds to them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.blocks[1](self.blocks[0](x))
        x = super().forward(early.detach().requires_grad_())
        x.register_hook(lambda g: early.backward(0.5 * torch.ones_like(early)))
        return self.blocks[0](x[..., :7]) if x.shape[-1] >= 7 else x


class RunsAgain(Continuous):
    """Runs a block again inside a hook, and goes back through that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        start = x.detach()[..., :7]

        def again(g: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                at = start.clone().requires_grad_()
                return g + torch.autograd.grad(self.blocks[0](at).square().mean(), at)[0].sum()

        x.register_hook(again)
        return x


@pytest.mark.guarantee("Nested backwards")
@at_stages(2, 3)
@pytest.mark.parametrize("kind", [SolvesBackward, HooksInside, ReachesAhead, RunsAgain])
def test_a_backward_inside_backward(kind: Any, stage: int) -> None:
    assert_same(built(kind), squared, numbers(2, 6, 5, 7), stage=stage, whole=False, run=run_processes)


# -------------------------------------------------------------------------------------------- torch.func


def transformed(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What torch's transforms make of a model, with its own parameters and with others."""
    own = {name: torch.full(p.shape, 0.1) for name, p in model.named_parameters()}

    def called(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    found = [
        torch.func.grad(called)(own, x),
        torch.func.vmap(torch.func.grad(called), (None, 0))(own, x),
        torch.func.grad(lambda x: model(x).square().mean())(x),
        torch.func.vmap(torch.func.grad(lambda x: model(x).square().mean()))(x),
        torch.func.jvp(lambda x: model(x), (x,), (x,)),
    ]
    return [tensor.detach() for tensor in tree_leaves(found)]


def sharded_transforms(rank: int, model: Any, batch: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = zeroshard.shard(model, decayed(model), **options)
    found = transformed(model, batch)
    squared(model, batch)
    optimizer.step()
    return [*found, *full_parameters(model).values()]


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 2, "offload": "host"}])
def test_transforms_of_a_sharded_model_are_those_of_the_plain_one(options: dict[str, Any]) -> None:
    model, batch = built(Continuous), numbers(1, 6, 7)[0]
    found = run_processes(2, sharded_transforms, model, batch, options)
    wanted, optimizer = transformed(model, batch), decayed(model)
    squared(model, batch)
    optimizer.step()
    for ours in found:
        torch.testing.assert_close(ours, [*wanted, *(p.detach() for p in model.parameters())])


class Layers(nn.Module):
    """Two layers, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = nn.Parameter(0.3 * torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.own


class CallsItself(Layers):
    """Runs once more inside its forward, for a target."""

    deep = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.deep:
            self.deep = False
            with torch.no_grad():
                target = self(0.5 * x)
            y = y + target
            self.deep = True
        return y


class Forces(Layers):
    """Adds the gradient of its energy, which the loss goes back through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force + x @ self.own


class ReturnsAParameter(Layers):
    """Gives back nothing but a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own


def step_plainly(model: Any, x: torch.Tensor, sharded: bool) -> None:
    model(x).square().sum().backward()


def call_again_in_a_hook(model: Any, x: torch.Tensor, sharded: bool) -> None:
    def add_target(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        with torch.no_grad():
            target = module(0.5 * x)
        return output + target

    handle = model.register_forward_hook(add_target)
    model(x).square().sum().backward()


def go_back_to_a_side_loss_after_a_write_of_nothing(model: Any, x: torch.Tensor, sharded: bool) -> None:
    kept: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda m, a, o: kept.append((x @ m.own @ m.own).square().sum()))
    model(x)
    hook.remove()
    if sharded:
        with zeroshard.gathered(model, write_rank=0):
            pass
    (0.1 * kept[0]).backward()


def _three_steps(rank: int, kind: Any, act: Any, sharded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if sharded:
        model, optimizer = zeroshard.shard(model, optimizer, stage=3, units=(nn.Linear,))
    for seed in range(3):
        act(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), sharded)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model) if sharded else copied(model)


@pytest.mark.guarantee("Nested calls")
@pytest.mark.parametrize(
    ("kind", "act"),
    [
        (CallsItself, step_plainly),
        (Forces, step_plainly),
        (ReturnsAParameter, step_plainly),
        (Layers, call_again_in_a_hook),
        (Layers, go_back_to_a_side_loss_after_a_write_of_nothing),
    ],
)
def test_calls_and_graphs_inside_and_outside_a_forward(kind: Any, act: Any) -> None:
    expected = _three_steps(0, kind, act, False)
    for found in run_processes(2, _three_steps, kind, act, True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


class ReturnsMemory(Layers):
    """Gives back a parameter's memory: a part of it, or all of it detached."""

    def forward(self, x: torch.Tensor, part: bool) -> torch.Tensor:
        return self.own[:4] if part else self.own.detach()


def _hold_memory(rank: int) -> None:
    model, _ = zeroshard.shard(ReturnsMemory(), None, stage=3)
    values = zeroshard.full_parameter(model, "own")
    x = torch.ones(1, 8)
    for part in (True, False):
        for quiet in (True, False):
            with torch.set_grad_enabled(not quiet):
                held = model(x, part)
            model(x, part)
            torch.testing.assert_close(held.clone(), values[:4] if part else values)


@pytest.mark.guarantee("Nested calls")
def test_what_a_forward_returns_of_a_parameters_memory_can_be_read_later() -> None:
    run_processes(2, _hold_memory)
