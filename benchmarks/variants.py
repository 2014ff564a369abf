"""Variants: how each library trains a row, as its documentation says.

All get the same model, data, optimizer (fused AdamW) and precision: on a GPU bf16 over fp32 master weights, on a CPU
fp32 throughout. Recomputation is torch's own checkpointing in the model's code, in all of them alike, but for the
variant that says otherwise. As one rank of many, models are built on the meta device where a library can fill them, and
all values are drawn from one distribution; elsewhere all begin with the same values.

| variant | what a step is |
|---|---|
| floor | forward and backward of the bf16 model, nothing sharded, no optimizer |
| plain | fp32 parameters under torch's autocast |
| DDP | the same under DistributedDataParallel, `no_sync` until the last backward of a step |
| FSDP2 | `fully_shard` of every block and of the model, bf16 parameters and reductions, `set_requires_gradient_sync` \
off until the last backward of a step |
| DeepSpeed 1, 2, 3 | its engine, defaults but for the stage, and a bucket no larger than the model; it counts \
backwards itself |
| zeroshard 0, 1, 2, 3 | `zeroshard.shard`, defaults but for the stage; gradients are reduced when the stage says |
| zeroshard 3, 16 bits kept | `cast_on_gather=False`: bf16 shards beside the masters |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from benchmarks.deepspeed_peer import DeepSpeedLoop, initialize
from benchmarks.rank import adamw, draw, fsdp2, precision
from benchmarks.rows import ACCUMULATED, FLOORS, KEPT, OWN, Row


@dataclass(frozen=True)
class Job:
    """A row on a device, within a process group."""

    row: Row
    device: str
    mesh: DeviceMesh

    @property
    def mixed(self) -> bool:
        """Whether computation is in bf16, over fp32 master weights."""
        return precision(self.device) == "bf16"

    def model(self, on_meta: bool = False, recomputed: bool | None = None) -> nn.Module:
        """The row's model, with the same values on every rank; of one of many, values as :func:`draw` has them."""
        torch.manual_seed(0)
        with torch.device("meta" if on_meta and self.row.place == "one of many" else self.device):
            model = self.row.build(recomputed)
        return model.apply(draw) if self.row.place == "one of many" else model

    def inputs(self, cast: bool = False) -> tuple[Tensor, ...]:
        """This rank's data. ``cast``: in the dtype that is computed in, for those who do not cast it themselves."""
        torch.manual_seed(1 + self.mesh.get_rank())
        tensors = self.row.inputs(self.device)
        if not (cast and self.mixed):
            return tensors
        return tuple(tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in tensors)


class Trained(Protocol):
    """A model in training."""

    model: Any
    loss: Tensor | None  # of the last forward

    def step(self) -> None:
        """Train one step."""


class Loop:
    """The loop that a user of plain PyTorch writes."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        around: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
        autocast: bool = False,
        cast: bool = False,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._around, self._autocast = around, autocast and job.mixed  # around a forward and its backward
        self._inputs, self._times, self._device = job.inputs(cast), job.row.accumulate, job.device
        self.loss: Tensor | None = None

    def step(self) -> None:
        """Forward and backward as often as the row says, and an update."""
        for left in reversed(range(self._times)):
            with self._around(left == 0):
                with torch.autocast(self._device, torch.bfloat16) if self._autocast else nullcontext():
                    loss = self.model(*self._inputs)
                (loss / self._times if self._times > 1 else loss).backward()
            self.loss = loss.detach()
            del loss
        if self.optimizer is not None:
            self.optimizer.step()
        (self.optimizer or self.model).zero_grad()


def floor(job: Job, own: bool = False) -> Trained:
    """What cannot be undercut: see the table above. ``own``: recomputed by `zeroshard.checkpoint_activations`."""
    model = job.model(recomputed=job.row.recomputed and not own)
    if own:
        zeroshard.checkpoint_activations(model)
    return Loop(job, model.bfloat16() if job.mixed else model, cast=True)


def plain(job: Job) -> Trained:
    """One process, as if there were no others."""
    model = job.model()
    return Loop(job, model, adamw(model), autocast=True)


def ddp(job: Job) -> Trained:
    """torch's data parallelism."""
    model = DistributedDataParallel(job.model(), process_group=job.mesh.get_group())
    around = lambda last: nullcontext() if last else model.no_sync()  # noqa: E731
    return Loop(job, model, adamw(model), around, autocast=True)


def fully_sharded(job: Job, every_time: bool = False) -> Trained:
    """torch's FSDP2."""
    model, optimizer = fsdp2(job.model(on_meta=True), job.mesh)

    def around(last: bool) -> AbstractContextManager[object]:
        if job.row.accumulate > 1:
            model.set_requires_gradient_sync(last or every_time)  # type: ignore[operator]
        return nullcontext()

    return Loop(job, model, optimizer, around)


def deepspeed(job: Job, stage: int) -> Trained:
    """DeepSpeed's ZeRO."""
    model, row = job.model(), job.row
    zero = {"stage": stage}
    engine = initialize(model, adamw(model), row.batch, job.mixed, zero, row.accumulate)
    return DeepSpeedLoop(engine, job.inputs(cast=True), row.accumulate)


def ours(job: Job, stage: int, no_sync: bool = False, own: bool = False, **more: Any) -> Trained:
    """zeroshard. ``own``: blocks are recomputed by `zeroshard.checkpoint_activations`."""
    model = job.model(on_meta=True, recomputed=job.row.recomputed and not own)
    options = {"stage": stage, "precision": precision(job.device), "mesh": job.mesh, "init_fn": draw, **more}
    model, optimizer = zeroshard.shard(model, adamw(model), **options)
    if own:
        zeroshard.checkpoint_activations(model)
    around = lambda last: zeroshard.no_sync(model) if no_sync and not last else nullcontext()  # noqa: E731
    return Loop(job, model, optimizer, around)


VARIANTS: dict[str, Callable[[Job], Trained]] = {
    FLOORS[0]: floor,
    FLOORS[1]: partial(floor, own=True),
    "plain": plain,
    "DDP": ddp,
    "FSDP2": fully_sharded,
    ACCUMULATED[0]: partial(fully_sharded, every_time=True),
    **{f"DeepSpeed {stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"zeroshard {stage}": partial(ours, stage=stage) for stage in (0, 1, 2, 3)},
    ACCUMULATED[1]: partial(ours, stage=3, no_sync=True),
    OWN: partial(ours, stage=3, own=True),
    KEPT: partial(ours, stage=3, cast_on_gather=False),
}
PEERS = tuple(name for name in VARIANTS if name not in FLOORS and not name.startswith("zeroshard"))
