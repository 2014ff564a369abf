"""A mesh of replicate × shard: states partitioned inside, gradients summed across, the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from plain import assert_close, batches, full_parameters, net_loss, run_plain, split
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import make_net

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig

STAGES = [0, 1, 2, 3]
SHAPES = [(2, 2), (1, 4), (4, 1)]
CONFIG = GPTConfig(vocab_size=1024, context=64, layers=3, heads=4, width=96)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(rank: int, model: nn.Module, stage: int, shape: tuple[int, ...], max_norm: float | None, options: dict):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = copy.deepcopy(model)
    model, optimizer = zeroshard.shard(model, adam(model), mesh=mesh, stage=stage, **options)
    norms = []
    for batch in batches(3):
        net_loss(model, split(batch, rank, 4)).backward()
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), norms, zeroshard.report(model)


@pytest.mark.parametrize(("shape", "bucket_size"), [((2, 2), 2**25), ((2, 2), 128), ((1, 4), 128), ((4, 1), 2**25)])
@pytest.mark.parametrize("stage", STAGES)
def test_training_on_a_mesh_gives_the_plain_numbers(stage: int, shape: tuple[int, ...], bucket_size: int) -> None:
    model = make_net()
    wanted = run_plain(model, adam, batches(3))
    for parameters, _, _ in run_threads(4, train, model, stage, shape, None, {"bucket_size": bucket_size}):
        assert_close(parameters, wanted, 1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_training_on_a_mesh_of_gloo_processes_gives_the_plain_numbers(stage: int) -> None:
    model = make_net()
    wanted = run_plain(model, adam, batches(3))
    for parameters, _, _ in run_processes(4, train, model, stage, (2, 2), None, {}):
        assert_close(parameters, wanted, 1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_on_a_mesh_are_clipped_by_the_plain_norm(stage: int) -> None:
    model = make_net()
    plain = copy.deepcopy(model)
    optimizer = adam(plain)
    wanted = []
    for batch in batches(3):
        net_loss(plain, batch).backward()
        wanted.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(wanted) > 0.5  # each step clips
    for parameters, norms, _ in run_threads(4, train, model, stage, (2, 2), 0.5, {}):
        assert norms == pytest.approx(wanted, rel=1e-5)
        assert_close(parameters, {name: p.detach() for name, p in plain.named_parameters()}, 1e-5)


def gpt_report(rank: int, stage: int, shape: tuple[int, ...]):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"precision": "bf16", "init_fn": lambda module: None}  # zeros do: no number is looked at
    model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, stage=stage, **options)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()
    return zeroshard.report(model)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", STAGES)
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
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, _ = zeroshard.shard(copy.deepcopy(model), mesh=mesh, stage=3)
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
        ours = copy.deepcopy(model)
        ours, optimizer = zeroshard.shard(ours, adam(ours), mesh=mesh, stage=3)
        for batch in batches(3, seed=job):
            net_loss(ours, split(batch, place, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(ours)

    wanted = [run_plain(model, adam, batches(3, seed=job)) for job in (0, 1)]
    for rank, parameters in enumerate(run_threads(4, body)):
        assert_close(parameters, wanted[rank // 2], 1e-5)


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
