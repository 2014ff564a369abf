"""Unit: flats that are gathered and reduced together."""

from __future__ import annotations

import enum

import torch

from zeroshard.core.flat import Flat, round_up
from zeroshard.core.gradient import Gradient
from zeroshard.core.parameter import GuardedParameter
from zeroshard.core.transfers import Transfer, TransferQueue
from zeroshard.utils.profiling import label

ALIGN_BYTES = 512  # as CUDA's allocator does


class UnitState(enum.Enum):
    """Where a unit's full parameters are."""

    SHARDED = enum.auto()  # only what this rank keeps is in memory; the parameters are guarded
    UNSHARDING = enum.auto()  # in memory, or on their way to it; still guarded
    UNSHARDED = enum.auto()  # in memory, and usable by modules


def allocate_together(flats: list[Flat], device: torch.device) -> list[torch.Tensor]:
    """Return memory for all values of each flat, in one storage: a unit is gathered and freed as a whole."""
    sizes = [round_up(flat.layout.numel * flat.dtype.itemsize, ALIGN_BYTES) for flat in flats]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    found = []
    for flat, piece in zip(flats, torch.split(memory, sizes), strict=True):
        found.append(piece[: flat.layout.numel * flat.dtype.itemsize].view(flat.dtype))
    return found


class Unit:
    """Parameters that go through unshard → wait → use → reshard together.

    If parameters are replicated they are never SHARDED, and UNSHARDING between uses: then the ranks exchange what the
    optimizer has changed.
    """

    def __init__(self, name: str, flats: list[Flat], gathers: TransferQueue) -> None:
        self.name = name
        self.flats = flats
        self.sharded_flats = [flat for flat in flats if flat.is_sharded]
        self.gradients = [Gradient(flat) for flat in flats if flat.is_trainable]
        self.is_sharded = bool(self.sharded_flats)
        if self.is_sharded:
            self._storage = self.sharded_flats[0].full.untyped_storage()
            self._nbytes = self._storage.nbytes()
            self._own_uses = torch._C._storage_Use_Count(self._storage._cdata)
        self.is_trainable = bool(self.gradients)
        self.state = UnitState.UNSHARDED
        self.users = 0  # running module calls, blocks of gathered(): while there are any, it is not resharded
        self.parameters = [parameter for flat in flats for parameter in flat.parameters]
        self.views = [view for flat in flats for view in flat.views]  # what they are, where these have memory
        self.classes = [type(parameter) for parameter in self.parameters]
        self._gathers = gathers
        self._transfer: Transfer | None = None  # while values are on their way
        self.refresh: Transfer | None = None  # of what this rank keeps, after a step

    def __str__(self) -> str:
        return repr(self.name)

    def start_unshard(self) -> None:
        """Start the all-gathers."""
        if self.state is not UnitState.SHARDED:
            return
        if self.refresh is not None:
            self.finish_refresh()
        self._storage.resize_(self._nbytes)
        with label("unshard {!r}", self.name):
            self._transfer = self._gathers.start(*[flat.all_gather() for flat in self.sharded_flats])
        self.state = UnitState.UNSHARDING

    def start_refresh(self, stepped: dict[Flat, bool]) -> None:
        """After the optimizer has changed masters: start to bring what is kept of the parameters up to date.

        ``stepped``: their flats, and whether the optimizer has written this rank's part of the parameters, too.
        """
        own = [flat for flat in self.flats if flat in stepped]
        for flat in own:
            torch.autograd.graph.increment_version(flat.parameters)  # a graph of the old values is stale
        changed = [flat for flat in own if flat.values is not flat.master]
        if not changed:
            return
        for flat in changed:
            if flat.copies_master and not stepped[flat]:  # before a fused optimizer writes another part of it
                flat.kept_master.copy_(flat.master)
        transfer = self._gathers.start(*[flat.refresh() for flat in changed])
        self.refresh = transfer
        if not self.is_sharded:
            self._transfer = transfer
            if self.state is UnitState.UNSHARDED:
                self.keep()

    def finish_refresh(self) -> None:
        """Wait until what is kept of the parameters is up to date: it may be read, and written by another step."""
        assert self.refresh is not None
        self._gathers.wait(self.refresh)
        self.refresh = None

    def wait(self) -> None:
        """Make the parameters usable."""
        if self.state is not UnitState.UNSHARDING:
            return
        if self._transfer is not None:
            with label("wait for {!r}", self.name):
                self._gathers.wait(self._transfer)
            self._transfer = None
        self.refresh = None
        for parameter, original in zip(self.parameters, self.classes, strict=True):
            parameter.__class__ = original
        self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Free the full parameters."""
        self.wait()
        self._storage.resize_(0)
        self._guard()
        self.state = UnitState.SHARDED

    def forget_prefetched(self) -> None:
        """Let values that this rank keeps be changed: forget what was gathered of them."""
        self.reshard()
        if self.refresh is not None:
            self.finish_refresh()

    def leave_used_memory(self) -> None:
        """If others have views of gathered values (a state dict, an array, a graph), leave them, and use new memory."""
        if not self.is_sharded or self.users > 1 or torch._C._storage_Use_Count(self._storage._cdata) == self._own_uses:
            return
        self._storage = torch.empty(self._nbytes, dtype=torch.uint8, device=self._storage.device).untyped_storage()
        for flat in self.sharded_flats:
            for tensor in (flat.full, *flat.views):
                tensor.set_(self._storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            for parameter, view in zip(flat.parameters, flat.views, strict=True):
                parameter.data = view

    def keep(self) -> None:
        """Keep the full parameters for the next use, as if they had been prefetched for it; guard them until then."""
        self._guard()
        self.state = UnitState.UNSHARDING

    def _guard(self) -> None:
        for parameter in self.parameters:
            parameter.__class__ = GuardedParameter
