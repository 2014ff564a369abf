"""Largest: the deepest model of a family that fits so many devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import Any

from zeroshard.offload import Offload, read_bytes
from zeroshard.planner.choice import Choice
from zeroshard.planner.footprint import Footprint
from zeroshard.planner.fullness import needed, shares
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.simulation.family import SHALLOW, Deep, Family
from zeroshard.planner.traces.inputs import Inputs
from zeroshard.planner.traces.tracing import Checkpoint

FIRST = (SHALLOW + 1, SHALLOW + 7)  # depths that a line is laid through
DEEPEST = 4096  # layers that are replayed: what is deeper is taken to lie on the line through this depth and half of it


@dataclass(frozen=True)
class Largest:
    """The deepest model that fits, and what stopped a deeper one."""

    layers: int
    """0: not even the shallowest that was looked at, of 3 layers, fits."""
    parameters: int
    """Its Ψ; of the shallowest, where nothing fits."""
    memory: float
    """Bytes of a device that it needs."""
    limit: str
    """What is full: "device", "host" or "disk"."""
    confirmed: bool
    """Whether this depth was replayed, and one more; else it is where a straight line ends."""


def largest(
    family: Family,
    inputs: Inputs = None,
    *,
    devices: int,
    machine: str | Machine = "h100",
    memory: str | int | None = None,
    stage: int = 3,
    tensor: int = 1,
    checkpoint: Checkpoint = "recompute",
    offload: Any = None,
    micro_batch: int = 1,
    **given: Any,
) -> Largest:
    """Find the deepest model of a family that fits; ``given`` are options of :class:`Deep`, ``precision`` among them.

    >>> from zeroshard.models import GPTConfig
    >>> from zeroshard.planner.simulation.family import gpt_family
    >>> family = gpt_family(GPTConfig(heads=64, width=8192))
    >>> found = largest(family, devices=64, machine="dgx2", precision="fp16")
    >>> 90e9 < found.parameters < 110e9, found.limit, found.confirmed
    (True, 'device', True)
    """
    machine = Machine.of(machine) if memory is None else Machine.of(machine, memory=read_bytes("memory", memory))
    far = Offload.of(offload)
    choice = Choice(stage=stage, tensor=tensor, checkpoint=checkpoint, offload=far, micro_batch=micro_batch)
    return deepest(Deep(family, FIRST[0], inputs, **given), choice, devices, machine)


def deepest(begin: Deep, choice: Choice, devices: int, machine: Machine) -> Largest:
    """The same from any member of a family that has over 2 layers, whose traces are used.

    Memory is a straight line in depth, or several one after the other where the peak moves to another moment: the line
    through two depths is followed to the limit, until one depth fits and the next does not.
    """
    if devices < 1:
        raise ValueError(f"devices is a whole number from 1 up, got {devices}")
    if choice.tensor < 1 or devices % choice.tensor:
        raise ValueError(f"{devices} devices are not a multiple of the {choice.tensor} that divide each layer")

    def held(layers: int) -> Footprint:
        return begin.at(layers).footprint(choice, devices, machine)

    def fullness(layers: int) -> float:
        return max(shares(held(layers), devices, machine).values())

    layers, confirmed = _search(fullness)
    deep, near = begin.at(max(layers, FIRST[0])), held(min(max(layers, FIRST[0]), DEEPEST))
    wanted = needed(near, machine)
    if layers > DEEPEST:
        half = held(DEEPEST // 2)
        wanted += (layers - DEEPEST) * (near.reserved - half.reserved) / (DEEPEST - DEEPEST // 2)
    full = shares(near, devices, machine)
    return Largest(layers, deep.parameters, wanted, max(full, key=lambda name: full[name]), confirmed)


def _search(fullness: Callable[[int], float]) -> tuple[int, bool]:
    """The last depth that is not over full, and whether it and the next were looked at."""
    seen = {layers: fullness(layers) for layers in FIRST}
    while True:
        fits = max((layers for layers, share in seen.items() if share <= 1), default=0)
        fails = min((layers for layers, share in seen.items() if share > 1), default=None)
        if fails is not None and (fails - fits == 1 or fails == FIRST[0]):
            return fits, True
        a, b = (fits, fails) if fits and fails is not None else sorted(seen)[-2:]
        slope = (seen[b] - seen[a]) / (b - a)
        if fails is None and (slope <= 0 or b + (1 - seen[b]) / slope > DEEPEST):
            if DEEPEST in seen and DEEPEST // 2 in seen:
                if slope <= 0:
                    raise ValueError(
                        f"a model of {DEEPEST} layers needs no more than one of {a}: its depth is no limit"
                    )
                return floor(DEEPEST + (1 - seen[DEEPEST]) / slope), False
            layers = DEEPEST // 2 if DEEPEST // 2 not in seen else DEEPEST
        else:
            layers = max(floor(b + (1 - seen[b]) / slope), fits + 1)
            layers = layers if fails is None else min(layers, fails - 1)
            if layers in seen:  # not where the line says
                layers = fits + 1 if fails is None else (fits + fails) // 2
        seen[layers] = fullness(layers)
