"""Training states partitioned over one or both axes of a mesh: the numbers, the memory, and the bytes by axis."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
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
    assert_same_training,
    batches,
    clipped_steps,
    full_parameters,
    masters,
    mesh_of,
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
from rules import Lamb
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from zoo import InOrder, built, make_net

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.planner import predict_memory

CONFIG = GPTConfig(vocab_size=1024, context=64, layers=3, heads=4, width=96)
PARTITIONS = ["full", "hierarchical", "hierarchical-gradients", "inner-gradients"]
INNER_GRADIENTS = PARTITIONS[2:]  # gradients are summed over the inner axis until the last backward of a step
DATA = batches(3, rows=24)
NET, SMALL_NET = make_net(), make_net(blocks=2)
HOST = {"optimizer": "host", "parameters": "host"}

every_partition = pytest.mark.parametrize("partition", PARTITIONS)
pytestmark = pytest.mark.usefixtures("tried_once")


def in_parts(model: Any, optimizer: Any, data: list[torch.Tensor], parts: int) -> None:
    for batch in data:
        for part in batch.chunk(parts):
            (scaled(optimizer, net_loss(model, part)) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def run_parts(model: nn.Module, parts: int, **options: Any) -> Tensors:
    """Train on a mesh of 2 × 2, with so many backwards a step."""
    loop = partial(in_parts, parts=parts)
    return run_ranks(4, model, adamw, DATA, loop, **{"mesh": (2, 2), "stage": 3, **options})


MESHES: list[dict[str, Any]] = [
    {"mesh": (2, 2)},
    {"mesh": (2, 2), "bucket_size": 128},
    {"mesh": (1, 4), "bucket_size": 128},
    {"mesh": (4, 1), "bucket_size": 128},
]
ROWS = [  # over an inner axis of one rank, neither parameters nor gradients can be partitioned: see ERRORS
    *product([("full", 1)], product(range(4), MESHES)),
    *product([("hierarchical", 1)], product([3], MESHES[:3])),
    *product(zip(INNER_GRADIENTS, (1, 3), strict=True), [(2, MESHES[0]), (3, {"backwards": 3}), (1, MESHES[3])]),
    *product(zip(INNER_GRADIENTS, (3, 1), strict=True), [(3, MESHES[1]), (3, MESHES[2]), (0, MESHES[3])]),
]


@pytest.mark.guarantee("Partitions of a mesh")
@pytest.mark.parametrize(("partition", "parts", "stage", "options"), [(*row, *more) for row, more in ROWS], ids=str)
def test_training_gives_the_plain_numbers(partition: str, parts: int, stage: int, options: dict[str, Any]) -> None:
    wanted = run_plain(NET, adamw, DATA)
    assert_close(run_parts(NET, parts, partition=partition, stage=stage, **options), wanted)


@every_partition
def test_gloo_processes_give_the_plain_numbers(partition: str) -> None:
    wanted = run_plain(NET, adamw, DATA)
    assert_close(run_parts(NET, 3, partition=partition, run=run_processes), wanted)


@every_partition
def test_clip_grad_norm_gives_the_plain_numbers(partition: str) -> None:
    loop = partial(clipped_steps, max_norm=0.5)
    assert_same_training(4, NET, adamw, batches(3), loop, stages=[3], mesh=(2, 2), partition=partition)


def skip_on_one_rank(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for x in data:
        take_step(optimizer, model(x, (0, 1, 3) if x[0, 0] == 1 else None).square().sum())


@pytest.mark.parametrize(("stage", "partition"), [(1, "full"), (2, "full"), (2, "inner-gradients")])
def test_ranks_that_skip_modules_do_not_mix_up_outer_reductions(stage: int, partition: str) -> None:
    model = built(lambda: InOrder(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    data = [torch.arange(4.0)[:, None].expand(4, 8)] * 3
    options = {"run": run_processes, "mesh": (2, 2), "stage": stage, "units": (nn.Sequential,), "timeout": 20}
    wanted = run_ranks(4, model, sgd, data, skip_on_one_rank, **options)
    assert_equal(run_ranks(4, model, sgd, data, skip_on_one_rank, **options, partition=partition), wanted)


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
    wanted = run_parts(SMALL_NET, 1, **options)
    rows = [(2, "inner-gradients"), *product([3], INNER_GRADIENTS)]
    if "backwards" not in options:
        rows += product([2, 3], ["hybrid", "full", "hierarchical"])
    for stage, partition in rows:
        assert_equal(run_parts(SMALL_NET, 1, stage=stage, partition=partition, **options), wanted)


# ------------------------------------------------------------------------------------------------------------- habits
# What loops do between steps, after which ranks have to notice that their inner shards are stale, and between
# backwards. All sums of gradients are exact, so that their order does not matter.


class ExactNet(nn.Module):
    """Layers whose inputs and gradients are small integers that depend on the signs of outputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs, total = x, self.nothing.float().sum()
        for layer in (*self.blocks, self.head):
            output = layer(x)
            x, total = inputs * output.detach().sign(), total + output.float().relu().sum()
        return total


def exact_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :3].float().sub(5).repeat(1, 2)) / 8


def backward(model: nn.Module, batch: torch.Tensor) -> None:
    exact_loss(model, batch).backward()


exact_steps = partial(train_steps, loss_of=exact_loss)


def one_backward(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    exact_steps(model, optimizer, data)


def accumulate(model: Any, optimizer: Any, data: list[torch.Tensor], counts: tuple[int, ...] = (4, 4, 4)) -> None:
    for count in counts:
        for batch in data[:count]:
            backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()


def change_the_number_of_backwards(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    accumulate(model, optimizer, data, (1, 1, 1, 2, 1, 3))


def no_sync(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for synced in ((1, 3), (0, 1), (3,), (0,)):
        for number, batch in enumerate(data):
            with zeroshard.no_sync(model) if number not in synced else torch.enable_grad():
                backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()


def keep_gradients(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        backward(model, batch)
        optimizer.step()


def zero_grad_in_place(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        backward(model, first)
        optimizer.zero_grad(set_to_none=False)
        backward(model, second)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def full_gradient(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for _ in range(2):
        for batch in data:
            backward(model, batch)
            assert optimizer.clip_grad_norm_(1e9) > 0
            for name, parameter in model.named_parameters():
                assert torch.equal(zeroshard.full_gradient(model, name), parameter.grad.clone())
        optimizer.step()
        optimizer.zero_grad()


def clear_one_gradient(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data[1:]:
        backward(model, batch)
        model.blocks[1][0].weight.grad = None
        take_step(optimizer, exact_loss(model, data[0]))


def change_gradients(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data[1:]:
        backward(model, batch)
        model.head.bias.grad.mul_(0.5)
        take_step(optimizer, exact_loss(model, data[1]))


def discard_gradients(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data[1:]:
        backward(model, data[0])
        optimizer.zero_grad()
        backward(model, batch)
        take_step(optimizer, exact_loss(model, data[2]))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def raise_in_backward(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data[1:3]:
        backward(model, data[0])
        handle = model.blocks[0].register_full_backward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            backward(model, batch)
        handle.remove()
        optimizer.zero_grad()
        accumulate(model, optimizer, data, (2, 2, 2))


def raise_in_step(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    exact_steps(model, optimizer, data[:2])
    handle = optimizer.inner.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        exact_steps(model, optimizer, data)
    handle.remove()
    exact_steps(model, optimizer, data[2:])


def offload_states(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        backward(model, data[0])
        offload_and_reload(model)
        take_step(optimizer, exact_loss(model, batch))
        offload_and_reload(model)


def offload_and_reload(model: Any) -> None:
    zeroshard.offload_states(model)
    assert zeroshard.report(model).total.now == 0
    zeroshard.reload_states(model)


def edit_gathered(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        exact_steps(model, optimizer, [batch])
        with zeroshard.gathered(model, write_rank=1), torch.no_grad():
            model.head.weight.mul_(0.9)


def load_state_dict(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    with zeroshard.gathered(model):
        start = copy.deepcopy(model.state_dict())
    exact_steps(model, optimizer, data[:2])
    with zeroshard.gathered(model, write_rank=0):
        model.load_state_dict({name: value + 0.01 for name, value in start.items()})
    exact_steps(model, optimizer, data[2:])


def ema(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    averages = zeroshard.EMA(model, 0.5)
    for batch in data[1:]:
        exact_steps(model, optimizer, [batch])
        averages.update()
        with averages.swapped(), torch.no_grad():
            averaged = exact_loss(model, data[0]).item()
        with torch.no_grad():
            assert exact_loss(model, data[0]).item() != averaged
    averages.copy_to_model()


def evaluate(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data[1:]:
        with torch.no_grad():
            exact_loss(model, batch)
        (exact_loss(model, batch) + exact_loss(model, batch)).backward()
        optimizer.step()
        with torch.no_grad():
            exact_loss(model, batch)
        optimizer.zero_grad()


def checkpoint_activations(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    zeroshard.checkpoint_activations(model, ["blocks.*"])
    exact_steps(model, optimizer, data)


BETWEEN_STEPS = [  # in stage 3: in stages 1 and 2, a step that raised leaves stale parameters on all meshes
    one_backward,
    load_state_dict,
    edit_gathered,
    evaluate,
    ema,
    checkpoint_activations,
    raise_in_step,
]
BETWEEN_BACKWARDS = [
    change_the_number_of_backwards,
    accumulate,
    no_sync,
    zero_grad_in_place,
    keep_gradients,
    clear_one_gradient,
    full_gradient,
    discard_gradients,
    change_gradients,
    offload_states,
    raise_in_backward,
]
HABITS = BETWEEN_STEPS + BETWEEN_BACKWARDS


def run_habit(habit: Any, make: Any = adamw, **options: Any) -> Tensors:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        habit(model, optimizer, data)
        assert all(grad.inner_sum is None for grad in model._zeroshard.engine.gradients.flat_grads.values())

    options = {"mesh": (2, 2), "stage": 3, "units": [nn.Sequential], **options}
    return run_ranks(4, ExactNet(), make, batches(4), loop, **options)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "offload": "host"}], ids=str)
@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_loops_give_the_bits_of_a_hybrid_mesh(habit: Any, options: dict[str, Any]) -> None:
    """In every habit one partition with each of the options, and over all habits each partition with both."""
    half = HABITS.index(habit) % 2
    first, second = INNER_GRADIENTS[half], INNER_GRADIENTS[1 - half]
    rows = [(PARTITIONS[half], {}), (second, {})]
    if habit in BETWEEN_BACKWARDS:
        rows += [(first, {"stage": 2}), (first, {"backwards": 4})]
    if options:
        rows = [(PARTITIONS[1 - half], options)]
    wanted = run_habit(habit, **options)
    for partition, more in rows:
        assert_equal(run_habit(habit, partition=partition, **more), wanted)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters())


def adamw_of_a_half(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of some parameters; the others are frozen or have none."""
    model.blocks[0].requires_grad_(False)
    return adamw(model.blocks[1:])


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [adamw(model.blocks[:1]), sgd(nn.ModuleList([model.blocks[1], model.head]), lr=2.0**-6)]


def step_in_turns(model: Any, optimizers: Any, data: list[torch.Tensor]) -> None:
    for number, batch in enumerate(data):
        backward(model, batch)
        take_step(optimizers[number % 2], exact_loss(model, data[0]))
        for optimizer in optimizers if number % 2 else ():  # also drops gradients of the other one
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "habit"), [(lamb, one_backward), (adamw_of_a_half, one_backward), (two_optimizers, step_in_turns)]
)
def test_optimizers_of_any_kind_give_the_bits_of_a_hybrid_mesh(make: Any, habit: Any) -> None:
    wanted = run_habit(habit, make)
    for partition in PARTITIONS:
        assert_equal(run_habit(habit, make, partition=partition), wanted)


def test_a_tensor_axis_gives_the_bits_of_a_hybrid_mesh() -> None:
    model = built(lambda: GPT(GPTConfig(vocab_size=64, context=8, layers=1, heads=2, width=16)))

    def adafactor(model: nn.Module) -> torch.optim.Optimizer:  # updates whole parameters
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)

    def body(rank: int, partition: str) -> Tensors:
        mesh = mesh_of((2, 2, 2), "replicate shard tensor")
        ours, optimizer = sharded(model, adafactor, mesh, partition=partition, backwards=1)
        for batch in batches(2, rows=4, length=9, vocabulary=64):
            tokens = split(batch, rank // 2, 4)
            take_step(optimizer, ours(tokens[:, :-1], tokens[:, 1:]))
        return masters(ours)

    wanted = run_threads(8, body, "hybrid")[0]
    for partition in PARTITIONS[:3]:
        for found in run_threads(8, body, partition):
            assert_equal(found, wanted)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"offload": "host"}, {"reduce_dtype": "fp32"}], ids=str)
def test_precision_and_offload_accumulate_as_a_hybrid_mesh_does(precision: str, options: dict[str, Any]) -> None:
    # sums over backwards are divided by the number of ranks at the end: the default scale would overflow sooner
    options = {"precision": precision, "loss_scale": 2.0**10, **options}
    is_first = (precision == "bf16") == ("offload" in options)  # each option, and each precision, with both partitions
    wanted = run_parts(SMALL_NET, 3, **options)
    assert_close(run_parts(SMALL_NET, 3, partition=INNER_GRADIENTS[is_first], **options), wanted, 2e-2)


def test_offload_does_not_change_a_bit() -> None:
    options: dict[str, Any] = {"precision": "bf16", "partition": "inner-gradients"}
    wanted = run_parts(SMALL_NET, 3, **options)
    for offload in ("host", HOST):
        assert_equal(run_parts(SMALL_NET, 3, offload=offload, **options), wanted)


class Overflowing(nn.Module):
    """A net whose loss overflows in fp16 for a large factor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.factor = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens) * self.factor


def train_with_overflow(rank: int, options: dict[str, Any]) -> list[float]:
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


def test_an_overflow_of_one_rank_skips_the_step() -> None:
    wanted = run_threads(4, train_with_overflow, {})[0]
    assert wanted[2] == wanted[1] / 2
    for options in ({}, {"backwards": 2}):
        for found in run_threads(4, train_with_overflow, {"partition": "hierarchical-gradients", **options}):
            assert found == wanted


def add_penalty_on_one_rank(rank: int) -> None:
    options = {"units": [nn.Sequential], "stage": 2, "partition": "hierarchical-gradients"}
    model, optimizer = sharded(ExactNet(), sgd, (2, 2), **options)
    backward(model, split(ONE_BATCH, rank, 4))
    if rank == 1:
        model.blocks[0][0].weight.square().sum().backward()  # in no forward of the model: summed locally
    optimizer.step()


def test_other_gradients_on_one_rank_are_an_error() -> None:
    """It reduces its local sums over both axes, and the others reduce their inner sums over the outer axis."""
    with pytest.raises(RanksFailed) as failure:
        run_threads(4, add_penalty_on_one_rank, timeout=30)
    for account in failure.value.accounts.values():
        assert "RanksDisagreeError: ranks disagree" in account
        assert "about to reduce unit 'head' over the outer axis" in account


# -------------------------------------------------------------------------------------------------------- checkpoints

LAYOUTS: dict[str, tuple[int, tuple[int, ...] | None, dict[str, Any]]] = {
    "two ranks": (2, None, {"stage": 2}),
    "hybrid": (4, (2, 2), {"stage": 3}),
    "full": (4, (2, 2), {"stage": 3, "partition": "full"}),
    "six ranks": (6, (3, 2), {"stage": 3, "partition": "hierarchical"}),
    "stage 2": (4, (2, 2), {"stage": 2, "partition": "inner-gradients"}),
    "hierarchical": (4, (2, 2), {"stage": 3, "partition": "hierarchical"}),
    "hierarchical-gradients": (4, (2, 2), {"stage": 3, "partition": "hierarchical-gradients"}),
}


def train_and_save_or_load(rank: int, layout: str, path: Path, is_saved: bool) -> tuple[Tensors, Any, float]:
    world, mesh, options = LAYOUTS[layout]
    model, optimizer = sharded(make_net(), adamw, mesh, **options)
    data = shares(batches(2, seed=int(is_saved)), rank, world)
    train_steps(model, optimizer, data[:1])
    token_step(model, data[1])
    if is_saved:
        with pytest.raises(zeroshard.CheckpointError, match="gradients of 1 backwards since the last step"):
            zeroshard.save(path, model, optimizer)
        take_step(optimizer, net_loss(model, data[0]))
        zeroshard.save(path, model, optimizer)
    else:
        zeroshard.load(path, model, optimizer)
    with torch.no_grad():
        loss = net_loss(model, ONE_BATCH).item()
    return full_parameters(model), copy.deepcopy(optimizer.state_dict()["state"]), loss


@pytest.mark.parametrize("saved", LAYOUTS)
def test_checkpoints_load_anywhere(saved: str, tmp_path: Path) -> None:
    hierarchical = list(LAYOUTS)[-2:]
    wanted = run_threads(LAYOUTS[saved][0], train_and_save_or_load, saved, tmp_path, True)[0]
    for layout in LAYOUTS if saved in hierarchical else hierarchical:
        for parameters, states, loss in run_threads(
            LAYOUTS[layout][0], train_and_save_or_load, layout, tmp_path, False
        ):
            assert_equal(parameters, wanted[0])
            torch.testing.assert_close(states, wanted[1], rtol=0, atol=0)
            assert loss == wanted[2]


# ---------------------------------------------------------------------------------------------------- memory and bytes


def gpt_reports(rank: int, options: dict[str, Any], backwards: int) -> tuple[zeroshard.Report, zeroshard.Report]:
    """Return a report after the first backward of the third step, and one after the step."""
    model, optimizer = sharded_gpt(CONFIG, (2, 2), **options)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    reports = []
    for step in range(3):
        optimizer.zero_grad()
        for number in range(backwards):
            model(tokens, tokens).backward()
            if (step, number) == (2, 0):
                reports.append(zeroshard.report(model))
        optimizer.step()
    return *reports, zeroshard.report(model)


# stage, partition, backwards, options: bytes by parameter of states, and of gradients after one backward; Ψ gathered
# inside and between, reduced inside and between
REPORTS = [
    (3, "full", 1, {}, 14 / 4, 2 / 4, (2, 2 / 2, 1, 1 / 2)),
    (3, "hierarchical", 1, {}, 14 / 4 + 2 / 2, 2 / 4, (2, 1 / 2, 1, 1 / 2)),
    (3, "hierarchical", 3, {}, 14 / 4 + 2 / 2, 2 / 4, (6, 1 / 2, 3, 3 / 2)),
    (3, "hierarchical-gradients", 1, {}, 14 / 4 + 2 / 2, 2 / 4, (2, 1 / 2, 1, 1 / 2)),
    (3, "hierarchical-gradients", 3, {}, 14 / 4 + 2 / 2, 2 / 2, (6, 1 / 2, 3, 1 / 2)),
    (3, "hierarchical-gradients", 3, {"backwards": 0}, 14 / 4 + 2 / 2, 2 / 2, (6, 1 / 2, 3, 1 / 2)),
    (3, "inner-gradients", 3, {}, 14 / 4, 2 / 2, (6, 6 / 2, 3, 1 / 2)),
    (2, "inner-gradients", 3, {}, 14 / 4 + 2, 2 / 2, (1, 1 / 2, 3, 1 / 2)),
]
KINDS = ("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter")


@pytest.mark.guarantee("Partitions of a mesh")
@pytest.mark.parametrize(("stage", "partition", "backwards", "options", "states", "gradients", "traffic"), REPORTS)
def test_report_of_memory_and_bytes_by_axis_is_the_formula(
    stage: int,
    partition: str,
    backwards: int,
    options: dict[str, Any],
    states: float,
    gradients: float,
    traffic: tuple[float, ...],
) -> None:
    psi = CONFIG.parameters
    with torch.device("meta"):
        model = GPT(CONFIG)
    options = {"stage": stage, "partition": partition, **options}
    predicted = predict_memory(model, ranks=4, replicas=2, precision="bf16", on_gpu=False, **options)
    inner_sums = predicted.transient.get("inner sums", 0)
    assert inner_sums == pytest.approx(2 / 2 * psi if partition in INNER_GRADIENTS else 0, rel=0.01)
    key = "gradients", "device"
    for between, report in run_threads(4, gpt_reports, options, backwards):
        assert states * psi <= report.states < states * psi * 1.01
        assert 0 <= report.states - predicted.state_bytes < 100  # step counts
        assert gradients * psi <= between.memory[key].now < gradients * psi * 1.01
        assert between.memory[key].now in (inner_sums, predicted.states["gradients"])
        assert report.memory[key].now == predicted.states["gradients"]
        assert report.memory[key].peak <= inner_sums + predicted.states["gradients"]
        assert report.total.peak <= predicted.peak_bytes
        for kind, times in zip(KINDS, traffic, strict=True):
            assert times * 2 * psi <= report.collectives[kind].bytes < times * 2 * psi * 1.01, kind


def test_reduce_wire_in_8_bits_takes_half_the_bytes_in_each_hop() -> None:
    options = {"stage": 3, "partition": "hierarchical-gradients"}
    exact = run_threads(4, gpt_reports, options, 3)[0][1].collectives
    found = run_threads(4, gpt_reports, {**options, "reduce_wire": "int8"}, 3)[0][1].collectives
    for kind in KINDS[2:]:
        assert found[kind].bytes == pytest.approx(exact[kind].bytes * (1 + 2 / 64) / 2, rel=0.01)
        assert found[kind].count == exact[kind].count


def test_reduce_wire_in_8_bits_trains_nearly_as_exact_gradients_do() -> None:
    options = {"partition": "hierarchical-gradients"}
    wanted = run_parts(SMALL_NET, 3, **options)
    for error_feedback in (False, True):
        assert_close(
            run_parts(SMALL_NET, 3, reduce_wire="int8", error_feedback=error_feedback, **options), wanted, 5e-2
        )


# ------------------------------------------------------------------------------------------------------------- errors


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


ON_DEVICE = r"keeps parameters on the device.*use partition="
ONE_RANK = " over the inner axis of the mesh, which has one rank: use stage="
ERRORS: list[tuple[str, tuple[int, int], dict[str, Any], str]] = [
    ("inner", (2, 2), {}, r"partition must be one of 'hybrid', 'hierarchical', 'full', .*, got 'inner'"),
    ("hierarchical", (4, 1), {}, f"parameters{ONE_RANK}2, or partition='f"),
    ("hierarchical", (2, 2), {"offload": HOST}, f"{ON_DEVICE}'full' to offload them"),
    ("hierarchical-gradients", (2, 2), {"offload": HOST}, f"{ON_DEVICE}'inner-gradients' to offload them"),
    *product(INNER_GRADIENTS, [(4, 1)], [{"stage": 2}, {}], [f"gradients{ONE_RANK}1"]),
    *product(
        PARTITIONS,
        [(2, 2)],
        [{"local_steps": 2}],
        [r"local_steps=2 averages replicas, and partition='[a-z-]+' has none"],
    ),
]


def test_what_cannot_be_partitioned_so_is_an_error() -> None:
    def body(rank: int) -> None:
        for partition, mesh, options, message in ERRORS:
            with pytest.raises(ValueError, match=message):
                sharded(make_net(), adamw, mesh, partition=partition, **{"stage": 3, **options})

    run_threads(4, body)
