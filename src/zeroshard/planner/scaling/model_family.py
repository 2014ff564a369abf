"""Family: models that differ in depth alone, and one of them as the subject of plans, however deep.

Only two shallow members are traced: see [Note: extrapolating in depth] in ``depth_extrapolation.py``. One with so many
and so small blocks that several make a unit ([Note: small blocks]) is traced as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeroshard.config.config import Config
from zeroshard.models.gpt import GPT
from zeroshard.planner.depth_extrapolation import extrapolate_state_sizes, extrapolate_trace
from zeroshard.planner.state_sizes import StateSizes
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel
from zeroshard.planner.tracing.inputs import Inputs
from zeroshard.planner.tracing.trace import Trace
from zeroshard.planner.tracing.trace_model import CheckpointMode
from zeroshard.sharding.units import blocks_per_group

SHALLOW_LAYERS = 2  # blocks of the shallower model that is traced: a first and a last one, between which others come

ModelFamily = Callable[[int], nn.Module]
"""Makes the model with so many layers; on the meta device it takes no memory."""


def gpt_family(config: Any, kind: type[GPT] = GPT) -> ModelFamily:
    """GPTs of one shape and any depth.

    >>> from zeroshard.models import GPTConfig
    >>> family = gpt_family(GPTConfig(heads=2, width=64, vocab_size=256, context=32))
    >>> len(family(5).blocks)
    5
    """

    def member(layers: int) -> nn.Module:
        with torch.device("meta"):
            model = kind(replace(config, layers=1))
        model.config = replace(config, layers=layers)
        block = model.blocks[0]  # copied: to make a block anew, its initial values included, takes ten times as long
        model.blocks.extend(copy.deepcopy(block) for _ in range(layers - 1))
        return model

    return member


def find_family(model: nn.Module) -> tuple[ModelFamily, int] | None:
    """The family of a model and its depth, where that is known: of zeroshard's own GPT.

    >>> from zeroshard.models import GPT, GPTConfig
    >>> with torch.device("meta"):
    ...     family, layers = find_family(GPT(GPTConfig(layers=4, heads=2, width=64)))
    >>> layers
    4
    """
    return (gpt_family(model.config, type(model)), model.config.layers) if isinstance(model, GPT) else None


class DepthExtrapolatedModel(TracedModel):
    """The member of a family with so many layers, as the subject of plans.

    ``given`` are options of :class:`TracedModel`.

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
        members: tuple[TracedModel, ...] | None = None,  # that are traced: those of another depth, if there is one
        **given: Any,
    ) -> None:
        if layers < 1:
            raise ValueError(f"layers is a whole number from 1 up, got {layers}")
        self.family, self.layers, self._model_options = family, layers, given
        shared = layers > SHALLOW_LAYERS and self._blocks_per_unit(layers) == 1
        depths = (SHALLOW_LAYERS, SHALLOW_LAYERS + 1) if shared else (layers,)
        self._traced_members = members or tuple(TracedModel(family(depth), inputs, **given) for depth in depths)
        super().__init__(self._traced_members[0].model, inputs, **given)
        self._deep_state_sizes: dict[Any, StateSizes] = {}

    @property
    def parameters(self) -> int:
        """Ψ: elements of all parameters."""
        counts = [sum(parameter.numel() for parameter in member.model.parameters()) for member in self._traced_members]
        return counts[0] if len(counts) == 1 else counts[0] + (self.layers - SHALLOW_LAYERS) * (counts[1] - counts[0])

    def with_layers(self, layers: int) -> DepthExtrapolatedModel:
        """The member of another depth, which needs no trace of its own: each of its blocks is taken to be a unit.

        >>> from zeroshard.models import GPTConfig
        >>> DepthExtrapolatedModel(gpt_family(GPTConfig(heads=64, width=8192)), 3).with_layers(125).layers
        125
        """
        if self.layers <= SHALLOW_LAYERS or layers <= SHALLOW_LAYERS:
            raise ValueError(f"depths from {SHALLOW_LAYERS + 1} up share their traces, got {self.layers} and {layers}")
        members = self._traced_members if len(self._traced_members) > 1 else None
        return DepthExtrapolatedModel(self.family, layers, self._inputs, members=members, **self._model_options)

    def _blocks_per_unit(self, layers: int) -> int:
        """How many blocks of the member with so many layers make a unit."""
        if self._model_options.get("units") is not None:
            return 1
        counts = [sum(parameter.numel() for parameter in self.family(depth).parameters()) for depth in (1, 2)]
        return blocks_per_group(counts[1] - counts[0], layers)

    def _trace(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        found = [member._trace(tensor, checkpoint, kind, micro_batch) for member in self._traced_members]
        return found[0] if len(found) == 1 else extrapolate_trace(found[0], found[1], self.layers - SHALLOW_LAYERS - 1)

    def state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        """What the library holds of a choice."""
        key = (strategy.stage, strategy.tensor, repr(strategy.offload), ranks, on_gpu)
        if key not in self._deep_state_sizes:
            self._deep_state_sizes[key] = self._compute_state_sizes(strategy, ranks, on_gpu)
        return self._deep_state_sizes[key]

    def _compute_state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        if strategy.offload is not None:  # its fractions are of all blocks together
            model, states = self.family(self.layers), self.optimizer_states
            together = len(self._traced_members) == 1
            whole = TracedModel(
                model,
                optimizer_states=states,
                one_pass=self.has_fused_adam,
                group_small_blocks=together,
                **self.options,
            )
            return whole.state_sizes(strategy, ranks, on_gpu)
        found = [member.state_sizes(strategy, ranks, on_gpu) for member in self._traced_members]
        if len(found) == 1:
            return found[0]
        return extrapolate_state_sizes(
            found[0], found[1], self.layers - SHALLOW_LAYERS - 1, Config(**self.options).bucket_size
        )
