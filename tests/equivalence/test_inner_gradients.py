"""Gradients partitioned over the inner axis of a mesh until the last backward, optimizer states over both."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import (
    ONE_BATCH,
    Tensors,
    adamw,
    assert_close,
    assert_equal,
    batches,
    full_parameters,
    net_loss,
    run_plain,
    run_ranks,
    scaled,
    sgd,
    sharded,
    sharded_gpt,
    shares,
    split,
    take_step,
    token_step,
    train_steps,
)
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from zoo import make_net

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.planner import predict_memory

CONFIG = GPTConfig(vocab_size=1024, context=64, layers=3, heads=4, width=96)
PARTITIONS = ["hierarchical-gradients", "inner-gradients"]


def in_parts(model: Any, optimizer: Any, data: list[torch.Tensor], backwards: int) -> None:
    for batch in data:
        for part in batch.chunk(backwards):
            (scaled(optimizer, net_loss(model, part)) / backwards).backward()
        optimizer.step()
        optimizer.zero_grad()


def run_parts(parts: int, model: nn.Module | None = None, **options: Any) -> Tensors:
    """Train on a mesh of 2 × 2, with so many backwards a step; ``backwards`` is the option of shard()."""
    loop = partial(in_parts, backwards=parts)
    options = {"mesh": (2, 2), "stage": 3, **options}
    return run_ranks(4, model or make_net(), adamw, batches(4, rows=24), loop, **options)


LAYOUTS_AND_OPTIONS = [
    (2, (2, 2), {}),
    (3, (2, 2), {"bucket_size": 128}),
    (3, (2, 2), {"backwards": 3}),
    (3, (1, 4), {}),
    (1, (4, 1), {}),
    (0, (4, 1), {}),
]


@pytest.mark.guarantee("Partitions of a mesh")
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("row", range(len(LAYOUTS_AND_OPTIONS)))
def test_training_gives_the_plain_numbers(row: int, backwards: int) -> None:
    stage, shape, options = LAYOUTS_AND_OPTIONS[row]
    # with every row both partitions, with each of them one number of backwards
    options = {"stage": stage, "mesh": shape, "partition": PARTITIONS[(row + backwards // 2) % 2], **options}
    wanted = run_plain(make_net(), adamw, batches(4, rows=24))
    assert_close(run_parts(backwards, **options), wanted)


def test_gloo_processes_give_the_plain_numbers() -> None:
    wanted = run_plain(make_net(), adamw, batches(4, rows=24))
    assert_close(run_parts(3, partition=PARTITIONS[0], run=run_processes), wanted)


@pytest.mark.guarantee("Partitions of a mesh")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"offload": "host"},
        {"bucket_size": 128},
        {"backwards": 1},
        {"backwards": 0},
    ],
    ids=str,
)
def test_one_backward_gives_the_bits_of_a_hybrid_mesh(options: dict[str, Any]) -> None:
    """Over two axes of two ranks, sums have one order: inside the inner axis first."""
    model = make_net(blocks=2)
    wanted = run_parts(1, model, **options)
    for stage, partition in [(2, PARTITIONS[1]), (3, PARTITIONS[0]), (3, PARTITIONS[1])]:
        assert_equal(run_parts(1, model, stage=stage, partition=partition, **options), wanted)


# ------------------------------------------------------------------------------------------------------------- habits
# What loops do between steps. All sums of gradients are exact, so that their order does not matter.


class ExactNet(nn.Module):
    """Layers whose inputs and gradients are small integers that depend on the signs of outputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(3))
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs, total = x, x.new_zeros(())
        for block in self.blocks:
            output = block(x)
            x, total = inputs * output.detach().sign(), total + output.relu().sum()
        return total


def exact_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :3].float().sub(5).repeat(1, 2)) / 8


slow_sgd = partial(sgd, lr=2.0**-6)


def accumulate(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for _ in range(3):
        for batch in data:
            exact_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def change_the_number_of_backwards(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for count in (1, 1, 1, 2, 1, 3):
        for batch in data[:count]:
            exact_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def use_no_sync(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for synced in ((1, 3), (0, 1), (3,), (0,)):
        for number, batch in enumerate(data):
            with zeroshard.no_sync(model) if number not in synced else torch.enable_grad():
                exact_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def keep_gradients(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        exact_loss(model, batch).backward()
        optimizer.step()


def zero_in_place(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        exact_loss(model, first).backward()
        optimizer.zero_grad(set_to_none=False)
        exact_loss(model, second).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def read_between(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for _ in range(2):
        for batch in data:
            exact_loss(model, batch).backward()
            assert optimizer.clip_grad_norm_(1e9) > 0
            for name, parameter in model.named_parameters():
                assert torch.equal(zeroshard.full_gradient(model, name), parameter.grad.clone())
        optimizer.step()
        optimizer.zero_grad()


def clear_one(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        exact_loss(model, batch).backward()
        model.blocks[1][0].weight.grad = None
        take_step(optimizer, exact_loss(model, data[0]))


def change_gradients(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        exact_loss(model, batch).backward()
        model.blocks[2][0].bias.grad.mul_(0.5)
        take_step(optimizer, exact_loss(model, data[1]))


def discard(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        exact_loss(model, data[0]).backward()
        optimizer.zero_grad()
        exact_loss(model, batch).backward()
        take_step(optimizer, exact_loss(model, data[2]))


def raise_in_backward(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for batch in data:
        exact_loss(model, data[0]).backward()
        handle = model.blocks[0].register_full_backward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            exact_loss(model, batch).backward()
        handle.remove()
        optimizer.zero_grad()
        accumulate(model, optimizer, data[:2])


def move_states(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        exact_loss(model, data[0]).backward()
        zeroshard.offload_states(model)
        assert zeroshard.report(model).total.now == 0
        zeroshard.reload_states(model)
        take_step(optimizer, exact_loss(model, batch))


HABITS = [
    accumulate,
    change_the_number_of_backwards,
    use_no_sync,
    keep_gradients,
    zero_in_place,
    read_between,
    clear_one,
    change_gradients,
    discard,
    raise_in_backward,
    move_states,
]


def run_habit(habit: Any, make: Any = slow_sgd, **options: Any) -> Tensors:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        habit(model, optimizer, data)
        assert all(grad.inner_sum is None for grad in model._zeroshard.engine.gradients.flat_grads.values())

    return run_ranks(4, ExactNet(), make, batches(4), loop, mesh=(2, 2), units=[nn.Sequential], **options)


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_loops_give_the_bits_of_a_hybrid_mesh(habit: Any) -> None:
    """In every habit each stage and each partition, and over all habits each stage with each partition."""
    wanted = run_habit(habit, stage=3)
    for number, options in enumerate(({"stage": 2}, {"stage": 3}, {"stage": 3, "backwards": 4}), HABITS.index(habit)):
        assert_equal(run_habit(habit, partition=PARTITIONS[number % 2], **options), wanted)


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [slow_sgd(part) for part in (model.blocks[:1], model.blocks[1:])]


def step_in_turns(model: Any, optimizers: Any, data: list[torch.Tensor]) -> None:
    for number, batch in enumerate(data):
        exact_loss(model, batch).backward()
        take_step(optimizers[number % 2], exact_loss(model, data[0]))
    for optimizer in optimizers:
        optimizer.zero_grad()


def test_two_optimizers_give_the_bits_of_a_hybrid_mesh() -> None:
    wanted = run_habit(step_in_turns, two, stage=3)
    for partition in PARTITIONS:
        assert_equal(run_habit(step_in_turns, two, stage=3, partition=partition), wanted)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"offload": "host"}, {"reduce_dtype": "fp32"}], ids=str)
def test_precisions_and_tiers_accumulate_as_a_hybrid_mesh_does(precision: str, options: dict[str, Any]) -> None:
    # sums over backwards are divided by the number of ranks at the end: the default scale would overflow sooner
    options = {"precision": precision, "loss_scale": 2.0**10, **options}
    is_first = (precision == "bf16") == ("offload" in options)  # each option, and each precision, with both partitions
    assert_close(run_parts(3, partition=PARTITIONS[is_first], **options), run_parts(3, **options), 2e-2)


def test_tiers_do_not_change_a_bit() -> None:
    options: dict[str, Any] = {"precision": "bf16", "partition": PARTITIONS[1]}
    wanted = run_parts(3, **options)
    for offload in ("host", {"optimizer": "host", "parameters": "host"}):
        assert_equal(run_parts(3, offload=offload, **options), wanted)


class Overflowing(nn.Module):
    """A net whose loss overflows in fp16 when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.factor = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens) * self.factor


def train_with_overflow(rank: int, options: dict[str, Any]):
    model, optimizer = sharded(Overflowing(), adamw, (2, 2), precision="fp16", stage=3, **options)
    scales = []
    for number, batch in enumerate(batches(4)):
        for factor in (1.0, 1e6 if number == 2 and rank == 1 else 1.0):
            model.factor = factor
            optimizer.scale(net_loss(model, split(batch, rank, 4))).backward()
        before = full_parameters(model)
        optimizer.step()
        scales.append(optimizer.loss_scale.item())
        if number == 2:
            assert_close(full_parameters(model), before, 0)
        optimizer.zero_grad()
    return scales


@pytest.mark.parametrize("backwards", [None, 2])
def test_an_overflow_of_one_rank_skips_the_step(backwards: int | None) -> None:
    wanted = run_threads(4, train_with_overflow, {})[0]
    assert wanted[2] == wanted[1] / 2
    for found in run_threads(4, train_with_overflow, {"partition": PARTITIONS[0], "backwards": backwards}):
        assert found == wanted


def add_penalty_on_one_rank(rank: int) -> None:
    model, optimizer = sharded(ExactNet(), slow_sgd, (2, 2), units=[nn.Sequential], stage=2, partition=PARTITIONS[0])
    exact_loss(model, split(ONE_BATCH, rank, 4)).backward()
    if rank == 1:
        model.blocks[1][0].weight.square().sum().backward()  # in no forward of the model: summed locally
    optimizer.step()


def test_other_gradients_on_one_rank_are_an_error() -> None:
    """It reduces its local sums over both axes, and the others reduce their inner sums over the outer axis."""
    with pytest.raises(RanksFailed) as failure:
        run_threads(4, add_penalty_on_one_rank, timeout=30)
    for account in failure.value.accounts.values():
        assert "RanksDisagreeError: ranks disagree" in account
        assert "about to reduce unit 'blocks.2' over the outer axis" in account


# -------------------------------------------------------------------------------------------------------- checkpoints

LAYOUTS: dict[str, tuple[int, tuple[int, ...] | None, dict[str, Any]]] = {
    "two ranks": (2, None, {"stage": 2}),
    "hybrid": (4, (2, 2), {"stage": 3}),
    "ours": (4, (2, 2), {"stage": 3, "partition": PARTITIONS[0]}),
    "stage 2": (4, (2, 2), {"stage": 2, "partition": PARTITIONS[1]}),
}


@pytest.mark.parametrize(
    ("here", "there"),
    [("ours", name) for name in LAYOUTS] + [(name, "ours") for name in LAYOUTS if name != "ours"],
)
def test_checkpoints_load_anywhere(here: str, there: str, tmp_path: Path) -> None:
    model = make_net()

    def body(rank: int, layout: str, is_saved: bool):
        world, shape, options = LAYOUTS[layout]
        ours, optimizer = sharded(model, adamw, mesh=shape, **options)
        data = shares(batches(2, seed=int(is_saved)), rank, world)
        train_steps(ours, optimizer, data)
        token_step(ours, data[0])
        if is_saved:
            with pytest.raises(zeroshard.CheckpointError, match="gradients of 1 backwards since the last step"):
                zeroshard.save(tmp_path / "saved", ours, optimizer)
            token_step(ours, data[1])
            optimizer.step()
            zeroshard.save(tmp_path / "saved", ours, optimizer)
        else:
            zeroshard.load(tmp_path / "saved", ours, optimizer)
        return full_parameters(ours), copy.deepcopy(optimizer.state_dict()["state"])

    wanted = run_threads(LAYOUTS[here][0], body, here, True)[0]
    for parameters, states in run_threads(LAYOUTS[there][0], body, there, False):
        assert_close(parameters, wanted[0], 0)
        torch.testing.assert_close(states, wanted[1], rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------- memory and bytes


def gpt_reports(rank: int, options: dict[str, Any], backwards: int):
    """Return a report after the first backward of the fourth step, and one after the step."""
    model, optimizer = sharded_gpt(CONFIG, (2, 2), **options)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    reports = []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(backwards):
            model(tokens, tokens).backward()
            if (step, number) == (3, 0):
                reports.append(zeroshard.report(model))
        optimizer.step()
    return *reports, zeroshard.report(model)


# stage, partition, backwards, options: bytes of gradients by parameter after a backward; Ψ gathered inside and between,
# reduced inside and between
ROWS = [
    (3, "hierarchical-gradients", 1, {}, 2 / 4, (2, 1 / 2, 1, 1 / 2)),
    (3, "hierarchical-gradients", 3, {}, 2 / 2, (6, 1 / 2, 3, 1 / 2)),
    (3, "hierarchical-gradients", 3, {"backwards": 0}, 2 / 2, (6, 1 / 2, 3, 1 / 2)),
    (3, "inner-gradients", 3, {}, 2 / 2, (6, 6 / 2, 3, 1 / 2)),
    (2, "inner-gradients", 3, {}, 2 / 2, (1, 1 / 2, 3, 1 / 2)),
]


@pytest.mark.guarantee("Partitions of a mesh")
@pytest.mark.parametrize(("stage", "partition", "backwards", "options", "gradients", "traffic"), ROWS)
def test_memory_and_bytes_by_axis_are_the_formula(
    stage: int, partition: str, backwards: int, options: dict[str, Any], gradients: float, traffic
) -> None:
    psi = CONFIG.parameters
    with torch.device("meta"):
        model = GPT(CONFIG)
    options = {"stage": stage, "partition": partition, **options}
    foretold = predict_memory(model, ranks=4, replicas=2, precision="bf16", on_gpu=False, **options)
    kinds = ("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter")
    key = "gradients", "device"
    for between, report in run_threads(4, gpt_reports, options, backwards):
        assert gradients * psi <= between.memory[key].now < gradients * psi * 1.01
        assert 0 <= report.states - foretold.state_bytes < 100  # step counts
        assert report.memory[key].now == foretold.states["gradients"]
        assert foretold.transient["inner sums"] == pytest.approx(2 / 2 * psi, rel=0.01)
        assert between.memory[key].now in (foretold.transient["inner sums"], foretold.states["gradients"])
        assert report.memory[key].peak <= foretold.transient["inner sums"] + foretold.states["gradients"]
        assert report.total.peak <= foretold.peak_bytes
        for kind, times in zip(kinds, traffic, strict=True):
            assert times * 2 * psi <= report.collectives[kind].bytes < times * 2 * psi * 1.01, kind


def test_gradients_in_8_bits_take_half_the_bytes_in_each_hop() -> None:
    options = {"stage": 3, "partition": "hierarchical-gradients", "reduce_wire": "int8"}
    exact = run_threads(4, gpt_reports, {**options, "reduce_wire": None}, 3)[0][1].collectives
    found = run_threads(4, gpt_reports, options, 3)[0][1].collectives
    for kind in ("reduce-scatter", "outer reduce-scatter"):
        assert found[kind].bytes == pytest.approx(exact[kind].bytes * (1 + 2 / 64) / 2, rel=0.01)
        assert found[kind].count == exact[kind].count


@pytest.mark.parametrize("options", [{"reduce_wire": "int8"}, {"reduce_wire": "int8", "error_feedback": True}], ids=str)
def test_gradients_in_8_bits_train_nearly_as_exact_ones(options: dict[str, Any]) -> None:
    assert_close(run_parts(3, partition=PARTITIONS[0], **options), run_parts(3, partition=PARTITIONS[0]), 5e-2)


def test_what_cannot_be_partitioned_so_is_an_error() -> None:
    def body(rank: int) -> None:
        for partition in PARTITIONS:
            for stage in (2, 3):
                with pytest.raises(ValueError, match=r"gradients over the inner axis of the mesh, which has one rank"):
                    sharded(make_net(), adamw, (4, 1), partition=partition, stage=stage)
            with pytest.raises(ValueError, match=r"local_steps=2 averages replicas, and partition='[a-z-]+' has none"):
                sharded(make_net(), adamw, (2, 2), partition=partition, local_steps=2)
        with pytest.raises(ValueError, match=r"on the device.*use partition='inner-gradients' to offload them"):
            offload = {"optimizer": "host", "parameters": "host"}
            sharded(make_net(), adamw, (2, 2), partition=PARTITIONS[0], offload=offload, stage=3)

    run_threads(4, body)
