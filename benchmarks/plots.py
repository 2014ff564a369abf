"""The pages' pictures, from the records in benchmarks/results or from a record of your own.

    python -m benchmarks plots                              # the pictures of all pages, as their records have them
    python -m benchmarks plots mine.json --into pictures    # those of them that this record has the tables for

What a picture shows is said on the page, where it stands: see `figure.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.block import PageError, blocks_of
from benchmarks.docs import PAGES, made, replaced
from benchmarks.figure import KINDS, picture_of
from benchmarks.record import ROOT
from benchmarks.selection import record_of, split


def drawn_from(record: Path, root: Path) -> tuple[dict[str, str], list[str]]:
    """The pages' pictures of another record, by name, and which could not be drawn, a line each."""
    found, refused = record_of(record, str(record)), []
    pictures: dict[str, str] = {}
    for page in PAGES:
        for block in blocks_of(page, (root / page).read_text(encoding="utf-8")):
            there = [name for name in split(block.options.get("tables", block.table)) if name in found["tables"]]
            if block.kind in KINDS and there:
                options = {**block.options, **({} if block.table else {"tables": " | ".join(there)})}
                try:
                    pictures[Path(options["file"]).name] = picture_of(replace(block, options=options), found)
                except (ValueError, KeyError) as error:
                    refused.append(f"{block.place}: not drawn: {error}")
    return pictures, refused


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, help="a file that a benchmark wrote with --out")
    parser.add_argument("--into", type=Path, help="a folder; without it, beside the record")
    chosen = parser.parse_args(argv)
    refused: list[str] = []
    try:
        if chosen.record is None:
            files = {name: text for name, text in made(root)[0].items() if name.endswith(".svg")}
            to = chosen.into or root
        else:
            files, refused = drawn_from(chosen.record, root)
            to = chosen.into or chosen.record.parent
    except (PageError, ValueError) as error:
        raise SystemExit(str(error)) from error
    for name, text in files.items():
        replaced(to / name, text)
        print(f"drew {to / name}")
    for line in refused:
        print(line)
    if not files:
        raise SystemExit("nothing was drawn: no page has a picture of a table that this record has")
