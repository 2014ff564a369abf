"""Space: what the ranks of this job have left, and the machine that this makes to plan for."""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.memory.host import host_memory_left
from zeroshard.offload import read_bytes
from zeroshard.planner.machines import kept
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.machines.presets import preset_of_gpu

STAND_IN = "a100"  # whose rates a GPU is given that has no preset and was not measured


@dataclass(frozen=True)
class Space:
    """What one rank finds where it is, in bytes."""

    node: str
    device: str
    """Which of the node's devices: ranks of one share its memory."""
    kind: str
    """ "cuda" or "cpu"."""
    machine: str
    """Whose rates are nearest: those measured here (a file), or a preset's."""
    memory: int
    """Left on its device. 0: nobody tells."""
    taken: int
    """Of its device, by the model as it is: sharding gives that back."""
    host: int
    """Left of the node's memory; 0: nobody tells."""
    disk: int
    """Left on the disk that states may rest on; 0: there is none."""

    @classmethod
    def of(cls, device: torch.device, model: nn.Module, directory: str | os.PathLike[str] | None = None) -> Space:
        """Look around.

        >>> Space.of(torch.device("cpu"), nn.Linear(4, 4, bias=False)).taken
        64
        """
        kind = "cuda" if device.type == "cuda" else "cpu"
        measured = kept.path_of(kept.name_here(kind))
        host, taken = host_memory_left(), _taken(model, device)
        number = "cpu"
        if kind == "cuda":
            number = str(torch.cuda.get_device_properties(device).uuid)
            preset = preset_of_gpu(torch.cuda.get_device_name(device)) or STAND_IN
            free, total = torch.cuda.mem_get_info(device)
            most = int(total * torch.cuda.get_per_process_memory_fraction(device))
            free = min(free + torch.cuda.memory_reserved(device), most)
            memory = max(1, free - torch.cuda.memory_allocated(device))  # 0 would say that nobody tells
        else:
            preset, memory = "cpu", host
        disk = shutil.disk_usage(_existing(Path(directory))).free if directory is not None else 0
        machine = os.fspath(measured) if measured.exists() else preset
        return cls(platform.node(), number, kind, machine, memory, taken, host, disk)


def machine_of(
    spaces: Sequence[Space], ranks: int, given: str | Machine | None = None, memory: str | int | None = None
) -> Machine:
    """The machine that ``ranks`` ranks with these spaces run on, of which the one with least counts.

    One space stands for all ranks where only one was looked at. ``given`` is a machine whose rates are taken, and whose
    memory is the most that is counted on; ``memory`` is the same for a device.

    >>> space = Space("here", "cpu", "cpu", "cpu", memory=10 * 2**30, taken=0, host=10 * 2**30, disk=0)
    >>> machine_of([space, space], 2, memory="4GB").memory
    4000000000
    """
    first = spaces[0]
    machine = Machine.of(given if given is not None else first.machine)
    if machine.kind != first.kind:
        raise ValueError(f"machine {machine.name!r} is of kind {machine.kind!r}, and the ranks run on {first.kind!r}")
    here, sharing = Counter(space.node for space in spaces), Counter((space.node, space.device) for space in spaces)
    if len(spaces) == 1:
        on_cpu = first.kind == "cpu"
        here[first.node] = ranks if on_cpu else max(1, min(ranks, torch.cuda.device_count()))
        sharing[first.node, first.device] = ranks if on_cpu else 1
    left = [space.memory // sharing[space.node, space.device] + space.taken for space in spaces if space.memory]
    limits = [nbytes + machine.context for nbytes in left]  # which this process has taken already
    limits += [machine.memory] if given is not None or not left else []
    wanted = read_bytes("memory", memory)
    hosts = [space.host for space in spaces if space.host]
    hosts += [machine.host_memory] if given is not None or not hosts else []
    return Machine.of(
        machine,
        devices=max(here.values()),
        memory=min([*limits, *([wanted] if wanted is not None else [])]),
        host_memory=min(hosts),
        disk=min(space.disk for space in spaces),
    )


def _taken(model: nn.Module, device: torch.device) -> int:
    """Bytes of a model's parameters and buffers on a device."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device == device]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    path = path.absolute()
    return next(found for found in (path, *path.parents) if found.exists())
