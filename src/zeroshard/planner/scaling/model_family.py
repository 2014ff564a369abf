"""Model families, whose models differ only in depth, and a traced model of any depth of a family.

Only two shallow models are traced: see [Note: extrapolating in depth] in ``depth_extrapolation.py``. A model with
many blocks so small that several form one unit ([Note: small blocks]) is traced at its full depth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeroshard.config.config import Config
from zeroshard.models import GPT
from zeroshard.planner.depth_extrapolation import extrapolate_state_sizes, extrapolate_trace
from zeroshard.planner.state_sizes import StateSizes
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel
from zeroshard.planner.tracing.inputs import Inputs
from zeroshard.planner.tracing.trace import Trace
from zeroshard.planner.tracing.trace_model import CheckpointMode
from zeroshard.sharding import blocks_per_group

SHALLOW_LAYERS = 2  # blocks of the shallower traced model: a first and a last one; more are inserted between them

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


def find_family(model: nn.Module) -> tuple[ModelFamily, int] | None:
    """Return the family and the depth of zeroshard's GPT; None for any other model.

    >>> from zeroshard.models import GPT, GPTConfig
    >>> with torch.device("meta"):
    ...     family, layers = find_family(GPT(GPTConfig(layers=4, heads=2, width=64)))
    >>> layers
    4
    """
    return (gpt_family(model.config, type(model)), model.config.layers) if isinstance(model, GPT) else None


class DepthExtrapolatedModel(TracedModel):
    """The traced model of a family with the given number of layers.

    Its traces and state sizes are extrapolated from shallow models. ``given`` are options of :class:`TracedModel`.

    >>> from zeroshard.models import GPTConfig
    >>> deep = DepthExtrapolatedModel(gpt_family(GPTConfig(heads=64, width=8192)), 125, precision="fp16")
    >>> f"{deep.parameters / 1e9:.1f}B"
    '101.5B'
    """

    def __init__(
        self,
        family: ModelFamily,
        layers: int,
        inputs: Inputs = None,
        *,
        members: tuple[TracedModel, ...] | None = None,  # the traced shallow models, if another depth already has them
        **given: Any,
    ) -> None:
        if layers < 1:
            raise ValueError(f"layers is a whole number from 1 up, got {layers}")
        self.family, self.layers, self._model_options = family, layers, given
        is_extrapolated = layers > SHALLOW_LAYERS and self._blocks_per_unit(layers) == 1
        depths = (SHALLOW_LAYERS, SHALLOW_LAYERS + 1) if is_extrapolated else (layers,)
        self._traced_members = members or tuple(TracedModel(family(depth), inputs, **given) for depth in depths)
        super().__init__(self._traced_members[0].model, inputs, **given)
        self._deep_state_sizes: dict[Any, StateSizes] = {}

    @property
    def parameters(self) -> int:
        """Ψ: the number of elements of all parameters."""
        counts = [sum(parameter.numel() for parameter in member.model.parameters()) for member in self._traced_members]
        return counts[0] if len(counts) == 1 else counts[0] + (self.layers - SHALLOW_LAYERS) * (counts[1] - counts[0])

    def with_layers(self, layers: int) -> DepthExtrapolatedModel:
        """Return the model of another depth, which shares the traces; each of its blocks is assumed to be a unit.

        >>> from zeroshard.models import GPTConfig
        >>> DepthExtrapolatedModel(gpt_family(GPTConfig(heads=64, width=8192)), 3).with_layers(125).layers
        125
        """
        if self.layers <= SHALLOW_LAYERS or layers <= SHALLOW_LAYERS:
            raise ValueError(f"depths from {SHALLOW_LAYERS + 1} up share their traces, got {self.layers} and {layers}")
        members = self._traced_members if len(self._traced_members) > 1 else None
        return DepthExtrapolatedModel(self.family, layers, self._inputs, members=members, **self._model_options)

    def _blocks_per_unit(self, layers: int) -> int:
        """Return how many blocks form a unit in the model with the given number of layers."""
        if self._model_options.get("units") is not None:
            return 1
        counts = [sum(parameter.numel() for parameter in self.family(depth).parameters()) for depth in (1, 2)]
        return blocks_per_group(counts[1] - counts[0], layers)

    def _trace(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        traces = [member._trace(tensor, checkpoint, kind, micro_batch) for member in self._traced_members]
        return (
            traces[0] if len(traces) == 1 else extrapolate_trace(traces[0], traces[1], self.layers - SHALLOW_LAYERS - 1)
        )

    def state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        """Return the sizes of the states that a rank holds with a strategy."""
        key = (strategy.stage, strategy.tensor, repr(strategy.offload), ranks, on_gpu)
        if key not in self._deep_state_sizes:
            self._deep_state_sizes[key] = self._compute_state_sizes(strategy, ranks, on_gpu)
        return self._deep_state_sizes[key]

    def _compute_state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        # Offload fractions apply to all blocks together, so they cannot be extrapolated.
        if strategy.offload is not None:
            model, states = self.family(self.layers), self.optimizer_states
            groups_blocks = len(self._traced_members) == 1
            full_model = TracedModel(
                model,
                optimizer_states=states,
                one_pass=self.has_fused_adam,
                group_small_blocks=groups_blocks,
                **self.options,
            )
            return full_model.state_sizes(strategy, ranks, on_gpu)
        sizes = [member.state_sizes(strategy, ranks, on_gpu) for member in self._traced_members]
        if len(sizes) == 1:
            return sizes[0]
        return extrapolate_state_sizes(
            sizes[0], sizes[1], self.layers - SHALLOW_LAYERS - 1, Config(**self.options).bucket_size
        )
