"""Collectives run while modules compute: exact times, on a clock that only computation and collectives advance.

tests/gpu/test_overlap_gpu.py runs the same steps on a GPU, where both are sleeping kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from pairs import at_stages
from ranks import run_processes
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard
from benchmarks.harness.collectives import Echo

LAYERS, FORWARD, BACKWARD = 5, 10, 20  # milliseconds of each layer
FASTER, EQUAL, SLOWER = (6, 8), (10, 20), (12, 24)  # a gather and a reduction, compared with what they overlap with


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Make computation wait for it."""


class Timeline(Protocol):
    """Where time passes: computation in one line, gathers in a second, reductions in a third."""

    milliseconds: dict[str, float]  # of each kind of collective
    is_sequential: bool  # the reference: computation waits for each collective immediately

    def compute(self, milliseconds: float) -> None:
        """Compute for some time."""

    def start(self, kind: str) -> Work:
        """Start a collective, after the computation so far and after the earlier ones of this kind."""

    def mark(self) -> Any:
        """Mark a moment of computation."""

    def elapsed(self, begin: Any, end: Any) -> float:
        """Return the milliseconds between two marks."""


@dataclass
class Clock:
    """A timeline without real time."""

    milliseconds: dict[str, float] = field(default_factory=dict)
    is_sequential: bool = False
    now: float = 0.0
    free_at: dict[str, float] = field(default_factory=dict)  # end of the last collective of each kind

    def compute(self, milliseconds: float) -> None:
        self.now += milliseconds

    def start(self, kind: str) -> Work:
        end = max(self.now, self.free_at.get(kind, 0.0)) + self.milliseconds.get(kind, 0.0)
        self.free_at[kind] = end
        if self.is_sequential:
            self.now = end
        return _ClockWork(self, end)

    def mark(self) -> float:
        return self.now

    def elapsed(self, begin: float, end: float) -> float:
        return end - begin


@dataclass
class _ClockWork:
    clock: Clock
    end: float

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.end)


class TimedGroup(Echo):
    """One rank of several, whose collectives take the time of a timeline."""

    timeline: Timeline

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> Work:
        super()._allgather_base(output, part)
        return self.timeline.start("gather")

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Work:
        super()._reduce_scatter_base(output, whole)
        return self.timeline.start("reduce")

    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        super().allreduce(tensors, opts)
        return self.timeline.start("reduce")


class Layer(nn.Module):
    """A layer that computes for a known time."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        super().__init__()
        self.linear, self.timeline = nn.Linear(width, width), timeline

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(_Computation.apply(x, self.timeline))
        return out


class _Computation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, timeline: Timeline) -> torch.Tensor:
        ctx.timeline = timeline
        timeline.compute(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.timeline.compute(BACKWARD)
        return gradient.clone(), None


@dataclass
class Milliseconds:
    """How long the parts of a step take: computation waits for all that it needs."""

    forward: float
    backward: float
    step: float


@contextmanager
def one_rank_of(ranks: int, timeline: Timeline) -> Iterator[None]:
    """Be one rank whose collectives take the time of a timeline."""
    if "fake_timed" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "fake_timed", lambda _, rank, size, __: TimedGroup(rank, size), devices=["cpu", "cuda"]
        )
    TimedGroup.timeline = timeline
    dist.init_process_group("fake_timed", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(
    timeline: Timeline,
    collectives: tuple[float, float],
    stage: int,
    device: str = "cpu",
    backwards: int = 1,
    width: int = 16,
    recomputes: bool = False,
    **options: Any,
) -> Milliseconds:
    """Return the times of a step after some others."""
    with torch.device(device):
        model: nn.Module = nn.Sequential(*(Layer(timeline, width) for _ in range(LAYERS)))
    if recomputes:
        model = zeroshard.checkpoint_activations(model, [Layer])
    model, optimizer = zeroshard.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.01), stage=stage, units=(Layer,), **options
    )
    x = torch.ones(2, width, device=device, requires_grad=True)
    for _ in range(5):
        timeline.milliseconds.update(gather=collectives[0], reduce=collectives[1])
        for _ in range(backwards):
            marks = [timeline.mark()]
            loss = model(x).sum()
            marks.append(timeline.mark())
            loss.backward()
            marks.append(timeline.mark())
        optimizer.step()
        marks.append(timeline.mark())
        optimizer.zero_grad()
    forward, backward, step = (timeline.elapsed(*pair) for pair in pairwise(marks))
    return Milliseconds(forward, backward, step)


def on_clock(
    rank: int, collectives: tuple[float, float], stage: int, is_sequential: bool, options: dict[str, Any]
) -> Milliseconds:
    """Train on the clock, as one rank of four."""
    dist.destroy_process_group()
    clock = Clock(is_sequential=is_sequential)
    with one_rank_of(4, clock):
        return train(clock, collectives, stage, **options)


def measure(collectives: tuple[float, float], stage: int, is_sequential: bool = False, **options: Any) -> Milliseconds:
    (found,) = run_processes(1, on_clock, collectives, stage, is_sequential, options)
    return found


def pipeline(first: float, second: float) -> float:
    """Return the time of two lines: each layer's second part follows its first, and no line runs two at once."""
    return first + (LAYERS - 1) * max(first, second) + second


@pytest.mark.guarantee("Overlap")
@pytest.mark.parametrize("collectives", [FASTER, EQUAL, SLOWER])
def test_partitioned_parameters_are_gathered_and_gradients_reduced_while_layers_compute(
    collectives: tuple[float, float],
) -> None:
    gather, reduction = collectives
    overlapped, sequential = measure(collectives, 3), measure(collectives, 3, is_sequential=True)
    assert sequential.forward == LAYERS * (gather + FORWARD)
    assert sequential.backward == LAYERS * (gather + BACKWARD + reduction)
    assert overlapped.forward == pipeline(gather, FORWARD)
    assert overlapped.backward == gather + pipeline(BACKWARD, reduction)
    assert overlapped.step == sequential.step == 0


@pytest.mark.guarantee("Overlap")
@pytest.mark.parametrize("collectives", [FASTER, EQUAL, SLOWER])
def test_stage_2_reduces_in_backward_and_gathers_in_the_next_forward(collectives: tuple[float, float]) -> None:
    gather, reduction = collectives
    overlapped, sequential = measure(collectives, 2), measure(collectives, 2, is_sequential=True)
    assert sequential == Milliseconds(LAYERS * FORWARD, LAYERS * (BACKWARD + reduction), LAYERS * gather)
    assert overlapped == Milliseconds(pipeline(gather, FORWARD), pipeline(BACKWARD, reduction), 0)


@pytest.mark.parametrize("backwards", [1, 3])
@at_stages(0, 1)
@pytest.mark.parametrize("collectives", [FASTER, SLOWER])
def test_stages_0_and_1_reduce_in_the_last_backward(
    collectives: tuple[float, float], stage: int, backwards: int
) -> None:
    gather, reduction = collectives
    found = measure(collectives, stage, backwards=backwards)
    # the parameters are gathered in the first forward after a step
    forward = pipeline(gather, FORWARD) if stage == 1 and backwards == 1 else LAYERS * FORWARD
    assert found == Milliseconds(forward, pipeline(BACKWARD, reduction), 0)


@at_stages(2, 3)
def test_every_backward_of_several_overlaps(stage: int) -> None:
    gather, reduction = SLOWER
    found = measure(SLOWER, stage, backwards=3)
    assert found.backward == (gather if stage == 3 else 0) + pipeline(BACKWARD, reduction)
    assert found.step == 0


def test_several_buckets_of_a_layer_overlap_as_far_as_the_ring_has_room() -> None:
    buckets, ring, gather, reduction = 5, 2, 1, 2
    found = measure((gather, reduction), 3, width=64, bucket_size=1024, ring=ring)
    assert found.forward == pipeline(buckets * gather, FORWARD)
    waits = (LAYERS - 1) * (buckets - ring) * reduction  # on a GPU, a side stream waits instead of computation
    assert found.backward == buckets * gather + pipeline(BACKWARD, buckets * reduction) + waits


def test_recomputation_in_backward_overlaps_with_gathers_and_reductions() -> None:
    gather, reduction = FASTER
    found = measure(FASTER, 3, recomputes=True)
    assert found.forward == pipeline(gather, FORWARD)
    assert found.backward == gather + pipeline(FORWARD + BACKWARD, reduction)
