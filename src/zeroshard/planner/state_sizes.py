"""Compute the bytes of a model's states on each rank from its shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroshard.comm import payload_bytes
from zeroshard.config.config import Config, check_inner_axis, check_replicas
from zeroshard.memory import MODEL_STATE_KINDS, buffer_lengths
from zeroshard.optim import ADAM_STATE_KEYS as STATES_OF_ADAM
from zeroshard.optim import (
    MOMENTUM_DTYPES,
    SUPPORTED_DTYPES,
    max_exchanged_numel,
    max_slice_numel,
    split_batches,
    state_bytes_per_element,
)
from zeroshard.planner.whole_params import (
    OWNER_BYTES_PER_ELEMENT,
    SHARD_BYTES_PER_ELEMENT,
    UPDATE_BYTES_PER_ELEMENT,
    OwnerLoads,
    WholeParamSpec,
    find_whole_params,
)
from zeroshard.sharding import (
    FlatSpec,
    ParamRange,
    ParamSpec,
    Placement,
    Precision,
    Range,
    ShardPlan,
    UnitSpec,
    find_float8_layers,
    plan_shards,
    plan_units,
)
from zeroshard.tensor_parallel import local_numels

FEEDBACK_PASSES = 9  # reads and writes of a gradient for error feedback


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on one rank by kind of state, as :func:`zeroshard.report` counts them; activations are not included."""

    states: dict[str, int]
    """On the device from the first step on: "parameters", "gradients" (from a backward to zero_grad(); see
    [Note: freeing gradients between steps]), "master weights", "optimizer states", "error feedback"."""
    transient: dict[str, int]
    """The peak of temporary memory in a step, by kind; "step" never overlaps with the others."""
    offloaded: dict[tuple[str, str], int] = field(default_factory=dict)
    """Offloaded from the first step on, by (kind of state, tier)."""

    @classmethod
    def from_sizes(cls, sizes: StateSizes) -> PredictedMemory:
        """Return the memory of states and of a step."""
        full_bytes = max((unit.full_bytes for unit in sizes.units), default=0)
        payload = max((unit.gather_payload_bytes for unit in sizes.units), default=0)
        buckets = sizes.shard_buffer_bytes + sizes.receive_buffer_bytes
        transient = {
            "gathered": 2 * full_bytes + payload if sizes.placement.parameters else 0,
            "autograd": 2 * max((unit.grad_bytes for unit in sizes.units), default=0),
            "buckets": sizes.ring_bytes if sizes.placement.gradients else buckets,
            "inner sums": sum(unit.inner_sum_bytes for unit in sizes.units),
            "step": sizes.step_buffer_bytes,
        }
        return cls(sizes.states, transient, sizes.offloaded)

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
    model: nn.Module,
    *,
    ranks: int,
    tensor: int = 1,
    replicas: int = 1,
    optimizer: str = "adamw",
    optimizer_states: int = 2,
    on_gpu: bool = True,
    **options: Any,
) -> PredictedMemory:
    """Predict the memory of each of ``ranks`` after :func:`zeroshard.shard` with ``options``.

    ``replicas`` is the size of the outer axis of a 2-D mesh of data-parallel ranks. ``tensor`` is the tensor-parallel
    degree; if it does not divide a layer evenly, the result is for the first rank, which holds the most. The model may
    be on the meta device. ``optimizer`` is "adamw" or "muon", which is Muon for the matrices of blocks and AdamW for
    the rest; then the result is for the rank that owns the most. ``optimizer_states`` is the number of values that
    AdamW, or another optimizer in its place, keeps per element: 1 for SGD with momentum. ``on_gpu=False``: the ranks
    use gloo, which needs buffers to receive gradients in. Every parameter that requires a gradient is assumed to be
    trained; without Muon by one of torch's optimizers, which are stepped slice by slice: see
    :attr:`zeroshard.Config.bucket_size`.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(1024, 1024, bias=False)
    >>> predict_memory(model, ranks=4, stage=3, precision="bf16").states["optimizer states"] == 2 * 4 * 1024**2 // 4
    True
    """
    sizes = state_sizes(
        model,
        Config(**options),
        ranks=ranks // replicas,
        tensor=tensor,
        replicas=replicas,
        optimizer_states=optimizer_states,
        on_gpu=on_gpu,
        whole=find_whole_params(model, optimizer),
    )
    return PredictedMemory.from_sizes(sizes)


@dataclass(frozen=True)
class BucketSizes:
    """Memory of one gradient bucket in a slot of the ring: see [Note: bucket ring]."""

    dtype: torch.dtype  # selects the ring
    packed_bytes: int  # bytes of the buffer it is packed into; 0 if it is reduced in place
    shard_buffer_bytes: int  # bytes of the buffer for this rank's shard, if reduced into one
    receive_buffer_bytes: int  # bytes of the buffers for the ranks' parts: 0 unless they use gloo or 8 bits
    needs_reduce_buffer: bool  # always, because it is offloaded; else only when accumulating


@dataclass(frozen=True)
class UnitSizes:
    """Memory and traffic of one unit on one rank."""

    name: str
    full_bytes: int  # bytes of its full parameters
    gather_bytes: int  # bytes that an all-gather of partitioned parameters moves
    alloc_bytes: int  # bytes allocated for them while unsharded
    grad_bytes: int  # bytes of its gradients from autograd
    reduce_bytes: int  # bytes of its reduction's input, in the reduce dtype
    trained_numel: int  # trainable elements of this rank's shard
    offloaded_numel: dict[str, int]  # of these, elements with offloaded optimizer states, by tier
    param_tier: str  # the tier of its parameter shard
    shard_bytes: int  # bytes of its shard
    offloaded_grad_bytes: int  # bytes of its gradient that are offloaded
    in_place_grad_bytes: int  # bytes of its gradient that are reduced in place
    slot_grad_bytes: int  # bytes of it that ring slots keep until the next unit's gradients are ready
    side_stream_grad_bytes: int  # bytes of it read on the side stream: see [Note: packing on the compute stream]
    device_grad_numels: tuple[tuple[torch.dtype, int], ...]  # elements of its gradients on the device, by dtype
    buckets: tuple[BucketSizes, ...]  # in reduce order
    exact_reduce_bytes: int  # of reduce_bytes, those that are not sent in 8 bits
    trained_gather_bytes: int = 0  # of gather_bytes, those of trained parameters
    cast_bytes: int = 0  # bytes read and written on the device to cast or quantize its shard before an all-gather
    gather_payload_bytes: int = 0  # of gather_bytes, 8-bit values and scales: a buffer while it is gathered
    dequantize_bytes: int = 0  # bytes read and written on the device to dequantize them
    reduce_payload_bytes: tuple[int, ...] = (0,)  # 8-bit values and scales that its reduction sends, in each hop
    reduce_kernel_bytes: int = 0  # bytes read and written on the device to quantize its gradients, and to sum them
    inner_sum_bytes: int = 0  # bytes of its inner sums, from a backward to the last one: see [Note: inner sums]
    num_blocks: int = 1  # blocks in this unit: see [Note: small blocks]
    refresh_bytes: int = 0  # of full_bytes, those of trained parameters: gathered after an update if unsharded
    average_bytes: int = 0  # bytes of this rank's shard in an average of replicas: see [Note: local steps]


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
    receive_buffer_bytes: int  # of ring_bytes, bytes of the receive buffers, which such reductions use too
    step_buffer_bytes: int  # bytes of the buffer that the update allocates
    staging_bytes: int  # bytes of host memory that stages offloaded states
    update_bytes_per_element: int  # read and written by an update: states, gradient, parameter, their copies
    optimizer_bytes_per_element: int  # bytes of an element's master weight and optimizer states
    whole: WholeSizes | None = None  # of parameters that are updated as a whole


@dataclass(frozen=True)
class WholeSizes:
    """Memory and traffic of parameters that one rank updates as a whole: [Note: predicting whole parameters]."""

    loads: OwnerLoads
    optimizer_state_bytes: tuple[int, ...]  # of each rank of the shard axis, whole or not, in all tiers
    shard_numel: int  # elements of whole parameters in a rank's shard
    to_owner_bytes: int  # that a rank sends: its shards of gradients and values
    from_owner_bytes: int  # that the fullest owner sends: new values
    tensor_bytes: int  # that the fullest owner all-gathers over the tensor axis
    collectives: int  # all-to-alls in a step

    @property
    def update_bytes(self) -> int:
        """Bytes that the fullest owner reads and writes in an update."""
        if not self.loads.least_flops:
            return self.loads.fullest_elements * UPDATE_BYTES_PER_ELEMENT
        return self.shard_numel * SHARD_BYTES_PER_ELEMENT + self.loads.fullest_elements * OWNER_BYTES_PER_ELEMENT


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
    whole: Mapping[str, WholeParamSpec] | None = None,
) -> StateSizes:
    """Compute the memory that :func:`zeroshard.shard` would hold on the first of ``ranks``.

    With ``whole`` parameters, on the one that owns the most.

    ``unit_specs`` are the model's units, if known. There are ``replicas`` groups of ``ranks``; the ranks of a group
    share the states, or those of all groups (``Config.partition``). ``on_gpu=False``: they use gloo, see [Note:
    reduce-scatter over gloo]. ``has_fused_adam``: the optimizer is an Adam that a GPU updates in one pass, see [Note:
    fused Adam in one pass].
    """
    if tensor < 1 or ranks % tensor:
        raise ValueError(f"{ranks} ranks are not a multiple of the {tensor} that divide each layer: change one of them")
    axes = _ShardAxes.of(config, ranks // tensor, replicas)
    unit_specs = plan_units(model, config.units, config.bucket_size) if unit_specs is None else unit_specs
    plan = _plan_model(model, config, unit_specs, axes, tensor, optimizer_states, on_gpu)
    return plan_sizes(
        plan,
        config,
        axes.placement,
        optimizer_states=optimizer_states,
        on_gpu=on_gpu,
        has_fused_adam=has_fused_adam,
        replicas=replicas,
        whole=whole,
    )


def plan_sizes(
    plan: ShardPlan,
    config: Config,
    placement: Placement,
    *,
    optimizer_states: int,
    on_gpu: bool,
    has_fused_adam: bool = False,
    replicas: int = 1,
    whole: Mapping[str, WholeParamSpec] | None = None,
) -> StateSizes:
    """Compute the memory of a shard plan: see :func:`state_sizes`."""
    shard_count = max((flat.layout.shard_count for flat in plan.flats), default=1)
    whole = _place_whole_states(whole, plan.flats, config) if whole else None
    owners = WholeOwners(plan.flats, whole, shard_count, config.bucket_size) if whole else None
    states, offloaded = _count_all_states(config, plan.flats, placement, optimizer_states, owners)
    trained = [flat for flat in plan.flats if flat.is_optimized]
    needs_receive_buffer = shard_count > 1 and not on_gpu
    rings = _ring_sizes(trained, needs_receive_buffer)
    uses_fused_adam = has_fused_adam and on_gpu and optimizer_states == len(STATES_OF_ADAM) and owners is None
    reduction = _ReduceConditions(
        can_pack_on_compute_stream=config.offload is None and (replicas == 1 or config.local_steps > 1),
        needs_receive_buffer=needs_receive_buffer,
        ring_slots=config.ring,
        has_feedback=config.error_feedback,
    )
    units = [
        _unit_sizes(spec, unit_flats, rings, placement, reduction)
        for spec, unit_flats in zip(plan.units, plan.flats_by_unit, strict=True)
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
        receive_buffer_bytes=config.ring * sum(ring.receive_slot_bytes for ring in rings.values()),
        step_buffer_bytes=_step_buffer_bytes(config, trained, owners, uses_fused_adam),
        staging_bytes=plan.staging_bytes,
        update_bytes_per_element=max(
            (_update_bytes_per_element(flat, optimizer_states, uses_fused_adam) for flat in trained), default=0
        ),
        optimizer_bytes_per_element=max(
            ((1 + optimizer_states) * flat.master_dtype.itemsize for flat in trained), default=0
        ),
        whole=None if owners is None else owners.sizes(optimizer_states),
    )


class _ShardAxes(NamedTuple):
    """Which states are sharded, and over how many ranks."""

    placement: Placement
    shard_count: int
    inner_count: int  # ranks of the inner axis, if gathers and reductions take two hops

    @classmethod
    def of(cls, config: Config, data_ranks: int, replicas: int) -> _ShardAxes:
        """Return those of ``replicas`` groups of ``data_ranks``; raise if the options do not allow them."""
        check_replicas(config, replicas)
        has_two_hops = replicas > 1 and config.partition != "hybrid"
        if has_two_hops:
            check_inner_axis(config, data_ranks)
        sharing_ranks = data_ranks * replicas if has_two_hops else data_ranks
        placement = Placement.from_stage(
            config.stage,
            sharing_ranks,
            config.offload,
            1 if has_two_hops else replicas,
            config.needs_cast_on_gather,
            config.partition if has_two_hops else "hybrid",
        )
        is_sharded = placement.optimizer
        return cls(placement, sharing_ranks if is_sharded else 1, data_ranks if has_two_hops and is_sharded else 1)


def _plan_model(
    model: nn.Module,
    config: Config,
    unit_specs: list[UnitSpec],
    axes: _ShardAxes,
    tensor: int,
    optimizer_states: int,
    on_gpu: bool,
) -> ShardPlan:
    """Return the shard plan of a model that an optimizer trains, as the engine would make it."""
    precision, numels = Precision(model, config), local_numels(model, tensor)
    tp_names = [name for name, p in model.named_parameters() if numels[name] != p.numel()]
    float8 = find_float8_layers(model, config, precision, tp_names)
    float8_weights = float8.weights if float8 is not None else {}
    params = {
        name: ParamSpec(
            numels[name],
            precision.compute_dtype(name, p),
            p.requires_grad,
            p.requires_grad,
            is_float8_weight=name in float8_weights,
        )
        for name, p in model.named_parameters()
    }
    return plan_shards(
        unit_specs,
        params,
        config=config,
        precision=precision,
        placement=axes.placement,
        shard_count=axes.shard_count,
        state_bytes_per_element=4 * optimizer_states,
        on_gpu=on_gpu,
        inner_count=axes.inner_count,
    )


def _place_whole_states(
    whole: Mapping[str, WholeParamSpec], flats: list[FlatSpec], config: Config
) -> dict[str, WholeParamSpec]:
    """Return the specs, with states on the owners for groups that cannot run on shards: see [Note: Muon on shards]."""
    dtypes = {name: flat.master_dtype for flat in flats for name in flat.names}
    has_states = {
        spec.group for name, spec in whole.items() if config.offload is not None or dtypes[name] not in MOMENTUM_DTYPES
    }
    return {
        name: spec._replace(is_on_shards=spec.is_on_shards and spec.group not in has_states)
        for name, spec in whole.items()
    }


def _count_all_states(
    config: Config, flats: list[FlatSpec], placement: Placement, optimizer_states: int, owners: WholeOwners | None
) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Return what :func:`count_states` does, with error feedback and the outer optimizer."""
    state_bytes = owners.fullest_state_bytes(optimizer_states) if owners is not None else None
    states, offloaded = count_states(flats, placement, optimizer_states, state_bytes)
    trained = [flat for flat in flats if flat.is_optimized]
    if config.error_feedback:
        states["error feedback"] = sum(
            flat.layout.numel * flat.reduce_dtype.itemsize for flat in trained if flat.reduce_wire is not None
        )
    for tier, nbytes in _outer_optimizer_bytes(config, trained).items():
        if tier == "device":
            states["outer optimizer"] = nbytes
        else:
            offloaded["outer optimizer", tier] = nbytes
    return states, offloaded


def _step_buffer_bytes(
    config: Config, trained: list[FlatSpec], owners: WholeOwners | None, uses_fused_adam: bool
) -> int:
    """Return the bytes of the buffers that an update allocates, or an average of replicas."""
    copied = [flat for flat in trained if _needs_grad_copy(flat, uses_fused_adam)]
    if owners is None:
        numel = min(sum(flat.layout.shard_numel for flat in copied), max_slice_numel(config.bucket_size))
        update_bytes = numel * max((flat.master_dtype.itemsize for flat in copied), default=0)
    else:
        update_bytes = owners.step_buffer_bytes(copied)
    return max(update_bytes, _average_buffer_bytes(config, trained))


def _outer_optimizer_bytes(config: Config, trained: list[FlatSpec]) -> dict[str, int]:
    """Return the bytes of the outer optimizer's values and states by tier: see [Note: local steps]."""
    if config.outer_optimizer is None:
        return {}
    outer = config.outer_optimizer([nn.Parameter(torch.zeros(1, device="cpu"))])
    found: dict[str, int] = {}
    for flat in trained:
        for span in flat.shard_ranges:
            tiers = [tier for range_, tier in flat.tier_placement.optimizer if range_.intersect(span) is not None]
            tier = "device" if all(tier == "device" for tier in tiers) else "host"
            found[tier] = found.get(tier, 0) + (4 + state_bytes_per_element(outer)) * span.numel
    return found


def _average_buffer_bytes(config: Config, trained: list[FlatSpec]) -> int:
    """Return the bytes of the buffers in which replicas are averaged."""
    if config.local_steps == 1:
        return 0
    largest = max((span.numel for flat in trained for span in flat.shard_ranges), default=0)
    return 4 * largest * (config.ring + (2 if config.outer_optimizer is not None else 0))


def _needs_grad_copy(flat: FlatSpec, has_fused_adam: bool) -> bool:
    """Return whether an update needs a copy of the gradient in the master dtype."""
    if has_fused_adam and flat.master_dtype == torch.float32 and flat.reduce_dtype in SUPPORTED_DTYPES:
        return False
    return not flat.compute_dtype == flat.reduce_dtype == flat.master_dtype


def _update_bytes_per_element(flat: FlatSpec, optimizer_states: int, has_fused_adam: bool) -> int:
    """Return the bytes read and written to update one element.

    Master weight and optimizer states count twice, gradient and parameter once. A gradient copy is written and read,
    and then the master weight is read once more to write the parameter.
    """
    has_own_param = flat.compute_dtype != flat.master_dtype and not flat.is_cast_from_master
    param_bytes = flat.compute_dtype.itemsize if has_own_param else 0
    nbytes = 2 * (1 + optimizer_states) * flat.master_dtype.itemsize + flat.reduce_dtype.itemsize + param_bytes
    if _needs_grad_copy(flat, has_fused_adam):
        nbytes += (2 + bool(param_bytes)) * flat.master_dtype.itemsize
    return nbytes


def _buckets(flat: FlatSpec) -> list[tuple[Range, ParamRange | None]]:
    """Return each bucket with the parameter range that is reduced in place, or None."""
    in_place = flat.single_param_buckets if flat.can_reduce_in_place else [None] * len(flat.layout.buckets)
    return list(zip(flat.layout.buckets, in_place, strict=True))


@dataclass(frozen=True)
class _RingSizes:
    """The lengths of a ring slot's buffers, in elements."""

    dtype: torch.dtype
    packed_numels: list[int]
    shard_numels: list[int]
    bucket_numels: list[int]  # lengths to pack all buckets, if none is reduced in place
    receive_numels: list[int]  # of the receive buffers, if there are any

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot with all buffers it can have."""
        return self.dtype.itemsize * sum(self.bucket_numels + self.shard_numels) + self.receive_slot_bytes

    @property
    def receive_slot_bytes(self) -> int:
        """Bytes of the receive buffers of one slot."""
        return self.dtype.itemsize * sum(self.receive_numels)

    @property
    def max_shard_bytes(self) -> int:
        """Bytes of a rank's shard of the longest bucket."""
        return self.dtype.itemsize * max(self.shard_numels, default=0)

    def bucket_sizes(
        self, packed_numel: int, shard_numel: int, receive_numel: int, *, is_offloaded: bool
    ) -> BucketSizes:
        """Return the memory of a bucket from the elements of its buffers; 0: none."""

        def buffer_bytes(lengths: list[int], needed: int) -> int:
            return self.dtype.itemsize * min(length for length in lengths if length >= needed) if needed else 0

        packed = buffer_bytes(self.packed_numels, packed_numel)
        received = buffer_bytes(self.receive_numels, receive_numel)
        shard = buffer_bytes(self.shard_numels, shard_numel)
        return BucketSizes(self.dtype, packed, shard, received, needs_reduce_buffer=is_offloaded)


def _ring_sizes(flats: list[FlatSpec], needs_receive_buffer: bool) -> dict[torch.dtype, _RingSizes]:
    """Return the ring sizes for each reduce dtype."""
    rings = {}
    for dtype in {flat.reduce_dtype: None for flat in flats}:
        same_dtype = [flat for flat in flats if flat.reduce_dtype == dtype]
        buckets = [bucket for flat in same_dtype for bucket in _buckets(flat)]
        packed = [bucket.numel for bucket, in_place in buckets if in_place is None]
        shards = [span.numel for flat in same_dtype for span in flat.shard_ranges]
        all_buckets = [bucket.numel for bucket, _ in buckets]
        received = [numel for flat in same_dtype for numel in flat.receive_numels(needs_receive_buffer) if numel]
        rings[dtype] = _RingSizes(
            dtype,
            buffer_lengths(packed),
            buffer_lengths(shards),
            buffer_lengths(all_buckets),
            buffer_lengths(received),
        )
    return rings


def _slot_grad_bytes(flats: list[FlatSpec], ring_slots: int) -> int:
    """Return the bytes of the gradients that the ring slots keep after a unit's last bucket has started.

    See [Note: reducing large gradients in place].
    """
    kept: dict[tuple[int, int], int] = {}  # by flat and parameter
    for dtype in {flat.reduce_dtype for flat in flats}:
        buckets = [
            (flat_index, in_place.param_index if in_place is not None else None)
            for flat_index, flat in enumerate(flats)
            for _, in_place in (_buckets(flat) if flat.reduce_dtype == dtype else ())
        ]
        for flat_index, param_index in buckets[-ring_slots:]:
            if param_index is not None:
                numel = flats[flat_index].layout.numels[param_index]
                kept[flat_index, param_index] = numel * flats[flat_index].compute_dtype.itemsize
    return sum(kept.values())


@dataclass(frozen=True)
class _ReduceConditions:
    """How gradients are reduced, the same for all units."""

    can_pack_on_compute_stream: bool
    needs_receive_buffer: bool  # of the backend
    ring_slots: int
    has_feedback: bool  # what 8 bits cannot express is kept for the next gradient


def _unit_sizes(
    spec: UnitSpec,
    flats: list[FlatSpec],
    rings: dict[torch.dtype, _RingSizes],
    placement: Placement,
    reduction: _ReduceConditions,
) -> UnitSizes:
    trained = [flat for flat in flats if flat.is_optimized]
    gathered_in_8_bits = [flat for flat in flats if flat.gather_dtype is not None]
    reduced_in_8_bits = [flat for flat in trained if flat.reduce_wire is not None]
    gather_payload_bytes = sum(flat.gather_buffer_bytes for flat in gathered_in_8_bits)
    exact_full_bytes = sum(flat.full_bytes for flat in flats if flat.gather_dtype is None)
    offloaded: dict[str, int] = {}
    for flat in trained:
        for range_, tier in flat.tier_placement.optimizer:
            if tier != "device":
                offloaded[tier] = offloaded.get(tier, 0) + range_.numel
    return UnitSizes(
        spec.name,
        full_bytes=sum(flat.full_bytes for flat in flats),
        gather_bytes=exact_full_bytes + gather_payload_bytes,
        alloc_bytes=sum(flat.alloc_bytes for flat in flats),
        grad_bytes=sum(sum(flat.layout.numels) * flat.compute_dtype.itemsize for flat in trained),
        reduce_bytes=sum(flat.layout.numel * flat.reduce_dtype.itemsize for flat in trained),
        trained_numel=sum(flat.layout.shard_numel for flat in trained),
        offloaded_numel=offloaded,
        param_tier=next((flat.tier_placement.parameters for flat in flats if flat.has_offloaded_params), "device"),
        shard_bytes=sum(flat.layout.shard_numel * flat.compute_dtype.itemsize for flat in flats),
        offloaded_grad_bytes=sum(
            flat.layout.shard_numel * flat.reduce_dtype.itemsize
            for flat in trained
            if flat.tier_placement.has_offloaded_optimizer or flat.has_offloaded_grads
        ),
        in_place_grad_bytes=sum(
            in_place.elements.numel * flat.compute_dtype.itemsize
            for flat in trained
            for _, in_place in _buckets(flat)
            if in_place is not None
        ),
        slot_grad_bytes=_slot_grad_bytes(trained, reduction.ring_slots),
        side_stream_grad_bytes=sum(
            sum(flat.layout.numels) * flat.compute_dtype.itemsize
            for flat in trained
            if not (reduction.can_pack_on_compute_stream and flat.fits_one_packed_bucket and flat.reduce_wire is None)
        ),
        device_grad_numels=tuple(
            (flat.reduce_dtype, flat.layout.shard_numel if placement.gradients else flat.layout.numel)
            for flat in trained
            if not flat.has_offloaded_grads
        ),
        buckets=tuple(
            rings[flat.reduce_dtype].bucket_sizes(
                0 if in_place is not None else bucket.numel,
                span.numel,
                received,
                is_offloaded=flat.has_offloaded_grads and flat.layout.shard_count > 1,
            )
            for flat in trained
            for (bucket, in_place), span, received in zip(
                _buckets(flat), flat.shard_ranges, flat.receive_numels(reduction.needs_receive_buffer), strict=True
            )
        ),
        exact_reduce_bytes=sum(
            flat.layout.numel * flat.reduce_dtype.itemsize for flat in trained if flat.reduce_wire is None
        ),
        trained_gather_bytes=sum(flat.gather_bytes for flat in trained),
        cast_bytes=sum(map(_cast_bytes, flats)),
        gather_payload_bytes=gather_payload_bytes,
        dequantize_bytes=gather_payload_bytes + sum(flat.full_bytes for flat in gathered_in_8_bits),
        reduce_payload_bytes=tuple(map(sum, zip(*(flat.reduce_payloads for flat in reduced_in_8_bits), strict=True)))
        or (0,),
        reduce_kernel_bytes=sum(_reduce_kernel_bytes(flat, reduction.has_feedback) for flat in reduced_in_8_bits),
        inner_sum_bytes=sum(flat.inner_sum_bytes for flat in trained),
        num_blocks=spec.block_count if spec.is_block else 1,
        refresh_bytes=sum(flat.full_bytes for flat in trained),
        average_bytes=sum(flat.layout.shard_numel * max(4, flat.master_dtype.itemsize) for flat in trained),
    )


def _cast_bytes(flat: FlatSpec) -> int:
    """Return the bytes read and written to cast or quantize what a rank sends in an all-gather."""
    nbytes = 0
    if flat.is_cast_from_master:
        nbytes += flat.layout.shard_numel * (flat.master_dtype.itemsize + flat.compute_dtype.itemsize)
    if flat.gather_dtype is not None:
        nbytes += flat.layout.shard_numel * flat.compute_dtype.itemsize + payload_bytes(flat.layout.shard_numel)
    return nbytes


def _reduce_kernel_bytes(flat: FlatSpec, has_feedback: bool) -> int:
    """Return the bytes read and written to quantize gradients, and to sum what is received, in each hop."""
    nbytes = 2 * sum(flat.reduce_payloads)
    if has_feedback:  # the residual is added, restored, subtracted and cleaned
        nbytes += FEEDBACK_PASSES * flat.layout.numel * flat.reduce_dtype.itemsize
    for before, parts in flat.reduce_hops:
        numel = flat.layout.numel // before
        nbytes += (numel + numel // parts) * flat.reduce_dtype.itemsize
    return nbytes


class WholeOwners:
    """The owners of whole parameters, and what is left for flat slices: [Note: predicting whole parameters]."""

    def __init__(
        self, flats: list[FlatSpec], whole: Mapping[str, WholeParamSpec], ranks: int, bucket_size: int
    ) -> None:
        self._flats = [flat for flat in flats if flat.is_optimized]
        self._flat_by_name = {name: flat for flat in self._flats for name in flat.names if name in whole}
        self._whole = {name: spec for name, spec in whole.items() if name in self._flat_by_name}
        self._ranks = ranks
        itemsizes = {name: flat.master_dtype.itemsize for name, flat in self._flat_by_name.items()}
        self._itemsize = max(itemsizes.values())
        self._owners, self.loads = OwnerLoads.assign(self._whole, itemsizes, ranks)
        self._batches: list[list[str]] = []  # of whole parameters
        self._matrix_batches: list[list[str]] = []  # of those on shards
        for is_on_shards, batches in ((False, self._batches), (True, self._matrix_batches)):
            max_numel = max_exchanged_numel(bucket_size) if is_on_shards else bucket_size // 2
            names = [name for name, spec in self._whole.items() if spec.is_on_shards == is_on_shards]
            owners = [self._owners[name] for name in names]
            found = split_batches(owners, [self._whole[name].numel for name in names], max_numel)
            batches += [[names[i] for i in batch] for batch in found]

    def state_bytes(self, rank: int, optimizer_states: int) -> dict[str, int]:
        """Return the bytes of a rank's optimizer states, by tier."""
        found: Counter[str] = Counter()
        for flat in self._flats:
            for span, tier in flat.tier_placement.optimizer:
                found[tier] += self._slice_bytes(flat, span, rank, optimizer_states)
        for name, spec in self._whole.items():
            if self._owners[name] == rank and not spec.is_on_shards:
                flat = self._flat_by_name[name]
                nbytes = round(spec.states * spec.numel * flat.master_dtype.itemsize)
                found[flat.tier_placement.main_optimizer_tier] += nbytes
        return dict(found)

    def fullest_state_bytes(self, optimizer_states: int) -> dict[str, int]:
        """Return the optimizer states of the rank that has the most bytes, by tier."""
        ranks = [self.state_bytes(rank, optimizer_states) for rank in range(self._ranks)]
        return max(ranks, key=lambda by_tier: sum(by_tier.values()))

    def _slice_bytes(self, flat: FlatSpec, span: Range, rank: int, optimizer_states: int) -> int:
        """Return the bytes of states on flat slices, inside a range of a rank's shard."""
        specs = [self._whole.get(name) for name in flat.names]
        states = [float(optimizer_states if spec is None else spec.states) for spec in specs]
        is_one_group = len({None if spec is None else spec.group for spec in specs}) == 1
        if is_one_group and (specs[0] is None or specs[0].is_on_shards):
            return round(states[0] * span.numel) * flat.master_dtype.itemsize  # with padding
        total = 0.0
        for owned in flat.layout.owned_ranges(rank):
            common = span.intersect(Range(owned.offset, owned.offset + owned.elements.numel))
            spec = specs[owned.param_index]
            if common is not None and (spec is None or spec.is_on_shards):
                total += common.numel * states[owned.param_index]
        return round(total) * flat.master_dtype.itemsize

    def sizes(self, optimizer_states: int) -> WholeSizes:
        """Return the memory of each rank and the traffic of a step."""
        shards, values, divided = 0, [0] * self._ranks, [0] * self._ranks
        for name, spec in self._whole.items():
            flat, owner = self._flat_by_name[name], self._owners[name]
            numel, itemsize = self._local_numel(name), flat.master_dtype.itemsize
            sent, back, gathered = flat.reduce_dtype.itemsize + itemsize, itemsize, 2 * itemsize
            if spec.is_on_shards:
                sent = back = gathered = torch.bfloat16.itemsize
            shards += -(-numel // self._ranks) * sent
            values[owner] += numel * back
            divided[owner] += gathered * spec.numel if numel < spec.numel else 0
        is_exchanged = self._ranks > 1
        return WholeSizes(
            self.loads,
            tuple(sum(self.state_bytes(rank, optimizer_states).values()) for rank in range(self._ranks)),
            shard_numel=sum(self._local_numel(name) for name in self._whole) // self._ranks,
            to_owner_bytes=shards if is_exchanged else 0,
            from_owner_bytes=max(values) if is_exchanged else 0,
            tensor_bytes=max(divided),
            collectives=2 * len(self._batches + self._matrix_batches) if is_exchanged else 0,
        )

    def step_buffer_bytes(self, copied: list[FlatSpec]) -> int:
        """Return a bound of the bytes that a step allocates, if one call updates everything.

        The copies of gradients on slices, the values and gradients of the owned parameters, and one exchange: what is
        sent, and what is received.
        """
        local = {id(flat): 0 for flat in self._flats}
        for name, flat in self._flat_by_name.items():
            local[id(flat)] += self._local_numel(name) // self._ranks
        slices = sum((flat.layout.shard_numel - local[id(flat)]) * flat.master_dtype.itemsize for flat in copied)
        is_divided = any(self._local_numel(name) < spec.numel for name, spec in self._whole.items())
        if not self._batches:
            return max(slices, self._matrix_bytes(is_divided))
        if self._ranks == 1 and not is_divided:  # values are updated in place
            return slices + (self.loads.fullest_elements * self._itemsize if copied else 0)
        exchanged = max(self._exchange_bytes(batch, is_divided) for batch in self._batches)
        return slices + 2 * self.loads.fullest_elements * self._itemsize + exchanged

    def _matrix_bytes(self, is_divided: bool) -> int:
        """Return a bound of the bytes of matrices on shards, while an exchange and those before and after it run.

        The fp32 copies of gradient and update on this rank, without Triton; what is sent and received by two exchanges;
        the updates that an owner orthogonalizes, and the TP shards of all tensor ranks.
        """
        owned = sent = runs = 0  # the most elements of an owner in an exchange, and of a rank's shards
        for batch in self._matrix_batches:
            by_owner, by_rank = Counter[int](), Counter[int]()
            for name in batch:
                by_owner[self._owners[name]] += self._whole[name].numel
                flat = self._flat_by_name[name]
                for rank in range(self._ranks):
                    for part in flat.layout.owned_ranges(rank):
                        by_rank[rank] += part.elements.numel if flat.names[part.param_index] == name else 0
            owned, sent = max(owned, *by_owner.values()), max(sent, *by_rank.values())
            runs = max(runs, (1 + self._ranks) * len(batch))
        copies, matrices = 2 * self._itemsize * sent, (3 if is_divided else 1) * owned
        return copies + 2 * (2 * (owned + sent) + matrices) + 2 * 16 * runs

    def _exchange_bytes(self, batch: list[str], is_divided: bool) -> int:
        """Return the most bytes that a rank sends and receives in an exchange, each run aligned."""
        received, runs = [0] * self._ranks, [0] * self._ranks
        for name in batch:
            received[self._owners[name]] += 2 * self._whole[name].numel * self._itemsize
            runs[self._owners[name]] += 2 * self._ranks
        sent = -(-sum(received) // self._ranks)
        return (1 + is_divided) * (max(received) + sent) + 16 * (max(runs) + 2 * len(batch))

    def _local_numel(self, name: str) -> int:
        """Return the elements of a parameter on this tensor-parallel rank."""
        flat = self._flat_by_name[name]
        return flat.layout.numels[flat.names.index(name)]


def count_states(
    flats: list[FlatSpec],
    placement: Placement,
    optimizer_states: int,
    optimizer_state_bytes: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Return the bytes of states on the device, and of offloaded states by (kind of state, tier).

    ``optimizer_state_bytes``: bytes of optimizer states by tier, if some parameters are updated as a whole.
    """
    counted: dict[tuple[str, str], int] = dict.fromkeys(((kind, "device") for kind in MODEL_STATE_KINDS), 0)

    def count(kind: str, tier: str, numel: int, dtype: torch.dtype) -> None:
        counted[kind, tier] = counted.get((kind, tier), 0) + numel * dtype.itemsize

    for flat in flats:
        layout, tiers = flat.layout, flat.tier_placement
        numel = flat.param_numel if placement.parameters else layout.numel
        count("parameters", tiers.parameters, numel, flat.compute_dtype)
        count("parameters", "device", flat.inner_payload_bytes, torch.uint8)
        if not flat.is_optimized:
            continue
        grad_numel = layout.shard_numel if placement.gradients else layout.numel
        count("gradients", tiers.gradients, grad_numel, flat.reduce_dtype)
        for range_, tier in flat.master_ranges():
            count("master weights", tier, range_.numel, flat.master_dtype)
        for range_, tier in tiers.optimizer if optimizer_state_bytes is None else ():
            count("optimizer states", tier, optimizer_states * range_.numel, flat.master_dtype)
    counted |= {("optimizer states", tier): nbytes for tier, nbytes in (optimizer_state_bytes or {}).items()}
    on_device = {kind: nbytes for (kind, tier), nbytes in counted.items() if tier == "device"}
    return on_device, {key: nbytes for key, nbytes in counted.items() if key[1] != "device" and nbytes}
