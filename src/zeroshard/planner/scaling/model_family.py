"""Model families, whose models differ only in depth: the traced model of any depth, and the deepest one that fits.

Only two shallow models are traced: see [Note: extrapolating in depth] in ``depth_extrapolation.py``. A model with
many blocks so small that several form one unit ([Note: small blocks]) is traced at its full depth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor
from typing import Any

import torch
from torch import nn

from zeroshard.config.config import Config
from zeroshard.config.offload import Offload
from zeroshard.models import GPT
from zeroshard.planner.depth_extrapolation import extrapolate_state_sizes, extrapolate_trace
from zeroshard.planner.footprint import Footprint, device_bytes_needed, usage_fractions
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import StateSizes
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import DEFAULT_LOOP, TracedModel, TraceKey, TrainingLoop
from zeroshard.planner.tracing.inputs import Inputs
from zeroshard.planner.tracing.trace import Trace
from zeroshard.planner.tracing.trace_model import CheckpointMode
from zeroshard.sharding import blocks_per_group

SHALLOW_LAYERS = 2  # blocks of the shallower traced model: a first and a last one; more are inserted between them
FIRST_DEPTHS = (SHALLOW_LAYERS + 1, SHALLOW_LAYERS + 7)  # depths of the first linear extrapolation
# Deeper models are not replayed, but extrapolated linearly from this depth and half of it.
MAX_REPLAYED_LAYERS = 4096

ModelFamily = Callable[[int], nn.Module]
"""Returns the model with the given number of layers; on the meta device it takes no memory."""


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


class DepthExtrapolatedModel(TracedModel):
    """The traced model of a family with the given number of layers.

    Its traces and state sizes are extrapolated from shallow models. ``members`` are these, if another depth already
    has them.

    >>> from zeroshard.models import GPTConfig
    >>> deep = DepthExtrapolatedModel(gpt_family(GPTConfig(heads=64, width=8192)), 125, precision="fp16")
    >>> f"{deep.parameters / 1e9:.1f}B"
    '101.5B'
    """

    def __init__(
        self,
        family: ModelFamily,
        layers: int = FIRST_DEPTHS[0],
        loop: TrainingLoop = DEFAULT_LOOP,
        *,
        members: tuple[TracedModel, ...] | None = None,
        **options: Any,
    ) -> None:
        if layers < 1:
            raise ValueError(f"layers must be a positive integer, got {layers}")
        self.family, self.layers = family, layers
        is_extrapolated = layers > SHALLOW_LAYERS and _blocks_per_unit(family, layers, options) == 1
        depths = (SHALLOW_LAYERS, SHALLOW_LAYERS + 1) if is_extrapolated else (layers,)
        self._members = members or tuple(TracedModel(family(depth), loop, **options) for depth in depths)
        super().__init__(self._members[0].model, loop, **options)

    @property
    def parameters(self) -> int:
        """Ψ: the number of elements of all parameters."""
        counts = [member.parameters for member in self._members]
        return counts[0] if len(counts) == 1 else counts[0] + (self.layers - SHALLOW_LAYERS) * (counts[1] - counts[0])

    def with_layers(self, layers: int) -> DepthExtrapolatedModel:
        """Return the model of another depth, which shares the traces; each of its blocks is assumed to be a unit.

        >>> from zeroshard.models import GPTConfig
        >>> DepthExtrapolatedModel(gpt_family(GPTConfig(heads=64, width=8192)), 3).with_layers(125).layers
        125
        """
        if self.layers <= SHALLOW_LAYERS or layers <= SHALLOW_LAYERS:
            raise ValueError(
                f"models share traces only with more than {SHALLOW_LAYERS} layers, got {self.layers} and {layers}"
            )
        members = self._members if len(self._members) > 1 else None
        return DepthExtrapolatedModel(self.family, layers, self.loop, members=members, **self.options)

    def _trace(self, key: TraceKey) -> Trace:
        traces = [member._trace(key) for member in self._members]
        if len(traces) == 1:
            return traces[0]
        return extrapolate_trace(traces[0], traces[1], self.layers - SHALLOW_LAYERS - 1)

    def _compute_state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        is_extrapolated = len(self._members) > 1
        if strategy.offload is not None:  # its fractions apply to all blocks together: they cannot be extrapolated
            model = self.family(self.layers)
            full_model = TracedModel(model, self.loop, group_small_blocks=not is_extrapolated, **self.options)
            return full_model.state_sizes(strategy, ranks, on_gpu)
        sizes = [member.state_sizes(strategy, ranks, on_gpu) for member in self._members]
        if not is_extrapolated:
            return sizes[0]
        bucket_size = Config(**self.options).bucket_size
        return extrapolate_state_sizes(sizes[0], sizes[1], self.layers - SHALLOW_LAYERS - 1, bucket_size)


def _blocks_per_unit(family: ModelFamily, layers: int, options: dict[str, Any]) -> int:
    """Return how many blocks form a unit in the model with the given number of layers."""
    if options.get("units") is not None:
        return 1
    counts = [sum(parameter.numel() for parameter in family(depth).parameters()) for depth in (1, 2)]
    return blocks_per_group(counts[1] - counts[0], layers)


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
    model = DepthExtrapolatedModel(family, loop=loop, **options)
    return find_deepest_member(model, strategy, devices, Machine.resolve(machine).with_memory(memory))


def find_deepest_member(
    member: DepthExtrapolatedModel, strategy: Strategy, devices: int, machine: Machine
) -> LargestModel:
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
