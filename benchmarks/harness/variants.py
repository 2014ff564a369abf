"""Variants: how each library trains a workload, as its documentation says.

All have the same model, data, optimizer (fused AdamW) and precision: bf16 over fp32 master weights on a GPU, fp32 on a
CPU; plain PyTorch and DDP compute under autocast. Blocks are recomputed by torch's checkpointing in the model's code
unless the variant says otherwise. Gradients are reduced in the last backward of a step if the library can wait. As one
rank of many, models are built on the meta device if the library can initialise them, and all values are drawn from one
distribution; otherwise all libraries begin with the same values.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from benchmarks.harness.training import Trainer
from benchmarks.harness.workloads import ACCUMULATED, FLOORS, KEPT, OWN, STD, Workload

DEEPSPEED_BUCKET = 500_000_000  # elements, its default


def precision(device: str) -> str:
    """bf16 on a GPU; fp32 on a CPU, where products in bf16 can be a hundred times as slow."""
    return "bf16" if device == "cuda" else "fp32"


def draw(module: nn.Module) -> None:
    """Initialise a module's own parameters, all from one distribution.

    One rank of many gathers copies of its own shard, whichever parameters those numbers were for. Only if all are drawn
    in the same way do all libraries compute with the same kind of numbers, on which the power of a GPU depends.
    """
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=STD)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all variants."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4, fused=True)


@dataclass(frozen=True)
class Job:
    """A workload on a device, within a process group."""

    work: Workload
    device: str
    mesh: DeviceMesh

    @property
    def is_mixed(self) -> bool:
        """Whether computation is in bf16, over fp32 master weights."""
        return precision(self.device) == "bf16"

    def model(self, on_meta: bool = False, recomputed: bool = True) -> nn.Module:
        """Build the model, with the same values on every rank. ``recomputed``: by torch, if the workload says so."""
        is_drawn = self.work.place == "one of many"
        torch.manual_seed(0)
        with torch.device("meta" if on_meta and is_drawn else self.device):
            model = replace(self.work, recomputed=self.work.recomputed and recomputed).build()
        return model.apply(draw) if is_drawn else model

    def inputs(self, cast: bool = False) -> tuple[Tensor, ...]:
        """Return this rank's data. ``cast``: in the dtype of the computation, if the library does not cast it."""
        torch.manual_seed(1 + self.mesh.get_rank())
        tensors = self.work.inputs(self.device)
        if not (cast and self.is_mixed):
            return tensors
        return tuple(tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in tensors)


class Loop:
    """The loop that a user of plain PyTorch writes. ``around`` is entered around each forward and its backward."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: Any = None,
        around: Callable[[bool], AbstractContextManager[object]] = lambda is_last: nullcontext(),
        *,
        autocast: bool = False,
        cast: bool = False,
        clip: float | None = None,  # the largest norm of all gradients, under zeroshard
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> None:
        self.model, self.optimizer, self._around = model, optimizer, around
        self._has_autocast, self._clip, self._scale = autocast and job.is_mixed, clip, scale
        self._inputs, self._times, self._device = job.inputs(cast), job.work.accumulate, job.device
        self.loss: Tensor | None = None

    def step(self, length: int | None = None) -> None:
        """Train on the first ``length`` tokens of every sequence (default: all)."""
        inputs = self._inputs if length is None else tuple(tokens[:, :length] for tokens in self._inputs)
        for left in reversed(range(self._times)):
            with self._around(left == 0):
                with torch.autocast(self._device, torch.bfloat16) if self._has_autocast else nullcontext():
                    loss = self.model(*inputs)
                self._scale(loss / self._times if self._times > 1 else loss).backward()
            self.loss = loss.detach()
            del loss
        if self.optimizer is not None:
            if self._clip is not None:
                self.optimizer.clip_grad_norm_(self._clip)
            self.optimizer.step()
        (self.optimizer or self.model).zero_grad()


def floor(job: Job, own: bool = False) -> Loop:
    """Forward and backward alone. ``own``: recomputed by `zeroshard.checkpoint_activations`."""
    model = job.model(recomputed=not own)
    if own:
        zeroshard.checkpoint_activations(model)
    return Loop(job, model.bfloat16() if job.is_mixed else model, cast=True)


def plain(job: Job) -> Loop:
    """Plain PyTorch, in one process."""
    model = job.model()
    return Loop(job, model, adamw(model), autocast=True)


def ddp(job: Job) -> Loop:
    """torch's data parallelism."""
    model = DistributedDataParallel(job.model(), process_group=job.mesh.get_group())
    around = lambda is_last: nullcontext() if is_last else model.no_sync()  # noqa: E731
    return Loop(job, model, adamw(model), around, autocast=True)


def fsdp2(
    job: Job,
    every_time: bool = False,
    offload: bool = False,
    is_mixed: bool | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Loop:
    """torch's FSDP2: every block, then the root. ``offload``: all states are on the host and updated there."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model, device = job.model(on_meta=True), job.device
    dtype = torch.bfloat16 if (job.is_mixed if is_mixed is None else is_mixed) else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype or dtype)
    offloaded = CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy()
    for part in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(part, mesh=job.mesh, mp_policy=policy, offload_policy=offloaded)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if offload else device)
        for parameter in model.parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.data.copy_(torch.empty_like(local, device=device).normal_(std=STD))  # a CPU draws slowly

    def around(is_last: bool) -> AbstractContextManager[object]:
        if job.work.accumulate > 1:
            model.set_requires_gradient_sync(is_last or every_time)  # type: ignore[operator]
        return nullcontext()

    return Loop(job, model, adamw(model), around)


class DeepSpeedLoop:
    """The loop of a user of DeepSpeed, whose engine counts the backwards of a step."""

    def __init__(self, engine: Any, inputs: tuple[Tensor, ...], times: int, adam: str) -> None:
        self.model, self.adam, self._inputs, self._times = engine, adam, inputs, times
        self.loss: Tensor | None = None

    def step(self) -> None:
        for _ in range(self._times):
            loss = self.model(*self._inputs)
            self.model.backward(loss)
            self.model.step()
            self.loss = loss.detach()


def deepspeed(job: Job, stage: int, offload: bool = False) -> DeepSpeedLoop:
    """DeepSpeed's ZeRO on the current process group. ``offload``: optimizer states are on the host.

    Its gradients are sent through a buffer of 5e8 elements by default; a smaller model is given a smaller one.
    """
    model, work = job.model(), job.work
    os.environ.setdefault("DS_ACCELERATOR", job.device)
    for name, value in {"RANK": dist.get_rank(), "LOCAL_RANK": 0, "WORLD_SIZE": dist.get_world_size()}.items():
        os.environ.setdefault(name, str(value))
    import deepspeed
    import deepspeed.ops

    # only inference uses it; on a CPU it is compiled at first use, for minutes, and if that is interrupted, never again
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    adam, optimizer = deepspeed_adam(model) if offload else ("torch's fused AdamW", adamw(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bucket = min(DEEPSPEED_BUCKET, sum(parameter.numel() for parameter in trained))
    host = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offload else {}
    settings = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.accumulate,
        "bf16": {"enabled": job.is_mixed or offload},
        "zero_optimization": {"reduce_bucket_size": bucket, "stage": stage, **host},
        "gradient_clipping": 0.0,  # without this key some versions clip
        "zero_force_ds_cpu_optimizer": False,  # torch's is used if its own cannot be built
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=trained, config=settings, dist_init_required=False
    )[0]
    return DeepSpeedLoop(engine, job.inputs(cast=True), work.accumulate, adam)


def deepspeed_adam(model: nn.Module) -> tuple[str, torch.optim.Optimizer]:
    """Return DeepSpeed's Adam on the host, or torch's if it cannot be compiled here; and what it is."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return "its own CPU Adam", DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=True)
    except Exception as error:  # a compiler, a header or a toolkit may be missing, each with its own exception
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return f"torch's fused AdamW ({why})", adamw(model)


def ours(
    job: Job,
    stage: int = 3,
    activations: dict[str, Any] | None = None,
    no_sync: bool = False,
    clip: float | None = None,
    **options: Any,
) -> Loop:
    """zeroshard. ``activations``: blocks are recomputed by `zeroshard.checkpoint_activations` with these options."""
    model = job.model(on_meta=True, recomputed=activations is None)
    given = {"stage": stage, "precision": precision(job.device), "mesh": job.mesh, "init_fn": draw, **options}
    model, optimizer = zeroshard.shard(model, adamw(model), **given)
    if activations is not None:
        zeroshard.checkpoint_activations(model, **activations)
    around = lambda is_last: zeroshard.no_sync(model) if no_sync and not is_last else nullcontext()  # noqa: E731
    return Loop(job, model, optimizer, around, clip=clip, scale=optimizer.scale)


VARIANTS: dict[str, Callable[[Job], Trainer]] = {
    FLOORS[0]: floor,
    FLOORS[1]: partial(floor, own=True),
    "plain": plain,
    "DDP": ddp,
    "FSDP2": fsdp2,
    ACCUMULATED[0]: partial(fsdp2, every_time=True),
    **{f"DeepSpeed {stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"zeroshard {stage}": partial(ours, stage=stage) for stage in (0, 1, 2, 3)},
    ACCUMULATED[1]: partial(ours, no_sync=True),
    OWN: partial(ours, activations={}),
    KEPT: partial(ours, cast_on_gather=False),
}
PEERS = tuple(name for name in VARIANTS if name not in FLOORS and not name.startswith("zeroshard"))
