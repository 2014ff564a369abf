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

from zeroshard.comm import Communicator, Pending
from zeroshard.engine.flat import Flat
from zeroshard.engine.parameter import (
    Card,
    GatheredBlock,
    Wardrobe,
    point,
    point_all,
    pointers_of,
    values_of,
    versions_of,
)
from zeroshard.layout import Range
from zeroshard.memory.lane import Lane
from zeroshard.memory.ledger import Ledger
from zeroshard.tensor.division import Divided

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine


LOOKS = 2  # at what a forward has left


class State(enum.Enum):
    """What is in memory of a unit's full parameters."""

    RELEASED = enum.auto()  # nothing: only this rank's shard
    GATHERING = enum.auto()  # the full storage, being filled
    READY = enum.auto()  # the full parameters


class GatheredValues:
    """Finds that a partitioned unit's parameters were changed in place while they were gathered.

    Version counters tell of all changes but those of ``parameter.data``, for 0.1 µs a parameter. So the first few times
    the values themselves are compared, too: a forward that changes its weights does so every time.
    """

    def __init__(self) -> None:
        self._to_compare = 4  # gathers: two forwards, two backwards
        self._versions: list[int] = []
        self._sums: list[torch.Tensor] = []

    def note_versions(self, flats: list[Flat]) -> None:
        """A gather begins."""
        self._versions, self._sums = _versions(flats), []

    def note(self, flats: list[Flat]) -> None:
        """The values are in place."""
        if self._to_compare:
            self._sums = [_checksum(flat.full) for flat in flats]

    def renew(self, flats: list[Flat]) -> None:
        """What was changed has been taken over, if the values are in place."""
        if self._versions:
            self._versions = _versions(flats)
        if self._sums:
            self.note(flats)

    def edited(self, flats: list[Flat], stay: bool = False) -> str | None:
        """What was changed since then, in words, or None. The values are about to go, unless they ``stay``."""
        before, sums, versions = self._versions, self._sums, _versions(flats)
        if not stay:
            self._versions, self._sums = [], []
        if versions != before:
            names = [name for flat in flats for name in flat.names]
            return next(repr(n) for n, old, new in zip(names, before, versions, strict=True) if old != new)
        for flat, noted in zip(flats if sums else [], sums, strict=True):
            if not torch.equal(_checksum(flat.full), noted):
                return f"{flat.names[0]!r}" + (f", or another of {flat.names[1:]}," if len(flat.names) > 1 else "")
        self._to_compare -= bool(sums) and not stay
        return None


def _versions(flats: list[Flat]) -> list[int]:
    return [version for flat in flats for version in versions_of(flat.parameters)]


@torch.no_grad()
def _checksum(full: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, as whole numbers: it takes no memory."""
    line = full.view(torch.uint8)
    even = line.numel() // 8 * 8
    return line[:even].view(torch.int64).sum() + line[even:].sum()


def _refuse_edits(edited: str | None) -> None:
    """Raise where :class:`GatheredValues` has found a change."""
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
        flats: list[Flat],
        comm: Communicator,
        ledger: Ledger,
        lane: Lane,
        partitioned: bool,
    ) -> None:
        self.name = name
        self.flats = flats
        self.partitioned = partitioned
        self.trainable = any(flat.trainable for flat in flats)
        self.state = State.READY
        # inside gathered(): the parameters hold full values in memory of their own, whatever the state
        self.block: GatheredBlock | None = None
        self._at_entry: list[tuple[list[int], list[int]]] = []  # versions and places of each flat's parameters there
        self.parked = False  # RELEASED, and the parameters point at no memory of the flat's
        self._resting = False
        self._shown: list[Wardrobe] = []  # partitioned: whose use is not noticed, as that of all others is
        self.lent = False  # partitioned, and a forward has returned tensors that have its memory
        self.out = False  # resident, and its values are in host memory: see away.py
        self.expected = False  # resident, and its new values are still being made outside the device
        self.gather_event = f"gather unit {name!r}"
        self.copy_event = f"gather a copy of unit {name!r}"
        self.reduce_event = f"reduce unit {name!r}"
        self.engine: Callable[[], Engine | None] = lambda: None  # weak: set by the engine
        self._comm = comm
        self._ledger = ledger
        self._lane = lane  # that gathers run on
        self._pending: list[Pending] = []
        self._gathered: torch.Event | None = None
        self._wardrobes: list[Wardrobe] = []  # of all parameters
        self._by_module: dict[str, list[Wardrobe]] = {}  # those that a module of several may use
        self._values = GatheredValues()
        self._aliases: list[weakref.ref[torch.Tensor]] = []  # ``parameter.data`` of a resident unit, as given out
        self._looks = LOOKS  # at values that a forward may change through ``parameter.data``
        self._changes_itself = False  # such a forward was found

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the unit."""
        return (parameter for flat in self.flats for parameter in flat.parameters)

    @property
    def copied(self) -> bool:
        """Whether the parameters hold full values in memory of their own: see :meth:`gather_copy`."""
        return self.block is not None

    @property
    def has_masters(self) -> bool:
        """Whether it is resident, and an optimizer updates other tensors than its parameters."""
        return not self.partitioned and any(flat.master is not None for flat in self.flats)

    @property
    def veiled(self) -> bool:
        """Whether any use of the unit will be noticed, though its values are in memory."""
        return self.state is State.READY and not self._shown

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of the full parameters' memory."""
        return sum(flat.room for flat in self.flats)

    def bind(self, original_classes: dict[int, type[nn.Parameter]]) -> None:
        """Point every parameter at its place in the flat, and give it its card."""
        for flat in self.flats:
            for index, parameter in enumerate(flat.parameters):
                original = original_classes[id(parameter)]
                point(parameter, flat.views[index])
                parameter._zeroshard = Card(flat.names[index], self, flat, index)  # type: ignore[attr-defined]
                self._wardrobes.append(Wardrobe(parameter, original))
            flat.known_versions = versions_of(flat.parameters)

    def attend(self, name: str, module: nn.Module) -> None:
        """The unit is brought for a module: remember which of its parameters that one has, or share it."""
        own = {id(parameter) for parameter in module.parameters()}
        self._by_module[name] = [wardrobe for wardrobe in self._wardrobes if id(wardrobe.parameter) in own]

    def start_released(self) -> None:
        """A partitioned unit begins its life with only its shard in memory."""
        self._dress(absent=True)
        self.state = State.RELEASED
        self.park()

    def park(self) -> None:
        """Point the absent parameters at a value of no use: see [Note: absent parameters]."""
        if self.partitioned and self.state is State.RELEASED and not self.parked:
            self._point("stand_ins")
            self.parked = True

    def _point(self, views: str) -> None:
        if self.copied:
            return
        for flat in self.flats:
            point_all(flat.parameters, getattr(flat, views), flat.has_divided)

    def gather(self, frozen: bool = False) -> None:
        """Start to bring the full parameters. They are usable after :meth:`wait`.

        Of a resident unit only what is trained can have changed on other ranks, unless ``frozen`` says otherwise.
        """
        if self.parked:
            self._point("views")
            self.parked = False
        if self.partitioned and self.state is State.RELEASED:
            for flat in self.flats:
                flat.full.untyped_storage().resize_(flat.room)
            self._ledger.add("gathered", self.full_bytes)
            self._values.note_versions(self.flats)
        elif not self.partitioned:
            self._dress(absent=True)  # until the new values are in
        self.expected = False
        changed = [flat for flat in self.flats if self.partitioned or flat.trainable or frozen]
        for flat in changed:
            flat.arrive()
        with self._lane:
            self._pending = self._all_gather(changed)
        self._gathered = self._lane.mark()
        self.state = State.GATHERING

    def expect(self) -> None:
        """New values of a resident unit are being made outside the device: its parameters are absent until then."""
        self._dress(absent=True)
        self.expected = True

    def wait(self, module: str | None = None) -> None:
        """Make the full parameters usable.

        Those of one module, where it is named: of the others a partitioned unit's use is still to be noticed.
        """
        gathering = self.state is State.GATHERING
        if gathering:
            self._finish()
            self.state = State.READY
            if self.partitioned:
                self._values.note(self.flats)
        if self.partitioned and self.state is State.READY:
            self._show(self._wardrobes if module is None else self._by_module.get(module, self._wardrobes))
        elif gathering:
            self._dress(absent=False) if self._resting else self._undress()

    def _show(self, wardrobes: list[Wardrobe]) -> None:
        if len(self._shown) == len(self._wardrobes):
            return
        hidden = [wardrobe for wardrobe in wardrobes if wardrobe.parameter.__class__ is not wardrobe.original]
        for wardrobe in hidden:
            wardrobe.parameter.__class__ = wardrobe.original
        self._shown = self._shown + hidden if self._shown else hidden

    def veil(self) -> None:
        """Make a use of a partitioned unit noticed, while its values are still in memory but nobody's in particular."""
        if self.partitioned and self.state is State.READY:
            self._hide()

    def _hide(self) -> None:
        copied = self.copied
        for wardrobe in self._shown:
            wardrobe.parameter.__class__ = wardrobe.gathered if copied else wardrobe.absent
        self._shown = []

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is that of the full parameters."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if type(tensor) is not torch.Tensor:  # the parameter itself
            return False
        places = [flat.full.untyped_storage().data_ptr() for flat in self.flats if flat.layout.numel]
        try:
            return tensor.untyped_storage().data_ptr() in places
        except (NotImplementedError, RuntimeError):  # it has no memory of its own: sparse, or vmap's
            return False

    def release(self) -> None:
        """Free the full parameters of a partitioned unit."""
        if not self.partitioned or self.state is State.RELEASED:
            return
        self._finish()  # a gather nobody used: its memory must not go while it is written
        edited = None if self.copied else self._values.edited(self.flats)
        self._hide()
        moved = [flat.free(self.lent) for flat in self.flats]
        self.lent = False
        if any(moved):
            self._point("views")
        self._ledger.add("gathered", -self.full_bytes)
        self.state = State.RELEASED
        _refuse_edits(edited)

    def accept_edits(self) -> None:
        """Values gathered for a pass count as unchanged from here on."""
        if self.partitioned and self.state is not State.RELEASED:
            self._values.renew(self.flats)

    def note_alias(self, values: torch.Tensor) -> None:
        """Somebody was given ``parameter.data`` of a resident unit, and may write into it as long as it lives."""
        if not self.partitioned:
            self._aliases.append(weakref.ref(values))

    def may_be_edited(self) -> bool:
        """Whether resident parameters may have been changed in a way that no version counter tells of.

        That is so where somebody has, or had since the last look, ``parameter.data``, and where the forward itself was
        seen to use that.
        """
        if self.expected or self.out or self.state is not State.READY:
            return False
        taken, self._aliases = bool(self._aliases), [alias for alias in self._aliases if alias() is not None]
        return taken or self._changes_itself

    def watch_forward(self) -> None:
        """A forward is over: see whether it has changed resident parameters through ``parameter.data``.

        That goes unnoticed there, but such a forward does so every time: the first times the values are compared with
        their masters.
        """
        if self._looks and self.has_masters and self.state is State.READY and not (self.expected or self.out):
            self._looks -= 1
            self._changes_itself = self._changes_itself or any(flat.differs_from_master() for flat in self.flats)

    def _finish(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._lane.join(self._gathered)
        self._gathered = None

    def leave(self) -> None:
        """The values of a resident unit are out: its parameters are absent, and point at no memory of the flat's."""
        self.out = True
        self._dress(absent=True)
        self._point("stand_ins")

    def come_back(self) -> None:
        """Undo :meth:`leave`."""
        self.out = False
        for flat in self.flats:
            flat.known_pointers = None  # their memory is other memory now
        self._point("views")
        self._dress(absent=False) if self._resting else self._undress()

    def rest(self) -> None:
        """Make ``grad`` of parameters whose values are there the reduced gradient."""
        if self.partitioned:
            for wardrobe in self._shown:
                wardrobe.parameter.__class__ = wardrobe.resting
            return
        self._resting = True
        if self.state is State.READY and not self.expected and not self.out:
            self._dress(absent=False)

    def wake(self) -> None:
        """Make parameters whose values are there plain ones, as autograd and compilers know them."""
        if self.partitioned:
            for wardrobe in self._shown:
                wardrobe.parameter.__class__ = wardrobe.original
            return
        self._resting = False
        if self.state is State.READY and not self.expected and not self.out:
            self._undress()

    @torch.no_grad()
    def gather_copy(self) -> None:
        """Point the parameters at full values in fresh memory, which stays valid for whoever keeps it.

        Until :meth:`drop_copy` they stay there: a forward or backward meanwhile gathers and releases as ever, but
        computes with these values.
        """
        if self.partitioned and self.state is not State.RELEASED:
            _refuse_edits(self._values.edited(self.flats, stay=True))
        copies = []
        for flat in self.flats:
            if not self.partitioned:
                copies.append(flat.full.clone())
                continue
            fresh = torch.empty(flat.layout.numel, dtype=flat.dtype, device=flat.device)
            flat.arrive()
            for number, bucket in enumerate(flat.layout.buckets):
                self._gather_whole(fresh[bucket.start : bucket.end], flat.computed(number), self.copy_event)
            copies.append(fresh)
        for flat, fresh in zip(self.flats, copies, strict=True):
            point_all(flat.parameters, [flat.view(fresh, i) for i in range(len(flat.shapes))], flat.has_divided)
        self.block = GatheredBlock()
        self._at_entry = self._marks()
        self._dress_hidden()

    def drop_copy(self) -> None:
        """Let go of what :meth:`gather_copy` made: the parameters are again what the unit's state says."""
        if self.block is None:
            return
        self.block.is_open = False
        edited = self.edited()
        self.block, self._at_entry = None, []
        if edited:  # what they were in the block is undone: no graph made of it may be gone back through
            torch.autograd.graph.increment_version(edited)
            self.accept_edits()
        self.parked = self.partitioned and self.state is State.RELEASED
        self._point("stand_ins" if self.parked else "views")
        self._dress_hidden()

    def edited(self) -> list[nn.Parameter]:
        """The parameters that were changed, or pointed elsewhere, since :meth:`gather_copy`."""
        marks = zip(self.flats, self._at_entry, self._marks(), strict=True) if self.copied else ()
        return [
            parameter
            for flat, before, now in marks
            if before != now
            for index, parameter in enumerate(flat.parameters)
            if any(old[index] != new[index] for old, new in zip(before, now, strict=True))
        ]

    def _marks(self) -> list[tuple[list[int], list[int]]]:
        return [(versions_of(flat.parameters), pointers_of(flat.parameters, flat.has_divided)) for flat in self.flats]

    def _dress_hidden(self) -> None:
        """Give a partitioned unit's parameters the class they have while no running module uses them."""
        shown = {id(wardrobe) for wardrobe in self._shown}
        for wardrobe in self._wardrobes if self.partitioned else ():
            if id(wardrobe) not in shown:
                wardrobe.parameter.__class__ = wardrobe.gathered if self.copied else wardrobe.absent

    def check_written(self) -> None:
        """Raise where a parameter was given values that the unit cannot hold."""
        for flat in self.flats:
            for index, (name, parameter) in enumerate(flat.named_parameters):
                values = values_of(parameter)
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
    def dissolve(self) -> None:
        """Make the parameters plain again: own memory, first dtype, the master's values where there is one."""
        self.wait()
        self._undress()
        for flat in self.flats:
            dtype = flat.dtype if flat.master is None else flat.master.dtype
            whole = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
            for number, (bucket, home) in enumerate(zip(flat.layout.buckets, flat.homes, strict=True)):
                mine = flat.owned[number] if flat.master is None else flat.master.read(home, flat.device)
                self._gather_whole(whole[bucket.start : bucket.end], mine, self.gather_event)
            for index, parameter in enumerate(flat.parameters):
                view = flat.view(whole, index)
                plain = torch.empty_strided(
                    view.shape, view.stride(), dtype=flat.original_dtypes[index], device=view.device
                )
                refill(parameter, plain.copy_(view), flat.divided[index])
                parameter.grad = None
                del parameter._zeroshard  # type: ignore[attr-defined]

    @torch.no_grad()
    def absorb(self, source: int | None) -> torch.Tensor:
        """Take the parameters' present full values, those of rank ``source`` of the mesh, into shards and master.

        Returns whether this rank's part of them is another one than before.
        """
        changed: list[torch.Tensor] = []
        self.check_written()
        for flat in self.flats:
            if flat.reader is not None:
                flat.reader.forget()
            for bucket in flat.layout.buckets:
                values = torch.zeros(bucket.numel, dtype=flat.dtype, device=flat.device)
                for piece in flat.layout.pieces(bucket):
                    line = flat.line(values_of(flat.parameters[piece.parameter]), piece.parameter)
                    end = piece.at + piece.within.numel
                    values[piece.at : end] = line[piece.within.start : piece.within.end]
                if source is not None:
                    self._comm.broadcast(values, source, f"write unit {self.name!r}")
                    self._share_undivided(flat, bucket, values)
                changed.append(self._keep(flat, bucket, values))
        self.accept_edits()
        return torch.stack(changed).any() if changed else torch.tensor(False)

    def _share_undivided(self, flat: Flat, bucket: Range, values: torch.Tensor) -> None:
        """Of what all ranks of the tensor axis hold alike, the first one's values count."""
        for piece in flat.layout.pieces(bucket) if self._comm.tensor.size > 1 else ():
            if flat.shares[piece.parameter] is None:
                part = values[piece.at : piece.at + piece.within.numel]
                self._comm.broadcast_over(self._comm.tensor, part, f"write unit {self.name!r}")

    def _keep(self, flat: Flat, bucket: Range, values: torch.Tensor) -> torch.Tensor:
        """Take new values of a bucket; returns whether this rank's part is another one than before."""
        number = flat.layout.buckets.index(bucket)
        part = flat.layout.owned(bucket, self._comm.shard.rank).moved(-bucket.start)
        new = values[part.start : part.end]
        changed = (flat.computed(number).to(flat.device) != new).any()
        if flat.master is not None:  # first: on the device it may be the part itself
            master = flat.master.read(flat.homes[number], flat.device)
            kept = torch.where(master.to(flat.dtype) == new, master, new.to(master.dtype))  # what is unchanged is exact
            flat.master.write(flat.homes[number], kept)
        if not flat.partitioned:
            flat.buckets[number].copy_(values)
        elif not flat.is_cast:
            flat.owned[number].copy_(new)
        return changed

    def _all_gather(self, flats: list[Flat]) -> list[Pending]:
        pending: list[Pending] = []
        for flat in flats:
            parts = flat.bring()
            if self._comm.shard.size > 1:
                pairs = zip(flat.buckets, parts, strict=True)
                pending += [self._comm.all_gather(full, part, self.gather_event) for full, part in pairs]
            elif parts is not flat.landings:  # one rank, whose parameters come and go
                torch._foreach_copy_(flat.landings, parts)
        return pending

    def _gather_whole(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> None:
        """Collect every rank's part of a bucket, wherever it rests, and wait for it."""
        part = part.to(whole.device)
        if self._comm.shard.size > 1:
            self._comm.all_gather(whole, part, what).wait()
        else:
            whole.copy_(part)

    def _dress(self, absent: bool) -> None:
        for wardrobe in self._wardrobes:
            wardrobe.parameter.__class__ = wardrobe.absent if absent else wardrobe.resting

    def _undress(self) -> None:
        for wardrobe in self._wardrobes:
            wardrobe.parameter.__class__ = wardrobe.original


def refill(parameter: nn.Parameter, values: torch.Tensor, divided: Divided | None) -> None:
    """Give a parameter values of another dtype; a DTensor's own dtype has to follow."""
    if divided is not None:
        parameter.data = divided.wrap(values)
    point(parameter, values)
