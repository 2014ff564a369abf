"""What is predicted from shapes alone is what a rank then holds."""

from __future__ import annotations

import pytest
import torch
from ranks import run_threads
from torch import nn

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.state_sizes import predict_memory

COUNTERS = 512  # bytes of step counts, one for each stretch of shards
CONFIG = GPTConfig(vocab_size=500, context=8, layers=3, heads=2, width=32)


class Adapted(nn.Module):
    """Frozen parameters in bf16 and trained ones in fp32, in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(24, 24).to(torch.bfloat16).requires_grad_(False), nn.Linear(24, 24, bias=False)])
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, trained in self.blocks:
            x = x + trained(frozen(x.to(torch.bfloat16)).float())
        return x


def measured(rank: int, model: nn.Module, inputs: tuple, options: dict):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model, optimizer = zeroshard.shard(model, optimizer, **options)
    held = {}
    for _ in range(2):
        optimizer.scale(model(*inputs).sum()).backward()
        held = {kind: nbytes.now for (kind, _), nbytes in zeroshard.report(model).memory.items()}  # with gradients
        optimizer.step()
        optimizer.zero_grad()
    return held, zeroshard.report(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "precision"), [(1, None), (2, None), (3, "bf16"), (4, "fp16")])
def test_the_states_of_a_gpt_are_predicted_to_the_byte(stage: int, ranks: int, precision: str | None) -> None:
    options = {"stage": stage, "precision": precision, "bucket_size": 4096, "loss_scale": 1.0}
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.device("meta"):
        predicted = predict_memory(GPT(CONFIG), ranks=ranks, **options)
    results = run_threads(ranks, lambda rank: measured(rank, GPT(CONFIG), (tokens, tokens), options))
    for held, report in results:
        for kind, nbytes in predicted.states.items():
            counters = COUNTERS if kind == "optimizer states" else 0
            assert nbytes <= held.get(kind, 0) <= nbytes + counters, kind
        peak = {kind: nbytes.peak for (kind, _), nbytes in report.memory.items()}
        for kind, nbytes in predicted.transient.items():
            assert peak.get(kind, 0) <= nbytes, kind
        assert sum(held.values()) <= predicted.peak_bytes + COUNTERS


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_and_mixed_parameters_are_predicted_too(stage: int) -> None:
    predicted = predict_memory(Adapted(), ranks=2, stage=stage)
    for held, report in run_threads(2, lambda rank: measured(rank, Adapted(), (torch.ones(2, 24),), {"stage": stage})):
        for kind in ("parameters", "gradients", "master weights"):
            assert held.get(kind, 0) == predicted.states[kind]
        states = report.memory["optimizer states", "device"].now
        assert 0 <= states - predicted.states["optimizer states"] <= COUNTERS


def test_the_papers_first_figure() -> None:
    """7.5B parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB, on a model of that many parameters."""
    width = 2**14
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(28)])
    psi = sum(p.numel() for p in model.parameters())
    assert psi == pytest.approx(7.5e9, rel=0.01)
    for stage, gigabytes in enumerate([120, 31.4, 16.6, 1.9]):
        memory = predict_memory(model, ranks=64, stage=stage, precision="bf16", cast_on_gather=False)
        assert memory.state_bytes / 1e9 * 7.5e9 / psi == pytest.approx(gigabytes, rel=0.02)
