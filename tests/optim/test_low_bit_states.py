"""Optimizers of bitsandbytes and torchao, whose states have 4 or 8 bits. They are tested where they are installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import copied, full_parameters
from ranks import run_processes
from torch import nn
from zoo import built

import zeroshard

BITSANDBYTES = ["bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.Lion8bit", "bitsandbytes.optim.LAMB8bit"]
TORCHAO = ["torchao.optim.AdamW8bit", "torchao.optim.AdamW4bit", "torchao.optim.AdamWFp8"]
NUMEL = 256 * 256  # of each matrix; the vector has less than 4096 elements, so its states are in fp32
STEPS = 4


class Distance(nn.Module):
    """The gradient of each element depends on that element alone, so all runs have gradients of the same bits."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, seed: int) -> torch.Tensor:
        target = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(seed))
        return (self.weight - target).square().sum()


def make_model() -> Any:
    return built(lambda: nn.ModuleList([Distance(256, 256), Distance(64), Distance(128, 512)]))


def make(name: str, model: nn.Module) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for module in model:
            module(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_plain(name: str) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make(name, model)
    train(model, optimizer, 0, STEPS)
    return copied(model)


@torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes longer than all tests
def train_and_save(rank: int, name: str, path: str) -> tuple[Any, float]:
    model = make_model()
    model, optimizer = zeroshard.shard(model, make(name, model), stage=2)
    train(model, optimizer, 0, STEPS // 2)
    zeroshard.save(path, model, optimizer)
    train(model, optimizer, STEPS // 2, STEPS)
    return full_parameters(model), zeroshard.report(model).memory["optimizer states", "device"].now


@torch.compiler.set_stance("force_eager")
def load_and_train(rank: int, name: str, path: str, plain_states: Any) -> tuple[Any, Any]:
    model = make_model()
    model, optimizer = zeroshard.shard(model, make(name, model), stage=3)
    zeroshard.load(path, model, optimizer)
    train(model, optimizer, STEPS // 2, STEPS)
    resumed = full_parameters(model)
    optimizer.load_state_dict(plain_states)  # in the form that the class gives them
    zeroshard.load(path, model)
    train(model, optimizer, STEPS // 2, STEPS)
    return resumed, full_parameters(model)


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), (key, (actual[key] - value).abs().max())


@pytest.mark.parametrize("name", BITSANDBYTES + TORCHAO)
def test_states_of_few_bits_are_those_of_the_plain_run(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(".")[0])
    with torch.compiler.set_stance("force_eager"):
        expected = train_plain(name)
        model = make_model()
        halfway = make(name, model)
        train(model, halfway, 0, STEPS // 2)
        states = halfway.state_dict()
    path = str(tmp_path / "a")
    # Processes: the kernels of bitsandbytes on the CPU give other numbers if two threads call them at once.
    saved = run_processes(2, train_and_save, name, path)
    for parameters, _ in saved:
        assert_same_bits(parameters, expected)
    nbytes = sum(nbytes for _, nbytes in saved)
    per_element = {"4bit": 1.06, "Lion8bit": 1.02, "8bit": 2.03, "Fp8": 2.03}
    bits = next(value for key, value in per_element.items() if name.endswith(key))
    small = 64 * 4 * (1 if "Lion" in name else 2)
    assert 0.99 * bits * 2 * NUMEL < nbytes - small < 1.01 * bits * 2 * NUMEL + 3 * 2048 + 100  # with maps and counts
    for resumed, loaded in run_processes(4, load_and_train, name, path, states):
        assert_same_bits(resumed, expected)
        assert_same_bits(loaded, expected)


@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles its update in 32 bits
def train_with_overrides(model: Any, first: int, last: int, path: str | None = None, stage: int | None = None) -> Any:
    """Train with 32 bits for one matrix and a learning rate of its own for another, as options of bitsandbytes."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    optimizer = make("bitsandbytes.optim.AdamW8bit", model)
    manager.override_config(model[2].weight, "lr", 0.03)
    try:
        if stage is not None:
            model, optimizer = zeroshard.shard(model, optimizer, stage=stage)
            if path is not None and first > 0:
                zeroshard.load(path, model, optimizer)
        train(model, optimizer, first, last)
        if path is not None and first == 0:
            zeroshard.save(path, model, optimizer)
        states = optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    finally:
        manager.initialize()
    nested = [state | state.get("__bnb_optimizer_quant_state__", {}) for state in states.values()]  # of the plain run
    parameters = full_parameters(model) if stage is not None else {}
    return parameters, [state["state1"].dtype for state in nested]


def save_and_resume_with_overrides(rank: int, first: int, last: int, stage: int, path: str) -> Any:
    return train_with_overrides(make_model(), first, last, path, stage)


def test_overrides_of_single_parameters_are_those_of_the_plain_run(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = make_model()
    _, dtypes = train_with_overrides(model, 0, STEPS)
    expected = copied(model)
    assert dtypes == [torch.float32, torch.float32, torch.uint8]  # the second has less than 4096 elements
    path = str(tmp_path / "a")
    run_processes(2, save_and_resume_with_overrides, 0, STEPS // 2, 2, path)
    for parameters, found in run_processes(4, save_and_resume_with_overrides, STEPS // 2, STEPS, 3, path):
        assert_same_bits(parameters, expected)
        assert found == dtypes
