"""The core under test, and loops written as programs.

The environment variable ZEROSHARD_TESTED_CORE names another module with the same functions: "zeroshard" runs these
tests on the public API. What that cannot do is marked `new_core`.

A *program* is a line such as "F0 F1 B0 B1 C S Z": what a loop does with one batch, which is divided into as many parts
as the program names.

    F0  forward of part 0            B0  backward of its loss     B01  one backward of the sum of two losses
    R0  backward, keep the graph     N0  backward in no_sync      E0   forward without gradients
    C   clip by norm                 V   clip by value            S    step
    Z   zero_grad                    z   zero_grad to zeros       D0   drop a loss without a backward
    G0  backward that makes a graph  A0  autograd.grad, assigned  H    the test's habit, which may return numbers
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import plain
import pytest
import round_trips
import torch
import torch.distributed as dist
from plain import batches
from ranks import run_processes, run_threads
from torch import nn

api: Any = importlib.import_module(os.environ.get("ZEROSHARD_TESTED_CORE", "zeroshard.core"))
new_core = pytest.mark.skipif(api.__name__ == "zeroshard", reason="the public API does not have this yet")

Habit = Callable[[Any, Any], Iterable[float] | None]
BUCKETS = (8, 25 << 20)
PARTITIONS = ("hybrid", "full", "hierarchical", "hierarchical-gradients", "inner-gradients")
on_ranks = partial(run_threads, timeout=30)
MAX_NORM = 0.05  # less than the norms here
MAX_VALUE = 0.003


@contextlib.contextmanager
def tested() -> Iterator[None]:
    """Let the harness shard with the tested core."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (plain, round_trips):
            patch.setattr(module, "zeroshard", api)
        yield


@pytest.fixture(autouse=True)
def tested_core() -> Iterator[None]:
    """Let the driver beside the plain run shard with the tested core, in the modules that import this."""
    with tested():
        yield


def in_processes(world: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run as `run_processes` does, with the tested core."""
    return run_processes(world, _with_tested_core, body, *args, **options)


def _with_tested_core(rank: int, body: Callable[..., Any], *args: Any) -> Any:
    with tested():
        return body(rank, *args)


def be_one_of(world: int) -> None:
    """Let this process be the first of several ranks, alone: the fake backend moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def no_sync(model: Any) -> contextlib.AbstractContextManager[Any]:
    """no_sync() of a sharded model; nothing for a plain one."""
    return api.no_sync(model) if api.is_sharded(model) else contextlib.nullcontext()


class Program:
    """A loop that runs a program with each batch, and returns norms and what habits do; see the top of the file."""

    def __init__(self, text: str, loss_of: plain.Loss, habit: Habit | None = None) -> None:
        self.events, self.loss_of, self.habit = text.split(), loss_of, habit
        self.parts = 1 + max((int(digit) for event in self.events for digit in event[1:]), default=0)
        self.has_one_backward = sum(event[0] in "BRNGA" for event in self.events) == 1

    def divided(self, data: list[torch.Tensor]) -> list[Any]:
        """Return each batch as its parts; the driver gives each rank its rows of every part."""
        return [batch.chunk(self.parts) for batch in data]

    def __call__(self, model: Any, optimizer: Any, data: list[Any]) -> list[float]:
        norms = list[float]()
        for parts in data:
            losses = dict[int, torch.Tensor]()
            for event in self.events:
                self.run(event[0], [int(digit) for digit in event[1:]], model, optimizer, parts, losses)
                if event == "C":
                    norms.append(plain.clip(model, optimizer, MAX_NORM).item())
                elif event == "H" and self.habit is not None:
                    norms += self.habit(model, optimizer) or ()
        return norms

    def run(self, kind: str, numbers: list[int], model: Any, optimizer: Any, parts: Any, losses: Any) -> None:
        if kind == "F":
            losses[numbers[0]] = self.loss_of(model, parts[numbers[0]])
        elif kind == "E":
            with torch.no_grad():
                self.loss_of(model, parts[numbers[0]])
        elif kind == "D":
            del losses[numbers[0]]
        elif kind == "R":
            losses[numbers[0]].backward(retain_graph=True)
        elif kind == "G":
            losses.pop(numbers[0]).backward(create_graph=True)
        elif kind == "A":
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(losses.pop(numbers[0]), parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        elif kind in "BN":
            with no_sync(model) if kind == "N" else contextlib.nullcontext():
                sum(losses.pop(number) for number in numbers).backward()
        elif kind == "V" and api.is_sharded(model):
            optimizer.clip_grad_value_(MAX_VALUE)
        elif kind == "V":
            nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
        elif kind == "S":
            optimizer.step()
        elif kind in "Zz":
            optimizer.zero_grad(set_to_none=kind == "Z")


def assert_same(
    base: nn.Module,
    loop: str | plain.Loop = "F0 B0 S Z",
    make: plain.MakeOptimizer = plain.decayed,
    data: list[torch.Tensor] | None = None,
    world: int = 2,
    stages: Sequence[int] = (0, 1, 2, 3),
    precision: str | None = None,
    identical: bool | None = None,
    loss_of: plain.Loss = plain.net_loss,
    habit: Habit | None = None,
    run: Callable[..., Any] = run_threads,
    **options: Any,
) -> None:
    """Assert that a program or loop trains as the plain run does, in each stage.

    In fp32 within 1e-6, and with the same bits in stages 1, 2 and 3 where a step has one backward. In bf16 within a
    tenth of what each parameter has moved: roundings are smaller, and a wrong divisor or a lost part is not.
    """
    data = batches(3, rows=24) if data is None else data
    if isinstance(loop, str):
        loop = Program(loop, loss_of, habit)
        data = loop.divided(data)
        identical = loop.has_one_backward if identical is None else identical
    options = {"precision": precision, "timeout": 20, **options}
    wanted = plain.run_plain(base, make, data, loop)
    plain.assert_moved(base, wanted)
    found = dict[int, plain.Tensors]()
    for stage in stages:
        results = run(world, run_rank, world, base, make, data, loop, {**options, "stage": stage})
        for other in results[1:]:
            plain.assert_equal(other, results[0])
        found[stage] = results[0]
        print(f"compare stage {stage} with the plain run")  # shown with an error
        if precision is None:
            plain.assert_close(found[stage], wanted)
        else:
            assert_nearly(found[stage], wanted, plain.copied(base))
    for stage in {2, 3}.intersection(stages) if identical and 1 in stages else ():
        plain.assert_equal(found[stage], found[1])


def run_rank(rank: int, world: int, base: nn.Module, make: Any, data: Any, loop: Any, options: Any) -> plain.Tensors:
    """Run a loop on one rank's part of each batch; return its outcome with the full masters."""
    model, optimizer = plain.sharded(base, make, **options)
    numbers = loop(model, optimizer, plain.shares(data, rank, world))
    masters = plain.masters(model)
    for name, computed in plain.full_parameters(model).items():
        assert torch.equal(computed, masters[name].to(computed.dtype)), f"{name} is not what its master is"
    return plain.outcome(masters, numbers)


def assert_nearly(ours: plain.Tensors, wanted: plain.Tensors, start: plain.Tensors) -> None:
    """Assert that each tensor is within a tenth of what it has moved, or a fiftieth of what others have."""
    assert ours.keys() == wanted.keys()
    moved = {name: (value - start[name] if name in start else value).norm() for name, value in wanted.items()}
    for name, value in wanted.items():
        assert (ours[name] - value).norm() <= 0.1 * moved[name] + 0.02 * max(moved.values()), name
