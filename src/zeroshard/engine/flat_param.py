"""Flat: the parameters of one unit that share dtype and trainability, and where their values are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from zeroshard.comm.collectives import Communicator
from zeroshard.memory.disk.prefetch import ParamPrefetcher
from zeroshard.memory.tiered_tensor import TieredTensor
from zeroshard.sharding.layout import FlatLayout, ParamRange, Range, round_to_shared_sizes
from zeroshard.sharding.tier_placement import TierPlacement
from zeroshard.tensor_parallel.parallelize import TPParam
from zeroshard.tensor_parallel.tp_shard import TPShard


class PendingUpdate(Protocol):
    """Values that are on their way from another tier."""

    def wait(self) -> None:
        """Return when what comes next on this thread and stream may use them."""


class FlatParam:
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
        tp_params: Sequence[TPParam | None],
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.layout = layout
        self.dtype = dtype
        self.is_trainable = parameters[0].requires_grad
        self.original_dtypes = tuple(p.dtype for p in parameters)
        self.tp_params = tuple(tp_params)  # which parameters are DTensors over the tensor axis, and how
        self.has_dtensors = any(d is not None for d in tp_params)
        self.tp_shards: tuple[TPShard | None, ...] = tuple(d.shard if d is not None else None for d in tp_params)
        self.full_shapes = tuple(p.shape for p in parameters)  # shapes of the undivided parameters
        # from here on, "parameter" is what this rank of the tensor axis has of it
        self.shapes = tuple(
            whole if share is None else share.local_shape
            for whole, share in zip(self.full_shapes, self.tp_shards, strict=True)
        )
        self.strides = tuple(
            _dense_stride(p) if d is None else torch.empty(shape, device="meta").stride()
            for p, d, shape in zip(parameters, tp_params, self.shapes, strict=True)
        )
        self.device = device
        self.full = torch.empty(0, dtype=dtype, device=device)  # [layout.numel], placed by Unit
        self.is_partitioned = False  # whether ``full`` comes and goes
        self.shard: torch.Tensor | None = None  # [layout.shard_numel] when partitioned, unless it is cast
        self.local_shards: list[
            torch.Tensor
        ] = []  # this rank's part of each bucket: of ``shard``, or of ``full``, if kept
        self.shard_slots: list[torch.Tensor] = []  # the same parts' places in ``full``
        self._cast_pairs: tuple[list[torch.Tensor], list[torch.Tensor]] | None = (
            None  # landings, and what is cast into them
        )
        self.shard_ranges = tuple(
            layout.shard_range(bucket) for bucket in layout.buckets
        )  # the same parts' places in the shard
        self.tier_placement = TierPlacement()  # in which tiers its states rest
        self.master: TieredTensor | None = (
            None  # [layout.shard_numel], what an optimizer updates in the parameters' stead
        )
        self.pending_update: PendingUpdate | None = (
            None  # of new values for ``owned``, from an update outside the device
        )
        self.prefetcher: ParamPrefetcher | None = None  # of a shard on disk
        self.views: list[torch.Tensor] = []  # each parameter in ``full``
        self.placeholders: list[torch.Tensor] = []  # what each absent parameter points at between passes
        self.owned_ranges: list[ParamRange] = []  # the parts of parameters this rank owns
        self.shard_rank = 0  # on the axis that the flat is partitioned over
        self.bucket_views: list[torch.Tensor] = []  # each bucket of ``full``
        # where the parameters lie, and how often they were changed in place, when last looked at: resident flats alone
        self.known_data_ptrs: list[int] | None = None
        self.known_versions: list[int] = []
        self.alloc_bytes = layout.numel * dtype.itemsize  # bytes of ``full``'s storage: see ``round_alloc_bytes``

    @property
    def is_offloaded(self) -> bool:
        """Whether this rank's part of the parameters rests outside the device."""
        return self.tier_placement.parameters != "device"

    @property
    def is_cast_from_master(self) -> bool:
        """Whether the master is all that this rank keeps of its part: see [Note: cast on gather]."""
        return self.is_partitioned and self.shard is None

    @property
    def is_on_disk(self) -> bool:
        """Whether it rests on disk."""
        return self.tier_placement.parameters == "disk"

    @property
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names."""
        return zip(self.names, self.parameters, strict=True)

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """View parameter ``index`` inside a tensor laid out like this flat, in the strides it was made with."""
        start = flat.storage_offset() + self.layout.starts[index]
        return flat.as_strided(self.shapes[index], self.strides[index], start)

    def flatten(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Flatten a tensor of parameter ``index``'s shape into the order its elements have in the flat."""
        if tensor.stride() != self.strides[index]:
            tensor = torch.empty_strided(
                self.shapes[index], self.strides[index], dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def allocate(self, comm: Communicator, is_partitioned: bool, shard: torch.Tensor | None) -> None:
        """Allocate: the breathing storage when partitioned, beside a shard or a master; else the full tensor alone."""
        self.is_partitioned, self.shard, self.shard_rank = is_partitioned, shard, comm.shard_axis.rank
        self._allocate_full()
        self._placeholder_value = torch.full(
            (), float("nan") if self.dtype.is_floating_point else 0, dtype=self.dtype, device=self.device
        )
        self.placeholders = [self.placeholder(shape) for shape in self.shapes]
        self.owned_ranges = self.layout.owned_ranges(self.shard_rank)
        self.local_shards = self.shard_slots
        if is_partitioned:
            self.local_shards = (
                [shard[home.start : home.end] for home in self.shard_ranges] if shard is not None else []
            )
            self.full.untyped_storage().resize_(0)

    def _allocate_full(self) -> None:
        self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        self.views = [self.view(self.full, index) for index in range(len(self.shapes))]
        self.bucket_views = [self.full[bucket.start : bucket.end] for bucket in self.layout.buckets]
        parts = [self.layout.bucket_shard(bucket, self.shard_rank) for bucket in self.layout.buckets]
        self.shard_slots = [self.full[part.start : part.end] for part in parts]
        self._cast_pairs = None

    def free(self, keep_storage: bool) -> bool:
        """Free the full values: see [Note: breathing storage]. Return whether ``views`` are others from now on.

        Memory that a NumPy array shares (``parameter.detach().numpy()``) can never be resized again, and what was
        ``lent`` somebody may still read: it is left to whoever holds it, and the flat takes a new storage.
        """
        storage = self.full.untyped_storage()
        if storage.resizable() and not keep_storage:
            storage.resize_(0)
            return False
        self._allocate_full()
        self.full.untyped_storage().resize_(0)
        return True

    def placeholder(self, shape: torch.Size) -> torch.Tensor:
        """A value of no use, for a parameter of ``shape`` to point at: see [Note: absent parameters]."""
        return self._placeholder_value.expand(shape)

    def load_full(self, values: torch.Tensor, rank: int) -> None:
        """Keep this rank's part of ``values``, a full tensor laid out like this flat."""
        for number, (bucket, home) in enumerate(zip(self.layout.buckets, self.shard_ranges, strict=True)):
            part = self.layout.bucket_shard(bucket, rank)
            if not self.is_cast_from_master:
                self.local_shards[number].copy_(values[part.start : part.end])
            if self.master is not None:
                self.master.write(home, values[part.start : part.end])
        if not self.is_partitioned:
            self.full.copy_(values)

    def local_shard(self, bucket_index: int) -> torch.Tensor:
        """This rank's part of a bucket, in the dtype of computation, wherever it rests."""
        if not self.is_cast_from_master or self.master is None:
            return self.local_shards[bucket_index]
        return self.master.read(self.shard_ranges[bucket_index], self.device).to(self.dtype)

    def owned_slices(self) -> Iterator[tuple[int, Range, torch.Tensor]]:
        """Yield (parameter, elements of it, their exact values, the master's where there is one) this rank owns."""
        for number, (bucket, home) in enumerate(zip(self.layout.buckets, self.shard_ranges, strict=True)):
            for piece in self.layout.owned_ranges_in_bucket(bucket, self.shard_rank):
                if self.master is None:
                    values = self.local_shards[number][piece.offset : piece.offset + piece.elements.numel]
                    yield piece.param_index, piece.elements, values
                    continue
                first = home.start + piece.offset
                for common, values in self.master.views_in(Range(first, first + piece.elements.numel)):
                    yield piece.param_index, common.shift(piece.elements.start - first), values

    def tp_sharded_ranges(self) -> list[Range]:
        """Where, in this rank's shard, the values are that no other rank of the tensor axis has too."""
        stretches: list[Range] = []
        for piece in self.owned_ranges:
            if self.tp_shards[piece.param_index] is None:
                continue
            here = Range(piece.offset, piece.offset + piece.elements.numel)
            if stretches and stretches[-1].end == here.start:
                stretches[-1] = Range(stretches[-1].start, here.end)
            else:
                stretches.append(here)
        return stretches

    def master_copy_lists(self, device_only: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's parts and the master's parts they are to be copied from; ``near``: those on the device."""
        return ([], []) if self.is_cast_from_master else self._pair_with_master(self.local_shards, device_only)

    def _pair_with_master(
        self, shards: list[torch.Tensor], device_only: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Places in parts of the buckets, and what of the master belongs there, unless it is there already."""
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for home, part in zip(self.shard_ranges, shards, strict=True):
            for stretch, common in self.master.segments_in(home) if self.master is not None else ():
                source = stretch.tensor[common.start - stretch.span.start : common.end - stretch.span.start]
                place = part[common.start - home.start : common.end - home.start]
                if not (device_only and stretch.is_offloaded) and place.data_ptr() != source.data_ptr():
                    places.append(place)
                    sources.append(source)
        return places, sources

    def differs_from_master(self) -> bool:
        """Whether this rank's part of resident values is not what its master, where it has one, would be cast to.

        One on disk is not read for that.
        """
        if self.master is None or any(stretch.tier == "disk" for stretch in self.master.segments):
            return False
        return any(
            not torch.equal(part, self.master.read(home, self.device).to(self.dtype))
            for part, home in zip(self.shard_slots, self.shard_ranges, strict=True)
        )

    def wait_for_update(self) -> None:
        """Wait for new values of this rank's part that are on their way."""
        if self.pending_update is not None:
            self.pending_update.wait()
            self.pending_update = None  # not before: a wait that was interrupted is begun anew

    def all_gather_inputs(self) -> list[torch.Tensor]:
        """Return this rank's part of each bucket on the device, for the other ranks to gather."""
        self.wait_for_update()
        if self.is_cast_from_master:
            self._cast_pairs = self._cast_pairs or self._pair_with_master(self.shard_slots, device_only=True)
            if self._cast_pairs[0]:
                torch._foreach_copy_(*self._cast_pairs)
            return self.shard_slots
        if not self.is_offloaded or self.shard is None:
            return self.local_shards
        shard = self.shard if self.prefetcher is None else self.prefetcher.acquire(self.shard)
        for place, home in zip(self.shard_slots, self.shard_ranges, strict=True):
            place.copy_(shard[home.slice], non_blocking=True)
        if self.prefetcher is not None:
            self.prefetcher.release(self.shard)
        return self.shard_slots

    def prefetch(self) -> None:
        """Start to read a shard that rests on disk, and is not about to change."""
        if self.prefetcher is not None and self.shard is not None and self.pending_update is None:
            self.prefetcher.prefetch(self.shard)


def round_alloc_bytes(flats: list[FlatParam]) -> None:
    """Let flats of nearly one size take memory of one size, so that each fits where another was."""
    for flat, room in zip(flats, round_to_shared_sizes([flat.alloc_bytes for flat in flats]), strict=True):
        flat.alloc_bytes = room


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's stride where its elements fill their memory (channels last too), else the plain one."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
