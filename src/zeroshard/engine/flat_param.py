"""FlatParam: the parameters of one unit that share dtype and trainability, and where their values are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from zeroshard.comm import CollectiveWork, Communicator, Quantizer
from zeroshard.engine.param_data import set_data
from zeroshard.memory import ParamPrefetcher, TieredTensor
from zeroshard.sharding import FlatSpec, Range
from zeroshard.tensor_parallel import TPParam, TPShard
from zeroshard.utils.profiling import label


class PendingUpdate(Protocol):
    """New values that are being computed in, or copied from, another tier."""

    def wait(self) -> None:
        """Wait until later work on this thread and stream may use the values."""


class FlatMetadata:
    """How the parameters of a FlatParam are packed, on this rank. Nothing here changes after ``shard()``.

    The base class of FlatParam, not a member of it, because most callers (gradients, optimizer states, checkpoints)
    need only this description, and ``flat.shapes`` is then as cheap to read as any attribute.
    """

    def __init__(
        self,
        spec: FlatSpec,
        parameters: Sequence[nn.Parameter],
        tp_params: Sequence[TPParam | None],
        comm: Communicator,
    ) -> None:
        self.spec = spec
        self.names, self.layout, self.dtype = spec.names, spec.layout, spec.compute_dtype
        self.device = comm.device
        self.shard_rank = comm.shard_axis.rank  # this rank's index on the shard axis
        self.shard_ranges = spec.shard_ranges  # of each bucket's shard, in ``FlatParam.shard``
        self.owned_ranges = spec.layout.owned_ranges(self.shard_rank)  # the parameter ranges in this rank's shard
        self.original_dtypes = tuple(p.dtype for p in parameters)
        self.full_shapes = tuple(p.shape for p in parameters)  # shapes before tensor parallelism
        self.tp_params = tuple(tp_params)  # which parameters are DTensors over the tensor axis, and how
        self.has_dtensors = any(tp_param is not None for tp_param in tp_params)
        self.tp_shards: tuple[TPShard | None, ...] = tuple(
            tp_param.shard if tp_param is not None else None for tp_param in tp_params
        )
        # from here on, "parameter" means its TP shard
        self.shapes = tuple(
            full_shape if tp_shard is None else tp_shard.local_shape
            for full_shape, tp_shard in zip(self.full_shapes, self.tp_shards, strict=True)
        )
        self.strides = tuple(
            _dense_stride(p) if tp_param is None else torch.empty(shape, device="meta").stride()
            for p, tp_param, shape in zip(parameters, tp_params, self.shapes, strict=True)
        )

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return a view of parameter ``index``, with its original strides, in a tensor with this flat's layout."""
        start = flat.storage_offset() + self.layout.starts[index]
        return flat.as_strided(self.shapes[index], self.strides[index], start)

    def flatten(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Flatten a tensor of parameter ``index``'s shape, in the element order of the flat."""
        if tensor.stride() != self.strides[index]:
            tensor = torch.empty_strided(
                self.shapes[index], self.strides[index], dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def tp_sharded_ranges(self) -> list[Range]:
        """Return the ranges of this rank's shard that are not replicated over the tensor axis."""
        ranges: list[Range] = []
        for param_range in self.owned_ranges:
            if self.tp_shards[param_range.param_index] is None:
                continue
            span = Range(param_range.offset, param_range.offset + param_range.elements.numel)
            if ranges and ranges[-1].end == span.start:
                ranges[-1] = Range(ranges[-1].start, span.end)
            else:
                ranges.append(span)
        return ranges


class FlatParam(FlatMetadata):
    """The parameters of one unit that share dtype, trainability and optimizer, packed into one tensor.

    [Note: storage resizing]
    The parameters are views into ``full``. When they are partitioned, resharding resizes the storage of ``full`` to
    zero and unsharding resizes it back. The storage object stays the same, so views that autograd saved stay valid,
    and the all-gather writes directly into the views' memory, without a copy. ``parameter.data = view`` gives each
    parameter its own version counter, so refilling the storage does not look like an in-place change to autograd.

    [Note: all-gathering from master weights]
    With ``Config.cast_on_gather``, a partitioned flat with an fp32 master on the device has no shard in the compute
    dtype (``spec.is_cast_from_master``): unsharding casts the master into this rank's slots in ``full``, which are the
    all-gather's input. The optimizer then writes only the master. The shard of any other flat always equals its master,
    cast, so the numerical results are the same.
    """

    def __init__(
        self,
        spec: FlatSpec,
        parameters: Sequence[nn.Parameter],
        tp_params: Sequence[TPParam | None],
        comm: Communicator,
    ) -> None:
        super().__init__(spec, parameters, tp_params, comm)
        self.parameters = tuple(parameters)
        self.is_partitioned = False  # whether ``full`` is freed by resharding
        self.full = torch.empty(0, dtype=self.dtype, device=self.device)  # [layout.numel], see :meth:`allocate`
        self.views: list[torch.Tensor] = []  # each parameter in ``full``
        self.bucket_views: list[torch.Tensor] = []  # each bucket of ``full``
        self.shard_slots: list[torch.Tensor] = []  # this rank's shard of each bucket, in ``full``
        self.placeholders: list[torch.Tensor] = []  # what each guarded parameter points at between passes
        self.shard: torch.Tensor | None = None  # [layout.shard_numel] if partitioned and not cast from the master
        # this rank's shard of each bucket: a view of ``shard``, or of ``full`` if that is replicated
        self.local_shards: list[torch.Tensor] = []
        self.inner: InnerShard | None = None  # contains ``local_shards``, or payloads: see [Note: inner shards]
        self.quantized = QuantizedGather(spec, comm) if spec.gather_dtype is not None else None
        self.prefetcher: ParamPrefetcher | None = None  # of a shard on disk
        # [layout.shard_numel], the master weights, which the optimizer updates instead of the parameters
        self.master: TieredTensor | None = None
        # slots in ``full``, and the master's values that are cast into them
        self._cast_pairs: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        # new values for ``local_shards``, from an update of offloaded states
        self.pending_update: PendingUpdate | None = None

    @property
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) pairs."""
        return zip(self.names, self.parameters, strict=True)

    def set_param_data(self, values: Sequence[torch.Tensor]) -> None:
        """Set the values of all parameters, or the local tensors of DTensors: see [Note: many parameters]."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, value in zip(self.parameters, values, strict=True):
                if self.has_dtensors:
                    set_data(parameter, value)
                else:
                    parameter.data = value

    def allocate(self, is_partitioned: bool, shard: torch.Tensor | None) -> None:
        """Allocate ``full``.

        If partitioned, its storage is empty until unshard, and ``shard`` or the master holds this rank's values;
        ``shard`` is the inner shard if the flat keeps that.
        """
        self.is_partitioned, self.shard = is_partitioned, shard
        if shard is not None and self.spec.keeps_inner_shard and self.quantized is None:
            self.shard, self.inner = None, InnerShard(shard, self.spec)
        self._allocate_full()
        nan_or_zero = float("nan") if self.dtype.is_floating_point else 0
        self._placeholder_value = torch.full((), nan_or_zero, dtype=self.dtype, device=self.device)
        self.placeholders = [self.placeholder(shape) for shape in self.shapes]
        self.local_shards = self.shard_slots
        if is_partitioned:
            self.local_shards = [self.shard[span.slice] for span in self.shard_ranges] if self.shard is not None else []
            if self.inner is not None:
                self.local_shards = self.inner.parts_of(self.shard_rank)
            self.full.untyped_storage().resize_(0)

    def _allocate_full(self) -> None:
        self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        self.views = [self.view(self.full, index) for index in range(len(self.shapes))]
        self.bucket_views = [self.full[bucket.slice] for bucket in self.layout.buckets]
        shards = [self.layout.bucket_shard(bucket, self.shard_rank) for bucket in self.layout.buckets]
        self.shard_slots = [self.full[span.slice] for span in shards]
        self._cast_pairs = None

    def free(self, keep_storage: bool) -> bool:
        """Free the full values: see [Note: storage resizing]. Return whether ``views`` were replaced.

        Memory that a NumPy array shares (``parameter.detach().numpy()``) can never be resized again. With
        ``keep_storage``, the user may still read a returned view. In both cases the old storage is left to its holders,
        and the flat gets a new one.
        """
        storage = self.full.untyped_storage()
        if storage.resizable() and not keep_storage:
            storage.resize_(0)
            return False
        self._allocate_full()
        self.full.untyped_storage().resize_(0)
        return True

    def placeholder(self, shape: torch.Size) -> torch.Tensor:
        """Return a placeholder for a guarded parameter of ``shape``: see [Note: guarded parameters]."""
        return self._placeholder_value.expand(shape)

    def load_full(self, values: torch.Tensor) -> None:
        """Write this rank's shard of ``values``, a full tensor with this flat's layout, to the shard and the master."""
        for bucket_index, bucket in enumerate(self.layout.buckets):
            self.load_shard(bucket_index, values[self.layout.bucket_shard(bucket, self.shard_rank).slice])
        if not self.is_partitioned:
            self.full.copy_(values)

    def load_shard(self, bucket_index: int, values: torch.Tensor) -> None:
        """Write ``values``, this rank's shard of a bucket, to the shard and the master."""
        if not self.spec.is_cast_from_master and values is not self.local_shards[bucket_index]:
            self.local_shards[bucket_index].copy_(values)
        if self.master is not None:
            self.master.write(self.shard_ranges[bucket_index], values)

    def local_shard(self, bucket_index: int) -> torch.Tensor:
        """Return this rank's shard of a bucket, in the compute dtype, on the device or offloaded."""
        if not self.spec.is_cast_from_master or self.master is None:
            return self.local_shards[bucket_index]
        return self.master.read(self.shard_ranges[bucket_index], self.device).to(self.dtype)

    def owned_slices(self, shard: TieredTensor | None = None) -> Iterator[tuple[int, Range, torch.Tensor]]:
        """Yield (param_index, elements, values) of this rank's shard.

        Values come from ``shard``, a tensor with the layout of this rank's shard; by default from the master, or the
        parameters if there is none.
        """
        shard = shard or self.master
        for bucket_index, (bucket, span) in enumerate(zip(self.layout.buckets, self.shard_ranges, strict=True)):
            for param_range in self.layout.owned_ranges_in_bucket(bucket, self.shard_rank):
                if shard is None:
                    values = self.local_shards[bucket_index][
                        param_range.offset : param_range.offset + param_range.elements.numel
                    ]
                    yield param_range.param_index, param_range.elements, values
                    continue
                first = span.start + param_range.offset
                for common, values in shard.views_in(Range(first, first + param_range.elements.numel)):
                    yield param_range.param_index, common.shift(param_range.elements.start - first), values

    def master_copy_lists(self, device_only: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of this rank's shard, and the master's values to copy into each.

        ``device_only``: without those whose master is offloaded.
        """
        return ([], []) if self.spec.is_cast_from_master else self._pair_with_master(self.local_shards, device_only)

    def _pair_with_master(
        self, shards: list[torch.Tensor], device_only: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of ``shards`` and the master's values for them, except where both are the same memory."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for span, shard in zip(self.shard_ranges, shards, strict=True):
            for segment, common in self.master.segments_in(span) if self.master is not None else ():
                source = segment.tensor[common.start - segment.span.start : common.end - segment.span.start]
                target = shard[common.start - span.start : common.end - span.start]
                if not (device_only and segment.is_offloaded) and target.data_ptr() != source.data_ptr():
                    targets.append(target)
                    sources.append(source)
        return targets, sources

    def differs_from_master(self) -> bool:
        """Return whether this rank's shard of replicated values differs from its master, cast.

        A master on disk is not read for that: the result is False.
        """
        if self.master is None or any(segment.tier == "disk" for segment in self.master.segments):
            return False
        return any(
            not torch.equal(shard, self.master.read(span, self.device).to(self.dtype))
            for shard, span in zip(self.shard_slots, self.shard_ranges, strict=True)
        )

    def wait_for_update(self) -> None:
        """Wait for the pending update of this rank's shard, if there is one."""
        if self.pending_update is not None:
            with label("wait for CPU update {!r}", self.spec.unit):
                self.pending_update.wait()
            self.pending_update = None  # not earlier: an interrupted wait must start again

    def all_gather_inputs(self) -> list[torch.Tensor]:
        """Return this rank's shard of each bucket, on the device, as input of the all-gather."""
        slots = self.shard_slots
        if self.quantized is not None and self.quantized.input_slots is not None:
            slots = self.quantized.input_slots
        if self.spec.is_cast_from_master:
            pairs = self._cast_pairs if slots is self.shard_slots else None
            pairs = pairs or self._pair_with_master(slots, device_only=True)
            if slots is self.shard_slots:
                self._cast_pairs = pairs
            if pairs[0]:
                torch._foreach_copy_(*pairs)
            return slots
        if self.shard is None or not self.spec.has_offloaded_params:
            return self.local_shards
        with label("copy offloaded parameters {!r}", self.spec.unit):
            shard = self.shard if self.prefetcher is None else self.prefetcher.acquire(self.shard)
            for slot, span in zip(slots, self.shard_ranges, strict=True):
                slot.copy_(shard[span.slice], non_blocking=True)
        if self.prefetcher is not None:
            self.prefetcher.release(self.shard)
        return slots

    def mark_values_changed(self) -> None:
        """Have the next unshard gather new values over the outer axis: see [Note: inner shards]."""
        if self.inner is not None:
            self.inner.is_stale = True

    def prefetch(self) -> None:
        """Start to read a shard on disk, unless an update of it is pending."""
        if self.prefetcher is not None and self.shard is not None and self.pending_update is None:
            self.prefetcher.prefetch(self.shard)


class QuantizedGather:
    """The all-gathers of a flat in 8 bits (``Config.gather_dtype``), through a buffer of all ranks' payloads.

    Every rank restores all values from these, its own too: so all compute with the same parameters. Shards and masters
    stay exact; :func:`gathered`, checkpoints and everything else that reads values between steps use those.
    """

    def __init__(self, spec: FlatSpec, comm: Communicator) -> None:
        self._spec, self._comm = spec, comm
        self._quantizer = Quantizer(str(spec.gather_dtype), comm.device)
        self._padding = spec.padding_in_blocks(comm.shard_axis.rank)  # of each bucket's shard
        self._buffer: torch.Tensor | None = None
        # memory for this rank's shard of each bucket, if ``full`` must not change; else that is in ``full``
        self.input_slots: list[torch.Tensor] | None = None

    def allocate(self, is_full_in_use: bool) -> int:
        """Allocate the buffer, on the compute stream: see [Note: streams without record_stream]. Return its bytes.

        ``is_full_in_use``: computation may use the full values, which were restored before. Exact ones must not be
        written over them, not even for a moment.
        """
        spec, payload_bytes = self._spec, self._spec.gather_buffer_bytes
        needs_slots = is_full_in_use and (spec.is_cast_from_master or spec.has_offloaded_params)
        slot_bytes = spec.layout.shard_numel * spec.compute_dtype.itemsize if needs_slots else 0
        self._buffer = torch.empty(payload_bytes + slot_bytes, dtype=torch.uint8, device=self._comm.device)
        if needs_slots:
            slots = self._buffer[payload_bytes:].view(spec.compute_dtype)
            self.input_slots = [slots[span.slice] for span in spec.shard_ranges]
        return self._buffer.nbytes

    def free(self) -> int:
        """Free the buffer. Return its bytes."""
        buffer, self._buffer, self.input_slots = self._buffer, None, None
        return 0 if buffer is None else buffer.nbytes

    def start(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], inner: InnerShard | None, what: str
    ) -> list[CollectiveWork]:
        """Start to gather all buckets from this rank's shards of them. ``inner``: where it keeps payloads."""
        assert self._buffer is not None
        rank = self._comm.shard_axis.rank
        gathered = [self._buffer[span.slice] for span in self._spec.gather_payloads]  # by bucket
        payloads = [bucket.view(self._comm.shard_axis.size, -1) for bucket in gathered]
        own = [rows[rank] for rows in payloads] if inner is None else inner.parts_of(rank)
        if inner is None or inner.is_stale:
            padding = [shard[span.slice] for shard, spans in zip(inputs, self._padding, strict=True) for span in spans]
            if padding:
                torch._foreach_zero_(padding)  # an optimizer may have changed it, and it shares blocks with parameters
            for payload, shard in zip(own, inputs, strict=True):
                self._quantizer.quantize(payload.unsqueeze(0), shard)
        if inner is not None:
            pending = inner.start_gathers(gathered, own, self._comm, what)
        else:
            pending = [self._comm.all_gather(*bucket, what) for bucket in zip(gathered, own, strict=True)]
        return [
            self._comm.finish_with(work, partial(self._quantizer.dequantize, output, rows))
            for work, output, rows in zip(pending, outputs, payloads, strict=True)
        ]


class InnerShard:
    """What the ranks with one inner rank have together of a flat.

    [Note: inner shards]
    If ``Config.partition`` has parameters over the inner axis, each rank keeps this, and units are unsharded inside it.
    Its own shard is a view into it. Values change on all ranks or on none. A change makes the inner shard stale; then
    the next unshard gathers it over the outer axis first. With ``Config.gather_dtype`` it consists of payloads, and
    the rank's own shard has separate memory.
    """

    def __init__(self, tensor: torch.Tensor, spec: FlatSpec) -> None:
        self.tensor = tensor  # [spec.param_numel], or [spec.inner_payload_bytes]
        self.is_stale = True  # whether it lacks new values of other ranks
        self._parts = [tensor[span.slice] for span in spec.inner_parts]
        self._outer_count = spec.layout.shard_count // spec.inner_count

    def parts_of(self, shard_rank: int) -> list[torch.Tensor]:
        """Return one rank's part of each bucket: its shard, or the payload of it."""
        return [part.view(self._outer_count, -1)[shard_rank % self._outer_count] for part in self._parts]

    def start_gathers(
        self, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor], comm: Communicator, what: str
    ) -> list[CollectiveWork]:
        """Start to gather all buckets over the inner axis; before, this rank's parts over the outer one, if stale."""
        pending: list[CollectiveWork] = []
        for full, part, own_part in zip(outputs, self._parts, own, strict=True):
            after = comm.all_gather_outer(part, own_part, what) if self.is_stale else None
            pending.append(comm.all_gather_inner(full, part, what, after))
        self.is_stale = False
        return pending


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's stride if it is dense (also channels last), else the contiguous one."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
