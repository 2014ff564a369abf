"""Memory: the bytes of a model's states on each rank, from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zeroshard.config.config import Config
from zeroshard.memory.bucket_ring import buffer_lengths
from zeroshard.memory.tier_allocator import staging_bytes
from zeroshard.memory.tracker import MODEL_STATE_KINDS
from zeroshard.optim.fused_adam.kernel_inputs import ADAM_STATE_KEYS as STATES_OF_ADAM
from zeroshard.optim.fused_adam.kernel_inputs import SUPPORTED_DTYPES
from zeroshard.optim.slices import max_slice_numel
from zeroshard.sharding.layout import FlatLayout, ParamRange, Range, round_to_shared_sizes
from zeroshard.sharding.placement import Placement
from zeroshard.sharding.precision import Precision
from zeroshard.sharding.tier_placement import FlatSizes, TierPlacement, assign_tiers
from zeroshard.sharding.units import UnitSpec, plan_units
from zeroshard.tensor_parallel.plans import local_numels


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on one rank, by kind of state, as :func:`zeroshard.report` counts them. Activations come on top."""

    states: dict[str, int]
    """Held on the device from the first step on: "parameters", "gradients" (those from a backward to zero_grad(); see
    [Note: gradients that come and go]), "master weights", "optimizer states"."""
    transient: dict[str, int]
    """The most that is held beside them at some moment of a step, by kind; "step" is never held with the others."""
    offloaded: dict[tuple[str, str], int] = field(default_factory=dict)
    """Held outside the device from the first step on, by (kind of state, tier)."""

    @property
    def state_bytes(self) -> int:
        """Bytes of all states on the device."""
        return sum(self.states.values())

    @property
    def peak_bytes(self) -> int:
        """An upper bound of what is held at once over a step."""
        passes = sum(nbytes for kind, nbytes in self.transient.items() if kind != "step")
        return self.state_bytes + max(passes, self.transient["step"])


def predict_memory(
    model: nn.Module, *, ranks: int, tensor: int = 1, optimizer_states: int = 2, **options: Any
) -> PredictedMemory:
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
    found = state_sizes(model, Config(**options), ranks=ranks, tensor=tensor, optimizer_states=optimizer_states)
    working = {
        "gathered": 2 * max((unit.full_bytes for unit in found.units), default=0) if found.placement.parameters else 0,
        "autograd": 2 * max((unit.grad_bytes for unit in found.units), default=0),
        "buckets": found.ring_bytes if found.placement.gradients else found.shard_buffer_bytes,
        "step": found.step_buffer_bytes,
    }
    return PredictedMemory(found.states, working, found.offloaded)


@dataclass(frozen=True)
class BucketSizes:
    """What one bucket of a unit's gradient takes in a slot of the ring: see [Note: buffers of a ring]."""

    dtype: torch.dtype  # which ring
    packed_bytes: int  # bytes of the buffer that it is packed into; none where it is reduced as it lies
    shard_buffer_bytes: int  # bytes of the buffer for this rank's part of it, where that is reduced aside
    needs_reduce_buffer: bool  # it is, since it leaves the device; else only where it is added to what is there


@dataclass(frozen=True)
class UnitSizes:
    """What one unit takes and moves on one rank."""

    name: str
    full_bytes: int  # bytes of its full parameters
    alloc_bytes: int  # bytes of memory that they take while they are gathered
    grad_bytes: int  # bytes of what autograd makes for it
    reduce_bytes: int  # bytes that its reduction is given, in the dtype of the reduction
    trained_numel: int  # elements of this rank's shard that are updated
    offloaded_numel: dict[str, int]  # elements of these whose optimizer states rest outside the device, by tier
    param_tier: str  # the tier that its shard rests in
    shard_bytes: int  # bytes of its shard
    offloaded_grad_bytes: int  # bytes of its gradient that leave the device
    in_place_grad_bytes: int  # bytes of its gradient that are reduced where autograd has made them
    side_stream_grad_bytes: int  # bytes of its gradient that are read by the lane: see [Note: packing at once]
    device_grad_numels: tuple[tuple[torch.dtype, int], ...]  # elements of its gradients that the device keeps, by dtype
    buckets: tuple[BucketSizes, ...]  # in the order that they are reduced in
    cast_bytes: int = 0  # bytes that a gather reads and writes on the device, to cast its shard
    num_blocks: int = 1  # that it was made of: see [Note: small blocks]


@dataclass(frozen=True)
class StateSizes:
    """Everything that the library holds on one rank, from shapes alone."""

    units: list[UnitSizes]
    placement: Placement
    shard_count: int  # that the states are partitioned over
    states: dict[str, int]
    offloaded: dict[tuple[str, str], int]
    ring_slots: int  # of each ring of buckets that gradients travel through in backward
    ring_bytes: int  # bytes of all of them with all the buffers that they may have
    shard_buffer_bytes: int  # bytes of the buffers for what is reduced at the step, where gradients are whole
    step_buffer_bytes: int  # bytes of the buffer that the update takes
    staging_bytes: int  # bytes of host memory that far states travel through
    update_bytes_per_element: (
        int  # bytes that an update reads and writes for one element: states, gradient, parameter, their copies
    )
    optimizer_bytes_per_element: int  # bytes of one element's master and states


def state_sizes(
    model: nn.Module,
    config: Config,
    *,
    ranks: int,
    tensor: int = 1,
    optimizer_states: int = 2,
    on_gpu: bool = True,
    has_fused_adam: bool = False,
    unit_specs: list[UnitSpec] | None = None,
    replicas: int = 1,
) -> StateSizes:
    """Work out what :func:`zeroshard.shard` would hold on the first of ``ranks``; ``plans`` are its units, if known.

    Of such ranks, who share the states, there are ``replicas``.
    ``one_pass``: the optimizer is one that a GPU updates so, see [Note: one pass].
    """
    if tensor < 1 or ranks % tensor:
        raise ValueError(f"{ranks} ranks are not a multiple of the {tensor} that divide each layer: change one of them")
    data_ranks = ranks // tensor
    placement = Placement.from_stage(config.stage, data_ranks, config.offload, replicas, config.needs_cast_on_gather)
    parts = data_ranks if placement.optimizer else 1
    unit_specs = plan_units(model, config.units, config.bucket_size) if unit_specs is None else unit_specs
    named, precision, held = dict(model.named_parameters()), Precision(model, config), local_numels(model, tensor)
    flats = [
        _flat_specs([(n, named[n], held[n]) for n in plan.parameters], config, precision, parts) for plan in unit_specs
    ]
    every = [flat for unit in flats for flat in unit]
    rests, travel = _tier_placements(every, placement, config, optimizer_states, on_gpu)
    cast = config.needs_cast_on_gather and placement.parameters
    every = [
        replace(
            flat,
            shard_from_master=cast and flat.can_shard_from_master(rest),
            reduce_in_place=on_gpu and flat.can_reduce_in_place(rest),
        )
        for flat, rest in zip(every, rests, strict=True)
    ]
    numbered = iter(every)
    flats = [[next(numbered) for _ in unit] for unit in flats]
    states, far = _count_states(every, rests, placement, optimizer_states)
    rings = _ring_sizes([flat for flat in every if flat.is_trained])
    at_once = has_fused_adam and on_gpu and optimizer_states == len(STATES_OF_ADAM)
    copies = [flat for flat in every if flat.is_trained and flat.needs_grad_copy(at_once)]
    copied, itemsize = (
        sum(f.layout.shard_numel for f in copies),
        max((f.optimizer_dtype.itemsize for f in copies), default=0),
    )
    rooms, resting = iter(round_to_shared_sizes([flat.nbytes for flat in every])), iter(rests)
    packs = config.offload is None and replicas == 1
    units = [
        _unit_sizes(plan, unit, [next(rooms) for _ in unit], [next(resting) for _ in unit], rings, placement, packs)
        for plan, unit in zip(unit_specs, flats, strict=True)
    ]
    return StateSizes(
        units,
        placement,
        parts,
        states,
        far,
        ring_slots=config.ring,
        ring_bytes=config.ring * sum(ring.slot_bytes for ring in rings.values()),
        shard_buffer_bytes=config.ring * sum(ring.max_shard_bytes for ring in rings.values()) if parts > 1 else 0,
        step_buffer_bytes=min(copied, max_slice_numel(config.bucket_size)) * itemsize,
        staging_bytes=travel,
        update_bytes_per_element=max(
            (flat.update_bytes_per_element(optimizer_states, at_once) for flat in every if flat.is_trained), default=0
        ),
        optimizer_bytes_per_element=max(
            ((1 + optimizer_states) * flat.optimizer_dtype.itemsize for flat in every if flat.is_trained), default=0
        ),
    )


@dataclass(frozen=True)
class _FlatSpec:
    """What decides the bytes of one flat."""

    layout: FlatLayout
    compute_dtype: torch.dtype  # in computation
    reduce_dtype: torch.dtype  # of its gradient
    optimizer_dtype: torch.dtype  # that the optimizer sees
    is_trained: bool
    shard_from_master: bool = False  # keeps its master alone: see [Note: cast on gather]
    reduce_in_place: bool = False  # its large gradients are reduced as they lie: see [Note: what needs no packing]

    @property
    def nbytes(self) -> int:
        """Of its full parameters."""
        return self.layout.numel * self.compute_dtype.itemsize

    @cached_property
    def buckets(self) -> list[tuple[Range, ParamRange | None]]:
        """Each with the part of a parameter that is reduced as it lies."""
        return [
            (bucket, self.layout.single_param(bucket) if self.reduce_in_place else None)
            for bucket in self.layout.buckets
        ]

    def flat_sizes(self, optimizer_states: int) -> FlatSizes:
        """The same, as ``tier_placement.py`` wants it."""
        homes = tuple(self.layout.shard_range(bucket) for bucket in self.layout.buckets)
        state_bytes = (1 + optimizer_states) * self.optimizer_dtype.itemsize
        return FlatSizes(homes, self.is_trained, self.compute_dtype.itemsize, self.reduce_dtype.itemsize, state_bytes)

    def can_shard_from_master(self, tier_placement: TierPlacement) -> bool:
        """Whether it could do with its master alone, were it partitioned."""
        return (
            self.is_trained
            and self.optimizer_dtype != self.compute_dtype
            and tier_placement.parameters == "device"
            and not tier_placement.has_offloaded_optimizer
        )

    def can_reduce_in_place(self, tier_placement: TierPlacement) -> bool:
        """Whether a GPU could reduce its gradients as autograd makes them."""
        return self.is_trained and self.compute_dtype == self.reduce_dtype and tier_placement.gradients == "device"

    @property
    def can_pack_on_compute_stream(self) -> bool:
        """Whether its gradients make one bucket: see [Note: packing at once]."""
        return len(self.layout.buckets) == 1 and self.layout.single_param(self.layout.buckets[0]) is None

    def needs_grad_copy(self, has_fused_adam: bool) -> bool:
        """Whether an update takes a copy of the gradient in the master's dtype."""
        if has_fused_adam and self.optimizer_dtype == torch.float32 and self.reduce_dtype in SUPPORTED_DTYPES:
            return False
        return not self.compute_dtype == self.reduce_dtype == self.optimizer_dtype

    def update_bytes_per_element(self, optimizer_states: int, has_fused_adam: bool) -> int:
        """Read and written for one element in an update: states and master twice, gradient and parameter once.

        With a copy of the gradient, that is written and read, and the master read once more for the parameter.
        """
        parameter = (
            0 if self.compute_dtype == self.optimizer_dtype or self.shard_from_master else self.compute_dtype.itemsize
        )
        moved = 2 * (1 + optimizer_states) * self.optimizer_dtype.itemsize + self.reduce_dtype.itemsize + parameter
        if self.needs_grad_copy(has_fused_adam):
            moved += (2 + bool(parameter)) * self.optimizer_dtype.itemsize
        return moved


def _flat_specs(
    parameters: list[tuple[str, nn.Parameter, int]], config: Config, precision: Precision, shard_count: int
) -> list[_FlatSpec]:
    """The flats of a unit, of its parameters with their names and the elements this rank has of them."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for name, parameter, numel in parameters:
        kinds.setdefault((precision.compute_dtype(name, parameter), parameter.requires_grad), []).append(numel)
    flats = []
    for (dtype, trained), numels in kinds.items():
        updated = torch.float32 if precision.has_master(dtype) else dtype
        layout = FlatLayout.build(numels, config.bucket_size, shard_count)
        flats.append(_FlatSpec(layout, dtype, precision.reduce_dtype(dtype), updated, trained))
    return flats


@dataclass(frozen=True)
class _RingSizes:
    """The lengths of a slot's buffers, in elements."""

    dtype: torch.dtype
    packed_numels: list[int]
    shard_numels: list[int]
    max_packed_numels: list[int]  # of those for packed buckets, where none is reduced as it lies

    @property
    def slot_bytes(self) -> int:
        """Of one slot with all the buffers that it may have."""
        return self.dtype.itemsize * sum(self.max_packed_numels + self.shard_numels)

    @property
    def max_shard_bytes(self) -> int:
        """Bytes of a rank's part of the longest bucket."""
        return self.dtype.itemsize * max(self.shard_numels, default=0)

    def bucket_sizes(self, numel: int, shard_numel: int, in_place: bool, needs_reduce_buffer: bool) -> BucketSizes:
        """What a bucket of so many elements takes."""
        packed = 0 if in_place else min(length for length in self.packed_numels if length >= numel)
        reduced = min(length for length in self.shard_numels if length >= shard_numel)
        return BucketSizes(self.dtype, packed * self.dtype.itemsize, reduced * self.dtype.itemsize, needs_reduce_buffer)


def _ring_sizes(flats: list[_FlatSpec]) -> dict[torch.dtype, _RingSizes]:
    """The ring of each dtype that gradients are reduced in."""
    rings = {}
    for dtype in {flat.reduce_dtype: None for flat in flats}:
        alike = [flat for flat in flats if flat.reduce_dtype == dtype]
        packed = [bucket.numel for flat in alike for bucket, lying in flat.buckets if lying is None]
        parts = [bucket.numel // flat.layout.shard_count for flat in alike for bucket, _ in flat.buckets]
        every = [bucket.numel for flat in alike for bucket, _ in flat.buckets]
        rings[dtype] = _RingSizes(dtype, *(buffer_lengths(numels) for numels in (packed, parts, every)))
    return rings


def _unit_sizes(
    spec: UnitSpec,
    flats: list[_FlatSpec],
    alloc_bytes: list[int],
    tier_placements: list[TierPlacement],
    rings: dict[torch.dtype, _RingSizes],
    placement: Placement,
    can_pack_on_compute_stream: bool,
) -> UnitSizes:
    trained = [(flat, rest) for flat, rest in zip(flats, tier_placements, strict=True) if flat.is_trained]
    far: dict[str, int] = {}
    for _, rest in trained:
        for span, tier in rest.optimizer:
            if tier != "device":
                far[tier] = far.get(tier, 0) + span.numel
    tiers = [rest.parameters for rest in tier_placements if rest.parameters != "device"]
    return UnitSizes(
        spec.name,
        full_bytes=sum(flat.nbytes for flat in flats),
        alloc_bytes=sum(alloc_bytes),
        grad_bytes=sum(sum(flat.layout.numels) * flat.compute_dtype.itemsize for flat, _ in trained),
        reduce_bytes=sum(flat.layout.numel * flat.reduce_dtype.itemsize for flat, _ in trained),
        trained_numel=sum(flat.layout.shard_numel for flat, _ in trained),
        offloaded_numel=far,
        param_tier=tiers[0] if tiers else "device",
        shard_bytes=sum(flat.layout.shard_numel * flat.compute_dtype.itemsize for flat in flats),
        offloaded_grad_bytes=sum(
            f.layout.shard_numel * f.reduce_dtype.itemsize
            for f, rest in trained
            if rest.has_offloaded_optimizer or rest.gradients != "device"
        ),
        in_place_grad_bytes=sum(
            lying.elements.numel * flat.compute_dtype.itemsize
            for flat, _ in trained
            for _, lying in flat.buckets
            if lying is not None
        ),
        side_stream_grad_bytes=sum(
            sum(f.layout.numels) * f.compute_dtype.itemsize
            for f, _ in trained
            if not (can_pack_on_compute_stream and f.can_pack_on_compute_stream)
        ),
        device_grad_numels=tuple(
            (flat.reduce_dtype, flat.layout.shard_numel if placement.gradients else flat.layout.numel)
            for flat, rest in trained
            if rest.gradients == "device"
        ),
        buckets=tuple(
            rings[flat.reduce_dtype].bucket_sizes(
                bucket.numel,
                bucket.numel // flat.layout.shard_count,
                in_place=lying is not None,
                needs_reduce_buffer=rest.gradients != "device" and flat.layout.shard_count > 1,
            )
            for flat, rest in trained
            for bucket, lying in flat.buckets
        ),
        cast_bytes=sum(
            f.layout.shard_numel * (f.optimizer_dtype.itemsize + f.compute_dtype.itemsize)
            for f in flats
            if f.shard_from_master
        ),
        num_blocks=spec.block_count if spec.is_block else 1,
    )


def _tier_placements(
    flats: list[_FlatSpec], placement: Placement, config: Config, optimizer_states: int, on_gpu: bool
) -> tuple[list[TierPlacement], int]:
    """Where each flat's states rest, and the bytes of host memory they travel through."""
    if config.offload is None:
        return [TierPlacement(optimizer=[(Range(0, flat.layout.shard_numel), "device")]) for flat in flats], 0
    bodies = [flat.flat_sizes(optimizer_states) for flat in flats]
    travel = staging_bytes(config.offload, bodies, on_gpu)
    return assign_tiers(bodies, config.offload, placement.gradients, travel)[0], travel


def _count_states(
    flats: list[_FlatSpec], tier_placements: list[TierPlacement], placement: Placement, optimizer_states: int
) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Bytes of states on the device, and outside it by (kind of state, tier)."""
    counted: dict[tuple[str, str], int] = dict.fromkeys(((kind, "device") for kind in MODEL_STATE_KINDS), 0)

    def count(kind: str, tier: str, numel: int, dtype: torch.dtype) -> None:
        counted[kind, tier] = counted.get((kind, tier), 0) + numel * dtype.itemsize

    for flat, rest in zip(flats, tier_placements, strict=True):
        layout = flat.layout
        numel = 0 if flat.shard_from_master else layout.shard_numel if placement.parameters else layout.numel
        count("parameters", rest.parameters, numel, flat.compute_dtype)
        if not flat.is_trained:
            continue
        count(
            "gradients", rest.gradients, layout.shard_numel if placement.gradients else layout.numel, flat.reduce_dtype
        )
        for span, tier in rest.optimizer:
            apart = flat.optimizer_dtype != flat.compute_dtype or tier != "device" or rest.parameters != "device"
            count("master weights", tier, span.numel if apart else 0, flat.optimizer_dtype)
            count("optimizer states", tier, optimizer_states * span.numel, flat.optimizer_dtype)
    near = {kind: nbytes for (kind, tier), nbytes in counted.items() if tier == "device"}
    return near, {key: nbytes for key, nbytes in counted.items() if key[1] != "device" and nbytes}
