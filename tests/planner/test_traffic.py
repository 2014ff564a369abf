"""The bytes that are predicted for a step, by collective, and those of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import at_stages
from ranks import run_threads
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import predict_memory, predict_traffic
from zeroshard.train.options import StepOptions
from zeroshard.train.training_setup import make_optimizer

TINY = GPTConfig(vocab_size=64, context=8, layers=2, heads=2, width=32)


def moved_bytes(
    model: GPT, optimizer: str, mesh_shape: tuple[int, ...], accumulate: int = 1, **options: Any
) -> list[dict[str, int]]:
    """The bytes of the second step of each rank, without those of small all-reduces."""

    def train(rank: int) -> dict[str, int]:
        mine = copy.deepcopy(model)
        inner = make_optimizer(mine, StepOptions(optimizer=optimizer))  # type: ignore[arg-type]
        sharded, stepper = zeroshard.shard(mine, inner, mesh=init_device_mesh("cpu", mesh_shape), **options)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            for _ in range(accumulate):
                sharded(tokens, tokens).backward()
            stepper.step()
            stepper.zero_grad()
        kinds = zeroshard.report(sharded).collectives
        return {kind: traffic.bytes for kind, traffic in kinds.items() if traffic.bytes > 1000}

    return run_threads(torch.Size(mesh_shape).numel(), train)


@pytest.mark.parametrize("partition", ["hierarchical", "hierarchical-gradients"])
def test_only_trained_parameters_go_over_the_outer_axis_after_a_step(partition: str) -> None:
    model = GPT(TINY)
    for block in model.blocks:
        block.mlp.up.weight.requires_grad_(False)
    options: dict[str, Any] = {"stage": 3, "precision": "bf16", "partition": partition}
    predicted = predict_traffic(model, ranks=4, replicas=2, on_gpu=False, **options).step
    assert predicted["outer all-gather"] < predicted["all-gather"] / 4  # gathered twice, by 2 inner ranks
    for moved in moved_bytes(model, "adamw", (2, 2), **options):
        assert predicted == moved


@pytest.mark.parametrize("predict", [predict_traffic, predict_memory])
def test_parameters_over_an_inner_axis_of_one_rank_are_refused_as_by_shard(predict: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="partitions parameters over the inner axis of the mesh, which has one rank"):
        predict(GPT(TINY), ranks=4, replicas=4, stage=3, partition="hierarchical", on_gpu=False)


@at_stages(1, 2, 3)
def test_a_mesh_with_one_inner_rank_has_one_axis(stage: int) -> None:
    options: dict[str, Any] = {"stage": stage, "partition": "full", "reduce_wire": "int8"}
    predicted = predict_traffic(GPT(TINY), ranks=4, replicas=4, on_gpu=False, **options).step
    assert predicted.keys() == {"all-gather", "reduce-scatter"}
    for moved in moved_bytes(GPT(TINY), "adamw", (4, 1), **options):
        assert predicted == moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_owners_of_muons_matrices_get_gradients_and_values_if_there_are_only_16_bits(dtype: torch.dtype) -> None:
    model = GPT(TINY).to(dtype)
    predicted = predict_traffic(model, ranks=3, optimizer="muon", on_gpu=False, stage=3).step
    found = moved_bytes(model, "muon", (3,), stage=3)
    most = max(moved["all-to-all"] for moved in found)  # prediction: of the rank that owns the most
    assert predicted == pytest.approx({**found[0], "all-to-all": most}, rel=0.05)
    numel = TINY.layers * 12 * TINY.width**2
    to_owner = 2 * numel / 3 * (2 if dtype == torch.bfloat16 else 1)
    assert most == pytest.approx(to_owner + 2 * numel / 3, rel=0.1)
