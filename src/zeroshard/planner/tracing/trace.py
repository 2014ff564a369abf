"""Trace: one forward and backward of a model as a list of events, for whoever wants to know what they would take.

[Note: tracing]
The real model runs once on meta tensors, which have shapes and no memory, and every operation that reaches PyTorch's
dispatcher is noted: what it computes, what it moves, which memory it takes and which is let go before it. Between the
operations stand the moments at which the engine acts: a unit is brought, let go, or its gradients are complete. Stages,
offload and machines do not change these lists, so one trace is replayed for all of them (``footprint.py``,
``step_time.py``), in milliseconds. What does change them is traced anew: the tensor degree, the precision, what is
recomputed, and the micro-batch, along which nearly everything is a straight line (:meth:`Trace.extrapolate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, cast

OpKind = Literal["product", "attention", "convolution", "plain", "nothing"]
EngineEventKind = Literal["bring", "release", "finish", "end forward", "end backward"]


@dataclass(slots=True)
class Op:
    """One operation, all figures for one rank."""

    name: str
    kind: OpKind  # "nothing": no kernel runs, as for a view or an allocation
    dtype: str  # "fp32", "bf16", "fp16" or another: what it is computed in
    flops: float
    moved_bytes: float  # bytes read and written
    freed_bytes: float  # bytes let go since the operation before
    allocated_bytes: float  # bytes of memory that its results take
    scratch_bytes: float  # bytes that it takes and lets go itself
    collective: str = ""  # over the tensor axis: "all-reduce", "all-gather"; ``moved`` is its tensor then
    module_name: str = ""  # the unit or module that is running
    is_backward: bool = False
    host_ops: float = 0.0  # what the host does beside launching it, in operations


@dataclass(slots=True)
class EngineEvent:
    """A moment at which the engine acts."""

    kind: EngineEventKind
    unit: int = -1  # its number
    nbytes: float = 0  # for "finish": of the gradients that autograd has made for the unit


@dataclass(frozen=True)
class Trace:
    """One forward and backward of a model on one rank, of one micro-batch."""

    events: tuple[Op | EngineEvent, ...]
    unit_names: tuple[str, ...]
    """Names of the units, by number."""
    micro_batch: int
    input_bytes: float
    """Bytes of the batch itself."""
    buffer_bytes: float
    """Bytes of the model's buffers."""
    kept_input_bytes: tuple[float, ...] = ()
    """Bytes of the inputs of recomputed blocks that this rank keeps, in the order of forward."""
    num_recomputed_blocks: int = 0
    """How many blocks are recomputed."""

    @property
    def ops(self) -> Iterator[Op]:
        """The operations alone."""
        return (event for event in self.events if isinstance(event, Op))

    def has_same_ops(self, other: Trace) -> bool:
        """Whether both are the same operations at other sizes."""
        return len(self.events) == len(other.events) and all(
            mine.kind == its.kind and mine.unit == its.unit
            if isinstance(mine, EngineEvent) and isinstance(its, EngineEvent)
            else isinstance(mine, Op) and isinstance(its, Op) and mine.name == its.name
            for mine, its in zip(self.events, other.events, strict=True)
        )

    def extrapolate(self, other: Trace, micro_batch: int) -> Trace:
        """The trace at another micro-batch, on the straight lines through this one and another that is alike."""
        share = (micro_batch - self.micro_batch) / (other.micro_batch - self.micro_batch)

        def at(mine: float, its: float) -> float:
            return max(0.0, mine + share * (its - mine))

        events: list[Op | EngineEvent] = []
        for mine, its in zip(self.events, other.events, strict=True):
            if isinstance(mine, EngineEvent):
                events.append(mine)
                continue
            its = cast(Op, its)
            events.append(
                replace(
                    mine,
                    flops=at(mine.flops, its.flops),
                    moved_bytes=at(mine.moved_bytes, its.moved_bytes),
                    freed_bytes=at(mine.freed_bytes, its.freed_bytes),
                    allocated_bytes=at(mine.allocated_bytes, its.allocated_bytes),
                    scratch_bytes=at(mine.scratch_bytes, its.scratch_bytes),
                )
            )
        kept = tuple(at(mine, its) for mine, its in zip(self.kept_input_bytes, other.kept_input_bytes, strict=True))
        inputs = at(self.input_bytes, other.input_bytes)
        return replace(self, events=tuple(events), micro_batch=micro_batch, input_bytes=inputs, kept_input_bytes=kept)


@dataclass
class TraceSpan:
    """What lies between two moments of the engine: the memory of activations, and the operations."""

    event: EngineEvent | None = None  # the moment it begins with
    start_bytes: float = 0.0  # bytes of activations held when it begins
    peak_bytes: float = 0.0  # at its highest
    end_bytes: float = 0.0
    ops: list[Op] = field(default_factory=list)
    peak_module_name: str = ""  # what was running at the highest point
    is_backward: bool = False


def split_spans(trace: Trace) -> list[TraceSpan]:
    """Cut a trace where the engine acts.

    >>> add = Op("add", "plain", "fp32", flops=0, moved_bytes=12, freed_bytes=0, allocated_bytes=4, scratch_bytes=0)
    >>> events = (EngineEvent("bring", 0), add, add, EngineEvent("end forward"))
    >>> trace = Trace(events, ("a",), micro_batch=1, input_bytes=0, buffer_bytes=0)
    >>> [span.peak_bytes for span in split_spans(trace)]
    [0.0, 8.0, 8.0]
    """
    spans, held = [TraceSpan()], 0.0
    for event in trace.events:
        if isinstance(event, EngineEvent):
            spans[-1].end_bytes = held
            spans.append(
                TraceSpan(event, held, held, held, is_backward=spans[-1].is_backward or event.kind == "end forward")
            )
            continue
        span = spans[-1]
        held += event.allocated_bytes - event.freed_bytes
        span.ops.append(event)
        if held + event.scratch_bytes > span.peak_bytes:
            span.peak_bytes, span.peak_module_name = held + event.scratch_bytes, event.module_name
    spans[-1].end_bytes = held
    return spans
