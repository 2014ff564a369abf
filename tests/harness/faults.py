"""What a rank may do to the others: bodies of the runs in test_rank_faults.py."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import device
from torch import nn

import zeroshard
from zeroshard.checkpoint.group import CheckpointGroup
from zeroshard.checkpoint.writer import _RankWriter
from zeroshard.comm import heartbeat_monitor, peers

AT, STEPS = 3, 6  # the step in which a rank does it, of how many


class LossError(Exception):
    """Raised by the user's loss."""


class MuteError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


RAISED = {
    "raises": LossError("of this rank"),
    "raises a long text": LossError("of this rank" + 9_000_000 * "!"),  # more than the store takes
    "raises without text": MuteError(),
}


class Net(nn.Module):
    """Blocks; one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.skipped = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = x + block(x)
        return x


def _kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _do(what: str, model: Net, optimizer: Any, directory: Path) -> None:
    """The fault itself, before a forward."""
    name = "blocks.1.0.weight"
    if what == "killed":
        _kill()
    elif what == "killed in save":
        CheckpointGroup.run_on_all = _kill  # type: ignore[method-assign,assignment]
        zeroshard.save(directory / "step", model, optimizer)
    elif what == "killed in save, writing":
        _RankWriter.write = _kill  # type: ignore[method-assign,assignment]
        zeroshard.save(directory / "step", model, optimizer)
    elif what == "skips a block":
        model.skipped = 1
    elif what == "ends early":
        sys.exit()
    elif what == "slow":
        time.sleep(3)
        ctypes.PyDLL(None).usleep(3_000_000)  # and with the interpreter's lock held
    elif what == "state_dict":
        optimizer.state_dict()
    elif what == "full_state":
        zeroshard.full_state(optimizer, name)
    elif what == "full_parameter":
        zeroshard.full_parameter(model, name)
    elif what == "full_gradient":
        zeroshard.full_gradient(model, name)
    elif what.startswith("barrier"):
        dist.barrier()
    elif what in ("save", "save before a barrier"):
        zeroshard.save(directory / "step", model, optimizer)


def fault(
    rank: int, ranks: int, what: str, directory: str, by: int, stage: int = 3, apart: bool = False, **options: Any
) -> Any:
    """Train; rank ``by`` does ``what`` in one of the steps. ``apart``: as if on machines of their own.

    Returns the error of this rank, how long after the fault, and how long its own call had taken by then.
    """
    if apart:
        peers._machine_id = lambda: f"machine-{rank}"
    torch.manual_seed(0)
    model = Net().to(device())
    model, optimizer = zeroshard.shard(model, torch.optim.Adam(model.parameters()), stage=stage, **options)
    mark, x = Path(directory, "mark"), torch.ones(2, 8, device=device())
    called = time.time()
    try:
        for step in range(STEPS):
            mine = rank == by and step == AT
            called = time.time()
            if step == AT and what.startswith("killed in save") and not mine:
                zeroshard.save(Path(directory, "step"), model, optimizer)
            if step == AT and what == "save before a barrier" and not mine:
                dist.barrier()
            if mine and what == "barrier in a step":
                mark.write_text(repr(time.time()))
            elif mine:
                mark.write_text(repr(time.time()))
                _do(what, model, optimizer, Path(directory))
            for _ in range(1 if mine and what == "micro-batches" else 2):
                called = time.time()
                loss = model(x).square().mean()
                if mine and what == "barrier in a step":
                    dist.barrier()
                if mine and what in RAISED:
                    raise RAISED[what]
                called = time.time()
                loss.backward()
            called = time.time()
            if mine and what == "killed before a step":
                _kill()
            optimizer.step()
            if step == AT and what == "killed before a step":
                if stage == 0:
                    model.state_dict()
                with zeroshard.gathered(model) if stage else nullcontext():
                    raise AssertionError("read values of a step that a dead rank took no part in")
            if what != "full_gradient":
                optimizer.zero_grad()
            loss.item()  # over NCCL, this is where the host waits
        watching = sum(thread.name == heartbeat_monitor.THREAD_NAME for thread in threading.enumerate())
        zeroshard.unwrap(model)
        left = sum(thread.name == heartbeat_monitor.THREAD_NAME for thread in threading.enumerate())
        return {"told": "", "watching": watching, "left": left}
    except zeroshard.RanksDisagreeError as error:
        now = time.time()
        return {"told": str(error), "after": now - float(mark.read_text()), "waited": now - called}
