"""Fullness: how much of a machine's device, host and disk a footprint takes, and what it does not fit into."""

from __future__ import annotations

from zeroshard.memory.report import size
from zeroshard.planner.footprint import Footprint
from zeroshard.planner.machines.machine import Machine

HOST_SHARE = 0.9  # of host memory that states may take: the rest is the system's, the data's and Python's


def needed(held: Footprint, machine: Machine) -> float:
    """Bytes of a device: what the allocator reserves, and the runtime's own."""
    return held.reserved + machine.context


def shares(held: Footprint, devices: int, machine: Machine) -> dict[str, float]:
    """How full device, host and disk are, as parts of what may be used; over 1 does not fit."""
    here = min(devices, machine.devices)
    return {
        "device": needed(held, machine) / machine.memory,
        "host": held.host * here / (machine.host_memory * HOST_SHARE),
        "disk": held.disk * here / (machine.disk or 1) if held.disk else 0.0,
    }


def lacks(held: Footprint, devices: int, machine: Machine) -> str:
    """What a footprint does not fit into, with figures; empty where it fits."""
    here, full = min(devices, machine.devices), shares(held, devices, machine)
    if full["device"] > 1:
        return f"it needs {size(int(needed(held, machine)))} a device, which has {size(machine.memory)}"
    if full["host"] > 1:
        has = f"{size(machine.host_memory)}, of which {HOST_SHARE:.0%} may be taken"
        return f"its {here} ranks a node need {size(int(held.host * here))} of host memory, which has {has}"
    if full["disk"] > 1:
        return f"its {here} ranks a node need {size(int(held.disk * here))} of disk, which has {size(machine.disk)}"
    return ""
