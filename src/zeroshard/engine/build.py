"""Building: from a plain model to units that hold their partitions, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.comm import Communicator
from zeroshard.config import Config
from zeroshard.engine.checks import check_modules, check_parameters
from zeroshard.engine.flat import Flat, share_rooms
from zeroshard.engine.unit import Unit, refill
from zeroshard.engine.units import Plan
from zeroshard.layout import FlatLayout, Range
from zeroshard.memory.arena import Arena
from zeroshard.memory.lane import Lane
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.pool import Pool
from zeroshard.memory.spread import Spread, Stretch
from zeroshard.memory.tiers import Tiers
from zeroshard.placement import Placement
from zeroshard.precision import Precision
from zeroshard.rests import GRANULES, Body, granules, place
from zeroshard.tensor.division import Division


def check_model(model: nn.Module, divided: bool) -> None:
    """Refuse what cannot be sharded, with the parameter's name. ``divided``: there is a tensor axis."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, got {type(model).__name__}")
    check_modules(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name!r} is not initialised yet: run one forward of the lazy module before shard()")
        if isinstance(parameter, DTensor) and not divided:
            raise ValueError(
                f"{name!r} is a DTensor: give shard() the mesh it is divided over, whose last axis is named 'tensor'"
            )
        if hasattr(parameter, "_zeroshard"):
            raise ValueError(f"{name!r} is sharded already: call zeroshard.unshard() on its model first")
    check_parameters(model)


def _make_real(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a meta parameter memory without changing which object it is."""
    real = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]


class Builder:
    """Makes the units of one model."""

    def __init__(
        self,
        model: nn.Module,
        plans: list[Plan],
        trained: set[int],
        config: Config,
        placement: Placement,
        precision: Precision,
        comm: Communicator,
        ledger: Ledger,
        pool: Pool,
        tiers: Tiers,
        state_bytes: int,
        division: Division | None = None,
    ) -> None:
        self._model, self._config = model, config
        self._tiers = tiers
        self._state_bytes = state_bytes  # of an element in fp32, of the optimizer's states, the master's not
        self._partitioned_gradients = placement.gradients
        self._division = division
        self._divided = division.parameters if division is not None else {}
        self._comm, self._ledger, self._precision, self._pool = comm, ledger, precision, pool
        self._partitioned = placement.parameters
        self._parameters = dict(model.named_parameters())
        self._classes = {id(p): type(p) for p in self._parameters.values()}
        self._from_meta = {name for name, p in self._parameters.items() if p.is_meta}
        self._trained = trained  # ids of the parameters an optimizer updates
        self._plans = plans
        lane = Lane(comm.device, comm.stopwatch)
        self.units = [Unit(p.name, self._flats(p), comm, ledger, lane, self._partitioned) for p in plans]
        share_rooms([flat for unit in self.units for flat in unit.flats])

    def build(self) -> list[Unit]:
        """Place shards in arenas, then fill them unit by unit: never more than the shards and one whole unit."""
        flats = [flat for unit in self.units for flat in unit.flats]
        self._place_rests(flats)
        near = {flat: self._near_masters(flat) for flat in flats}
        numel = sum(span.numel for spans in near.values() for span in spans)
        masters = Arena("master weights", numel, torch.float32, self._pool, self._ledger) if numel else None
        shards: dict[torch.dtype, Arena] = {}
        self._ledger.add("parameters", 0)  # to be told, though a rank may keep none
        resting = [flat for flat in flats if self._partitioned and not flat.far and not self._is_cast(flat)]
        for dtype in dict.fromkeys(flat.dtype for flat in resting):
            numel = sum(flat.layout.shard_numel for flat in resting if flat.dtype == dtype)
            shards[dtype] = Arena("parameters", numel, dtype, self._pool, self._ledger)
        reader = self._tiers.reader([flat.layout.shard_numel * flat.dtype.itemsize for flat in flats if flat.on_disk])
        for unit, plan in zip(self.units, self._plans, strict=True):
            for flat in unit.flats:
                self._place(flat, shards)
                flat.reader = reader if flat.on_disk else None
                if self._has_master(flat):
                    flat.master = self._master(flat, masters, near[flat])
            self._fill(unit, plan)
        self._buffers()
        if self._comm.device.type == "cuda" and self._config.defragment:
            torch.cuda.empty_cache()  # what units were staged in is as large as they are whole, and of no use any more
        return self.units

    def _place_rests(self, flats: list[Flat]) -> None:
        """Say in which tier each state of each flat rests."""
        offload = self._config.offload
        if offload is None:
            for flat in flats:
                flat.rest.optimizer = [(Range(0, flat.layout.shard_numel), "device")]
            return
        bodies = [
            Body(
                flat.homes,
                self._is_trained(flat),
                flat.dtype.itemsize,
                self._precision.reduce_dtype(flat.dtype).itemsize,
                self._exact(flat).itemsize + self._state_bytes * self._exact(flat).itemsize // 4,
            )
            for flat in flats
        ]
        buffers = self._tiers.buffers(bodies)
        rests, self._tiers.host_left = place(bodies, offload, self._partitioned_gradients, buffers)
        for flat, rest in zip(flats, rests, strict=True):
            flat.rest = rest

    def _place(self, flat: Flat, shards: dict[torch.dtype, Arena]) -> None:
        """Allocate a flat: its shard in its tier, if it keeps one, or all of it on the device."""
        shard, numel = None, flat.layout.shard_numel
        if self._partitioned and flat.far:
            shard = self._tiers.zeros("parameters", flat.rest.parameters, numel, flat.dtype, pinned=True)
        elif self._partitioned and not self._is_cast(flat):
            shard = shards[flat.dtype].take(numel)
        # What is partitioned has its full memory for a moment only: the pool would keep it, for one unit's size.
        with nullcontext() if self._partitioned else self._pool:
            flat.place(self._comm, self._partitioned, shard)
        if not self._partitioned:
            self._ledger.add("parameters", flat.full.nbytes)

    def _exact(self, flat: Flat) -> torch.dtype:
        """The dtype that a flat is updated in."""
        return torch.float32 if self._precision.has_master(flat.dtype) else flat.dtype

    def _near_masters(self, flat: Flat) -> list[Range]:
        """The stretches of which the device has a copy for the optimizer, beside the one in computation."""
        if not self._has_master(flat) or (self._exact(flat) == flat.dtype and not flat.far):
            return []
        return [span for span, tier in flat.rest.optimizer if tier == "device"]

    def _master(self, flat: Flat, arena: Arena | None, near: list[Range]) -> Spread:
        """What the optimizer updates: stretches in their tiers, and this rank's part itself where that will do."""
        stretches: list[Stretch] = []
        for span, tier in flat.rest.optimizer:
            if tier != "device":
                for part in granules(span, flat.homes, GRANULES[tier]):
                    tensor = self._tiers.zeros("master weights", tier, part.numel, self._exact(flat))
                    stretches.append(Stretch(part, tier, tensor))
            elif span in near and arena is not None:
                stretches.append(Stretch(span, tier, arena.take(span.numel)))
            else:
                for home, owned in zip(flat.homes, flat.owned, strict=True):
                    common = span.meet(home)
                    if common is not None:
                        part = common.moved(-home.start)
                        stretches.append(Stretch(common, tier, owned[part.start : part.end]))
        return Spread(stretches)

    def _flats(self, plan: Plan) -> list[Flat]:
        kinds: dict[tuple[torch.dtype, bool], list[str]] = {}
        for name in plan.parameters:
            parameter = self._parameters[name]
            kind = (self._precision.compute_dtype(name, parameter), parameter.requires_grad)
            kinds.setdefault(kind, []).append(name)
        flats = []
        for (dtype, _), names in kinds.items():
            parameters = [self._parameters[name] for name in names]
            divided = [self._divided.get(name) for name in names]
            shares = [d.share if d is not None else None for d in divided]
            numels = [
                share.local_shape.numel() if share is not None else p.numel()
                for p, share in zip(parameters, shares, strict=True)
            ]
            layout = FlatLayout.build(numels, self._config.bucket_size, self._comm.shard.size)
            flats.append(Flat(names, parameters, layout, dtype, self._comm.device, divided))
        return flats

    def _is_trained(self, flat: Flat) -> bool:
        return flat.trainable and any(id(parameter) in self._trained for parameter in flat.parameters)

    def _has_master(self, flat: Flat) -> bool:
        """Whether an optimizer updates something else than the parameters in computation: exacter, or elsewhere."""
        apart = self._precision.has_master(flat.dtype) or flat.rest.far or flat.far
        return self._is_trained(flat) and apart

    def _is_cast(self, flat: Flat) -> bool:
        """Whether a partitioned flat keeps its master alone: see [Note: cast on gather]."""
        near = not flat.far and not flat.rest.far
        return self._config.casts_masters and near and self._has_master(flat) and self._exact(flat) != flat.dtype

    @torch.no_grad()
    def _fill(self, unit: Unit, plan: Plan) -> None:
        staged = [self._stage(flat) for flat in unit.flats]
        self._initialise(plan)
        for flat, (values, wholes) in zip(unit.flats, staged, strict=True):
            self._share_out(flat, values, wholes)
            for bucket in flat.layout.buckets:  # rank 0's values count, as under DDP
                self._comm.broadcast(values[bucket.start : bucket.end], 0, f"share unit {unit.name!r}")
            flat.scatter(values, self._comm.shard.rank)
            self._replace_divided(flat)
        unit.bind(self._classes)
        for values, wholes in staged:
            self._ledger.add("staging", -values.nbytes - sum(whole.nbytes for whole in wholes.values()))
        if self._partitioned:
            unit.start_released()

    def _stage(self, flat: Flat) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Lay the parameters' values, or room for them, out as the flat does; apart, whole what is to be divided."""
        dtype = flat.dtype if flat.master is None else flat.master.dtype
        values = torch.zeros(flat.layout.numel, dtype=dtype, device=self._comm.device)
        wholes: dict[int, torch.Tensor] = {}
        for index, parameter in enumerate(flat.parameters):
            view = flat.view(values, index)
            if isinstance(parameter, DTensor):  # the user's: divided already
                self._copy_divided(flat.names[index], parameter, view)
                continue
            if flat.shares[index] is not None:
                view = wholes[index] = torch.empty(parameter.shape, dtype=dtype, device=self._comm.device)
            if parameter.is_meta:
                _make_real(parameter, view)
            else:
                view.copy_(parameter.data)
                parameter.data = view
        self._ledger.add("staging", values.nbytes + sum(whole.nbytes for whole in wholes.values()))
        return values, wholes

    def _copy_divided(self, name: str, parameter: DTensor, view: torch.Tensor) -> None:
        if parameter.is_meta:
            raise ValueError(
                f"{name!r} is a DTensor on the meta device: leave it to shard() to divide a model that was built there"
            )
        view.copy_(parameter.to_local())
        parameter._local_tensor = view

    def _share_out(self, flat: Flat, values: torch.Tensor, wholes: dict[int, torch.Tensor]) -> None:
        """Bring the first tensor rank's values to all of its axis, and keep this rank's share of what is divided."""
        if self._comm.tensor.size == 1:
            return
        for index, share in enumerate(flat.shares):
            what = f"share {flat.names[index]!r} over the tensor axis"
            if share is None:
                place = flat.layout.parameter(index)
                self._comm.broadcast_over(self._comm.tensor, values[place.start : place.end], what)
            elif index in wholes:
                self._comm.broadcast_over(self._comm.tensor, wholes[index], what)
                flat.view(values, index).copy_(share.take(wholes[index]))

    def _replace_divided(self, flat: Flat) -> None:
        """Put DTensors in the place of plain parameters that are divided: see [Note: divided parameters]."""
        parameters = list(flat.parameters)
        for index, (name, parameter) in enumerate(flat.named_parameters):
            divided = flat.divided[index]
            if divided is None or self._division is None:
                continue
            if isinstance(parameter, DTensor):
                refill(parameter, flat.views[index], divided)  # its dtype may be another in computation
                continue
            new = nn.Parameter(divided.wrap(flat.views[index]), requires_grad=parameter.requires_grad)
            self._classes[id(new)] = type(new)
            self._division.replace(name, new)
            parameter.data = flat.stand_in(parameter.shape)
            parameters[index] = new
        flat.parameters = tuple(parameters)

    def _initialise(self, plan: Plan) -> None:
        """Run the initialisation of the unit's modules that were built on the meta device."""
        here = set(plan.parameters)
        for name, module in self._model.named_modules():
            own = {key for key, _ in module.named_parameters(name, recurse=False)}
            if not own & here & self._from_meta:
                continue
            if not own <= here:
                raise ValueError(
                    f"{name!r} shares {sorted(own - here)} with another unit, so it cannot be initialised alone from "
                    "the meta device: build the model on a real device"
                )
            self._initialise_module(name, module)

    def _initialise_module(self, name: str, module: nn.Module) -> None:
        self._buffers_of(module)
        reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
        if self._config.init_fn is not None:
            self._config.init_fn(module)
        elif callable(reset):
            reset()
        else:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters(): "
                "pass shard(init_fn=…), which is called on each such module"
            )

    def _buffers_of(self, module: nn.Module) -> None:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=self._comm.device)

    def _buffers(self) -> None:
        """Bring buffers to the device; those of modules without parameters are initialised here."""
        for name, module in self._model.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                self._initialise_module(name, module)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._comm.device:
                    module._buffers[key] = buffer.to(self._comm.device)
