"""Count the round trips between ranks: how often rank 0 waits, outside of collectives, for the other ranks.

A round trip is one `ConsistencyChecker.confirm` that reaches the store: a rank is about to do something that the
recorded order did not expect, and waits until all ranks have announced the same. What `shard()`, errors and heartbeats
exchange is not counted: they are not part of a step.

`LOOPS` train two blocks in stage 3 on two ranks. A loop is run for twenty steps: what it costs in the first ten, where
the order is learned, and in the next ten, which repeat from then on. So 100 steps take about the first number and nine
times the second. For the loops in their order these sums were 13, 212, 511, 411, 55, 254, 214 and 164 at 7b662b1;
`tests/budgets.toml` has what was measured last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import run_threads, seeded
from torch import nn

import zeroshard
from zeroshard.comm import ConsistencyChecker

STEPS = 10
Loop = Callable[[nn.Module, Any, int], None]


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that gets what rank 0 has compared with the others."""
    found = list[str]()
    confirm = ConsistencyChecker.confirm

    def counting(self: Any, event_index: int, what: str, expected: str) -> None:
        if self.rank == 0 and self.is_distributed:
            found.append(what)
        confirm(self, event_index, what, expected)

    ConsistencyChecker.confirm = counting
    try:
        yield found
    finally:
        ConsistencyChecker.confirm = confirm


def forward(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(3, 6)).pow(2).mean()


def accumulate(model: nn.Module, backwards: int) -> None:
    for _ in range(backwards):
        forward(model).backward()


def gpipe(model: nn.Module, optimizer: Any, step: int) -> None:
    losses = [forward(model) for _ in range(4)]
    for loss in losses:
        loss.backward()


def one_forward_one_backward(model: nn.Module, optimizer: Any, step: int) -> None:
    losses = [forward(model), forward(model)]
    for _ in range(2):
        losses.pop(0).backward()
        losses.append(forward(model))
    for loss in losses:
        loss.backward()


def evaluated(backwards: int) -> Loop:
    """Return a loop that evaluates twenty batches every tenth step."""

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        if step % 10 == 5:
            model.eval()
            with torch.no_grad():
                for _ in range(20):
                    forward(model)
            model.train()
        accumulate(model, backwards)

    return loop


LOOPS: dict[str, Loop] = {
    "plain": lambda model, optimizer, step: accumulate(model, 1),
    "accumulate 4": lambda model, optimizer, step: accumulate(model, 4),
    "1F1B": one_forward_one_backward,
    "GPipe": gpipe,
    "evaluation": evaluated(1),
    "accumulate 4, evaluation": evaluated(4),
    "uneven": lambda model, optimizer, step: accumulate(model, 2 if step % 5 == 4 else 4),
    "GAN": lambda model, optimizer, step: accumulate(model, 1 + step % 2),
}


def round_trips(loop: Loop) -> dict[str, float]:
    """Return how many round trips a loop takes in its first steps and in the next ones."""

    def body(rank: int) -> int:
        with seeded(0):
            blocks = [nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)) for _ in range(2)]
        net = nn.Sequential(*blocks)
        model, optimizer = zeroshard.shard(net, torch.optim.SGD(net.parameters(), lr=0.01), stage=3)
        first = 0
        for step in range(2 * STEPS):
            if step == STEPS:
                first = len(found)
            loop(model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        return first

    with counted() as found:
        first = run_threads(2, body)[0]
    return {"first": first, "next": len(found) - first}


def all_round_trips() -> dict[str, dict[str, float]]:
    return {name: round_trips(loop) for name, loop in LOOPS.items()}
