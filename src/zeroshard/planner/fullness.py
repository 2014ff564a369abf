"""Fullness: how much of a machine's device, host and disk a footprint takes, and what it does not fit into."""

from __future__ import annotations

from zeroshard.memory.report import format_bytes
from zeroshard.planner.footprint import Footprint
from zeroshard.planner.machines.machine import Machine

USABLE_HOST_FRACTION = 0.9  # of host memory that states may take: the rest is the system's, the data's and Python's


def device_bytes_needed(footprint: Footprint, machine: Machine) -> float:
    """Bytes of a device: what the allocator reserves, and the runtime's own."""
    return footprint.reserved + machine.context


def usage_fractions(footprint: Footprint, devices: int, machine: Machine) -> dict[str, float]:
    """How full device, host and disk are, as parts of what may be used; over 1 does not fit."""
    here = min(devices, machine.devices)
    return {
        "device": device_bytes_needed(footprint, machine) / machine.memory,
        "host": footprint.host * here / (machine.host_memory * USABLE_HOST_FRACTION),
        "disk": footprint.disk * here / (machine.disk or 1) if footprint.disk else 0.0,
    }


def memory_shortfall(footprint: Footprint, devices: int, machine: Machine) -> str:
    """What a footprint does not fit into, with figures; empty where it fits."""
    here, full = min(devices, machine.devices), usage_fractions(footprint, devices, machine)
    if full["device"] > 1:
        return (
            f"it needs {format_bytes(int(device_bytes_needed(footprint, machine)))} a device, which has "
            f"{format_bytes(machine.memory)}"
        )
    if full["host"] > 1:
        has = f"{format_bytes(machine.host_memory)}, of which {USABLE_HOST_FRACTION:.0%} may be taken"
        return (
            f"its {here} ranks a node need {format_bytes(int(footprint.host * here))} of host memory, which has {has}"
        )
    if full["disk"] > 1:
        return (
            f"its {here} ranks a node need {format_bytes(int(footprint.disk * here))} of disk, which has "
            f"{format_bytes(machine.disk)}"
        )
    return ""
