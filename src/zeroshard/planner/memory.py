"""Memory: the bytes of a model's states on each rank, from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroshard.config import Config
from zeroshard.engine.units import plan_units
from zeroshard.layout import FlatLayout, Range
from zeroshard.memory.ledger import STATES
from zeroshard.offload import Offload
from zeroshard.placement import Placement
from zeroshard.precision import Precision
from zeroshard.rests import Body, Rest, place
from zeroshard.runs import longest_run
from zeroshard.tensor.plans import local_numels


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by kind of state, as :func:`zeroshard.report` counts them. Activations come on top."""

    states: dict[str, int]
    """Held on the device from the first step on: "parameters", "gradients", "master weights", "optimizer states"."""
    working: dict[str, int]
    """The most that is held beside them at some moment of a step, by kind; "step" is never held with the others."""
    far: dict[tuple[str, str], int] = field(default_factory=dict)
    """Held outside the device from the first step on, by (kind of state, tier)."""

    @property
    def at_rest(self) -> int:
        """Bytes of all states on the device."""
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
    placement = Placement.of_stage(config.stage, data_ranks, config.offload)
    precision, parts = Precision(model, config), data_ranks if placement.optimizer else 1
    found: list[_Flat] = []
    unit_bytes, gradient_bytes = [0], [0]
    bucket_bytes: dict[torch.dtype, int] = {}  # of the largest, by the dtype it is reduced in: each has a ring
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
            reduced = precision.reduce_dtype(dtype)
            updated = torch.float32 if precision.has_master(dtype) else dtype
            found.append(_Flat(layout, dtype, reduced, updated, trained))
            unit_bytes[-1] += layout.numel * dtype.itemsize
            if trained:
                gradient_bytes[-1] += sum(numels) * dtype.itemsize
                longest = max((bucket.numel for bucket in layout.buckets), default=0) * reduced.itemsize
                bucket_bytes[reduced] = max(bucket_bytes.get(reduced, 0), longest)
    states, far = _states(found, placement, config.offload, optimizer_states)
    copies = [f for f in found if f.trained and not f.dtype == f.reduced == f.updated]  # in the dtype of the update
    copied, widest = sum(f.layout.shard_numel for f in copies), max((f.updated.itemsize for f in copies), default=0)
    ring = config.ring * sum(bucket_bytes.values())
    working = {
        "gathered": 2 * max(unit_bytes) if placement.parameters else 0,
        "autograd": 2 * max(gradient_bytes),
        "buckets": ring + ring // parts if placement.gradients else ring // parts,
        "step": min(copied, longest_run(config.bucket_size)) * widest,
    }
    return Memory(states, working, far)


@dataclass(frozen=True)
class _Flat:
    """What decides the bytes of one flat."""

    layout: FlatLayout
    dtype: torch.dtype  # in computation
    reduced: torch.dtype  # of its gradient
    updated: torch.dtype  # that the optimizer sees
    trained: bool

    def body(self, optimizer_states: int) -> Body:
        """The same, as ``rests.py`` wants it."""
        homes = tuple(self.layout.in_shard(bucket) for bucket in self.layout.buckets)
        state_bytes = (1 + optimizer_states) * self.updated.itemsize
        return Body(homes, self.trained, self.dtype.itemsize, self.reduced.itemsize, state_bytes)


def _states(
    flats: list[_Flat], placement: Placement, offload: Offload | None, optimizer_states: int
) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Bytes of states on the device, and outside it by (kind of state, tier)."""
    if offload is None:
        rests = [Rest(optimizer=[(Range(0, flat.layout.shard_numel), "device")]) for flat in flats]
    else:
        rests, _ = place([flat.body(optimizer_states) for flat in flats], offload, placement.gradients)
    counted: dict[tuple[str, str], int] = dict.fromkeys(((kind, "device") for kind in STATES), 0)

    def count(kind: str, tier: str, numel: int, dtype: torch.dtype) -> None:
        counted[kind, tier] = counted.get((kind, tier), 0) + numel * dtype.itemsize

    for flat, rest in zip(flats, rests, strict=True):
        layout = flat.layout
        count("parameters", rest.parameters, layout.shard_numel if placement.parameters else layout.numel, flat.dtype)
        if not flat.trained:
            continue
        count("gradients", rest.gradients, layout.shard_numel if placement.gradients else layout.numel, flat.reduced)
        for span, tier in rest.optimizer:
            apart = flat.updated != flat.dtype or tier != "device" or rest.parameters != "device"
            count("master weights", tier, span.numel if apart else 0, flat.updated)
            count("optimizer states", tier, optimizer_states * span.numel, flat.updated)
    near = {kind: nbytes for (kind, tier), nbytes in counted.items() if tier == "device"}
    return near, {key: nbytes for key, nbytes in counted.items() if key[1] != "device" and nbytes}
