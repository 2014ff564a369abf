"""Flat: the parameters of one unit that share dtype and trainability, and where their values are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from zeroshard.comm import Communicator
from zeroshard.layout import FlatLayout, Piece, Range, shared_rooms
from zeroshard.memory.reader import Reader
from zeroshard.memory.spread import Spread
from zeroshard.rests import Rest
from zeroshard.tensor.division import Divided
from zeroshard.tensor.share import Share


class Arrival(Protocol):
    """Values that are on their way from another tier."""

    def wait(self) -> None:
        """Return when what comes next on this thread and stream may use them."""


class Flat:
    """The parameters of one unit that share dtype and trainability, laid end to end in one tensor.

    [Note: breathing storage]
    The parameters are views into ``full``. When they are partitioned, releasing them resizes the storage of ``full``
    to zero and gathering resizes it back: the storage object stays the same, so views that autograd saved stay valid,
    and the all-gather lands where the views look, without a copy. ``parameter.data = view`` gives each parameter a
    version counter of its own, so refilling the storage does not look like an in-place change to autograd.

    [Note: cast on gather]
    Where ``Config.cast_on_gather`` asks for it, a partitioned flat with an fp32 master on the device has no shard: what
    this rank owns, in the dtype of computation, is the master's, cast. A gather casts it into its place in ``full``,
    which is where an all-gather wants it. The optimizer then writes the master alone. Since the shard of other flats is
    always their master, cast, no number changes.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        dtype: torch.dtype,
        device: torch.device,
        divided: Sequence[Divided | None],
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.layout = layout
        self.dtype = dtype
        self.trainable = parameters[0].requires_grad
        self.original_dtypes = tuple(p.dtype for p in parameters)
        self.divided = tuple(divided)  # which parameters are DTensors over the tensor axis, and how
        self.has_divided = any(d is not None for d in divided)
        self.shares: tuple[Share | None, ...] = tuple(d.share if d is not None else None for d in divided)
        self.wholes = tuple(p.shape for p in parameters)  # shapes of the undivided parameters
        # from here on, "parameter" is what this rank of the tensor axis has of it
        self.shapes = tuple(
            whole if share is None else share.local_shape for whole, share in zip(self.wholes, self.shares, strict=True)
        )
        self.strides = tuple(
            _dense_stride(p) if d is None else torch.empty(shape, device="meta").stride()
            for p, d, shape in zip(parameters, divided, self.shapes, strict=True)
        )
        self.device = device
        self.full = torch.empty(0, dtype=dtype, device=device)  # [layout.numel], placed by Unit
        self.partitioned = False  # whether ``full`` comes and goes
        self.shard: torch.Tensor | None = None  # [layout.shard_numel] when partitioned, unless it is cast
        self.owned: list[torch.Tensor] = []  # this rank's part of each bucket: of ``shard``, or of ``full``, if kept
        self.landings: list[torch.Tensor] = []  # the same parts' places in ``full``
        self._casts: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # landings, and what is cast into them
        self.homes = tuple(layout.in_shard(bucket) for bucket in layout.buckets)  # the same parts' places in the shard
        self.rest = Rest()  # in which tiers its states rest
        self.master: Spread | None = None  # [layout.shard_numel], what an optimizer updates in the parameters' stead
        self.arrival: Arrival | None = None  # of new values for ``owned``, from an update outside the device
        self.reader: Reader | None = None  # of a shard on disk
        self.views: list[torch.Tensor] = []  # each parameter in ``full``
        self.stand_ins: list[torch.Tensor] = []  # what each absent parameter points at between passes
        self.segments: list[Piece] = []  # the parts of parameters this rank owns
        self.rank = 0  # on the axis that the flat is partitioned over
        self.buckets: list[torch.Tensor] = []  # each bucket of ``full``
        # where the parameters lie, and how often they were changed in place, when last looked at: resident flats alone
        self.known_pointers: list[int] | None = None
        self.known_versions: list[int] = []
        self.room = layout.numel * dtype.itemsize  # bytes of ``full``'s storage: see ``share_rooms``

    @property
    def far(self) -> bool:
        """Whether this rank's part of the parameters rests outside the device."""
        return self.rest.parameters != "device"

    @property
    def is_cast(self) -> bool:
        """Whether the master is all that this rank keeps of its part: see [Note: cast on gather]."""
        return self.partitioned and self.shard is None

    @property
    def on_disk(self) -> bool:
        """Whether it rests on disk."""
        return self.rest.parameters == "disk"

    @property
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names."""
        return zip(self.names, self.parameters, strict=True)

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """View parameter ``index`` inside a tensor laid out like this flat, in the strides it was made with."""
        start = flat.storage_offset() + self.layout.starts[index]
        return flat.as_strided(self.shapes[index], self.strides[index], start)

    def line(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Flatten a tensor of parameter ``index``'s shape into the order its elements have in the flat."""
        if tensor.stride() != self.strides[index]:
            tensor = torch.empty_strided(
                self.shapes[index], self.strides[index], dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def place(self, comm: Communicator, partitioned: bool, shard: torch.Tensor | None) -> None:
        """Allocate: the breathing storage when partitioned, beside a shard or a master; else the full tensor alone."""
        self.partitioned, self.shard, self.rank = partitioned, shard, comm.shard.rank
        self._allocate()
        self._nothing = torch.full(
            (), float("nan") if self.dtype.is_floating_point else 0, dtype=self.dtype, device=self.device
        )
        self.stand_ins = [self.stand_in(shape) for shape in self.shapes]
        self.segments = self.layout.segments(self.rank)
        self.owned = self.landings
        if partitioned:
            self.owned = [shard[home.start : home.end] for home in self.homes] if shard is not None else []
            self.full.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        self.views = [self.view(self.full, index) for index in range(len(self.shapes))]
        self.buckets = [self.full[bucket.start : bucket.end] for bucket in self.layout.buckets]
        parts = [self.layout.owned(bucket, self.rank) for bucket in self.layout.buckets]
        self.landings = [self.full[part.start : part.end] for part in parts]
        self._casts = None

    def free(self, lent: bool) -> bool:
        """Free the full values: see [Note: breathing storage]. Return whether ``views`` are others from now on.

        Memory that a NumPy array shares (``parameter.detach().numpy()``) can never be resized again, and what was
        ``lent`` somebody may still read: it is left to whoever holds it, and the flat takes a new storage.
        """
        storage = self.full.untyped_storage()
        if storage.resizable() and not lent:
            storage.resize_(0)
            return False
        self._allocate()
        self.full.untyped_storage().resize_(0)
        return True

    def stand_in(self, shape: torch.Size) -> torch.Tensor:
        """A value of no use, for a parameter of ``shape`` to point at: see [Note: absent parameters]."""
        return self._nothing.expand(shape)

    def scatter(self, values: torch.Tensor, rank: int) -> None:
        """Keep this rank's part of ``values``, a full tensor laid out like this flat."""
        for number, (bucket, home) in enumerate(zip(self.layout.buckets, self.homes, strict=True)):
            part = self.layout.owned(bucket, rank)
            if not self.is_cast:
                self.owned[number].copy_(values[part.start : part.end])
            if self.master is not None:
                self.master.write(home, values[part.start : part.end])
        if not self.partitioned:
            self.full.copy_(values)

    def computed(self, number: int) -> torch.Tensor:
        """This rank's part of a bucket, in the dtype of computation, wherever it rests."""
        if not self.is_cast or self.master is None:
            return self.owned[number]
        return self.master.read(self.homes[number], self.device).to(self.dtype)

    def held(self) -> Iterator[tuple[int, Range, torch.Tensor]]:
        """Yield (parameter, elements of it, their exact values, the master's where there is one) this rank owns."""
        for number, (bucket, home) in enumerate(zip(self.layout.buckets, self.homes, strict=True)):
            for piece in self.layout.owned_pieces(bucket, self.rank):
                if self.master is None:
                    values = self.owned[number][piece.at : piece.at + piece.within.numel]
                    yield piece.parameter, piece.within, values
                    continue
                first = home.start + piece.at
                for common, values in self.master.within(Range(first, first + piece.within.numel)):
                    yield piece.parameter, common.moved(piece.within.start - first), values

    def divided_stretches(self) -> list[Range]:
        """Where, in this rank's shard, the values are that no other rank of the tensor axis has too."""
        stretches: list[Range] = []
        for piece in self.segments:
            if self.shares[piece.parameter] is None:
                continue
            here = Range(piece.at, piece.at + piece.within.numel)
            if stretches and stretches[-1].end == here.start:
                stretches[-1] = Range(stretches[-1].start, here.end)
            else:
                stretches.append(here)
        return stretches

    def update_from_master(self, near: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's parts and the master's parts they are to be copied from; ``near``: those on the device."""
        return ([], []) if self.is_cast else self._paired(self.owned, near)

    def _paired(self, parts: list[torch.Tensor], near: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Places in parts of the buckets, and what of the master belongs there, unless it is there already."""
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for home, part in zip(self.homes, parts, strict=True):
            for stretch, common in self.master.parts(home) if self.master is not None else ():
                source = stretch.tensor[common.start - stretch.span.start : common.end - stretch.span.start]
                place = part[common.start - home.start : common.end - home.start]
                if not (near and stretch.far) and place.data_ptr() != source.data_ptr():
                    places.append(place)
                    sources.append(source)
        return places, sources

    def differs_from_master(self) -> bool:
        """Whether this rank's part of resident values is not what its master, where it has one, would be cast to.

        One on disk is not read for that.
        """
        if self.master is None or any(stretch.tier == "disk" for stretch in self.master.stretches):
            return False
        return any(
            not torch.equal(part, self.master.read(home, self.device).to(self.dtype))
            for part, home in zip(self.landings, self.homes, strict=True)
        )

    def arrive(self) -> None:
        """Wait for new values of this rank's part that are on their way."""
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None  # not before: a wait that was interrupted is begun anew

    def bring(self) -> list[torch.Tensor]:
        """Return this rank's part of each bucket on the device, for the other ranks to gather."""
        self.arrive()
        if self.is_cast:
            self._casts = self._casts or self._paired(self.landings, near=True)
            if self._casts[0]:
                torch._foreach_copy_(*self._casts)
            return self.landings
        if not self.far or self.shard is None:
            return self.owned
        shard = self.shard if self.reader is None else self.reader.take(self.shard)
        for place, home in zip(self.landings, self.homes, strict=True):
            place.copy_(shard[home.slice], non_blocking=True)
        if self.reader is not None:
            self.reader.give(self.shard)
        return self.landings

    def fetch(self) -> None:
        """Start to read a shard that rests on disk, and is not about to change."""
        if self.reader is not None and self.shard is not None and self.arrival is None:
            self.reader.fetch(self.shard)


def share_rooms(flats: list[Flat]) -> None:
    """Let flats of nearly one size take memory of one size, so that each fits where another was."""
    for flat, room in zip(flats, shared_rooms([flat.room for flat in flats]), strict=True):
        flat.room = room


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's stride where its elements fill their memory (channels last too), else the plain one."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
