"""A mesh of replicate × shard: states partitioned inside, gradients summed across, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from plain import (
    adamw,
    assert_close,
    assert_same_training,
    batches,
    clipped_steps,
    full_parameters,
    run_plain,
    run_rank,
    sharded,
    sharded_gpt,
    train_steps,
)
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import make_net

import zeroshard
from zeroshard.models.gpt import GPTConfig

STAGES = [0, 1, 2, 3]
SHAPES = [(2, 2), (1, 4), (4, 1)]
CONFIG = GPTConfig(vocab_size=1024, context=64, layers=3, heads=4, width=96)


@pytest.mark.parametrize(("shape", "bucket_size"), [((2, 2), 2**25), ((2, 2), 128), ((1, 4), 128), ((4, 1), 2**25)])
@every_stage
def test_training_on_a_mesh_gives_the_plain_numbers(stage: int, shape: tuple[int, ...], bucket_size: int) -> None:
    options = {"mesh": shape, "bucket_size": bucket_size}
    assert_same_training(4, make_net(), adamw, batches(3), stages=[stage], **options)


@at_stages(2, 3)
def test_training_on_a_mesh_of_gloo_processes_gives_the_plain_numbers(stage: int) -> None:
    options = {"mesh": (2, 2), "run": run_processes}
    assert_same_training(4, make_net(), adamw, batches(3), stages=[stage], **options)


@every_stage
def test_gradients_on_a_mesh_are_clipped_by_the_plain_norm(stage: int) -> None:
    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
        norms = clipped_steps(model, optimizer, data, 0.5)
        assert min(norms) > 0.5  # each step clips
        return norms

    assert_same_training(4, make_net(), adamw, batches(3), loop, stages=[stage], mesh=(2, 2))


def gpt_report(rank: int, stage: int, shape: tuple[int, ...]):
    model, optimizer = sharded_gpt(CONFIG, shape, stage=stage)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()
    return zeroshard.report(model)


@pytest.mark.parametrize("shape", SHAPES)
@every_stage
def test_memory_is_the_formula_of_the_inner_axis_and_traffic_adds_the_outer_sum(stage: int, shape) -> None:
    outer, inner = shape
    states = {0: 16, 1: 4 + 12 / inner, 2: 2 + 14 / inner, 3: 14 / inner if inner > 1 else 16}[stage]
    within = {0: 0, 1: 2, 2: 2, 3: 3}[stage] if inner > 1 else 0
    across = 2 / inner if outer > 1 else 0  # an all-reduce of what each rank owns
    if stage == 0:  # plain data parallelism over all ranks, one axis after the other
        across = 2 * ((outer > 1) + (inner > 1))
    psi = CONFIG.parameters
    for report in run_threads(4, gpt_report, stage, shape):
        assert report.ranks == 4
        assert states * psi <= report.states < states * psi * 1.005
        wanted = (within + across) * psi * 2  # bytes, bf16
        assert wanted <= report.communicated < wanted * 1.005 + 2**10


def test_writing_rank_counts_along_the_mesh() -> None:
    def body(rank: int, model):
        model, _ = sharded(model, mesh=(2, 2), stage=3)
        with zeroshard.gathered(model, write_rank=2), torch.no_grad():
            for p in model.parameters():
                p.fill_(rank)
        return full_parameters(model)

    for parameters in run_threads(4, body, make_net()):
        assert all(value.eq(2).all() for value in parameters.values())


def test_two_meshes_of_one_axis_train_two_models_side_by_side() -> None:
    model = make_net()

    def body(rank: int):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shard"))["shard"]
        job, place = divmod(rank, 2)
        return run_rank(place, 2, model, adamw, batches(3, seed=job), train_steps, {"mesh": mesh, "stage": 3})

    wanted = [run_plain(model, adamw, batches(3, seed=job)) for job in (0, 1)]
    for rank, parameters in enumerate(run_threads(4, body)):
        assert_close(parameters, wanted[rank // 2])


def test_a_mesh_of_three_axes_is_refused_with_what_is_wanted() -> None:
    def body(rank: int):
        with pytest.raises(ValueError, match=r"one axis \(shard\) or two \(replicate, shard\) for data"):
            zeroshard.shard(make_net(), mesh=init_device_mesh("cpu", (1, 2, 2)))

    run_threads(4, body)


@pytest.mark.guarantee("Axes of the mesh")
@pytest.mark.parametrize("name", ["pipeline", "pp", "ep", "cp", "context", "stage"])
def test_an_axis_that_is_not_data_parallel_is_refused_and_its_sub_mesh_named(name: str) -> None:
    def body(rank: int) -> None:
        for names in ((name, "shard"), ("shard", name)):
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
            with pytest.raises(ValueError, match=rf"ranks along '{name}' may .* mesh\['shard'\]"):
                zeroshard.shard(make_net(), mesh=mesh)
            zeroshard.shard(make_net(), mesh=mesh["shard"])
        for names in (("dp_replicate", "dp_shard"), ("data", "tp"), ("dp", "tensor")):
            zeroshard.shard(make_net(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=names))

    run_threads(2, body)
