"""Local steps in a plan: what an average moves, holds and takes, and that no plan chooses them by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_replicas import DILOCO, Outer
from pairs import at_stages
from plain import adamw, sharded
from ranks import run_threads
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.config.config import Config
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.commands.plan import main as plan_main
from zeroshard.planner.commands.simulate import main as simulate_main
from zeroshard.planner.machines.machine import Link, Machine
from zeroshard.planner.plans import Plans, plan
from zeroshard.planner.scaling import TracedModel, gpt_family, simulate
from zeroshard.planner.state_sizes import predict_memory, state_sizes
from zeroshard.planner.step_time import StepConditions, StepTime, TraceCost, step_time
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.tracing.trace_model import trace_model

pytestmark = pytest.mark.usefixtures("traced_once")

SHAPE = GPTConfig(vocab_size=512, context=32, layers=4, heads=4, width=64)
TINY = GPTConfig(vocab_size=64, context=8, layers=2, heads=2, width=16)
FREE = Link(bandwidth=1e15, latency=0)
OPEN: dict[str, Any] = {"checkpoint": "none", "offload": None, "tensor": 1}


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(SHAPE)


def node(rate: float = 1e15, devices: int = 2, **changes: Any) -> Machine:
    """A node whose devices and links have no latency; ``rate``: between nodes."""
    links = {"inside": FREE, "outside": Link(bandwidth=rate, latency=0)}
    return Machine.resolve("h100", devices=devices, **links, **changes)


def simulated(machine: Machine, ranks: int = 4, replicas: int = 2, accumulate: int = 1, **options: Any) -> StepTime:
    """The step of a strategy with these options of shard()."""
    config = Config(**{"precision": "bf16", **options})
    strategy = Strategy(stage=config.stage, replicas=replicas, local_steps=config.local_steps)
    cost = TraceCost.from_trace(trace_model(gpt(), micro_batch=2, precision="bf16"), machine)
    conditions = StepConditions(
        ranks=ranks,
        replicas=replicas,
        accumulate=accumulate,
        local_steps=config.local_steps,
        average_ranks=strategy.average_ranks(ranks),
        shares_loss_scale=config.precision == "fp16",
    )
    sizes = state_sizes(gpt(), config, ranks=ranks // replicas, replicas=replicas)
    return step_time(cost, sizes, machine, conditions)


# -------------------------------------------------------------------------------------------------- bytes


@pytest.mark.guarantee("Plans with local steps")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "replicas", "accumulate", "outer"),
    [
        (0, 1, 1, None),  # one axis: every rank is a replica
        (0, 2, 1, DILOCO),
        (1, 2, 2, None),
        (2, 2, 2, DILOCO),
        (3, 2, 1, None),
        (3, 4, 1, DILOCO),
    ],
)
def test_traffic_and_memory_are_those_of_a_run(
    stage: int, replicas: int, accumulate: int, outer: Outer, precision: str
) -> None:
    ranks, every = 4, 3
    options: dict[str, Any] = {"stage": stage, "precision": precision, "local_steps": every, "outer_optimizer": outer}

    def train(rank: int) -> tuple[dict[str, float], dict[str, int]]:
        torch.manual_seed(0)
        mesh = None if replicas == 1 else init_device_mesh("cpu", (replicas, ranks // replicas))
        model, optimizer = sharded(GPT(TINY), adamw, mesh=mesh, **options)
        tokens, moved = torch.zeros(2, 8, dtype=torch.int64), dict[str, float]()
        for step in range(2 * every):
            for _ in range(accumulate):
                model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            for kind, traffic in zeroshard.report(model).collectives.items():
                moved[kind] = moved.get(kind, 0.0) + (traffic.bytes / every if step >= every else 0.0)
        held = {kind: use.now for (kind, _), use in zeroshard.report(model).memory.items()}
        return {kind: nbytes for kind, nbytes in moved.items() if nbytes > 1000}, held

    model, machine = GPT(TINY), Machine.resolve("cpu")
    traced = plan(
        model,
        devices=ranks,
        machine=machine,
        replicas=replicas,
        batch=2 * ranks * accumulate,
        micro_batch=2,
        **OPEN,
        **options,
    )
    (found,) = traced.candidates
    predicted = {kind: nbytes for kind, nbytes in found.step_time.traffic.items() if nbytes}
    memory = predict_memory(model, ranks=ranks, replicas=replicas, on_gpu=False, **options).states
    assert found.footprint.states == memory
    for measured, held in run_threads(ranks, train):
        assert predicted == pytest.approx(measured, abs=300)
        for kind in ("master weights", "optimizer states", "outer optimizer"):
            assert memory.get(kind, 0) == pytest.approx(held.get(kind, 0), abs=300), kind


def test_an_average_moves_fp32_values_once_in_k_steps() -> None:
    once, never = (simulated(node(), stage=3, local_steps=steps) for steps in (10, 10**9))
    psi = sum(parameter.numel() for parameter in gpt().parameters())
    assert once.traffic["replica average"] == pytest.approx(8 * psi / 2 / 10, rel=0.01)
    assert never.traffic["replica average"] < 1
    assert "all-reduce" not in once.traffic and "all-reduce" in simulated(node(), stage=3).traffic
    assert once.traffic["all-gather"] == pytest.approx(never.traffic["all-gather"])


@at_stages(1, 2)
def test_an_average_gathers_unsharded_parameters_once_more(stage: int) -> None:
    found = simulated(node(), stage=stage, local_steps=4)
    psi = 2 * sum(parameter.numel() for parameter in gpt().parameters())
    assert found.traffic["all-gather"] == pytest.approx(1.25 * psi, rel=0.01)


# --------------------------------------------------------------------------------------------------- time


def test_over_a_slow_link_a_step_takes_an_average_divided_by_the_local_steps() -> None:
    slow = node(2e4, bandwidth=1e15)
    psi = sum(parameter.numel() for parameter in gpt().parameters())
    for steps in (4, 16):
        found = simulated(slow, stage=3, local_steps=steps)
        # two replicas: each sends and receives half of its shard, in both halves of an all-reduce; a node has two ranks
        assert found.average == pytest.approx(4 * psi / 2e4 / steps, rel=0.02)
        assert found.step == pytest.approx(found.average, rel=0.05)
        assert found.exposed_communication >= found.average
    assert simulated(slow, stage=3).average == 0


def test_an_average_is_not_repeated_in_each_backward() -> None:
    slow = node(2e6)
    one, many = (simulated(slow, stage=3, local_steps=4, accumulate=count) for count in (1, 8))
    assert many.average == pytest.approx(one.average)
    assert many.traffic["replica average"] == pytest.approx(one.traffic["replica average"])


def test_fp16_compares_overflows_over_the_slow_link_in_every_step() -> None:
    late = Machine.resolve("h100", devices=2, outside=Link(bandwidth=1e15, latency=0.5))
    fp16, bf16 = (simulated(late, stage=3, local_steps=100, precision=precision) for precision in ("fp16", "bf16"))
    assert fp16.average > 0.5 > bf16.average


def test_the_outer_optimizer_takes_time_and_memory() -> None:
    machine = node(bandwidth=1e9)
    plain, outer = (simulated(machine, stage=3, local_steps=2, outer_optimizer=make) for make in (None, DILOCO))
    assert outer.average > plain.average
    states = [
        predict_memory(gpt(), ranks=4, replicas=2, stage=3, local_steps=2, outer_optimizer=make).states
        for make in (None, DILOCO)
    ]
    psi = sum(parameter.numel() for parameter in gpt().parameters())
    assert "outer optimizer" not in states[0]
    assert states[1]["outer optimizer"] == pytest.approx(8 * psi / 2, rel=0.01)


# -------------------------------------------------------------------------------------------------- plans


def planned(rate: float, **given: Any) -> Plans:
    return plan(gpt(), **{"devices": 8, "machine": node(rate, devices=4), "batch": 16, **OPEN, **given})


@pytest.mark.guarantee("Plans with local steps")
def test_local_steps_are_never_chosen() -> None:
    for given in ({}, {"allow_lossy": True}):
        found = planned(1e6, **given)
        assert {candidate.strategy.local_steps for candidate in found.candidates} == {1}
        assert "local_steps" not in found.reason


def test_given_local_steps_are_planned_with_one_replica_per_node() -> None:
    found = planned(1e6, local_steps=8)
    assert {(one.strategy.local_steps, one.strategy.replicas, one.strategy.partition) for one in found.candidates} == {
        (8, 2, "hybrid")
    }
    assert {one.strategy.stage for one in found.candidates} == {0, 1, 2, 3}
    assert found.best is not None and "averaged every 8 steps" in found.best.strategy.description
    assert "local_steps=8, as given, is another algorithm" in found.reason
    assert found.best.samples_per_second > planned(1e6).best.samples_per_second  # type: ignore[union-attr]


def test_without_rows_only_stage_0_has_replicas() -> None:
    assert {one.strategy.stage for one in planned(1e6, local_steps=8, replicas=1).candidates} == {0}
    assert planned(1e6, local_steps=8, reduce_wire="int8", stage=3).candidates[0].strategy.is_lossy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local_steps": 8, "replicas": 1, "stage": 3}, "no strategy of this search supports local_steps=8: stages 1"),
        ({"local_steps": 8, "replicas": 2, "partition": "full"}, "and partition='hybrid'"),
        ({"local_steps": 0}, "local_steps must be a positive integer, got 0"),
        ({"local_steps": 8, "devices": 1, "batch": 2}, "of which there must be several"),
    ],
)
def test_local_steps_that_shard_rejects_are_not_planned(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(1e6, **given)


def test_the_outer_optimizer_is_planned_only_with_local_steps() -> None:
    given = planned(1e6, local_steps=8, outer_optimizer=DILOCO, stage=3).candidates
    assert all(one.footprint.states["outer optimizer"] for one in given)
    without = planned(1e6, outer_optimizer=DILOCO, stage=3).candidates
    assert not any("outer optimizer" in one.footprint.states for one in without)


def test_auto_keeps_local_steps_that_are_given() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)

    def body(rank: int) -> tuple[Config, str]:
        model, _ = sharded(
            GPT(TINY),
            adamw,
            mesh=init_device_mesh("cpu", (2, 2)),
            stage="auto",
            inputs=(tokens, tokens),
            local_steps=5,
            outer_optimizer=DILOCO,
        )
        return model._zeroshard.engine.context.config, zeroshard.report(model).chosen

    for config, why in run_threads(4, body):
        assert (config.local_steps, config.outer_optimizer) == (5, DILOCO)
        assert "hybrid over 2 replicas, averaged every 5 steps" in why and "another algorithm" in why


def test_simulate_has_a_series_for_each_number_of_local_steps() -> None:
    given: dict[str, Any] = {"devices": [8], "machine": node(1e6, devices=4), "stages": [3]}
    found = simulate(gpt(), replicas="nodes", local_steps=[1, 8, 64], **given)
    assert found.series[0] == "stage 3, hybrid" and "stage 3, hybrid, local steps 8" in found.series
    of_hybrid = [point for point in found.points if point.plan.strategy.partition == "hybrid"]
    hybrid = {point.plan.strategy.local_steps: point for point in of_hybrid}
    assert hybrid.keys() == {1, 8, 64} and len(found.series) == 5  # hierarchical and full have no replicas
    assert hybrid[64].time_fractions["average"] < hybrid[8].time_fractions["average"]
    assert hybrid[64].samples_per_second_per_device > hybrid[8].samples_per_second_per_device
    with pytest.raises(ValueError, match=r"none of \[8\] devices supports local_steps=8: stages 1 to 3 need replicas"):
        simulate(gpt(), local_steps=8, **given)


def test_the_largest_model_is_not_searched_with_local_steps() -> None:
    with pytest.raises(ValueError, match="local_steps is part of a strategy"):
        TracedModel.from_family(gpt_family(SHAPE), local_steps=8)


# ----------------------------------------------------------------------------------------------- commands

SIZE = ["gpt2", "--sequence", "64", "--micro-batch", "1", "--machine", "h100", "--stage", "3"]


def test_the_plan_command_prices_local_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    given = [*SIZE, "--devices", "16", "--tensor", "1", "--checkpoint", "none", "--offload", "none"]
    local = ["--local-steps", "50", "--outer-lr", "0.7"]
    assert plan_main([*given, *local, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "--local-steps 50" in shown and "--outer-lr 0.7 --outer-momentum 0.9" in shown
    assert "local_steps=50, outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=" in shown
    data = json.loads(file.read_text())
    (found,) = data["plans"]
    assert found["strategy"]["local_steps"] == 50 and found["seconds"]["average"] > 0
    assert found["state_bytes"]["outer optimizer"] > 0 and found["traffic_bytes"]["replica average"] > 0
    assert plan_main([*given, "--outer-lr", "0.7"]) == 2
    assert "give --local-steps above 1 too" in capsys.readouterr().err
    assert plan_main([*given, "--local-steps", "8", "--outer-momentum", "0.7"]) == 2
    assert "--outer-momentum is that of --outer-lr" in capsys.readouterr().err
    for rate in ("-1", "nan", "inf"):
        assert plan_main([*given, "--local-steps", "8", "--outer-lr", rate]) == 2
        assert f"--outer-lr must be above 0, its momentum 0 or more, got {rate} and 0.9" in capsys.readouterr().err


def test_the_simulate_command_compares_local_steps(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SIZE, "--devices", "16", "--replicas", "nodes", "--partition", "hybrid", "--network", "1"]
    assert simulate_main([*given, "--local-steps", "1,50"]) == 0
    shown = capsys.readouterr().out
    assert "stage 3, hybrid, local steps 50" in shown
    assert simulate_main([*SIZE, "--devices", "16", "--local-steps", "50"]) == 0
    assert "stage 3, hybrid, local steps 50" in capsys.readouterr().out
    assert simulate_main([*given[:-2], "--largest", "--local-steps", "50"]) == 2
    assert "cannot search with it" in capsys.readouterr().err
