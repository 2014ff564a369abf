"""Figure: what a block's picture shows, taken from a record's table.

    <!-- made from benchmarks/results/peers.json: bars
    tables: 1.4B, batch 16 | 7.6B, batch 4
    file: docs/peers-steps.svg
    title: A step over the floor
    group: table                                    bars under one name, and …
    name: variant                                   … what each is called
    values: of the floor                            its length; a second column is drawn lighter beyond it
    words: of the floor | ms a step as ms           at its end; without it, the values
    mark: 1 = the floor                             a line across all
    rows: variant != floor                          those alone
    -->

    <!-- made from benchmarks/results/scaling.json: lines ranks
    file: docs/scaling-ranks.svg
    title: Host time of a step by ranks
    across: ranks                                   the axis
    values: host ms                                 one column with `name`; without it a line for each column, and …
    up: ms                                          … what all of them are
    name: variant                                   a line for each value of this column
    scale: log                                      of the axis; without it, from 0
    -->

A picture of several tables has the option `tables` in place of the name in the first line: see `docs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from benchmarks.block import Block
from benchmarks.selection import Selection, renamed, split, table_of, tables_of
from benchmarks.svg import Bar, Line, bars, lines
from benchmarks.table import cell

KINDS = {  # of pictures, with the options of each
    "bars": ("file", "title", "tables", "rows", "group", "name", "values", "words", "mark"),
    "lines": ("file", "title", "tables", "rows", "across", "up", "name", "values", "scale"),
}
LONGEST = 44  # letters at the end of a bar, for which it leaves room
NEEDED = {"bars": ("file", "title", "name", "values"), "lines": ("file", "title", "across", "values")}


def source_of(block: Block, record: Mapping[str, Any]) -> Selection:
    """The table, or the tables, that a block is made of."""
    several = split(block.options["tables"]) if "tables" in block.options else []
    if bool(several) == bool(block.table):
        raise ValueError(f"a {block.kind} has a table's name in its first line, or the option tables: one of the two")
    return tables_of(record, several) if several else table_of(record, block.table)


def picture_of(block: Block, record: Mapping[str, Any]) -> str:
    """Draw what a block asks for."""
    options = block.options
    if missing := [key for key in NEEDED[block.kind] if key not in options]:
        raise ValueError(f"a picture of {block.kind} needs the options {', '.join(missing)}")
    path = PurePosixPath(options["file"])
    if path.suffix != ".svg" or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"a picture's file is a path in the repository that ends in .svg, not {str(path)!r}")
    chosen = source_of(block, record)
    if "rows" in options:
        chosen = chosen.only(options["rows"])
    if not chosen.rows:
        raise ValueError("there are no rows to draw")
    return (_bars if block.kind == "bars" else _lines)(options, chosen)


def _bars(options: Mapping[str, str], chosen: Selection) -> str:
    values, parts = zip(*(renamed(part) for part in split(options["values"])), strict=True)
    if len(values) > 2:
        raise ValueError(f"a bar shows one value, or two of which the second is larger, not {len(values)}")
    said = [renamed(part) for part in split(options.get("words", options["values"]))]
    units = ["" if name == head else f" {name}" for head, name in said] if "words" in options else [""] * len(said)
    words = [chosen.column(head) for head, _ in said]
    groups = chosen.column(options["group"]) if "group" in options else [""] * len(chosen.rows)
    lengths = [chosen.numbers(head) for head in values]
    drawn = [
        Bar(
            cell(groups[row]),
            cell(name),
            [column[row] for column in lengths],
            _said([(cell(column[row]), unit) for column, unit in zip(words, units, strict=True)]),
        )
        for row, name in enumerate(chosen.column(options["name"]))
    ]
    return bars(options["title"], drawn, parts, _mark(options))


def _said(parts: list[tuple[str, str]]) -> str:
    said = " · ".join(words + unit for words, unit in parts if words) or "not measured"
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"


def _mark(options: Mapping[str, str]) -> tuple[float, str] | None:
    if "mark" not in options:
        return None
    number, equals, name = options["mark"].partition(" = ")
    try:
        return float(number), name if equals else number
    except ValueError:
        raise ValueError(f"{options['mark']!r} does not read mark: NUMBER = NAME") from None


def _lines(options: Mapping[str, str], chosen: Selection) -> str:
    log = options.get("scale", "linear") == "log"
    if options.get("scale", "log") not in ("log", "linear"):
        raise ValueError(f"a scale is log or linear, not {options['scale']!r}")
    values = [renamed(part) for part in split(options["values"])]
    across, place = renamed(options["across"])
    series: dict[str, list[tuple[float, float]]] = {}
    if "name" in options and len(values) > 1:
        raise ValueError(f"with name, values is one column, not {len(values)}")
    for head, called in values:
        names = chosen.column(options["name"]) if "name" in options else [called] * len(chosen.rows)
        for name, x, y in zip(names, chosen.numbers(across), chosen.numbers(head), strict=True):
            if x is not None and y is not None:
                series.setdefault(cell(name), []).append((x, y))
    if not series:
        raise ValueError(f"no row has both {across!r} and {options['values']!r}")
    if log and any(x <= 0 for points in series.values() for x, _ in points):
        raise ValueError(f"{across!r} has values that are not above 0, which a log scale cannot show")
    drawn = [Line(name, sorted(points)) for name, points in series.items()]
    up = options.get("up", values[0][1] if len(values) == 1 else "")
    return lines(options["title"], drawn, place, up, log)
