"""Foresight: whether this backward is likely to be the last before the step."""

from __future__ import annotations

HOLD = 8  # steps that nothing is done ahead, after a guess was wrong


class Foresight:
    """Learns from the loop how many backwards it runs for a step.

    >>> foresight = Foresight()
    >>> foresight.stepped(backwards=2)
    >>> foresight.stepped(backwards=2)
    >>> foresight.last(1), foresight.last(2)
    (False, True)
    >>> foresight.wrong()
    >>> foresight.last(2)
    False
    """

    def __init__(self) -> None:
        self._usual = 0
        self._steady = False
        self._held = 0

    def last(self, backward: int) -> bool:
        """Whether the step is expected after this backward, the how-many-eth since the last step."""
        return self._steady and not self._held and backward == self._usual

    def stepped(self, backwards: int) -> None:
        """A step has come."""
        self._steady = backwards == self._usual
        self._usual = backwards
        self._held = max(0, self._held - 1)

    def wrong(self) -> None:
        """What was done ahead was for nothing."""
        self._held = HOLD
