"""Memory: the bytes of a model's states on each rank, from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.config import Config
from zeroshard.engine.units import plan_units
from zeroshard.layout import FlatLayout
from zeroshard.placement import Placement
from zeroshard.precision import Precision


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by kind of state, as :func:`zeroshard.report` counts them. Activations come on top."""

    states: dict[str, int]
    """Held from the first step on: "parameters", "gradients", "master weights", "optimizer states"."""
    working: dict[str, int]
    """The most that is held beside them at some moment of a step, by kind; "step" is never held with the others."""

    @property
    def at_rest(self) -> int:
        """Bytes of all states."""
        return sum(self.states.values())

    @property
    def peak(self) -> int:
        """An upper bound of what is held at once over a step."""
        passes = sum(nbytes for kind, nbytes in self.working.items() if kind != "step")
        return self.at_rest + max(passes, self.working["step"])


def predict_memory(model: nn.Module, *, ranks: int, optimizer_states: int = 2, **options: Any) -> Memory:
    """Predict what :func:`zeroshard.shard` with ``options`` will hold on each of ``ranks``.

    The model may be on the meta device. ``optimizer_states`` is how many values the optimizer keeps for each element:
    2 for Adam, 1 for SGD with momentum. Every parameter that requires a gradient is taken to be trained.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(1024, 1024, bias=False)
    >>> predict_memory(model, ranks=4, stage=3, precision="bf16").states["optimizer states"] == 2 * 4 * 1024**2 // 4
    True
    """
    config = Config(**options)
    placement, precision = Placement.of_stage(config.stage, ranks), Precision(model, config)
    parts = ranks if placement.optimizer else 1
    states = dict.fromkeys(("parameters", "gradients", "master weights", "optimizer states"), 0)
    unit_bytes, gradient_bytes, bucket_bytes, copied = [0], [0], [0], 0
    named = dict(model.named_parameters())
    for plan in plan_units(model, config.units, config.bucket_size):
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for name in plan.parameters:
            kind = (precision.compute_dtype(name, named[name]), named[name].requires_grad)
            kinds.setdefault(kind, []).append(named[name].numel())
        unit_bytes.append(0)
        gradient_bytes.append(0)
        for (dtype, trained), numels in kinds.items():
            layout = FlatLayout.build(numels, config.bucket_size, parts)
            states["parameters"] += (layout.shard_numel if placement.parameters else layout.numel) * dtype.itemsize
            unit_bytes[-1] += layout.numel * dtype.itemsize
            if not trained:
                continue
            reduced = precision.reduce_dtype(dtype).itemsize
            states["gradients"] += (layout.shard_numel if placement.gradients else layout.numel) * reduced
            gradient_bytes[-1] += sum(numels) * dtype.itemsize
            bucket_bytes.append(max(bucket.numel for bucket in layout.buckets) * reduced)
            master = precision.has_master(dtype)
            states["master weights"] += layout.shard_numel * 4 if master else 0
            states["optimizer states"] += optimizer_states * layout.shard_numel * (4 if master else dtype.itemsize)
            copied += layout.shard_numel * 4 if master else 0
    ring = config.ring * max(bucket_bytes)
    working = {
        "gathered": 2 * max(unit_bytes) if placement.parameters else 0,
        "autograd": 2 * max(gradient_bytes),
        "buckets": ring + ring // parts if placement.gradients else ring // parts,
        "step": copied,
    }
    return Memory(states, working)
