"""Short human-readable numbers, and text that is safe to print."""

from __future__ import annotations

import re


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
    ('128', '1.06M', '112k', '1.40B')
    """
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:#.3g}".rstrip(".") + unit if unit else f"{value:.3g}"
        value /= 1000
    return f"{value:,.2f}T"


def escape_control_chars(text: str) -> str:
    """Escape control characters, except line feeds: they could move the cursor, clear the screen or set its title.

    >>> print(escape_control_chars("red " + chr(27) + "[31m"))
    red \\x1b[31m
    """
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda match: ascii(match[0])[1:-1], text)
