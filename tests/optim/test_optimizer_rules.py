"""Rules that keep their gradient, change after shard(), hold parameters, or store states of another dtype."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import (
    assert_equal,
    assert_same_training,
    batches,
    full_parameters,
    of,
    sharded,
    token_step,
    train_steps,
)
from ranks import run_threads
from rules import Rule
from torch import nn
from zoo import make_net

import zeroshard
from zeroshard.optim.elementwise_check import rule_checker

BASE = make_net(blocks=1)
DATA = batches(4)


# x gradients as states


class KeepsGrads(Rule):
    """Adds the last two gradients, which it keeps as they are: the tensor, and a view of it in a list."""

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        last, views = state.get("last", torch.zeros_like(p)), state.get("views", (torch.zeros(p.numel()),))
        state["last"], state["views"] = grad, (grad.view(-1),)
        return grad + 0.5 * last + 0.1 * views[0].view_as(p)


def all_but_empty(model: nn.Module) -> torch.optim.Optimizer:
    """``nothing`` has a gradient and is in no group."""
    return KeepsGrads([p for p in model.parameters() if p.numel()])


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        for batch in (first, second):
            token_step(model, batch)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize(
    ("world", "loop", "options"),
    [(2, train_steps, {}), (1, accumulate, {}), (2, train_steps, {"offload": "host"})],
)
def test_a_rule_may_keep_its_gradient(world: int, loop: Any, options: Any, elementwise: bool) -> None:
    assert_same_training(world, BASE, all_but_empty, DATA, loop, elementwise=elementwise, **options)


def test_zeros_are_not_written_to_a_gradient_that_is_a_state() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(BASE, all_but_empty, elementwise=False)
        optimizer.zero_grad(set_to_none=False)
        token_step(model, DATA[0])
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"state 'views' is the tensor of a gradient.*clone"):
            optimizer.zero_grad(set_to_none=False)

    run_threads(1, body)


# ----------------------------------------------------------------------------------------- states of another dtype


class OwnDtype(Rule):
    """Keeps momentum in ``dtype``, and an average in the parameter's."""

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=group["dtype"])).lerp_(
            grad.to(group["dtype"]), 0.3
        )
        average = state.setdefault("average", torch.zeros_like(p)).lerp_(grad, 0.1)
        return (momentum + average).to(p.dtype)


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize(("precision", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_a_resumed_run_keeps_the_dtypes_of_states(
    precision: Any, dtype: torch.dtype, elementwise: bool, tmp_path: Path
) -> None:
    """In each precision a state has the dtype that the rule gives it, wherever it was saved."""
    base = copy.deepcopy(BASE).to(torch.bfloat16)

    def make(precision: Any) -> tuple[Any, Any]:
        return sharded(base, of(OwnDtype, dtype=dtype), precision=precision, elementwise=elementwise)

    def body(rank: int) -> None:
        model, optimizer = make(precision)
        train_steps(model, optimizer, DATA[:2])
        zeroshard.save(tmp_path / "a", model, optimizer)
        state_dict = optimizer.state_dict()
        (loaded, loaded_optimizer), (other, other_optimizer) = make(precision), make(precision)
        zeroshard.load(tmp_path / "a", loaded, loaded_optimizer)
        zeroshard.load(tmp_path / "a", other)
        other_optimizer.load_state_dict(state_dict)
        for pair in ((model, optimizer), (loaded, loaded_optimizer), (other, other_optimizer)):
            train_steps(*pair, DATA[2:])
        for ours in (loaded, other):
            assert_equal(full_parameters(ours), full_parameters(model))
        third, third_optimizer = make("bf16" if precision is None else None)
        zeroshard.load(tmp_path / "a", third, third_optimizer)
        state = zeroshard.full_state(third_optimizer, "head.weight")
        assert state["momentum"].dtype == dtype
        assert state["average"].dtype == (torch.float32 if precision is None else torch.bfloat16)
        plain = copy.deepcopy(base)
        plain_optimizer = OwnDtype(plain.parameters(), dtype=dtype)
        zeroshard.load(tmp_path / "a", plain, plain_optimizer)
        assert plain_optimizer.state[plain.head.weight]["momentum"].dtype == dtype

    run_threads(2, body)


# --------------------------------------------------------------------------------------------- changes after shard()


class Optional(Rule):
    """Elementwise, unless an option or an attribute of a parameter says otherwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, trust_ratio=False, clip=0.0, sign=False, count=0, mode=None)

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        update = grad.sign() if group["sign"] else grad
        if group["trust_ratio"]:
            update = update * p.norm() / (update.norm() + 1)
        if group["clip"]:
            update = update / (1 + update.norm() / group["clip"])
        return update * getattr(p, "scale", 1.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] += 1
            group["mode"] = "later"


def test_a_rule_that_changes_after_shard_is_tried_again() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(BASE, of(Optional))
        train_steps(model, optimizer, DATA[:1])
        group = optimizer.param_groups[0]
        with pytest.MonkeyPatch.context() as patch:  # what a scheduler or the rule itself changes is not tried
            patch.setattr(rule_checker, "find_whole_param_groups", None)
            for lr in (0.0, 0.03, 0.1):
                group["lr"] = group["initial_lr"] = lr
                train_steps(model, optimizer, DATA[1:2])
        group["sign"] = True  # still elementwise
        train_steps(model, optimizer, DATA[2:3])
        optimizer.inner.param_groups[0]["clip"] = 0.5
        with pytest.raises(RuntimeError, match=r"'clip' of group 0 is 0.5 now.*elementwise=False to shard"):
            train_steps(model, optimizer, DATA[3:])
        group["clip"] = 0.0
        state_dict = optimizer.state_dict()
        loaded = copy.deepcopy(state_dict)
        loaded["param_groups"][0]["trust_ratio"] = True
        optimizer.load_state_dict(loaded)
        with pytest.raises(RuntimeError, match="'trust_ratio' of group 0 is True now"):
            optimizer.step()
        optimizer.load_state_dict(state_dict)
        optimizer.step()
        model.head.weight.scale = 0.5
        with pytest.raises(RuntimeError, match=r"parameters of group 0 have the attributes \['scale'\] now"):
            optimizer.step()

    run_threads(1, body)


def test_a_rule_that_changes_together_with_a_new_group_is_tried_too() -> None:
    def body(rank: int) -> None:
        model = copy.deepcopy(BASE)
        last = model.head.weight
        model, optimizer = zeroshard.shard(model, Optional([p for p in model.parameters() if p is not last]))
        optimizer.add_param_group({"params": [last]})
        optimizer.param_groups[0]["trust_ratio"] = True
        with pytest.raises(RuntimeError, match="'trust_ratio' of group 0 is True now"):
            train_steps(model, optimizer, DATA[:1])

    run_threads(2, body)


class LoadsItself(torch.optim.SGD):
    """Has its own load_state_dict, which leaves the states to torch's."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("elementwise", [False, True])
def test_a_class_that_loads_itself_gets_each_state_in_the_dtype_of_its_parameter(elementwise: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).double())
        return model, LoadsItself(model.parameters(), lr=0.1, momentum=0.9)

    plain, saved = make()
    for parameter in plain.parameters():
        parameter.grad = torch.full_like(parameter, 1 / 3)
    saved.step()
    _, optimizer = zeroshard.shard(*make(), elementwise=elementwise)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    states = optimizer.state_dict()["state"]
    for number, state in saved.state_dict()["state"].items():
        assert torch.equal(states[number]["momentum_buffer"], state["momentum_buffer"])
        assert states[number]["momentum_buffer"].dtype == state["momentum_buffer"].dtype
