"""Order: the recorded order of collectives, which says what to prefetch and notices a rank that leaves it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator

from zeroshard.comm.consistency import PASS_START, ConsistencyChecker

MAX_PAST_PASSES = 64  # passes whose events are still known


class CollectiveOrder:
    """Records each pass (a forward, a backward, a step) as its list of events, and expects the same next time.

    A pass is known by its kind, and which kind follows which is recorded too. Doing what is expected costs nothing; a
    change of order costs one agreement of all ranks and a missed prefetch, never a wrong result: see [Note: agreement].

    >>> order = CollectiveOrder(ConsistencyChecker(None, "", 0, 1, 1.0))
    >>> for _ in range(2):
    ...     order.begin_pass("forward")
    ...     order.check("gather unit 'a'")
    ...     print(order.next_expected({"gather unit 'b'"}))
    ...     order.check("gather unit 'b'")
    None
    gather unit 'b'
    """

    def __init__(self, consistency: ConsistencyChecker) -> None:
        self._consistency = consistency
        self.event_count = 0  # events so far: the same on all ranks
        self._events_by_pass: dict[str, list[str]] = {}
        self._next_pass: dict[str, str] = {}
        self._pass_kind = ""
        self._starting_pass: str | None = None
        self._expected_events: list[str] = []
        self._position = 0  # position in ``_expected_events``
        self._done_events: list[str] = []
        self._past_passes: deque[tuple[int, str, list[str]]] = deque(
            maxlen=MAX_PAST_PASSES
        )  # of passes: first moment, kind, events
        self._pass_start = 0  # the moment at which this pass did
        consistency.track_progress(self)

    def __del__(self) -> None:
        """Tell the other ranks that this one will take part in nothing more."""
        self._consistency.announce_model_dropped((self.event_count, self.describe_last_event()))

    def begin_pass(self, kind: str) -> None:
        """Say that a pass starts. It counts from its first event: one without collectives leaves no trace."""
        self._starting_pass = kind

    def check(self, event: str, always_confirm: bool = False) -> None:
        """Note an event about to happen. Returns when all ranks are known to do the same.

        ``meet``: ask them in any case, for the sake of what follows and would wait longer than the timeout.
        """
        if self._starting_pass is not None:
            self._switch_pass(self._starting_pass)
        if self._consistency.faults:
            self._consistency.raise_on_fault(self.event_count + 1, event)
        if self._position < len(self._expected_events) and self._expected_events[self._position] == event:
            if always_confirm:
                self._confirm(event, event)
            self._position += 1
        else:
            expected = (
                self._expected_events[self._position]
                if self._position < len(self._expected_events)
                else "go on to the next pass"
            )
            self._confirm(event, expected)
            if event in self._expected_events[self._position :]:  # some were skipped: go on from here
                self._position = self._expected_events.index(event, self._position) + 1
        self._done_events.append(event)
        self.event_count += 1  # at the end: whoever is past a moment has agreed on it, or has seen no need to

    def _confirm(self, event: str, expected: str) -> None:
        try:
            self._consistency.confirm(self.event_count + 1, event, expected)
        except BaseException:
            self.event_count += 1  # it is not asked about again
            raise

    def _switch_pass(self, kind: str) -> None:
        """Record the pass that is over and expect what the last pass of this kind did."""
        self._starting_pass = None
        complete = self._position == len(self._expected_events)
        if not complete or self._next_pass.get(self._pass_kind) != kind:
            expected = (
                self._next_pass.get(self._pass_kind, "nothing yet")
                if complete
                else self._expected_events[self._position]
            )
            self._confirm(PASS_START + kind, expected)
        self._past_passes.append((self._pass_start, self._pass_kind, self._done_events))
        self._events_by_pass[self._pass_kind] = self._done_events
        self._next_pass[self._pass_kind] = kind
        self._pass_kind, self._expected_events = kind, self._events_by_pass.get(kind, [])
        self._position, self._done_events = 0, []
        self._pass_start = self.event_count + 1
        self.event_count += 1

    def event_at(self, event_index: int) -> str:
        """What this rank did at a moment; "" where that is too long ago, or to come."""
        for began, kind, events in ((self._pass_start, self._pass_kind, self._done_events), *tuple(self._past_passes)):
            if began <= event_index <= began + len(events):
                return events[event_index - began - 1] if event_index > began else PASS_START + kind
        return ""

    def describe_last_event(self) -> str:
        """The last event of this rank, in words."""
        last = (
            f"{self._done_events[-1]}, in its pass {self._pass_kind!r}"
            if self._done_events
            else f"the start of {self._pass_kind!r}"
        )
        return last if self._pass_kind else "no collective yet"

    def next_expected(self, candidates: Container[str]) -> str | None:
        """Return the next expected event of this pass that is one of ``among``."""
        return next(self.iter_expected(candidates), None)

    def iter_expected(self, candidates: Container[str]) -> Iterator[str]:
        """Yield the expected events of this pass that are among these, the next first."""
        positions = range(self._position, len(self._expected_events))
        return (event for position in positions if (event := self._expected_events[position]) in candidates)

    def remaining_events(self) -> list[str]:
        """Return all events still expected in this pass."""
        return self._expected_events[self._position :]
