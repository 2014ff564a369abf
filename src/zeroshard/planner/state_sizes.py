"""Compute the bytes of a model's states on each rank from its shapes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zeroshard.config.config import Config
from zeroshard.memory import MODEL_STATE_KINDS, buffer_lengths, staging_bytes
from zeroshard.optim import ADAM_STATE_KEYS as STATES_OF_ADAM
from zeroshard.optim import SUPPORTED_DTYPES, max_slice_numel
from zeroshard.sharding import (
    FlatLayout,
    FlatSizes,
    ParamRange,
    Placement,
    Precision,
    Range,
    TierPlacement,
    UnitSpec,
    assign_tiers,
    plan_units,
    round_to_shared_sizes,
)
from zeroshard.tensor_parallel import local_numels


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on one rank by kind of state, as :func:`zeroshard.report` counts them; activations are not included."""

    states: dict[str, int]
    """On the device from the first step on: "parameters", "gradients" (from a backward to zero_grad(); see
    [Note: freeing gradients between steps]), "master weights", "optimizer states"."""
    transient: dict[str, int]
    """The peak of temporary memory in a step, by kind; "step" never overlaps with the others."""
    offloaded: dict[tuple[str, str], int] = field(default_factory=dict)
    """Offloaded from the first step on, by (kind of state, tier)."""

    @property
    def state_bytes(self) -> int:
        """Bytes of all states on the device."""
        return sum(self.states.values())

    @property
    def peak_bytes(self) -> int:
        """An upper bound of the memory usage in a step."""
        passes = sum(nbytes for kind, nbytes in self.transient.items() if kind != "step")
        return self.state_bytes + max(passes, self.transient["step"])


def predict_memory(
    model: nn.Module, *, ranks: int, tensor: int = 1, optimizer_states: int = 2, **options: Any
) -> PredictedMemory:
    """Predict the memory of each of ``ranks`` after :func:`zeroshard.shard` with ``options``.

    ``tensor`` is the tensor-parallel degree; if it does not divide a layer evenly, the result is for the first rank,
    which holds the most. The model may be on the meta device. ``optimizer_states`` is the number of values that the
    optimizer keeps per element: 2 for Adam, 1 for SGD with momentum. Every parameter that requires a gradient is
    assumed to be trained by one of torch's optimizers, which are stepped slice by slice: see
    :attr:`zeroshard.Config.bucket_size`.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(1024, 1024, bias=False)
    >>> predict_memory(model, ranks=4, stage=3, precision="bf16").states["optimizer states"] == 2 * 4 * 1024**2 // 4
    True
    """
    sizes = state_sizes(model, Config(**options), ranks=ranks, tensor=tensor, optimizer_states=optimizer_states)
    transient = {
        "gathered": 2 * max((unit.full_bytes for unit in sizes.units), default=0) if sizes.placement.parameters else 0,
        "autograd": 2 * max((unit.grad_bytes for unit in sizes.units), default=0),
        "buckets": sizes.ring_bytes if sizes.placement.gradients else sizes.shard_buffer_bytes,
        "step": sizes.step_buffer_bytes,
    }
    return PredictedMemory(sizes.states, transient, sizes.offloaded)


@dataclass(frozen=True)
class BucketSizes:
    """Memory of one gradient bucket in a slot of the ring: see [Note: bucket ring]."""

    dtype: torch.dtype  # selects the ring
    packed_bytes: int  # bytes of the buffer it is packed into; 0 if it is reduced in place
    shard_buffer_bytes: int  # bytes of the buffer for this rank's shard, if reduced into one
    needs_reduce_buffer: bool  # always, because it is offloaded; else only when accumulating


@dataclass(frozen=True)
class UnitSizes:
    """Memory and traffic of one unit on one rank."""

    name: str
    full_bytes: int  # bytes of its full parameters
    alloc_bytes: int  # bytes allocated for them while unsharded
    grad_bytes: int  # bytes of its gradients from autograd
    reduce_bytes: int  # bytes of its reduction's input, in the reduce dtype
    trained_numel: int  # trainable elements of this rank's shard
    offloaded_numel: dict[str, int]  # of these, elements with offloaded optimizer states, by tier
    param_tier: str  # the tier of its parameter shard
    shard_bytes: int  # bytes of its shard
    offloaded_grad_bytes: int  # bytes of its gradient that are offloaded
    in_place_grad_bytes: int  # bytes of its gradient that are reduced in place
    side_stream_grad_bytes: int  # bytes of it read on the side stream: see [Note: packing on the compute stream]
    device_grad_numels: tuple[tuple[torch.dtype, int], ...]  # elements of its gradients on the device, by dtype
    buckets: tuple[BucketSizes, ...]  # in reduce order
    cast_bytes: int = 0  # bytes read and written on the device to cast its shard before an all-gather
    num_blocks: int = 1  # blocks in this unit: see [Note: small blocks]


@dataclass(frozen=True)
class StateSizes:
    """All memory that the library holds on one rank, computed from shapes."""

    units: list[UnitSizes]
    placement: Placement
    shard_count: int  # ranks that the states are sharded over
    states: dict[str, int]
    offloaded: dict[tuple[str, str], int]
    ring_slots: int  # slots of each bucket ring that backward uses
    ring_bytes: int  # bytes of all rings with all buffers they can have
    shard_buffer_bytes: int  # bytes of the buffers for reductions at the step, if gradients are unsharded
    step_buffer_bytes: int  # bytes of the buffer that the update allocates
    staging_bytes: int  # bytes of host memory that stages offloaded states
    update_bytes_per_element: int  # read and written by an update: states, gradient, parameter, their copies
    optimizer_bytes_per_element: int  # bytes of an element's master weight and optimizer states


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
    """Compute the memory that :func:`zeroshard.shard` would hold on the first of ``ranks``.

    ``unit_specs`` are the model's units, if known. There are ``replicas`` groups of ``ranks``; the ranks of a group
    share the states. ``has_fused_adam``: the optimizer is an Adam that a GPU updates in one pass, see [Note: fused Adam
    in one pass].
    """
    if tensor < 1 or ranks % tensor:
        raise ValueError(f"{ranks} ranks are not a multiple of the {tensor} that divide each layer: change one of them")
    data_ranks = ranks // tensor
    placement = Placement.from_stage(config.stage, data_ranks, config.offload, replicas, config.needs_cast_on_gather)
    shard_count = data_ranks if placement.optimizer else 1
    unit_specs = plan_units(model, config.units, config.bucket_size) if unit_specs is None else unit_specs
    parameters, precision, numels = (
        dict(model.named_parameters()),
        Precision(model, config),
        local_numels(model, tensor),
    )
    flats = [
        _flat_specs(
            [(name, parameters[name], numels[name]) for name in spec.parameters], config, precision, shard_count
        )
        for spec in unit_specs
    ]
    all_flats = [flat for unit in flats for flat in unit]
    tier_placements, staging = _tier_placements(all_flats, placement, config, optimizer_states, on_gpu)
    shards_from_master = config.needs_cast_on_gather and placement.parameters
    all_flats = [
        replace(
            flat,
            shard_from_master=shards_from_master and flat.can_shard_from_master(tier_placement),
            reduce_in_place=on_gpu and flat.can_reduce_in_place(tier_placement),
        )
        for flat, tier_placement in zip(all_flats, tier_placements, strict=True)
    ]
    flat_iter = iter(all_flats)
    flats = [[next(flat_iter) for _ in unit] for unit in flats]
    states, offloaded = _count_states(all_flats, tier_placements, placement, optimizer_states)
    rings = _ring_sizes([flat for flat in all_flats if flat.is_trained])
    uses_fused_adam = has_fused_adam and on_gpu and optimizer_states == len(STATES_OF_ADAM)
    copied_flats = [flat for flat in all_flats if flat.is_trained and flat.needs_grad_copy(uses_fused_adam)]
    copied_numel, itemsize = (
        sum(f.layout.shard_numel for f in copied_flats),
        max((f.optimizer_dtype.itemsize for f in copied_flats), default=0),
    )
    alloc_iter, tier_iter = iter(round_to_shared_sizes([flat.nbytes for flat in all_flats])), iter(tier_placements)
    can_pack = config.offload is None and replicas == 1
    units = [
        _unit_sizes(
            spec, unit, [next(alloc_iter) for _ in unit], [next(tier_iter) for _ in unit], rings, placement, can_pack
        )
        for spec, unit in zip(unit_specs, flats, strict=True)
    ]
    return StateSizes(
        units,
        placement,
        shard_count,
        states,
        offloaded,
        ring_slots=config.ring,
        ring_bytes=config.ring * sum(ring.slot_bytes for ring in rings.values()),
        shard_buffer_bytes=config.ring * sum(ring.max_shard_bytes for ring in rings.values()) if shard_count > 1 else 0,
        step_buffer_bytes=min(copied_numel, max_slice_numel(config.bucket_size)) * itemsize,
        staging_bytes=staging,
        update_bytes_per_element=max(
            (flat.update_bytes_per_element(optimizer_states, uses_fused_adam) for flat in all_flats if flat.is_trained),
            default=0,
        ),
        optimizer_bytes_per_element=max(
            ((1 + optimizer_states) * flat.optimizer_dtype.itemsize for flat in all_flats if flat.is_trained), default=0
        ),
    )


@dataclass(frozen=True)
class _FlatSpec:
    """The properties of one FlatParam that determine its bytes."""

    layout: FlatLayout
    compute_dtype: torch.dtype  # of its parameters in forward and backward
    reduce_dtype: torch.dtype  # of its gradient in the reduction
    optimizer_dtype: torch.dtype  # of its master weights and optimizer states
    is_trained: bool
    shard_from_master: bool = False  # keeps only its master weights: see [Note: all-gathering from master weights]
    reduce_in_place: bool = False  # reduces large gradients in place: see [Note: reducing large gradients in place]

    @property
    def nbytes(self) -> int:
        """Bytes of its full parameters."""
        return self.layout.numel * self.compute_dtype.itemsize

    @cached_property
    def buckets(self) -> list[tuple[Range, ParamRange | None]]:
        """Each bucket with the parameter range that is reduced in place, or None."""
        return [
            (bucket, self.layout.single_param(bucket) if self.reduce_in_place else None)
            for bucket in self.layout.buckets
        ]

    def flat_sizes(self, optimizer_states: int) -> FlatSizes:
        """Return the sizes that ``tier_placement.py`` needs."""
        shard_ranges = tuple(self.layout.shard_range(bucket) for bucket in self.layout.buckets)
        state_bytes = (1 + optimizer_states) * self.optimizer_dtype.itemsize
        return FlatSizes(
            shard_ranges, self.is_trained, self.compute_dtype.itemsize, self.reduce_dtype.itemsize, state_bytes
        )

    def can_shard_from_master(self, tier_placement: TierPlacement) -> bool:
        """Return whether it can keep only its master weights if its parameters are partitioned."""
        return (
            self.is_trained
            and self.optimizer_dtype != self.compute_dtype
            and tier_placement.parameters == "device"
            and not tier_placement.has_offloaded_optimizer
        )

    def can_reduce_in_place(self, tier_placement: TierPlacement) -> bool:
        """Return whether a GPU can reduce its gradients in place."""
        return self.is_trained and self.compute_dtype == self.reduce_dtype and tier_placement.gradients == "device"

    @property
    def can_pack_on_compute_stream(self) -> bool:
        """Whether its gradients are packed into a single bucket: see [Note: packing on the compute stream]."""
        return len(self.layout.buckets) == 1 and self.layout.single_param(self.layout.buckets[0]) is None

    def needs_grad_copy(self, has_fused_adam: bool) -> bool:
        """Return whether an update needs a copy of the gradient in the master dtype."""
        if has_fused_adam and self.optimizer_dtype == torch.float32 and self.reduce_dtype in SUPPORTED_DTYPES:
            return False
        return not self.compute_dtype == self.reduce_dtype == self.optimizer_dtype

    def update_bytes_per_element(self, optimizer_states: int, has_fused_adam: bool) -> int:
        """Return the bytes read and written to update one element.

        Master weight and optimizer states count twice, gradient and parameter once. A gradient copy is written and
        read, and then the master weight is read once more to write the parameter.
        """
        param_bytes = (
            0 if self.compute_dtype == self.optimizer_dtype or self.shard_from_master else self.compute_dtype.itemsize
        )
        nbytes = 2 * (1 + optimizer_states) * self.optimizer_dtype.itemsize + self.reduce_dtype.itemsize + param_bytes
        if self.needs_grad_copy(has_fused_adam):
            nbytes += (2 + bool(param_bytes)) * self.optimizer_dtype.itemsize
        return nbytes


def _flat_specs(
    parameters: list[tuple[str, nn.Parameter, int]], config: Config, precision: Precision, shard_count: int
) -> list[_FlatSpec]:
    """Return the FlatParams of a unit from its parameters: (name, parameter, elements on this rank)."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for name, parameter, numel in parameters:
        groups.setdefault((precision.compute_dtype(name, parameter), parameter.requires_grad), []).append(numel)
    flats = []
    for (compute_dtype, is_trained), numels in groups.items():
        optimizer_dtype = torch.float32 if precision.has_master(compute_dtype) else compute_dtype
        layout = FlatLayout.build(numels, config.bucket_size, shard_count)
        flats.append(
            _FlatSpec(layout, compute_dtype, precision.reduce_dtype(compute_dtype), optimizer_dtype, is_trained)
        )
    return flats


@dataclass(frozen=True)
class _RingSizes:
    """The lengths of a ring slot's buffers, in elements."""

    dtype: torch.dtype
    packed_numels: list[int]
    shard_numels: list[int]
    max_packed_numels: list[int]  # lengths for packed buckets if none is reduced in place

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot with all buffers it can have."""
        return self.dtype.itemsize * sum(self.max_packed_numels + self.shard_numels)

    @property
    def max_shard_bytes(self) -> int:
        """Bytes of a rank's shard of the longest bucket."""
        return self.dtype.itemsize * max(self.shard_numels, default=0)

    def bucket_sizes(self, numel: int, shard_numel: int, in_place: bool, needs_reduce_buffer: bool) -> BucketSizes:
        """Return the memory of a bucket of ``numel`` elements."""
        packed = 0 if in_place else min(length for length in self.packed_numels if length >= numel)
        shard = min(length for length in self.shard_numels if length >= shard_numel)
        return BucketSizes(self.dtype, packed * self.dtype.itemsize, shard * self.dtype.itemsize, needs_reduce_buffer)


def _ring_sizes(flats: list[_FlatSpec]) -> dict[torch.dtype, _RingSizes]:
    """Return the ring sizes for each reduce dtype."""
    rings = {}
    for dtype in {flat.reduce_dtype: None for flat in flats}:
        same_dtype = [flat for flat in flats if flat.reduce_dtype == dtype]
        packed = [bucket.numel for flat in same_dtype for bucket, in_place in flat.buckets if in_place is None]
        shards = [bucket.numel // flat.layout.shard_count for flat in same_dtype for bucket, _ in flat.buckets]
        all_buckets = [bucket.numel for flat in same_dtype for bucket, _ in flat.buckets]
        rings[dtype] = _RingSizes(dtype, *(buffer_lengths(numels) for numels in (packed, shards, all_buckets)))
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
    trained = [
        (flat, tier_placement) for flat, tier_placement in zip(flats, tier_placements, strict=True) if flat.is_trained
    ]
    offloaded: dict[str, int] = {}
    for _, tier_placement in trained:
        for range_, tier in tier_placement.optimizer:
            if tier != "device":
                offloaded[tier] = offloaded.get(tier, 0) + range_.numel
    tiers = [tier_placement.parameters for tier_placement in tier_placements if tier_placement.parameters != "device"]
    return UnitSizes(
        spec.name,
        full_bytes=sum(flat.nbytes for flat in flats),
        alloc_bytes=sum(alloc_bytes),
        grad_bytes=sum(sum(flat.layout.numels) * flat.compute_dtype.itemsize for flat, _ in trained),
        reduce_bytes=sum(flat.layout.numel * flat.reduce_dtype.itemsize for flat, _ in trained),
        trained_numel=sum(flat.layout.shard_numel for flat, _ in trained),
        offloaded_numel=offloaded,
        param_tier=tiers[0] if tiers else "device",
        shard_bytes=sum(flat.layout.shard_numel * flat.compute_dtype.itemsize for flat in flats),
        offloaded_grad_bytes=sum(
            f.layout.shard_numel * f.reduce_dtype.itemsize
            for f, tier_placement in trained
            if tier_placement.has_offloaded_optimizer or tier_placement.gradients != "device"
        ),
        in_place_grad_bytes=sum(
            in_place.elements.numel * flat.compute_dtype.itemsize
            for flat, _ in trained
            for _, in_place in flat.buckets
            if in_place is not None
        ),
        side_stream_grad_bytes=sum(
            sum(f.layout.numels) * f.compute_dtype.itemsize
            for f, _ in trained
            if not (can_pack_on_compute_stream and f.can_pack_on_compute_stream)
        ),
        device_grad_numels=tuple(
            (flat.reduce_dtype, flat.layout.shard_numel if placement.gradients else flat.layout.numel)
            for flat, tier_placement in trained
            if tier_placement.gradients == "device"
        ),
        buckets=tuple(
            rings[flat.reduce_dtype].bucket_sizes(
                bucket.numel,
                bucket.numel // flat.layout.shard_count,
                in_place=in_place is not None,
                needs_reduce_buffer=tier_placement.gradients != "device" and flat.layout.shard_count > 1,
            )
            for flat, tier_placement in trained
            for bucket, in_place in flat.buckets
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
    """Return the tiers of each FlatParam's states, and the bytes of host memory for staging."""
    if config.offload is None:
        return [TierPlacement(optimizer=[(Range(0, flat.layout.shard_numel), "device")]) for flat in flats], 0
    flat_sizes = [flat.flat_sizes(optimizer_states) for flat in flats]
    staging = staging_bytes(config.offload, flat_sizes, on_gpu)
    return assign_tiers(flat_sizes, config.offload, placement.gradients, staging)[0], staging


def _count_states(
    flats: list[_FlatSpec], tier_placements: list[TierPlacement], placement: Placement, optimizer_states: int
) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Return the bytes of states on the device, and of offloaded states by (kind of state, tier)."""
    counted: dict[tuple[str, str], int] = dict.fromkeys(((kind, "device") for kind in MODEL_STATE_KINDS), 0)

    def count(kind: str, tier: str, numel: int, dtype: torch.dtype) -> None:
        counted[kind, tier] = counted.get((kind, tier), 0) + numel * dtype.itemsize

    for flat, tier_placement in zip(flats, tier_placements, strict=True):
        layout = flat.layout
        numel = 0 if flat.shard_from_master else layout.shard_numel if placement.parameters else layout.numel
        count("parameters", tier_placement.parameters, numel, flat.compute_dtype)
        if not flat.is_trained:
            continue
        count(
            "gradients",
            tier_placement.gradients,
            layout.shard_numel if placement.gradients else layout.numel,
            flat.reduce_dtype,
        )
        for range_, tier in tier_placement.optimizer:
            has_master = (
                flat.optimizer_dtype != flat.compute_dtype or tier != "device" or tier_placement.parameters != "device"
            )
            count("master weights", tier, range_.numel if has_master else 0, flat.optimizer_dtype)
            count("optimizer states", tier, optimizer_states * range_.numel, flat.optimizer_dtype)
    on_device = {kind: nbytes for (kind, tier), nbytes in counted.items() if tier == "device"}
    return on_device, {key: nbytes for key, nbytes in counted.items() if key[1] != "device" and nbytes}
