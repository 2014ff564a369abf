"""Short human-readable numbers and columns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise


def memory_rows(held_bytes: Mapping[str, int], ddp_bytes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return rows (kind, bytes held, bytes of plain data parallelism), the total last."""
    kinds = [(kind, held_bytes.get(kind, 0), ddp_bytes.get(kind, 0)) for kind in {**held_bytes, **ddp_bytes}]
    return [*kinds, ("total", sum(held_bytes.values()), sum(ddp_bytes.values()))]


def align_labels(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs with labels padded to equal width."""
    width = max((len(label) for label, _ in lines), default=0)
    return [(f"{label:<{width}}  ", value) for label, value in lines]


def escape_control_chars(text: str) -> str:
    """Escape control characters, which could move the cursor or clear the screen."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda match: ascii(match[0])[1:-1], text)


def format_metric(value: float, digits: int = 3) -> str:
    """Format a loss or a norm.

    >>> format_metric(5.8124), format_metric(1234.5)
    ('5.812', '1.2e+03')
    """
    fits = value == 0 or 0.1 <= abs(value) < 1000 or not math.isfinite(value)
    return f"{value:.{digits}f}" if fits else f"{value:.1e}"


def format_compact_count(value: float) -> str:
    """Format a large count.

    >>> format_compact_count(21300)
    '21.3k'
    """
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def format_percent(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return "-" if value is None else f"{100 * value:.0f}%"


def format_clock(seconds: float | None) -> str:
    """Format as minutes and seconds, with hours if there are any.

    >>> format_clock(75)
    '1:15'
    """
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with a unit.

    >>> format_bytes(4096)
    '4.10 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


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
