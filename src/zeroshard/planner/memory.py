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
from zeroshard.runs import longest_run
from zeroshard.tensor.plans import local_numels


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


def predict_memory(
    model: nn.Module, *, ranks: int, tensor: int = 1, optimizer_states: int = 2, **options: Any
) -> Memory:
    """Predict what :func:`zeroshard.shard` with ``options`` will hold on each of ``ranks``.

    Of these, ``tensor`` divide each layer; where they cannot do so evenly, it is the first of them, which holds most.
    The model may be on the meta device. ``optimizer_states`` is how many values the optimizer keeps for each element:
    2 for Adam, 1 for SGD with momentum. Every parameter that requires a gradient is taken to be trained, by one of
    torch's own optimizers, which are stepped in pieces: see :attr:`zeroshard.Config.bucket_size`.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(1024, 1024, bias=False)
    >>> predict_memory(model, ranks=4, stage=3, precision="bf16").states["optimizer states"] == 2 * 4 * 1024**2 // 4
    True
    """
    if tensor < 1 or ranks % tensor:
        raise ValueError(f"{ranks} ranks are not a multiple of the {tensor} that divide each layer: change one of them")
    config, data_ranks = Config(**options), ranks // tensor
    placement, precision = Placement.of_stage(config.stage, data_ranks), Precision(model, config)
    parts = data_ranks if placement.optimizer else 1
    states = dict.fromkeys(("parameters", "gradients", "master weights", "optimizer states"), 0)
    unit_bytes, gradient_bytes = [0], [0]
    bucket_bytes: dict[torch.dtype, int] = {}  # of the largest, by the dtype it is reduced in: each has a ring
    copied, widest = 0, 0  # elements of gradients that the update needs a copy of, and bytes of the widest of them
    named, held = dict(model.named_parameters()), local_numels(model, tensor)
    for plan in plan_units(model, config.units, config.bucket_size):
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for name in plan.parameters:
            kind = (precision.compute_dtype(name, named[name]), named[name].requires_grad)
            kinds.setdefault(kind, []).append(held[name])
        unit_bytes.append(0)
        gradient_bytes.append(0)
        for (dtype, trained), numels in kinds.items():
            layout = FlatLayout.build(numels, config.bucket_size, parts)
            states["parameters"] += (layout.shard_numel if placement.parameters else layout.numel) * dtype.itemsize
            unit_bytes[-1] += layout.numel * dtype.itemsize
            if not trained:
                continue
            reduced = precision.reduce_dtype(dtype)
            states["gradients"] += (layout.shard_numel if placement.gradients else layout.numel) * reduced.itemsize
            gradient_bytes[-1] += sum(numels) * dtype.itemsize
            longest = max((bucket.numel for bucket in layout.buckets), default=0) * reduced.itemsize
            bucket_bytes[reduced] = max(bucket_bytes.get(reduced, 0), longest)
            master = precision.has_master(dtype)
            states["master weights"] += layout.shard_numel * 4 if master else 0
            states["optimizer states"] += optimizer_states * layout.shard_numel * (4 if master else dtype.itemsize)
            updated = torch.float32 if master else dtype
            if master or reduced != updated:  # the optimizer gets a copy in the dtype it updates
                copied += layout.shard_numel
                widest = max(widest, updated.itemsize)
    ring = config.ring * sum(bucket_bytes.values())
    working = {
        "gathered": 2 * max(unit_bytes) if placement.parameters else 0,
        "autograd": 2 * max(gradient_bytes),
        "buckets": ring + ring // parts if placement.gradients else ring // parts,
        "step": min(copied, longest_run(config.bucket_size)) * widest,
    }
    return Memory(states, working)
