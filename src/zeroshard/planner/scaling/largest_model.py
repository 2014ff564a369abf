"""Find the deepest model of a family that fits on a given number of devices."""

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

FIRST_DEPTHS = (SHALLOW_LAYERS + 1, SHALLOW_LAYERS + 7)  # depths of the first linear extrapolation
# Deeper models are not replayed, but extrapolated linearly from this depth and half of it.
MAX_REPLAYED_LAYERS = 4096


@dataclass(frozen=True)
class LargestModel:
    """The deepest model that fits, and what prevents a deeper one."""

    layers: int
    """0 if not even the shallowest model considered, with 3 layers, fits."""
    parameters: int
    """Ψ of this model; of the shallowest one if nothing fits."""
    memory: float
    """Bytes that it needs on a device."""
    limit: str
    """The memory with the highest usage: "device", "host" or "disk"."""
    confirmed: bool
    """Whether this depth and the next were replayed; otherwise the depth is a linear extrapolation."""


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
    offload_config = Offload.from_option(offload)
    strategy = Strategy(
        stage=stage, tensor=tensor, checkpoint=checkpoint, offload=offload_config, micro_batch=micro_batch
    )
    return find_deepest_member(
        DepthExtrapolatedModel(family, FIRST_DEPTHS[0], inputs, **given), strategy, devices, machine
    )


def find_deepest_member(
    member: DepthExtrapolatedModel, strategy: Strategy, devices: int, machine: Machine
) -> LargestModel:
    """Find the deepest model that fits, using the traces of any model of the family with more than 2 layers.

    Memory is linear in depth, or piecewise linear if the peak moves to another point in time. The search follows the
    line through two depths to the limit, until one depth fits and the next does not.
    """
    if devices < 1:
        raise ValueError(f"devices is a whole number from 1 up, got {devices}")
    if strategy.tensor < 1 or devices % strategy.tensor:
        raise ValueError(f"{devices} devices are not a multiple of the {strategy.tensor} that divide each layer")

    def footprint_at(layers: int) -> Footprint:
        return member.with_layers(layers).footprint(strategy, devices, machine)

    def max_usage(layers: int) -> float:
        return max(usage_fractions(footprint_at(layers), devices, machine).values())

    layers, confirmed = _search_depth(max_usage)
    model, footprint = (
        member.with_layers(max(layers, FIRST_DEPTHS[0])),
        footprint_at(min(max(layers, FIRST_DEPTHS[0]), MAX_REPLAYED_LAYERS)),
    )
    needed_bytes = device_bytes_needed(footprint, machine)
    if layers > MAX_REPLAYED_LAYERS:
        half_footprint = footprint_at(MAX_REPLAYED_LAYERS // 2)
        needed_bytes += (
            (layers - MAX_REPLAYED_LAYERS)
            * (footprint.reserved - half_footprint.reserved)
            / (MAX_REPLAYED_LAYERS - MAX_REPLAYED_LAYERS // 2)
        )
    usage = usage_fractions(footprint, devices, machine)
    return LargestModel(layers, model.parameters, needed_bytes, max(usage, key=lambda name: usage[name]), confirmed)


def _search_depth(fullness: Callable[[int], float]) -> tuple[int, bool]:
    """Return the greatest depth that fits, and whether it and the next depth were replayed."""
    usage = {layers: fullness(layers) for layers in FIRST_DEPTHS}
    while True:
        fits = max((layers for layers, fraction in usage.items() if fraction <= 1), default=0)
        fails = min((layers for layers, fraction in usage.items() if fraction > 1), default=None)
        if fails is not None and (fails - fits == 1 or fails == FIRST_DEPTHS[0]):
            return fits, True
        a, b = (fits, fails) if fits and fails is not None else sorted(usage)[-2:]
        slope = (usage[b] - usage[a]) / (b - a)
        if fails is None and (slope <= 0 or b + (1 - usage[b]) / slope > MAX_REPLAYED_LAYERS):
            if MAX_REPLAYED_LAYERS in usage and MAX_REPLAYED_LAYERS // 2 in usage:
                if slope <= 0:
                    raise ValueError(
                        f"a model of {MAX_REPLAYED_LAYERS} layers needs no more than one of {a}: its depth is no limit"
                    )
                return floor(MAX_REPLAYED_LAYERS + (1 - usage[MAX_REPLAYED_LAYERS]) / slope), False
            layers = MAX_REPLAYED_LAYERS // 2 if MAX_REPLAYED_LAYERS // 2 not in usage else MAX_REPLAYED_LAYERS
        else:
            layers = max(floor(b + (1 - usage[b]) / slope), fits + 1)
            layers = layers if fails is None else min(layers, fails - 1)
            if layers in usage:  # the extrapolation is wrong here
                layers = fits + 1 if fails is None else (fits + fails) // 2
        usage[layers] = fullness(layers)
