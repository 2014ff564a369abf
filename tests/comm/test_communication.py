"""A step moves the bytes the paper counts, in collectives of at most a bucket, the next unit's gather ahead of use."""

from __future__ import annotations

import copy
import math
import sys
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live import Collectives, received_bytes
from pairs import every_stage
from plain import sgd, sharded, take_step
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from zoo import InOrder

import zeroshard
from zeroshard.comm.collectives import Communicator
from zeroshard.comm.consistency import ConsistencyChecker
from zeroshard.comm.counters import TPTrafficMode, Traffic
from zeroshard.comm.mesh import MeshAxis
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.train.options import StepOptions
from zeroshard.train.training_setup import make_optimizer

CONFIG = GPTConfig(vocab_size=2000, context=64, layers=4, heads=4, width=96)  # 0.8 M parameters
PSI = CONFIG.parameters
ALIGNMENT = 0.005
SMALL = GPTConfig(vocab_size=256, context=16, layers=3, heads=2, width=64)


def steady_step(rank: int, config: GPTConfig, steps: int, options: dict[str, Any]):
    """Train; return the report of the last step and what a dispatch mode saw of it (gloo's collectives are ops)."""
    with torch.device("meta"):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = options | {"precision": "bf16", "init_fn": lambda module: None}  # zeros do: no number is looked at
    model, optimizer = zeroshard.shard(model, optimizer, **options)
    tokens = torch.arange(1).view(1, -1)
    for _ in range(steps):
        with Collectives() as seen:
            take_step(optimizer, model(tokens, tokens))
    return zeroshard.report(model), seen.events


def sizes_of(events, kind: str) -> list[int]:
    return [nbytes for name, nbytes in events if name == kind]


@pytest.mark.guarantee("Traffic")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_steady_step_communicates_what_the_paper_counts(stage: int, volume: int, world: int) -> None:
    for report, events in run_processes(world, steady_step, CONFIG, 3, {"stage": stage, "bucket_size": 2**16}):
        wanted = volume * PSI * 2  # bytes, bf16
        assert wanted <= report.communicated < wanted * (1 + ALIGNMENT)
        assert {name for name, _ in events} == set(report.collectives)  # the report's word against the dispatcher's
        for kind, traffic in report.collectives.items():
            assert (traffic.count, traffic.bytes) == (len(sizes_of(events, kind)), sum(sizes_of(events, kind)))


def measure_wire(
    rank: int, axes: dict[str, int], stage: int, is_muon: bool = False, partition: str = "hybrid"
) -> tuple[float, int]:
    """Return the bytes that a step's report promises this rank receives, and those that its sockets have received."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = GPT(replace(CONFIG, layers=2) if is_muon else CONFIG)  # Muon's products in bf16 are slow on a CPU
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    if is_muon:
        optimizer = make_optimizer(model, StepOptions(optimizer="muon"))
    options = {"stage": stage, "partition": partition, "precision": "bf16", "bucket_size": 2**16}
    model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, **options)
    if "tensor" in axes:
        zeroshard.checkpoint_activations(model, partition=True)
    tokens = torch.arange(2).view(1, -1)
    for _ in range(3):
        dist.barrier()
        before = received_bytes()
        dist.barrier()
        with zeroshard.profile(model):
            take_step(optimizer, model(tokens, tokens))
        if stage < 3:  # the all-gathers of the step end when the parameters are used
            sum(parameter.sum() for parameter in model.parameters())
        dist.barrier()
        received = received_bytes() - before
    report = zeroshard.report(model)
    counted = report.communicated + (report.tensor_traffic.bytes if report.tensor_traffic is not None else 0)
    size = max(axes.values())  # of every axis with more than one rank
    return counted * (size - 1) / size, received


@pytest.mark.guarantee("Traffic")
@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes with Linux's TCP_INFO")
@pytest.mark.parametrize(
    ("axes", "stage", "partition"),
    [
        ({"shard": 2}, 1, "hybrid"),
        ({"shard": 3}, 2, "hybrid"),
        ({"shard": 4}, 3, "hybrid"),
        ({"replicate": 2, "shard": 2}, 3, "hybrid"),
        ({"replicate": 2, "shard": 2}, 3, "hierarchical"),
        ({"replicate": 2, "shard": 2}, 2, "full"),
        ({"shard": 2, "tensor": 2}, 2, "hybrid"),
    ],
)
def test_the_wire_moves_the_bytes_of_the_report(axes: dict[str, int], stage: int, partition: str) -> None:
    ranks = math.prod(axes.values())
    for promised, received in run_processes(ranks, measure_wire, axes, stage, False, partition):
        assert received == pytest.approx(promised, rel=0.03, abs=2**14)  # headers, heartbeats


@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes with Linux's TCP_INFO")
def test_the_wire_moves_the_bytes_of_whole_parameters_too() -> None:
    found = run_processes(3, measure_wire, {"shard": 3}, 3, True)
    promised, received = (sum(part) for part in zip(*found, strict=True))  # a rank's own share of an all-to-all differs
    assert received == pytest.approx(promised, rel=0.03, abs=2**14)


def scatter_dtensor(rank: int) -> tuple[float, int]:
    """Return what a reduce-scatter of a DTensor is counted as receiving, and what the sockets have received."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    partial_sums = DTensor.from_local(torch.ones(2**18), mesh, [Partial()], run_check=False)
    for _ in range(2):  # the first one connects
        before = received_bytes()
        dist.barrier()
        with TPTrafficMode(MeshAxis.from_group(mesh.get_group())) as counted:
            (partial_sums.redistribute(placements=[Shard(0)]).to_local() * 1).sum().item()
        dist.barrier()
        received = received_bytes() - before
    return counted.traffic.bytes / 2, received


@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes with Linux's TCP_INFO")
def test_a_reduce_scatter_of_dtensors_is_counted_as_gloo_moves_it() -> None:
    for counted, received in run_processes(2, scatter_dtensor):
        assert received == pytest.approx(counted, rel=0.03, abs=2**14)


def sum_with_delays(rank: int, world: int, dtype: torch.dtype) -> None:
    """Reduce-scatter twice, the ranks arriving in both orders."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(world, world * 64, generator=generator).to(dtype)  # of all ranks
    expected = inputs[0].clone()
    for other in inputs[1:]:
        expected += other
    axis, checker = MeshAxis.from_group(dist.group.WORLD), ConsistencyChecker(None, 0, [0], timeout=60.0)
    comm = Communicator([axis], torch.device("cpu"), axis, checker)
    for position in (rank, world - rank):
        time.sleep(0.02 * position)
        packed, shard = inputs[rank].clone(), torch.empty(64, dtype=dtype)
        comm.reduce_scatter(shard, packed, "sum", torch.empty_like(packed)).wait()
        assert torch.equal(shard, expected.view(world, -1)[rank])
        assert torch.equal(packed, inputs[rank])
    assert comm.counters.total["reduce-scatter"] == Traffic(2, 2 * packed.nbytes)


@pytest.mark.guarantee("Order of sums")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_gloo_sums_in_the_order_of_the_ranks_and_keeps_its_input(world: int, dtype: torch.dtype) -> None:
    run_processes(world, sum_with_delays, world, dtype)


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        (0, {"all-reduce": 2}),
        (1, {"reduce-scatter": 1, "all-gather": 1}),
        (2, {"reduce-scatter": 1, "all-gather": 1}),
        (3, {"reduce-scatter": 1, "all-gather": 2}),
    ],
)
def test_each_stage_uses_its_own_collectives(stage: int, kinds: dict[str, int]) -> None:
    for report, _ in run_threads(2, steady_step, SMALL, 3, {"stage": stage}):
        sizes = {kind: traffic.bytes for kind, traffic in report.collectives.items() if traffic.bytes > 1024}
        assert sizes.keys() == kinds.keys()
        for kind, times in kinds.items():
            assert sizes[kind] == pytest.approx(times * SMALL.parameters * 2, rel=0.05)


@every_stage
def test_one_rank_alone_communicates_nothing(stage: int) -> None:
    ((report, events),) = run_processes(1, steady_step, SMALL, 2, {"stage": stage})
    assert report.communicated == 0
    assert not events


@every_stage
def test_smaller_buckets_make_more_and_smaller_collectives_of_the_same_volume(stage: int) -> None:
    (large, at_large), *_ = run_processes(2, steady_step, SMALL, 3, {"stage": stage, "bucket_size": 2**25})
    (small, at_small), *_ = run_processes(2, steady_step, SMALL, 3, {"stage": stage, "bucket_size": 2**12})
    assert small.communicated == pytest.approx(large.communicated, rel=0.02)
    for kind, traffic in large.collectives.items():
        if traffic.bytes < 1024:
            continue
        assert small.collectives[kind].count > 2 * traffic.count
        times = 2 if kind == "all-reduce" else 1
        assert max(sizes_of(at_small, kind)) <= 2 * times * 2**12 < max(sizes_of(at_large, kind))


# ------------------------------------------------------------------------------------------------- prefetch

HIDDEN = (67, 199, 331, 463)  # of each block: sizes tell the blocks apart, in gathers and in products


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden, bias=False), nn.Linear(hidden, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def uneven_steps(rank: int, prefetch: bool):
    model, optimizer = sharded(nn.Sequential(*(Block(hidden) for hidden in HIDDEN)), sgd, stage=3, prefetch=prefetch)
    for _ in range(3):
        with Collectives(ops=("mm", "addmm")) as seen:
            loss = model(torch.ones(2, 16)).square().mean()
            seen.events.append(("forward is over", None))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen.events


def first_gathers_and_products(events) -> list[tuple[str, int]]:
    """In order: ("gather", block) and ("compute", block), each when it first happens."""
    first: dict[tuple[str, int], None] = {}
    for name, what in events:
        for block, hidden in enumerate(HIDDEN):
            if name == "all-gather" and abs(what // 4 - 32 * hidden) < 32 * 33:  # elements, alignment allowed
                first["gather", block] = None
            elif name in ("mm", "addmm") and any(hidden in shape for shape in what):
                first["compute", block] = None
    return list(first)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_next_unit_is_gathered_before_the_present_one_computes_when_prefetching(prefetch: bool, backward: bool) -> None:
    for events in run_processes(2, uneven_steps, prefetch):
        over = events.index(("forward is over", None))
        order = first_gathers_and_products(events[over:] if backward else events[:over])
        blocks = list(range(len(HIDDEN)))[:: -1 if backward else 1]
        for present, upcoming in pairwise(blocks):
            ahead = order.index(("gather", upcoming)) < order.index(("compute", present))
            assert ahead == prefetch, order
            assert order.index(("gather", upcoming)) < order.index(("compute", upcoming))


def test_a_change_of_order_costs_a_missed_prefetch_and_no_wrong_result() -> None:
    model = InOrder(Block(hidden) for hidden in HIDDEN)
    orders = [(0, 1, 2, 3), (0, 1, 2, 3), (2, 0, 3, 1), (3, 2), (0, 1, 2, 3), (1, 1, 0)]
    x = torch.ones(2, 16)

    def body(rank: int):
        ours, _ = sharded(model, stage=3)
        losses = []
        for order in orders:
            loss = ours(x, order).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return losses, zeroshard.full_gradient(ours, "blocks.1.up.weight")

    plain = copy.deepcopy(model)
    expected = []
    for order in orders:
        loss = plain(x, order).square().sum()
        loss.backward()
        expected.append(loss.detach())
    for losses, gradient in run_threads(2, body):
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(gradient, plain.blocks[1].up.weight.grad)
