"""Number formats of the HTML pages."""

from __future__ import annotations

from itertools import pairwise


def format_count(value: float) -> str:
    """Format a count with three significant digits.

    >>> format_count(128), format_count(1_060_352), format_count(112_034.5), format_count(1.4e9)
    ('128', '1.06 M', '112 k', '1.40 B')
    """
    for unit in ("", " k", " M", " B"):
        if abs(value) < 999.5:
            return (f"{value:#.3g}".rstrip(".") if unit else f"{value:.0f}") + unit
        value /= 1000
    return f"{value:,.2f} T"


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units.

    >>> format_duration(0.4), format_duration(71.3), format_duration(7_500), format_duration(200_000)
    ('0.4 s', '1 min 11 s', '2 h 5 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, large), (smaller_name, small) in pairwise(units):
        if seconds >= large:
            return f"{seconds // large:.0f} {name} {seconds % large // small:.0f} {smaller_name}"
    raise AssertionError(seconds)
