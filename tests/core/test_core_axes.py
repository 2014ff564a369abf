"""Meshes of two axes, and parameters that other ranks share than the rest of the model."""

from __future__ import annotations

import copy
from typing import Any

import plain
import pytest
import torch
import torch.distributed as dist
from core_runs import BUCKETS, PARTITIONS, Program, assert_same, in_processes, new_core, on_ranks
from core_runs import tested_core as tested_core
from pairs import pairwise
from plain import batches
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_gather, all_reduce
from zoo import built, make_net

NET = make_net()
PROGRAMS = ["F0 B0 C S Z", "F0 B0 F1 B1 C S Z", "F0 N0 F1 B1 V C S Z", "F0 F1 B0 C B1 S Z"]


@pytest.mark.parametrize(("partition", "program", "stage"), pairwise(PARTITIONS, PROGRAMS, range(4)))
def test_partitions_of_a_mesh(partition: str, program: str, stage: int) -> None:
    options: dict[str, Any] = {"mesh": (2, 2), "partition": partition, "stages": (stage,), "bucket_size": 100}
    assert_same(NET, program, plain.adamw, world=4, **options)
    if stage > 1:
        assert_same(NET, program, world=4, precision="bf16", **options)


@pytest.mark.parametrize(("shape", "partition"), pairwise([(1, 2), (2, 1), (3, 1)], ["hybrid", "full"]))
def test_meshes_with_an_axis_of_one_rank(partition: str, shape: tuple[int, int]) -> None:
    assert_same(NET, "F0 B0 C S Z", world=max(shape), mesh=shape, partition=partition)


@pytest.mark.parametrize("partition", ["full", "hierarchical-gradients"])
def test_partitions_in_processes(partition: str) -> None:
    options: dict[str, Any] = {"mesh": (2, 2), "partition": partition, "stages": (2, 3), "run": in_processes}
    assert_same(NET, "F0 N0 F1 B1 C S Z", world=4, **options)


@pytest.mark.parametrize("size", [100, BUCKETS[1]])
def test_one_backward_gives_the_bits_of_a_hybrid_mesh(size: int) -> None:
    data = batches(3, rows=24)
    options: dict[str, Any] = {"mesh": (2, 2), "bucket_size": size}
    wanted = plain.run_ranks(4, NET, plain.adamw, data, stage=3, **options)
    for partition in PARTITIONS[1:]:
        found = plain.run_ranks(4, NET, plain.adamw, data, stage=3, partition=partition, **options)
        plain.assert_equal(found, wanted)


class Experts(nn.Module):
    """Layers that are weighed by a router; each rank of a group may hold some of them, for the rows of all."""

    def __init__(self, count: int = 4, width: int = 7) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.first = 0
        self.group: dist.ProcessGroup | None = None

    def hold(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts only."""
        count = len(self.experts) // mesh.size()
        self.rank, self.size, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        self.first = self.rank * count
        self.experts = self.experts[self.first : self.first + count]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        if self.group is not None:
            x, weights = (torch.cat(all_gather(mine, self.group)) for mine in (x, weights))
        y = sum(weights[:, self.first + i, None] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))
        return y if self.group is None else all_reduce(y, group=self.group).chunk(self.size)[self.rank]


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def plain_name(model: WithExperts, name: str) -> str:
    """Return what the plain model calls a parameter of this rank's."""
    words = name.split(".")
    if "experts" in words:
        words[3] = str(int(words[3]) + model.layers[int(words[1])].first)
    return ".".join(words)


BASE = built(WithExperts)
AXES = ("layers.0.experts", "layers.1.experts")
PLACES: dict[str, tuple[tuple[int, int], bool, Any]] = {  # shape of (experts, data); whether the rest has both; units
    "experts on two ranks each": ((2, 2), False, None),
    "one unit holds both axes": ((2, 2), False, ("layers.0",)),
    "experts on one rank each": ((2, 1), False, None),
    "experts on all ranks": ((1, 2), False, None),
    "four groups of experts": ((4, 1), False, None),
    "the rest on a mesh of two axes": ((2, 2), True, None),
}


@new_core
@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")
@pytest.mark.parametrize(("stage", "place", "program"), pairwise(range(4), PLACES, PROGRAMS))
def test_experts_are_those_of_the_plain_run(stage: int, place: str, program: str) -> None:
    """And norms are of all experts, not of this rank's alone."""
    (experts, replicas), has_both, units = PLACES[place]
    world = experts * replicas
    run = Program(program, plain.square_loss)
    data = run.divided(plain.numbers(4, 4 * world, 7))
    wanted = plain.run_plain(BASE, plain.adamw, data, run)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (experts, replicas), mesh_dim_names=("experts", "data"))
        own = init_device_mesh("cpu", (experts, replicas), mesh_dim_names=("replicate", "shard")) if has_both else None
        model: Any = copy.deepcopy(BASE)
        for layer in model.layers:
            layer.hold(mesh["experts"])
        options: dict[str, Any] = {"axes": dict.fromkeys(AXES, mesh["data"]), "mesh": own, "units": units}
        model, optimizer = plain.zeroshard.shard(model, plain.adamw(model), stage=stage, timeout=20, **options)
        norms = run(model, optimizer, plain.shares(data, rank, world))
        found = {plain_name(model, name): value for name, value in plain.full_parameters(model).items()}
        plain.assert_close(found, {name: wanted[name] for name in found})
        plain.assert_close(plain.outcome({}, norms), {k: v for k, v in wanted.items() if k.startswith("number")})

    on_ranks(world, body)
