"""Search: the largest size that fits into memory, in few attempts.

Memory is close to a straight line in the size. So two small sizes are tried, then the sizes at which the line through
them reaches the limit: that of the memory reserved, which is likely to fit, and that of the memory allocated, which is
likely not to. What is left between is bisected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.table import Result


@dataclass
class Largest:
    """What a search found."""

    fits: int = 0
    """The largest size that was run, 0 where none."""
    fails: int | None = None
    """The smallest that ran out of memory, if any."""
    error: str | None = None
    """Why the search ended early."""
    tried: dict[int, Result] = field(default_factory=dict)

    def near(self, within: float) -> bool:
        """Whether what fits and what fails are neighbours, or as close as a share of the size."""
        return self.fails is not None and self.fails - self.fits <= max(1, within * self.fits)


def largest(
    attempt: Callable[[int], Result],
    first: tuple[int, int],
    limit: float,
    within: float = 0.05,
    most: int = 9,
    seconds: float = math.inf,
) -> Largest:
    """Find the largest size whose attempt does not run out of memory, to a share ``within``; ``limit`` is in bytes."""
    found, begin = Largest(), time.monotonic()
    for attempts in range(most + 1):
        if found.near(within):
            break
        if attempts == most or time.monotonic() - begin > seconds:
            found.error = f"ended after {attempts} attempts, {time.monotonic() - begin:.0f} s"
            break
        size = next((size for size in first if size not in found.tried and found.fails is None), None)
        size = _next(found, limit, within) if size is None else size
        result = found.tried[size] = attempt(size)
        if "error" in result:
            found.error = result["error"]
            break
        if "out_of_memory" in result:
            found.fails = size
        else:
            found.fits = size
    return found


def _next(found: Largest, limit: float, within: float) -> int:
    least = found.fits + max(1, math.floor(within * found.fits))
    guesses = [_crossing(found, kind, limit) for kind in ("reserved", "allocated")]
    if found.fails is None:
        known = [min(guess, 4 * found.fits) for guess in guesses if guess is not None]  # a line too flat leads far off
        return next((guess for guess in known if guess >= least), least if known else 2 * found.fits)
    between = [guess for guess in guesses if guess is not None and least <= guess <= found.fails - (least - found.fits)]
    return between[0] if between else (found.fits + found.fails) // 2


def _crossing(found: Largest, kind: str, limit: float) -> int | None:
    """Where the line through the two largest sizes that fit reaches the limit; None where there is no such line."""
    points: list[tuple[int, int]] = sorted(
        (size, result[kind]) for size, result in found.tried.items() if kind in result
    )[-2:]
    if len(points) < 2 or points[1][1] <= points[0][1]:
        return None
    (size, low), (_, high) = points
    return math.floor(size + (limit - low) * (points[1][0] - size) / (high - low))
