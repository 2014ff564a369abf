"""Build the tables and charts of the pages from the records in benchmarks/results.

    python -m benchmarks docs                          # rewrite the pages in PAGES
    python -m benchmarks docs --check                  # change nothing; fail where a page differs from its records
    python -m benchmarks docs --add FILE peers/large   # first make FILE, written with --out, the record of this run

A results file has the runs of one suite by name. On a page, what stands between `<!-- peers/large -->` and
`<!-- end -->` is built: the command of the run, the machine, and all its tables. To select, the first comment goes on
in TOML: each `[[show]]` has the fields of a `Table` and, for a chart, `bar` and `label`. All other text on a page is
written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.evidence import page as evidence
from benchmarks.harness.record import ROOT, cell, describe, encode, markdown

PAGES = ("README.md", "docs/benchmarks.md", "benchmarks/results/README.md", "docs/simulation.md", evidence.PAGE)
BLOCK = re.compile(r"(?ms)^<!-- (?P<name>[\w .]+/[\w .]+)(?P<shown>\n[^>]*| )-->\n.*?^<!-- end -->$")
Row = dict[str | int, Any]  # a table's row: cells by the head of their column and by its index
BAR_LENGTH, NAME_LENGTH = 40, 30  # characters
Column = str | Sequence[Any]


@dataclass(frozen=True)
class Table:
    """What a page shows of a run's tables.

    Several tables are joined; "table" is then a column with their names. A column is named by its head, or by its
    index; a pair gives it another head. Without ``columns`` all are shown. ``rows`` are the first cells of the rows to
    show. ``words`` adds columns. In the first column, a value that repeats the one above is left out.
    """

    names: Sequence[str]
    columns: Sequence[Column] = ()
    rows: Sequence[str] = ()
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def read(self, tables: Mapping[str, Any]) -> list[Row]:
        """Return the rows to show."""
        found: list[Row] = []
        for name in self.names:
            heads = tables[name]["heads"]
            for row in tables[name]["rows"]:
                if not self.rows or cell(row[0]) in self.rows:
                    by_head = dict(reversed(list(zip(heads, row, strict=True))))  # of columns with one head, the first
                    found.append({**by_head, **dict(enumerate(row)), "table": name})
        for index, row in enumerate(found):
            row.update({head: texts[index] for head, texts in self.words.items()})
        return found

    def build(self, tables: Mapping[str, Any]) -> str:
        """Return the table as Markdown."""
        columns = self.columns or tuple(enumerate(tables[self.names[0]]["heads"]))
        pairs = [(column, column) if isinstance(column, str) else column for column in columns]
        rows = [[row[key] for key, _ in pairs] for row in self.read(tables)]
        for row, above in zip(rows[:0:-1], rows[-2::-1], strict=True):
            row[0] = None if row[0] == above[0] else row[0]
        return markdown([head for _, head in pairs], rows)


@dataclass(frozen=True)
class Chart:
    """Bars of text, by table and variant, as long as ``bar``; ``label`` is filled in with the cells of a row."""

    table: Table
    bar: str
    label: str

    def build(self, tables: Mapping[str, Any]) -> str:
        """Return the chart as a block of text."""
        lines, rows, group = ["```"], self.table.read(tables), ""
        scale = BAR_LENGTH / max(row[self.bar] for row in rows)
        for row in rows:
            lines += [row["table"]] if row["table"] != group else []
            group = row["table"]
            label = self.label.format_map({str(head): cell(value) for head, value in row.items()})
            lines.append(f"  {row['variant']:<{NAME_LENGTH}} {'█' * round(scale * row[self.bar])} {label}")
        return "\n".join([*lines, "```"])


BOTH, LARGE = ("FSDP2", "zeroshard 3"), ("1.4B, batch 16", "7.6B, batch 4")
AT_BATCH_2 = (("allocated at peak GB", "allocated at peak, batch 2, GB"), "traffic a step")
OF_FLOOR = ("ms a step", ("of the floor", "of forward and backward alone"), "allocated GB")
PARTITIONED = ("nothing (plain data parallelism)", "optimizer states", "and gradients", "and parameters")
README: dict[str, tuple[str, Table]] = {  # blocks without a command → the run they show
    "readme/stages": (
        "stages/1.4b",
        Table(
            ["stages"],
            ("stage", "partitioned", ("model states GB", "model states a rank, GB"), "formula", *AT_BATCH_2),
            words={"partitioned": PARTITIONED, "formula": ("16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "14Ψ/N")},
        ),
    ),
    "readme/peers": (
        "peers/large",
        Table(LARGE, (("table", "GPT, batch"), ("variant", "by"), *OF_FLOOR, "reserved GB"), rows=BOTH),
    ),
}


def read_runs(root: Path, suite: str) -> tuple[Path, dict[str, Any]]:
    """Return the results file of a suite and its runs."""
    path = root / "benchmarks/results" / f"{suite}.json"
    return path, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_record(root: Path, run: str) -> dict[str, Any]:
    """Return the record of a run, SUITE/RUN. Each section of the evidence has a file of its own."""
    suite, _, name = run.partition("/")
    if suite == "evidence" and (section := evidence.read_section(root, name)) is not None:
        return section
    path, runs = read_runs(root, suite)
    if name not in runs:
        raise SystemExit(f"{path} has no run {name!r}: expected one of {list(runs)}. Add it with docs --add FILE {run}")
    return dict(runs[name])


def describe_run(record: Mapping[str, Any]) -> str:
    """Return the command of a run, and in a line where and when it ran."""
    commit = record["machine"].get("commit") or ""
    changes = " with changes" if commit.endswith("-dirty") else ""
    commit = f", commit {commit.removesuffix('-dirty')}{changes}" if commit else ""
    return f"```\n{record['command']}\n```\n\n{describe(record['machine'])}; {record['date']}{commit}."


def select(bar: str = "", label: str = "", **table: Any) -> Table | Chart:
    """Return what a `[[show]]` of a page selects."""
    return Chart(Table(**table), bar, label) if bar else Table(**table)


def build_block(name: str, shown: str, root: Path) -> str:
    """Return the text of a block."""
    suite, _, section = name.partition("/")
    if suite == "evidence" and evidence.read_section(root, section) is None:
        return evidence.missing(section)
    run, *parts = README.get(name) or (name, *(select(**each) for each in tomllib.loads(shown).get("show", ())))
    record = read_record(root, run)
    try:
        texts = [part.build(record["tables"]) for part in parts or [Table([table]) for table in record["tables"]]]
    except KeyError as error:
        raise SystemExit(f"the record of {run} has no table or column {error}, which {name} shows") from None
    if suite == "evidence":
        texts = [evidence.summarize(section, record, root), *texts, describe_run(record)]
    elif name not in README:
        texts = [describe_run(record), *texts]
    return "\n\n".join(texts)


def build_page(page: str, root: Path) -> str:
    """Return the text of a page as the records say."""
    text = (root / page).read_text(encoding="utf-8")
    if text.count("<!-- end -->") != len(BLOCK.findall(text)):
        raise SystemExit(f"{page}: each block begins with <!-- SUITE/RUN --> and ends with <!-- end -->")

    def build(block: re.Match[str]) -> str:
        text = build_block(block["name"], block["shown"], root)
        return f"<!-- {block['name']}{block['shown']}-->\n\n{text}\n\n<!-- end -->"

    return BLOCK.sub(build, text)


def add_record(root: Path, source: Path, run: str) -> None:
    """Make the record in a file the one of a run, SUITE/RUN."""
    suite, _, name = run.partition("/")
    record = json.loads(source.read_text(encoding="utf-8"))
    path, runs = (evidence.path_of(root, name), {}) if suite == "evidence" else read_runs(root, suite)
    path.parent.mkdir(exist_ok=True)
    path.write_text(encode({**runs, name: record} if suite != "evidence" else record) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page differs from its records")
    parser.add_argument("--add", nargs=2, metavar=("FILE", "SUITE/RUN"), help="first take FILE as the record of a run")
    chosen = parser.parse_args(argv)
    if chosen.add:
        add_record(root, Path(chosen.add[0]), chosen.add[1])
    files = {path: build_page(path, root) for path in PAGES} | evidence.draw_charts(root)
    stale = [name for name, text in files.items() if not _is_text(root / name, text)]
    if chosen.check and stale:
        raise SystemExit(f"{', '.join(stale)}: not what the records say. Run: python -m benchmarks docs")
    for name in stale:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(files[name], encoding="utf-8")
        print(f"wrote {name}")


def _is_text(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text
