"""Find the deepest model of a family that fits. The models of a family differ only in depth.

Only two shallow models are traced: see [Note: extrapolating in depth] in ``depth_extrapolation.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor
from typing import Any

import torch
from torch import nn

from zeroshard.config.offload import Offload
from zeroshard.models import GPT
from zeroshard.planner.footprint import Footprint, device_bytes_needed, usage_fractions
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TRACED_DEPTHS, ModelFamily, TracedModel, TrainingLoop
from zeroshard.planner.tracing.inputs import Inputs
from zeroshard.planner.tracing.trace_model import CheckpointMode

FIRST_DEPTHS = (TRACED_DEPTHS[1], TRACED_DEPTHS[1] + 6)  # depths of the first linear extrapolation
# Deeper models are not replayed, but extrapolated linearly from this depth and half of it.
MAX_REPLAYED_LAYERS = 4096


def gpt_family(config: Any, kind: type[GPT] = GPT) -> ModelFamily:
    """Return the family of GPTs with this shape and any depth.

    >>> from zeroshard.models import GPTConfig
    >>> family = gpt_family(GPTConfig(heads=2, width=64, vocab_size=256, context=32))
    >>> len(family(5).blocks)
    5
    """

    def build_model(layers: int) -> nn.Module:
        with torch.device("meta"):
            model = kind(replace(config, layers=1))
        model.config = replace(config, layers=layers)
        block = model.blocks[0]  # copied: constructing and initializing a block takes ten times as long
        model.blocks.extend(copy.deepcopy(block) for _ in range(layers - 1))
        return model

    return build_model


def find_family(model: nn.Module) -> ModelFamily | None:
    """Return the family of zeroshard's GPT; None for any other model."""
    return gpt_family(model.config, type(model)) if isinstance(model, GPT) else None


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
    sequence: int | None = None,
    optimizer_states: int = 2,
    **options: Any,
) -> LargestModel:
    """Find the deepest model of a family that fits. The arguments are those of :func:`zeroshard.plan`.

    >>> from zeroshard.models import GPTConfig
    >>> family = gpt_family(GPTConfig(heads=64, width=8192))
    >>> found = find_largest_model(family, devices=64, machine="dgx2", precision="fp16")
    >>> 90e9 < found.parameters < 110e9, found.limit, found.confirmed
    (True, 'device', True)
    """
    strategy = Strategy(
        stage=stage,
        tensor=tensor,
        checkpoint=checkpoint,
        offload=Offload.from_option(offload),
        micro_batch=micro_batch,
    )
    loop = TrainingLoop(inputs=inputs, sequence=sequence, optimizer_states=optimizer_states)
    model = TracedModel.from_family(family, loop=loop, **options)
    return find_deepest_member(model, strategy, devices, Machine.resolve(machine).with_memory(memory))


def find_deepest_member(member: TracedModel, strategy: Strategy, devices: int, machine: Machine) -> LargestModel:
    """Find the deepest model that fits, using the traces of any model of the family with more than 2 layers.

    Memory is linear in depth, or piecewise linear if the peak moves to another point in time. The search follows the
    line through two depths to the limit, until one depth fits and the next does not.
    """
    if devices < 1:
        raise ValueError(f"devices must be a positive integer, got {devices}")
    if strategy.tensor < 1 or devices % strategy.tensor:
        raise ValueError(f"devices ({devices}) must be a multiple of the tensor degree ({strategy.tensor})")

    def footprint_at(layers: int) -> Footprint:
        return member.with_layers(layers).footprint(strategy, devices, machine)

    def max_usage(layers: int) -> float:
        return max(usage_fractions(footprint_at(layers), devices, machine).values())

    layers, confirmed = _search_depth(max_usage)
    shown_layers = max(layers, FIRST_DEPTHS[0])
    parameters = member.with_layers(shown_layers).parameters
    footprint = footprint_at(min(shown_layers, MAX_REPLAYED_LAYERS))
    needed_bytes = device_bytes_needed(footprint, machine)
    if layers > MAX_REPLAYED_LAYERS:
        half = MAX_REPLAYED_LAYERS // 2
        growth = footprint.reserved - footprint_at(half).reserved
        needed_bytes += (layers - MAX_REPLAYED_LAYERS) * growth / (MAX_REPLAYED_LAYERS - half)
    usage = usage_fractions(footprint, devices, machine)
    return LargestModel(layers, parameters, needed_bytes, max(usage, key=lambda name: usage[name]), confirmed)


def _search_depth(max_usage: Callable[[int], float]) -> tuple[int, bool]:
    """Return the greatest depth that fits, and whether it and the next depth were replayed."""
    usage = {layers: max_usage(layers) for layers in FIRST_DEPTHS}
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
                        f"there is no largest model: {MAX_REPLAYED_LAYERS} layers need no more memory than {a}"
                    )
                return floor(MAX_REPLAYED_LAYERS + (1 - usage[MAX_REPLAYED_LAYERS]) / slope), False
            layers = MAX_REPLAYED_LAYERS // 2 if MAX_REPLAYED_LAYERS // 2 not in usage else MAX_REPLAYED_LAYERS
        else:
            layers = max(floor(b + (1 - usage[b]) / slope), fits + 1)
            layers = layers if fails is None else min(layers, fails - 1)
            if layers in usage:  # the extrapolation is wrong here
                layers = fits + 1 if fails is None else (fits + fails) // 2
        usage[layers] = max_usage(layers)
