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

from zeroshard.config.offload import parse_bytes
from zeroshard.memory.host_info import available_host_memory
from zeroshard.planner.machines import cache
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.machines.presets import preset_of_gpu

FALLBACK_PRESET = "a100"  # whose rates a GPU is given that has no preset and was not measured


@dataclass(frozen=True)
class FreeMemory:
    """What one rank finds where it is, in bytes."""

    node: str
    device_id: str
    """Which of the node's devices: ranks of one share its memory."""
    device_kind: str
    """ "cuda" or "cpu"."""
    machine_spec: str
    """Whose rates are nearest: those measured here (a file), or a preset's."""
    device_bytes: int
    """Left on its device. 0: nobody tells."""
    model_bytes: int
    """Of its device, by the model as it is: sharding gives that back."""
    host_bytes: int
    """Left of the node's memory; 0: nobody tells."""
    disk_bytes: int
    """Left on the disk that states may rest on; 0: there is none."""

    @classmethod
    def measure(
        cls, device: torch.device, model: nn.Module, directory: str | os.PathLike[str] | None = None
    ) -> FreeMemory:
        """Look around.

        >>> FreeMemory.measure(torch.device("cpu"), nn.Linear(4, 4, bias=False)).model_bytes
        64
        """
        kind = "cuda" if device.type == "cuda" else "cpu"
        measured = cache.machine_path(cache.local_machine_name(kind))
        host, taken = available_host_memory(), _model_bytes(model, device)
        number = "cpu"
        if kind == "cuda":
            number = str(torch.cuda.get_device_properties(device).uuid)
            preset = preset_of_gpu(torch.cuda.get_device_name(device)) or FALLBACK_PRESET
            free, total = torch.cuda.mem_get_info(device)
            most = int(total * torch.cuda.get_per_process_memory_fraction(device))
            free = min(free + torch.cuda.memory_reserved(device), most)
            memory = max(1, free - torch.cuda.memory_allocated(device))  # 0 would say that nobody tells
        else:
            preset, memory = "cpu", host
        disk = shutil.disk_usage(_nearest_existing_dir(Path(directory))).free if directory is not None else 0
        machine = os.fspath(measured) if measured.exists() else preset
        return cls(platform.node(), number, kind, machine, memory, taken, host, disk)


def machine_from_free_memory(
    free_memory: Sequence[FreeMemory],
    ranks: int,
    requested_machine: str | Machine | None = None,
    memory: str | int | None = None,
) -> Machine:
    """The machine that ``ranks`` ranks with these spaces run on, of which the one with least counts.

    One space stands for all ranks where only one was looked at. ``given`` is a machine whose rates are taken, and whose
    memory is the most that is counted on; ``memory`` is the same for a device.

    >>> free = FreeMemory("here", "cpu", "cpu", "cpu", 10 * 2**30, model_bytes=0, host_bytes=10 * 2**30, disk_bytes=0)
    >>> machine_from_free_memory([free, free], 2, memory="4GB").memory
    4000000000
    """
    first = free_memory[0]
    machine = Machine.resolve(requested_machine if requested_machine is not None else first.machine_spec)
    if machine.kind != first.device_kind:
        raise ValueError(
            f"machine {machine.name!r} is of kind {machine.kind!r}, and the ranks run on {first.device_kind!r}"
        )
    here, sharing = (
        Counter(space.node for space in free_memory),
        Counter((space.node, space.device_id) for space in free_memory),
    )
    if len(free_memory) == 1:
        on_cpu = first.device_kind == "cpu"
        here[first.node] = ranks if on_cpu else max(1, min(ranks, torch.cuda.device_count()))
        sharing[first.node, first.device_id] = ranks if on_cpu else 1
    left = [
        space.device_bytes // sharing[space.node, space.device_id] + space.model_bytes
        for space in free_memory
        if space.device_bytes
    ]
    limits = [nbytes + machine.context for nbytes in left]  # which this process has taken already
    limits += [machine.memory] if requested_machine is not None or not left else []
    wanted = parse_bytes("memory", memory)
    hosts = [space.host_bytes for space in free_memory if space.host_bytes]
    hosts += [machine.host_memory] if requested_machine is not None or not hosts else []
    return Machine.resolve(
        machine,
        devices=max(here.values()),
        memory=min([*limits, *([wanted] if wanted is not None else [])]),
        host_memory=min(hosts),
        disk=min(space.disk_bytes for space in free_memory),
    )


def _model_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of a model's parameters and buffers on a device."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device == device]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


def _nearest_existing_dir(path: Path) -> Path:
    """The nearest directory above that is there."""
    path = path.absolute()
    return next(found for found in (path, *path.parents) if found.exists())
