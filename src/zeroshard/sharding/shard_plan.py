"""ShardPlan: how a model's states are divided into flats and placed in tiers, decided as data before anything is built.

``engine/build.py`` allocates what the plan says, and the planner prices the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch

from zeroshard.comm import BLOCK_NUMEL, exchange_numel, payload_bytes
from zeroshard.config.config import Config
from zeroshard.sharding.float8_layers import Float8Layers, describe
from zeroshard.sharding.layout import FlatLayout, ParamRange, Range, round_to_shared_sizes, round_up
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

_QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that 8-bit collectives convert


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, as the plan needs it."""

    numel: int  # on this rank of the tensor axis
    compute_dtype: torch.dtype
    requires_grad: bool
    is_optimized: bool  # an optimizer updates it
    optimizer: int = 0  # which one, of several; -1: none of them
    is_float8_weight: bool = False  # only a float8 layer uses it


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
    is_gathered_in_float8: bool = False  # see [Note: gathering float8]
    keeps_inner_shard: bool = False  # parameters are partitioned over the inner axis: [Note: inner shards]
    keeps_inner_sum: bool = False  # gradients are, until the last backward of a step: [Note: inner sums]
    gather_dtype: str | None = None  # parameters are all-gathered in 8 bits: see [Note: 8-bit payloads]
    reduce_wire: str | None = None  # gradients are sent in 8 bits
    has_error_feedback: bool = False  # what 8 bits cannot express is added to the next gradient

    @cached_property
    def shard_ranges(self) -> tuple[Range, ...]:
        """The range of each bucket's shard in this rank's shard."""
        return tuple(self.layout.shard_range(bucket) for bucket in self.layout.buckets)

    @cached_property
    def inner_layout(self) -> FlatLayout:
        """The layout of what the ranks with one inner rank have together, as a shard of the inner axis."""
        return replace(self.layout, shard_count=self.inner_count)

    @property
    def inner_sum_bytes(self) -> int:
        """Bytes of the inner sum between the backwards of a step; 0 if there is none."""
        return self.inner_layout.shard_numel * self.reduce_dtype.itemsize if self.keeps_inner_sum else 0

    @property
    def param_numel(self) -> int:
        """Elements that a rank keeps of partitioned parameters between their uses, in the compute dtype."""
        if self.keeps_inner_shard and self.gather_dtype is None:
            return self.inner_layout.shard_numel
        return 0 if self.is_cast_from_master else self.layout.shard_numel

    @cached_property
    def gather_payloads(self) -> tuple[Range, ...]:
        """The range of each bucket in the buffer of an 8-bit all-gather, in bytes: a payload of each rank."""
        return self._payloads_of(self.layout.shard_count)

    @cached_property
    def inner_parts(self) -> tuple[Range, ...]:
        """The range of each bucket in the inner shard: elements, or payloads in bytes ([Note: inner shards])."""
        if self.gather_dtype is not None:
            return self._payloads_of(self.layout.shard_count // self.inner_count)
        return tuple(map(self.inner_layout.shard_range, self.layout.buckets))

    @property
    def inner_payload_bytes(self) -> int:
        """Bytes of an inner shard of payloads; 0 if there is none."""
        has_payloads = self.keeps_inner_shard and self.gather_dtype is not None and self.layout.buckets
        return self.inner_parts[-1].end if has_payloads else 0

    @property
    def gather_buffer_bytes(self) -> int:
        """Bytes of the buffer of an 8-bit all-gather; 0 if there is none."""
        return self.gather_payloads[-1].end if self.gather_dtype is not None and self.layout.buckets else 0

    def _payloads_of(self, ranks: int) -> tuple[Range, ...]:
        """Return the range of each bucket, in bytes, if each of some ranks has a payload of it."""
        sizes = [ranks * payload_bytes(span.numel) for span in self.shard_ranges]
        return tuple(Range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))

    @property
    def gather_bytes(self) -> int:
        """Bytes of the outputs of an all-gather."""
        return self.full_bytes if self.gather_dtype is None else self.gather_buffer_bytes

    @property
    def reduce_hops(self) -> list[tuple[int, int]]:
        """For each hop of a reduction, by what the gradients are divided before it, and into how many parts by it."""
        ranks, inner = self.layout.shard_count, self.inner_count
        return [(1, inner), (inner, ranks // inner)] if inner > 1 else [(1, ranks)]

    @property
    def reduce_payloads(self) -> list[int]:
        """Bytes that a reduction in 8 bits sends in each hop."""
        return [
            sum(parts * payload_bytes(bucket.numel // before // parts) for bucket in self.layout.buckets)
            for before, parts in self.reduce_hops
        ]

    @property
    def reduce_bytes(self) -> list[int]:
        """Bytes of the inputs of a reduction, in each hop."""
        if self.reduce_wire is not None:
            return self.reduce_payloads
        return [self.layout.numel // before * self.reduce_dtype.itemsize for before, _ in self.reduce_hops]

    def padding_in_blocks(self, rank: int) -> list[list[Range]]:
        """Return the padding of each bucket's shard that shares an 8-bit block with a parameter."""
        owned = [self.layout.owned_ranges_in_bucket(bucket, rank) for bucket in self.layout.buckets]
        ends = [[part.offset + part.elements.numel for part in parts] for parts in owned]
        return [
            [Range(end, round_up(end, BLOCK_NUMEL)) for end in of_bucket if end % BLOCK_NUMEL] for of_bucket in ends
        ]

    def receive_numels(self, needs_receive_buffer: bool) -> list[int]:
        """Return the elements of each bucket's receive buffer in a reduction, in ``reduce_dtype``; 0: none.

        ``needs_receive_buffer``: of the backend. Reductions in 8 bits always need one, also for what is sent.
        """
        numels = [bucket.numel for bucket in self.layout.buckets]
        if self.reduce_wire is not None:
            return [exchange_numel(numel, self.reduce_hops[0][1], self.reduce_dtype) for numel in numels]
        return numels if needs_receive_buffer else [0] * len(numels)

    @property
    def tracks_changed_values(self) -> bool:
        """Whether a rank keeps more than its shard: see [Note: inner shards] and [Note: gathering float8]."""
        return self.keeps_inner_shard or self.is_gathered_in_float8

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters."""
        return self.layout.numel * (1 if self.is_gathered_in_float8 else self.compute_dtype.itemsize)

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
        overwrites_input = self.inner_count > 1 or self.has_error_feedback
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
    float8_layers: Float8Layers | None = None  # None: no layer computes in float8

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
    can_gather_float8 = placement.parameters and not placement.keeps_inner_shards and config.offload is None
    if not can_gather_float8 and config.gather_dtype is None:
        params = {name: replace(spec, is_float8_weight=False) for name, spec in params.items()}
    flats = [flat for unit in units for flat in _group_flats(unit, params, config, precision, shard_count)]
    is_of_float8_layers = [flat.is_gathered_in_float8 for flat in flats]  # float8 is their only rounding to 8 bits
    flats = [replace(flat, is_gathered_in_float8=flat.is_gathered_in_float8 and can_gather_float8) for flat in flats]
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
    can_cast = config.needs_cast_on_gather and placement.parameters
    placed = []
    for flat, is_float8, tier, nbytes in zip(flats, is_of_float8_layers, tiers, alloc_bytes, strict=True):
        can_gather_in_8_bits = placement.parameters and not is_float8 and _can_quantize(flat, config)
        gather_dtype = config.gather_dtype if can_gather_in_8_bits else None
        keeps_elements = placement.keeps_inner_shards and gather_dtype is None  # of its own shard too
        placed.append(
            replace(
                flat,
                tier_placement=tier,
                alloc_bytes=nbytes,
                is_cast_from_master=can_cast and not keeps_elements and _can_cast_from_master(flat, tier),
                inner_count=inner_count,
                keeps_inner_shard=placement.keeps_inner_shards,
                keeps_inner_sum=placement.keeps_inner_sums and flat.is_trainable,
                gather_dtype=gather_dtype,
                reduce_wire=config.reduce_wire if _can_quantize(flat, config) else None,
                has_error_feedback=config.error_feedback and _can_quantize(flat, config),
            )
        )
    remaining = iter(placed)
    return replace(plan, flats_by_unit=[[next(remaining) for _ in range(count)] for count in counts])


def _can_quantize(flat: FlatSpec, config: Config) -> bool:
    """Return whether a flat may be sent in 8 bits."""
    return not _reason_against_8_bits(flat, config)


def _reason_against_8_bits(flat: FlatSpec, config: Config) -> str:
    """Return why a flat is not sent in 8 bits, or an empty string."""
    if flat.layout.shard_count == 1:
        return "on one rank"
    if flat.compute_dtype not in _QUANTIZED_DTYPES:
        return f"in {str(flat.compute_dtype).removeprefix('torch.')}"
    if config.has_master and flat.compute_dtype == torch.float32:
        return f"stays in fp32 under {config.precision}"
    return ""


@dataclass(frozen=True)
class EightBitParams:
    """The parameters that one kind of collective sends in 8 bits, and those that it does not.

    >>> print(EightBitParams("int8", ("a", "b"), {"norm": "stays in fp32 under bf16"}))
    int8, 2 parameters; not norm (stays in fp32 under bf16)
    """

    dtype: str
    """"int8" or "fp8"."""
    names: tuple[str, ...]
    """Parameters that are sent in 8 bits."""
    excluded: dict[str, str] = field(default_factory=dict)
    """The others, and why they are not. Of reductions, frozen parameters are not among them."""

    def __str__(self) -> str:
        count = f"{self.dtype}, {len(self.names)} parameter{'s' if len(self.names) != 1 else ''}"
        return "; ".join([count, *describe(self.excluded)])


def find_eight_bit_params(flats: Iterable[FlatSpec], config: Config) -> dict[str, EightBitParams]:
    """Return which parameters ``Config.gather_dtype`` and ``Config.reduce_wire`` apply to, by option; unset: left out.

    >>> find_eight_bit_params([], Config(stage=3, gather_dtype="int8"))
    {'gather_dtype': EightBitParams(dtype='int8', names=(), excluded={})}
    """
    flats, found = list(flats), {}
    for option in ("gather_dtype", "reduce_wire"):
        dtype = getattr(config, option)
        if dtype is None:
            continue
        names: list[str] = []
        excluded: dict[str, str] = {}
        for flat in flats if option == "gather_dtype" else [flat for flat in flats if flat.is_trainable]:
            if getattr(flat, option) is not None:
                names += flat.names
                continue
            reason = _reason_against_8_bits(flat, config) or "the weight of a float8 layer"
            excluded |= dict.fromkeys(flat.names, reason)
        found[option] = EightBitParams(dtype, tuple(names), excluded)
    return found


def _can_cast_from_master(flat: FlatSpec, tier_placement: TierPlacement) -> bool:
    is_on_device = tier_placement.parameters == "device" and not tier_placement.has_offloaded_optimizer
    return flat.is_optimized and flat.master_dtype != flat.compute_dtype and is_on_device


FlatKey = tuple[torch.dtype, bool, int, bool]


def _flat_keys(unit: UnitSpec, params: Mapping[str, ParamSpec]) -> list[FlatKey]:
    """Return, for each parameter of a unit, what the parameters of one flat have in common.

    Several optimizers have separate flats: each updates, clips, offloads and clears its own, at its own time.
    """
    specs = [params[name] for name in unit.parameters]
    return [
        (spec.compute_dtype, spec.requires_grad, spec.optimizer if spec.requires_grad else 0, spec.is_float8_weight)
        for spec in specs
    ]


def _group_flats(
    unit: UnitSpec, params: Mapping[str, ParamSpec], config: Config, precision: Precision, shard_count: int
) -> Iterator[FlatSpec]:
    """Yield the flats of a unit: one for each compute dtype and optimizer, for trainable and for frozen parameters."""
    groups: dict[FlatKey, list[str]] = {}
    for name, key in zip(unit.parameters, _flat_keys(unit, params), strict=True):
        groups.setdefault(key, []).append(name)
    for (dtype, is_trainable, _, is_float8), names in groups.items():
        layout = FlatLayout.build([params[name].numel for name in names], config.bucket_size, shard_count)
        master_dtype = torch.float32 if precision.has_master(dtype) else dtype
        is_optimized = is_trainable and any(params[name].is_optimized for name in names)
        reduce_dtype = precision.reduce_dtype(dtype)
        yield FlatSpec(
            tuple(names),
            layout,
            dtype,
            reduce_dtype,
            master_dtype,
            is_trainable,
            is_optimized,
            unit=unit.name,
            is_gathered_in_float8=is_float8,
        )
