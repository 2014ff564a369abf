"""Measure the free memory of this job's ranks, and derive the machine to plan for."""

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
from zeroshard.memory import available_host_memory
from zeroshard.planner.machines import cache
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.machines.presets import FALLBACK_PRESET, preset_of_gpu
from zeroshard.utils.stored_tensor import StoredTensor


@dataclass(frozen=True)
class FreeMemory:
    """The free memory of one rank, in bytes."""

    node: str
    device_id: str
    """Identifies the device in the node: ranks on the same device share its memory."""
    device_kind: str
    """ "cuda" or "cpu"."""
    machine_spec: str
    """The machine whose rates fit best: a file with local measurements, or a preset."""
    device_bytes: int
    """Free on its device. 0: unknown."""
    model_bytes: int
    """Used on its device by the unsharded model: sharding frees it."""
    host_bytes: int
    """Free in the node's host memory. 0: unknown."""
    disk_bytes: int
    """Free on the disk for offloaded states. 0: there is no disk."""

    @classmethod
    def measure(
        cls, device: torch.device, model: nn.Module, directory: str | os.PathLike[str] | None = None
    ) -> FreeMemory:
        """Measure the free memory of this rank.

        >>> FreeMemory.measure(torch.device("cpu"), nn.Linear(4, 4, bias=False)).model_bytes
        64
        """
        kind = "cuda" if device.type == "cuda" else "cpu"
        measured = cache.machine_path(cache.local_machine_name(kind))
        host, model_bytes = available_host_memory(), _model_bytes(model, device)
        device_id = "cpu"
        if kind == "cuda":
            device_id = str(torch.cuda.get_device_properties(device).uuid)
            preset = preset_of_gpu(torch.cuda.get_device_name(device)) or FALLBACK_PRESET
            free, total = torch.cuda.mem_get_info(device)
            limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
            free = min(free + torch.cuda.memory_reserved(device), limit)
            device_bytes = max(1, free - torch.cuda.memory_allocated(device))  # 0 would mean unknown
        else:
            preset, device_bytes = "cpu", host
        disk = shutil.disk_usage(_nearest_existing_dir(Path(directory))).free if directory is not None else 0
        machine = os.fspath(measured) if measured.exists() else preset
        return cls(platform.node(), device_id, kind, machine, device_bytes, model_bytes, host, disk)


def machine_from_free_memory(
    free_memory: Sequence[FreeMemory],
    ranks: int,
    requested_machine: str | Machine | None = None,
    memory: str | int | None = None,
) -> Machine:
    """Return the machine that ``ranks`` ranks run on, with the smallest free memory of any rank.

    A single element of ``free_memory`` stands for all ranks. The rates of ``requested_machine`` are used, and its
    memory is an upper limit; ``memory`` is another upper limit, for a device.

    >>> free = FreeMemory("here", "cpu", "cpu", "cpu", 10 * 2**30, model_bytes=0, host_bytes=10 * 2**30, disk_bytes=0)
    >>> machine_from_free_memory([free, free], 2, memory="4GB").memory
    4000000000
    """
    first = free_memory[0]
    machine = Machine.resolve(requested_machine if requested_machine is not None else first.machine_spec)
    if machine.kind != first.device_kind:
        raise ValueError(
            f"machine {machine.name!r} must be of the kind that the ranks run on, {first.device_kind!r}, got "
            f"{machine.kind!r}"
        )
    ranks_per_node = Counter(rank_memory.node for rank_memory in free_memory)
    ranks_per_device = Counter((rank_memory.node, rank_memory.device_id) for rank_memory in free_memory)
    if len(free_memory) == 1:
        on_cpu = first.device_kind == "cpu"
        ranks_per_node[first.node] = ranks if on_cpu else max(1, min(ranks, torch.cuda.device_count()))
        ranks_per_device[first.node, first.device_id] = ranks if on_cpu else 1
    available = [
        rank_memory.device_bytes // ranks_per_device[rank_memory.node, rank_memory.device_id] + rank_memory.model_bytes
        for rank_memory in free_memory
        if rank_memory.device_bytes
    ]
    limits = [nbytes + machine.context for nbytes in available]  # this process has already allocated its context
    limits += [machine.memory] if requested_machine is not None or not available else []
    requested_bytes = parse_bytes("memory", memory)
    limits += [requested_bytes] if requested_bytes is not None else []
    hosts = [rank_memory.host_bytes for rank_memory in free_memory if rank_memory.host_bytes]
    hosts += [machine.host_memory] if requested_machine is not None or not hosts else []
    return Machine.resolve(
        machine,
        devices=max(ranks_per_node.values()),
        memory=min(limits),
        host_memory=min(hosts),
        disk=min(rank_memory.disk_bytes for rank_memory in free_memory),
    )


def _model_bytes(model: nn.Module, device: torch.device) -> int:
    """Return the bytes of a model's parameters and buffers on a device; those still in files have none."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device == device]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    local = [tensor for tensor in local if not isinstance(tensor, StoredTensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


def _nearest_existing_dir(path: Path) -> Path:
    """Return the path itself if it exists, else its closest parent that does."""
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())
