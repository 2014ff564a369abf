"""What a step costs the host: the engine makes as many calls for a unit of many parameters as for one of few."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import run_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from zeroshard import engine

ENGINE = str(Path(engine.__file__).parent)
ROWS, FEW, MANY = 24, 2, 24  # of a block's weight, and parameters that they are cut into


class Cut(nn.Module):
    """A linear layer whose weight is so many parameters, of as many elements in all."""

    def __init__(self, pieces: int, trained: bool = True) -> None:
        super().__init__()
        rows = torch.linspace(-1, 1, ROWS * ROWS).view(pieces, ROWS // pieces, ROWS)
        self.weights = nn.ParameterList(nn.Parameter(part.clone(), requires_grad=trained) for part in rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ torch.cat(list(self.weights)))


class Frozen(nn.Module):
    """The same with a part that is not trained."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.base, self.adapter = Cut(pieces, trained=False), Cut(pieces)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


class Calls:
    """Counts the calls that start in the engine's files or enter them, by the function they start in or enter."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(ENGINE):
            name = f" → {called.__name__}" if event == "c_call" else ""
            self.found[frame.f_code.co_qualname + name] += 1


class Operations(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def train(rank: int, counter: Any, pieces: int, block: type[nn.Module], options: dict[str, Any]) -> Counter[str]:
    """Train until steps repeat, and count one."""
    model = nn.Sequential(*[nn.Sequential(block(pieces)) for _ in range(3)])
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(trained, lr=0.1), **options)

    def step() -> None:
        model(torch.ones(2, ROWS)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with counter() as found:
        step()
    return found.found


def counted(counter: Any, pieces: int, block: type[nn.Module] = Cut, **options: Any) -> Counter[str]:
    """What one of two ranks does in a step."""
    return run_threads(2, train, counter, pieces, block, options)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_calls_of_the_engine_are_as_many_however_many_parameters_a_unit_has(stage: int) -> None:
    few, many = (counted(Calls, pieces, stage=stage) for pieces in (FEW, MANY))
    assert sum(few.values()) > 100
    assert many == few


def test_frozen_parameters_and_another_dtype_cost_no_calls_either() -> None:
    few, many = (counted(Calls, pieces, Frozen, stage=3, precision="bf16") for pieces in (FEW, MANY))
    assert many == few


@pytest.mark.parametrize("stage", [1, 3])
def test_operations_are_as_many_but_for_those_of_the_model(stage: int) -> None:
    asked = []
    for pieces in (FEW, MANY):
        model = nn.Sequential(*[Cut(pieces) for _ in range(3)])
        with Operations() as plain:
            model(torch.ones(2, ROWS)).sum().backward()
        asked.append(plain.found)
    few, many = (counted(Operations, pieces, stage=stage) for pieces in (FEW, MANY))
    assert many - few == asked[1] - asked[0]
