"""LastBackward: whether a step follows this backward."""

from __future__ import annotations


class LastBackward:
    """Predicts the last backward of a step from the last two steps, if these had the same number.

    A gradient that is not reduced by then is reduced when the optimizer needs it; one that is reduced too early is
    reduced again. Both give the right sum.

    >>> last, found = LastBackward(None), []
    >>> for _ in range(3):
    ...     found.append([last.begin(), last.begin()])
    ...     last.end_step()
    >>> found
    [[False, False], [False, False], [False, True]]
    """

    def __init__(self, known: int | None) -> None:
        """``known``: the number of backwards of a step, if the user has given it."""
        self._known = known
        self._expected = known
        self._last_count = 0
        self._count = 0

    def begin(self) -> bool:
        """Count a backward; return whether it is probably the last one."""
        self._count += 1
        return bool(self._expected) and self._count >= (self._expected or 0)

    def end_step(self) -> None:
        """Begin another step, unless this one only steps another optimizer."""
        if not self._count:
            return
        if self._known is None:
            self._expected = self._count if self._count == self._last_count else None
        self._last_count = self._count
        self._count = 0
