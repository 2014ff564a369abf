"""ShardPlan: how a model's states are divided into flats and placed in tiers, decided as data before anything is built.

``engine/build.py`` allocates what the plan says, and the planner prices the same object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from zeroshard.config.config import Config
from zeroshard.sharding.layout import FlatLayout, ParamRange, Range, round_to_shared_sizes
from zeroshard.sharding.placement import Placement
from zeroshard.sharding.precision import Precision
from zeroshard.sharding.tier_placement import (
    MAX_CHUNK_ELEMENTS,
    FlatSizes,
    TierPlacement,
    assign_tiers,
    split_chunks,
    staging_bytes,
)
from zeroshard.sharding.units import UnitSpec


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, as the plan needs it."""

    numel: int  # on this rank of the tensor axis
    compute_dtype: torch.dtype
    requires_grad: bool
    is_optimized: bool  # an optimizer updates it
    optimizer: int = 0  # which one, of several; -1: none of them


@dataclass(frozen=True, eq=False)
class FlatSpec:
    """What one FlatParam will be: its parameters, its dtypes, and where its states are placed."""

    names: tuple[str, ...]
    layout: FlatLayout
    compute_dtype: torch.dtype  # of the parameters in forward and backward
    reduce_dtype: torch.dtype  # of the gradient in the reduction
    master_dtype: torch.dtype  # in which the optimizer updates it
    is_trainable: bool  # its parameters require a gradient
    is_optimized: bool  # an optimizer updates some of them
    tier_placement: TierPlacement = field(default_factory=TierPlacement)
    alloc_bytes: int = 0  # allocated for the full parameters: see ``round_to_shared_sizes``
    is_cast_from_master: bool = False  # keeps only its master: see [Note: all-gathering from master weights]
    unit: str = ""  # name of its unit
    inner_count: int = 1  # ranks of the inner axis, if gathers and reductions take two hops: [Note: two hops]
    keeps_inner_shard: bool = False  # parameters are partitioned over the inner axis: [Note: inner shards]

    @cached_property
    def shard_ranges(self) -> tuple[Range, ...]:
        """The range of each bucket's shard in this rank's shard."""
        return tuple(self.layout.shard_range(bucket) for bucket in self.layout.buckets)

    @property
    def param_numel(self) -> int:
        """Elements that a rank keeps of partitioned parameters between their uses, in the compute dtype."""
        if self.keeps_inner_shard:
            return self.layout.numel // self.inner_count
        return 0 if self.is_cast_from_master else self.layout.shard_numel

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters."""
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def has_offloaded_params(self) -> bool:
        """Whether this rank's parameter shard is offloaded."""
        return self.tier_placement.parameters != "device"

    @property
    def has_offloaded_grads(self) -> bool:
        """Whether the reduced gradient is offloaded."""
        return self.tier_placement.gradients != "device"

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates master weights: in a higher precision, or in another tier."""
        is_separate = self.tier_placement.has_offloaded_optimizer or self.has_offloaded_params
        return self.is_optimized and (self.master_dtype != self.compute_dtype or is_separate)

    def master_ranges(self) -> Iterator[tuple[Range, str]]:
        """Yield the ranges of the shard, with their tiers, whose master weights have memory of their own.

        Offloaded ones are split into state chunks. A master on the device is the parameter shard itself if both have
        the same dtype and that is on the device too.
        """
        has_device_memory = self.master_dtype != self.compute_dtype or self.has_offloaded_params
        for span, tier in self.tier_placement.optimizer if self.has_master else ():
            if tier != "device":
                for chunk in split_chunks(span, self.shard_ranges, MAX_CHUNK_ELEMENTS[tier]):
                    yield chunk, tier
            elif has_device_memory:
                yield span, tier

    @property
    def can_reduce_in_place(self) -> bool:
        """Whether buckets inside one parameter may be reduced in place: [Note: reducing large gradients in place]."""
        overwrites_input = self.inner_count > 1
        return self.compute_dtype == self.reduce_dtype and not self.has_offloaded_grads and not overwrites_input

    @cached_property
    def single_param_buckets(self) -> tuple[ParamRange | None, ...]:
        """For each bucket inside one parameter, its range in that; else None."""
        return tuple(self.layout.single_param(bucket) for bucket in self.layout.buckets)

    @cached_property
    def has_single_param_buckets(self) -> bool:
        """Whether some bucket is inside one parameter."""
        return any(param_range is not None for param_range in self.single_param_buckets)

    @cached_property
    def fits_one_packed_bucket(self) -> bool:
        """Whether the gradients are packed into a single bucket: see [Note: packing on the compute stream]."""
        return len(self.layout.buckets) == 1 and not self.has_single_param_buckets

    @property
    def sizes(self) -> FlatSizes:
        """The element sizes that decide about tiers, without optimizer states."""
        param_bytes, grad_bytes = self.compute_dtype.itemsize, self.reduce_dtype.itemsize
        return FlatSizes(self.shard_ranges, self.is_optimized, param_bytes, grad_bytes, self.master_dtype.itemsize)


@dataclass(frozen=True)
class ShardPlan:
    """The flats of each unit, in the order of the units."""

    units: list[UnitSpec]
    flats_by_unit: list[list[FlatSpec]]
    staging_bytes: int = 0  # of host memory that stages offloaded states
    spare_host_bytes: int | None = None  # below the host limit, not needed by any state; None: no limit

    @property
    def flats(self) -> list[FlatSpec]:
        """All flats."""
        return [flat for flats in self.flats_by_unit for flat in flats]


def plan_shards(
    units: list[UnitSpec],
    params: Mapping[str, ParamSpec],
    *,
    config: Config,
    precision: Precision,
    placement: Placement,
    shard_count: int,
    state_bytes_per_element: int,
    on_gpu: bool,
    inner_count: int = 1,
) -> ShardPlan:
    """Decide the flats of a model, their layout, and the tiers of their states.

    ``state_bytes_per_element``: bytes of an fp32 element's optimizer states, without its master. ``inner_count``: ranks
    of the inner axis, if ``shard_count`` is a product ([Note: two hops]).

    >>> from torch import nn
    >>> from zeroshard.sharding.units import plan_units
    >>> model, config = nn.Linear(4, 4), Config(stage=3, precision="bf16")
    >>> params = {name: ParamSpec(p.numel(), torch.bfloat16, True, True) for name, p in model.named_parameters()}
    >>> plan = plan_shards(plan_units(model, None, config.bucket_size), params, config=config,
    ...     precision=Precision(model, config), placement=Placement.from_stage(3, ranks=2), shard_count=2,
    ...     state_bytes_per_element=8, on_gpu=False)
    >>> (flat,) = plan.flats
    >>> flat.names, flat.master_dtype, flat.is_cast_from_master
    (('weight', 'bias'), torch.float32, True)
    """
    flats = [flat for unit in units for flat in _group_flats(unit, params, config, precision, shard_count)]
    counts = [len(set(_flat_keys(unit, params))) for unit in units]
    plan = ShardPlan(units, [])
    if config.offload is None:
        tiers = [TierPlacement(optimizer=[(Range(0, flat.layout.shard_numel), "device")]) for flat in flats]
    else:
        sizes = [
            replace(
                flat.sizes,
                state_bytes_per_element=flat.master_dtype.itemsize
                + state_bytes_per_element * flat.master_dtype.itemsize // 4,
            )
            for flat in flats
        ]
        staging = staging_bytes(config.offload, sizes, on_gpu)
        tiers, spare = assign_tiers(sizes, config.offload, placement.gradients, staging)
        plan = replace(plan, staging_bytes=staging, spare_host_bytes=spare)
    alloc_bytes = round_to_shared_sizes([flat.full_bytes for flat in flats])
    can_cast = config.needs_cast_on_gather and placement.parameters and not placement.keeps_inner_shards
    placed = iter(
        [
            replace(
                flat,
                tier_placement=tier,
                alloc_bytes=nbytes,
                is_cast_from_master=can_cast and _can_cast_from_master(flat, tier),
                inner_count=inner_count,
                keeps_inner_shard=placement.keeps_inner_shards,
            )
            for flat, tier, nbytes in zip(flats, tiers, alloc_bytes, strict=True)
        ]
    )
    return replace(plan, flats_by_unit=[[next(placed) for _ in range(count)] for count in counts])


def _can_cast_from_master(flat: FlatSpec, tier_placement: TierPlacement) -> bool:
    is_on_device = tier_placement.parameters == "device" and not tier_placement.has_offloaded_optimizer
    return flat.is_optimized and flat.master_dtype != flat.compute_dtype and is_on_device


def _flat_keys(unit: UnitSpec, params: Mapping[str, ParamSpec]) -> list[tuple[torch.dtype, bool, int]]:
    """Return, for each parameter of a unit, what the parameters of one flat have in common.

    Several optimizers have separate flats: each updates, clips, offloads and clears its own, at its own time.
    """
    specs = [params[name] for name in unit.parameters]
    return [(spec.compute_dtype, spec.requires_grad, spec.optimizer if spec.requires_grad else 0) for spec in specs]


def _group_flats(
    unit: UnitSpec, params: Mapping[str, ParamSpec], config: Config, precision: Precision, shard_count: int
) -> Iterator[FlatSpec]:
    """Yield the flats of a unit: one for each compute dtype and optimizer, for trainable and for frozen parameters."""
    groups: dict[tuple[torch.dtype, bool, int], list[str]] = {}
    for name, key in zip(unit.parameters, _flat_keys(unit, params), strict=True):
        groups.setdefault(key, []).append(name)
    for (dtype, is_trainable, _), names in groups.items():
        layout = FlatLayout.build([params[name].numel for name in names], config.bucket_size, shard_count)
        master_dtype = torch.float32 if precision.has_master(dtype) else dtype
        is_optimized = is_trainable and any(params[name].is_optimized for name in names)
        reduce_dtype = precision.reduce_dtype(dtype)
        yield FlatSpec(
            tuple(names), layout, dtype, reduce_dtype, master_dtype, is_trainable, is_optimized, unit=unit.name
        )
