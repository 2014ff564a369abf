"""Series of one metric over the steps of a run: extract, smooth and downsample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

JsonObject = dict[str, Any]  # an object of run.json, or a line of metrics.jsonl

MAX_POINTS = 2000  # per line of a chart


def finite_or_none(value: object) -> float | None:
    """Return ``value`` if it is a finite number: the JSON of a diverged run also contains NaN and Infinity.

    >>> finite_or_none(2), finite_or_none(float("nan")), finite_or_none(None)
    (2.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def format_number(value: float) -> str:
    """Format a number for a table.

    >>> format_number(6.97123), format_number(0.00012), format_number(21034.7), format_number(0)
    ('6.971', '0.00012', '21,035', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def extract_series(steps: Sequence[JsonObject], key: str) -> tuple[list[int], list[float]]:
    """Return the steps at which ``key`` is a finite number, and the numbers."""
    pairs = [(step["step"], value) for step in steps if (value := finite_or_none(step.get(key))) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def downsample(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Return at most ``limit`` indices that keep the shape: both ends, and the minimum and maximum of every interval.

    >>> downsample([0, 5, 1, 1, -3, 1, 1, 1, 0, 2], limit=6)
    [0, 1, 4, 8, 9]
    """
    count, num_intervals = len(values), (limit - 2) // 2
    if count <= limit:
        return list(range(count))
    kept = {0, count - 1}
    for interval in range(num_intervals):
        indices = range(interval * count // num_intervals, (interval + 1) * count // num_intervals)
        kept |= {min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}
    return sorted(kept)


def smooth(values: Sequence[float]) -> list[float]:
    """Average over a centered window of about a 25th of the run, so that a steep start is not delayed.

    >>> smooth([4, 3, 2, 1])
    [4.0, 3.0, 2.0, 1.5]
    """
    half_width, sums = max(1, len(values) // 50), [0.0]
    for value in values:
        sums.append(sums[-1] + value)

    def average(index: int) -> float:
        width = min(index, half_width)  # not wider on the right than on the left: the first value does not change
        first, last = index - width, min(len(values), index + width + 1)
        return (sums[last] - sums[first]) / (last - first)

    return [average(index) for index in range(len(values))]
