"""GradReducer: reduce gradients over the ranks, bucket by bucket, through buffers of constant size."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from zeroshard.comm import COMPLETED_WORK, CollectiveWork, ErrorFeedback, MeshAxis, Quantizer
from zeroshard.engine.context import ShardContext
from zeroshard.engine.flat_grad import FlatGrad, GradListeners, GradMemory, compute_norms
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.unit import Unit
from zeroshard.memory import BucketRing, BucketSlot, SideStream, buffer_lengths
from zeroshard.sharding import ParamRange, Range
from zeroshard.utils.profiling import label

# What the reduced gradients are made of, equal on all ranks: how often all units were reduced since they were cleared,
# and which parameters were cleared since, each after how many of these reductions.
GradHistory = tuple[int, tuple[tuple[str, int], ...]]
NO_HISTORY: GradHistory = (0, ())


class Hops(Enum):
    """Over which axes partitioned gradients are reduced; the value is a suffix for the names of backward passes."""

    BOTH = ""  # over all that there are
    INNER = " inside the inner axis"  # and added to the inner sum: see [Note: inner sums]
    OUTER = " over the outer axis"  # an inner sum, after the backwards


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
    in memory. Local sums of ``no_sync`` are reduced in place in the same way.
    """

    def __init__(self, flat_grads: Iterable[FlatGrad], context: ShardContext) -> None:
        comm, self._slot_count = context.comm, context.config.ring
        self._flat_grads, self._comm, self._tracker = list(flat_grads), comm, context.tracker
        # flats whose buckets inside one parameter may be reduced in place; the same on all ranks
        self._in_place = {grad for grad in self._flat_grads if grad.flat.spec.can_reduce_in_place}
        self._rings: dict[torch.dtype, BucketRing] = {}
        self._shard_buffers: dict[torch.dtype, deque[torch.Tensor]] = {}  # the next one first
        self._packers: dict[tuple[FlatParam, int, int], GradPacker] = {}  # by flat, bucket and slot
        self.is_reading_autograd_grads = False  # whether pending reductions may read autograd's gradients
        # elements of the receive buffer of each bucket; 0: none
        self.receive_numels = {
            grad: grad.flat.spec.receive_numels(comm.needs_receive_buffer) for grad in self._flat_grads
        }
        # for each bucket, what converts gradients to 8 bits, if they are sent in these
        self.quantizers = {grad: self._make_quantizers(grad) for grad in self._flat_grads}

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
        if flat_grad not in self._in_place:
            return [None] * len(buckets)
        if flat_grad.has_local_sum and local_sum is not None:
            return [local_sum[bucket.slice] for bucket in buckets]
        return [
            None if param_range is None else self._in_place_input(flat_grad, bucket, param_range, autograd_grads)
            for bucket, param_range in zip(buckets, flat_grad.flat.spec.single_param_buckets, strict=True)
        ]

    def acquire_slots(self, flat_grad: FlatGrad, in_place_inputs: Sequence[torch.Tensor | None]) -> list[BucketSlot]:
        """Return a slot for each bucket, with buffers for packing and for the result where these are needed.

        It allocates memory, so it is called on the compute stream: see [Note: streams without record_stream].
        """
        ring = self._rings.get(flat_grad.dtype)
        if ring is None:
            ring = self._rings[flat_grad.dtype] = self._make_ring(flat_grad.dtype)
        slots, needs_reduce_buffer = [], flat_grad.needs_reduce_buffer
        for bucket_index, in_place_input in enumerate(in_place_inputs):
            slot = ring.next_slot()
            bucket = flat_grad.flat.layout.buckets[bucket_index]
            if in_place_input is None:
                slot.input_buffers.alloc_storage(bucket.end - bucket.start)
            if slot.receive_buffers is not None and (numel := self.receive_numels[flat_grad][bucket_index]):
                slot.receive_buffers.alloc_storage(numel)
            if needs_reduce_buffer:
                slot.output_buffers.alloc_storage(flat_grad.flat.shard_ranges[bucket_index].numel)
            slots.append(slot)
        self.is_reading_autograd_grads |= flat_grad in self._in_place and flat_grad.flat.spec.has_single_param_buckets
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

    def next_shard_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the next of the few buffers that replicated gradients are reduce-scattered into, in turn."""
        buffers = self._shard_buffers.setdefault(dtype, deque())
        if not buffers:
            numel, device = max(self._shard_numels(dtype), default=0), self._comm.device
            buffers.extend(torch.empty(numel, dtype=dtype, device=device) for _ in range(self._slot_count))
            self._tracker.add("buckets", sum(buffer.nbytes for buffer in buffers))
        buffers.rotate(-1)
        return buffers[-1]

    def receive_buffer(self, flat_grad: FlatGrad, bucket_index: int) -> torch.Tensor | None:
        """Return the ring's next receive buffer, to reduce a bucket of replicated gradients; None if not needed."""
        ring, numel = self._rings.get(flat_grad.dtype), self.receive_numels[flat_grad][bucket_index]
        if ring is None:
            ring = self._rings[flat_grad.dtype] = self._make_ring(flat_grad.dtype)
        buffers = ring.next_slot().receive_buffers
        if buffers is None or not numel:
            return None
        buffers.alloc_storage(numel)
        return buffers.view(numel)

    def residuals(self) -> list[torch.Tensor]:
        """Return what earlier payloads could not express, by bucket."""
        quantizers = [quantizer for of_grad in self.quantizers.values() for quantizer in of_grad]
        return [quantizer.residual for quantizer in quantizers if isinstance(quantizer, ErrorFeedback)]

    def _make_quantizers(self, flat_grad: FlatGrad) -> list[Quantizer | None]:
        wire, layout, device = flat_grad.flat.spec.reduce_wire, flat_grad.flat.layout, self._comm.device
        if wire is None or not flat_grad.flat.spec.has_error_feedback:
            return [None if wire is None else Quantizer(wire, device)] * len(layout.buckets)
        residual = torch.zeros(layout.numel, dtype=flat_grad.dtype, device=device)
        self._tracker.add("error feedback", residual.nbytes)
        return [
            ErrorFeedback(wire, residual[bucket.slice], partial(flat_grad.unused_parts, bucket))
            for bucket in layout.buckets
        ]

    def _make_ring(self, dtype: torch.dtype) -> BucketRing:
        packed: set[int] = set()
        received: set[int] = set()
        for gradient in self._grads_of_dtype(dtype):
            spec = gradient.flat.spec
            received |= set(self.receive_numels[gradient]) - {0}
            for bucket, param_range in zip(spec.layout.buckets, spec.single_param_buckets, strict=True):
                if param_range is None or gradient not in self._in_place:
                    packed.add(bucket.numel)
        lengths = buffer_lengths(packed), buffer_lengths(self._shard_numels(dtype)), buffer_lengths(received)
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
        tensor, index, flat = autograd_grads[param_range.param_index], param_range.param_index, flat_grad.flat
        if (
            tensor is not None
            and (tensor.dtype, tensor.stride()) == (flat_grad.dtype, flat.strides[index])
            and not (tensor.is_conj() or tensor.is_neg())  # else its memory holds other values
        ):
            bucket_grad = flat.flatten(tensor, index)[param_range.elements.slice]
        else:
            bucket_grad = torch.empty(bucket.numel, dtype=flat_grad.dtype, device=self._comm.device)
            GradPacker(flat, bucket, bucket_grad).pack(autograd_grads)
            self._tracker.record_transient("autograd", bucket_grad.nbytes)
        return bucket_grad


class _Reduction(NamedTuple):
    """A pending reduction of one bucket."""

    work: CollectiveWork
    axes: list[MeshAxis]  # over which the result is still to be summed
    what: str
    flat_grad: FlatGrad
    bucket_index: int
    result: torch.Tensor
    shard: torch.Tensor  # where the result goes
    adds_to_shard: bool = False  # the shard holds the sum of earlier backwards
    kept: torch.Tensor | None = None  # what is reduced; if offloaded, a part of it: device memory for the earlier sum

    @property
    def is_last_bucket(self) -> bool:
        """Whether the gradient is complete with this bucket."""
        return self.bucket_index == len(self.flat_grad.bucket_shards) - 1


class ReduceQueue:
    """The fixed order in which all ranks reduce their units, whatever order each finishes them in.

    Once the ranks have agreed, it is the reverse of rank 0's first forward: backward usually finishes units in that
    order. Before, it is the reverse of their definition.

    Replicated gradients are reduced in the last backward before a step, if that is known, or by the step. If that
    backward raises, it reduces what it has got, because the other ranks wait for it. On a GPU its end may be noticed
    late, with some units reduced and others not: then the next reduction goes on from there.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.order = units[::-1]
        self.is_agreed = False  # whether all ranks have agreed on the order
        self._position = 0  # of the next unit to reduce
        self._done: set[Unit] = set()
        self.history = NO_HISTORY
        self.last_done: dict[Unit, None] = {}  # units in the order in which a backward finished them, before is_agreed

    def agree(self, used: list[Unit], context: ShardContext) -> None:
        """Use the order of rank 0's ``used`` units, then the others, on all ranks; it goes from host to host."""
        units, what = self.order[::-1], "agree on the order of reductions"
        order = [units.index(unit) for unit in dict.fromkeys((*used, *units))]
        context.order.check(what)
        text = context.comm.consistency.broadcast_text(what, json.dumps(order))
        self.order, self.is_agreed = [units[index] for index in (order if text is None else json.loads(text))], True

    @property
    def is_partial(self) -> bool:
        """Whether some units are reduced and the others are not yet."""
        return self._position > 0

    def is_ahead_of(self, unit: Unit) -> bool:
        """Return whether a unit is already reduced, and others are not yet."""
        return unit in self.order[: self._position]

    def add(self, unit: Unit) -> list[Unit]:
        """Add a unit that is done in this backward; return the units to reduce now."""
        self._done.add(unit)
        first = self._position
        while self._position < len(self.order) and self.order[self._position] in self._done:
            self._position += 1
        return self.order[first : self._position]

    def drain(self) -> list[Unit]:
        """Return the units that are not reduced yet, and start again with the first unit."""
        reductions, cleared = self.history
        remaining, self._position, self.history = self.order[self._position :], 0, (reductions + 1, cleared)
        self._done.clear()
        return remaining

    def record_clear(self, parameter: str) -> None:
        """Record that the reduced gradient of one parameter is cleared."""
        reductions, cleared = self.history
        self.history = reductions, tuple(sorted({**dict(cleared), parameter: reductions}.items()))

    def record_optimizer_clear(self, optimizer: int, count: int) -> None:
        """Record that the reduced gradients of one of ``count`` optimizers are cleared.

        What was before the last clear of each is forgotten.
        """
        self.record_clear(f"optimizer {optimizer}")
        reductions, cleared = self.history
        by_name = dict(cleared)
        forgotten = min(by_name.get(f"optimizer {number}", 0) for number in range(count))
        kept = [(name, number - forgotten) for name, number in cleared if number > forgotten]
        self.history = reductions - forgotten, tuple(kept)

    def abort(self, keeps_position: bool) -> None:
        """Handle a backward that has raised: start again with the first unit, or go on from the next one."""
        self._position = self._position if keeps_position else 0
        self._done.clear()


class GradReducer:
    """Reduces gradients over the ranks, concurrently with compute, and writes each rank's shard.

    [Note: packing on the compute stream]
    If a unit's gradients fit in one bucket, as for most units, the compute stream packs them, and autograd's gradients
    are freed before the next unit's are computed. It first waits for the pending reduction of its ring slot, which
    started some units ago (``Config.ring``). With more buckets than slots, it would have to wait for reductions that
    have just started. If finishing a reduction takes more than a wait and a multiplication (an all-reduce over
    replicas, a second hop, a sum of 8-bit payloads, a copy off the device), it would wait for that too. In these cases
    the side stream packs the gradients and finishes the reductions, concurrently with compute, and autograd's gradients
    stay until the next unit's are ready.
    """

    def __init__(self, flat_grads: Iterable[FlatGrad], memory: GradMemory, context: ShardContext) -> None:
        comm, config = context.comm, context.config
        self.listeners = GradListeners()
        self._comm, self._tracker, self._memory, self._slot_count = comm, context.tracker, memory, config.ring
        self._stream = SideStream(comm.device, comm.wait_timer)
        self._buffers = ReduceBuffers(flat_grads, context)
        self._stream_inputs: list[torch.Tensor] = []  # kept until compute has waited for the side stream
        self.is_busy = False  # whether a reduction may be pending, or memory is kept for one
        has_one_hop = not comm.replicate_axes and comm.shard_axis.factors is None
        self._can_finish_on_compute_stream = has_one_hop and config.offload is None
        self.needs_overflow_check = False  # fp16: the largest magnitudes of offloaded gradients are needed too
        self._local_reductions: deque[_Reduction] = deque()  # pending, the oldest first
        # how many of these there may be: each has a buffer, or, if waiting blocks the host, all end with backward
        is_unbounded = comm.shard_axis.size == 1 and comm.is_host_blocking
        self._max_local_reductions = math.inf if is_unbounded else config.ring

    # -- partitioned gradients --------------------------------------------------------------------------------------

    def begin_unit(self) -> None:
        """Free the gradients of the previous unit, which the side stream has read."""
        self.is_busy = True
        if self._buffers.is_reading_autograd_grads:  # these could not be freed before
            with self._stream:
                self._buffers.wait_all()
        self._wait_stream()

    def start(self, flat_grad: FlatGrad, what: str, hops: Hops) -> None:
        """Start to reduce a flat's gradient bucket by bucket; pack it if necessary."""
        earlier_sums = [] if flat_grad.inner_sum is None else flat_grad.inner_parts()
        autograd_grads: list[torch.Tensor | None] = []
        in_place_inputs: Sequence[torch.Tensor | None] = earlier_sums
        if hops is not Hops.OUTER:
            autograd_grads = flat_grad.pop_autograd_grads()
            in_place_inputs = self._buffers.in_place_inputs(flat_grad, autograd_grads)
        slots = self._buffers.acquire_slots(flat_grad, in_place_inputs)
        present = [tensor for tensor in autograd_grads if tensor is not None]
        self._tracker.record_transient("autograd", sum(map(attrgetter("nbytes"), present)))
        on_compute_stream = (
            self._can_finish_on_compute_stream
            and flat_grad.flat.spec.fits_one_packed_bucket
            and flat_grad.flat.spec.reduce_wire is None
            and not flat_grad.has_local_sum
        )
        if not on_compute_stream:
            self._stream_inputs += present
        (self._memory.allocate_inner_sum if hops is Hops.INNER else self._memory.allocate)(flat_grad)
        flat_grad.flat.wait_for_update()  # a pending update may still read the previous step's gradient
        targets = flat_grad.inner_parts() if hops is Hops.INNER else flat_grad.bucket_shards
        with nullcontext() if on_compute_stream else self._stream:
            for bucket_index, slot in enumerate(slots):
                slot.wait()
                packed, target = in_place_inputs[bucket_index], targets[bucket_index]
                if packed is None:
                    packed = self._buffers.pack(flat_grad, bucket_index, slot, autograd_grads)
                inner_sum = earlier_sums[bucket_index] if earlier_sums else None
                self._launch(flat_grad, bucket_index, slot, packed, target, inner_sum, hops, what)
        if hops is not Hops.INNER:
            flat_grad.has_shard = True
            if flat_grad.inner_sum is not None:
                self._stream_inputs.append(flat_grad.inner_sum)  # the side stream may still read it
                self._memory.drop_inner_sum(flat_grad)
        if flat_grad.local_sum is not None:
            self._stream_inputs.append(flat_grad.local_sum)  # the side stream may still read it
            self._memory.drop_local_sum(flat_grad)
        if self._comm.device.type != "cuda":
            self._stream_inputs.clear()

    def _launch(
        self,
        flat_grad: FlatGrad,
        bucket_index: int,
        slot: BucketSlot,
        packed: torch.Tensor,
        target: torch.Tensor,
        inner_sum: torch.Tensor | None,
        hops: Hops,
        what: str,
    ) -> None:
        """Start to reduce a packed bucket to ``target``: its shard, or its part of the inner sum.

        ``inner_sum``: that part, if it has values.
        """
        numel = self._buffers.receive_numels[flat_grad][bucket_index]
        received = None if slot.receive_buffers is None or not numel else slot.receive_buffers.view(numel)
        quantizer = self._buffers.quantizers[flat_grad][bucket_index]
        if hops is Hops.INNER:
            adds = inner_sum is not None
            slot.finish_reduce = self._comm.reduce_scatter_inner(target, packed, what, received, quantizer, adds).wait
            return
        # If the shard holds no values yet, reduce directly into it.
        result = slot.output_buffers.view(target.numel()) if flat_grad.needs_reduce_buffer else target
        finish, kept = self._finish_on_device, packed
        if flat_grad.is_offloaded:
            finish, kept = self._finish_offloaded, packed[: target.numel()]
            if self._comm.shard_axis.size == 1:
                result, kept = packed, result
        if hops is Hops.OUTER:
            work = self._comm.reduce_scatter_outer(result, packed, what, received, quantizer, COMPLETED_WORK)
        else:
            work = self._comm.reduce_scatter(result, packed, what, received, quantizer, inner_sum)
        axes = self._comm.replicate_axes
        if axes:
            work, axes = self._start_sum(work, result, what, axes)
        adds = flat_grad.has_shard
        reduction = _Reduction(work, axes, what, flat_grad, bucket_index, result, target, adds, kept)
        slot.finish_reduce = partial(finish, reduction)
        if self._comm.data_parallel_size == 1:  # there are no other ranks to wait for
            slot.wait()

    def _finish_on_device(self, reduction: _Reduction) -> None:
        self._finish(reduction)
        if reduction.kept is not None and self._comm.device.type == "cuda":
            self._stream_inputs.append(reduction.kept)
        if self.listeners:
            self._notify(reduction)

    def _finish_offloaded(self, reduction: _Reduction) -> None:
        """Finish the reduction of an offloaded gradient: record its norms, and copy it off the device."""
        flat_grad, shard, result = reduction.flat_grad, reduction.shard, reduction.result
        self._wait_average(reduction)
        if reduction.adds_to_shard and shard.device == result.device:
            result.add_(shard)
        elif reduction.adds_to_shard and reduction.kept is not None:
            result.add_(reduction.kept.copy_(shard, non_blocking=True))
        start = flat_grad.flat.shard_ranges[reduction.bucket_index].start
        spans = flat_grad.norm_ranges(reduction.bucket_index, include_replicated=self._comm.tensor_axis.rank == 0)
        views = [result[span.start - start : span.end - start] for span in spans]
        flat_grad.norms[2.0][reduction.bucket_index] = compute_norms(views, 2.0)
        if self.needs_overflow_check:
            flat_grad.norms[math.inf][reduction.bucket_index] = compute_norms([result], math.inf)
        with label("offload gradients ({})", reduction.what):
            shard.copy_(result, non_blocking=True)
        flat_grad.copy_done = self._stream.record_blocking_event()
        if reduction.kept is not None and self._comm.device.type == "cuda":
            self._stream_inputs.append(reduction.kept)  # part of an inner sum, perhaps, which is dropped already
        if self.listeners:
            self._notify(reduction)

    def _notify(self, reduction: _Reduction) -> None:
        """Tell the listeners if all buckets of a flat are reduced."""
        if reduction.is_last_bucket:
            self.listeners.on_shard_ready(reduction.flat_grad.flat)

    # -- replicated gradients -----------------------------------------------------------------------------------

    def start_local_sum(self, flat_grad: FlatGrad, what: str) -> None:
        """Start to reduce ``local_sum`` bucket by bucket; the results go to its front, where they form the shard.

        The target of a bucket, ``shard_range(bucket)``, is inside buckets that are already reduced. So nothing that is
        still needed is overwritten, and stage 1 needs no memory in addition to its full gradients.
        """
        self.is_busy = True
        if not flat_grad.has_local_sum:  # no gradient on this rank: contribute zeros
            self._memory.allocate_local_sum(flat_grad).zero_()
            flat_grad.has_local_sum = True
        local_sum, layout, comm = flat_grad.local_sum, flat_grad.flat.layout, self._comm
        assert local_sum is not None
        flat_grad.set_shard(local_sum[: layout.shard_numel])
        for bucket_index, bucket in enumerate(layout.buckets if comm.data_parallel_size > 1 else ()):
            result = shard = flat_grad.bucket_shards[bucket_index]
            received = None
            if comm.shard_axis.size > 1:  # before the side stream: see [Note: streams without record_stream]
                result = self._buffers.next_shard_buffer(flat_grad.dtype)[: shard.numel()]
                received = self._buffers.receive_buffer(flat_grad, bucket_index)
            with self._stream:
                if len(self._local_reductions) >= self._max_local_reductions:
                    self._finish_local_reduction()
                if comm.shard_axis.size > 1:
                    quantizer = self._buffers.quantizers[flat_grad][bucket_index]
                    work, done = comm.reduce_scatter(result, local_sum[bucket.slice], what, received, quantizer), 0
                else:
                    work, done = comm.all_reduce_gradient(result, comm.replicate_axes[0], what), 1
                work, axes = self._start_sum(work, result, what, comm.replicate_axes[done:])
            self._local_reductions.append(_Reduction(work, axes, what, flat_grad, bucket_index, result, shard))
        if comm.data_parallel_size == 1 or not layout.buckets:  # nothing to reduce
            self._finish_local_sum(flat_grad)

    def _finish_local_reduction(self) -> None:
        """Finish the oldest reduction of a bucket of a local sum, on the side stream."""
        reduction = self._local_reductions.popleft()
        self._finish(reduction)
        if reduction.is_last_bucket:
            self._finish_local_sum(reduction.flat_grad)

    def _finish_local_sum(self, flat_grad: FlatGrad) -> None:
        carried_over = self._memory.pop_carried_over(flat_grad)
        if carried_over is not None:
            assert flat_grad.shard is not None
            flat_grad.shard.add_(carried_over)
            self._stream_inputs.append(carried_over)
        flat_grad.has_local_sum, flat_grad.has_shard = False, True

    # -- finishing ----------------------------------------------------------------------------------------------

    def _start_sum(
        self, work: CollectiveWork, result: torch.Tensor, what: str, axes: list[MeshAxis]
    ) -> tuple[CollectiveWork, list[MeshAxis]]:
        """Start to sum the result of a collective over the replicas; return what to wait for, and the axes left.

        Only the side stream waits for the collective. Where waiting blocks the host, the sums start when the reduction
        is finished.
        """
        if self._comm.is_host_blocking:
            return work, axes
        for axis in axes:
            work.wait()
            work = self._comm.all_reduce_gradient(result, axis, what)
        return work, []

    def _finish(self, reduction: _Reduction) -> None:
        """Finish a reduction: sum over the replicas, average, and write the result to its shard."""
        self._wait_average(reduction)
        if reduction.adds_to_shard:
            reduction.shard.add_(reduction.result)
        elif reduction.result.data_ptr() != reduction.shard.data_ptr():
            reduction.shard.copy_(reduction.result)

    def _wait_average(self, reduction: _Reduction) -> None:
        """Wait until a reduction is averaged over all ranks, or summed; then divide it by their number."""
        reduction.work.wait()
        for axis in reduction.axes:
            self._comm.all_reduce_gradient(reduction.result, axis, reduction.what).wait()
        if self._comm.data_parallel_size > 1 and reduction.result.dtype not in self._comm.averaged_dtypes:
            reduction.result.mul_(1 / self._comm.data_parallel_size)

    def clear_feedback(self) -> None:
        """Forget what was left of gradients sent in 8 bits, because other states are loaded."""
        for residual in self.residuals():
            residual.zero_()

    def residuals(self) -> list[torch.Tensor]:
        """Return what was left of gradients sent in 8 bits (``Config.error_feedback``)."""
        return self._buffers.residuals()

    def wait(self) -> None:
        """Finish all pending reductions, so that compute may use the results."""
        with label("wait for reductions"), self._stream:
            while self._local_reductions:
                self._finish_local_reduction()
            self._buffers.wait_all()
        self._wait_stream()
        self._buffers.free()
        self.is_busy = False

    def _wait_stream(self) -> None:
        """Make compute wait for the side stream, and free the tensors that it has read."""
        self._stream.compute_wait_all()
        self._stream_inputs.clear()
