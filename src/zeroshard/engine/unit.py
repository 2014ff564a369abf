"""Unit: the parameters that are all-gathered and reduced together; it unshards and reshards them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.comm import CollectiveWork, Communicator
from zeroshard.engine.context import ShardContext
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.param_access import ParamAccess, ReplicatedEditDetector
from zeroshard.engine.param_data import set_data
from zeroshard.engine.parameter import GatheredBlock, ParamInfo, param_info
from zeroshard.memory import SideStream
from zeroshard.utils.profiling import label


class UnitState(enum.Enum):
    """Where a unit's full parameters are.

    A partitioned unit goes SHARDED → UNSHARDING → UNSHARDED → SHARDED. One that is retained from an earlier pass goes
    from UNSHARDED to UNSHARDING: it is all-gathered again, because other ranks may not have it any more. A replicated
    unit is UNSHARDED, and goes through UNSHARDING when the ranks exchange their updated shards, possibly from STALE.
    """

    SHARDED = enum.auto()  # only this rank's shard is in memory
    UNSHARDING = enum.auto()  # the full storage is allocated, and an all-gather fills it
    UNSHARDED = enum.auto()  # the full parameters are in memory
    STALE = enum.auto()  # replicated: the host still computes the new values
    ON_HOST = enum.auto()  # replicated: offload_states() has moved the values to host memory


_NEXT_STATES = {
    UnitState.SHARDED: {UnitState.UNSHARDING},
    UnitState.UNSHARDING: {UnitState.UNSHARDED, UnitState.UNSHARDING},
    UnitState.UNSHARDED: {UnitState.SHARDED, UnitState.UNSHARDING, UnitState.STALE, UnitState.ON_HOST},
    UnitState.STALE: {UnitState.UNSHARDING, UnitState.STALE},
    UnitState.ON_HOST: {UnitState.UNSHARDED},
}


class Unit:
    """Parameters that go through unshard → wait → use → reshard together.

    Partitioned units free their full storage between uses; replicated units keep it.
    """

    def __init__(self, name: str, flats: list[FlatParam], context: ShardContext, all_gather_stream: SideStream) -> None:
        self.name = name
        self.flats = flats
        self.is_partitioned = context.placement.parameters
        self.state = UnitState.UNSHARDED
        self.access = ParamAccess(flats, self.is_partitioned)
        self.replicated_edits = ReplicatedEditDetector(flats, is_compared=context.comm.data_parallel_size > 1)
        # inside gathered(): the parameters have full values in separate memory, in any state
        self.gathered_block: GatheredBlock | None = None
        self.has_returned_views = False  # partitioned: a forward has returned tensors that share its storage
        self.all_gather_label = f"gather unit {name!r}"
        self.gather_copy_label = f"gather a copy of unit {name!r}"
        self.reduce_label = f"reduce unit {name!r}"
        self._is_storage_detached = False  # SHARDED, and the parameters do not point at the flat's memory
        self._context = context
        self._all_gather_stream = all_gather_stream
        self._all_gather: tuple[list[CollectiveWork], torch.Event | None] = [], None  # while UNSHARDING

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the unit."""
        return (parameter for flat in self.flats for parameter in flat.parameters)

    @property
    def has_gathered_copy(self) -> bool:
        """Whether the parameters have full values in separate memory: the unit is inside ``gathered()``."""
        return self.gathered_block is not None

    @property
    def detects_edits(self) -> bool:
        """Whether the unit is replicated, and an edit must reach master weights or be the same on all ranks."""
        return not self.is_partitioned and (self.replicated_edits.has_masters or self.replicated_edits.is_compared)

    @property
    def is_guarded(self) -> bool:
        """Whether the next use of the unit is intercepted although it is unsharded."""
        return self.state is UnitState.UNSHARDED and not self.access.unguarded

    @cached_property
    def is_trainable(self) -> bool:
        """Whether any parameter requires a gradient."""
        return any(flat.spec.is_trainable for flat in self.flats)

    @cached_property
    def full_bytes(self) -> int:
        """Allocated bytes of the full parameters."""
        return sum(flat.spec.alloc_bytes for flat in self.flats)

    # -- construction -------------------------------------------------------------------------------------------

    def bind(self, original_classes: dict[int, type[nn.Parameter]]) -> None:
        """Point every parameter at its view of the flat, and attach its ParamInfo."""
        for flat in self.flats:
            for index, parameter in enumerate(flat.parameters):
                set_data(parameter, flat.views[index])
                parameter._zeroshard = ParamInfo(flat.names[index], self, flat, index)  # type: ignore[attr-defined]
                self.access.add_param(parameter, original_classes[id(parameter)])
        self.replicated_edits.record_versions()
        if self.is_partitioned:
            self.access.set_classes("guarded")
            self._enter(UnitState.SHARDED)
            self.detach_storage()

    # -- unshard and reshard ------------------------------------------------------------------------------------

    def start_unshard(self, include_frozen: bool = False) -> None:
        """Start the all-gather of the full parameters. They are usable after :meth:`wait_for_unshard`.

        In a replicated unit only trained parameters can have changed on other ranks: ``include_frozen`` gathers all.
        """
        if self._is_storage_detached:
            self._point_params_at("views")
            self._is_storage_detached = False
        if not self.is_partitioned:
            self.access.set_classes("guarded")  # until the new values have arrived
        elif self.state is UnitState.SHARDED:
            for flat in self.flats:
                flat.full.untyped_storage().resize_(flat.spec.alloc_bytes)
            self._context.tracker.add("gathered", self.full_bytes)
            self.access.record_versions()
        elif self.gathered_block is None and (error := self.access.find_edit(keep_record=True)) is not None:
            raise error  # else this all-gather would undo the edit, and nobody would notice
        gathered = [flat for flat in self.flats if self.is_partitioned or flat.spec.is_trainable or include_frozen]
        for flat in gathered:
            flat.wait_for_update()
            if flat.quantized is not None:
                nbytes = flat.quantized.allocate(is_full_in_use=self.state is UnitState.UNSHARDED)
                self._context.tracker.add("gathered", nbytes)
        with label("unshard {!r}", self.name), self._all_gather_stream:
            pending = _start_all_gathers(gathered, self._context.comm, self.all_gather_label)
        self._all_gather = pending, self._all_gather_stream.record_event()
        self._enter(UnitState.UNSHARDING)

    def mark_values_changed(self) -> None:
        """Have the next unshard take over new values where it uses more than this rank's shard."""
        for flat in self.flats:
            flat.mark_values_changed()

    def wait_for_unshard(self, module: str | None = None) -> None:
        """Wait for the all-gather and unguard the parameters.

        With ``module``, only those of this module: the other parameters of a partitioned unit stay guarded.
        """
        was_unsharding = self.state is UnitState.UNSHARDING
        if was_unsharding:
            self._wait_all_gather()
            self._enter(UnitState.UNSHARDED)
            if self.is_partitioned:
                self.access.record_checksums()
        if not self.is_partitioned:
            if was_unsharding:
                self.access.set_classes(self.access.unguarded_kind)
        elif self.state is UnitState.UNSHARDED:
            self.access.unguard(module)

    def _wait_all_gather(self) -> None:
        pending, event = self._all_gather
        with label("wait for unshard {!r}", self.name):
            for work in pending:
                work.wait()
            self._all_gather_stream.compute_wait_event(event)
        self._all_gather = [], None
        for flat in self.flats:
            if flat.quantized is not None:
                self._context.tracker.add("gathered", -flat.quantized.free())

    def reshard(self) -> None:
        """Free the full parameters of a partitioned unit."""
        if not self.is_partitioned or self.state is UnitState.SHARDED:
            return
        if self.state is UnitState.UNSHARDING:  # unused: its memory must not be freed while the all-gather writes it
            self._wait_all_gather()
            self._enter(UnitState.UNSHARDED)
        error = self.access.find_edit() if self.gathered_block is None else None
        self.access.guard()
        moved = error is not None  # a parameter's data may have been replaced
        for flat in self.flats:
            moved |= flat.free(self.has_returned_views)
        self.has_returned_views = False
        if moved:
            self._point_params_at("views")
        self._context.tracker.add("gathered", -self.full_bytes)
        self._enter(UnitState.SHARDED)
        if error is not None:
            raise error

    def detach_storage(self) -> None:
        """Point the guarded parameters at a NaN placeholder: see [Note: guarded parameters]."""
        if self.is_partitioned and self.state is UnitState.SHARDED and not self._is_storage_detached:
            self._point_params_at("placeholders")
            self._is_storage_detached = True

    def owns_storage_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the storage of the full parameters."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if type(tensor) is not torch.Tensor:  # the parameter itself
            return False
        addresses = [flat.full.untyped_storage().data_ptr() for flat in self.flats if flat.layout.numel]
        try:
            return tensor.untyped_storage().data_ptr() in addresses
        except (NotImplementedError, RuntimeError):  # it has no storage: sparse, or wrapped by vmap
            return False

    def accept_edits(self) -> None:
        """Treat the current unsharded values of a partitioned unit as unchanged from here on."""
        if self.is_partitioned and self.state is not UnitState.SHARDED:
            self.access.accept_edits()

    def _enter(self, state: UnitState) -> None:
        if state not in _NEXT_STATES[self.state]:
            raise AssertionError(f"unit {self.name!r} cannot go from {self.state.name} to {state.name}")
        self.state = state

    # -- replicated units ---------------------------------------------------------------------------------------

    def mark_stale(self) -> None:
        """Guard the parameters of a replicated unit while the host computes their new values."""
        self.wait_for_unshard()
        self.access.set_classes("guarded")
        self._enter(UnitState.STALE)

    def release_to_host(self) -> None:
        """Guard the parameters of a replicated unit and detach them: its values are now in host memory."""
        self._enter(UnitState.ON_HOST)
        self.access.set_classes("guarded")
        self._point_params_at("placeholders")

    def restore_from_host(self) -> None:
        """Undo :meth:`release_to_host`."""
        self._enter(UnitState.UNSHARDED)
        self.replicated_edits.forget_data_ptrs()
        self._point_params_at("views")
        self.access.set_classes(self.access.unguarded_kind)

    def record_data_alias(self, values: torch.Tensor) -> None:
        """Remember that the user got ``parameter.data`` and may write to it: see [Note: edits of parameters]."""
        if self.is_partitioned:
            self.access.record_checksums(is_data_read=True)
        else:
            self.replicated_edits.record_data_alias(values)

    def record_checksum(self) -> None:
        """Record a checksum of a replicated unit before its parameters are edited, if its values are there."""
        if self.state is UnitState.UNSHARDING:
            self.wait_for_unshard()
        if self.state is UnitState.UNSHARDED:
            self.replicated_edits.record_checksum()

    # -- what an access to a parameter meets --------------------------------------------------------------------

    def guard(self) -> None:
        """Intercept the next use of a partitioned unit's parameters, although they are still unsharded."""
        if self.access.unguarded and self.state is UnitState.UNSHARDED:
            self.access.guard()

    def expose_reduced_grads(self) -> None:
        """Make ``grad`` of the unguarded parameters return the reduced gradient."""
        self.access.set_unguarded_kind("reduced_grad", self.state is UnitState.UNSHARDED)

    def hide_reduced_grads(self) -> None:
        """Give the unguarded parameters their plain class, as autograd and compilers know it."""
        self.access.set_unguarded_kind("original", self.state is UnitState.UNSHARDED)

    def _point_params_at(self, tensors: str) -> None:
        """Set the parameters' data to the flats' ``views`` or ``placeholders``, except inside ``gathered()``."""
        if self.gathered_block is None:
            for flat in self.flats:
                flat.set_param_data(getattr(flat, tensors))

    # -- inside gathered(): see unit_values.py ------------------------------------------------------------------

    def enter_block(self, block: GatheredBlock, copies: Sequence[torch.Tensor]) -> None:
        """Point the parameters at full values in separate memory, one tensor with the layout of each flat.

        A forward or backward until :meth:`leave_block` unshards and reshards as usual, but computes with these values.
        """
        for flat, full in zip(self.flats, copies, strict=True):
            flat.set_param_data([flat.view(full, index) for index in range(len(flat.shapes))])
        self.gathered_block = block
        self.access.set_guarded_kind("gathered")

    def leave_block(self) -> None:
        """Make the parameters again what the unit's state says."""
        self.gathered_block = None
        self._is_storage_detached = self.is_partitioned and self.state is UnitState.SHARDED
        self._point_params_at("placeholders" if self._is_storage_detached else "views")
        self.access.set_guarded_kind("guarded")

    def release_params(self) -> None:
        """Make the parameters plain, without gradients: they no longer belong to the unit."""
        self.access.set_classes("original")
        for parameter in self.parameters:
            parameter.grad = None
            del parameter._zeroshard  # type: ignore[attr-defined]


def _start_all_gathers(flats: list[FlatParam], comm: Communicator, what: str) -> list[CollectiveWork]:
    pending: list[CollectiveWork] = []
    for flat in flats:
        inputs = flat.all_gather_inputs()
        if flat.quantized is not None:
            pending += flat.quantized.start(flat.bucket_views, inputs, flat.inner, what)
        elif flat.inner is not None:
            pending += flat.inner.start_gathers(flat.bucket_views, inputs, comm, what)
        elif comm.shard_axis.size > 1:
            for full, shard in zip(flat.bucket_views, inputs, strict=True):
                pending.append(comm.all_gather(full, shard, what))
        elif inputs is not flat.shard_slots:  # one rank, with partitioned parameters
            torch._foreach_copy_(flat.shard_slots, inputs)
    return pending


def unit_of(parameter: torch.Tensor) -> Unit | None:
    """Return the unit of a managed parameter, None for any other tensor."""
    info = param_info(parameter)
    unit = info.unit() if info is not None else None
    return unit if isinstance(unit, Unit) else None
