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

from zeroshard.engine.gradient_memory import piece_numbers
from zeroshard.planner.memory import BucketBytes, Holdings
from zeroshard.planner.traces.trace import Span, Trace, spans_of

ROUNDED = 1.09  # memory that the allocator reserves over what is allocated: 1.01 to 1.09 measured, docs/benchmarks.md
NEAR_INPUTS = 2  # blocks' inputs on the device, where they are kept on the host: one in use, one on its way


@dataclass(frozen=True)
class Moment:
    """What is held at one moment, in bytes."""

    what: str
    """What is running."""
    held: dict[str, float]
    """By kind: "states" (but for gradients), "gradients", "activations", "kept inputs", "gathered", "gradients of
    autograd", "buckets", "step", …"""

    @property
    def total(self) -> float:
        """Of all kinds."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Footprint:
    """Bytes that one rank holds."""

    states: dict[str, int]
    """On the device after a backward, by kind of state."""
    far: dict[tuple[str, str], int]
    """Outside it, by (kind of state, tier)."""
    peak: Moment
    """The highest moment of a step on the device."""
    at_rest: float
    """On the device between zero_grad() and the next forward: states, and what stays from step to step beside them."""
    travel: float
    """Host memory that states travel through."""
    kept_on_host: float = 0.0
    """Host memory for the inputs of recomputed blocks."""
    timeline: tuple[Moment, ...] = field(default=(), repr=False)
    """All moments in order, where they were asked for."""

    @property
    def host(self) -> float:
        """Bytes of host memory of one rank."""
        return sum(nbytes for (_, tier), nbytes in self.far.items() if tier == "host") + self.travel + self.kept_on_host

    @property
    def disk(self) -> float:
        """Bytes on disk of one rank."""
        return sum(nbytes for (_, tier), nbytes in self.far.items() if tier == "disk")

    @property
    def reserved(self) -> float:
        """What the allocator is expected to reserve for the peak."""
        return self.peak.total * ROUNDED


def footprint(
    trace: Trace,
    held: Holdings,
    *,
    on_gpu: bool = True,
    prefetch: bool = True,
    inputs_on_host: bool = False,
    workspace: float = 0,
    scratch: float = 0,
    timeline: bool = False,
    spans: Sequence[Span] | None = None,
    gradients_stay: bool = False,
    adds: bool = False,
) -> Footprint:
    """Replay a trace: see [Note: replaying memory].

    ``workspace`` is what math libraries hold in the device's allocator, ``scratch`` what the optimizer's own kernels
    take in a step, both in bytes. ``spans`` are those of the trace, if they were cut before. ``gradients_stay``: they
    are there when a forward begins. ``adds``: a backward adds to those of another.
    """
    kept = sum(trace.kept)
    near = sum(sorted(trace.kept)[-NEAR_INPUTS:]) if inputs_on_host else kept
    gradients = float(held.states["gradients"])
    always = {
        "states": float(sum(held.states.values())) - gradients,
        "gradients": gradients if gradients_stay else 0.0,
        "kept inputs": near,
        "buffers": trace.buffers,
        "inputs": trace.inputs,
        "libraries": workspace,
        "landings": float(0 if held.placement.gradients else held.landings),
    }
    spans = spans_of(trace) if spans is None else spans
    walk = _Walk(spans, held, on_gpu, prefetch, gradients_stay, adds)
    moments = [walk.over(span) for span in spans]
    best = max(moments, key=lambda moment: moment.total)
    best = Moment(best.what, {**always, **best.held})
    step = Moment("step", {**always, "gradients": gradients, "activations": 0.0, "step": float(held.step) + scratch})
    if step.total > best.total:
        best = step
    return Footprint(
        held.states,
        held.far,
        best,
        at_rest=sum(always.values()) - trace.inputs,
        travel=float(held.travel),
        kept_on_host=kept if inputs_on_host else 0.0,
        timeline=(*(Moment(m.what, {**always, **m.held}) for m in moments), step) if timeline else (),
    )


class OpenRings:
    """The buffers of all rings that have memory: see [Note: buffers of a ring]."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._turns: Counter[torch.dtype] = Counter()
        self._packed: set[tuple[torch.dtype, int, int]] = set()  # by dtype, slot, and bytes
        self._parts: set[tuple[torch.dtype, int, int]] = set()

    @property
    def nbytes(self) -> int:
        """Of all these buffers."""
        return sum(nbytes for *_, nbytes in self._packed) + sum(nbytes for *_, nbytes in self._parts)

    def take(self, buckets: Sequence[BucketBytes], adds: bool) -> None:
        """Let a unit's buckets pass. ``adds``: what is reduced is added to gradients that are there."""
        for bucket in buckets:
            slot = self._turns[bucket.dtype] % self._slots
            self._turns[bucket.dtype] += 1
            self._packed.add((bucket.dtype, slot, bucket.packed))
            if adds or bucket.aside:
                self._parts.add((bucket.dtype, slot, bucket.part))

    def close(self) -> None:
        """Give their memory back."""
        self._packed.clear()
        self._parts.clear()


class _Walk:
    """Where a replay is, and what the library holds there."""

    def __init__(
        self, spans: Sequence[Span], held: Holdings, on_gpu: bool, prefetch: bool, gradients_stay: bool, adds: bool
    ) -> None:
        self._held, self._on_gpu, self._prefetch, self._adds = held, on_gpu, prefetch, adds
        self._pieces = _pieces(held)
        self._there = set().union(*self._pieces) if gradients_stay else set()  # pieces of reduced gradients
        self._orders = brought_in(spans)
        self._at = 0
        self._gathered: set[int] = set()
        self._waiting = 0.0  # bytes of gradients that a reduction still reads
        self._high = 0.0  # bytes of activations and units when forward ended, the loss among them
        self._rings = OpenRings(held.slots)

    def over(self, span: Span) -> Moment:
        """Go through one span, from its mark on, and return its highest moment, without what is always there."""
        taken = self._act(span) if span.mark is not None else 0.0
        return Moment(
            span.where or (span.mark.moment if span.mark is not None else ""),
            {
                "activations": max(span.peak, span.begin + taken),
                "gathered": self._brought,
                "gradients": float(sum(nbytes for *_, nbytes in self._there)),
                "gradients of autograd": self._waiting,
                "buckets": float(self._rings.nbytes),
            },
        )

    def _act(self, span: Span) -> float:
        """Do what the engine does at a mark; return bytes that are held for this moment alone."""
        mark, partitioned = span.mark, self._held.placement
        if mark is None:
            return 0.0
        if mark.moment == "bring" and partitioned.parameters:
            self._bring(mark.unit, self._orders[span.backward])
        elif mark.moment == "release":
            self._gathered.discard(mark.unit)
        elif mark.moment == "finish":
            if not (partitioned.gradients or self._there) and self._on_gpu:
                self._take_at_once(self._high - span.begin - self._brought - mark.nbytes)
            self._there |= self._pieces[mark.unit]
            if not partitioned.gradients:
                return mark.nbytes  # copied into the sum, and gone
            self._rings.take(self._held.units[mark.unit].buckets, self._adds)
            late = self._held.units[mark.unit].late if self._on_gpu else 0.0
            self._waiting = min(late, mark.nbytes)
            return mark.nbytes - self._waiting
        elif mark.moment == "end forward":
            self._high = span.begin + self._brought
            self._at = 0
        elif mark.moment == "end backward":
            self._waiting = 0.0
            self._rings.close()
            self._gathered.clear()
        return 0.0

    def _take_at_once(self, room: float) -> None:
        """Take all pieces if the loss has left room for them: see [Note: gradients that come and go]."""
        every = set().union(*self._pieces)
        if room >= sum(nbytes for *_, nbytes in every):
            self._there |= every

    @property
    def _brought(self) -> float:
        return float(sum(self._held.units[unit].room for unit in self._gathered))

    def _bring(self, unit: int, order: list[int]) -> None:
        self._gathered.add(unit)
        self._at += 1
        if self._prefetch and self._at < len(order):
            self._gathered.add(order[self._at])


Piece = tuple[torch.dtype, int, int]  # of which dtype, its number, and its bytes


def _pieces(held: Holdings) -> list[set[Piece]]:
    """For each unit the pieces that its gradients lie in: see [Note: gradients that come and go]."""
    found: list[set[Piece]] = [set() for _ in held.units]
    for dtype in {dtype: None for unit in held.units for dtype, _ in unit.kept}:
        sizes = [(number, numel) for number, unit in enumerate(held.units) for its, numel in unit.kept if its == dtype]
        parts = held.ranks if held.placement.gradients else 1
        numbers = piece_numbers([numel for _, numel in sizes], parts)
        together = Counter[int]()
        for piece, (_, numel) in zip(numbers, sizes, strict=True):
            together[piece] += numel * dtype.itemsize
        for piece, (unit, _) in zip(numbers, sizes, strict=True):
            found[unit].add((dtype, piece, together[piece]))
    return found


def brought_in(spans: Sequence[Span]) -> tuple[list[int], list[int]]:
    """The units in the order that forward, and backward, brings them in."""
    orders: tuple[list[int], list[int]] = ([], [])
    for span in spans:
        if span.mark is not None and span.mark.moment == "bring":
            orders[span.backward].append(span.mark.unit)
    return orders
