"""Buckets: the buffers that gradients pass on their way to their owners, and what is spared the way through them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroshard.comm.collectives import Communicator
from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.memory.bucket_ring import BucketRing, BucketSlot, buffer_lengths
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.sharding.layout import ParamRange, Range


class GradPacker:
    """Copies the gradients of one bucket into one slot of the ring, with the cast, in a few fused kernels."""

    def __init__(self, flat: FlatParam, bucket: Range, packed: torch.Tensor) -> None:
        self.packed = packed  # [bucket.numel], the slot's first elements
        self._flat = flat
        self._param_ranges = flat.layout.params_in_bucket(bucket)
        self._param_indices = [piece.param_index for piece in self._param_ranges]
        self._partial_positions: list[
            int
        ] = []  # positions of pieces that are not whole parameters: at most the first and the last
        self._target_views: list[torch.Tensor] = []
        for position, piece in enumerate(self._param_ranges):
            whole = piece.elements.numel == flat.layout.numels[piece.param_index]
            if not whole:
                self._partial_positions.append(position)
            shape = flat.shapes[piece.param_index] if whole else torch.Size((piece.elements.numel,))
            stride = flat.strides[piece.param_index] if whole else (1,)
            self._target_views.append(packed.as_strided(shape, stride, packed.storage_offset() + piece.offset))
        self._padding_views = [packed[gap.start : gap.end] for gap in flat.layout.padding(bucket)]

    def pack(self, autograd_grads: list[torch.Tensor | None]) -> None:
        """Fill the slot: what has no gradient, and what belongs to no parameter, is zero."""
        taken = [autograd_grads[parameter] for parameter in self._param_indices]
        for position in self._partial_positions:
            gradient, piece = taken[position], self._param_ranges[position]
            if gradient is not None:
                taken[position] = self._flat.flatten(gradient, piece.param_index)[piece.elements.slice]
        sources = [gradient for gradient in taken if gradient is not None]
        places, empty = self._target_views, self._padding_views
        if len(sources) < len(places):
            pairs = list(zip(taken, places, strict=True))
            empty = [*empty, *(place for gradient, place in pairs if gradient is None)]
            places = [place for gradient, place in pairs if gradient is not None]
        if empty:
            torch._foreach_zero_(empty)
        if places:
            torch._foreach_copy_(places, sources)


class ReduceBuffers:
    """For each dtype that gradients are reduced in, a ring where they are partitioned, or a few landings.

    [Note: what needs no packing]
    A bucket that lies within one large parameter ([Note: large parameters]) is given to the reduction as a part of the
    gradient that autograd has made, where that has the dtype it would be packed in: a copy saved, which reads and
    writes the gradient once beside a computation that wants the same memory. Where there is no such gradient, or with
    other strides, a tensor is made that could be one. It then has to live until the reduction has read it, so its slot
    of the ring, of which no buffer is used, keeps it until it is settled, and the lane's list until compute has waited
    for the lane. That is when the next unit's gradients are there: where a unit has such buckets (which all ranks know
    alike), its reductions end before those of the next begin, so that no more than two units' gradients are in memory.
    What was summed inside ``no_sync`` is reduced where it lies in the same way. A backend that overwrites what it
    reduces is given a copy all the same: whoever has seen the gradient in a hook may have kept it.
    """

    def __init__(self, gradients: Iterable[FlatGrad], comm: Communicator, slots: int, ledger: MemoryTracker) -> None:
        self._flat_grads, self._comm, self._slot_count, self._tracker = list(gradients), comm, slots, ledger
        self._rings: dict[torch.dtype, BucketRing] = {}
        self._shard_buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        self._packers: dict[tuple[FlatParam, int, int], GradPacker] = {}  # by flat, bucket and slot
        self.is_reading_autograd_grads = False  # whether reductions under way may be reading autograd's own

    @property
    def is_busy(self) -> bool:
        """Whether a reduction is under way, or buffers are open for one."""
        return any(ring.is_busy for ring in self._rings.values())

    def wait_all(self) -> None:
        """End every reduction under way."""
        for ring in self._rings.values():
            ring.wait_all()
        self.is_reading_autograd_grads = False

    def free(self) -> None:
        """Free the rings' buffers until they are wanted again."""
        for ring in self._rings.values():
            ring.free_storage()

    def in_place_inputs(
        self, flat_grad: FlatGrad, autograd_grads: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Of each bucket, what is reduced without being packed, or None."""
        buckets, local = flat_grad.flat.layout.buckets, flat_grad.local_sum
        if not self._can_reduce_in_place(flat_grad):
            return [None] * len(buckets)
        if flat_grad.has_local_sum and local is not None:
            return [local[bucket.slice] for bucket in buckets]
        return [
            None if sole is None else self._in_place_input(flat_grad, bucket, sole, autograd_grads)
            for bucket, sole in zip(buckets, flat_grad.single_param_buckets, strict=True)
        ]

    def acquire_slots(self, flat_grad: FlatGrad, in_place_inputs: list[torch.Tensor | None]) -> list[BucketSlot]:
        """A slot for each bucket in turn, where all that is not ``ready`` can be packed, and what needs to be reduced.

        It takes memory, so it is called on the compute stream: see [Note: streams without record_stream].
        """
        ring = self._rings.get(flat_grad.dtype)
        if ring is None:
            ring = self._rings[flat_grad.dtype] = self._make_ring(flat_grad.dtype)
        slots = [ring.next_slot() for _ in in_place_inputs]
        for number, slot in enumerate(slots):
            if in_place_inputs[number] is None:
                slot.input_buffers.alloc_storage(flat_grad.flat.layout.buckets[number].numel)
            if flat_grad.needs_reduce_buffer:
                slot.output_buffers.alloc_storage(flat_grad.flat.shard_ranges[number].numel)
        self.is_reading_autograd_grads |= self._can_reduce_in_place(flat_grad) and any(
            sole is not None for sole in flat_grad.single_param_buckets
        )
        return slots

    def pack(
        self, flat_grad: FlatGrad, bucket_index: int, slot: BucketSlot, autograd_grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Fill a slot with a bucket of what this rank has summed before, or else of what autograd has made."""
        flat, bucket = flat_grad.flat, flat_grad.flat.layout.buckets[bucket_index]
        packer = self._packers.get((flat, bucket_index, slot.index))
        if packer is None:
            packer = GradPacker(flat, bucket, slot.input_buffers.view(bucket.numel))
            self._packers[flat, bucket_index, slot.index] = packer
        if flat_grad.has_local_sum and flat_grad.local_sum is not None:
            packer.packed.copy_(flat_grad.local_sum[bucket.slice])
        else:
            packer.pack(autograd_grads)
        return packer.packed

    def shard_buffer(self, dtype: torch.dtype, bucket_index: int) -> torch.Tensor:
        """One of the few buffers that parts of replicated gradients are reduced into."""
        buffers = self._shard_buffers.setdefault(dtype, [])
        if not buffers:
            part, device = max(self._shard_numels(dtype), default=0), self._comm.device
            buffers += [torch.empty(part, dtype=dtype, device=device) for _ in range(self._slot_count)]
            self._tracker.add("buckets", sum(buffer.nbytes for buffer in buffers))
        return buffers[bucket_index % len(buffers)]

    def _make_ring(self, dtype: torch.dtype) -> BucketRing:
        packed = {
            bucket.numel
            for gradient in self._grads_of_dtype(dtype)
            for bucket, sole in zip(gradient.flat.layout.buckets, gradient.single_param_buckets, strict=True)
            if sole is None or not self._can_reduce_in_place(gradient)
        }
        parts = buffer_lengths(self._shard_numels(dtype))
        return BucketRing(self._slot_count, buffer_lengths(packed), parts, dtype, self._comm.device, self._tracker)

    def _grads_of_dtype(self, dtype: torch.dtype) -> list[FlatGrad]:
        return [gradient for gradient in self._flat_grads if gradient.dtype == dtype]

    def _shard_numels(self, dtype: torch.dtype) -> list[int]:
        """Elements of a rank's part of each bucket."""
        return [home.numel for gradient in self._grads_of_dtype(dtype) for home in gradient.flat.shard_ranges]

    def _in_place_input(
        self, flat_grad: FlatGrad, bucket: Range, param_range: ParamRange, autograd_grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """A bucket within one parameter, as it lies, or laid out anew."""
        found = flat_grad.in_place_input(param_range, autograd_grads)
        if found is None:
            found = torch.empty(bucket.numel, dtype=flat_grad.dtype, device=self._comm.device)
            GradPacker(flat_grad.flat, bucket, found).pack(autograd_grads)
            self._tracker.record_transient("autograd", found.nbytes)
        return found

    def _can_reduce_in_place(self, flat_grad: FlatGrad) -> bool:
        """Whether buckets within one parameter may be reduced as they lie; all ranks say the same."""
        return not (
            self._comm.reduce_scatter_overwrites_input
            or flat_grad.is_offloaded
            or flat_grad.flat.dtype != flat_grad.dtype
        )
