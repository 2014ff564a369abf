"""Build: makes the shard plan of a plain model, fills its units one at a time, and makes its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.comm import Communicator
from zeroshard.engine.context import ShardContext
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_param import FlatParam, InnerShard
from zeroshard.engine.float8_flat import Float8FlatParam
from zeroshard.engine.forward_methods import install_forward_methods, mark_generating_modules
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.hooks import install_hooks
from zeroshard.engine.module_buffers import BufferBroadcaster
from zeroshard.engine.param_data import set_data_and_dtype
from zeroshard.engine.unit import Unit
from zeroshard.float8 import install_float8_layers
from zeroshard.memory import Arena, SideStream, TieredTensor, TierSegment
from zeroshard.sharding import FlatSpec, ParamSpec, ShardPlan, UnitSpec, find_float8_layers, plan_shards
from zeroshard.tensor_parallel import TensorParallelState
from zeroshard.utils.stored_tensor import StoredTensor


def plan_model(
    context: ShardContext,
    model: nn.Module,
    units: list[UnitSpec],
    optimizer_of: Mapping[int, int],
    state_bytes_per_element: int,
    tp_state: TensorParallelState | None,
) -> ShardPlan:
    """Return the shard plan of a model. ``optimizer_of``: the number of the optimizer of each parameter, by id."""
    has_several = len(set(optimizer_of.values())) > 1
    tp_names = tp_state.tp_params if tp_state is not None else ()
    float8 = find_float8_layers(model, context.config, context.precision, tp_names)
    params = {}
    for name, parameter in model.named_parameters():
        tp_param = tp_state.tp_params.get(name) if tp_state is not None else None
        tp_shard = tp_param.shard if tp_param is not None else None
        params[name] = ParamSpec(
            parameter.numel() if tp_shard is None else tp_shard.local_shape.numel(),
            context.precision.compute_dtype(name, parameter),
            parameter.requires_grad,
            id(parameter) in optimizer_of,
            optimizer_of.get(id(parameter), -1) if has_several else 0,
            float8 is not None and name in float8.weights,
        )
    plan = plan_shards(
        units,
        params,
        config=context.config,
        precision=context.precision,
        placement=context.placement,
        shard_count=context.comm.shard_axis.size,
        inner_count=context.comm.shard_axis.factors[1].size if context.comm.shard_axis.factors else 1,
        state_bytes_per_element=state_bytes_per_element,
        on_gpu=context.comm.device.type == "cuda",
    )
    return replace(plan, float8_layers=float8)


def _materialize(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Make a meta or stored parameter an ordinary one with these values, and keep its object identity."""
    real = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]


def build_engine(
    context: ShardContext, model: nn.Module, plan: ShardPlan, tp_state: TensorParallelState | None
) -> tuple[Engine, list[Any]]:
    """Shard a model as the plan says. Return its engine, and the handles that remove its hooks."""
    units = UnitBuilder(context, model, plan, tp_state).build()
    engine = Engine(context, units, Gradients(context, units), BufferBroadcaster(model, context))
    handles: list[Any] = list(install_hooks(model, engine, plan.units))
    if plan.float8_layers is not None:
        layers = plan.float8_layers
        flats = [flat for unit in units for flat in unit.flats if isinstance(flat, Float8FlatParam)]
        gathered = {name: weight for flat in flats for name, weight in zip(flat.names, flat.weights, strict=True)}
        weights = {layers.weights[name]: weight for name, weight in gathered.items()}
        handles += install_float8_layers(model, layers.names, weights)
    return engine, [*handles, install_forward_methods(model), *mark_generating_modules(model, engine)]


def _is_stored(flat: FlatParam) -> bool:
    """Return whether values of a flat are in files."""
    return any(isinstance(parameter, StoredTensor) for parameter in flat.parameters)


def _read_shard(flat: FlatParam, sources: list[torch.Tensor], comm: Communicator, what: str) -> None:
    """Fill this rank's shard of a flat, and all of a replicated one; ``sources`` are stored or ordinary tensors."""
    for bucket_index, bucket in enumerate(flat.layout.buckets):
        if flat.master is None:
            shard = flat.local_shards[bucket_index]
        else:
            shard = torch.empty(bucket.numel // flat.layout.shard_count, dtype=flat.master.dtype, device=flat.device)
        end = 0
        for part in flat.layout.owned_ranges_in_bucket(bucket, flat.shard_rank):
            shard[end : part.offset] = 0  # padding
            end = part.offset + part.elements.numel
            source, target = sources[part.param_index], shard[part.offset : end]
            if isinstance(source, StoredTensor):
                source.read_range(part.elements.start, part.elements.end, target)
            else:
                target.copy_(source.reshape(-1)[part.elements.slice])
        shard[end:] = 0
        flat.load_shard(bucket_index, shard)
        if not flat.is_partitioned and comm.shard_axis.size > 1:
            comm.all_gather(flat.bucket_views[bucket_index], flat.local_shards[bucket_index], what).wait()


class UnitBuilder:
    """Allocates and fills the units of one model, as a shard plan says."""

    def __init__(
        self, context: ShardContext, model: nn.Module, plan: ShardPlan, tp_state: TensorParallelState | None = None
    ) -> None:
        self._model, self._plan = model, plan
        self._comm, self._tracker, self._pool, self._tiers = (
            context.comm,
            context.tracker,
            context.pool,
            context.tiers,
        )
        self._defragments = context.config.defragment
        self._init_fn = context.config.init_fn
        self._tp_state = tp_state
        self._has_partitioned_params = context.placement.parameters
        self._parameters = dict(model.named_parameters())
        self._original_classes = {id(p): type(p) for p in self._parameters.values()}
        self._meta_param_names = {name for name, p in self._parameters.items() if p.is_meta}
        all_gather_stream = SideStream(self._comm.device, self._comm.wait_timer)
        self.units = [
            Unit(spec.name, [self._make_flat(flat) for flat in flats], context, all_gather_stream)
            for spec, flats in zip(plan.units, plan.flats_by_unit, strict=True)
        ]

    def _make_flat(self, spec: FlatSpec) -> FlatParam:
        tp_params = self._tp_state.tp_params if self._tp_state is not None else {}
        parameters = [self._parameters[name] for name in spec.names]
        kind = Float8FlatParam if spec.is_gathered_in_float8 else FlatParam
        return kind(spec, parameters, [tp_params.get(name) for name in spec.names], self._comm)

    def build(self) -> list[Unit]:
        """Allocate all shards, then fill them unit by unit: memory never exceeds the shards and one full unit."""
        flats = [flat for unit in self.units for flat in unit.flats]
        self._tiers.spare_host_bytes = self._plan.spare_host_bytes
        numel = sum(range_.numel for flat in flats for range_, tier in flat.spec.master_ranges() if tier == "device")
        masters = Arena("master weights", numel, torch.float32, self._pool, self._tracker) if numel else None
        shards: dict[torch.dtype, Arena] = {}
        self._tracker.add("parameters", 0)  # to appear in reports even if this rank has none
        sharded = [
            flat
            for flat in flats
            if self._has_partitioned_params and not flat.spec.has_offloaded_params and not flat.spec.is_cast_from_master
        ]
        for dtype in dict.fromkeys(flat.dtype for flat in sharded):
            numel = sum(flat.spec.param_numel for flat in sharded if flat.dtype == dtype)
            shards[dtype] = Arena("parameters", numel, dtype, self._pool, self._tracker)
        payload_bytes = sum(flat.spec.inner_payload_bytes for flat in flats)
        payloads = Arena("parameters", payload_bytes, torch.uint8, self._pool, self._tracker) if payload_bytes else None
        on_disk = {flat for flat in flats if flat.spec.tier_placement.parameters == "disk"}
        prefetcher = self._tiers.make_prefetcher(
            [flat.layout.shard_numel * flat.dtype.itemsize for flat in flats if flat in on_disk]
        )
        for unit, spec in zip(self.units, self._plan.units, strict=True):
            for flat in unit.flats:
                self._allocate_flat(flat, shards)
                if payloads is not None and flat.spec.inner_payload_bytes:
                    flat.inner = InnerShard(payloads.allocate(flat.spec.inner_payload_bytes), flat.spec)
                flat.prefetcher = prefetcher if flat in on_disk else None
                if flat.spec.has_master:
                    flat.master = self._make_master(flat, masters)
            self._init_unit(unit, spec)
        self._move_buffers_to_device()
        if self._comm.device.type == "cuda" and self._defragments:
            torch.cuda.empty_cache()  # the staging memory is as large as full units, and not needed any more
        return self.units

    def _allocate_flat(self, flat: FlatParam, shards: dict[torch.dtype, Arena]) -> None:
        """Allocate a flat: its shard in its tier, if it has one, or all of it on the device."""
        shard, numel = None, flat.layout.shard_numel
        if self._has_partitioned_params and flat.spec.has_offloaded_params:
            shard = self._tiers.zeros("parameters", flat.spec.tier_placement.parameters, numel, flat.dtype, pinned=True)
        elif self._has_partitioned_params and not flat.spec.is_cast_from_master:
            shard = shards[flat.dtype].allocate(flat.spec.param_numel)
        # Partitioned flats have full memory only briefly: the pool would keep that of one unit.
        with nullcontext() if self._has_partitioned_params else self._pool:
            flat.allocate(self._has_partitioned_params, shard)
        if not self._has_partitioned_params:
            self._tracker.add("parameters", flat.full.nbytes)

    def _make_master(self, flat: FlatParam, arena: Arena | None) -> TieredTensor:
        """Return the master weights: segments in their tiers, or the local shard itself where no copy is needed."""
        segments: list[TierSegment] = []
        for range_, tier in flat.spec.master_ranges():
            if tier != "device":
                tensor = self._tiers.zeros("master weights", tier, range_.numel, flat.spec.master_dtype)
                segments.append(TierSegment(range_, tier, tensor))
            elif arena is not None:
                segments.append(TierSegment(range_, tier, arena.allocate(range_.numel)))
        if not any(segment.tier == "device" for segment in segments):
            for range_ in (range_ for range_, tier in flat.spec.tier_placement.optimizer if tier == "device"):
                for shard_range, shard in zip(flat.shard_ranges, flat.local_shards, strict=True):
                    common = range_.intersect(shard_range)
                    if common is not None:
                        segments.append(TierSegment(common, "device", shard[common.shift(-shard_range.start).slice]))
        return TieredTensor(sorted(segments, key=lambda segment: segment.span.start), flat.spec.master_dtype)

    @torch.no_grad()
    def _init_unit(self, unit: Unit, spec: UnitSpec) -> None:
        staged: list[tuple[torch.Tensor, dict[int, torch.Tensor]]] = []
        what = f"share unit {unit.name!r}"
        for flat in unit.flats:
            staged.append(self._stage_unstored(flat) if _is_stored(flat) else self._stage_values(flat))
        self._init_meta_modules(spec)
        for flat, (values, full_tensors) in zip(unit.flats, staged, strict=True):
            if _is_stored(flat):
                self._load_stored(flat, full_tensors, what)
            else:
                self._broadcast_over_tensor_axis(flat, values, full_tensors)
                for bucket in flat.layout.buckets:  # rank 0's values count, as in DDP
                    self._comm.broadcast(values[bucket.start : bucket.end], 0, what)
                flat.load_full(values)
            self._install_dtensors(flat)
        unit.bind(self._original_classes)
        for values, full_tensors in staged:
            self._tracker.add("staging", -values.nbytes - sum(full.nbytes for full in full_tensors.values()))

    def _stage_unstored(self, flat: FlatParam) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return full tensors, by index, of the parameters that are not stored in files, and no buffer for the flat."""
        dtype = flat.dtype if flat.master is None else flat.master.dtype
        full_tensors: dict[int, torch.Tensor] = {}
        for index, (name, parameter) in enumerate(flat.named_parameters):
            if isinstance(parameter, StoredTensor):
                continue
            full = torch.empty(parameter.shape, dtype=dtype, device=self._comm.device)
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"{name!r} is a DTensor, and other parameters of its unit are still in the files of "
                    "from_pretrained(): leave it to shard() to divide the model over the tensor axis"
                )
            if parameter.is_meta:
                _materialize(parameter, full)
            else:
                parameter.data = full.copy_(parameter.data)
            full_tensors[index] = full
        self._tracker.add("staging", sum(full.nbytes for full in full_tensors.values()))
        return torch.empty(0, dtype=dtype, device="cpu"), full_tensors

    def _load_stored(self, flat: FlatParam, full_tensors: dict[int, torch.Tensor], what: str) -> None:
        """Read this rank's shard of a flat from files; what is not stored there comes from rank 0."""
        sources: list[torch.Tensor] = []
        for index, parameter in enumerate(flat.parameters):
            source = parameter.detach()
            if index in full_tensors:
                source = full_tensors[index]
                self._comm.broadcast_over_axis(self._comm.tensor_axis, source, what)
                self._comm.broadcast(source, 0, what)
            tp_shard = flat.tp_shards[index]
            source = source if tp_shard is None else tp_shard.slice(source)
            dims = sorted(range(source.dim()), key=lambda dim: -flat.strides[index][dim])  # in the flat's order
            sources.append(source if dims == [*range(source.dim())] else source.permute(dims))
        _read_shard(flat, sources, self._comm, what)
        for parameter in flat.parameters:
            if isinstance(parameter, StoredTensor):
                _materialize(parameter, flat.placeholder(parameter.shape))
                self._original_classes[id(parameter)] = type(parameter)

    def _stage_values(self, flat: FlatParam) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Copy the parameters' values into a buffer with the flat's layout, or reserve space for meta parameters.

        Returns it, and the full tensors of parameters that are still to be split over the tensor axis, by index.
        """
        dtype = flat.dtype if flat.master is None else flat.master.dtype
        values = torch.zeros(flat.layout.numel, dtype=dtype, device=self._comm.device)
        full_tensors: dict[int, torch.Tensor] = {}
        for index, parameter in enumerate(flat.parameters):
            view = flat.view(values, index)
            if isinstance(parameter, DTensor):  # made by the user: already tensor-parallel
                self._copy_from_dtensor(flat.names[index], parameter, view)
                continue
            if flat.tp_shards[index] is not None:
                view = full_tensors[index] = torch.empty(parameter.shape, dtype=dtype, device=self._comm.device)
            if parameter.is_meta:
                _materialize(parameter, view)
            else:
                view.copy_(parameter.data)
                parameter.data = view
        self._tracker.add("staging", values.nbytes + sum(full.nbytes for full in full_tensors.values()))
        return values, full_tensors

    def _copy_from_dtensor(self, name: str, parameter: DTensor, view: torch.Tensor) -> None:
        if parameter.is_meta:
            raise ValueError(
                f"{name!r} is a DTensor on the meta device: leave it to shard() to divide a model that was built there"
            )
        view.copy_(parameter.to_local())
        parameter._local_tensor = view

    def _broadcast_over_tensor_axis(
        self, flat: FlatParam, values: torch.Tensor, full_tensors: dict[int, torch.Tensor]
    ) -> None:
        """Broadcast the first tensor rank's values over its axis; keep this rank's TP shard of split parameters."""
        if self._comm.tensor_axis.size == 1:
            return
        for index, tp_shard in enumerate(flat.tp_shards):
            what = f"share {flat.names[index]!r} over the tensor axis"
            if tp_shard is None:
                param_range = flat.layout.range_of_param(index)
                self._comm.broadcast_over_axis(
                    self._comm.tensor_axis, values[param_range.start : param_range.end], what
                )
            elif index in full_tensors:
                self._comm.broadcast_over_axis(self._comm.tensor_axis, full_tensors[index], what)
                flat.view(values, index).copy_(tp_shard.slice(full_tensors[index]))

    def _install_dtensors(self, flat: FlatParam) -> None:
        """Replace plain parameters that are tensor-parallel by DTensors: see [Note: tensor-parallel parameters]."""
        parameters = list(flat.parameters)
        for index, (name, parameter) in enumerate(flat.named_parameters):
            tp_param = flat.tp_params[index]
            if tp_param is None or self._tp_state is None:
                continue
            if isinstance(parameter, DTensor):
                set_data_and_dtype(parameter, flat.views[index], tp_param)  # its compute dtype may differ
                continue
            new = nn.Parameter(tp_param.to_dtensor(flat.views[index]), requires_grad=parameter.requires_grad)
            self._original_classes[id(new)] = type(new)
            self._tp_state.replace_param(name, new)
            parameter.data = flat.placeholder(parameter.shape)
            parameters[index] = new
        flat.parameters = tuple(parameters)

    def _init_meta_modules(self, spec: UnitSpec) -> None:
        """Initialise the unit's modules that were built on the meta device."""
        inside = set(spec.parameters)
        for name, module in self._model.named_modules() if inside & self._meta_param_names else ():
            own = {key for key, _ in module.named_parameters(name, recurse=False)}
            if not own & inside & self._meta_param_names:
                continue
            if not own <= inside:
                raise ValueError(
                    f"{name!r} shares {sorted(own - inside)} with another unit, so it cannot be initialised alone from "
                    "the meta device: build the model on a real device"
                )
            self._init_meta_module(name, module)

    def _init_meta_module(self, name: str, module: nn.Module) -> None:
        self._materialize_buffers(module)
        reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
        if self._init_fn is not None:
            self._init_fn(module)
        elif callable(reset):
            reset()
        else:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters(): "
                "pass shard(init_fn=…), which is called on each such module"
            )

    def _materialize_buffers(self, module: nn.Module) -> None:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=self._comm.device)

    def _move_buffers_to_device(self) -> None:
        """Move buffers to the device; initialise meta buffers of modules without parameters."""
        for name, module in self._model.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                self._init_meta_module(name, module)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._comm.device:
                    module._buffers[key] = buffer.to(self._comm.device)
