"""Which parameters are updated how, as the report and the log say it; groups whose filter matched nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from pairs import at_stages
from plain import sharded
from ranks import run_threads
from rules import Rule
from torch import nn

import zeroshard
from zeroshard.memory import Routing


class MuonOrSGD(Rule):
    """The rule of a matrix in some groups, and of an element in the others, as scripts with Muon have it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, lr=0.1, use_muon=False)

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if not group["use_muon"]:
            return grad
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(grad))
        return momentum.lerp_(grad, 0.1) / momentum.norm().clamp(min=1e-7)


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 4)])


def split(model: nn.Module, **options: Any) -> MuonOrSGD:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return MuonOrSGD([{"params": matrices, "use_muon": True, **options}, {"params": vectors}])


def routed(rank: int, stage: int) -> tuple[Routing | None, str]:
    model, optimizer = sharded(net(), split, stage=stage)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    report = zeroshard.report(model)
    assert report.routing is not None
    owned = report.routing.state_bytes_by_owner()
    assert owned is not None
    owner = rank if stage else 0
    assert report.memory["optimizer states", "device"].now == owned[owner]  # SGD has no states
    return report.routing, str(report)


@pytest.mark.guarantee("One rule for each group")
@pytest.mark.usefixtures("tried_once")
@at_stages(0, 3)
def test_the_report_says_who_updates_what(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zeroshard")
    (routing, text), (other, _) = run_threads(2, routed, stage)
    assert routing == other
    assert routing is not None
    assert routing.flat == {"0.bias": 24, "2.bias": 8, "4.bias": 4}
    assert {name: param.elements for name, param in routing.whole.items()} == {
        "0.weight": 192,
        "2.weight": 192,
        "4.weight": 32,
    }
    if stage:  # the largest first, each to the rank with the least
        assert routing.elements_by_owner() == [224, 192]
        assert "each by one of 2 ranks: the fullest has 1.08 × the mean's elements, 1.08 × its state bytes" in text
    else:
        assert routing.elements_by_owner() == [416]
        assert "whole: 3 parameters, 416 elements, by every rank" in text
    assert "updates: flat slices: 3 parameters, 36 elements; whole: 3 parameters, 416 elements" in text
    lines = [record.getMessage() for record in caplog.records if "updates" in record.getMessage()]
    assert lines == [f"MuonOrSGD updates {routing}"]  # rank 0's


def test_an_elementwise_optimizer_is_routed_to_slices() -> None:
    model = net()
    frozen = model[4].requires_grad_(False)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    routing = zeroshard.report(model).routing
    assert routing is not None
    assert (len(routing.flat), routing.whole) == (4, {})
    assert str(routing) == f"flat slices: 4 parameters, {sum(p.numel() for p in model[:4].parameters())} elements"
    del optimizer
    assert frozen is model[4]
    assert zeroshard.report(model).routing is None


def test_states_that_cannot_be_known_are_not_guessed() -> None:
    """A rule that reads values cannot run on the meta device."""

    class Reads(MuonOrSGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and float(parameter.grad.norm()) > 0:
                        super().step()
                        return

    model = net()
    model, _ = zeroshard.shard(model, Reads([{"params": list(model.parameters()), "use_muon": True}]), elementwise=None)
    routing = zeroshard.report(model).routing
    assert routing is not None
    assert routing.state_bytes_by_owner() is None


@pytest.mark.guarantee("Groups without parameters")
@pytest.mark.parametrize("is_added", [False, True])
def test_a_group_whose_filter_matched_nothing_is_an_error(is_added: bool) -> None:
    model = net()
    matched: list[nn.Parameter] = [p for name, p in model.named_parameters() if name.startswith("module.")]
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    empty = {"params": matched, "use_muon": True}
    message = r"parameter group 1 has no parameters, and no other group has its options \(use_muon=True\)"
    if is_added:
        model, optimizer = zeroshard.shard(model, MuonOrSGD(groups))
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(empty)
        assert len(optimizer.param_groups) == 1
    else:
        with pytest.raises(ValueError, match=message):
            zeroshard.shard(model, MuonOrSGD([*groups, empty]))


def test_an_optimizer_without_any_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match="parameter group 0 has no parameters, nor has any other group"):
        zeroshard.shard(net(), torch.optim.AdamW([{"params": []}]))


def empty_and_harmless(rank: int) -> int:
    model = nn.Linear(4, 4, bias=False)  # a split by dimensions leaves no vectors, as in a plain run
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1, "name": "decayed"},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "name": "others"},
    ]
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(groups, lr=0.1))
    optimizer.add_param_group({"params": [], "lr": 0.5})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return len(optimizer.param_groups)


def test_an_empty_group_of_the_same_rule_is_accepted_as_in_torch() -> None:
    assert run_threads(2, empty_and_harmless) == [3, 3]
