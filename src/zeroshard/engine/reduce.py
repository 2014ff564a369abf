"""ReduceBuffers: the buffers that gradients are packed and reduced in, and which gradients need no packing."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.memory import BucketRing, BucketSlot, MemoryTracker, buffer_lengths
from zeroshard.sharding import ParamRange, Range


class GradPacker:
    """Copies the gradients of one bucket into one slot of the ring, with the cast, in a few fused kernels."""

    def __init__(self, flat: FlatParam, bucket: Range, packed: torch.Tensor) -> None:
        self.packed = packed  # [bucket.numel], the slot's first elements
        self._flat = flat
        self._param_ranges = flat.layout.params_in_bucket(bucket)
        self._param_indices = [param_range.param_index for param_range in self._param_ranges]
        # positions of ranges that cover only a part of their parameter: at most the first and the last
        self._partial_positions: list[int] = []
        self._target_views: list[torch.Tensor] = []
        for position, param_range in enumerate(self._param_ranges):
            is_full = param_range.elements.numel == flat.layout.numels[param_range.param_index]
            if not is_full:
                self._partial_positions.append(position)
            shape = flat.shapes[param_range.param_index] if is_full else torch.Size((param_range.elements.numel,))
            stride = flat.strides[param_range.param_index] if is_full else (1,)
            self._target_views.append(packed.as_strided(shape, stride, packed.storage_offset() + param_range.offset))
        self._padding_views = [packed[span.start : span.end] for span in flat.layout.padding(bucket)]

    def pack(self, autograd_grads: list[torch.Tensor | None]) -> None:
        """Fill the slot; parameters without a gradient, and the padding, become zero."""
        bucket_grads = [autograd_grads[index] for index in self._param_indices]
        for position in self._partial_positions:
            gradient, param_range = bucket_grads[position], self._param_ranges[position]
            if gradient is not None:
                bucket_grads[position] = self._flat.flatten(gradient, param_range.param_index)[
                    param_range.elements.slice
                ]
        sources = [gradient for gradient in bucket_grads if gradient is not None]
        targets, to_zero = self._target_views, self._padding_views
        if len(sources) < len(targets):
            pairs = list(zip(bucket_grads, targets, strict=True))
            to_zero = [*to_zero, *(target for gradient, target in pairs if gradient is None)]
            targets = [target for gradient, target in pairs if gradient is not None]
        if to_zero:
            torch._foreach_zero_(to_zero)
        if targets:
            torch._foreach_copy_(targets, sources)


class ReduceBuffers:
    """For each dtype that gradients are reduced in: a bucket ring if they are partitioned, else a few shard buffers.

    [Note: reducing large gradients in place]
    A bucket inside one large parameter ([Note: large parameters]) is reduced as a slice of autograd's own gradient, if
    that has the dtype it would be packed in. This saves a copy, which would read and write the gradient once while
    compute needs the same memory bandwidth. If there is no such gradient, or it has other strides, a tensor with the
    right layout is created. The input has to live until the reduction has read it. So its ring slot (no buffer of
    which is used) keeps it until the reduction is finished, and the side stream's list keeps it until compute has
    waited for that stream. This happens when the next unit's gradients are ready: if a unit has such buckets (the same
    on all ranks), its reductions finish before those of the next start, so that the gradients of at most two units are
    in memory. Local sums of ``no_sync`` are reduced in place in the same way. If the backend overwrites its input, it
    gets a copy nevertheless, because a hook of the user may have kept the gradient.
    """

    def __init__(self, gradients: Iterable[FlatGrad], comm: Communicator, slots: int, ledger: MemoryTracker) -> None:
        self._flat_grads, self._comm, self._slot_count, self._tracker = list(gradients), comm, slots, ledger
        self._rings: dict[torch.dtype, BucketRing] = {}
        self._shard_buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        self._packers: dict[tuple[FlatParam, int, int], GradPacker] = {}  # by flat, bucket and slot
        self.is_reading_autograd_grads = False  # whether pending reductions may read autograd's gradients

    @property
    def is_busy(self) -> bool:
        """Return whether a reduction is pending, or buffers are allocated for one."""
        return any(ring.is_busy for ring in self._rings.values())

    def wait_all(self) -> None:
        """Finish all pending reductions."""
        for ring in self._rings.values():
            ring.wait_all()
        self.is_reading_autograd_grads = False

    def free(self) -> None:
        """Free the rings' buffers until they are needed again."""
        for ring in self._rings.values():
            ring.free_storage()

    def in_place_inputs(
        self, flat_grad: FlatGrad, autograd_grads: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return, for each bucket, the tensor that is reduced without packing, or None."""
        buckets, local_sum = flat_grad.flat.layout.buckets, flat_grad.local_sum
        if not self._can_reduce_in_place(flat_grad):
            return [None] * len(buckets)
        if flat_grad.has_local_sum and local_sum is not None:
            return [local_sum[bucket.slice] for bucket in buckets]
        return [
            None if param_range is None else self._in_place_input(flat_grad, bucket, param_range, autograd_grads)
            for bucket, param_range in zip(buckets, flat_grad.single_param_buckets, strict=True)
        ]

    def acquire_slots(self, flat_grad: FlatGrad, in_place_inputs: list[torch.Tensor | None]) -> list[BucketSlot]:
        """Return a slot for each bucket, with buffers for packing and for the result where these are needed.

        It allocates memory, so it is called on the compute stream: see [Note: streams without record_stream].
        """
        ring = self._rings.get(flat_grad.dtype)
        if ring is None:
            ring = self._rings[flat_grad.dtype] = self._make_ring(flat_grad.dtype)
        slots = [ring.next_slot() for _ in in_place_inputs]
        for bucket_index, slot in enumerate(slots):
            if in_place_inputs[bucket_index] is None:
                slot.input_buffers.alloc_storage(flat_grad.flat.layout.buckets[bucket_index].numel)
            if flat_grad.needs_reduce_buffer:
                slot.output_buffers.alloc_storage(flat_grad.flat.shard_ranges[bucket_index].numel)
        self.is_reading_autograd_grads |= self._can_reduce_in_place(flat_grad) and any(
            param_range is not None for param_range in flat_grad.single_param_buckets
        )
        return slots

    def pack(
        self, flat_grad: FlatGrad, bucket_index: int, slot: BucketSlot, autograd_grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Pack one bucket into a slot, from the local sum if there is one, else from autograd's gradients."""
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
        """Return one of the few buffers that replicated gradients are reduce-scattered into."""
        buffers = self._shard_buffers.setdefault(dtype, [])
        if not buffers:
            numel, device = max(self._shard_numels(dtype), default=0), self._comm.device
            buffers += [torch.empty(numel, dtype=dtype, device=device) for _ in range(self._slot_count)]
            self._tracker.add("buckets", sum(buffer.nbytes for buffer in buffers))
        return buffers[bucket_index % len(buffers)]

    def _make_ring(self, dtype: torch.dtype) -> BucketRing:
        packed_lengths = {
            bucket.numel
            for gradient in self._grads_of_dtype(dtype)
            for bucket, param_range in zip(gradient.flat.layout.buckets, gradient.single_param_buckets, strict=True)
            if param_range is None or not self._can_reduce_in_place(gradient)
        }
        lengths = buffer_lengths(packed_lengths), buffer_lengths(self._shard_numels(dtype))
        return BucketRing(self._slot_count, lengths, dtype, self._comm.device, self._tracker)

    def _grads_of_dtype(self, dtype: torch.dtype) -> list[FlatGrad]:
        return [gradient for gradient in self._flat_grads if gradient.dtype == dtype]

    def _shard_numels(self, dtype: torch.dtype) -> list[int]:
        """Return the elements of one rank's shard of each bucket."""
        return [span.numel for gradient in self._grads_of_dtype(dtype) for span in gradient.flat.shard_ranges]

    def _in_place_input(
        self, flat_grad: FlatGrad, bucket: Range, param_range: ParamRange, autograd_grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return a bucket inside one parameter, in place if possible, else as a packed copy."""
        bucket_grad = flat_grad.in_place_input(param_range, autograd_grads)
        if bucket_grad is None:
            bucket_grad = torch.empty(bucket.numel, dtype=flat_grad.dtype, device=self._comm.device)
            GradPacker(flat_grad.flat, bucket, bucket_grad).pack(autograd_grads)
            self._tracker.record_transient("autograd", bucket_grad.nbytes)
        return bucket_grad

    def _can_reduce_in_place(self, flat_grad: FlatGrad) -> bool:
        """Return whether buckets inside one parameter may be reduced in place; the same on all ranks."""
        return not (
            self._comm.reduce_scatter_overwrites_input
            or flat_grad.is_offloaded
            or flat_grad.flat.dtype != flat_grad.dtype
        )
