"""Optimizers of the user: whatever is right in a plain loop is right here, and what cannot be is refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import plain
import pytest
import torch
from core_runs import api, assert_same, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages
from plain import batches, net_loss
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from zoo import make_net

NET = make_net()


def shard(optimizer_of: Callable[[Any], Any], **options: Any) -> tuple[Any, Any, Any]:
    """Return a sharded model, its optimizer, and the one that shard() was given."""
    model = copy.deepcopy(NET)
    given = optimizer_of(model)
    model, optimizer = api.shard(model, given, timeout=20, **options)
    return model, optimizer, given


# ------------------------------------------------------------------------------- the optimizer that shard() was given


@at_stages(0, 1, 3)
@pytest.mark.parametrize("call", ["step", "zero_grad", "state_dict"])
def test_the_given_optimizer_names_the_one_to_use(call: str, stage: int) -> None:
    def body(rank: int) -> None:
        model, _, given = shard(plain.adamw, stage=stage)
        net_loss(model, batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match=r"passed to zeroshard.shard\(\).*use the one that shard\(\) returned"):
            getattr(given, call)()

    on_ranks(2, body)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


@pytest.mark.parametrize("kind", [plain.momentum, plain.adamw])
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("is_before", [False, True])
def test_schedulers_made_before_and_after_shard(schedule: str, is_before: bool, kind: Any) -> None:
    def make(model: Any) -> Any:
        optimizer = kind(model)
        if is_before:
            optimizer.scheduler = SCHEDULERS[schedule](optimizer)
        return optimizer

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
        scheduler = optimizer.scheduler if is_before else SCHEDULERS[schedule](optimizer)
        rates = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Detected call")
            warnings.filterwarnings("error", "Seems like")
            for batch in data:
                plain.take_step(optimizer, net_loss(model, batch))
                scheduler.step(*[1.0] if schedule == "ReduceLROnPlateau" else [])
                rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    assert_same(NET, loop, make, batches(5), stages=(1, 3))


# -------------------------------------------------------------------------------------------------------------- hooks


@at_stages(0, 1, 2)
def test_hooks_made_before_shard_see_the_models_parameters(stage: int) -> None:
    @torch.no_grad()
    def unit_grads(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()

    @torch.no_grad()
    def unit_rows(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.div_(parameter.norm(dim=-1, keepdim=True))

    def make(model: Any) -> Any:
        optimizer = plain.adamw(model)
        optimizer.register_step_pre_hook(unit_grads)
        optimizer.register_step_post_hook(unit_rows)
        return optimizer

    assert_same(NET, make=make, stages=(stage,))


@at_stages(0, 3)
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_hooks_on_all_optimizers_run_once_a_step(is_scheduled: bool, stage: int) -> None:
    seen: list[Any] = []
    model, optimizer, _ = shard(plain.adamw, stage=stage)
    if is_scheduled:
        lr_scheduler.StepLR(optimizer, 1)
    handles = [
        register(lambda optimizer, *_: seen.append(optimizer))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        for batch in batches(2):
            plain.take_step(optimizer, net_loss(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 4
    assert all(each is optimizer for each in seen)


def test_a_replaced_step_is_refused() -> None:
    model = copy.deepcopy(NET)
    optimizer = plain.sgd(model)
    original = optimizer.step
    optimizer.step = lambda *args: original(*args)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"step\(\) of this SGD was replaced .* register_step_post_hook"):
        api.shard(model, optimizer)
    assert not api.is_sharded(model)


def closures(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        assert optimizer.step(closure).requires_grad


def test_closures() -> None:
    assert_same(NET, closures)


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"maximize": True},
        {"amsgrad": True},
        {"lr": torch.tensor(0.01)},
    ],
    ids=str,
)
def test_options_of_adamw(options: dict[str, Any], precision: str | None) -> None:
    assert_same(NET, make=lambda model: plain.adamw(model, **options), precision=precision, stages=(1, 3))


# ------------------------------------------------------------------------------------------ classes, and what is given


class Renamed(torch.optim.AdamW):
    """Overrides nothing of the update, and cannot be made as its base."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), lr=0.01, eps=1e-3)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})
        self.sign = torch.sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.sub_(self.sign(average + 0.01) * average.abs().sqrt(), alpha=group["lr"])


class ReplacesTensors(Lion):
    """Counts its steps, and puts new values into new tensors."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] / self.count * parameter.grad


def test_a_subclass_that_overrides_nothing_of_the_update() -> None:
    assert_same(NET, make=Renamed)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("kind", [Lion, ReplacesTensors])
def test_a_class_that_is_declared_elementwise(kind: Any, precision: str | None) -> None:
    assert_same(NET, make=plain.of(kind, lr=0.1), elementwise=True, precision=precision, bucket_size=100)


class Decays(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Lion, ValueError, "Lion is not known .* pass elementwise=True"),
        (Decays, ValueError, "Decays is not known .* pass elementwise=True"),
        (torch.optim.LBFGS, NotImplementedError, "LBFGS updates parameters as a whole"),
        (torch.optim.Adafactor, NotImplementedError, "Adafactor updates parameters as a whole"),
    ],
)
def test_other_classes_are_refused_before_anything_changes(kind: Any, error: Any, text: str) -> None:
    model = copy.deepcopy(NET)
    with pytest.raises(error, match=text):
        api.shard(model, kind(model.parameters(), lr=0.1))
    assert not api.is_sharded(model)
    if kind is torch.optim.LBFGS:
        with pytest.raises(error, match=text):
            api.shard(model, kind(model.parameters()), elementwise=True)


def test_optimizers_that_cannot_be_sharded_are_refused_by_name() -> None:
    model = copy.deepcopy(NET)
    with pytest.raises(ValueError, match=r"'temperature' is in optimizer 0 \(SGD\) and in optimizer 1 \(AdamW\)"):
        api.shard(model, [plain.sgd(model), plain.adamw(model)])
    with pytest.raises(ValueError, match="the list of optimizers is empty"):
        api.shard(model, [])
    with pytest.raises(TypeError, match="got str"):
        api.shard(model, [plain.sgd(model), "adam"])
    with pytest.raises(ValueError, match=r"shape \(2,\) that is not in the model"):
        api.shard(model, torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    assert not api.is_sharded(model)
