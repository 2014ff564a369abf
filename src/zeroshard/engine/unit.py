"""Unit: the parameters that are all-gathered and reduced together; it unshards and reshards them."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.comm import CollectiveWork, Communicator
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.parameter import (
    GatheredBlock,
    ParamClasses,
    ParamInfo,
    data_ptrs,
    local_data,
    param_versions,
    set_data,
    set_data_all,
)
from zeroshard.memory import MemoryTracker, SideStream
from zeroshard.sharding import Range
from zeroshard.tensor_parallel import TPParam

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine


MAX_FORWARD_EDIT_CHECKS = 2  # forwards after which the values are compared


class UnitState(enum.Enum):
    """How much of a unit's parameters is in memory."""

    SHARDED = enum.auto()  # only this rank's shard
    UNSHARDING = enum.auto()  # the full storage, while the all-gather fills it
    UNSHARDED = enum.auto()  # the full parameters


class GatheredEditDetector:
    """Detects in-place changes to a partitioned unit's parameters while they are unsharded.

    Version counters show all changes except those through ``parameter.data``, at 0.1 µs per parameter. So the first few
    times the values are compared as well: a forward that changes its weights does so every time.
    """

    def __init__(self) -> None:
        self._checksums_left = 4  # all-gathers: two forwards, two backwards
        self._versions: list[int] = []
        self._checksums: list[torch.Tensor] = []

    def record_versions(self, flats: list[FlatParam]) -> None:
        """Record the version counters when an all-gather starts."""
        self._versions, self._checksums = _flat_versions(flats), []

    def record_checksums(self, flats: list[FlatParam]) -> None:
        """Record checksums of the values when the all-gather is complete."""
        if self._checksums_left:
            self._checksums = [_checksum(flat.full) for flat in flats]

    def reset(self, flats: list[FlatParam]) -> None:
        """Record versions and checksums again, after the changes have been written back."""
        if self._versions:
            self._versions = _flat_versions(flats)
        if self._checksums:
            self.record_checksums(flats)

    def describe_edits(self, flats: list[FlatParam], keep_record: bool = False) -> str | None:
        """Describe what changed since the record, or return None. Drop the record unless ``keep_record``."""
        old_versions, checksums, versions = self._versions, self._checksums, _flat_versions(flats)
        if not keep_record:
            self._versions, self._checksums = [], []
        if versions != old_versions:
            names = [name for flat in flats for name in flat.names]
            return next(repr(n) for n, old, new in zip(names, old_versions, versions, strict=True) if old != new)
        for flat, checksum in zip(flats if checksums else [], checksums, strict=True):
            if not torch.equal(_checksum(flat.full), checksum):
                return f"{flat.names[0]!r}" + (f", or another of {flat.names[1:]}," if len(flat.names) > 1 else "")
        self._checksums_left -= bool(checksums) and not keep_record
        return None


def _flat_versions(flats: list[FlatParam]) -> list[int]:
    return [version for flat in flats for version in param_versions(flat.parameters)]


@torch.no_grad()
def _checksum(full: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as integers: this allocates no memory."""
    data = full.view(torch.uint8)
    even = data.numel() // 8 * 8
    return data[:even].view(torch.int64).sum() + data[even:].sum()


def _raise_if_edited(edited: str | None) -> None:
    """Raise if :class:`GatheredEditDetector` has found a change."""
    if edited is not None:
        raise RuntimeError(
            f"the values of {edited} were changed in place during a forward or backward, where they are a copy that is "
            "gathered for the pass: the change would be lost. Compute what is to be used from the parameter in "
            "forward, without changing it (weight = self.weight.clamp(…)), or change it after step() inside "
            "`with zeroshard.gathered(model, write_rank=0):`"
        )


class Unit:
    """Parameters that go through unshard → wait → use → reshard together.

    Partitioned units free their full storage between uses; replicated units keep it.
    """

    def __init__(
        self,
        name: str,
        flats: list[FlatParam],
        comm: Communicator,
        tracker: MemoryTracker,
        all_gather_stream: SideStream,
        is_partitioned: bool,
    ) -> None:
        self.name = name
        self.flats = flats
        self.is_partitioned = is_partitioned
        self.is_trainable = any(flat.is_trainable for flat in flats)
        self.state = UnitState.UNSHARDED
        # inside gathered(): the parameters have full values in separate memory, in any state
        self.gathered_block: GatheredBlock | None = None
        # versions and addresses of each flat's parameters at entry to gathered()
        self._edit_snapshot_at_entry: list[tuple[list[int], list[int]]] = []
        self.is_storage_detached = False  # SHARDED, and the parameters do not point at the flat's memory
        self._has_exposed_grads = False
        self._unguarded: list[ParamClasses] = []  # partitioned: all other parameters are guarded
        self.has_returned_views = False  # partitioned: a forward has returned tensors that share its storage
        self.is_released_to_host = False  # replicated: its values are in host memory, see offload_states.py
        self.is_stale = False  # replicated: its updated values are still being computed on the host
        self.all_gather_label = f"gather unit {name!r}"
        self.gather_copy_label = f"gather a copy of unit {name!r}"
        self.reduce_label = f"reduce unit {name!r}"
        self.engine: Callable[[], Engine | None] = lambda: None  # a weak reference, set by the engine
        self._comm = comm
        self._tracker = tracker
        self._all_gather_stream = all_gather_stream
        self._pending_gathers: list[CollectiveWork] = []
        self._all_gather_event: torch.Event | None = None
        self._param_classes: list[ParamClasses] = []  # of all parameters
        self._param_classes_by_module: dict[str, list[ParamClasses]] = {}  # the parameters that each module may use
        self._edit_detector = GatheredEditDetector()
        self._data_aliases: list[weakref.ref[torch.Tensor]] = []  # replicated: ``parameter.data`` in the user's hands
        self._edit_checks_left = MAX_FORWARD_EDIT_CHECKS  # a forward may change values through ``parameter.data``
        self._has_forward_edits = False  # such a forward was found

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the unit."""
        return (parameter for flat in self.flats for parameter in flat.parameters)

    @property
    def has_gathered_copy(self) -> bool:
        """Whether the parameters have full values in separate memory: see :meth:`gather_copy`."""
        return self.gathered_block is not None

    @property
    def needs_master_sync(self) -> bool:
        """Whether the unit is replicated and the optimizer updates master weights, not the parameters."""
        return not self.is_partitioned and any(flat.master is not None for flat in self.flats)

    @property
    def is_guarded(self) -> bool:
        """Whether the next use of the unit is intercepted although it is unsharded."""
        return self.state is UnitState.UNSHARDED and not self._unguarded

    @cached_property
    def full_bytes(self) -> int:
        """Allocated bytes of the full parameters."""
        return sum(flat.alloc_bytes for flat in self.flats)

    def bind(self, original_classes: dict[int, type[nn.Parameter]]) -> None:
        """Point every parameter at its view of the flat, and attach its ParamInfo."""
        for flat in self.flats:
            for index, parameter in enumerate(flat.parameters):
                original = original_classes[id(parameter)]
                set_data(parameter, flat.views[index])
                parameter._zeroshard = ParamInfo(flat.names[index], self, flat, index)  # type: ignore[attr-defined]
                self._param_classes.append(ParamClasses(parameter, original))
            flat.known_versions = param_versions(flat.parameters)

    def add_module(self, name: str, module: nn.Module) -> None:
        """Register a module that the unit is unsharded for: record which of the unit's parameters the module has."""
        own = {id(parameter) for parameter in module.parameters()}
        self._param_classes_by_module[name] = [
            classes for classes in self._param_classes if id(classes.parameter) in own
        ]

    def init_sharded(self) -> None:
        """Put a new partitioned unit into the SHARDED state: only its shard is in memory."""
        self._set_classes(guarded=True)
        self.state = UnitState.SHARDED
        self.detach_storage()

    def detach_storage(self) -> None:
        """Point the guarded parameters at a NaN placeholder: see [Note: guarded parameters]."""
        if self.is_partitioned and self.state is UnitState.SHARDED and not self.is_storage_detached:
            self._set_param_data("placeholders")
            self.is_storage_detached = True

    def _set_param_data(self, views: str) -> None:
        if self.has_gathered_copy:
            return
        for flat in self.flats:
            set_data_all(flat.parameters, getattr(flat, views), flat.has_dtensors)

    def start_unshard(self, include_frozen: bool = False) -> None:
        """Start the all-gather of the full parameters. They are usable after :meth:`wait_for_unshard`.

        In a replicated unit only trained parameters can have changed on other ranks: ``include_frozen`` gathers all.
        """
        if self.is_storage_detached:
            self._set_param_data("views")
            self.is_storage_detached = False
        if self.is_partitioned and self.state is UnitState.SHARDED:
            for flat in self.flats:
                flat.full.untyped_storage().resize_(flat.alloc_bytes)
            self._tracker.add("gathered", self.full_bytes)
            self._edit_detector.record_versions(self.flats)
        elif not self.is_partitioned:
            self._set_classes(guarded=True)  # until the new values have arrived
        self.is_stale = False
        gathered = [flat for flat in self.flats if self.is_partitioned or flat.is_trainable or include_frozen]
        for flat in gathered:
            flat.wait_for_update()
        with self._all_gather_stream:
            self._pending_gathers = self._start_all_gathers(gathered)
        self._all_gather_event = self._all_gather_stream.record_event()
        self.state = UnitState.UNSHARDING

    def mark_stale(self) -> None:
        """Guard the parameters of a replicated unit while the host computes their new values."""
        self._set_classes(guarded=True)
        self.is_stale = True

    def wait_for_unshard(self, module: str | None = None) -> None:
        """Wait for the all-gather and unguard the parameters.

        With ``module``, only those of this module: the other parameters of a partitioned unit stay guarded.
        """
        was_unsharding = self.state is UnitState.UNSHARDING
        if was_unsharding:
            self._wait_all_gather()
            self.state = UnitState.UNSHARDED
            if self.is_partitioned:
                self._edit_detector.record_checksums(self.flats)
        if self.is_partitioned and self.state is UnitState.UNSHARDED:
            self._unguard(
                self._param_classes
                if module is None
                else self._param_classes_by_module.get(module, self._param_classes)
            )
        elif was_unsharding:
            self._set_classes(guarded=False) if self._has_exposed_grads else self._restore_classes()

    def _unguard(self, param_classes: list[ParamClasses]) -> None:
        if len(self._unguarded) == len(self._param_classes):
            return
        guarded = [classes for classes in param_classes if classes.parameter.__class__ is not classes.original]
        for classes in guarded:
            classes.parameter.__class__ = classes.original
        self._unguarded = self._unguarded + guarded if self._unguarded else guarded

    def guard(self) -> None:
        """Intercept the next use of a partitioned unit's parameters, although they are still unsharded."""
        if self.is_partitioned and self.state is UnitState.UNSHARDED:
            self._guard()

    def _guard(self) -> None:
        has_copy = self.has_gathered_copy
        for classes in self._unguarded:
            classes.parameter.__class__ = classes.gathered if has_copy else classes.guarded
        self._unguarded = []

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

    def reshard(self) -> None:
        """Free the full parameters of a partitioned unit."""
        if not self.is_partitioned or self.state is UnitState.SHARDED:
            return
        self._wait_all_gather()  # of an unused all-gather: its memory must not be freed while it is written
        edited = None if self.has_gathered_copy else self._edit_detector.describe_edits(self.flats)
        self._guard()
        moved = [flat.free(self.has_returned_views) for flat in self.flats]
        self.has_returned_views = False
        if any(moved):
            self._set_param_data("views")
        self._tracker.add("gathered", -self.full_bytes)
        self.state = UnitState.SHARDED
        _raise_if_edited(edited)

    def accept_edits(self) -> None:
        """Treat the current unsharded values as unchanged from here on."""
        if self.is_partitioned and self.state is not UnitState.SHARDED:
            self._edit_detector.reset(self.flats)

    def record_data_alias(self, values: torch.Tensor) -> None:
        """Remember that the user got ``parameter.data`` of a replicated unit and may write to it while it is alive."""
        if not self.is_partitioned:
            self._data_aliases.append(weakref.ref(values))

    def may_be_edited(self) -> bool:
        """Return whether replicated parameters may have been changed without a change of their version counters.

        This is so if the user has ``parameter.data``, or had it since the last call, or if the forward itself was found
        to write through it.
        """
        if self.is_stale or self.is_released_to_host or self.state is not UnitState.UNSHARDED:
            return False
        was_read, self._data_aliases = (
            bool(self._data_aliases),
            [alias for alias in self._data_aliases if alias() is not None],
        )
        return was_read or self._has_forward_edits

    def detect_forward_edits(self) -> None:
        """Check after a forward whether it has changed replicated parameters through ``parameter.data``.

        Nothing intercepts that during forward, but such a forward does it every time: so the first few times the values
        are compared with their master weights.
        """
        if (
            self._edit_checks_left
            and self.needs_master_sync
            and self.state is UnitState.UNSHARDED
            and not (self.is_stale or self.is_released_to_host)
        ):
            self._edit_checks_left -= 1
            self._has_forward_edits = self._has_forward_edits or any(flat.differs_from_master() for flat in self.flats)

    def _wait_all_gather(self) -> None:
        for pending in self._pending_gathers:
            pending.wait()
        self._pending_gathers = []
        self._all_gather_stream.compute_wait_event(self._all_gather_event)
        self._all_gather_event = None

    def release_to_host(self) -> None:
        """Guard the parameters of a replicated unit and detach them: its values are now in host memory."""
        self.is_released_to_host = True
        self._set_classes(guarded=True)
        self._set_param_data("placeholders")

    def restore_from_host(self) -> None:
        """Undo :meth:`release_to_host`."""
        self.is_released_to_host = False
        for flat in self.flats:
            flat.known_data_ptrs = None  # their memory has moved
        self._set_param_data("views")
        self._set_classes(guarded=False) if self._has_exposed_grads else self._restore_classes()

    def expose_reduced_grads(self) -> None:
        """Make ``grad`` of the unguarded parameters return the reduced gradient."""
        if self.is_partitioned:
            for classes in self._unguarded:
                classes.parameter.__class__ = classes.reduced_grad
            return
        self._has_exposed_grads = True
        if self.state is UnitState.UNSHARDED and not self.is_stale and not self.is_released_to_host:
            self._set_classes(guarded=False)

    def hide_reduced_grads(self) -> None:
        """Give the unguarded parameters their plain class, as autograd and compilers know it."""
        if self.is_partitioned:
            for classes in self._unguarded:
                classes.parameter.__class__ = classes.original
            return
        self._has_exposed_grads = False
        if self.state is UnitState.UNSHARDED and not self.is_stale and not self.is_released_to_host:
            self._restore_classes()

    @torch.no_grad()
    def gather_copy(self) -> None:
        """Point the parameters at full values in new memory, which stays valid as long as a reference to it exists.

        The parameters point there until :meth:`drop_copy`: a forward or backward in between unshards and reshards as
        usual, but computes with these values.
        """
        if self.is_partitioned and self.state is not UnitState.SHARDED:
            _raise_if_edited(self._edit_detector.describe_edits(self.flats, keep_record=True))
        copies = []
        for flat in self.flats:
            if not self.is_partitioned:
                copies.append(flat.full.clone())
                continue
            full = torch.empty(flat.layout.numel, dtype=flat.dtype, device=flat.device)
            flat.wait_for_update()
            for index, bucket in enumerate(flat.layout.buckets):
                self._all_gather_bucket(
                    full[bucket.start : bucket.end], flat.local_shard(index), self.gather_copy_label
                )
            copies.append(full)
        for flat, full in zip(self.flats, copies, strict=True):
            set_data_all(flat.parameters, [flat.view(full, i) for i in range(len(flat.shapes))], flat.has_dtensors)
        self.gathered_block = GatheredBlock()
        self._edit_snapshot_at_entry = self._edit_snapshot()
        self._set_guarded_classes()

    def drop_copy(self) -> None:
        """Drop the copy of :meth:`gather_copy`: the parameters are again as the unit's state says."""
        if self.gathered_block is None:
            return
        self.gathered_block.is_open = False
        edited = self.edited_params()
        self.gathered_block, self._edit_snapshot_at_entry = None, []
        if edited:  # the block's values are gone: no backward may use a graph made with them
            torch.autograd.graph.increment_version(edited)
            self.accept_edits()
        self.is_storage_detached = self.is_partitioned and self.state is UnitState.SHARDED
        self._set_param_data("placeholders" if self.is_storage_detached else "views")
        self._set_guarded_classes()

    def edited_params(self) -> list[nn.Parameter]:
        """Return the parameters that were changed in place, or got other ``data``, since :meth:`gather_copy`."""
        snapshots = (
            zip(self.flats, self._edit_snapshot_at_entry, self._edit_snapshot(), strict=True)
            if self.has_gathered_copy
            else ()
        )
        return [
            parameter
            for flat, old_snapshot, new_snapshot in snapshots
            if old_snapshot != new_snapshot
            for index, parameter in enumerate(flat.parameters)
            if any(old[index] != new[index] for old, new in zip(old_snapshot, new_snapshot, strict=True))
        ]

    def _edit_snapshot(self) -> list[tuple[list[int], list[int]]]:
        return [(param_versions(flat.parameters), data_ptrs(flat.parameters, flat.has_dtensors)) for flat in self.flats]

    def _set_guarded_classes(self) -> None:
        """Set the class that a partitioned unit's parameters have while no running module uses them."""
        unguarded = {id(classes) for classes in self._unguarded}
        for classes in self._param_classes if self.is_partitioned else ():
            if id(classes) not in unguarded:
                classes.parameter.__class__ = classes.gathered if self.has_gathered_copy else classes.guarded

    def check_param_data(self) -> None:
        """Raise if a parameter's shape, dtype or device is not the one it was sharded with."""
        for flat in self.flats:
            for index, (name, parameter) in enumerate(flat.named_parameters):
                values = local_data(parameter)
                expected, got = (
                    f"{tuple(shape)} {dtype} on {device}"
                    for shape, dtype, device in (
                        (flat.shapes[index], flat.dtype, flat.device),
                        (values.shape, values.dtype, values.device),
                    )
                )
                if expected != got:
                    raise RuntimeError(
                        f"{name!r} was sharded as {expected} and is {got} now: nothing was written. Change shape, "
                        "dtype or device before zeroshard.shard(), or after zeroshard.unwrap()"
                    )

    @torch.no_grad()
    def to_plain(self) -> None:
        """Convert to plain parameters: separate memory, original dtype, the master weights' values if there are any."""
        self.wait_for_unshard()
        self._restore_classes()
        for flat in self.flats:
            dtype = flat.dtype if flat.master is None else flat.master.dtype
            full = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
            for i, (bucket, shard_range) in enumerate(zip(flat.layout.buckets, flat.shard_ranges, strict=True)):
                shard = flat.local_shards[i] if flat.master is None else flat.master.read(shard_range, flat.device)
                self._all_gather_bucket(full[bucket.start : bucket.end], shard, self.all_gather_label)
            for index, parameter in enumerate(flat.parameters):
                view = flat.view(full, index)
                plain = torch.empty_strided(
                    view.shape, view.stride(), dtype=flat.original_dtypes[index], device=view.device
                )
                set_data_and_dtype(parameter, plain.copy_(view), flat.tp_params[index])
                parameter.grad = None
                del parameter._zeroshard  # type: ignore[attr-defined]

    @torch.no_grad()
    def write_back(self, src_rank: int | None) -> torch.Tensor:
        """Write the parameters' current full values back to shards and master weights.

        With ``src_rank``, those of this rank of the mesh. Returns whether any value in this rank's shard changed.
        """
        changed: list[torch.Tensor] = []
        self.check_param_data()
        for flat in self.flats:
            if flat.prefetcher is not None:
                flat.prefetcher.discard()
            for bucket in flat.layout.buckets:
                values = torch.zeros(bucket.numel, dtype=flat.dtype, device=flat.device)
                for part in flat.layout.params_in_bucket(bucket):
                    flattened = flat.flatten(local_data(flat.parameters[part.param_index]), part.param_index)
                    end = part.offset + part.elements.numel
                    values[part.offset : end] = flattened[part.elements.start : part.elements.end]
                if src_rank is not None:
                    self._comm.broadcast(values, src_rank, f"write unit {self.name!r}")
                    self._broadcast_tp_replicated(flat, bucket, values)
                changed.append(self._write_bucket(flat, bucket, values))
        self.accept_edits()
        return torch.stack(changed).any() if changed else torch.tensor(False)

    def _broadcast_tp_replicated(self, flat: FlatParam, bucket: Range, values: torch.Tensor) -> None:
        """Broadcast what is replicated over the tensor axis: the first rank's values count."""
        for param_range in flat.layout.params_in_bucket(bucket) if self._comm.tensor_axis.size > 1 else ():
            if flat.tp_shards[param_range.param_index] is None:
                param_values = values[param_range.offset : param_range.offset + param_range.elements.numel]
                self._comm.broadcast_over_axis(self._comm.tensor_axis, param_values, f"write unit {self.name!r}")

    def _write_bucket(self, flat: FlatParam, bucket: Range, values: torch.Tensor) -> torch.Tensor:
        """Write new values of a bucket; return whether any value in this rank's shard changed."""
        index = flat.layout.buckets.index(bucket)
        shard_range = flat.layout.bucket_shard(bucket, self._comm.shard_axis.rank).shift(-bucket.start)
        new = values[shard_range.start : shard_range.end]
        changed = (flat.local_shard(index).to(flat.device) != new).any()
        if flat.master is not None:  # first: on the device it may be the shard itself
            master = flat.master.read(flat.shard_ranges[index], flat.device)
            # unchanged elements keep their exact master value
            updated = torch.where(master.to(flat.dtype) == new, master, new.to(master.dtype))
            flat.master.write(flat.shard_ranges[index], updated)
        if not flat.is_partitioned:
            flat.bucket_views[index].copy_(values)
        elif not flat.is_cast_from_master:
            flat.local_shards[index].copy_(new)
        return changed

    def _start_all_gathers(self, flats: list[FlatParam]) -> list[CollectiveWork]:
        pending: list[CollectiveWork] = []
        for flat in flats:
            inputs = flat.all_gather_inputs()
            if self._comm.shard_axis.size > 1:
                pairs = zip(flat.bucket_views, inputs, strict=True)
                pending += [self._comm.all_gather(full, shard, self.all_gather_label) for full, shard in pairs]
            elif inputs is not flat.shard_slots:  # one rank, with partitioned parameters
                torch._foreach_copy_(flat.shard_slots, inputs)
        return pending

    def _all_gather_bucket(self, output: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        """All-gather a bucket from shards in any tier, and wait for it."""
        shard = shard.to(output.device)
        if self._comm.shard_axis.size > 1:
            self._comm.all_gather(output, shard, what).wait()
        else:
            output.copy_(shard)

    def _set_classes(self, guarded: bool) -> None:
        for classes in self._param_classes:
            classes.parameter.__class__ = classes.guarded if guarded else classes.reduced_grad

    def _restore_classes(self) -> None:
        for classes in self._param_classes:
            classes.parameter.__class__ = classes.original


def set_data_and_dtype(parameter: nn.Parameter, values: torch.Tensor, tp_param: TPParam | None) -> None:
    """Set a parameter's values, perhaps of another dtype; the dtype of a DTensor changes with them."""
    if tp_param is not None:
        parameter.data = tp_param.to_dtensor(values)
    set_data(parameter, values)
