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

from zeroshard.models import GPT, MAX_LAYERS
from zeroshard.planner.footprint import Footprint, device_bytes_needed, usage_fractions
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TRACED_DEPTHS, ModelFamily, TracedModel

FIRST_DEPTHS = (TRACED_DEPTHS[1], TRACED_DEPTHS[1] + 6)  # depths of the first linear extrapolation


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
    """0 if not even the shallowest model considered, with 3 layers, fits; at most ``MAX_LAYERS``."""
    parameters: int
    """Ψ of this model; of the shallowest one if nothing fits."""
    memory: float
    """Bytes that it needs on a device."""
    limit: str
    """The memory with the highest usage: "device", "host" or "disk"."""

    @property
    def may_be_deeper(self) -> bool:
        """Whether no deeper model was considered."""
        return self.layers == MAX_LAYERS


def find_deepest_member(member: TracedModel, strategy: Strategy, devices: int, machine: Machine) -> LargestModel:
    """Find the deepest model that fits, using the traces of any model of the family with more than 2 layers.

    >>> from zeroshard.models import GPTConfig
    >>> member = TracedModel.from_family(gpt_family(GPTConfig(heads=64, width=8192)), precision="fp16")
    >>> strategy = Strategy(stage=3, checkpoint="recompute")
    >>> found = find_deepest_member(member, strategy, 64, Machine.resolve("dgx2"))
    >>> 90e9 < found.parameters < 110e9, found.limit
    (True, 'device')

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

    layers = _search_depth(max_usage)
    shown_layers = max(layers, FIRST_DEPTHS[0])
    footprint = footprint_at(shown_layers)
    usage = usage_fractions(footprint, devices, machine)
    return LargestModel(
        layers,
        member.with_layers(shown_layers).parameters,
        device_bytes_needed(footprint, machine),
        max(usage, key=lambda name: usage[name]),
    )


def _search_depth(max_usage: Callable[[int], float]) -> int:
    """Return the greatest depth that fits, at most MAX_LAYERS; 0 if the first one does not."""
    usage = {layers: max_usage(layers) for layers in FIRST_DEPTHS}
    while True:
        fits = max((layers for layers, fraction in usage.items() if fraction <= 1), default=0)
        fails = min((layers for layers, fraction in usage.items() if fraction > 1), default=MAX_LAYERS + 1)
        if fails - fits == 1 or fails == FIRST_DEPTHS[0]:
            return fits
        a, b = (fits, fails) if fits and fails in usage else sorted(usage)[-2:]
        slope = (usage[b] - usage[a]) / (b - a)
        guess = floor(b + (1 - usage[b]) / slope) if slope > 0 else MAX_LAYERS
        layers = min(max(guess, fits + 1), fails - 1)
        usage[layers] = max_usage(layers)
