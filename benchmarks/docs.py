"""The pages' figures, made from the records in benchmarks/results.

    python -m benchmarks stages --out benchmarks/results/stages.json    # measure; the record is what pages are made of
    python -m benchmarks docs                                           # make the blocks of all pages, and the pictures
    python -m benchmarks docs --check                                   # say which are not as the records have them

Prose is written on the page itself. A block is what stands between two comments (`block.py`):

    <!-- made from benchmarks/results/stages.json: run -->            the command, the machine, versions, date, commit
    <!-- made from benchmarks/results/stages.json: table stages -->   the table of that name
    <!-- made from benchmarks/results/peers.json: bars peers          a picture: see figure.py
    file: docs/peers.svg
    -->

A table's options (`selection.py` says how columns are named):

    tables: 1.4B, batch 16 | 7.6B, batch 4                  of several, behind a column `table` that names them
    columns: stage | ms a step as ms                        these, in this order, some by another name
    rows: stage = 0 | 3; variant != floor                   those alone
    add: kept by stage: 0 = all | 3 = a part                a column of words that no benchmark measures
    group: GPT, batch                                       what repeats the cell above it is left out
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.block import Block, PageError, blocks_of, filled
from benchmarks.figure import KINDS, picture_of, source_of
from benchmarks.record import ROOT
from benchmarks.selection import record_of
from benchmarks.table import markdown

PAGES = ("README.md", "docs/benchmarks.md")
OPTIONS = {"run": (), "table": ("tables", "columns", "rows", "add", "group"), **KINDS}  # by kind, what a block may say
CHANGED = "-dirty"  # git's word, behind a commit


def text_of(block: Block, record: Mapping[str, Any]) -> str:
    """What stands in a block."""
    if block.kind == "run":
        return run_of(record)
    if block.kind == "table":
        return _table(block, record)
    to = os.path.relpath(block.options["file"], Path(block.page).parent)
    return f"![{block.options['title']}]({to})"


def run_of(record: Mapping[str, Any]) -> str:
    """How a record came about: the command, and a line of where and when."""
    machine = record["machine"]
    known = [("device", "{}"), ("cores", "{} cores"), ("torch", "torch {}"), ("python", "Python {}")]
    words = [form.format(machine[key]) for key, form in known if machine.get(key)]
    commit = machine.get("commit") or ""
    if commit:
        changed = " with changes" if commit.endswith(CHANGED) else ""
        commit = f", commit {commit.removesuffix(CHANGED)}{changed}"
    return f"```\n{record['command']}\n```\n\n{', '.join(words)}; {record['date']}{commit}."


def _table(block: Block, record: Mapping[str, Any]) -> str:
    chosen = source_of(block, record)
    if "rows" in block.options:
        chosen = chosen.only(block.options["rows"])
    if "add" in block.options:
        chosen = chosen.added(block.options["add"])
    if "group" in block.options:
        chosen = chosen.grouped(block.options["group"])
    if "columns" in block.options:
        chosen = chosen.columns(block.options["columns"])
    return markdown(chosen.heads, chosen.rows)


def made(root: Path, pages: Sequence[str] = PAGES) -> tuple[dict[str, str], list[str]]:
    """All files as the records have them, by path, and what is not so by now, a line each."""
    files: dict[str, str] = {}
    stale: list[str] = []
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        blocks, bodies = blocks_of(page, text), []
        for block in blocks:
            body, pictures = _made(block, root, files)
            bodies.append(body)
            there = text.splitlines()[block.start : block.stop]
            if there != ["", *body.splitlines(), ""]:
                stale.append(f"{block.place}: the {block.kind} is not what {block.record} has")
            for path, drawn in pictures.items():
                if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != drawn:
                    stale.append(f"{block.place}: {path} is not what {block.record} has")
            files |= pictures
        files[page] = filled(text, blocks, bodies)
    return files, stale


def _made(block: Block, root: Path, others: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The text of a block, and the picture it shows, if any."""
    try:
        if block.kind not in OPTIONS:
            raise ValueError(f"nothing is made that is called {block.kind!r}, only {', '.join(OPTIONS)}")
        if unknown := sorted(set(block.options) - set(OPTIONS[block.kind])):
            raise ValueError(
                f"{unknown[0]!r} is no option of a {block.kind}: {', '.join(OPTIONS[block.kind]) or 'none'}"
            )
        record = record_of(root / block.record, block.record)
        if block.kind not in KINDS:
            return text_of(block, record), {}
        drawn, path = picture_of(block, record), block.options["file"]
        if path in others:
            raise ValueError(f"{path} is the file of another picture")
        return text_of(block, record), {path: drawn}
    except ValueError as error:
        raise PageError(f"{block.place}: {error}") from error


def replaced(path: Path, text: str) -> None:
    """Write a file so that it is at every moment the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Make all pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where something would change")
    chosen = parser.parse_args(argv)
    try:
        files, stale = made(root)
    except PageError as error:
        raise SystemExit(f"{error}\nNothing was written.") from error
    if chosen.check and stale:
        raise SystemExit("\n".join([*stale, "Run: python -m benchmarks docs"]))
    for path, text in files.items():
        if chosen.check or ((root / path).exists() and (root / path).read_text(encoding="utf-8") == text):
            continue
        replaced(root / path, text)
        print(f"made {path}")
