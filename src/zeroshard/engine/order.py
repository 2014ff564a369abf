"""Order: the recorded order of collectives, which says what to prefetch and notices a rank that leaves it."""

from __future__ import annotations

from collections.abc import Container, Iterator

from zeroshard.agreement import Agreement

PASS_START = "start "


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
        self._moment = 0  # events so far: the same on all ranks
        self._recorded: dict[str, list[str]] = {}
        self._successor: dict[str, str] = {}
        self._kind = ""
        self._starting: str | None = None
        self._expected: list[str] = []
        self._at = 0  # position in ``_expected``
        self._done: list[str] = []

    def begin(self, kind: str) -> None:
        """Say that a pass starts. It counts from its first event: one without collectives leaves no trace."""
        self._starting = kind

    def check(self, event: str, meet: bool = False) -> None:
        """Note an event about to happen. Returns when all ranks are known to do the same.

        ``meet``: ask them in any case, for the sake of what follows and would wait longer than the timeout.
        """
        if self._starting is not None:
            self._turn_to(self._starting)
        self._moment += 1
        self._done.append(event)
        if self._at < len(self._expected) and self._expected[self._at] == event:
            self._at += 1
            if meet:
                self._control.agree(self._moment, event, event)
            return
        expected = self._expected[self._at] if self._at < len(self._expected) else "go on to the next pass"
        self._control.agree(self._moment, event, expected)
        if event in self._expected[self._at :]:  # some were skipped: go on from here
            self._at = self._expected.index(event, self._at) + 1

    def _turn_to(self, kind: str) -> None:
        """Record the pass that is over and expect what the last pass of this kind did."""
        self._starting = None
        self._moment += 1
        complete = self._at == len(self._expected)
        if not complete or self._successor.get(self._kind) != kind:
            expected = self._successor.get(self._kind, "nothing yet") if complete else self._expected[self._at]
            self._control.agree(self._moment, PASS_START + kind, expected)
        self._recorded[self._kind] = self._done
        self._successor[self._kind] = kind
        self._kind, self._expected = kind, self._recorded.get(kind, [])
        self._at, self._done = 0, []

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
