"""Block: a stretch of a page that is made from a record, between two comments that begin their lines:

    <!-- made from benchmarks/results/stages.json: table stages
    columns: stage | model states GB as model states, GB | ms a step
    -->

    | stage | model states, GB | ms a step |
    …

    <!-- end -->

After the colon stand what is made and the name of the record's table. Options follow, a line each; what is long goes on
in a line that begins with spaces. Without options the comment ends in its first line. This file knows where blocks are,
`selection.py` which part of a table one means, `docs.py` and `figure.py` what is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

BEGIN = "<!-- made from "
FIRST = re.compile(re.escape(BEGIN) + r"(?P<record>\S+): (?P<kind>\w+)(?: (?P<table>.+))?")
END = "<!-- end -->"
FORM = f"{BEGIN}benchmarks/results/NAME.json: KIND TABLE -->"


class PageError(ValueError):
    """Something on a page that nothing can be made of; it names the file and the line."""


@dataclass(frozen=True)
class Block:
    """One of them."""

    page: str
    line: int
    """Of its first comment, from 1."""
    kind: str
    record: str
    """The record's path from the repository's root, as all paths here."""
    table: str
    options: Mapping[str, str]
    start: int
    """The lines from here, from 0, …"""
    stop: int
    """… to before here are made."""

    @property
    def place(self) -> str:
        """Where it is, as compilers say it."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """Find the blocks of a page."""
    lines, found, at = text.splitlines(), [], 0
    while at < len(lines):
        if lines[at].startswith(BEGIN):
            block = _block(page, lines, at)
            found.append(block)
            at = block.stop
        elif lines[at].strip() == END:
            raise PageError(f"{page}:{at + 1}: {END} without a comment that begins a block, {FORM}")
        at += 1
    return found


def filled(text: str, blocks: list[Block], made: list[str]) -> str:
    """The page with what was made in its blocks."""
    lines = text.splitlines()
    for block, words in zip(reversed(blocks), reversed(made), strict=True):
        lines[block.start : block.stop] = ["", *words.splitlines(), ""]
    return "\n".join(lines) + "\n"


def _block(page: str, lines: list[str], at: int) -> Block:
    place, whole = f"{page}:{at + 1}", lines[at].endswith(" -->")
    first = FIRST.fullmatch(lines[at].removesuffix(" -->"))
    if first is None:
        raise PageError(f"{place}: {lines[at]!r} does not read {FORM} (or, with options, without its -->)")
    options, start = ({}, at + 1) if whole else _options(page, lines, at)
    stop = start
    while stop < len(lines) and lines[stop].strip() != END:
        if lines[stop].startswith(BEGIN):
            raise PageError(f"{place}: the block has no {END} before the next begins, in line {stop + 1}")
        stop += 1
    if stop == len(lines):
        raise PageError(f"{place}: the block has no {END}")
    return Block(page, at + 1, first["kind"], first["record"], first["table"] or "", options, start, stop)


def _options(page: str, lines: list[str], at: int) -> tuple[dict[str, str], int]:
    """What follows the first line of a comment up to its end, and the line after that."""
    options: dict[str, str] = {}
    key = ""
    for number, line in enumerate(lines[at + 1 :], at + 1):
        if line.strip() == "-->":
            return options, number + 1
        if line.startswith(" ") and key:
            options[key] += f" {line.strip()}"
            continue
        key, colon, value = line.partition(": ")
        if not colon or key in options:
            why = "is there twice" if key in options else "does not read KEY: VALUE"
            raise PageError(f"{page}:{number + 1}: {line!r} in the comment that begins a block {why}")
        options[key] = value.strip()
    raise PageError(f"{page}:{at + 1}: this comment has no end: a line with --> alone")
