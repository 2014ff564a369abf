"""Short human-readable numbers and columns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence


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
