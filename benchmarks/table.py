"""Table: results as people read them, and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Result = dict[str, Any]  # what was measured, with the arguments


def show(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table. None leaves a cell empty."""
    cells = [list(heads), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = [" | ".join(f"{words:<{width}}" for words, width in zip(row, widths, strict=True)) for row in cells]
    rule = "|".join("-" * (width + 2) for width in widths)
    print(f"| {lines[0]} |\n|{rule}|", *(f"| {line} |" for line in lines[1:]), sep="\n")


def middle(results: Sequence[Result], key: str) -> float | None:
    """The median of a measurement over the runs that have it; None where none has."""
    values = [result[key] for result in results if key in result]
    return statistics.median(values) if values else None


def spread(results: Sequence[Result], key: str) -> float | None:
    """The largest value of a measurement less the smallest; None where there are not several."""
    values = [result[key] for result in results if key in result]
    return max(values) - min(values) if len(values) > 1 else None


def ratio(value: float | None, base: float | None) -> float | None:
    """One measurement over another; None where either is missing."""
    return value / base if value is not None and base else None


def gigabytes(nbytes: float | None) -> float | None:
    """GB as the paper counts them: 10^9 bytes."""
    return None if nbytes is None else nbytes / 1e9


def listed(values: Mapping[Any, float]) -> str:
    """Names and numbers in a line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def said(result: Result) -> str:
    """The last line of what went wrong; empty where nothing did."""
    words = result.get("error") or result.get("out_of_memory") or ""
    return str(words.splitlines()[-1]) if words else ""


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as a page has it."""
    lines = [heads, *([cell(value) for value in row] for row in rows)]
    first, *rest = ("| " + " | ".join(_in_a_line(words) for words in line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(heads), *rest])


def cell(value: object) -> str:
    """A number as all tables and pages write it: three figures or four. Text stays as it is, None is empty."""
    if isinstance(value, float):
        return (
            f"{value:.2g}"
            if abs(value) < 0.01
            else f"{value:.3f}"
            if abs(value) < 1
            else f"{value:.2f}"
            if abs(value) < 100
            else f"{value:.0f}"
        )
    return "" if value is None else str(value)


def _in_a_line(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")
