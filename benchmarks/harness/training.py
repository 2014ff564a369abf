"""Process groups, device memory, and what a steady step takes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import zeroshard
from benchmarks.harness.collectives import ECHO, register_echo
from benchmarks.harness.record import Result

STATES = ("parameters", "master weights", "optimizer states")  # kinds of a report that persist between steps


@contextmanager
def one_rank(
    device: str, shape: Sequence[int] = (64,), names: Sequence[str] = ("shard",), backend: str = "fake"
) -> Iterator[DeviceMesh]:
    """Be the first rank of a mesh whose other ranks do not exist: memory, compute and host work are real."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if backend == ECHO:
        register_echo()
    store = FakeStore() if "fake" in backend else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=math.prod(shape))
    try:
        yield init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()


def alone(device: str) -> AbstractContextManager[DeviceMesh]:
    """Be the only rank, on the backend that training uses: NCCL on a GPU, gloo on a CPU."""
    return one_rank(device, (1,), backend="nccl" if device == "cuda" else "gloo")


class Memory:
    """The peak of the device's allocator, and a limit on it, in bytes.

    A CPU's allocator has no counter and no limit. There the profiler's events are added up, and the limit is checked
    afterwards; host memory then counts as the device's, and reserved equals allocated.
    """

    def __init__(self, device: str, limit: float | None = None) -> None:
        self.device, self.limit = device, limit
        self._held = self._peak = 0
        self._events: Any = None

    def __enter__(self) -> Memory:
        if self.device == "cuda" and self.limit is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / torch.cuda.mem_get_info()[1]))
        self._watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._count()

    def restart(self, empty: bool = True) -> None:
        """Forget the peak so far and, with ``empty``, free unused memory."""
        self.wait()
        self._peak = self._held
        if self.device == "cuda":
            if empty:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, int]:
        """Return the peak since the last restart."""
        self.wait()
        if self.device != "cuda":
            return {"allocated": self._peak, "reserved": self._peak}
        stats = torch.cuda.memory_stats()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
        }

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else self._held

    def wait(self) -> None:
        """Wait for the device. On a CPU, check the limit."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return
        self._count()
        self._watch()
        if self.limit is not None and self._peak > self.limit:
            peak, self._peak = self._peak, self._held
            raise torch.OutOfMemoryError(f"{peak} bytes were allocated, but the limit is {self.limit:.0f}")

    def _watch(self) -> None:
        if self.device != "cuda":
            self._events = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._events.start()

    def _count(self) -> None:
        if self._events is None:
            return
        self._events.stop()
        found = [event for event in self._events.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(found, key=lambda event: event.start_ns()):
            self._held += event.nbytes()
            self._peak = max(self._peak, self._held)
        self._events = None


class Trainer(Protocol):
    """A model in training."""

    loss: Tensor | None  # of the last forward

    def step(self) -> None: ...


def time_steps(trainer: Trainer, steps: int, device: str, seconds: float = math.inf) -> Result:
    """Return the times of steps in ms: whole, until the call returns, and the processor time of this process in it.

    No step starts after ``seconds``. Losses tell whether libraries that begin with the same values do the same.
    """
    whole: list[float] = []
    returned, busy, losses = [], [], []
    first = time.perf_counter()
    while len(whole) < steps and (not whole or time.perf_counter() - first < seconds):
        begin, worked = time.perf_counter(), time.process_time()
        trainer.step()
        busy.append(1e3 * (time.process_time() - worked))
        returned.append(1e3 * (time.perf_counter() - begin))
        if device == "cuda":
            torch.cuda.synchronize()
        whole.append(1e3 * (time.perf_counter() - begin))
        losses.append(trainer.loss)
    times = {"ms": whole, "returned_ms": returned, "host_ms": busy}
    medians = {name: statistics.median(values) for name, values in times.items()}
    known = [loss.item() for loss in losses if loss is not None]
    return {**medians, "all_ms": whole, "losses": known, "loss": known[-1] if known else None, "steps": len(whole)}


def measure_steps(
    trainer: Trainer, memory: Memory, warmup: int = 3, steps: int = 3, seconds: float = math.inf
) -> Result:
    """Return the times of steps and the peak of memory in them, after ``warmup`` steps."""
    for _ in range(warmup):
        trainer.step()
    memory.restart()
    if warmup:
        trainer.step()  # zeroshard allocates its segments again, which for a moment counts as allocated
        memory.restart(empty=False)
    measured = time_steps(trainer, steps, memory.device, seconds)
    return {**measured, **memory.peak()}


class StateBytes:
    """The bytes of a model's states under zeroshard, with the gradients as they are when the optimizer steps."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._gradients = model, 0
        optimizer.register_step_pre_hook(self._count_gradients)

    def _count_gradients(self, *_: object) -> None:
        self._gradients = self._sum(["gradients"])

    def _sum(self, kinds: Sequence[str]) -> int:
        held = zeroshard.report(self._model).memory
        return sum(nbytes.now for (kind, _), nbytes in held.items() if kind in kinds)

    @property
    def total(self) -> int:
        return self._gradients + self._sum(STATES)
