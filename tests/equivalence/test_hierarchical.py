"""States partitioned over both axes of a mesh, parameters over one or both: the numbers, memory and bytes by axis."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import at_stages
from plain import (
    ONE_BATCH,
    adamw,
    assert_close,
    assert_equal,
    assert_same_training,
    batches,
    clipped_steps,
    full_parameters,
    masters,
    mesh_of,
    net_loss,
    run_ranks,
    run_stages,
    sgd,
    sharded,
    sharded_gpt,
    shares,
    split,
    take_step,
    token_step,
    train_step,
    train_steps,
)
from ranks import run_processes, run_threads
from rules import Lamb
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zoo import InOrder, built, make_net

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.planner import predict_memory

CONFIG = GPTConfig(vocab_size=1024, context=64, layers=3, heads=4, width=96)
PARTITIONS = ["full", "hierarchical"]

pytestmark = pytest.mark.usefixtures("tried_once")


@pytest.mark.parametrize(("shape", "bucket_size"), [((2, 2), 2**25), ((2, 2), 128), ((1, 4), 128), ((4, 1), 128)])
@pytest.mark.parametrize(
    ("stage", "partition"), [(0, "full"), (1, "full"), (2, "full"), (3, "full"), (3, "hierarchical")]
)
def test_training_gives_the_plain_numbers(stage: int, partition: str, shape, bucket_size: int) -> None:
    if (stage, partition, shape) == (3, "hierarchical", (4, 1)):
        pytest.skip("parameters cannot be partitioned over one rank: see below")
    options = {"mesh": shape, "partition": partition, "bucket_size": bucket_size}
    assert_same_training(4, make_net(), adamw, batches(3), stages=[stage], **options)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_gloo_processes_give_the_plain_numbers(partition: str) -> None:
    options = {"mesh": (2, 2), "partition": partition, "run": run_processes}
    assert_same_training(4, make_net(), adamw, batches(3), stages=[3], **options)


def skip_on_one_rank(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for x in data:
        take_step(optimizer, model(x, (0, 1, 3) if x[0, 0] == 1 else None).square().sum())


@at_stages(1, 2)
def test_ranks_that_skip_modules_do_not_mix_up_second_hops(stage: int) -> None:
    model = built(lambda: InOrder(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    data = [torch.arange(4.0)[:, None].expand(4, 8)] * 3
    options = {"run": run_processes, "mesh": (2, 2), "stage": stage, "units": (nn.Sequential,), "timeout": 20}
    wanted = run_ranks(4, model, sgd, data, skip_on_one_rank, **options)
    assert_equal(run_ranks(4, model, sgd, data, skip_on_one_rank, **options, partition="full"), wanted)


@pytest.mark.parametrize("partition", ["hybrid", *PARTITIONS])
def test_a_mesh_that_process_groups_would_sort_is_an_error(partition: str) -> None:
    """Over [0, 2] and [1, 3] of this mesh, ranks 0 and 2 would be replicas although their shards differ."""

    def body(rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor([[0, 3], [2, 1]]))
        with pytest.raises(ValueError, match=r"must ascend along each of its axes, got \[\[0, 3\], \[2, 1\]\]"):
            zeroshard.shard(make_net(), mesh=mesh, partition=partition)
        mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
        zeroshard.shard(make_net(), mesh=mesh, partition=partition)

    run_threads(4, body)


@pytest.mark.guarantee("Partitions of a mesh")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"offload": "host"}, {"bucket_size": 128}])
def test_all_partitions_that_reduce_alike_give_the_same_bits(options: dict[str, Any]) -> None:
    """Over two axes of two ranks, sums have one order: inside the inner axis first."""
    model = make_net(blocks=2)
    wanted = None
    for partition in ["hybrid", *PARTITIONS]:
        options = {**options, "mesh": (2, 2), "partition": partition}
        for found in run_stages(4, model, adamw, batches(3), stages=(2, 3), **options).values():
            wanted = wanted or found
            assert_equal(found, wanted)


# ------------------------------------------------------------------------------------------------------------- habits
# What loops do between steps. After each of them, the ranks have to notice that their inner shards are stale.


def accumulate(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        with zeroshard.no_sync(model):
            token_step(model, first)
        train_step(model, optimizer, second)


def edit(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        train_steps(model, optimizer, [batch])
        with zeroshard.gathered(model, write_rank=1), torch.no_grad():
            model.head.weight.mul_(0.9)


def load_weights(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    with zeroshard.gathered(model):
        start = copy.deepcopy(model.state_dict())
    for batch in data:
        train_steps(model, optimizer, [batch])
    with zeroshard.gathered(model, write_rank=0):
        model.load_state_dict({name: value + 0.01 for name, value in start.items()})
    train_steps(model, optimizer, data)


def average(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    ema = zeroshard.EMA(model, 0.5)
    for batch in data:
        train_steps(model, optimizer, [batch])
        ema.update()
        with ema.swapped(), torch.no_grad():
            averaged = net_loss(model, data[0]).item()
        with torch.no_grad():
            assert net_loss(model, data[0]).item() != averaged
    ema.copy_to_model()


def evaluate_between(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        with torch.no_grad():
            net_loss(model, batch)
        (net_loss(model, batch) + net_loss(model, batch)).backward()
        optimizer.step()
        with torch.no_grad():
            net_loss(model, batch)
        optimizer.zero_grad()


def move_states(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        train_steps(model, optimizer, [batch])
        zeroshard.offload_states(model)
        assert zeroshard.report(model).total.now == 0
        zeroshard.reload_states(model)


def recompute(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    zeroshard.checkpoint_activations(model, ["blocks.*"])
    train_steps(model, optimizer, data)


def raise_in_step(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    train_steps(model, optimizer, data)
    handle = optimizer.inner.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_steps(model, optimizer, data)
    handle.remove()
    train_steps(model, optimizer, data)


HABITS = [train_steps, accumulate, edit, load_weights, average, evaluate_between, move_states, recompute, raise_in_step]
OPTIONS = [{}, {"precision": "bf16", "offload": "host"}]


def run_habit(habit: Any, make: Any = adamw, **options: Any) -> dict[str, torch.Tensor]:
    return run_ranks(4, make_net(blocks=2), make, batches(4), habit, mesh=(2, 2), stage=3, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=["fp32", "bf16, host"])
@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_loops_give_the_bits_of_a_hybrid_mesh(habit: Any, options: dict[str, Any]) -> None:
    """In every habit each partition, with one kind of options, and over all habits each partition with both kinds."""
    partition = PARTITIONS[(HABITS.index(habit) + OPTIONS.index(options)) % 2]
    assert_equal(run_habit(habit, partition=partition, **options), run_habit(habit, **options))


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters())


def adamw_of_a_half(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of some parameters; the others are frozen or have none."""
    model.embedding.requires_grad_(False)
    return adamw(model.blocks[1:])


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [adamw(model.blocks), sgd(nn.ModuleList([model.embedding, model.head]))]


def step_in_turns(model: Any, optimizers: Any, data: list[torch.Tensor]) -> None:
    for number, batch in enumerate(data):
        token_step(model, batch)
        optimizers[number % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(("make", "habit"), [(lamb, train_steps), (adamw_of_a_half, train_steps), (two, step_in_turns)])
def test_optimizers_of_any_kind_give_the_bits_of_a_hybrid_mesh(make: Any, habit: Any) -> None:
    wanted = run_habit(habit, make)
    for partition in PARTITIONS:
        assert_equal(run_habit(habit, make, partition=partition), wanted)


def test_a_tensor_axis_gives_the_bits_of_a_hybrid_mesh() -> None:
    model = built(lambda: GPT(GPTConfig(vocab_size=64, context=8, layers=1, heads=2, width=16)))

    def adafactor(model: nn.Module) -> torch.optim.Optimizer:  # updates whole parameters
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)

    def body(rank: int, partition: str):
        mesh = mesh_of((2, 2, 2), "replicate shard tensor")
        ours, optimizer = sharded(model, adafactor, mesh, partition=partition)
        for batch in batches(3, rows=4, length=9, vocabulary=64):
            tokens = split(batch, rank // 2, 4)
            take_step(optimizer, ours(tokens[:, :-1], tokens[:, 1:]))
        return masters(ours)

    wanted = run_threads(8, body, "hybrid")[0]
    for partition in PARTITIONS:
        for found in run_threads(8, body, partition):
            assert_close(found, wanted, 0)


def test_gradients_are_clipped_by_the_plain_norm() -> None:
    loop = partial(clipped_steps, max_norm=0.5)
    for partition in PARTITIONS:
        assert_same_training(4, make_net(), adamw, batches(3), loop, stages=[3], mesh=(2, 2), partition=partition)


# -------------------------------------------------------------------------------------------------------- checkpoints

LAYOUTS: dict[str, tuple[int, tuple[int, ...] | None, dict[str, Any]]] = {
    "two ranks": (2, None, {"stage": 2}),
    "hybrid": (4, (2, 2), {"stage": 3}),
    "full": (4, (2, 2), {"stage": 3, "partition": "full"}),
    "hierarchical": (4, (2, 2), {"stage": 3, "partition": "hierarchical"}),
    "six ranks": (6, (3, 2), {"stage": 3, "partition": "hierarchical"}),
}


@pytest.mark.parametrize(
    ("here", "there"),
    [("hierarchical", there) for there in LAYOUTS]
    + [(here, "hierarchical") for here in LAYOUTS if here != "hierarchical"],
)
def test_checkpoints_load_anywhere(here: str, there: str, tmp_path: Path) -> None:
    model = make_net()

    def body(rank: int, layout: str, is_saved: bool):
        world, shape, options = LAYOUTS[layout]
        ours, optimizer = sharded(model, adamw, mesh=shape, **options)
        train_steps(ours, optimizer, shares(batches(2, seed=int(is_saved)), rank, world))
        if is_saved:
            zeroshard.save(tmp_path / "saved", ours, optimizer)
        else:
            zeroshard.load(tmp_path / "saved", ours, optimizer)
        with torch.no_grad():
            loss = net_loss(ours, ONE_BATCH).item()
        return full_parameters(ours), copy.deepcopy(optimizer.state_dict()["state"]), loss

    wanted = run_threads(LAYOUTS[here][0], body, here, True)[0]
    for parameters, states, loss in run_threads(LAYOUTS[there][0], body, there, False):
        assert_close(parameters, wanted[0], 0)
        torch.testing.assert_close(states, wanted[1], rtol=0, atol=0)
        assert loss == wanted[2]


# ---------------------------------------------------------------------------------------------------- memory and bytes


def gpt_report(rank: int, shape: tuple[int, ...], options: dict[str, Any], backwards: int = 1):
    model, optimizer = sharded_gpt(CONFIG, shape, **options)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(backwards):
            model(tokens, tokens).backward()
        optimizer.step()
    return zeroshard.report(model)


# partition, backwards a step: bytes of states by parameter; Ψ gathered inside and between, reduced inside and between
ROWS = [
    ("full", 1, 14 / 4, (2, 2 / 2, 1, 1 / 2)),
    ("hierarchical", 1, 14 / 4 + 2 / 2, (2, 1 / 2, 1, 1 / 2)),
    ("hierarchical", 3, 14 / 4 + 2 / 2, (6, 1 / 2, 3, 3 / 2)),
]


@pytest.mark.parametrize(("partition", "backwards", "states", "traffic"), ROWS)
def test_memory_and_bytes_by_axis_are_the_formula(partition: str, backwards: int, states: float, traffic) -> None:
    psi = CONFIG.parameters
    with torch.device("meta"):
        model = GPT(CONFIG)
    options = {"stage": 3, "partition": partition}
    foretold = predict_memory(model, ranks=4, replicas=2, precision="bf16", **options).state_bytes
    kinds = ("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter")
    for report in run_threads(4, gpt_report, (2, 2), options, backwards):
        assert states * psi <= report.states < states * psi * 1.01
        assert 0 <= report.states - foretold < 100  # step counts
        for kind, times in zip(kinds, traffic, strict=True):
            assert times * 2 * psi <= report.collectives[kind].bytes < times * 2 * psi * 1.01, kind


def test_what_cannot_be_partitioned_so_is_an_error() -> None:
    def body(rank: int) -> None:
        with pytest.raises(
            ValueError, match=r"inner axis of the mesh, which has one rank: use stage=2, or partition='f"
        ):
            zeroshard.shard(make_net(), mesh=init_device_mesh("cpu", (4, 1)), partition="hierarchical")
        with pytest.raises(ValueError, match=r"keeps parameters on the device.*use partition='full' to offload them"):
            offload = {"optimizer": "host", "parameters": "host"}
            model = make_net()
            mesh = init_device_mesh("cpu", (2, 2))
            zeroshard.shard(model, adamw(model), mesh=mesh, partition="hierarchical", offload=offload, stage=3)
        with pytest.raises(
            ValueError, match=r"partition must be one of 'hybrid', 'hierarchical', 'full', .*, got 'inner'"
        ):
            zeroshard.shard(make_net(), partition="inner")

    run_threads(4, body)
