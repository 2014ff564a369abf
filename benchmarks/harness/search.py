"""Search for the largest size that fits into memory, in few attempts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.harness.record import Result


@dataclass
class Found:
    """The result of a search."""

    fits: int = 0  # the largest size that was run, 0 if none
    fails: int | None = None  # the smallest that ran out of memory, if any
    error: str | None = None  # why the search ended early
    tried: dict[int, Result] = field(default_factory=dict)

    def is_within(self, share: float) -> bool:
        """Whether what fits and what fails are neighbours, or differ by at most this share of the size."""
        return self.fails is not None and self.fails - self.fits <= max(1, share * self.fits)

    def next_size(self, limit: float, within: float) -> int:
        """Return where the line through the two largest sizes that fit reaches the limit, if that helps."""
        step, guesses = max(1, math.floor(within * self.fits)), []
        for kind in ("reserved", "allocated"):
            points = sorted((size, result[kind]) for size, result in self.tried.items() if kind in result)[-2:]
            if len(points) == 2 and points[0][1] < points[1][1]:
                (size, low), (larger, high) = points
                guesses.append(math.floor(size + (limit - low) * (larger - size) / (high - low)))
        line = min(*guesses, 4 * self.fits) if guesses else 2 * self.fits  # a flat line leads too far
        guess = max(line, self.fits + step)
        return guess if self.fails is None or guess <= self.fails - step else (self.fits + self.fails) // 2


def find_largest(
    attempt: Callable[[int], Result],
    first: tuple[int, int],
    limit: float,
    within: float = 0.05,
    attempts: int = 9,
    seconds: float = math.inf,
) -> Found:
    """Find the largest size that does not run out of memory, to a share ``within``; ``limit`` is in bytes.

    Memory is close to a straight line in the size: after the two ``first`` sizes, the line gives the next.
    """
    found, begin = Found(), time.monotonic()
    while not found.is_within(within):
        if len(found.tried) == attempts or time.monotonic() - begin > seconds:
            found.error = f"ended after {len(found.tried)} attempts, {time.monotonic() - begin:.0f} s"
            break
        size = next((size for size in first if size not in found.tried and found.fails is None), None)
        size = found.next_size(limit, within) if size is None else size
        result = found.tried[size] = attempt(size)
        if "error" in result:
            found.error = result["error"]
            break
        if "out_of_memory" in result:
            found.fails = size
        else:
            found.fits = size
    return found
