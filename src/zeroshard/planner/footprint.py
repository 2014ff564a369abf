"""Footprint: what one rank holds over a step, moment by moment, from a trace and what the library holds.

[Note: replaying memory]
The trace has the activations; what the library adds to them follows from the moments between: a unit that is brought is
there until it is let go, and the next one already comes (prefetch); gradients that autograd has made wait until the
reduction after them begins; a buffer of the ring of buckets is there from the first bucket that passes it to the end of
backward, and reduced gradients are from there to zero_grad(), which is taken to come before the next forward; the
update takes its buffer when all that is gone. The highest of these moments is the peak. Where several backwards make a
step, or states rest outside the device, gradients are there all the time ([Note: gradients that come and go]).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.engine.grad_memory import assign_segments
from zeroshard.memory.report import format_bytes
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import BucketSizes, StateSizes
from zeroshard.planner.tracing.trace import Trace, TraceSpan, split_spans

RESERVED_RATIO = (
    1.09  # memory that the allocator reserves over what is allocated: 1.01 to 1.09 measured, docs/benchmarks.md
)
DEVICE_KEPT_INPUTS = 2  # blocks' inputs on the device, where they are kept on the host: one in use, one on its way


@dataclass(frozen=True)
class MemoryUsage:
    """What is held at one moment, in bytes."""

    label: str
    """What is running."""
    by_kind: dict[str, float]
    """By kind: "states" (but for gradients), "gradients", "activations", "kept inputs", "gathered", "gradients of
    autograd", "buckets", "step", …"""

    @property
    def total(self) -> float:
        """Of all kinds."""
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Footprint:
    """Bytes that one rank holds."""

    states: dict[str, int]
    """On the device after a backward, by kind of state."""
    offloaded: dict[tuple[str, str], int]
    """Outside it, by (kind of state, tier)."""
    peak: MemoryUsage
    """The highest moment of a step on the device."""
    between_steps: float
    """On the device between zero_grad() and the next forward: states, and what stays from step to step beside them."""
    staging: float
    """Host memory that states travel through."""
    kept_inputs_on_host: float = 0.0
    """Host memory for the inputs of recomputed blocks."""
    timeline: tuple[MemoryUsage, ...] = field(default=(), repr=False)
    """All moments in order, where they were asked for."""

    @property
    def host(self) -> float:
        """Bytes of host memory of one rank."""
        return (
            sum(nbytes for (_, tier), nbytes in self.offloaded.items() if tier == "host")
            + self.staging
            + self.kept_inputs_on_host
        )

    @property
    def disk(self) -> float:
        """Bytes on disk of one rank."""
        return sum(nbytes for (_, tier), nbytes in self.offloaded.items() if tier == "disk")

    @property
    def reserved(self) -> float:
        """What the allocator is expected to reserve for the peak."""
        return self.peak.total * RESERVED_RATIO


def footprint(
    trace: Trace,
    sizes: StateSizes,
    *,
    on_gpu: bool = True,
    prefetch: bool = True,
    inputs_on_host: bool = False,
    workspace: float = 0,
    scratch: float = 0,
    timeline: bool = False,
    spans: Sequence[TraceSpan] | None = None,
    has_persistent_grads: bool = False,
    is_accumulating: bool = False,
) -> Footprint:
    """Replay a trace: see [Note: replaying memory].

    ``workspace`` is what math libraries hold in the device's allocator, ``scratch`` what the optimizer's own kernels
    take in a step, both in bytes. ``spans`` are those of the trace, if they were cut before. ``gradients_stay``: they
    are there when a forward begins. ``adds``: a backward adds to those of another.
    """
    kept = sum(trace.kept_input_bytes)
    near = sum(sorted(trace.kept_input_bytes)[-DEVICE_KEPT_INPUTS:]) if inputs_on_host else kept
    gradients = float(sizes.states["gradients"])
    always = {
        "states": float(sum(sizes.states.values())) - gradients,
        "gradients": gradients if has_persistent_grads else 0.0,
        "kept inputs": near,
        "buffers": trace.buffer_bytes,
        "inputs": trace.input_bytes,
        "libraries": workspace,
        "landings": float(0 if sizes.placement.gradients else sizes.shard_buffer_bytes),
    }
    spans = split_spans(trace) if spans is None else spans
    walk = _MemoryReplay(spans, sizes, on_gpu, prefetch, has_persistent_grads, is_accumulating)
    moments = [walk.replay_span(span) for span in spans]
    best = max(moments, key=lambda moment: moment.total)
    best = MemoryUsage(best.label, {**always, **best.by_kind})
    step = MemoryUsage(
        "step", {**always, "gradients": gradients, "activations": 0.0, "step": float(sizes.step_buffer_bytes) + scratch}
    )
    if step.total > best.total:
        best = step
    return Footprint(
        sizes.states,
        sizes.offloaded,
        best,
        between_steps=sum(always.values()) - trace.input_bytes,
        staging=float(sizes.staging_bytes),
        kept_inputs_on_host=kept if inputs_on_host else 0.0,
        timeline=(*(MemoryUsage(m.label, {**always, **m.by_kind}) for m in moments), step) if timeline else (),
    )


class SimulatedRings:
    """The buffers of all rings that have memory: see [Note: buffers of a ring]."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._next_slot: Counter[torch.dtype] = Counter()
        self._packed_buffers: set[tuple[torch.dtype, int, int]] = set()  # by dtype, slot, and bytes
        self._shard_buffers: set[tuple[torch.dtype, int, int]] = set()

    @property
    def nbytes(self) -> int:
        """Of all these buffers."""
        return sum(nbytes for *_, nbytes in self._packed_buffers) + sum(nbytes for *_, nbytes in self._shard_buffers)

    def add_buckets(self, buckets: Sequence[BucketSizes], is_accumulating: bool) -> None:
        """Let a unit's buckets pass. ``adds``: what is reduced is added to gradients that are there."""
        for bucket in buckets:
            slot = self._next_slot[bucket.dtype] % self._slots
            self._next_slot[bucket.dtype] += 1
            self._packed_buffers.add((bucket.dtype, slot, bucket.packed_bytes))
            if is_accumulating or bucket.needs_reduce_buffer:
                self._shard_buffers.add((bucket.dtype, slot, bucket.shard_buffer_bytes))

    def free(self) -> None:
        """Give their memory back."""
        self._packed_buffers.clear()
        self._shard_buffers.clear()


class _MemoryReplay:
    """Where a replay is, and what the library holds there."""

    def __init__(
        self,
        spans: Sequence[TraceSpan],
        sizes: StateSizes,
        on_gpu: bool,
        prefetch: bool,
        has_persistent_grads: bool,
        is_accumulating: bool,
    ) -> None:
        self._sizes, self._is_gpu, self._prefetch, self._is_accumulating = sizes, on_gpu, prefetch, is_accumulating
        self._segments = _grad_segments(sizes)
        self._allocated_segments = (
            set().union(*self._segments) if has_persistent_grads else set()
        )  # pieces of reduced gradients
        self._unshard_orders = unshard_orders(spans)
        self._next_unshard = 0
        self._unsharded: set[int] = set()
        self._pending_grad_bytes = 0.0  # bytes of gradients that a reduction still reads
        self._forward_end_bytes = 0.0  # bytes of activations and units when forward ended, the loss among them
        self._rings = SimulatedRings(sizes.ring_slots)

    def replay_span(self, span: TraceSpan) -> MemoryUsage:
        """Go through one span, from its mark on, and return its highest moment, without what is always there."""
        taken = self._apply_event(span) if span.event is not None else 0.0
        return MemoryUsage(
            span.peak_module_name or (span.event.kind if span.event is not None else ""),
            {
                "activations": max(span.peak_bytes, span.start_bytes + taken),
                "gathered": self._unsharded_bytes,
                "gradients": float(sum(nbytes for *_, nbytes in self._allocated_segments)),
                "gradients of autograd": self._pending_grad_bytes,
                "buckets": float(self._rings.nbytes),
            },
        )

    def _apply_event(self, span: TraceSpan) -> float:
        """Do what the engine does at a mark; return bytes that are held for this moment alone."""
        mark, partitioned = span.event, self._sizes.placement
        if mark is None:
            return 0.0
        if mark.kind == "bring" and partitioned.parameters:
            self._unshard(mark.unit, self._unshard_orders[span.is_backward])
        elif mark.kind == "release":
            self._unsharded.discard(mark.unit)
        elif mark.kind == "finish":
            if not (partitioned.gradients or self._allocated_segments) and self._is_gpu:
                self._allocate_all_segments(
                    self._forward_end_bytes - span.start_bytes - self._unsharded_bytes - mark.nbytes
                )
            self._allocated_segments |= self._segments[mark.unit]
            if not partitioned.gradients:
                return mark.nbytes  # copied into the sum, and gone
            self._rings.add_buckets(self._sizes.units[mark.unit].buckets, self._is_accumulating)
            late = self._sizes.units[mark.unit].side_stream_grad_bytes if self._is_gpu else 0.0
            self._pending_grad_bytes = min(late, mark.nbytes)
            return mark.nbytes - self._pending_grad_bytes
        elif mark.kind == "end forward":
            self._forward_end_bytes = span.start_bytes + self._unsharded_bytes
            self._next_unshard = 0
        elif mark.kind == "end backward":
            self._pending_grad_bytes = 0.0
            self._rings.free()
            self._unsharded.clear()
        return 0.0

    def _allocate_all_segments(self, free_bytes: float) -> None:
        """Take all pieces if the loss has left room for them: see [Note: gradients that come and go]."""
        every = set().union(*self._segments)
        if free_bytes >= sum(nbytes for *_, nbytes in every):
            self._allocated_segments |= every

    @property
    def _unsharded_bytes(self) -> float:
        return float(sum(self._sizes.units[unit].alloc_bytes for unit in self._unsharded))

    def _unshard(self, unit: int, order: list[int]) -> None:
        self._unsharded.add(unit)
        self._next_unshard += 1
        if self._prefetch and self._next_unshard < len(order):
            self._unsharded.add(order[self._next_unshard])


GradSegment = tuple[torch.dtype, int, int]  # of which dtype, its number, and its bytes


def _grad_segments(held: StateSizes) -> list[set[GradSegment]]:
    """For each unit the pieces that its gradients lie in: see [Note: gradients that come and go]."""
    found: list[set[GradSegment]] = [set() for _ in held.units]
    for dtype in {dtype: None for unit in held.units for dtype, _ in unit.device_grad_numels}:
        sizes = [
            (number, numel)
            for number, unit in enumerate(held.units)
            for its, numel in unit.device_grad_numels
            if its == dtype
        ]
        parts = held.shard_count if held.placement.gradients else 1
        numbers = assign_segments([numel for _, numel in sizes], parts)
        together = Counter[int]()
        for piece, (_, numel) in zip(numbers, sizes, strict=True):
            together[piece] += numel * dtype.itemsize
        for piece, (unit, _) in zip(numbers, sizes, strict=True):
            found[unit].add((dtype, piece, together[piece]))
    return found


def unshard_orders(spans: Sequence[TraceSpan]) -> tuple[list[int], list[int]]:
    """The units in the order that forward, and backward, brings them in."""
    orders: tuple[list[int], list[int]] = ([], [])
    for span in spans:
        if span.event is not None and span.event.kind == "bring":
            orders[span.is_backward].append(span.event.unit)
    return orders


USABLE_HOST_FRACTION = 0.9  # of host memory that states may take: the rest is the system's, the data's and Python's


def device_bytes_needed(footprint: Footprint, machine: Machine) -> float:
    """Bytes of a device: what the allocator reserves, and the runtime's own."""
    return footprint.reserved + machine.context


def usage_fractions(footprint: Footprint, devices: int, machine: Machine) -> dict[str, float]:
    """How full device, host and disk are, as parts of what may be used; over 1 does not fit."""
    here = min(devices, machine.devices)
    return {
        "device": device_bytes_needed(footprint, machine) / machine.memory,
        "host": footprint.host * here / (machine.host_memory * USABLE_HOST_FRACTION),
        "disk": footprint.disk * here / (machine.disk or 1) if footprint.disk else 0.0,
    }


def memory_shortfall(footprint: Footprint, devices: int, machine: Machine) -> str:
    """What a footprint does not fit into, with figures; empty where it fits."""
    here, full = min(devices, machine.devices), usage_fractions(footprint, devices, machine)
    if full["device"] > 1:
        return (
            f"it needs {format_bytes(int(device_bytes_needed(footprint, machine)))} a device, which has "
            f"{format_bytes(machine.memory)}"
        )
    if full["host"] > 1:
        has = f"{format_bytes(machine.host_memory)}, of which {USABLE_HOST_FRACTION:.0%} may be taken"
        return (
            f"its {here} ranks a node need {format_bytes(int(footprint.host * here))} of host memory, which has {has}"
        )
    if full["disk"] > 1:
        return (
            f"its {here} ranks a node need {format_bytes(int(footprint.disk * here))} of disk, which has "
            f"{format_bytes(machine.disk)}"
        )
    return ""
