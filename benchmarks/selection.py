"""Selection: the part of a record's table that a page or a picture shows.

A column is named by its head; the second of those that share one by `head #2`, the first without a head by `#1`.
Several are separated by bars, for heads have commas in them. `head as other words` gives another head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.table import Result, cell

SHAPE = {"command": str, "date": str, "machine": dict, "tables": dict}  # of a record: Record in record.py writes it


@dataclass(frozen=True)
class Selection:
    """Heads and rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def where(self, head: str) -> int:
        """The index of a column."""
        name, mark, number = (part.strip() for part in head.rpartition("#"))
        if not (mark and number.isdecimal()):
            name, number = head.strip(), ""
        places = [at for at, other in enumerate(self.heads) if other == name]
        if not places:
            raise ValueError(f"there is no column {name!r}, only {', '.join(map(repr, self.heads))}")
        if not number and len(places) > 1:
            raise ValueError(f"{len(places)} columns are called {name!r}: say {name} #1, or which of them is meant")
        if number and not 1 <= int(number) <= len(places):
            raise ValueError(f"there is no {name} #{number}: {len(places)} columns are called {name!r}")
        return places[int(number or 1) - 1]

    def column(self, head: str) -> list[Any]:
        """The values of a column."""
        at = self.where(head)
        return [row[at] for row in self.rows]

    def numbers(self, head: str) -> list[float | None]:
        """The same as numbers: also those that were kept as text, with the digits that were printed."""
        return [_number(value, head) for value in self.column(head)]

    def columns(self, names: str) -> Selection:
        """These columns alone, in this order, some by another name."""
        pairs = [renamed(part) for part in split(names)]
        places = [self.where(head) for head, _ in pairs]
        return Selection([name for _, name in pairs], [[row[at] for at in places] for row in self.rows])

    def only(self, rule: str) -> Selection:
        """The rows that `head = value | value` is true of, or `head != value`; semicolons separate several rules."""
        chosen = self
        for part in rule.split("; "):
            head, equals, values = part.partition(" != " if " != " in part else " = ")
            wanted = split(values)
            if not equals:
                raise ValueError(f"{part.strip()!r} does not read HEAD = VALUE | VALUE, nor HEAD != VALUE | VALUE")
            at, kept = chosen.where(head), equals == " = "
            missing = set(wanted) - {cell(row[at]) for row in chosen.rows}
            if missing and kept:
                raise ValueError(f"no row has {head.strip()} = {', '.join(sorted(missing))}")
            chosen = replace(chosen, rows=[row for row in chosen.rows if (cell(row[at]) in wanted) == kept])
        return chosen

    def added(self, rule: str) -> Selection:
        """With a column of fixed words, `head by other head: value = words | value = words`, or several, as above."""
        chosen = self
        for part in rule.split("; "):
            head, by, rest = part.partition(" by ")
            key, colon, pairs = rest.partition(": ")
            words = dict(pair.split(" = ", 1) for pair in split(pairs) if " = " in pair)
            if not (by and colon and words):
                raise ValueError(f"{part.strip()!r} does not read HEAD by OTHER HEAD: VALUE = WORDS | VALUE = WORDS")
            values = [cell(value) for value in chosen.column(key)]
            if set(values) != set(words):
                raise ValueError(f"{head.strip()} has words for {sorted(words)}, and {key} is {sorted(set(values))}")
            rows = [[*row, words[value]] for row, value in zip(chosen.rows, values, strict=True)]
            chosen = Selection([*chosen.heads, head.strip()], rows)
        return chosen

    def grouped(self, head: str) -> Selection:
        """A value that repeats the one above it left out, in one column."""
        at, rows, above = self.where(head), [], None
        for row in self.rows:
            rows.append([None if index == at and value == above else value for index, value in enumerate(row)])
            above = row[at]
        return replace(self, rows=rows)


def split(names: str) -> list[str]:
    """What bars separate."""
    return [part.strip() for part in names.split("|")]


def renamed(part: str) -> tuple[str, str]:
    """A head, and what it is called here.

    >>> renamed("ms a step as ms"), renamed("ms a step"), renamed("#2")
    (('ms a step', 'ms'), ('ms a step', 'ms a step'), ('#2', ''))
    """
    head, _, name = (word.strip() for word in part.partition(" as "))
    return head, name or re.sub(r"\s*#\d+$", "", head)


def record_of(path: Path, name: str) -> Result:
    """Read a record; ``name`` is what it is called in errors."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        others = sorted(other.name for other in path.parent.glob("*.json"))
        raise ValueError(f"there is no {name}; beside it there are {', '.join(others) or 'none'}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    for key, kind in SHAPE.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), kind):
            what = f"its {key!r} is no {kind.__name__}" if isinstance(record, dict) and key in record else f"no {key!r}"
            raise ValueError(f"{name} is no record of a benchmark ({what}): make one with --out")
    return dict(record)


def tables_of(record: Mapping[str, Any], names: Sequence[str]) -> Selection:
    """Several tables as one: the columns that all have, behind one with their names, `table`."""
    found = [table_of(record, name) for name in names]
    numbered = [_numbered(each.heads) for each in found]
    shared = [head for head in numbered[0] if all(head in others for others in numbered)]
    rows = [
        [name, *(row[heads.index(head)] for head in shared)]
        for name, each, heads in zip(names, found, numbered, strict=True)
        for row in each.rows
    ]
    return Selection(["table", *(head for head, _ in shared)], rows)


def _numbered(heads: Sequence[str]) -> list[tuple[str, int]]:
    return [(head, heads[:at].count(head)) for at, head in enumerate(heads)]


def table_of(record: Mapping[str, Any], name: str) -> Selection:
    """A table of a record."""
    tables = record["tables"]
    if name not in tables:
        raise ValueError(f"the record has no table {name!r}, only {', '.join(map(repr, tables)) or 'none'}")
    try:
        heads, rows = list(tables[name]["heads"]), [list(row) for row in tables[name]["rows"]]
    except (KeyError, TypeError):
        raise ValueError(f"the record's table {name!r} has no heads and rows") from None
    for number, row in enumerate(rows, 1):
        if len(row) != len(heads):
            raise ValueError(f"row {number} of the table {name!r} has {len(row)} cells, its heads are {len(heads)}")
    return Selection(heads, rows)


def _number(value: Any, head: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} in the column {head!r} is no number") from None
