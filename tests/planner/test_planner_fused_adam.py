"""What the planner knows of the update in one pass: no buffer, and fewer bytes, where a GPU and fused Adam are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from one_pass import in_one_pass
from plain import adamw, sharded
from torch import nn

import zeroshard
from zeroshard.config.config import Config
from zeroshard.optim import is_supported
from zeroshard.optim.slices import max_slice_numel
from zeroshard.planner.auto import JobTopology, choose_plan
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import StateSizes, state_sizes
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop

MODEL = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
PSI = 4 * 64 * 64


def held(one_pass: bool = True, on_gpu: bool = True, optimizer_states: int = 2, **options: Any) -> StateSizes:
    config = Config(**{"precision": "bf16", "bucket_size": 1024, "cast_on_gather": False, **options})
    return state_sizes(
        MODEL, config, ranks=2, optimizer_states=optimizer_states, on_gpu=on_gpu, has_fused_adam=one_pass
    )


@pytest.mark.parametrize(
    ("chosen", "step", "updated"),
    [
        ({}, 0, 28),
        ({"cast_on_gather": True}, 0, 26),
        ({"cast_on_gather": True, "one_pass": False}, 4 * 1024, 34),
        ({"one_pass": False}, 4 * 1024, 40),  # gradient to the buffer and from it, the master once more
        ({"on_gpu": False}, 4 * 1024, 40),
        ({"optimizer_states": 1}, 4 * 1024, 32),
        ({"precision": "fp16"}, 0, 28),
        ({"precision": None}, 0, 28),
        ({"precision": None, "one_pass": False}, 0, 28),
        ({"reduce_dtype": "fp32"}, 0, 30),
        ({"reduce_dtype": "fp32", "one_pass": False}, 4 * 1024, 42),
        ({"reduce_dtype": torch.float64}, 4 * 1024, 46),
    ],
    ids=str,
)
def test_an_updates_buffer_and_bytes(chosen: dict[str, Any], step: int, updated: int) -> None:
    found = held(**chosen)
    assert (found.step_buffer_bytes, found.update_bytes_per_element) == (step, updated)
    assert found.optimizer_bytes_per_element == 4 * (1 + chosen.get("optimizer_states", 2))
    assert found.states == held(**{**chosen, "one_pass": False}).states


def test_the_buffer_is_the_one_a_step_takes() -> None:
    def peak() -> int:
        model, optimizer = sharded(MODEL, partial(adamw, fused=True), precision="bf16", bucket_size=1024)
        model(torch.ones(1, 64)).float().sum().backward()
        optimizer.step()
        return zeroshard.report(model).memory["step", "device"].peak

    with in_one_pass():
        assert peak() == held(one_pass=True).step_buffer_bytes
    assert peak() == held(one_pass=False).step_buffer_bytes == 4 * max_slice_numel(1024)


@pytest.mark.parametrize("machine", ["h100", "cpu"])
def test_memory_and_time_of_a_plan(machine: str) -> None:
    found = Machine.resolve(machine)
    subjects = [
        TracedModel(MODEL, TrainingLoop(inputs=torch.ones(1, 64), has_fused_adam=flag), precision="bf16")
        for flag in (True, False)
    ]
    choice, gained = Strategy(stage=2), found.kind == "cuda"
    ours, theirs = (subject.footprint(choice, 1, found, timeline=True).timeline[-1] for subject in subjects)
    assert ours.label == "step"
    assert theirs.by_kind["step"] - ours.by_kind["step"] == (4 * PSI if gained else 0)
    fast, slow = (subject.step_time(choice, 1, found).update for subject in subjects)
    assert slow - fast == pytest.approx(12 * PSI / found.bandwidth if gained else 0.0)


def test_plans_follow_the_optimizer_they_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Noted(TracedModel):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            asked.append(self.loop.has_fused_adam)

    monkeypatch.setattr("zeroshard.planner.plans.TracedModel", Noted)
    site = JobTopology(torch.device("cpu"), 1)
    for flag in (True, False):
        choose_plan(MODEL, torch.ones(1, 64), site, batch=1, micro_batch=1, stage="auto", one_pass=flag)
    assert asked == [True, False]
    parameters = list(MODEL.parameters())
    for kind, chosen, served in (
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.1)}, True),
        (torch.optim.AdamW, {}, False),
        (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}, False),
        (torch.optim.SGD, {"fused": True}, False),
    ):
        assert is_supported(kind(parameters, **chosen)) == served
    assert not is_supported(None)
