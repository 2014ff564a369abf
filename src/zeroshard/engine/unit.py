"""Unit: the parameters that are gathered and reduced together, and how they come and go."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.comm.collectives import CollectiveWork, Communicator
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
from zeroshard.memory.streams import SideStream
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding.layout import Range
from zeroshard.tensor_parallel.parallelize import TPParam

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine


MAX_FORWARD_EDIT_CHECKS = 2  # at what a forward has left


class UnitState(enum.Enum):
    """What is in memory of a unit's full parameters."""

    SHARDED = enum.auto()  # nothing: only this rank's shard
    UNSHARDING = enum.auto()  # the full storage, being filled
    UNSHARDED = enum.auto()  # the full parameters


class GatheredEditDetector:
    """Finds that a partitioned unit's parameters were changed in place while they were gathered.

    Version counters tell of all changes but those of ``parameter.data``, for 0.1 µs a parameter. So the first few times
    the values themselves are compared, too: a forward that changes its weights does so every time.
    """

    def __init__(self) -> None:
        self._checksums_left = 4  # gathers: two forwards, two backwards
        self._versions: list[int] = []
        self._checksums: list[torch.Tensor] = []

    def record_versions(self, flats: list[FlatParam]) -> None:
        """A gather begins."""
        self._versions, self._checksums = _flat_versions(flats), []

    def record_checksums(self, flats: list[FlatParam]) -> None:
        """The values are in place."""
        if self._checksums_left:
            self._checksums = [_checksum(flat.full) for flat in flats]

    def reset(self, flats: list[FlatParam]) -> None:
        """What was changed has been taken over, if the values are in place."""
        if self._versions:
            self._versions = _flat_versions(flats)
        if self._checksums:
            self.record_checksums(flats)

    def describe_edits(self, flats: list[FlatParam], keep_record: bool = False) -> str | None:
        """What was changed since then, in words, or None. The values are about to go, unless they ``stay``."""
        before, sums, versions = self._versions, self._checksums, _flat_versions(flats)
        if not keep_record:
            self._versions, self._checksums = [], []
        if versions != before:
            names = [name for flat in flats for name in flat.names]
            return next(repr(n) for n, old, new in zip(names, before, versions, strict=True) if old != new)
        for flat, noted in zip(flats if sums else [], sums, strict=True):
            if not torch.equal(_checksum(flat.full), noted):
                return f"{flat.names[0]!r}" + (f", or another of {flat.names[1:]}," if len(flat.names) > 1 else "")
        self._checksums_left -= bool(sums) and not keep_record
        return None


def _flat_versions(flats: list[FlatParam]) -> list[int]:
    return [version for flat in flats for version in param_versions(flat.parameters)]


@torch.no_grad()
def _checksum(full: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, as whole numbers: it takes no memory."""
    line = full.view(torch.uint8)
    even = line.numel() // 8 * 8
    return line[:even].view(torch.int64).sum() + line[even:].sum()


def _raise_if_edited(edited: str | None) -> None:
    """Raise where :class:`GatheredEditDetector` has found a change."""
    if edited is not None:
        raise RuntimeError(
            f"the values of {edited} were changed in place during a forward or backward, where they are a copy that is "
            "gathered for the pass: the change would be lost. Compute what is to be used from the parameter in "
            "forward, without changing it (weight = self.weight.clamp(…)), or change it after step() inside "
            "`with zeroshard.gathered(model, write_rank=0):`"
        )


class Unit:
    """The life of a unit: gather → (wait) → use → release. ``partitioned`` units breathe, others stay."""

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
        # inside gathered(): the parameters hold full values in memory of their own, whatever the state
        self.gathered_block: GatheredBlock | None = None
        self._edit_snapshot_at_entry: list[
            tuple[list[int], list[int]]
        ] = []  # versions and places of each flat's parameters there
        self.is_storage_detached = False  # RELEASED, and the parameters point at no memory of the flat's
        self._has_exposed_grads = False
        self._unguarded: list[ParamClasses] = []  # partitioned: whose use is not noticed, as that of all others is
        self.has_returned_views = False  # partitioned, and a forward has returned tensors that have its memory
        self.is_released_to_host = False  # resident, and its values are in host memory: see away.py
        self.is_stale = False  # resident, and its new values are still being made outside the device
        self.all_gather_label = f"gather unit {name!r}"
        self.gather_copy_label = f"gather a copy of unit {name!r}"
        self.reduce_label = f"reduce unit {name!r}"
        self.engine: Callable[[], Engine | None] = lambda: None  # weak: set by the engine
        self._comm = comm
        self._tracker = tracker
        self._all_gather_stream = all_gather_stream  # that gathers run on
        self._pending_gathers: list[CollectiveWork] = []
        self._all_gather_event: torch.Event | None = None
        self._param_classes: list[ParamClasses] = []  # of all parameters
        self._param_classes_by_module: dict[str, list[ParamClasses]] = {}  # those that a module of several may use
        self._edit_detector = GatheredEditDetector()
        self._data_aliases: list[weakref.ref[torch.Tensor]] = []  # ``parameter.data`` of a resident unit, as given out
        self._edit_checks_left = (
            MAX_FORWARD_EDIT_CHECKS  # at values that a forward may change through ``parameter.data``
        )
        self._has_forward_edits = False  # such a forward was found

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the unit."""
        return (parameter for flat in self.flats for parameter in flat.parameters)

    @property
    def has_gathered_copy(self) -> bool:
        """Whether the parameters hold full values in memory of their own: see :meth:`gather_copy`."""
        return self.gathered_block is not None

    @property
    def needs_master_sync(self) -> bool:
        """Whether it is resident, and an optimizer updates other tensors than its parameters."""
        return not self.is_partitioned and any(flat.master is not None for flat in self.flats)

    @property
    def is_guarded(self) -> bool:
        """Whether any use of the unit will be noticed, though its values are in memory."""
        return self.state is UnitState.UNSHARDED and not self._unguarded

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of the full parameters' memory."""
        return sum(flat.alloc_bytes for flat in self.flats)

    def bind(self, original_classes: dict[int, type[nn.Parameter]]) -> None:
        """Point every parameter at its place in the flat, and give it its card."""
        for flat in self.flats:
            for index, parameter in enumerate(flat.parameters):
                original = original_classes[id(parameter)]
                set_data(parameter, flat.views[index])
                parameter._zeroshard = ParamInfo(flat.names[index], self, flat, index)  # type: ignore[attr-defined]
                self._param_classes.append(ParamClasses(parameter, original))
            flat.known_versions = param_versions(flat.parameters)

    def add_module(self, name: str, module: nn.Module) -> None:
        """The unit is brought for a module: remember which of its parameters that one has, or share it."""
        own = {id(parameter) for parameter in module.parameters()}
        self._param_classes_by_module[name] = [
            wardrobe for wardrobe in self._param_classes if id(wardrobe.parameter) in own
        ]

    def init_sharded(self) -> None:
        """A partitioned unit begins its life with only its shard in memory."""
        self._set_classes(guarded=True)
        self.state = UnitState.SHARDED
        self.detach_storage()

    def detach_storage(self) -> None:
        """Point the absent parameters at a value of no use: see [Note: absent parameters]."""
        if self.is_partitioned and self.state is UnitState.SHARDED and not self.is_storage_detached:
            self._set_param_data("placeholders")
            self.is_storage_detached = True

    def _set_param_data(self, views: str) -> None:
        if self.has_gathered_copy:
            return
        for flat in self.flats:
            set_data_all(flat.parameters, getattr(flat, views), flat.has_dtensors)

    def start_unshard(self, include_frozen: bool = False) -> None:
        """Start to bring the full parameters. They are usable after :meth:`wait`.

        Of a resident unit only what is trained can have changed on other ranks, unless ``frozen`` says otherwise.
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
            self._set_classes(guarded=True)  # until the new values are in
        self.is_stale = False
        changed = [flat for flat in self.flats if self.is_partitioned or flat.is_trainable or include_frozen]
        for flat in changed:
            flat.wait_for_update()
        with self._all_gather_stream:
            self._pending_gathers = self._start_all_gathers(changed)
        self._all_gather_event = self._all_gather_stream.record_event()
        self.state = UnitState.UNSHARDING

    def mark_stale(self) -> None:
        """New values of a resident unit are being made outside the device: its parameters are absent until then."""
        self._set_classes(guarded=True)
        self.is_stale = True

    def wait_for_unshard(self, module: str | None = None) -> None:
        """Make the full parameters usable.

        Those of one module, where it is named: of the others a partitioned unit's use is still to be noticed.
        """
        gathering = self.state is UnitState.UNSHARDING
        if gathering:
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
        elif gathering:
            self._set_classes(guarded=False) if self._has_exposed_grads else self._restore_classes()

    def _unguard(self, wardrobes: list[ParamClasses]) -> None:
        if len(self._unguarded) == len(self._param_classes):
            return
        hidden = [wardrobe for wardrobe in wardrobes if wardrobe.parameter.__class__ is not wardrobe.original]
        for wardrobe in hidden:
            wardrobe.parameter.__class__ = wardrobe.original
        self._unguarded = self._unguarded + hidden if self._unguarded else hidden

    def guard(self) -> None:
        """Make a use of a partitioned unit noticed, while its values are still in memory but nobody's in particular."""
        if self.is_partitioned and self.state is UnitState.UNSHARDED:
            self._guard()

    def _guard(self) -> None:
        copied = self.has_gathered_copy
        for wardrobe in self._unguarded:
            wardrobe.parameter.__class__ = wardrobe.gathered if copied else wardrobe.guarded
        self._unguarded = []

    def owns_storage_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is that of the full parameters."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if type(tensor) is not torch.Tensor:  # the parameter itself
            return False
        places = [flat.full.untyped_storage().data_ptr() for flat in self.flats if flat.layout.numel]
        try:
            return tensor.untyped_storage().data_ptr() in places
        except (NotImplementedError, RuntimeError):  # it has no memory of its own: sparse, or vmap's
            return False

    def reshard(self) -> None:
        """Free the full parameters of a partitioned unit."""
        if not self.is_partitioned or self.state is UnitState.SHARDED:
            return
        self._wait_all_gather()  # a gather nobody used: its memory must not go while it is written
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
        """Values gathered for a pass count as unchanged from here on."""
        if self.is_partitioned and self.state is not UnitState.SHARDED:
            self._edit_detector.reset(self.flats)

    def record_data_alias(self, values: torch.Tensor) -> None:
        """Somebody was given ``parameter.data`` of a resident unit, and may write into it as long as it lives."""
        if not self.is_partitioned:
            self._data_aliases.append(weakref.ref(values))

    def may_be_edited(self) -> bool:
        """Whether resident parameters may have been changed in a way that no version counter tells of.

        That is so where somebody has, or had since the last look, ``parameter.data``, and where the forward itself was
        seen to use that.
        """
        if self.is_stale or self.is_released_to_host or self.state is not UnitState.UNSHARDED:
            return False
        taken, self._data_aliases = (
            bool(self._data_aliases),
            [alias for alias in self._data_aliases if alias() is not None],
        )
        return taken or self._has_forward_edits

    def detect_forward_edits(self) -> None:
        """A forward is over: see whether it has changed resident parameters through ``parameter.data``.

        That goes unnoticed there, but such a forward does so every time: the first times the values are compared with
        their masters.
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
        """The values of a resident unit are out: its parameters are absent, and point at no memory of the flat's."""
        self.is_released_to_host = True
        self._set_classes(guarded=True)
        self._set_param_data("placeholders")

    def restore_from_host(self) -> None:
        """Undo :meth:`leave`."""
        self.is_released_to_host = False
        for flat in self.flats:
            flat.known_data_ptrs = None  # their memory is other memory now
        self._set_param_data("views")
        self._set_classes(guarded=False) if self._has_exposed_grads else self._restore_classes()

    def expose_reduced_grads(self) -> None:
        """Make ``grad`` of parameters whose values are there the reduced gradient."""
        if self.is_partitioned:
            for wardrobe in self._unguarded:
                wardrobe.parameter.__class__ = wardrobe.reduced_grad
            return
        self._has_exposed_grads = True
        if self.state is UnitState.UNSHARDED and not self.is_stale and not self.is_released_to_host:
            self._set_classes(guarded=False)

    def hide_reduced_grads(self) -> None:
        """Make parameters whose values are there plain ones, as autograd and compilers know them."""
        if self.is_partitioned:
            for wardrobe in self._unguarded:
                wardrobe.parameter.__class__ = wardrobe.original
            return
        self._has_exposed_grads = False
        if self.state is UnitState.UNSHARDED and not self.is_stale and not self.is_released_to_host:
            self._restore_classes()

    @torch.no_grad()
    def gather_copy(self) -> None:
        """Point the parameters at full values in fresh memory, which stays valid for whoever keeps it.

        Until :meth:`drop_copy` they stay there: a forward or backward meanwhile gathers and releases as ever, but
        computes with these values.
        """
        if self.is_partitioned and self.state is not UnitState.SHARDED:
            _raise_if_edited(self._edit_detector.describe_edits(self.flats, keep_record=True))
        copies = []
        for flat in self.flats:
            if not self.is_partitioned:
                copies.append(flat.full.clone())
                continue
            fresh = torch.empty(flat.layout.numel, dtype=flat.dtype, device=flat.device)
            flat.wait_for_update()
            for number, bucket in enumerate(flat.layout.buckets):
                self._all_gather_bucket(
                    fresh[bucket.start : bucket.end], flat.local_shard(number), self.gather_copy_label
                )
            copies.append(fresh)
        for flat, fresh in zip(self.flats, copies, strict=True):
            set_data_all(flat.parameters, [flat.view(fresh, i) for i in range(len(flat.shapes))], flat.has_dtensors)
        self.gathered_block = GatheredBlock()
        self._edit_snapshot_at_entry = self._edit_snapshot()
        self._set_guarded_classes()

    def drop_copy(self) -> None:
        """Let go of what :meth:`gather_copy` made: the parameters are again what the unit's state says."""
        if self.gathered_block is None:
            return
        self.gathered_block.is_open = False
        edited = self.edited_params()
        self.gathered_block, self._edit_snapshot_at_entry = None, []
        if edited:  # what they were in the block is undone: no graph made of it may be gone back through
            torch.autograd.graph.increment_version(edited)
            self.accept_edits()
        self.is_storage_detached = self.is_partitioned and self.state is UnitState.SHARDED
        self._set_param_data("placeholders" if self.is_storage_detached else "views")
        self._set_guarded_classes()

    def edited_params(self) -> list[nn.Parameter]:
        """The parameters that were changed, or pointed elsewhere, since :meth:`gather_copy`."""
        marks = (
            zip(self.flats, self._edit_snapshot_at_entry, self._edit_snapshot(), strict=True)
            if self.has_gathered_copy
            else ()
        )
        return [
            parameter
            for flat, before, now in marks
            if before != now
            for index, parameter in enumerate(flat.parameters)
            if any(old[index] != new[index] for old, new in zip(before, now, strict=True))
        ]

    def _edit_snapshot(self) -> list[tuple[list[int], list[int]]]:
        return [(param_versions(flat.parameters), data_ptrs(flat.parameters, flat.has_dtensors)) for flat in self.flats]

    def _set_guarded_classes(self) -> None:
        """Give a partitioned unit's parameters the class they have while no running module uses them."""
        shown = {id(wardrobe) for wardrobe in self._unguarded}
        for wardrobe in self._param_classes if self.is_partitioned else ():
            if id(wardrobe) not in shown:
                wardrobe.parameter.__class__ = wardrobe.gathered if self.has_gathered_copy else wardrobe.guarded

    def check_param_data(self) -> None:
        """Raise where a parameter was given values that the unit cannot hold."""
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
                        "dtype or device before zeroshard.shard(), or after zeroshard.unshard()"
                    )

    @torch.no_grad()
    def to_plain(self) -> None:
        """Make the parameters plain again: own memory, first dtype, the master's values where there is one."""
        self.wait_for_unshard()
        self._restore_classes()
        for flat in self.flats:
            dtype = flat.dtype if flat.master is None else flat.master.dtype
            whole = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
            for number, (bucket, home) in enumerate(zip(flat.layout.buckets, flat.shard_ranges, strict=True)):
                mine = flat.local_shards[number] if flat.master is None else flat.master.read(home, flat.device)
                self._all_gather_bucket(whole[bucket.start : bucket.end], mine, self.all_gather_label)
            for index, parameter in enumerate(flat.parameters):
                view = flat.view(whole, index)
                plain = torch.empty_strided(
                    view.shape, view.stride(), dtype=flat.original_dtypes[index], device=view.device
                )
                set_data_and_dtype(parameter, plain.copy_(view), flat.tp_params[index])
                parameter.grad = None
                del parameter._zeroshard  # type: ignore[attr-defined]

    @torch.no_grad()
    def write_back(self, src_rank: int | None) -> torch.Tensor:
        """Take the parameters' present full values, those of rank ``source`` of the mesh, into shards and master.

        Returns whether this rank's part of them is another one than before.
        """
        changed: list[torch.Tensor] = []
        self.check_param_data()
        for flat in self.flats:
            if flat.prefetcher is not None:
                flat.prefetcher.discard()
            for bucket in flat.layout.buckets:
                values = torch.zeros(bucket.numel, dtype=flat.dtype, device=flat.device)
                for piece in flat.layout.params_in_bucket(bucket):
                    line = flat.flatten(local_data(flat.parameters[piece.param_index]), piece.param_index)
                    end = piece.offset + piece.elements.numel
                    values[piece.offset : end] = line[piece.elements.start : piece.elements.end]
                if src_rank is not None:
                    self._comm.broadcast(values, src_rank, f"write unit {self.name!r}")
                    self._broadcast_tp_replicated(flat, bucket, values)
                changed.append(self._write_bucket(flat, bucket, values))
        self.accept_edits()
        return torch.stack(changed).any() if changed else torch.tensor(False)

    def _broadcast_tp_replicated(self, flat: FlatParam, bucket: Range, values: torch.Tensor) -> None:
        """Of what all ranks of the tensor axis hold alike, the first one's values count."""
        for piece in flat.layout.params_in_bucket(bucket) if self._comm.tensor_axis.size > 1 else ():
            if flat.tp_shards[piece.param_index] is None:
                part = values[piece.offset : piece.offset + piece.elements.numel]
                self._comm.broadcast_over_axis(self._comm.tensor_axis, part, f"write unit {self.name!r}")

    def _write_bucket(self, flat: FlatParam, bucket: Range, values: torch.Tensor) -> torch.Tensor:
        """Take new values of a bucket; returns whether this rank's part is another one than before."""
        number = flat.layout.buckets.index(bucket)
        part = flat.layout.bucket_shard(bucket, self._comm.shard_axis.rank).shift(-bucket.start)
        new = values[part.start : part.end]
        changed = (flat.local_shard(number).to(flat.device) != new).any()
        if flat.master is not None:  # first: on the device it may be the part itself
            master = flat.master.read(flat.shard_ranges[number], flat.device)
            kept = torch.where(master.to(flat.dtype) == new, master, new.to(master.dtype))  # what is unchanged is exact
            flat.master.write(flat.shard_ranges[number], kept)
        if not flat.is_partitioned:
            flat.bucket_views[number].copy_(values)
        elif not flat.is_cast_from_master:
            flat.local_shards[number].copy_(new)
        return changed

    def _start_all_gathers(self, flats: list[FlatParam]) -> list[CollectiveWork]:
        pending: list[CollectiveWork] = []
        for flat in flats:
            parts = flat.all_gather_inputs()
            if self._comm.shard_axis.size > 1:
                pairs = zip(flat.bucket_views, parts, strict=True)
                pending += [self._comm.all_gather(full, part, self.all_gather_label) for full, part in pairs]
            elif parts is not flat.shard_slots:  # one rank, whose parameters come and go
                torch._foreach_copy_(flat.shard_slots, parts)
        return pending

    def _all_gather_bucket(self, output: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        """Collect every rank's part of a bucket, wherever it rests, and wait for it."""
        shard = shard.to(output.device)
        if self._comm.shard_axis.size > 1:
            self._comm.all_gather(output, shard, what).wait()
        else:
            output.copy_(shard)

    def _set_classes(self, guarded: bool) -> None:
        for wardrobe in self._param_classes:
            wardrobe.parameter.__class__ = wardrobe.guarded if guarded else wardrobe.reduced_grad

    def _restore_classes(self) -> None:
        for wardrobe in self._param_classes:
            wardrobe.parameter.__class__ = wardrobe.original


def set_data_and_dtype(parameter: nn.Parameter, values: torch.Tensor, tp_param: TPParam | None) -> None:
    """Give a parameter values of another dtype; a DTensor's own dtype has to follow."""
    if tp_param is not None:
        parameter.data = tp_param.to_dtensor(values)
    set_data(parameter, values)
