"""One rank of many whose others do not exist: true memory, compute and work of the host, no data on a wire.

The reference GPT as zeroshard and as FSDP2 train it, and what a step of it takes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import zeroshard
from benchmarks import echo
from zeroshard.models import GPT, GPTConfig
from zeroshard.presets import PRESETS, GPTPreset

TINY = GPTPreset(layers=2, heads=16, width=64, context=16, vocabulary=64)  # heads for the paper's tensor axis of 16
ROWS: dict[str, tuple[GPTPreset, int]] = {  # name → (shape, batch)
    "1.4B, batch 16": (PRESETS["1.4b"], 16),
    "1.4B, batch 2": (PRESETS["1.4b"], 2),
    "0.2B (48×512), batch 2": (GPTPreset(layers=48, heads=8, width=512), 2),
    "7.6B, batch 4": (PRESETS["7.6b"], 4),
    "tiny": (TINY, 2),
}
STD = 0.02  # of all values, where none is true anyway
Trained = tuple[nn.Module, torch.optim.Optimizer]


@contextmanager
def one_rank(
    device: str, shape: Sequence[int] = (64,), names: Sequence[str] = ("shard",), backend: str = "fake"
) -> Iterator[DeviceMesh]:
    """Be the first rank of a mesh whose other ranks do not exist, on torch's "fake" backend or on echo's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if backend == echo.NAME:
        echo.register()
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=math.prod(shape))
    try:
        yield init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()


@contextmanager
def alone(device: str) -> Iterator[DeviceMesh]:
    """Be the only rank, on the backend that training uses: NCCL on a GPU, gloo on a CPU."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def precision(device: str) -> str:
    """bf16 on a GPU; fp32 on a CPU, where products in bf16 can be a hundred times as slow."""
    return "bf16" if device == "cuda" else "fp32"


def shape_of(preset: GPTPreset, **changes: Any) -> GPTConfig:
    """The reference GPT of a preset."""
    shape = {"layers": preset.layers, "heads": preset.heads, "width": preset.width, "context": preset.context}
    return GPTConfig(**{"vocab_size": preset.vocabulary, **shape, **changes})


class FrugalGPT(GPT):
    """The reference GPT with its loss computed a sequence at a time, and once more in backward.

    The logits of a batch are 50304 numbers a token, several times over. Where other activations are the subject, they
    are in the way: they can be larger than all that is kept for the blocks.
    """

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """As the reference GPT's."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpoint else block(x)
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        losses = [checkpoint(self._loss, *pair, use_reentrant=False) for pair in zip(x, targets, strict=True)]
        return torch.stack(losses).mean()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets)


def zeroshard_gpt(
    config: GPTConfig,
    mesh: DeviceMesh,
    activations: dict[str, Any] | None = None,
    kind: type[GPT] = GPT,
    **options: Any,
) -> Trained:
    """The model as a user of zeroshard trains it; ``activations`` are options of ``checkpoint_activations``.

    Memory is not defragmented unless ``options`` say so: in its first steps that takes time, which is no step's.
    """
    with torch.device("meta"):
        model: nn.Module = kind(config)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = zeroshard.shard(
        model, optimizer, mesh=mesh, **{"precision": precision(mesh.device_type), "defragment": False, **options}
    )
    if activations is not None:
        zeroshard.checkpoint_activations(model, **activations)
    return model, optimizer


def fsdp2_gpt(config: GPTConfig, mesh: DeviceMesh, mixed: bool | None = None, offload: bool = False) -> Trained:
    """The reference GPT as :func:`fsdp2` shards it, never whole in memory."""
    with torch.device("meta"):
        model = GPT(config)
    return fsdp2(model, mesh, mixed, offload)


def fsdp2(model: nn.Module, mesh: DeviceMesh, mixed: bool | None = None, offload: bool = False) -> Trained:
    """A model as FSDP2's documentation shards it: every block, then the root. ``mixed``: bf16 over fp32 masters.

    ``offload``: parameters, gradients and optimizer states rest on the host, and are updated there.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mixed = precision(mesh.device_type) == "bf16" if mixed is None else mixed
    dtype = torch.bfloat16 if mixed else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    resting = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for part in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=resting)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if offload else mesh.device_type)
        for parameter in model.parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.data.copy_(torch.empty_like(local, device=mesh.device_type).normal_(std=STD))  # a CPU draws slowly
    return model, adamw(model)


def draw(module: nn.Module) -> None:
    """Fill a module's own parameters as :func:`fsdp2` does: all alike.

    What one rank of many gathers is copies of its own shard, whatever parameters those numbers were meant for. Only
    where all are drawn alike do all libraries compute with the same kind of numbers, on which a GPU's power depends.
    """
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=STD)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all variants, for what is to be trained."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4, fused=True)


class Memory:
    """What the device's allocator has handed out, at peak, and a limit on it, in bytes.

    A CPU's allocator keeps no count and knows no limit. There its events are added up, and whether the limit was kept
    is looked at afterwards; host memory then counts as the device's, and nothing is reserved beyond what is allocated.
    """

    def __init__(self, device: str, limit: float | None = None) -> None:
        self.on_gpu, self.limit = device == "cuda", limit
        self._held = self._peak = 0
        self._events: Any = None

    def __enter__(self) -> Memory:
        if self.on_gpu and self.limit is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / torch.cuda.mem_get_info()[1]))
        self._watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._count()

    def restart(self, empty: bool = True) -> None:
        """Give unused memory back, and begin to look for the peak anew."""
        self.wait()
        self._peak = self._held
        if self.on_gpu:
            if empty:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, int]:
        """The peak since the last restart."""
        self.wait()
        if not self.on_gpu:
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
        """Bytes held at this moment."""
        return torch.cuda.memory_allocated() if self.on_gpu else self._held

    def wait(self) -> None:
        """Wait for the device. On a CPU, see whether the limit was kept."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return
        self._count()
        self._watch()
        if self.limit is not None and self._peak > self.limit:
            peak, self._peak = self._peak, self._held
            raise torch.OutOfMemoryError(f"{peak} bytes were held, {self.limit:.0f} are allowed")

    def _watch(self) -> None:
        if not self.on_gpu:
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


class Training:
    """Steps of one model on random tokens."""

    def __init__(
        self,
        trained: tuple[nn.Module, torch.optim.Optimizer | None],
        batch: int,
        memory: Memory,
        clip: float | None = None,  # the most that the norm of all gradients may be, under zeroshard
    ) -> None:
        self.model, self.optimizer = trained
        self.memory, self.clip = memory, clip
        config: Any = self.model.config
        device = "cuda" if memory.on_gpu else "cpu"
        self.tokens = torch.randint(config.vocab_size, (batch, config.context), device=device)

    def step(self, length: int | None = None) -> None:
        """Train on the first ``length`` tokens of every sequence; without it, on all."""
        tokens = self.tokens[:, :length]
        self.model(tokens, tokens).backward()
        if self.optimizer is not None:
            if self.clip is not None:
                self.optimizer.clip_grad_norm_(self.clip)  # type: ignore[attr-defined]
            self.optimizer.step()
        (self.optimizer or self.model).zero_grad()

    def steady(self, warmup: int = 3, steps: int = 3, seconds: float = math.inf) -> dict[str, Any]:
        """Time of a step and peak of memory, after ``warmup`` steps, over at most ``steps``, or the first of them to
        end after ``seconds``."""
        for _ in range(warmup):
            self.step()
        self.memory.restart()
        if warmup:
            self.step()  # zeroshard makes its segments anew, which for a moment counts as allocated
            self.memory.restart(empty=False)
        times: list[float] = []
        busy: list[float] = []
        begin = time.perf_counter()
        while len(times) < steps and (not times or time.perf_counter() - begin < seconds):
            start, host = time.perf_counter(), time.process_time()
            self.step()
            busy.append(time.process_time() - host)
            self.memory.wait()
            times.append(time.perf_counter() - start)
        middle = {"ms": 1e3 * statistics.median(times), "host_ms": 1e3 * statistics.median(busy), "steps": len(times)}
        return {**middle, **self.memory.peak()}
