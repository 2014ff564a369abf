"""What the planner knows of parameters that one rank updates as a whole."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from ranks import run_threads
from rules import Rule
from torch import nn

import zeroshard
from zeroshard.config.config import Config
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plan_json import plans_to_dict
from zeroshard.planner.state_sizes import state_sizes
from zeroshard.planner.whole_params import find_whole_params, least_max_load
from zeroshard.train.options import StepOptions
from zeroshard.train.training_setup import make_optimizer

SMALL = GPTConfig(vocab_size=500, context=8, layers=3, heads=2, width=32)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (32, 128), (128, 32)])
def test_the_flops_of_newton_schulz_are_those_of_the_formula(rows: int, columns: int) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(columns, rows, bias=False)) for _ in range(2))
    short, long = sorted((rows, columns))
    for spec in find_whole_params(model, "muon").values():
        assert spec == (rows * columns, 1.0, 20 * short**2 * long + 10 * short**3, 0, True)


def test_the_fullest_of_64_owners_of_gpt_7_6b() -> None:
    """Bytes are equal. 72 matrices have 67M elements, and 8 of 64 owners orthogonalize two: no assignment is better."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=36, heads=32, width=4096))  # the preset 7.6b
    width, layers = 4096, 36
    chosen = {"stage": 3, "tensor": 1, "replicas": 1, "checkpoint": "none", "micro_batch": 4}
    (found,) = zeroshard.plan(model, devices=64, machine="h100", optimizer="muon", **chosen).candidates
    loads = found.owner_loads
    assert loads is not None
    assert sum(loads.elements) == layers * 12 * width**2
    mean = layers * 12 * width**2 / 64
    assert set(loads.state_bytes) == {4 * mean}
    assert max(loads.flops) == 2 * 90 * width**3 == loads.least_flops  # of a matrix of 4096 x 16384
    assert sum(loads.flops) == layers * (2 * 90 + 70 + 30) * width**3
    assert loads.describe().endswith("(1.14 ×); no assignment of whole parameters' work is below 1.14 ×")
    # updates in bf16 to the owners and back: 2Ψ/N elements and what the fullest has more
    assert found.step_time.traffic["all-to-all"] == pytest.approx(2 * mean + 2 * max(loads.elements), rel=1e-3)


def test_no_assignment_is_below_the_bound() -> None:
    assert least_max_load([5, 5, 5, 1, 1], ranks=2) == 10
    assert least_max_load([9, 1, 1], ranks=3) == 9
    assert least_max_load([1] * 7, ranks=3) == 3


def test_time_and_memory_of_a_step() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=512, context=64, layers=4, heads=4, width=512))
    plans = [
        zeroshard.plan(model, devices=8, optimizer=name, stage=(0, 3), tensor=1, checkpoint="none", micro_batch=2)
        for name in ("adamw", "muon")
    ]
    assert all(plan.strategy.offload is None for plan in plans[1].candidates)
    on_device = [[plan for plan in found.candidates if plan.strategy.offload is None] for found in plans]
    by_stage = [{plan.strategy.stage: plan for plan in found} for found in on_device]
    for stage in (0, 3):
        adamw, muon = (found[stage] for found in by_stage)
        loads = muon.owner_loads
        assert adamw.owner_loads is None and loads is not None
        assert len(loads.elements) == (8 if stage else 1)
        matmuls = Machine.resolve("h100").matmul_seconds(max(loads.flops), "bf16")
        assert muon.step_time.update > adamw.step_time.update + matmuls * 0.99
        states = [plan.footprint.states["optimizer states"] for plan in (adamw, muon)]
        assert states[1] < states[0] * (0.65 if stage else 0.55)
        assert ("all-to-all" in muon.step_time.traffic) == bool(stage)
        assert "all-to-all" not in adamw.step_time.traffic
    written = plans_to_dict(plans[1])["plans"][-1]["whole_parameters"]
    assert set(written) == {"elements", "state_bytes", "flops"}
    assert plans_to_dict(plans[0])["plans"][0]["whole_parameters"] is None


def test_what_cannot_be_planned_is_refused() -> None:
    with torch.device("meta"):
        model = GPT(SMALL)
    with pytest.raises(ValueError, match="optimizer must be one of adamw, muon, got 'adam'"):
        zeroshard.plan(model, devices=2, optimizer="adam")
    with pytest.raises(ValueError, match="cannot predict the step time with offloaded states"):
        zeroshard.plan(model, devices=2, optimizer="muon", offload={"optimizer": "host"})
    with pytest.raises(ValueError, match="Linear has no trained matrices in repeated blocks"):
        zeroshard.plan(nn.Linear(4, 4), torch.ones(1, 4), devices=2, optimizer="muon")


MODEL = GPT(SMALL)


def shard_auto(rank: int) -> tuple[str, str]:
    model = copy.deepcopy(MODEL)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    optimizer = make_optimizer(model, StepOptions(optimizer="muon"))
    planning = {"machine": "cpu"}
    model, optimizer = zeroshard.shard(model, optimizer, stage="auto", inputs=(tokens, tokens), planning=planning)
    model(tokens, tokens).backward()
    optimizer.step()
    report = zeroshard.report(model)
    return report.chosen, str(report.routing)


def test_stage_auto_plans_with_whole_parameters() -> None:
    for chosen, routing in run_threads(2, shard_auto):
        assert "plans that fit" in chosen
        assert "flat slices, orthogonalized each by one of 2 ranks: 12 parameters, 36,864 elements" in routing


class Normalized(Rule):
    """A rule that needs whole parameters, in every group."""

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        total = self.state[p].setdefault("total", torch.zeros_like(p)).add_(grad)
        return total / total.norm().clamp(min=1e-7)


def test_owners_of_several_groups_are_those_of_the_engine() -> None:
    def train(rank: int) -> zeroshard.Report:
        model = copy.deepcopy(MODEL)
        vectors, others = ([p for p in model.parameters() if (p.dim() < 2) is is_vector] for is_vector in (True, False))
        optimizer = Normalized([{"params": vectors, "lr": 0.01}, {"params": others}])
        model, optimizer = zeroshard.shard(model, optimizer, elementwise=False)
        return zeroshard.report(model)

    parameters = list(MODEL.parameters())
    vectors, others = ([p for p in parameters if (p.dim() < 2) is is_vector] for is_vector in (True, False))
    whole = find_whole_params(MODEL, Normalized([{"params": vectors}, {"params": others}]), [True, True])
    sizes = state_sizes(MODEL, Config(), ranks=3, on_gpu=False, whole=whole).whole
    assert sizes is not None
    for report in run_threads(3, train):
        assert report.routing is not None
        assert tuple(report.routing.elements_by_owner()) == sizes.loads.elements
        assert report.routing.state_bytes_by_owner() == list(sizes.loads.state_bytes)


def test_a_parameter_of_every_shape_has_one_owner() -> None:
    with torch.device("meta"):
        model = GPT(SMALL)
    whole = find_whole_params(model, "muon")
    assert sum(spec.numel for spec in whole.values()) == 3 * 12 * 32**2
    assert math.isclose(sum(spec.states for spec in whole.values()), len(whole))
