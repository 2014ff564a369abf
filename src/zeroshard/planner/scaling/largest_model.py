"""Largest: the deepest model of a family that fits so many devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import Any

from zeroshard.config.offload import Offload, parse_bytes
from zeroshard.planner.footprint import Footprint, device_bytes_needed, usage_fractions
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.scaling.model_family import SHALLOW_LAYERS, DepthExtrapolatedModel, ModelFamily
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.tracing.inputs import Inputs
from zeroshard.planner.tracing.trace_model import CheckpointMode

FIRST_DEPTHS = (SHALLOW_LAYERS + 1, SHALLOW_LAYERS + 7)  # depths that a line is laid through
MAX_REPLAYED_LAYERS = (
    4096  # layers that are replayed: what is deeper is taken to lie on the line through this depth and half of it
)


@dataclass(frozen=True)
class LargestModel:
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


def find_largest_model(
    family: ModelFamily,
    inputs: Inputs = None,
    *,
    devices: int,
    machine: str | Machine = "h100",
    memory: str | int | None = None,
    stage: int = 3,
    tensor: int = 1,
    checkpoint: CheckpointMode = "recompute",
    offload: Any = None,
    micro_batch: int = 1,
    **given: Any,
) -> LargestModel:
    """Find the deepest model of a family that fits; ``given`` are options of :class:`DepthExtrapolatedModel`.

    >>> from zeroshard.models import GPTConfig
    >>> from zeroshard.planner.scaling.model_family import gpt_family
    >>> family = gpt_family(GPTConfig(heads=64, width=8192))
    >>> found = find_largest_model(family, devices=64, machine="dgx2", precision="fp16")
    >>> 90e9 < found.parameters < 110e9, found.limit, found.confirmed
    (True, 'device', True)
    """
    machine = (
        Machine.resolve(machine) if memory is None else Machine.resolve(machine, memory=parse_bytes("memory", memory))
    )
    far = Offload.from_option(offload)
    choice = Strategy(stage=stage, tensor=tensor, checkpoint=checkpoint, offload=far, micro_batch=micro_batch)
    return find_deepest_member(
        DepthExtrapolatedModel(family, FIRST_DEPTHS[0], inputs, **given), choice, devices, machine
    )


def find_deepest_member(
    member: DepthExtrapolatedModel, strategy: Strategy, devices: int, machine: Machine
) -> LargestModel:
    """The same from any member of a family that has over 2 layers, whose traces are used.

    Memory is a straight line in depth, or several one after the other where the peak moves to another moment: the line
    through two depths is followed to the limit, until one depth fits and the next does not.
    """
    if devices < 1:
        raise ValueError(f"devices is a whole number from 1 up, got {devices}")
    if strategy.tensor < 1 or devices % strategy.tensor:
        raise ValueError(f"{devices} devices are not a multiple of the {strategy.tensor} that divide each layer")

    def held(layers: int) -> Footprint:
        return member.with_layers(layers).footprint(strategy, devices, machine)

    def fullness(layers: int) -> float:
        return max(usage_fractions(held(layers), devices, machine).values())

    layers, confirmed = _search_depth(fullness)
    deep, near = (
        member.with_layers(max(layers, FIRST_DEPTHS[0])),
        held(min(max(layers, FIRST_DEPTHS[0]), MAX_REPLAYED_LAYERS)),
    )
    wanted = device_bytes_needed(near, machine)
    if layers > MAX_REPLAYED_LAYERS:
        half = held(MAX_REPLAYED_LAYERS // 2)
        wanted += (
            (layers - MAX_REPLAYED_LAYERS)
            * (near.reserved - half.reserved)
            / (MAX_REPLAYED_LAYERS - MAX_REPLAYED_LAYERS // 2)
        )
    full = usage_fractions(near, devices, machine)
    return LargestModel(layers, deep.parameters, wanted, max(full, key=lambda name: full[name]), confirmed)


def _search_depth(fullness: Callable[[int], float]) -> tuple[int, bool]:
    """The last depth that is not over full, and whether it and the next were looked at."""
    seen = {layers: fullness(layers) for layers in FIRST_DEPTHS}
    while True:
        fits = max((layers for layers, share in seen.items() if share <= 1), default=0)
        fails = min((layers for layers, share in seen.items() if share > 1), default=None)
        if fails is not None and (fails - fits == 1 or fails == FIRST_DEPTHS[0]):
            return fits, True
        a, b = (fits, fails) if fits and fails is not None else sorted(seen)[-2:]
        slope = (seen[b] - seen[a]) / (b - a)
        if fails is None and (slope <= 0 or b + (1 - seen[b]) / slope > MAX_REPLAYED_LAYERS):
            if MAX_REPLAYED_LAYERS in seen and MAX_REPLAYED_LAYERS // 2 in seen:
                if slope <= 0:
                    raise ValueError(
                        f"a model of {MAX_REPLAYED_LAYERS} layers needs no more than one of {a}: its depth is no limit"
                    )
                return floor(MAX_REPLAYED_LAYERS + (1 - seen[MAX_REPLAYED_LAYERS]) / slope), False
            layers = MAX_REPLAYED_LAYERS // 2 if MAX_REPLAYED_LAYERS // 2 not in seen else MAX_REPLAYED_LAYERS
        else:
            layers = max(floor(b + (1 - seen[b]) / slope), fits + 1)
            layers = layers if fails is None else min(layers, fails - 1)
            if layers in seen:  # not where the line says
                layers = fits + 1 if fails is None else (fits + fails) // 2
        seen[layers] = fullness(layers)
