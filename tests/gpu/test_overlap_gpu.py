"""Collectives run while a GPU computes: both are sleeping kernels, and a sequential reference has the same ones.

tests/engine/test_overlap.py has the steps, and their exact times on a clock. Here streams and events do the waiting.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from test_overlap import BACKWARD, FASTER, FORWARD, LAYERS, SLOWER, Milliseconds, one_rank_of, pipeline, train

import zeroshard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NEAR = {"rel": 0.06, "abs": 1.5}  # milliseconds; what overlaps is at least 20 of them


class Kernels:
    """A timeline of sleeping kernels: computation on the current stream, each kind of collective on its own."""

    def __init__(self, is_sequential: bool, computes: bool) -> None:
        self.milliseconds: dict[str, float] = {}
        self.is_sequential, self._computes = is_sequential, computes
        self._compute_stream = torch.cuda.current_stream()  # zeroshard starts gathers from a side stream
        self._streams = {kind: torch.cuda.Stream() for kind in ("gather", "reduce")}
        torch.cuda._sleep(2**20)  # the first one loads the kernel
        begin = self.mark()
        torch.cuda._sleep(2**25)
        self._cycles_per_millisecond = 2**25 / self.elapsed(begin, self.mark())

    def compute(self, milliseconds: float) -> None:
        if self._computes:
            self._sleep(milliseconds)

    def _sleep(self, milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * self._cycles_per_millisecond))

    def start(self, kind: str) -> torch.cuda.Event:
        stream = self._streams[kind]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._sleep(self.milliseconds.get(kind, 0.0))
            done = stream.record_event()
        if self.is_sequential:
            done.wait(self._compute_stream)
        return done  # whose wait() makes the current stream wait, as that of NCCL's work does

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end)


def on_gpu(
    rank: int,
    collectives: tuple[float, float],
    stage: int,
    is_sequential: bool,
    computes: bool,
    options: dict[str, Any],
) -> Milliseconds:
    """Train on the GPU, as one rank of four."""
    dist.destroy_process_group()
    kernels = Kernels(is_sequential, computes)
    with one_rank_of(4, kernels):
        if "mesh" in options:
            options["mesh"] = dist.init_device_mesh("cuda", options["mesh"], mesh_dim_names=("replicate", "shard"))
        return train(kernels, collectives, stage, device="cuda", **options)


def measure(
    collectives: tuple[float, float], stage: int, is_sequential: bool = False, computes: bool = True, **options: Any
) -> Milliseconds:
    (found,) = run_processes(1, on_gpu, collectives, stage, is_sequential, computes, options)
    return found


@pytest.mark.parametrize("collectives", [FASTER, SLOWER])
def test_partitioned_parameters_are_gathered_and_gradients_reduced_while_layers_compute(
    collectives: tuple[float, float],
) -> None:
    gather, reduction = collectives
    overlapped, sequential = measure(collectives, 3), measure(collectives, 3, is_sequential=True)
    assert sequential.forward == pytest.approx(LAYERS * (gather + FORWARD), **NEAR)
    assert sequential.backward == pytest.approx(LAYERS * (gather + BACKWARD + reduction), **NEAR)
    assert overlapped.forward == pytest.approx(pipeline(gather, FORWARD), **NEAR)
    assert overlapped.backward == pytest.approx(gather + pipeline(BACKWARD, reduction), **NEAR)


@pytest.mark.parametrize("collectives", [FASTER, SLOWER])
def test_stage_2_reduces_in_backward_and_gathers_in_the_next_forward(collectives: tuple[float, float]) -> None:
    gather, reduction = collectives
    overlapped, sequential = measure(collectives, 2), measure(collectives, 2, is_sequential=True)
    assert sequential.backward == pytest.approx(LAYERS * (BACKWARD + reduction), **NEAR)
    assert sequential.step == pytest.approx(LAYERS * gather, **NEAR)
    assert overlapped.forward == pytest.approx(pipeline(gather, FORWARD), **NEAR)
    assert overlapped.backward == pytest.approx(pipeline(BACKWARD, reduction), **NEAR)
    assert overlapped.step < 3


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_0_and_1_reduce_in_the_last_backward(stage: int) -> None:
    gather, reduction = FASTER
    found = measure(FASTER, stage)
    assert found.forward == pytest.approx(pipeline(gather, FORWARD) if stage == 1 else LAYERS * FORWARD, **NEAR)
    assert found.backward == pytest.approx(pipeline(BACKWARD, reduction), **NEAR)
    assert found.step < 3


def test_several_buckets_of_a_layer_overlap_on_the_side_stream() -> None:
    buckets, gather, reduction = 5, 1, 2
    found = measure((gather, reduction), 3, width=64, bucket_size=1024, ring=2)
    assert found.forward == pytest.approx(pipeline(buckets * gather, FORWARD), **NEAR)
    assert found.backward == pytest.approx(buckets * gather + pipeline(BACKWARD, buckets * reduction), **NEAR)


def test_a_hybrid_mesh_sums_over_replicas_while_layers_compute() -> None:
    gather, reduction = FASTER
    found = measure(FASTER, 3, mesh=(2, 2))
    assert found.backward == pytest.approx(gather + pipeline(BACKWARD, 2 * reduction), **NEAR)


def test_recomputation_in_backward_overlaps_with_gathers_and_reductions() -> None:
    gather, reduction = FASTER
    found = measure(FASTER, 3, recomputes=True)
    assert found.forward == pytest.approx(pipeline(gather, FORWARD), **NEAR)
    assert found.backward == pytest.approx(gather + pipeline(FORWARD + BACKWARD, reduction), **NEAR)


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
def test_the_host_tier_moves_data_while_layers_compute(kind: str) -> None:
    """This rank has 268 MB of a layer: a copy over PCIe takes some milliseconds, less than the layer's computation."""
    wide: dict[str, Any] = {"width": 2**14}
    offloaded = {**wide, "offload": zeroshard.Offload(**{kind: "host"})}
    computation = measure((0, 0), 3, **wide)
    copies = measure((0, 0), 3, computes=False, **offloaded)
    both = measure((0, 0), 3, **offloaded)
    part = "forward" if kind == "parameters" else "backward"
    alone = getattr(copies, part)
    assert alone > 10
    assert getattr(both, part) < getattr(computation, part) + alone / 2  # one after the other, it would be all of it
