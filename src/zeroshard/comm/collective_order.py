"""CollectiveOrder: the recorded order of collectives. It predicts what to prefetch and detects a rank that deviates."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator

from zeroshard.comm.consistency import PASS_START, ConsistencyChecker

MAX_PAST_PASSES = 64  # past passes whose events are still known


class CollectiveOrder:
    """Record each pass (a forward, a backward, a step) as a list of events, and expect the same next time.

    A pass is identified by its kind, and which kind follows which is recorded too. An expected event costs nothing; a
    change of order costs one consistency check of all ranks and a missed prefetch, never a wrong result: see [Note:
    consistency of ranks].

    >>> order = CollectiveOrder(ConsistencyChecker(None, 0, [0], timeout=1.0))
    >>> for _ in range(2):
    ...     order.begin_pass("forward")
    ...     order.check("gather unit 'a'")
    ...     print(list(order.iter_expected({"gather unit 'b'"})))
    ...     order.check("gather unit 'b'")
    []
    ["gather unit 'b'"]
    """

    def __init__(self, consistency: ConsistencyChecker) -> None:
        self._consistency = consistency
        self.event_count = 0  # events so far: equal on all ranks
        self._events_by_pass: dict[str, list[str]] = {}
        self._next_pass: dict[str, str] = {}
        self._pass_kind = ""
        self._starting_pass: str | None = None
        self._expected_events: list[str] = []
        self._position = 0  # index in ``_expected_events``
        self._done_events: list[str] = []
        # first event index, kind, events
        self._past_passes: deque[tuple[int, str, list[str]]] = deque(maxlen=MAX_PAST_PASSES)
        self._pass_start = 0  # event index at which this pass started
        consistency.track_progress(self)

    def __del__(self) -> None:
        """Notify the other ranks that this one will join no more collectives."""
        self._consistency.announce_model_dropped((self.event_count, self.describe_last_event()))

    def begin_pass(self, kind: str) -> None:
        """Announce a pass. It starts with its first event: a pass without collectives is not recorded."""
        self._starting_pass = kind

    def check(self, event: str, always_confirm: bool = False) -> None:
        """Record an event that is about to happen. Return once all ranks are known to do the same.

        ``always_confirm``: confirm it with all ranks even if it is expected, because what follows may take longer than
        the timeout.
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
            has_ended = self._position == len(self._expected_events)
            expected = "go on to the next pass" if has_ended else self._expected_events[self._position]
            self._confirm(event, expected)
            if event in self._expected_events[self._position :]:  # some were skipped: continue from here
                self._position = self._expected_events.index(event, self._position) + 1
        self._done_events.append(event)
        self.event_count += 1  # last: a rank past an event has confirmed it, or did not need to

    def _confirm(self, event: str, expected: str) -> None:
        try:
            self._consistency.confirm(self.event_count + 1, event, expected)
        except BaseException:
            self.event_count += 1  # do not confirm it again
            raise

    def _switch_pass(self, kind: str) -> None:
        """Record the finished pass, and expect the events of the last pass of this kind."""
        self._starting_pass = None
        is_complete = self._position == len(self._expected_events)
        if not is_complete or self._next_pass.get(self._pass_kind) != kind:
            next_pass = self._next_pass.get(self._pass_kind, "nothing yet")
            self._confirm(PASS_START + kind, next_pass if is_complete else self._expected_events[self._position])
        self._past_passes.append((self._pass_start, self._pass_kind, self._done_events))
        self._events_by_pass[self._pass_kind] = self._done_events
        self._next_pass[self._pass_kind] = kind
        self._pass_kind, self._expected_events = kind, self._events_by_pass.get(kind, [])
        self._position, self._done_events = 0, []
        self._pass_start = self.event_count + 1
        self.event_count += 1

    def event_at(self, event_index: int) -> str:
        """Return this rank's event at an index; "" if that is too long ago, or in the future."""
        for start, kind, events in ((self._pass_start, self._pass_kind, self._done_events), *tuple(self._past_passes)):
            if start <= event_index <= start + len(events):
                return events[event_index - start - 1] if event_index > start else PASS_START + kind
        return ""

    def describe_last_event(self) -> str:
        if not self._pass_kind:
            return "no collective yet"
        if not self._done_events:
            return f"the start of {self._pass_kind!r}"
        return f"{self._done_events[-1]}, in its pass {self._pass_kind!r}"

    def iter_expected(self, candidates: Container[str]) -> Iterator[str]:
        """Yield the expected events of this pass that are in ``candidates``, the next one first."""
        positions = range(self._position, len(self._expected_events))
        return (event for position in positions if (event := self._expected_events[position]) in candidates)

    def remaining_events(self) -> list[str]:
        """Return all events still expected in this pass."""
        return self._expected_events[self._position :]
