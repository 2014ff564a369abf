"""Order: the recorded order of collectives, which says what to prefetch and notices a rank that leaves it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator

from zeroshard.agreement import PASS_START, Agreement

PAST = 64  # passes whose events are still known


class Order:
    """Records each pass (a forward, a backward, a step) as its list of events, and expects the same next time.

    A pass is known by its kind, and which kind follows which is recorded too. Doing what is expected costs nothing; a
    change of order costs one agreement of all ranks and a missed prefetch, never a wrong result: see [Note: agreement].

    >>> order = Order(Agreement(None, "", 0, 1, 1.0))
    >>> for _ in range(2):
    ...     order.begin("forward")
    ...     order.check("gather unit 'a'")
    ...     print(order.upcoming({"gather unit 'b'"}))
    ...     order.check("gather unit 'b'")
    None
    gather unit 'b'
    """

    def __init__(self, control: Agreement) -> None:
        self._control = control
        self.moment = 0  # events so far: the same on all ranks
        self._recorded: dict[str, list[str]] = {}
        self._successor: dict[str, str] = {}
        self._kind = ""
        self._starting: str | None = None
        self._expected: list[str] = []
        self._at = 0  # position in ``_expected``
        self._done: list[str] = []
        self._past: deque[tuple[int, str, list[str]]] = deque(maxlen=PAST)  # of passes: first moment, kind, events
        self._began = 0  # the moment at which this pass did
        control.follow(self)

    def __del__(self) -> None:
        """Tell the other ranks that this one will take part in nothing more."""
        self._control.leave((self.moment, self.where()))

    def begin(self, kind: str) -> None:
        """Say that a pass starts. It counts from its first event: one without collectives leaves no trace."""
        self._starting = kind

    def check(self, event: str, meet: bool = False) -> None:
        """Note an event about to happen. Returns when all ranks are known to do the same.

        ``meet``: ask them in any case, for the sake of what follows and would wait longer than the timeout.
        """
        if self._starting is not None:
            self._turn_to(self._starting)
        if self._control.faults:
            self._control.refuse(self.moment + 1, event)
        if self._at < len(self._expected) and self._expected[self._at] == event:
            if meet:
                self._ask(event, event)
            self._at += 1
        else:
            expected = self._expected[self._at] if self._at < len(self._expected) else "go on to the next pass"
            self._ask(event, expected)
            if event in self._expected[self._at :]:  # some were skipped: go on from here
                self._at = self._expected.index(event, self._at) + 1
        self._done.append(event)
        self.moment += 1  # at the end: whoever is past a moment has agreed on it, or has seen no need to

    def _ask(self, event: str, expected: str) -> None:
        try:
            self._control.agree(self.moment + 1, event, expected)
        except BaseException:
            self.moment += 1  # it is not asked about again
            raise

    def _turn_to(self, kind: str) -> None:
        """Record the pass that is over and expect what the last pass of this kind did."""
        self._starting = None
        complete = self._at == len(self._expected)
        if not complete or self._successor.get(self._kind) != kind:
            expected = self._successor.get(self._kind, "nothing yet") if complete else self._expected[self._at]
            self._ask(PASS_START + kind, expected)
        self._past.append((self._began, self._kind, self._done))
        self._recorded[self._kind] = self._done
        self._successor[self._kind] = kind
        self._kind, self._expected = kind, self._recorded.get(kind, [])
        self._at, self._done = 0, []
        self._began = self.moment + 1
        self.moment += 1

    def event_at(self, moment: int) -> str:
        """What this rank did at a moment; "" where that is too long ago, or to come."""
        for began, kind, events in ((self._began, self._kind, self._done), *tuple(self._past)):
            if began <= moment <= began + len(events):
                return events[moment - began - 1] if moment > began else PASS_START + kind
        return ""

    def where(self) -> str:
        """The last event of this rank, in words."""
        last = f"{self._done[-1]}, in its pass {self._kind!r}" if self._done else f"the start of {self._kind!r}"
        return last if self._kind else "no collective yet"

    def upcoming(self, among: Container[str]) -> str | None:
        """Return the next expected event of this pass that is one of ``among``."""
        return next(self.ahead(among), None)

    def ahead(self, among: Container[str]) -> Iterator[str]:
        """Yield the expected events of this pass that are among these, the next first."""
        positions = range(self._at, len(self._expected))
        return (event for position in positions if (event := self._expected[position]) in among)

    def remaining(self) -> list[str]:
        """Return all events still expected in this pass."""
        return self._expected[self._at :]
