"""stage="auto", offload="auto", checkpoint="auto": the fastest plan that fits, and never one that does not."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from live import allocated_bytes
from plain import mesh_of, token_step
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import Net, make_net

import zeroshard
from zeroshard.activations.checkpoint import CheckpointedForward
from zeroshard.comm import Communicator, open_consistency_checker
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import auto, traced_model
from zeroshard.planner.auto import (
    JobTopology,
    NothingFitsError,
    PlanningOptions,
    choose_for_shard,
    choose_plan_for_machine,
)
from zeroshard.planner.free_memory import FreeMemory, machine_from_free_memory
from zeroshard.planner.machines import cache
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plans import Plans, plan
from zeroshard.planner.tracing.trace_model import UntraceableError, strip_checkpointing, trace_model

pytestmark = pytest.mark.usefixtures("traced_once")

CPU = Machine.resolve("cpu", context=0)  # the bytes that tensors take, and nothing else
WORLD = 4
RANDOM_STATE = 5056  # bytes that torch keeps for each recomputed block: only small models notice
TOKENS = torch.zeros(4, 16, dtype=torch.int64)


def gpt(layers: int = 2, width: int = 32) -> GPT:
    return GPT(GPTConfig(vocab_size=96, context=16, layers=layers, heads=2, width=width))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def loss_of_net(output: torch.Tensor) -> torch.Tensor:
    targets = torch.zeros(output.shape[:-1].numel(), dtype=torch.int64, device=output.device)
    return nn.functional.cross_entropy(output.flatten(0, -2).float(), targets)


def images() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), *blocks, nn.Flatten(), nn.Linear(6 * 10 * 10, 9))


# name → (the model, what it is called with, what of its output is the loss, the optimizer's options)
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, dict[str, Any]]] = {
    "gpt": (gpt, (TOKENS, TOKENS), None, {"fused": True}),
    "wide gpt, foreach": (lambda: gpt(1, 64), (TOKENS[:1], TOKENS[:1]), None, {"foreach": True}),
    "net": (lambda: Net(16, 3, 1500), torch.zeros(6, 8, dtype=torch.int64), loss_of_net, {"fused": True}),
    "net, plain": (lambda: Net(24, 9, 20), torch.zeros(16, 4, dtype=torch.int64), loss_of_net, {"foreach": False}),
    "images": (images, torch.zeros(8, 3, 12, 12), loss_of_net, {"fused": True}),
}


# ------------------------------------------------------------------------------------ never out of memory


def plans_of(name: str, precision: str | None) -> Plans:
    """Everything that could be chosen, on a machine without limits."""
    make, inputs, loss, fused = CASES[name]
    found: list[Plans] = []

    def spied(*args: Any, **kwargs: Any) -> Plans:
        found.append(plan(*args, **kwargs))
        return found[-1]

    model, real = on_meta(make), auto.plan
    auto.plan = spied
    try:
        told = {"loss": loss, "machine": replace(CPU, memory=2**40)}
        site, control = JobTopology(torch.device("cpu"), WORLD), open_consistency_checker(None, 60.0)
        options = {"stage": "auto", "checkpoint": "auto", "precision": precision}
        choose_for_shard(model, adam(model, **fused), inputs, told, site, control, **options)
    finally:
        auto.plan = real
    return found[0]


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


@contextlib.contextmanager
def one_model_at_many_limits() -> Iterator[None]:
    """The same model is planned for at every limit: only the limit changes."""
    known: dict[Any, Any] = {}

    def remembered(model: nn.Module, inputs: Any, **options: Any) -> Any:
        key = (options["checkpoint"], options["micro_batch"])
        if key not in known:
            known[key] = trace_model(model, inputs, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_model, "trace_model", remembered)
        yield


def measured_under_limits(rank: int, name: str, precision: str | None) -> list[tuple[int, int, str, list[str]]]:
    # the fake backend gets the buffers of gloo, which a CPU's ranks use
    buffers = mock.patch.object(Communicator, "needs_receive_buffer", property(lambda comm: comm.shard_axis.size > 1))
    with one_model_at_many_limits(), buffers:
        return measured(name, precision)


def measured(name: str, precision: str | None) -> list[tuple[int, int, str, list[str]]]:
    """For each of several limits: (the limit, the most that one rank of four took, what was chosen, what would fit)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())  # moves and allocates nothing
    make, inputs, loss, fused = CASES[name]
    plans = plans_of(name, precision)
    needs = sorted({int(found.memory) + 1 for found in plans.candidates})
    outcomes = []
    for limit in needs[:: max(1, len(needs) // 4)]:
        kept_alive: list[Any] = []

        def train(limit: int = limit, kept_alive: list[Any] = kept_alive) -> None:
            model = on_meta(make)
            model, optimizer = zeroshard.shard(
                model,
                adam(model, **fused),
                stage="auto",
                checkpoint="auto",
                inputs=inputs,
                planning={"loss": loss, "machine": CPU, "memory": limit},
                precision=precision,
                init_fn=fill,
            )
            kept_alive.append(model)
            for _ in range(3):
                output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
                (output if loss is None else loss(output)).backward()
                optimizer.step()
                optimizer.zero_grad()

        most, _ = allocated_bytes(train)
        most -= RANDOM_STATE * sum("forward" in module.__dict__ for module in kept_alive[0].modules())
        fitting = [found for found in plans.candidates if found.memory <= limit]
        fast = max(found.samples_per_second for found in fitting)
        outcomes.append(
            (
                limit,
                most,
                zeroshard.report(kept_alive[0]).chosen,
                [found.strategy.description for found in fitting if found.samples_per_second >= 0.99 * fast],
            )
        )
    model = on_meta(make)
    with pytest.raises(NothingFitsError, match="nothing fits: even with stage"):
        zeroshard.shard(
            model,
            adam(model, **fused),
            stage="auto",
            checkpoint="auto",
            inputs=inputs,
            planning={"loss": loss, "machine": CPU, "memory": needs[0] - 2},
            precision=precision,
        )
    assert not hasattr(model, "_zeroshard") and all(parameter.is_meta for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
    return outcomes


@pytest.mark.parametrize(("name", "precision"), [*((name, None) for name in CASES), ("net", "bf16")])
def test_what_is_chosen_is_the_fastest_that_fits_and_really_fits(name: str, precision: str | None) -> None:
    (outcomes,) = run_processes(1, measured_under_limits, name, precision, fresh=True)
    assert len(outcomes) >= 4
    for limit, most, chosen, fastest in outcomes:
        assert most <= limit
        assert any(chosen.startswith(words + ":") for words in fastest), (limit, chosen)
    assert len({chosen.partition(":")[0] for _, _, chosen, _ in outcomes}) > 1  # limits that change the choice
    assert any(most > 0.85 * limit for limit, most, _, _ in outcomes)  # and that leave little space


# ----------------------------------------------------------------------------------------- equal on all ranks


def sharded(model: nn.Module, limit: int | None = None, **options: Any) -> tuple[nn.Module, Any]:
    model = copy.deepcopy(model)
    planning = {"machine": CPU, "loss": loss_of_net, **({"memory": limit} if limit is not None else {})}
    return zeroshard.shard(
        model, adam(model, fused=True), inputs=torch.zeros(3, 5, dtype=torch.int64), planning=planning, **options
    )


def test_numbers_are_those_of_the_stage_that_was_chosen() -> None:
    net, generator = make_net(), torch.Generator().manual_seed(3)
    rows = torch.randint(11, (2, 2, 3, 5), generator=generator)  # steps, ranks, a rank's batch

    def body(rank: int, stage: Any) -> tuple[str, list[torch.Tensor]]:
        if stage == "auto":
            model, optimizer = sharded(net, stage="auto")
        else:
            model = copy.deepcopy(net)
            model, optimizer = zeroshard.shard(model, adam(model, fused=True), stage=stage)
        for batch in rows:
            token_step(model, batch[rank])
            optimizer.step()
            optimizer.zero_grad()
        said = zeroshard.report(model).chosen
        return said, [zeroshard.full_parameter(model, name) for name, _ in model.named_parameters()]

    chosen = run_threads(2, body, "auto")
    assert len({said for said, _ in chosen}) == 1
    stage = int(chosen[0][0].removeprefix("stage ")[0])
    expected = run_threads(2, body, stage)
    assert expected[0][0] == ""
    for mine, theirs in zip(chosen[0][1], expected[0][1], strict=True):
        assert torch.equal(mine, theirs)


def test_one_rank_plans_and_says_why_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    net, planned = make_net(), []
    monkeypatch.setattr(auto, "plan", lambda *args, **kwargs: planned.append(dist.get_rank()) or plan(*args, **kwargs))
    with caplog.at_level(logging.INFO, logger="zeroshard"):
        said = run_threads(3, lambda rank: str(zeroshard.report(sharded(net, stage="auto")[0])).splitlines()[-1])
    assert planned == [0]
    (told,) = [message for message in caplog.messages if " updates " not in message]
    assert "4 plans that fit (0 do not)" in told and "\n" not in told
    assert said == [f"chosen: {told}"] * 3


def test_the_rank_with_least_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    net, real = make_net(width=24, blocks=6), FreeMemory.measure
    example, loss = torch.zeros(3, 5, dtype=torch.int64), auto._OutputHoldingLoss(loss_of_net)
    question: dict[str, Any] = {"micro_batch": 3, "checkpoint": "none", "precision": None, "offload": None}
    free = plan(net, example, devices=3, machine=CPU, loss=loss, **question)
    needs = {found.strategy.stage: int(found.memory) for found in free.candidates}
    most, least = max(needs.values()), min(needs.values())

    def narrow(*args: Any) -> FreeMemory:
        space = real(*args)
        left = least + 100 if dist.get_rank() == 1 else 10 * most
        return replace(space, node=f"node {dist.get_rank()}", device_bytes=left - space.model_bytes)

    monkeypatch.setattr(FreeMemory, "measure", narrow)
    stages = run_threads(3, lambda rank: zeroshard.report(sharded(net, stage="auto")[0]).chosen)
    assert needs[int(stages[0].removeprefix("stage ")[0])] == least
    assert len(set(stages)) == 1


def refused(rank: int, net: nn.Module, limit: int | None, **options: Any) -> tuple[type, str, bool]:
    model = copy.deepcopy(net)
    try:
        zeroshard.shard(
            model,
            adam(model),
            stage="auto",
            inputs=torch.zeros(3, 5, dtype=torch.int64),
            planning={"machine": CPU, "memory": limit},
        )
    except Exception as error:
        return type(error), str(error), not hasattr(model, "_zeroshard")
    raise AssertionError("it was not refused")


class Decides(nn.Module):
    """Looks at what it has computed, which a plan has not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding(tokens)
        return found if found.sum() > 0 else -found


def test_where_nothing_fits_every_rank_says_what_comes_nearest() -> None:
    found = run_threads(2, refused, make_net(), 1000)
    assert found[0] == found[1]
    kind, told, unharmed = found[0]
    assert kind is NothingFitsError and unharmed and issubclass(kind, ValueError)
    assert "even with stage" in told and "has 1.00 kB" in told
    assert "Try more ranks, shorter samples, a smaller micro-batch, offload='auto' instead of a fixed value" in told


def test_a_model_that_cannot_be_traced_is_refused_on_every_rank() -> None:
    found = run_threads(2, refused, Decides(), None)
    assert found[0] == found[1]
    assert found[0][0] is UntraceableError and "cannot run on tensors without values" in found[0][1]


def test_the_error_says_when_recomputing_would_do() -> None:
    model = on_meta(lambda: gpt(layers=3))
    site = JobTopology(torch.device("cpu"), 1)
    question = {"stage": "auto", "micro_batch": 4, "precision": "fp32"}
    recomputing = choose_plan_for_machine(model, None, site, CPU, checkpoint="auto", **question)
    plans = plan(model, devices=1, machine=CPU, micro_batch=4, checkpoint="recompute", stage=3, precision="fp32")
    tight = replace(CPU, memory=int(plans.candidates[0].memory) + 1)
    assert recomputing.strategy.checkpoint == "none"
    assert (
        choose_plan_for_machine(model, None, site, tight, checkpoint="auto", **question).strategy.checkpoint
        == "recompute"
    )
    with pytest.raises(NothingFitsError, match="With recomputed activations, this fits: stage 3, recomputing"):
        choose_plan_for_machine(model, None, site, tight, **question)


def told_of_different_loops(rank: int, inputs: list[Any], planning: list[dict[str, Any]]) -> tuple[type, str]:
    model = make_net()
    with pytest.raises(ValueError, match="all ranks must pass the same planning options") as caught:
        zeroshard.shard(model, stage="auto", checkpoint="auto", inputs=inputs[rank], planning=planning[rank])
    assert not hasattr(model, "_zeroshard") and not any("forward" in module.__dict__ for module in model.modules())
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "planning", "words"),
    [
        ((3, 3, 2), [{}, {}, {}], ["rank 0 has inputs of shapes (3, 5), micro_batch None", "rank 2 has inputs of sha"]),
        ((3, 2, 3), [{"micro_batch": 3}] * 3, ["rank 1 has inputs of shapes (2, 5), micro_batch 3"]),  # a last batch
        ((3, 3, 3), [{}, {"accumulate": 2}, {}], ["accumulate 1, ", "rank 1 has inputs of shapes (3, 5), ", "ate 2"]),
    ],
)
def test_ranks_that_plan_for_different_loops_are_refused(sizes: Any, planning: Any, words: list[str]) -> None:
    examples = [torch.zeros(size, 5, dtype=torch.int64) for size in sizes]
    found = run_threads(3, told_of_different_loops, examples, planning)
    assert len(set(found)) == 1
    for said in (*words, "an example as large as the largest batch"):
        assert said in found[0][1]


def test_the_least_memory_that_a_rank_is_allowed_counts() -> None:
    net = make_net()

    def body(rank: int) -> str:
        with pytest.raises(NothingFitsError) as caught:
            sharded(net, [None, 1000, 10**12][rank], stage="auto")
        return str(caught.value)

    found = run_threads(3, body)
    assert len(set(found)) == 1 and "has 1.00 kB" in found[0]


@pytest.mark.parametrize("form", ["dict", "Offload", "here"])
def test_a_disk_that_is_given_is_looked_at_and_each_rank_keeps_its_own(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    monkeypatch.chdir(tmp_path)

    def body(rank: int) -> Any:
        directory = "." if form == "here" else tmp_path / f"rank {rank}"
        Path(directory).mkdir(exist_ok=True)
        offload: Any = {"optimizer": "disk", "directory": directory, "threads": rank + 1}
        offload = zeroshard.Offload(**offload) if form == "Offload" else offload
        model, _ = sharded(net, stage="auto", offload=offload)
        return zeroshard.Offload.from_option(offload), model._zeroshard.engine.context.config.offload

    for given, kept_ in run_threads(2, body):
        assert given == kept_


def test_a_chosen_disk_is_in_each_ranks_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    offload = zeroshard.Offload(optimizer="disk", directory=".")

    def on_disk(*args: Any, directory: Any, **question: Any) -> auto.PlanDecision:
        return auto.PlanDecision(auto.Strategy(stage=3, offload=offload), "because").with_directory(directory)

    monkeypatch.setattr(auto, "choose_plan_for_machine", on_disk)

    def body(rank: int) -> Any:
        mine = tmp_path / f"rank {rank}"
        mine.mkdir()
        model, example = copy.deepcopy(net), torch.zeros(3, 5, dtype=torch.int64)
        planning = {"directory": mine}
        zeroshard.shard(model, adam(model), stage=3, offload="auto", inputs=example, planning=planning)
        return mine, model._zeroshard.engine.context.config.offload

    for mine, found in run_threads(2, body):
        assert found == replace(offload, directory=mine)


# -------------------------------------------------------------------------------------- what is left open


def choice_on_paper(model: nn.Module, machine: Machine, **question: Any) -> auto.Strategy:
    ranks, tensor = question.pop("ranks", 8), question.pop("tensor", 1)
    asked = {"stage": "auto", "offload": None, "micro_batch": 2, "precision": "bf16", **question}
    return choose_plan_for_machine(
        model, None, JobTopology(torch.device("cuda"), ranks, tensor), machine, **asked
    ).strategy


@pytest.fixture(scope="module")
def large() -> nn.Module:
    return on_meta(lambda: GPT(GPTConfig(vocab_size=50304, context=256, layers=6, heads=16, width=2048)))


def test_what_is_given_is_kept(large: nn.Module) -> None:
    h100 = Machine.resolve("h100")
    assert [choice_on_paper(large, h100, stage=stage).stage for stage in (0, 2)] == [0, 2]
    for given, stages in (({"parameters": "host"}, {3}), ({"gradients": "host"}, {2, 3}), ("host", {0, 1, 2, 3})):
        choice = choice_on_paper(large, h100, offload=given)
        assert choice.stage in stages and choice.offload == zeroshard.Offload.from_option(given)
    assert choice_on_paper(large, h100, tensor=4).tensor == 4
    assert choice_on_paper(large, h100, stage=2, offload="auto").stage == 2


def test_states_leave_the_device_only_where_they_must(large: nn.Module) -> None:
    assert choice_on_paper(large, Machine.resolve("h100"), offload="auto", ranks=1).offload is None
    tight = choice_on_paper(large, Machine.resolve("h100", memory="3GB"), offload="auto", ranks=1)
    assert tight.offload is not None and "host" in tight.offload.optimizer


def test_states_rest_on_disk_only_where_a_directory_is_named(large: nn.Module, tmp_path: Path) -> None:
    poor = Machine.resolve("h100", memory="3GB", host_memory="5GB")
    with pytest.raises(NothingFitsError, match="host memory"):
        choice_on_paper(large, poor, offload="auto", ranks=1)
    choice = choice_on_paper(large, poor, offload="auto", ranks=1, directory=tmp_path)
    assert choice.offload is not None and choice.offload.needs_disk and choice.offload.directory == tmp_path


def test_on_a_cpu_what_is_offloaded_takes_the_same_memory() -> None:
    model, site = on_meta(gpt), JobTopology(torch.device("cpu"), 2)
    question = {"stage": 3, "offload": "host", "micro_batch": 2, "precision": "fp32"}
    found = plan(model, devices=2, machine=CPU, **{**question, "offload": ["host"]}, checkpoint="none").candidates[0]
    both = int(found.memory + found.footprint.host) + 1
    assert (
        choose_plan_for_machine(model, None, site, replace(CPU, memory=both), **question).strategy.offload is not None
    )
    with pytest.raises(NothingFitsError):
        choose_plan_for_machine(model, None, site, replace(CPU, memory=both - 1000), **question)


def test_accumulation_and_clipping_are_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(auto, "plan", lambda *args, **kwargs: asked.append(kwargs) or plan(*args, **kwargs))
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    zeroshard.shard(
        model,
        optimizer,
        stage="auto",
        inputs=torch.zeros(3, 5, dtype=torch.int64),
        planning={"accumulate": 4, "clip": False},
    )
    assert (asked[0]["batch"], asked[0]["micro_batch"], asked[0]["clip"]) == (12, 3, False)
    assert asked[0]["optimizer_states"] == 1 and asked[0]["precision"] is None


def test_a_mesh_is_planned_with_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(auto, "plan", lambda *args, **kwargs: asked.append(kwargs) or plan(*args, **kwargs))
    model = gpt()

    def body(rank: int) -> str:
        mesh = mesh_of((2, 1, 2), "replicate shard tensor")
        mine = copy.deepcopy(model)
        mine, optimizer = zeroshard.shard(mine, adam(mine), mesh=mesh, stage="auto", inputs=(TOKENS, TOKENS))
        mine(TOKENS, TOKENS).backward()
        optimizer.step()
        return zeroshard.report(mine).chosen

    chosen = run_threads(4, body)
    assert len(set(chosen)) == 1 and "tensor 2" in chosen[0]
    assert [asked[0][name] for name in ("devices", "tensor", "replicas", "batch")] == [4, 2, 2, 8]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ["hybrid", "hierarchical", "full"]),
        ({"partition": "full"}, ["full"]),
        (
            {"planning": {"accumulate": 2}},
            ["hybrid", "hierarchical", "full", "hierarchical-gradients", "inner-gradients"],
        ),
    ],
)
def test_a_mesh_of_two_data_axes_is_planned_with_every_partition_that_is_open(
    given: dict[str, Any], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(auto, "plan", lambda *args, **kwargs: tried.append(plan(*args, **kwargs)) or tried[-1])
    model = gpt()

    def body(rank: int) -> str:
        mine, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2, 2))
        options = {"stage": "auto", "inputs": (TOKENS, TOKENS), **given}
        mine, optimizer = zeroshard.shard(mine, adam(mine), mesh=mesh, **options)
        mine(TOKENS, TOKENS).backward()
        optimizer.step()
        return mine._zeroshard.engine.context.config.partition

    chosen = run_threads(4, body)
    assert len(set(chosen)) == 1 and chosen[0] in wanted
    assert {candidate.strategy.partition for candidate in tried[0].candidates} == set(wanted)


def test_an_example_is_taken_as_it_is() -> None:
    class Graph(nn.Module):
        """Nodes and edges, which have no first dimension in common."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(nodes).index_add(0, edges[1], self.linear(nodes)[edges[0]])

    model, _ = zeroshard.shard(Graph(), stage="auto", inputs=(torch.ones(5, 4), torch.zeros(2, 9, dtype=torch.int64)))
    assert "micro-batch 1" in zeroshard.report(model).chosen
    model, _ = zeroshard.shard(gpt(), stage="auto", planning={"micro_batch": 3, "sequence": 8})
    assert "micro-batch 3" in zeroshard.report(model).chosen


# ------------------------------------------------------------------------------------- recomputed already


def test_blocks_that_are_recomputed_are_planned_as_such() -> None:
    model = gpt()
    plain = trace_model(model, micro_batch=2, checkpoint="recompute", device_kind="cpu")
    zeroshard.checkpoint_activations(model)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    paper, word = strip_checkpointing(model)
    assert word == "recompute" and paper is not model
    assert trace_model(paper, micro_batch=2, checkpoint="recompute", device_kind="cpu") == plain
    assert not any("forward" in module.__dict__ for module in paper.modules())  # so that not to recompute can be chosen
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before  # the user's own
    assert all(parameter.is_meta for parameter in paper.parameters())
    assert strip_checkpointing(zeroshard.checkpoint_activations(model, offload=True))[1] == "host"
    assert strip_checkpointing(zeroshard.checkpoint_activations(model, partition=False), tensor=1)[1] == "recompute"


@pytest.mark.parametrize(
    ("options", "tensor"),
    [({"blocks": 2}, 1), ({"policy": [torch.ops.aten.mm.default]}, 1), ({"partition": False}, 2)],
    ids=["every second", "policy", "whole inputs"],
)
def test_blocks_that_keep_something_else_stay_as_they_are(options: dict[str, Any], tensor: int) -> None:
    model = gpt(layers=4)
    whole, least = (
        _kept(trace_model(model, micro_batch=2, checkpoint=word, device_kind="cpu")) for word in ("none", "recompute")
    )
    zeroshard.checkpoint_activations(model, **options)
    paper, word = strip_checkpointing(model, tensor)
    assert word == "none"
    found = _kept(trace_model(paper, micro_batch=2, device_kind="cpu"))
    assert least * 0.8 < found < whole
    wrapped = [module for module in paper.modules() if isinstance(module.__dict__.get("forward"), CheckpointedForward)]
    assert len(wrapped) == (2 if "blocks" in options else 4)


def _kept(traced: Any) -> float:
    """The most that is held at once."""
    held = most = 0.0
    for op in traced.ops:
        held += op.allocated_bytes - op.freed_bytes
        most = max(most, held)
    return most + sum(traced.kept_input_bytes)


def test_checkpointing_is_chosen_and_done() -> None:
    def shard(memory: int) -> nn.Module:
        model = gpt(layers=4)
        zeroshard.shard(
            model,
            adam(model, fused=True),
            checkpoint="auto",
            inputs=(TOKENS, TOKENS),
            planning={"machine": CPU, "memory": memory},
        )
        return model

    model = shard(10**9)
    assert not any("forward" in block.__dict__ for block in model.blocks)
    needs = plan(
        gpt(layers=4), devices=1, machine=CPU, micro_batch=4, checkpoint="recompute", stage=3, precision="fp32"
    )
    model = shard(int(needs.candidates[0].memory) + 1)
    assert all(isinstance(block.__dict__["forward"], CheckpointedForward) for block in model.blocks)
    model(TOKENS, TOKENS).backward()


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stage": 2, "inputs": torch.ones(1, 4)}, ValueError, "inputs is for planning, and nothing is left to a plan"),
        ({"planning": {"clip": True}}, ValueError, "planning is for planning, and nothing is left to a plan"),
        ({"stage": "auto"}, ValueError, "the number of samples per forward is not known: pass inputs="),
        ({"stage": "auto", "inputs": lambda batch: torch.ones(batch, 4)}, ValueError, "planning={'micro_batch'"),
        ({"stage": "auto", "planning": {"micro_batch": 2}}, ValueError, "the arguments of Linear are not known"),
        (
            {"stage": "auto", "inputs": torch.ones(3, 4), "planning": {"micro_batch": 2}},
            ValueError,
            r"in the example inputs \(3\), got 2",
        ),
        (
            {"stage": "auto", "planning": {"micro_batch": 0}},
            ValueError,
            "micro_batch must be a positive integer, got 0",
        ),
        (
            {"stage": "auto", "planning": {"memmory": 2}},
            TypeError,
            "unknown planning option 'memmory': the options are",
        ),
        (
            {"stage": "auto", "inputs": torch.ones(1, 4), "planning": {"machine": "h1000"}},
            ValueError,
            "unknown machine",
        ),
        (
            {"stage": "auto", "inputs": torch.ones(1, 4), "planning": {"machine": "h100"}},
            ValueError,
            "the kind that the ranks run on",
        ),
        (
            {"stage": "auto", "inputs": torch.ones(1, 4), "planning": {"memory": "much"}},
            ValueError,
            "memory is a number",
        ),
        ({"stage": "auto", "inputs": torch.ones(1, 5)}, UntraceableError, "Linear raised RuntimeError"),
        (
            {"stage": "auto", "inputs": torch.ones(1, 4), "planning": {"loss": 5}},
            TypeError,
            "loss must be a function of the model's output, or None, got 5",
        ),
        ({"stage": "autos"}, ValueError, "stage must be 0, 1, 2 or 3, got 'autos'"),
        ({"checkpoint": "host"}, ValueError, "checkpoint is None or 'auto', got 'host'"),
        ({"stage": "auto", "stagee": 2}, TypeError, "did you mean 'stage'"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(error, match=words):
        zeroshard.shard(model, **options)
    assert not hasattr(model, "_zeroshard")


def test_auto_never_reaches_the_engine() -> None:
    with pytest.raises(ValueError, match=r"got 'auto': only zeroshard.shard\(\) accepts it"):
        zeroshard.Config(stage="auto")  # type: ignore[arg-type]
    model, _ = zeroshard.shard(gpt(), stage="auto", offload="auto", inputs=(TOKENS, TOKENS))
    assert (
        model._zeroshard.engine.context.config.stage in (0, 1, 2, 3)
        and model._zeroshard.engine.context.config.offload is None
    )


def test_a_rank_that_leaves_nothing_open_is_missed() -> None:
    def body(rank: int) -> None:
        model = make_net()
        example = torch.zeros(3, 5, dtype=torch.int64)
        open_ = {"stage": "auto", "inputs": example} if rank else {"stage": 3}
        zeroshard.shard(model, adam(model), timeout=1.0, **open_)

    with pytest.raises(RanksFailed, match="RanksDisagreeError"):
        run_threads(2, body)


# ------------------------------------------------------------------------------------------ what is there

SPACE = FreeMemory(
    "a", "cpu", "cpu", "cpu", device_bytes=8 * 10**9, model_bytes=10**8, host_bytes=8 * 10**9, disk_bytes=0
)


def test_ranks_of_a_node_share_its_memory() -> None:
    context = Machine.resolve("cpu").context
    found = machine_from_free_memory([SPACE, SPACE, replace(SPACE, node="b")], 3)
    assert (found.devices, found.memory) == (2, 4 * 10**9 + 10**8 + context)
    assert machine_from_free_memory([SPACE], 4).memory == 2 * 10**9 + 10**8 + context  # one rank's word for all
    assert (
        machine_from_free_memory([replace(SPACE, device_bytes=0, host_bytes=0)], 4).memory
        == Machine.resolve("cpu").memory
    )  # nobody tells
    assert machine_from_free_memory([SPACE], 2, memory="2GB").memory == 2 * 10**9
    assert (
        machine_from_free_memory([SPACE], 1, memory="20GB").memory == 8 * 10**9 + 10**8 + context
    )  # no more than there is
    assert (
        machine_from_free_memory(
            [SPACE], 1, requested_machine=Machine.resolve("cpu", memory="1GB", host_memory="3GB")
        ).memory
        == 10**9
    )
    assert (
        machine_from_free_memory(
            [SPACE], 1, requested_machine=Machine.resolve("cpu", memory="1GB", host_memory="3GB")
        ).host_memory
        == 3 * 10**9
    )


def test_gpus_have_their_own_memory_and_share_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpu = FreeMemory(
        "a", "first", "cuda", "h100", device_bytes=50 * 10**9, model_bytes=0, host_bytes=10**12, disk_bytes=7 * 10**11
    )
    found = machine_from_free_memory(
        [gpu, replace(gpu, device_id="second", device_bytes=40 * 10**9, disk_bytes=5 * 10**11)], 2
    )
    context = Machine.resolve("h100").context
    assert (found.devices, found.memory, found.disk) == (2, 40 * 10**9 + context, 5 * 10**11)
    assert found.host_memory == 10**12 and found.flops == Machine.resolve("h100").flops
    assert machine_from_free_memory([gpu], 64).devices == 4
    assert machine_from_free_memory([gpu, gpu], 2).memory == 25 * 10**9 + context  # two ranks on one


def test_a_gpu_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (
        ("get_device_name", "NVIDIA H200"),
        ("mem_get_info", (60 * 10**9, 100 * 10**9)),
        ("memory_reserved", 20 * 10**9),
        ("memory_allocated", 5 * 10**9),
        ("get_per_process_memory_fraction", 1.0),
        ("get_device_properties", SimpleNamespace(uuid="GPU-7")),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    device, model = torch.device("cuda", 0), on_meta(gpt)
    found = FreeMemory.measure(device, model, tmp_path / "not there yet")
    assert (found.device_id, found.device_kind, found.machine_spec) == ("GPU-7", "cuda", "h200")
    assert (found.device_bytes, found.model_bytes) == (75 * 10**9, 0)
    assert found.disk_bytes > 0
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some other GPU")
    assert (FreeMemory.measure(device, model).device_bytes, FreeMemory.measure(device, model).machine_spec) == (
        45 * 10**9,
        "a100",
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 90 * 10**9)
    assert (
        machine_from_free_memory([FreeMemory.measure(device, model)], 1).memory == Machine.resolve("a100").context + 1
    )  # others have it all


def test_measured_rates_count_more_than_a_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = torch.device("cpu")
    assert FreeMemory.measure(cpu, gpt()).machine_spec == "cpu"
    cache.write_machine(cache.local_machine_name("cpu"), Machine.resolve("cpu", bandwidth=123e9).to_json())
    found = machine_from_free_memory([FreeMemory.measure(cpu, gpt())], 1)
    assert found.bandwidth == 123e9


def test_a_decision_survives_being_sent() -> None:
    offload = zeroshard.Offload(optimizer={"host": 0.5, "disk": 0.5}, parameters="host", directory=Path("x"))
    said = auto.PlanDecision(auto.Strategy(stage=3, offload=offload, checkpoint="host"), "because")
    found = auto.PlanDecision.from_json(said.as_json)
    assert found.strategy.offload == replace(offload, directory="x") and json.loads(said.as_json)["why"] == "because"
    with pytest.raises(RuntimeError, match="something odd"):
        auto.PlanDecision.from_json(json.dumps({"kind": "OddError", "error": "something odd"}))


def test_planning_has_defaults() -> None:
    assert PlanningOptions.from_mapping(None) == PlanningOptions.from_mapping({}) == PlanningOptions()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("limit", [1.2e9, 1.5e9, 2e9, 4e9])
def test_on_a_gpu_what_is_chosen_fits(limit: float) -> None:
    """The allocator itself refuses more: a choice that does not fit would raise."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with torch.device("cuda"):
            model = GPT(GPTConfig(vocab_size=8192, context=512, layers=6, heads=8, width=512))
        tokens = torch.zeros(16, 512, dtype=torch.int64, device="cuda")
        model, optimizer = zeroshard.shard(
            model,
            adam(model, fused=True),
            stage="auto",
            offload="auto",
            checkpoint="auto",
            precision="bf16",
            inputs=(tokens, tokens),
        )
        for _ in range(4):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
