"""Memory: the bytes of a model's states on each rank, from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zeroshard.config import Config
from zeroshard.device.strip import PASSED
from zeroshard.device.strip import STATES as STATES_OF_ADAM
from zeroshard.engine.units import Plan, plan_units
from zeroshard.layout import FlatLayout, Piece, Range, shared_rooms
from zeroshard.memory.ledger import STATES
from zeroshard.memory.ring import buffer_lengths
from zeroshard.memory.tiers import travel_bytes
from zeroshard.placement import Placement
from zeroshard.precision import Precision
from zeroshard.rests import Body, Rest, place
from zeroshard.runs import longest_run
from zeroshard.tensor.plans import local_numels


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by kind of state, as :func:`zeroshard.report` counts them. Activations come on top."""

    states: dict[str, int]
    """Held on the device from the first step on: "parameters", "gradients" (those from a backward to zero_grad(); see
    [Note: gradients that come and go]), "master weights", "optimizer states"."""
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
    found = holdings(model, Config(**options), ranks=ranks, tensor=tensor, optimizer_states=optimizer_states)
    working = {
        "gathered": 2 * max((unit.whole for unit in found.units), default=0) if found.placement.parameters else 0,
        "autograd": 2 * max((unit.gradient for unit in found.units), default=0),
        "buckets": found.rings if found.placement.gradients else found.landings,
        "step": found.step,
    }
    return Memory(found.states, working, found.far)


@dataclass(frozen=True)
class BucketBytes:
    """What one bucket of a unit's gradient takes in a slot of the ring: see [Note: buffers of a ring]."""

    dtype: torch.dtype  # which ring
    packed: int  # bytes of the buffer that it is packed into; none where it is reduced as it lies
    part: int  # bytes of the buffer for this rank's part of it, where that is reduced aside
    aside: bool  # it is, since it leaves the device; else only where it is added to what is there


@dataclass(frozen=True)
class UnitBytes:
    """What one unit takes and moves on one rank."""

    name: str
    whole: int  # bytes of its full parameters
    room: int  # bytes of memory that they take while they are gathered
    gradient: int  # bytes of what autograd makes for it
    reduced: int  # bytes that its reduction is given, in the dtype of the reduction
    trained: int  # elements of this rank's shard that are updated
    far: dict[str, int]  # elements of these whose optimizer states rest outside the device, by tier
    parameters: str  # the tier that its shard rests in
    shard: int  # bytes of its shard
    sent: int  # bytes of its gradient that leave the device
    unpacked: int  # bytes of its gradient that are reduced where autograd has made them
    late: int  # bytes of its gradient that are read by the lane: see [Note: packing at once]
    kept: tuple[tuple[torch.dtype, int], ...]  # elements of its gradients that the device keeps, by dtype
    buckets: tuple[BucketBytes, ...]  # in the order that they are reduced in
    cast: int = 0  # bytes that a gather reads and writes on the device, to cast its shard
    blocks: int = 1  # that it was made of: see [Note: small blocks]


@dataclass(frozen=True)
class Holdings:
    """Everything that the library holds on one rank, from shapes alone."""

    units: list[UnitBytes]
    placement: Placement
    ranks: int  # that the states are partitioned over
    states: dict[str, int]
    far: dict[tuple[str, str], int]
    slots: int  # of each ring of buckets that gradients travel through in backward
    rings: int  # bytes of all of them with all the buffers that they may have
    landings: int  # bytes of the buffers for what is reduced at the step, where gradients are whole
    step: int  # bytes of the buffer that the update takes
    travel: int  # bytes of host memory that far states travel through
    updated: int  # bytes that an update reads and writes for one element: states, gradient, parameter, their copies
    kept: int  # bytes of one element's master and states


def holdings(
    model: nn.Module,
    config: Config,
    *,
    ranks: int,
    tensor: int = 1,
    optimizer_states: int = 2,
    on_gpu: bool = True,
    one_pass: bool = False,
    plans: list[Plan] | None = None,
    replicas: int = 1,
) -> Holdings:
    """Work out what :func:`zeroshard.shard` would hold on the first of ``ranks``; ``plans`` are its units, if known.

    Of such ranks, who share the states, there are ``replicas``.
    ``one_pass``: the optimizer is one that a GPU updates so, see [Note: one pass].
    """
    if tensor < 1 or ranks % tensor:
        raise ValueError(f"{ranks} ranks are not a multiple of the {tensor} that divide each layer: change one of them")
    data_ranks = ranks // tensor
    placement = Placement.of_stage(config.stage, data_ranks, config.offload, replicas, config.casts_masters)
    parts = data_ranks if placement.optimizer else 1
    plans = plan_units(model, config.units, config.bucket_size) if plans is None else plans
    named, precision, held = dict(model.named_parameters()), Precision(model, config), local_numels(model, tensor)
    flats = [_flats([(n, named[n], held[n]) for n in plan.parameters], config, precision, parts) for plan in plans]
    every = [flat for unit in flats for flat in unit]
    rests, travel = _rests(every, placement, config, optimizer_states, on_gpu)
    cast = config.casts_masters and placement.parameters
    every = [
        replace(flat, cast=cast and flat.may_cast(rest), lies=on_gpu and flat.may_lie(rest))
        for flat, rest in zip(every, rests, strict=True)
    ]
    numbered = iter(every)
    flats = [[next(numbered) for _ in unit] for unit in flats]
    states, far = _states(every, rests, placement, optimizer_states)
    rings = _rings([flat for flat in every if flat.trained])
    at_once = one_pass and on_gpu and optimizer_states == len(STATES_OF_ADAM)
    copies = [flat for flat in every if flat.trained and flat.is_copied(at_once)]
    copied, itemsize = sum(f.layout.shard_numel for f in copies), max((f.updated.itemsize for f in copies), default=0)
    rooms, resting = iter(shared_rooms([flat.nbytes for flat in every])), iter(rests)
    packs = config.offload is None and replicas == 1
    units = [
        _unit(plan, unit, [next(rooms) for _ in unit], [next(resting) for _ in unit], rings, placement, packs)
        for plan, unit in zip(plans, flats, strict=True)
    ]
    return Holdings(
        units,
        placement,
        parts,
        states,
        far,
        slots=config.ring,
        rings=config.ring * sum(ring.nbytes for ring in rings.values()),
        landings=config.ring * sum(ring.longest_part for ring in rings.values()) if parts > 1 else 0,
        step=min(copied, longest_run(config.bucket_size)) * itemsize,
        travel=travel,
        updated=max((flat.update_bytes(optimizer_states, at_once) for flat in every if flat.trained), default=0),
        kept=max(((1 + optimizer_states) * flat.updated.itemsize for flat in every if flat.trained), default=0),
    )


@dataclass(frozen=True)
class _Flat:
    """What decides the bytes of one flat."""

    layout: FlatLayout
    dtype: torch.dtype  # in computation
    reduced: torch.dtype  # of its gradient
    updated: torch.dtype  # that the optimizer sees
    trained: bool
    cast: bool = False  # keeps its master alone: see [Note: cast on gather]
    lies: bool = False  # its large gradients are reduced as they lie: see [Note: what needs no packing]

    @property
    def nbytes(self) -> int:
        """Of its full parameters."""
        return self.layout.numel * self.dtype.itemsize

    @cached_property
    def buckets(self) -> list[tuple[Range, Piece | None]]:
        """Each with the part of a parameter that is reduced as it lies."""
        return [(bucket, self.layout.sole(bucket) if self.lies else None) for bucket in self.layout.buckets]

    def body(self, optimizer_states: int) -> Body:
        """The same, as ``rests.py`` wants it."""
        homes = tuple(self.layout.in_shard(bucket) for bucket in self.layout.buckets)
        state_bytes = (1 + optimizer_states) * self.updated.itemsize
        return Body(homes, self.trained, self.dtype.itemsize, self.reduced.itemsize, state_bytes)

    def may_cast(self, rest: Rest) -> bool:
        """Whether it could do with its master alone, were it partitioned."""
        return self.trained and self.updated != self.dtype and rest.parameters == "device" and not rest.far

    def may_lie(self, rest: Rest) -> bool:
        """Whether a GPU could reduce its gradients as autograd makes them."""
        return self.trained and self.dtype == self.reduced and rest.gradients == "device"

    @property
    def is_packed_at_once(self) -> bool:
        """Whether its gradients make one bucket: see [Note: packing at once]."""
        return len(self.layout.buckets) == 1 and self.layout.sole(self.layout.buckets[0]) is None

    def is_copied(self, one_pass: bool) -> bool:
        """Whether an update takes a copy of the gradient in the master's dtype."""
        if one_pass and self.updated == torch.float32 and self.reduced in PASSED:
            return False
        return not self.dtype == self.reduced == self.updated

    def update_bytes(self, optimizer_states: int, one_pass: bool) -> int:
        """Read and written for one element in an update: states and master twice, gradient and parameter once.

        With a copy of the gradient, that is written and read, and the master read once more for the parameter.
        """
        parameter = 0 if self.dtype == self.updated or self.cast else self.dtype.itemsize
        moved = 2 * (1 + optimizer_states) * self.updated.itemsize + self.reduced.itemsize + parameter
        if self.is_copied(one_pass):
            moved += (2 + bool(parameter)) * self.updated.itemsize
        return moved


def _flats(
    parameters: list[tuple[str, nn.Parameter, int]], config: Config, precision: Precision, parts: int
) -> list[_Flat]:
    """The flats of a unit, of its parameters with their names and the elements this rank has of them."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for name, parameter, numel in parameters:
        kinds.setdefault((precision.compute_dtype(name, parameter), parameter.requires_grad), []).append(numel)
    flats = []
    for (dtype, trained), numels in kinds.items():
        updated = torch.float32 if precision.has_master(dtype) else dtype
        layout = FlatLayout.build(numels, config.bucket_size, parts)
        flats.append(_Flat(layout, dtype, precision.reduce_dtype(dtype), updated, trained))
    return flats


@dataclass(frozen=True)
class _Ring:
    """The lengths of a slot's buffers, in elements."""

    dtype: torch.dtype
    packed: list[int]
    parts: list[int]
    most: list[int]  # of those for packed buckets, where none is reduced as it lies

    @property
    def nbytes(self) -> int:
        """Of one slot with all the buffers that it may have."""
        return self.dtype.itemsize * sum(self.most + self.parts)

    @property
    def longest_part(self) -> int:
        """Bytes of a rank's part of the longest bucket."""
        return self.dtype.itemsize * max(self.parts, default=0)

    def bucket(self, numel: int, part: int, lies: bool, aside: bool) -> BucketBytes:
        """What a bucket of so many elements takes."""
        packed = 0 if lies else min(length for length in self.packed if length >= numel)
        reduced = min(length for length in self.parts if length >= part)
        return BucketBytes(self.dtype, packed * self.dtype.itemsize, reduced * self.dtype.itemsize, aside)


def _rings(flats: list[_Flat]) -> dict[torch.dtype, _Ring]:
    """The ring of each dtype that gradients are reduced in."""
    rings = {}
    for dtype in {flat.reduced: None for flat in flats}:
        alike = [flat for flat in flats if flat.reduced == dtype]
        packed = [bucket.numel for flat in alike for bucket, lying in flat.buckets if lying is None]
        parts = [bucket.numel // flat.layout.parts for flat in alike for bucket, _ in flat.buckets]
        every = [bucket.numel for flat in alike for bucket, _ in flat.buckets]
        rings[dtype] = _Ring(dtype, *(buffer_lengths(numels) for numels in (packed, parts, every)))
    return rings


def _unit(
    plan: Plan,
    flats: list[_Flat],
    rooms: list[int],
    rests: list[Rest],
    rings: dict[torch.dtype, _Ring],
    placement: Placement,
    at_once: bool,
) -> UnitBytes:
    trained = [(flat, rest) for flat, rest in zip(flats, rests, strict=True) if flat.trained]
    far: dict[str, int] = {}
    for _, rest in trained:
        for span, tier in rest.optimizer:
            if tier != "device":
                far[tier] = far.get(tier, 0) + span.numel
    tiers = [rest.parameters for rest in rests if rest.parameters != "device"]
    return UnitBytes(
        plan.name,
        whole=sum(flat.nbytes for flat in flats),
        room=sum(rooms),
        gradient=sum(sum(flat.layout.numels) * flat.dtype.itemsize for flat, _ in trained),
        reduced=sum(flat.layout.numel * flat.reduced.itemsize for flat, _ in trained),
        trained=sum(flat.layout.shard_numel for flat, _ in trained),
        far=far,
        parameters=tiers[0] if tiers else "device",
        shard=sum(flat.layout.shard_numel * flat.dtype.itemsize for flat in flats),
        sent=sum(
            f.layout.shard_numel * f.reduced.itemsize for f, rest in trained if rest.far or rest.gradients != "device"
        ),
        unpacked=sum(
            lying.within.numel * flat.dtype.itemsize
            for flat, _ in trained
            for _, lying in flat.buckets
            if lying is not None
        ),
        late=sum(sum(f.layout.numels) * f.dtype.itemsize for f, _ in trained if not (at_once and f.is_packed_at_once)),
        kept=tuple(
            (flat.reduced, flat.layout.shard_numel if placement.gradients else flat.layout.numel)
            for flat, rest in trained
            if rest.gradients == "device"
        ),
        buckets=tuple(
            rings[flat.reduced].bucket(
                bucket.numel,
                bucket.numel // flat.layout.parts,
                lies=lying is not None,
                aside=rest.gradients != "device" and flat.layout.parts > 1,
            )
            for flat, rest in trained
            for bucket, lying in flat.buckets
        ),
        cast=sum(f.layout.shard_numel * (f.updated.itemsize + f.dtype.itemsize) for f in flats if f.cast),
        blocks=plan.blocks if plan.is_block else 1,
    )


def _rests(
    flats: list[_Flat], placement: Placement, config: Config, optimizer_states: int, on_gpu: bool
) -> tuple[list[Rest], int]:
    """Where each flat's states rest, and the bytes of host memory they travel through."""
    if config.offload is None:
        return [Rest(optimizer=[(Range(0, flat.layout.shard_numel), "device")]) for flat in flats], 0
    bodies = [flat.body(optimizer_states) for flat in flats]
    travel = travel_bytes(config.offload, bodies, on_gpu)
    return place(bodies, config.offload, placement.gradients, travel)[0], travel


def _states(
    flats: list[_Flat], rests: list[Rest], placement: Placement, optimizer_states: int
) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Bytes of states on the device, and outside it by (kind of state, tier)."""
    counted: dict[tuple[str, str], int] = dict.fromkeys(((kind, "device") for kind in STATES), 0)

    def count(kind: str, tier: str, numel: int, dtype: torch.dtype) -> None:
        counted[kind, tier] = counted.get((kind, tier), 0) + numel * dtype.itemsize

    for flat, rest in zip(flats, rests, strict=True):
        layout = flat.layout
        numel = 0 if flat.cast else layout.shard_numel if placement.parameters else layout.numel
        count("parameters", rest.parameters, numel, flat.dtype)
        if not flat.trained:
            continue
        count("gradients", rest.gradients, layout.shard_numel if placement.gradients else layout.numel, flat.reduced)
        for span, tier in rest.optimizer:
            apart = flat.updated != flat.dtype or tier != "device" or rest.parameters != "device"
            count("master weights", tier, span.numel if apart else 0, flat.updated)
            count("optimizer states", tier, optimizer_states * span.numel, flat.updated)
    near = {kind: nbytes for (kind, tier), nbytes in counted.items() if tier == "device"}
    return near, {key: nbytes for key, nbytes in counted.items() if key[1] != "device" and nbytes}
