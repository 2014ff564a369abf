"""Whole parameters on real NCCL ranks: each step is that of a plain optimizer with the same gradients.

Without a GPU, ZEROSHARD_TEST_GLOO=1 runs the cases over gloo, to debug them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from plain import assert_close
from ranks import run_nccl, run_processes
from rules import Lamb
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.models import GPT, GPTConfig

ON_GLOO = os.environ.get("ZEROSHARD_TEST_GLOO") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or ON_GLOO), reason="needs a GPU, which several NCCL ranks can share"
)
run = run_processes if ON_GLOO else run_nccl

SHAPE = GPTConfig(vocab_size=64, context=16, layers=2, heads=4, width=64)
OPTIMIZERS: dict[str, Any] = {
    "Lamb": lambda parameters: Lamb(parameters),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.02),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02),
}
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "Lamb", {"stage": 0}),
    (2, "Adafactor", {"stage": 3, "bucket_size": 20_000}),
    (2, "Muon", {"stage": 2, "precision": "bf16"}),
    (4, "Muon", {"stage": 3, "bucket_size": 20_000}),
    (4, "Lamb", {"stage": 1, "mesh": (2, 2)}),
    (4, "Lamb", {"stage": 3, "mesh": (2, 2), "tensor": True}),
    (2, "Adafactor", {"stage": 3, "precision": "bf16", "offload": "host", "bucket_size": 20_000}),
    (2, "Lamb", {"stage": 3, "offload": {"optimizer": {"host": 0.5, "disk": 0.5}}}),
    (2, "Lamb", {"stage": 2, "precision": "fp16", "offload": "host"}),
]


def step_like_a_plain_optimizer(rank: int, kind: str, options: dict[str, Any]) -> dict[str, int]:
    """Train a few steps; before each, give the gradients to a plain optimizer too, and compare the parameters."""
    device, options = ranks.device(), dict(options)
    mesh_shape, is_divided = options.pop("mesh", None), options.pop("tensor", False)
    names = ("shard", "tensor") if is_divided else ("replicate", "shard")
    mesh = None if mesh_shape is None else init_device_mesh(device.type, mesh_shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = GPT(SHAPE).to(device)
    plain = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    wanted = OPTIMIZERS[kind](list(plain.values()))
    trained = [p for group in wanted.param_groups for p in group["params"]]
    inner = OPTIMIZERS[kind](list(model.parameters()))
    model, optimizer = zeroshard.shard(model, inner, mesh=mesh, elementwise=False, **options)
    generator = torch.Generator().manual_seed(rank // 2 if is_divided else rank)
    for number in range(4):
        ids = torch.randint(64, (2, 16), generator=generator).to(device)
        optimizer.scale(model(ids, ids)).backward()
        for name, p in plain.items():
            p.grad = zeroshard.full_gradient(model, name).to(p.dtype).clone()
        if number == 2 and kind != "Muon":  # it computes in bf16: the last bit of a coefficient would show
            optimizer.clip_grad_norm_(0.1)
            nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        wanted.step()
        optimizer.zero_grad()
        ours = {name: zeroshard.full_parameter(model, name) for name in plain}
        assert_close(ours, {name: p.detach() for name, p in plain.items()}, 3e-6 if kind != "Muon" else 1e-3)
        assert all(p.grad.any() for p in trained if p.grad is not None)
    return {tier: held.now for (what, tier), held in zeroshard.report(model).memory.items() if what.startswith("optim")}


@pytest.mark.parametrize(("world", "kind", "options"), CASES, ids=str)
def test_a_step_on_real_ranks_is_that_of_a_plain_optimizer(
    world: int, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    offload = options.get("offload")
    if isinstance(offload, dict):
        options = {**options, "offload": {**offload, "directory": str(tmp_path)}}
    for held in run(world, step_like_a_plain_optimizer, kind, options):
        assert bool(held.get("device")) == (offload is None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_states_on_the_host_take_no_device_memory() -> None:
    allocated = {}
    for offload in (None, "host"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        muon = torch.optim.Muon(model.parameters(), lr=0.02)
        model, optimizer = zeroshard.shard(model, muon, offload=offload, bucket_size=2**21)
        for _ in range(3):
            model(torch.ones(8, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        allocated[offload] = torch.cuda.memory_allocated()
        del model, muon, optimizer
    states = 4 * 4 * 1024 * 1024
    assert allocated[None] - allocated["host"] >= 0.99 * states  # updates from the host keep a few small tensors
