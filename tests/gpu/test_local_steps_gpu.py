"""Local steps on NCCL ranks, which share a GPU if there are not enough: the numbers of a plain loop over replicas.

Without a GPU, ZEROSHARD_TEST_GLOO=1 runs the cases over gloo, to debug them.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from local_replicas import DILOCO, PlainReplicas, Values
from pairs import every_stage
from plain import adamw_in_groups, assert_close, assert_equal, batches, full_parameters, net_loss, split
from ranks import device, run_nccl, run_processes
from torch.distributed.device_mesh import init_device_mesh
from zoo import make_net

import zeroshard

ON_GLOO = os.environ.get("ZEROSHARD_TEST_GLOO") == "1"
pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() or ON_GLOO), reason="needs a GPU, which NCCL ranks can share"),
    pytest.mark.filterwarnings("ignore:.*between two averages"),
]
run = run_processes if ON_GLOO else run_nccl
STEPS = 7
FUSED = partial(torch.optim.AdamW, lr=0.01, fused=True)  # its step counts are on the device


def train(rank: int, shape: tuple[int, int], options: dict[str, Any], path: str | None) -> tuple[Values, Values]:
    """Train this rank, and a plain loop over all replicas beside it; return the values of its replica in both."""
    model: Any = make_net().to(device())
    plain = PlainReplicas(model, adamw_in_groups, shape[0], 3, options.get("outer_optimizer"))
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))
    model, optimizer = zeroshard.shard(model, adamw_in_groups(model), mesh=mesh, local_steps=3, **options)
    for number, batch in enumerate(batches(STEPS)):
        if path is not None and number == 5:
            zeroshard.save(path, model, optimizer)
            optimizer.param_groups[0]["lr"] = 3.0
            zeroshard.load(path, model, optimizer)
        plain.step(batch.to(device()))
        net_loss(model, split(batch, rank, shape[0] * shape[1]).to(device())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), plain.values(rank // shape[1])


@pytest.mark.parametrize("outer", [None, DILOCO, FUSED], ids=["mean", "DiLoCo", "fused AdamW"])
@every_stage
def test_training_gives_the_numbers_of_a_plain_loop_over_replicas(stage: int, outer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"stage": stage, "outer_optimizer": outer, "precision": "fp32"}
    for found, wanted in run(4, train, (2, 2), options, str(tmp_path / "step")):
        assert_close(found, wanted, 2e-5)


@pytest.mark.parametrize("offload", [None, "host"])
def test_states_on_the_host_and_bf16_give_the_same_bits_on_all_stages(offload: str | None) -> None:
    stages = []
    for stage in (1, 2, 3):
        options: dict[str, Any] = {"stage": stage, "outer_optimizer": DILOCO, "precision": "bf16", "offload": offload}
        stages.append([found for found, _ in run(4, train, (2, 2), options, None)])
    for first, *others in zip(*stages, strict=True):
        for other in others:
            assert_equal(other, first)
