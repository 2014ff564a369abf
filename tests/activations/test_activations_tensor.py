"""P_a along a tensor axis: divided by default, gathered for recomputation, and refused where inputs differ."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import ONE_BATCH, adamw, assert_equal, batches, masters, net_loss, sharded, take_step, token_step, tokens
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from zoo import built, make_net

import zeroshard
from zeroshard.comm.counters import TPTrafficMode
from zeroshard.comm.mesh import MeshAxis
from zeroshard.models.gpt import GPT, GPTConfig

LAYERS = 3


def gpt() -> GPT:
    return built(lambda: GPT(GPTConfig(vocab_size=13, context=8, layers=LAYERS, heads=2, width=16)))


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))


def train(rank: int, model: nn.Module, shape: tuple[int, int], stage: int, options: dict[str, Any]) -> Any:
    model, optimizer = sharded(model, adamw, mesh=mesh_of(shape), stage=stage, timeout=20)
    zeroshard.checkpoint_activations(model, **options)
    for ids in tokens(2, 13, rows=4):
        mine = ids.chunk(shape[0])[rank // shape[1]]
        with zeroshard.profile(model):
            take_step(optimizer, model(mine, mine))
    parameters = masters(model)
    return parameters, zeroshard.report(model)


@functools.cache
def undivided(shape: tuple[int, int], stage: int) -> Any:
    return run_threads(shape[0] * shape[1], train, gpt(), shape, stage, {"partition": False})[0]


@pytest.mark.parametrize(
    ("shape", "stage", "options"), [((1, 2), 0, {}), ((2, 2), 3, {"partition": True, "offload": True})]
)
def test_inputs_are_divided_over_the_tensor_axis_and_the_report_compares_the_traffic(
    shape: tuple[int, int], stage: int, options: dict[str, Any]
) -> None:
    whole, before = undivided(shape, stage)
    assert before.activation_share is None
    assert "activation gather" not in str(before)
    each = 4 // shape[0] * 5 * 16 * 4  # bytes of a block's input
    assert before.memory["activations", "device"].peak == LAYERS * each
    for parameters, report in run_threads(shape[0] * shape[1], train, gpt(), shape, stage, options):
        assert_equal(parameters, whole)
        tier = "host" if "offload" in options else "device"
        assert report.memory["activations", tier].peak == LAYERS * each / 2
        gathers = report.collectives["activation gather"]
        assert report.activation_traffic == gathers
        assert (gathers.count, gathers.bytes) == (LAYERS, LAYERS * each)
        # Five all-reduces a block (torch does not run the last one of its forward again), and embedding, norm and head.
        assert report.tensor_traffic.count >= 5 * LAYERS
        assert 1 / 12 < report.activation_share < 1 / 10
        assert f"are 1/{1 / report.activation_share:.1f} of tensor parallelism's traffic" in str(report)


def count_traffic(rank: int) -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    axis = MeshAxis.from_group(mesh.get_group("tensor"))
    x = DTensor.from_local(torch.ones(4, 6), mesh, [Replicate(), Shard(0)], run_check=False).requires_grad_()
    found = []

    def counted(body: Callable[[], Any]) -> None:
        with TPTrafficMode(axis) as traffic:
            body()
        found.append((traffic.traffic.count, traffic.traffic.bytes))

    counted(lambda: x.redistribute(placements=[Replicate(), Replicate()]).to_local() * 1)
    counted(lambda: x.sum().redistribute(placements=[Replicate(), Replicate()]).backward())
    left = DTensor.from_local(torch.ones(3, 2), mesh, [Replicate(), Shard(1)], run_check=False)
    right = DTensor.from_local(torch.ones(2, 5), mesh, [Replicate(), Shard(0)], run_check=False)
    counted(lambda: torch.tanh(left @ right))  # summed within an operation
    other = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0), Replicate()], run_check=False)
    counted(lambda: other.redistribute(placements=[Replicate(), Replicate()]).to_local() * 1)  # the other axis
    return found


def test_collectives_of_dtensors_are_counted_over_the_axis_alone_as_the_paper_counts() -> None:
    for gathered, summed, within, elsewhere in run_threads(4, count_traffic):
        assert gathered == (1, 2 * 4 * 6 * 4)  # by its output
        assert summed == (1, 2 * 4)  # twice a number
        assert within == (1, 2 * 3 * 5 * 4)
        assert elsewhere == (0, 0)


def test_processes_divide_as_threads_do() -> None:
    whole, _ = undivided((1, 2), 0)
    for parameters, report in run_processes(2, train, gpt(), (1, 2), 0, {}):
        assert_equal(parameters, whole)
        assert report.collectives["activation gather"].count == LAYERS


# -------------------------------------------------------------------------------------------------------- DTensors


class OfDTensors(nn.Module):
    """Blocks that are given DTensors, as some plans have it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x: DTensor) -> DTensor:
            assert isinstance(x, DTensor) and x.shape == (3, 5)
            local = torch.tanh(self.inner(x.to_local()))
            return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=(5, 1))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: DTensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.to_local().square().sum()


def run_dtensors(rank: int, model: nn.Module, placement: Any, options: dict[str, Any] | None) -> Any:
    model, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,))
    if options is not None:
        zeroshard.checkpoint_activations(model, **{"partition": mesh, **options})
    local = torch.arange(15.0).view(3, 5) if placement == Replicate() else torch.ones(2 - rank, 5) * rank
    x = DTensor.from_local(local * 0.1, mesh, [placement], run_check=False, shape=torch.Size((3, 5)), stride=(5, 1))
    for _ in range(2):
        model.zero_grad()
        model(x.requires_grad_() * 1).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_replicated_dtensors_are_divided_and_come_back_as_dtensors() -> None:
    model = built(OfDTensors)
    (whole, _) = run_threads(2, run_dtensors, model, Replicate(), None)
    for options in ({}, {"offload": True}):
        for found in run_threads(2, run_dtensors, model, Replicate(), options):
            assert_equal(found, whole)


def test_dtensors_that_ranks_have_parts_of_are_refused_unless_they_stay_whole() -> None:
    model = built(OfDTensors)
    with pytest.raises(RanksFailed, match=r"an input of block 'blocks\.0' is a DTensor .*Shard\(dim=0\)") as failed:
        run_threads(2, run_dtensors, model, Shard(0), {})
    assert len(failed.value.accounts) == 2
    plain = run_threads(2, run_dtensors, model, Shard(0), None)
    kept = run_threads(2, run_dtensors, model, Shard(0), {"partition": False, "offload": True})
    for found, wanted in zip(kept, plain, strict=True):
        assert_equal(found, wanted)


# ----------------------------------------------------------------------------------- inputs that are not the same


def on_a_data_axis(rank: int, model: nn.Module, rows: tuple[int, int]) -> str:
    model = copy.deepcopy(model)
    zeroshard.checkpoint_activations(model, partition=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError) as refused:
        net_loss(model, batches(2, rows[rank])[rank])
    return str(refused.value)


@pytest.mark.parametrize(("rows", "what"), [((4, 4), "value"), ((4, 2), "shape")])
def test_inputs_that_differ_are_refused_on_all_ranks(rows: tuple[int, int], what: str) -> None:
    first, second = run_threads(2, on_a_data_axis, make_net(), rows)
    assert first == second
    assert "the input of block 'blocks.0' cannot be partitioned over 2 ranks" in first
    assert f"on ranks [1] of the axis its {what} differs from rank 0" in first
    assert "partition=False" in first


def one_value(rank: int, model: Any) -> str:
    model, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,))
    with torch.no_grad():
        model.embedding.weight[0] = float("nan")  # of one token; a NaN is the same as itself
    zeroshard.checkpoint_activations(model, partition=mesh)
    token_step(model, ONE_BATCH)
    difference = torch.zeros(12, 5, 7).index_put((torch.tensor(4), torch.tensor(0), torch.tensor(2)), torch.ones(()))
    if rank == 1:
        model.blocks[0].register_forward_hook(lambda module, args, output: output + difference)
    net_loss(model, ONE_BATCH)  # it was looked at once
    zeroshard.checkpoint_activations(model, partition=mesh)
    with pytest.raises(ValueError) as refused:
        net_loss(model, ONE_BATCH)
    return str(refused.value)


def test_one_value_that_differs_among_nans_is_refused_with_the_blocks_name() -> None:
    assert (ONE_BATCH == 0).any()
    assert ONE_BATCH[4, 0] != 0
    first, second = run_threads(2, one_value, make_net())
    assert first == second
    assert "the input of block 'blocks.1'" in first


def sharded_over_data(rank: int, model: nn.Module) -> str:
    """The error comes through the engine's hooks, and the model can be used afterwards."""
    model, optimizer = sharded(model, adamw, stage=3, timeout=20)
    zeroshard.checkpoint_activations(model, partition=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError) as refused:
        net_loss(model, batches(2)[rank])
    zeroshard.checkpoint_activations(model)
    token_step(model, batches(2)[rank])
    optimizer.step()
    return str(refused.value)


def test_a_sharded_model_goes_on_after_it_was_refused() -> None:
    first, second = run_threads(2, sharded_over_data, make_net())
    assert first == second
