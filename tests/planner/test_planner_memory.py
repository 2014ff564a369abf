"""What is predicted from shapes alone is what a rank then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from ranks import run_threads
from torch import nn

import zeroshard
from zeroshard.comm import Traffic
from zeroshard.config.config import Config
from zeroshard.models import GPT, GPTConfig
from zeroshard.optim import MuonWithAdamW
from zeroshard.planner.state_sizes import predict_memory, state_sizes
from zeroshard.planner.whole_params import find_whole_params
from zeroshard.sharding import find_block_matrices

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
    return measure_steps(*zeroshard.shard(model, optimizer, **options), inputs)


def measure_steps(model: nn.Module, optimizer: Any, inputs: tuple) -> tuple[dict[str, int], zeroshard.Report]:
    held: dict[str, int] = {}
    for _ in range(2):
        optimizer.scale(model(*inputs).sum()).backward()
        held = {kind: nbytes.now for (kind, _), nbytes in zeroshard.report(model).memory.items()}  # with gradients
        optimizer.step()
        optimizer.zero_grad()
    return held, zeroshard.report(model)


@every_stage
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


def train_muon(rank: int, options: dict) -> tuple[dict[str, int], zeroshard.Report]:
    model = GPT(CONFIG)
    matrices = [p for name, p in model.named_parameters() if name in find_block_matrices(model)]
    others = [p for name, p in model.named_parameters() if name not in find_block_matrices(model)]
    optimizer = MuonWithAdamW(torch.optim.Muon(matrices), torch.optim.AdamW(others))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    return measure_steps(*zeroshard.shard(model, optimizer, **options), (tokens, tokens))


@pytest.mark.parametrize(
    ("ranks", "stage", "precision"), [(1, 2, None), (2, 3, None), (3, 1, "bf16"), (4, 3, "bf16"), (2, 0, None)]
)
def test_the_states_of_muon_are_predicted_to_the_byte_on_every_owner(
    ranks: int, stage: int, precision: str | None
) -> None:
    options = {"stage": stage, "precision": precision, "bucket_size": 4096}
    with torch.device("meta"):
        model = GPT(CONFIG)
    predicted = predict_memory(model, ranks=ranks, optimizer="muon", on_gpu=False, **options)
    sizes = state_sizes(
        model, Config(**options), ranks=ranks, on_gpu=False, whole=find_whole_params(model, "muon")
    ).whole
    assert sizes is not None
    results = run_threads(ranks, train_muon, options)
    for rank, (held, report) in enumerate(results):
        owner = rank if stage else 0
        states = report.memory["optimizer states", "device"].now
        assert 0 <= states - sizes.optimizer_state_bytes[owner] <= COUNTERS
        assert report.routing is not None
        assert not report.routing.whole and tuple(report.routing.flops_by_owner()) == sizes.loads.flops
        for kind in ("parameters", "gradients", "master weights"):
            assert held.get(kind, 0) == predicted.states[kind]
        exchanged = report.collectives.get("all-to-all", Traffic())
        if ranks == 1 or stage == 0:
            assert (sizes.collectives, exchanged.count) == (0, 0)
        else:
            assert exchanged.count == sizes.collectives
            # the parts of a rank are not all equal, because buckets are divided, not parameters
            expected = sizes.to_owner_bytes + 2 * sizes.loads.elements[owner]
            assert exchanged.bytes == pytest.approx(expected, rel=0.3)
    fullest = max(report.memory["optimizer states", "device"].now for _, report in results)
    assert 0 <= fullest - predicted.states["optimizer states"] <= COUNTERS
    if ranks > 1 and stage:
        sent = sum(report.collectives["all-to-all"].bytes for _, report in results)
        expected = ranks * sizes.to_owner_bytes + 2 * sum(sizes.loads.elements)
        assert sent == pytest.approx(expected, rel=0.01)
        peak = max(report.memory["step", "device"].peak for _, report in results)
        assert peak <= predicted.transient["step"]


@at_stages(1, 3)
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
