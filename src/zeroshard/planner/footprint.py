"""Footprint: the memory of one rank over a step, from a trace and the state sizes.

[Note: simulating memory]
The trace contains the activations. The engine events between its operations determine what the library adds:

- An unsharded unit is in memory until it is resharded, together with the next one (prefetch). If it is gathered in 8
  bits, the values that are received are in memory too, until computation waits for the unit.
- Gradients from autograd stay until the next reduction begins.
- A buffer of the bucket ring is in memory from the first bucket that uses it to the end of backward. Replicated
  gradients use only its receive buffers: in the last backward, and before that is known in the step, where they are
  freed before the update.
- Reduced gradients stay until zero_grad(), which is assumed to come before the next forward.
- The update allocates its buffer after all of these are freed, except the reduced gradients.

The peak is the highest usage over all these points in time. With gradient accumulation or offloaded states, gradients
persist between steps ([Note: freeing gradients between steps]).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.engine import assign_segments
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import BucketSizes, StateSizes
from zeroshard.planner.tracing.trace import Trace, TraceSpan, UnshardOrder, split_spans
from zeroshard.utils.format import format_bytes

RESERVED_RATIO = 1.09  # reserved / allocated memory of the allocator: 1.00 to 1.08 measured, docs/benchmarks.md
USABLE_HOST_FRACTION = 0.9  # share of host memory for states: the system, data loading and Python need the remainder
DEVICE_KEPT_INPUTS = 2  # block inputs on the device if kept on the host: one in use, one in transfer

GradSegment = tuple[torch.dtype, int, int]  # (dtype, segment index, bytes)


@dataclass(frozen=True)
class MemoryUsage:
    """Memory usage at one point in time, in bytes."""

    label: str
    """The module or event that runs."""
    by_kind: dict[str, float]
    """By kind: "states" (without gradients), "gradients", "activations", "kept inputs", "gathered", "gradients of
    autograd", "buckets", "step", …"""

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Footprint:
    """Memory of one rank, in bytes."""

    states: dict[str, int]
    """On the device after a backward, by kind of state."""
    offloaded: dict[tuple[str, str], int]
    """Offloaded, by (kind of state, tier)."""
    peak: MemoryUsage
    """The highest usage of the device in a step."""
    between_steps: float
    """On the device between zero_grad() and the next forward: states, and other memory that persists between steps."""
    staging: float
    """Host memory of the staging buffers."""
    kept_inputs_on_host: float = 0.0
    """Host memory for the inputs of recomputed blocks."""
    timeline: tuple[MemoryUsage, ...] = field(default=(), repr=False)
    """The usage at every point in time, in order; empty unless requested."""

    @property
    def host(self) -> float:
        """Host memory of one rank, in bytes."""
        return (
            sum(nbytes for (_, tier), nbytes in self.offloaded.items() if tier == "host")
            + self.staging
            + self.kept_inputs_on_host
        )

    @property
    def disk(self) -> float:
        """Disk space of one rank, in bytes."""
        return sum(nbytes for (_, tier), nbytes in self.offloaded.items() if tier == "disk")

    @property
    def reserved(self) -> float:
        """Bytes that the allocator is expected to reserve for the peak."""
        return self.peak.total * RESERVED_RATIO


@dataclass(frozen=True, kw_only=True)
class MemoryConditions:
    """What else the memory of a step depends on, besides the trace and the state sizes."""

    on_gpu: bool = True
    prefetch: bool = True
    """The next unit is all-gathered while one computes."""
    keeps_inputs_on_host: bool = False
    """The inputs of recomputed blocks are in host memory."""
    workspace_bytes: float = 0
    """Memory of math libraries in the device's allocator."""
    scratch_bytes: float = 0
    """Temporary memory of the optimizer's kernels in a step."""
    has_persistent_grads: bool = False
    """Reduced gradients, or local sums of replicated ones, are in memory when a forward begins."""
    is_accumulating: bool = False
    """A backward adds to the gradients of an earlier one."""
    reduces_in_backward: bool = True
    """Replicated gradients and inner sums are reduced in the last backward."""


DEFAULT_CONDITIONS = MemoryConditions()


def footprint(
    trace: Trace,
    sizes: StateSizes,
    conditions: MemoryConditions = DEFAULT_CONDITIONS,
    *,
    spans: Sequence[TraceSpan] | None = None,
    timeline: bool = False,
) -> Footprint:
    """Replay a trace: see [Note: simulating memory]. ``spans`` are the spans of the trace, if already split."""
    kept_bytes = sum(trace.kept_input_bytes)
    device_kept_bytes, host_kept_bytes = kept_bytes, 0.0
    if conditions.keeps_inputs_on_host:
        device_kept_bytes, host_kept_bytes = sum(sorted(trace.kept_input_bytes)[-DEVICE_KEPT_INPUTS:]), kept_bytes
    gradients = float(sizes.states["gradients"])
    persistent = {
        "states": float(sum(sizes.states.values())) - gradients,
        "gradients": gradients if conditions.has_persistent_grads else 0.0,
        "kept inputs": device_kept_bytes,
        "buffers": trace.buffer_bytes,
        "inputs": trace.input_bytes,
        "libraries": conditions.workspace_bytes,
        "landings": float(0 if sizes.placement.gradients else sizes.shard_buffer_bytes),
    }
    spans = split_spans(trace) if spans is None else spans
    replay = _MemoryReplay(spans, sizes, conditions)
    usages = [replay.replay_span(span) for span in spans]
    peak = max(usages, key=lambda usage: usage.total)
    peak = MemoryUsage(peak.label, {**persistent, **peak.by_kind})
    step_bytes = max(sizes.step_buffer_bytes + conditions.scratch_bytes, _step_receive_bytes(sizes))
    inner_sums = 0.0 if conditions.reduces_in_backward else replay.inner_sum_bytes
    at_step = {"gradients": gradients + inner_sums, "activations": 0.0, "step": step_bytes}
    step = MemoryUsage("step", {**persistent, **at_step})
    everything = [MemoryUsage(usage.label, {**persistent, **usage.by_kind}) for usage in usages] if timeline else []
    return Footprint(
        sizes.states,
        sizes.offloaded,
        step if step.total > peak.total else peak,
        between_steps=sum(persistent.values()) - trace.input_bytes,
        staging=float(sizes.staging_bytes),
        kept_inputs_on_host=host_kept_bytes,
        timeline=(*everything, step) if timeline else (),
    )


class SimulatedRings:
    """The allocated buffers of all rings: see [Note: bucket ring]."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._next_slot: Counter[torch.dtype] = Counter()
        self._buffers: set[tuple[torch.dtype, int, str, int]] = set()  # (dtype, slot, use, bytes)

    @property
    def nbytes(self) -> int:
        """The total size of the allocated buffers."""
        return sum(nbytes for *_, nbytes in self._buffers)

    def add_buckets(self, buckets: Sequence[BucketSizes], is_accumulating: bool) -> None:
        """Allocate the buffers for a unit's buckets.

        ``is_accumulating``: reduced values are added to existing gradients.
        """
        for bucket in buckets:
            slot = self._add_receive_buffer(bucket)
            self._buffers.add((bucket.dtype, slot, "packed", bucket.packed_bytes))
            if is_accumulating or bucket.needs_reduce_buffer:
                self._buffers.add((bucket.dtype, slot, "shard", bucket.shard_buffer_bytes))

    def add_local_sum(self, buckets: Sequence[BucketSizes]) -> None:
        """Allocate the buffers to reduce a unit's unsharded gradients."""
        for bucket in buckets:
            self._add_receive_buffer(bucket)

    def _add_receive_buffer(self, bucket: BucketSizes) -> int:
        """Allocate the receive buffer of the next slot; return the slot."""
        slot = self._next_slot[bucket.dtype] % self._slots
        self._next_slot[bucket.dtype] += 1
        self._buffers.add((bucket.dtype, slot, "received", bucket.receive_buffer_bytes))
        return slot

    def free(self) -> None:
        self._buffers.clear()


def _step_receive_bytes(sizes: StateSizes) -> float:
    """Return the bytes of the receive buffers that reductions at the step use."""
    rings = SimulatedRings(sizes.ring_slots)
    if not sizes.placement.gradients:
        for unit in reversed(sizes.units):
            rings.add_local_sum(unit.buckets)
    return float(rings.nbytes)


class _MemoryReplay:
    """The state of a memory replay: what the library holds at the current event."""

    def __init__(self, spans: Sequence[TraceSpan], sizes: StateSizes, conditions: MemoryConditions) -> None:
        self._sizes, self._conditions = sizes, conditions
        self._segments = _grad_segments(sizes)  # of reduced gradients
        self._allocated_segments = set().union(*self._segments) if conditions.has_persistent_grads else set()
        self._unshard_order = UnshardOrder(spans)
        self._unsharded: set[int] = set()
        self._gathering: set[int] = set()  # of these, units that computation has not waited for
        self._pending_grad_bytes = 0.0  # gradients that a reduction still reads
        self._forward_end_bytes = 0.0  # activations (with the loss) and units at the end of forward
        self._rings = SimulatedRings(sizes.ring_slots)
        # of earlier backwards: see [Note: inner sums]
        has_inner_sums = conditions.is_accumulating or not conditions.reduces_in_backward
        self.inner_sum_bytes = sum(unit.inner_sum_bytes for unit in sizes.units) if has_inner_sums else 0
        self._remaining_inner_bytes = self.inner_sum_bytes  # if this is the last backward

    def replay_span(self, span: TraceSpan) -> MemoryUsage:
        """Replay one span, its event first, and return its peak usage without the persistent memory."""
        extra = self._apply_event(span) if span.event is not None else 0.0
        return MemoryUsage(
            span.peak_module_name or (span.event.kind if span.event is not None else ""),
            {
                "activations": max(span.peak_bytes, span.start_bytes + extra),
                "gathered": self._unsharded_bytes,
                "gradients": float(max(self._allocated_bytes + self._remaining_inner_bytes, self.inner_sum_bytes)),
                "gradients of autograd": self._pending_grad_bytes,
                "buckets": float(self._rings.nbytes),
            },
        )

    def _apply_event(self, span: TraceSpan) -> float:
        """Apply an engine event; return the bytes that are allocated only during this event."""
        event, placement = span.event, self._sizes.placement
        if event is None:
            return 0.0
        if event.kind == "unshard" and placement.parameters:
            self._start_unshard(event.unit)
            before = self._unsharded_bytes
            self._gathering.discard(event.unit)
            next_unit = self._unshard_order.next_unit(span.is_backward)
            if self._conditions.prefetch and next_unit is not None:
                self._start_unshard(next_unit)
            return max(0.0, before - self._unsharded_bytes)
        elif event.kind == "reshard":
            self._unsharded.discard(event.unit)
            self._gathering.discard(event.unit)
        elif event.kind == "reduce":
            if not (placement.gradients or self._allocated_segments) and self._conditions.on_gpu:
                self._allocate_all_segments(
                    self._forward_end_bytes - span.start_bytes - self._unsharded_bytes - event.nbytes
                )
            self._allocated_segments |= self._segments[event.unit]
            if not placement.gradients:
                before = self._rings.nbytes
                if self._conditions.reduces_in_backward:
                    self._rings.add_local_sum(self._sizes.units[event.unit].buckets)
                # added to the accumulated gradients, then freed, before these are reduced
                return max(0.0, event.nbytes - (self._rings.nbytes - before))
            unit = self._sizes.units[event.unit]
            self._remaining_inner_bytes -= min(unit.inner_sum_bytes, self._remaining_inner_bytes)
            adds_to_shard = self._conditions.is_accumulating and not placement.keeps_inner_sums
            self._rings.add_buckets(unit.buckets, adds_to_shard)
            pending = unit.side_stream_grad_bytes if self._conditions.on_gpu else unit.slot_grad_bytes
            self._pending_grad_bytes = min(pending, event.nbytes)
            return event.nbytes - self._pending_grad_bytes
        elif event.kind == "end forward":
            self._forward_end_bytes = span.start_bytes + self._unsharded_bytes
            self._unshard_order.begin_pass()
        elif event.kind == "end backward":
            self._pending_grad_bytes = 0.0
            self._rings.free()
            self._unsharded.clear()
            self._gathering.clear()
        return 0.0

    def _start_unshard(self, unit: int) -> None:
        if unit not in self._unsharded:
            self._unsharded.add(unit)
            self._gathering.add(unit)

    def _allocate_all_segments(self, free_bytes: float) -> None:
        """Allocate all segments if they fit into the bytes freed since the loss.

        See [Note: freeing gradients between steps].
        """
        segments = set().union(*self._segments)
        if free_bytes >= sum(nbytes for *_, nbytes in segments):
            self._allocated_segments |= segments

    @property
    def _allocated_bytes(self) -> int:
        return sum(nbytes for *_, nbytes in self._allocated_segments)

    @property
    def _unsharded_bytes(self) -> float:
        units = self._sizes.units
        payloads = sum(units[unit].gather_payload_bytes for unit in self._gathering)
        return float(sum(units[unit].alloc_bytes for unit in self._unsharded) + payloads)


def _grad_segments(sizes: StateSizes) -> list[set[GradSegment]]:
    """Return the gradient segments of each unit: see [Note: freeing gradients between steps]."""
    segments: list[set[GradSegment]] = [set() for _ in sizes.units]
    for dtype in {dtype: None for unit in sizes.units for dtype, _ in unit.device_grad_numels}:
        unit_numels = [
            (index, numel)
            for index, unit in enumerate(sizes.units)
            for grad_dtype, numel in unit.device_grad_numels
            if grad_dtype == dtype
        ]
        shard_count = sizes.shard_count if sizes.placement.gradients else 1
        assigned = assign_segments([numel for _, numel in unit_numels], shard_count)
        segment_bytes = Counter[int]()
        for segment, (_, numel) in zip(assigned, unit_numels, strict=True):
            segment_bytes[segment] += numel * dtype.itemsize
        for segment, (unit, _) in zip(assigned, unit_numels, strict=True):
            segments[unit].add((dtype, segment, segment_bytes[segment]))
    return segments


def device_bytes_needed(footprint: Footprint, machine: Machine) -> float:
    """Return the device memory needed, in bytes: what the allocator reserves plus the runtime's context."""
    return footprint.reserved + machine.context


def usage_fractions(footprint: Footprint, devices: int, machine: Machine) -> dict[str, float]:
    """Return usage / usable capacity of device, host and disk; above 1, the footprint does not fit."""
    local_ranks = machine.local_ranks(devices)
    return {
        "device": device_bytes_needed(footprint, machine) / machine.memory,
        "host": footprint.host * local_ranks / (machine.host_memory * USABLE_HOST_FRACTION),
        "disk": footprint.disk * local_ranks / (machine.disk or 1) if footprint.disk else 0.0,
    }


def memory_shortfall(footprint: Footprint, devices: int, machine: Machine) -> str:
    """Say which memory is too small for a footprint, with the numbers; empty if it fits."""
    ranks, usage = machine.local_ranks(devices), usage_fractions(footprint, devices, machine)
    if usage["device"] > 1:
        needed = format_bytes(int(device_bytes_needed(footprint, machine)))
        return f"it needs {needed} per device, but a device has {format_bytes(machine.memory)}"
    if usage["host"] > 1:
        needed, has = format_bytes(int(footprint.host * ranks)), format_bytes(machine.host_memory)
        usable = f"({USABLE_HOST_FRACTION:.0%} is usable)"
        return f"the {ranks} ranks of a node need {needed} of host memory, but a node has {has} {usable}"
    if usage["disk"] > 1:
        needed = format_bytes(int(footprint.disk * ranks))
        return f"the {ranks} ranks of a node need {needed} of disk, but a node has {format_bytes(machine.disk)}"
    return ""
