"""Trace: one forward and backward of a model as a list of events, for whoever wants to know what they would take.

[Note: tracing]
The real model runs once on meta tensors, which have shapes and no memory, and every operation that reaches PyTorch's
dispatcher is noted: what it computes, what it moves, which memory it takes and which is let go before it. Between the
operations stand the moments at which the engine acts: a unit is brought, let go, or its gradients are complete. Stages,
offload and machines do not change these lists, so one trace is replayed for all of them (``footprint.py``,
``pace.py``), in milliseconds. What does change them is traced anew: the tensor degree, the precision, what is
recomputed, and the micro-batch, along which nearly everything is a straight line (:meth:`Trace.between`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, cast

Kind = Literal["product", "attention", "convolution", "plain", "nothing"]
Moment = Literal["bring", "release", "finish", "end forward", "end backward"]


@dataclass(slots=True)
class Op:
    """One operation, all figures for one rank."""

    name: str
    kind: Kind  # "nothing": no kernel runs, as for a view or an allocation
    dtype: str  # "fp32", "bf16", "fp16" or another: what it is computed in
    flops: float
    moved: float  # bytes read and written
    freed: float  # bytes let go since the operation before
    made: float  # bytes of memory that its results take
    scratch: float  # bytes that it takes and lets go itself
    collective: str = ""  # over the tensor axis: "all-reduce", "all-gather"; ``moved`` is its tensor then
    where: str = ""  # the unit or module that is running
    backward: bool = False
    host: float = 0.0  # what the host does beside launching it, in operations


@dataclass(slots=True)
class Mark:
    """A moment at which the engine acts."""

    moment: Moment
    unit: int = -1  # its number
    nbytes: float = 0  # for "finish": of the gradients that autograd has made for the unit


@dataclass(frozen=True)
class Trace:
    """One forward and backward of a model on one rank, of one micro-batch."""

    events: tuple[Op | Mark, ...]
    units: tuple[str, ...]
    """Names of the units, by number."""
    micro_batch: int
    inputs: float
    """Bytes of the batch itself."""
    buffers: float
    """Bytes of the model's buffers."""
    kept: tuple[float, ...] = ()
    """Bytes of the inputs of recomputed blocks that this rank keeps, in the order of forward."""
    blocks: int = 0
    """How many blocks are recomputed."""

    @property
    def ops(self) -> Iterator[Op]:
        """The operations alone."""
        return (event for event in self.events if isinstance(event, Op))

    def alike(self, other: Trace) -> bool:
        """Whether both are the same operations at other sizes."""
        return len(self.events) == len(other.events) and all(
            mine.moment == its.moment and mine.unit == its.unit
            if isinstance(mine, Mark) and isinstance(its, Mark)
            else isinstance(mine, Op) and isinstance(its, Op) and mine.name == its.name
            for mine, its in zip(self.events, other.events, strict=True)
        )

    def between(self, other: Trace, micro_batch: int) -> Trace:
        """The trace at another micro-batch, on the straight lines through this one and another that is alike."""
        share = (micro_batch - self.micro_batch) / (other.micro_batch - self.micro_batch)

        def at(mine: float, its: float) -> float:
            return max(0.0, mine + share * (its - mine))

        events: list[Op | Mark] = []
        for mine, its in zip(self.events, other.events, strict=True):
            if isinstance(mine, Mark):
                events.append(mine)
                continue
            its = cast(Op, its)
            events.append(
                replace(
                    mine,
                    flops=at(mine.flops, its.flops),
                    moved=at(mine.moved, its.moved),
                    freed=at(mine.freed, its.freed),
                    made=at(mine.made, its.made),
                    scratch=at(mine.scratch, its.scratch),
                )
            )
        kept = tuple(at(mine, its) for mine, its in zip(self.kept, other.kept, strict=True))
        inputs = at(self.inputs, other.inputs)
        return replace(self, events=tuple(events), micro_batch=micro_batch, inputs=inputs, kept=kept)


@dataclass
class Span:
    """What lies between two moments of the engine: the memory of activations, and the operations."""

    mark: Mark | None = None  # the moment it begins with
    begin: float = 0.0  # bytes of activations held when it begins
    peak: float = 0.0  # at its highest
    end: float = 0.0
    ops: list[Op] = field(default_factory=list)
    where: str = ""  # what was running at the highest point
    backward: bool = False


def spans_of(trace: Trace) -> list[Span]:
    """Cut a trace where the engine acts.

    >>> add = Op("add", "plain", "fp32", flops=0, moved=12, freed=0, made=4, scratch=0)
    >>> trace = Trace((Mark("bring", 0), add, add, Mark("end forward")), ("a",), micro_batch=1, inputs=0, buffers=0)
    >>> [span.peak for span in spans_of(trace)]
    [0.0, 8.0, 8.0]
    """
    spans, held = [Span()], 0.0
    for event in trace.events:
        if isinstance(event, Mark):
            spans[-1].end = held
            spans.append(Span(event, held, held, held, backward=spans[-1].backward or event.moment == "end forward"))
            continue
        span = spans[-1]
        held += event.made - event.freed
        span.ops.append(event)
        if held + event.scratch > span.peak:
            span.peak, span.where = held + event.scratch, event.where
    spans[-1].end = held
    return spans
