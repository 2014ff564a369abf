"""Order: the events that all ranks do together, as data. It predicts the next one, and asks before any other."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from zeroshard.comm.consistency import ConsistencyChecker
from zeroshard.core.unit import Unit

MAX_PAST_EVENTS = 10_000


class Kind(enum.Enum):
    """What ranks do together. A pass begins with the first event after it was announced."""

    FORWARD = "start forward"
    BACKWARD = "start backward"
    STEP = "start step"
    ADD = "add a group"
    ZERO = "set gradients to zero"
    BUFFERS = "broadcast buffers"
    GATHER = "gather unit"
    REDUCE = "reduce unit"
    FLAGS = "agree on gradients"
    SCHEDULE = "agree on the order of reductions"
    READ = "read gradients of unit"
    VALUES = "gather values"
    WRITE = "write a parameter of unit"
    NORM = "add up norms"
    OVERFLOW = "look for overflows"


class Event(NamedTuple):
    """One of them, of a unit, of the model, or as a text says that is the same on all ranks."""

    kind: Kind
    unit: Unit | str | None = None

    def __str__(self) -> str:
        return self.kind.value if self.unit is None else f"{self.kind.value} {self.unit}"


Place = tuple[object, object]  # of a pass in the loop


@dataclass(frozen=True)
class Pass:
    """What one pass did."""

    kind: Kind
    events: list[Event]


class Order:
    """Expects of each pass what it did the last time, at the same place of a step of the same shape.

    The place of a pass is looked up by the passes of the last step and those since then, then by the passes since then,
    then by the last pass. Only recorded events count, so a place is the same on all ranks. An event that was expected
    costs nothing; any other is confirmed by all ranks first (a round trip), so that none runs into a collective that
    another rank will not join.
    """

    def __init__(self, checker: ConsistencyChecker) -> None:
        self.event_count = 0
        self._checker = checker
        self._past: deque[Event] = deque(maxlen=MAX_PAST_EVENTS)
        self._known: dict[Place, Pass] = {}  # what came next, by its place
        self._numbers: dict[tuple[int, Kind], int] = {}  # of each sequence of passes
        self._last_step = 0  # the sequence of passes of the last step
        self._since = 0  # the sequence since then
        self._places: list[Place] = []  # of the present pass
        self._announced: Kind | None = None
        self._is_step_over = False
        self._kind = Kind.STEP
        self._expected: list[Event] = []
        self._position = 0
        self._done: list[Event] = []
        checker.track_progress(self)

    def __del__(self) -> None:
        """Tell the other ranks that this one will join nothing more."""
        self._checker.announce_model_dropped((self.event_count, self.describe_last_event()))

    def begin(self, kind: Kind) -> None:
        """Announce a pass."""
        self._announced = kind

    def end_step(self) -> None:
        """Begin another step with the next pass."""
        self._is_step_over = True

    def record(self, kind: Kind, unit: Unit | str | None = None, is_agreed: bool = False) -> None:
        """Return when all ranks are known to do this next; raise if they do not.

        ``is_agreed``: all ranks do it in this pass, but each when it comes to it: so none waits for the others here,
        where they may wait for it in a collective of the user's.
        """
        if self._announced is Kind.FORWARD and kind not in (Kind.BUFFERS, Kind.GATHER):
            self._announced = None  # a forward without an event is not a pass: other ranks may not run it
        if self._announced is not None:
            self._switch(self._announced)
        event = Event(kind, unit)
        if self._checker.faults:
            self._checker.raise_on_fault(self.event_count + 1, str(event))
        position = self._position
        if position < len(self._expected) and self._expected[position] == event:
            self._position = position + 1
        else:
            if not is_agreed:
                self._confirm(event)
            if event in self._expected[position:]:  # some were left out: go on from here
                self._position = self._expected.index(event, position) + 1
        self._done.append(event)
        self._add_past(event)

    def next_gather(self) -> Unit | None:
        """Return the unit that is probably gathered next, in this pass."""
        for position in range(self._position, len(self._expected)):
            event = self._expected[position]
            if isinstance(event.unit, Unit) and event.kind is Kind.GATHER:
                return event.unit
        return None

    def _switch(self, kind: Kind) -> None:
        """Begin a pass; keep what the last one did at each of its places."""
        self._announced = None
        for place in self._places:
            self._known[place] = Pass(self._kind, self._done)
        self._since = self._numbers.setdefault((self._since, self._kind), len(self._numbers) + 1)
        if self._is_step_over:
            self._last_step = self._since
            self._since = 0
            self._is_step_over = False
        places: list[Place] = [(self._last_step, self._since), (None, self._since), (None, self._kind)]
        found = next((self._known[place] for place in places if place in self._known), None)
        is_expected = found is not None and found.kind is kind
        if not is_expected or self._position < len(self._expected):
            self._confirm(Event(kind))
        of_kind: Place = ("last", kind)
        if not is_expected:
            found = self._known.get(of_kind)
        self._places = [*places, of_kind]
        self._expected = [] if found is None else found.events
        self._kind = kind
        self._position = 0
        self._done = []
        self._add_past(Event(kind))

    def _confirm(self, event: Event) -> None:
        is_rest = self._position < len(self._expected)
        expected = str(self._expected[self._position]) if is_rest else "go on to the next pass"
        self._checker.confirm(self.event_count + 1, str(event), expected)

    def _add_past(self, event: Event) -> None:
        self._past.append(event)
        self.event_count += 1  # last: another thread reads it first

    # -- what the checker asks ----------------------------------------------------------------------------------

    def event_at(self, event_index: int) -> str:
        """Return an event of the past, in words."""
        back = self.event_count - event_index
        return str(self._past[-1 - back]) if 0 <= back < len(self._past) else ""

    def describe_last_event(self) -> str:
        """Return the last event, in words."""
        return str(self._past[-1]) if self._past else "shard()"
