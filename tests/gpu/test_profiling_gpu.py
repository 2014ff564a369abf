"""Traces of steps on a GPU: kernels and the labels of what launched them. ZEROSHARD_TEST_GLOO=1 tries it on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ranks import run_nccl, run_processes
from test_profiling import labels, read
from torch import nn

import zeroshard

ON_GLOO = os.environ.get("ZEROSHARD_TEST_GLOO") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or ON_GLOO), reason="needs a GPU")

WIDTH, BLOCKS, STEPS = 256, 3, 2


def traced(rank: int, directory: str, stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks).to(ranks.device())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = zeroshard.shard(model, optimizer, stage=stage, precision="bf16", units=["0", "1", "2"])
    x = torch.ones(8, WIDTH, device=ranks.device())

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    with zeroshard.profile(model, trace=Path(directory) / "trace.json.gz") as profile:
        for _ in range(STEPS):
            step()
    assert profile.trace is not None
    return read(profile.trace)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trace_has_kernels_streams_and_labels(stage: int, tmp_path: Path) -> None:
    traces = (run_processes if ON_GLOO else run_nccl)(2, traced, str(tmp_path), stage)
    for rank, trace in enumerate(traces):
        events = trace["traceEvents"]
        assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"rank {rank}"}
        found = [label.name for lane in labels(trace).values() for label in lane]  # on a GPU, backward has its thread
        assert found.count("forward") == STEPS
        for unit in ("0", "1", "2"):
            assert found.count(f"forward {unit!r}") == found.count(f"pre_backward {unit!r}") == STEPS
            assert found.count(f"reduce gradients {unit!r}") == STEPS
            assert found.count(f"unshard {unit!r}") == (2 if stage == 3 else 1) * STEPS
        assert any(name.startswith("update ") for name in found)
        if ON_GLOO:
            continue
        kernels = [e for e in events if e.get("cat") == "kernel"]
        names = [kernel["name"] for kernel in kernels]
        assert any("AllGather" in name for name in names) and any("ReduceScatter" in name for name in names), names
        compute = {e["tid"] for e in kernels if "nccl" not in e["name"].lower()}
        assert {e["tid"] for e in kernels if "AllGather" in e["name"]} - compute  # another stream: it can overlap
        on_device = {e["name"] for e in events if e.get("cat") == "gpu_user_annotation"}
        assert {f"zeroshard: forward {unit!r}" for unit in ("0", "1", "2")} <= on_device
