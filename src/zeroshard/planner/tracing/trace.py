"""Trace: one forward and backward of a model as a list of events.

[Note: tracing]
The real model runs once on meta tensors, which have shapes but no memory. Every operation that reaches PyTorch's
dispatcher is recorded: its FLOPs, the bytes it reads and writes, the memory it allocates, and the memory freed before
it. Between the operations are the engine events: a unit is unsharded or resharded, or its gradients are ready. Stages,
offload and machines do not change this list, so one trace is replayed for all of them (``footprint.py``,
``step_time.py``) in milliseconds. The tensor degree, the precision, recomputation and the micro-batch do change it and
need another trace; nearly everything is linear in the micro-batch (:meth:`Trace.extrapolate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

OpKind = Literal["matmul", "attention", "convolution", "plain", "nothing"]
EngineEventKind = Literal["unshard", "reshard", "reduce", "end forward", "end backward"]
_SCALING_FIELDS = ("flops", "moved_bytes", "freed_bytes", "allocated_bytes", "scratch_bytes")  # linear in the batch


@dataclass(slots=True)
class Op:
    """One operation; all numbers are for one rank."""

    name: str
    kind: OpKind  # "nothing": no kernel, as for a view or an allocation
    dtype: str = ""  # "fp32", "bf16", "fp16" or another: the compute dtype
    flops: float = 0.0
    moved_bytes: float = 0.0  # bytes read and written
    freed_bytes: float = 0.0  # since the previous operation
    allocated_bytes: float = 0.0  # for its results
    scratch_bytes: float = 0.0  # temporary memory of its kernel
    collective: str = ""  # tensor-parallel: "all-reduce", "all-gather"; ``moved_bytes`` is then its tensor's size
    module_name: str = ""  # the unit or module that runs
    is_backward: bool = False
    host_ops: float = 0.0  # host time in addition to the launch, in units of one operation


@dataclass(slots=True)
class EngineEvent:
    """A point in the trace where the engine acts."""

    kind: EngineEventKind
    unit: int = -1  # its index
    nbytes: float = 0  # for "reduce": bytes of the unit's gradients from autograd


@dataclass(frozen=True)
class Trace:
    """One forward and backward of a micro-batch on one rank."""

    events: tuple[Op | EngineEvent, ...]
    unit_names: tuple[str, ...]
    """Unit names, by index."""
    micro_batch: int
    input_bytes: float
    """Bytes of the input batch."""
    buffer_bytes: float
    """Bytes of the model's buffers."""
    kept_input_bytes: tuple[float, ...] = ()
    """Bytes of each input of recomputed blocks that this rank keeps, in forward order."""

    @property
    def ops(self) -> Iterator[Op]:
        """The operations, without engine events."""
        return (event for event in self.events if isinstance(event, Op))

    def has_same_ops(self, other: Trace) -> bool:
        """Return whether both have the same operations, possibly at other sizes."""
        return len(self.events) == len(other.events) and all(
            mine.kind == its.kind and mine.unit == its.unit
            if isinstance(mine, EngineEvent) and isinstance(its, EngineEvent)
            else isinstance(mine, Op) and isinstance(its, Op) and mine.name == its.name
            for mine, its in zip(self.events, other.events, strict=True)
        )

    def extrapolate(self, other: Trace, micro_batch: int) -> Trace:
        """Return the trace at another micro-batch by linear extrapolation from this one and ``other``.

        Both must have the same operations.
        """
        ratio = (micro_batch - self.micro_batch) / (other.micro_batch - self.micro_batch)

        def interpolate(mine: float, its: float) -> float:
            return max(0.0, mine + ratio * (its - mine))

        events: list[Op | EngineEvent] = []
        for mine, its in zip(self.events, other.events, strict=True):
            if isinstance(mine, EngineEvent):
                events.append(mine)
                continue
            sizes: dict[str, Any] = {
                name: interpolate(getattr(mine, name), getattr(its, name)) for name in _SCALING_FIELDS
            }
            events.append(replace(mine, **sizes))
        kept = tuple(
            interpolate(mine, its) for mine, its in zip(self.kept_input_bytes, other.kept_input_bytes, strict=True)
        )
        inputs = interpolate(self.input_bytes, other.input_bytes)
        return replace(self, events=tuple(events), micro_batch=micro_batch, input_bytes=inputs, kept_input_bytes=kept)


@dataclass
class TraceSpan:
    """The operations and activation memory between two engine events."""

    event: EngineEvent | None = None  # the event it begins with
    start_bytes: float = 0.0  # activations when it begins
    peak_bytes: float = 0.0  # activations at the peak
    end_bytes: float = 0.0
    ops: list[Op] = field(default_factory=list)
    peak_module_name: str = ""  # what runs at the peak
    is_backward: bool = False


def split_spans(trace: Trace) -> list[TraceSpan]:
    """Split a trace at its engine events.

    >>> add = Op("add", "plain", "fp32", moved_bytes=12, allocated_bytes=4)
    >>> events = (EngineEvent("unshard", 0), add, add, EngineEvent("end forward"))
    >>> trace = Trace(events, ("a",), micro_batch=1, input_bytes=0, buffer_bytes=0)
    >>> [span.peak_bytes for span in split_spans(trace)]
    [0.0, 8.0, 8.0]
    """
    spans, live_bytes = [TraceSpan()], 0.0
    for event in trace.events:
        if isinstance(event, EngineEvent):
            spans[-1].end_bytes = live_bytes
            spans.append(
                TraceSpan(
                    event,
                    live_bytes,
                    live_bytes,
                    live_bytes,
                    is_backward=spans[-1].is_backward or event.kind == "end forward",
                )
            )
            continue
        span = spans[-1]
        live_bytes += event.allocated_bytes - event.freed_bytes
        span.ops.append(event)
        if live_bytes + event.scratch_bytes > span.peak_bytes:
            span.peak_bytes, span.peak_module_name = live_bytes + event.scratch_bytes, event.module_name
    spans[-1].end_bytes = live_bytes
    return spans


class UnshardOrder:
    """The units that forward and backward unshard, in order: after each one, the engine prefetches the next."""

    def __init__(self, spans: Sequence[TraceSpan]) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []
        for span in spans:
            if span.event is not None and span.event.kind == "unshard":
                (self.backward if span.is_backward else self.forward).append(span.event.unit)
        self._position = 0

    def begin_pass(self) -> None:
        """Start a forward or a backward."""
        self._position = 0

    def next_unit(self, is_backward: bool) -> int | None:
        """Advance by one unit, and return the unit to prefetch; None at the end of the pass."""
        order = self.backward if is_backward else self.forward
        self._position += 1
        return order[self._position] if self._position < len(order) else None
