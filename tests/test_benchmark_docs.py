"""The pages' figures are the records': nothing on them is stale, a changed number is noticed, and bad input is refused
before anything is written."""

from __future__ import annotations

import doctest
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import checkpoint, docs, plots, selection, svg, table
from benchmarks.block import PageError, blocks_of, filled
from benchmarks.record import ROOT, Record
from benchmarks.selection import Selection

RECORD: dict[str, Any] = {
    "command": "python -m benchmarks peers --steps 8",
    "date": "2026-11-15",
    "machine": {"device": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "python": "3.12.3", "commit": "87b3d04-dirty"},
    "tables": {
        "peers": {
            "heads": ["model", "", "ms", "of the floor", "ms"],
            "rows": [
                ["1.4B", "floor", 299.71, 1.0, 9],
                ["1.4B", "zeroshard & co", 67.449, 1.066, None],
                ["7.6B", "FSDP2", "383.5", 0.0042, 1],
            ],
        },
        "ranks": {
            "heads": ["ranks", "variant", "host ms", "peer's ms"],
            "rows": [[1, "zeroshard", 10.0, 11.5], [1024, "zeroshard", 12.5, 40.0], [32, "FSDP2", 20.0, None]],
        },
    },
}
MADE = "<!-- made from benchmarks/results/peers.json: "
BARS = f"""{MADE}bars
tables: peers
file: docs/steps.svg
title: A <step>
group: model
name: #1
values: of the floor
words: of the floor | ms #1 as ms
mark: 0.5 = half the floor
-->
<!-- end -->
"""
LINES = f"""{MADE}lines ranks
file: docs/ranks.svg
title: Host time
across: ranks
name: variant
values: host ms
scale: log
-->
<!-- end -->
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one record and two pages, the second with blocks of all kinds."""
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A\n")
    write(tmp_path, RECORD)
    page = (
        f"# B\n\n{MADE}run -->\n<!-- end -->\n\nProse.\n\n{MADE}table peers -->\nold\n<!-- end -->\n\n{BARS}\n{LINES}"
    )
    (tmp_path / "docs/benchmarks.md").write_text(page)
    return tmp_path


def write(root: Path, record: Any) -> None:
    (root / "benchmarks/results/peers.json").write_text(json.dumps(record))


def page_of(root: Path, text: str | None = None) -> str:
    """The page with blocks, as it is or as it is now to be."""
    path = root / "docs/benchmarks.md"
    if text is not None:
        path.write_text(text)
    return path.read_text()


def block(root: Path, first: str, *options: str) -> list[str]:
    """What is made of one block, its lines."""
    rest = "\n".join([first, *options, "-->"]) if options else f"{first} -->"
    page_of(root, f"{MADE}{rest}\n<!-- end -->\n")
    files, _ = docs.made(root)
    lines = files["docs/benchmarks.md"].splitlines()
    return lines[2 + len(options) + bool(options) : -2]


# ------------------------------------------------------------------------------------------------ this repository


def test_no_page_is_stale() -> None:
    docs.main(["--check"])


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    for page in docs.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    for picture in (ROOT / "docs").glob("*.svg"):
        shutil.copy(picture, tmp_path / "docs")
    docs.main(["--check"], tmp_path)
    path = tmp_path / "benchmarks/results/stages.json"
    record = json.loads(path.read_text())
    record["tables"]["stages"]["rows"][3][1] = 0.4567
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as refused:
        docs.main(["--check"], tmp_path)
    assert str(refused.value).count("the table is not what benchmarks/results/stages.json has") == 2
    docs.main([], tmp_path)
    docs.main(["--check"], tmp_path)
    assert all("| 0.457 |" in (tmp_path / page).read_text() for page in docs.PAGES)


def test_every_table_of_the_benchmarks_page_is_made_from_a_record() -> None:
    page = "docs/benchmarks.md"
    text = (ROOT / page).read_text()
    lines, made = text.splitlines(), {at for found in blocks_of(page, text) for at in range(found.start, found.stop)}
    assert not [line for at, line in enumerate(lines) if line.startswith("|") and at not in made]
    assert any(line.startswith("|") for line in lines)


def test_a_new_record_of_checkpoints_fits_the_page(tmp_path: Path) -> None:
    kinds = ("save", "load", "pause", "step", "step beside")
    times = {f"{name} {kind}": [4.0, 1.0, 2.0] for name in checkpoint.VARIANTS for kind in kinds}
    record = Record("checkpoint", "cpu", tmp_path / "out.json")
    checkpoint.show(8 * 10**9, {**times, "raw save": [1.0], "host copy": [0.5]}, record)
    new = json.loads((tmp_path / "out.json").read_text())["tables"]
    kept = json.loads((ROOT / "benchmarks/results/checkpoint.json").read_text())["tables"]
    assert {name: found["heads"] for name, found in new.items()} == {name: kept[name]["heads"] for name in kept}
    assert new["saving"]["rows"][1] == ["zeroshard", 2.0, 3.0, 4.0, 2.0, 2.0, 3.0, 4.0, 1.0]
    assert new["beside"]["rows"][1] == ["zeroshard", 2000.0, 3000.0, 4.0, 4000.0, 2000.0, 2000.0]


# ------------------------------------------------------------------------------------------------ what is made


def test_pages_and_pictures_are_made_once_and_prose_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"docs/benchmarks.md:8: the table is not what benchmarks/results/peers.json"):
        docs.main(["--check"], root)
    assert "old" in page_of(root)
    docs.main([], root)
    assert capsys.readouterr().out.split() == "made docs/steps.svg made docs/ranks.svg made docs/benchmarks.md".split()
    text = page_of(root)
    assert "\nProse.\n" in text and "\nold\n" not in text
    docs.main(["--check"], root)
    docs.main([], root)
    assert page_of(root) == text and capsys.readouterr().out == ""
    (root / "docs/steps.svg").write_text("<svg/>")
    with pytest.raises(SystemExit, match=r"docs/steps.svg is not what"):
        docs.main(["--check"], root)


def test_the_run_is_told(root: Path) -> None:
    told = "NVIDIA H200, 16 cores, torch 2.11.0, Python 3.12.3; 2026-11-15, commit 87b3d04 with changes."
    assert block(root, "run") == ["```", RECORD["command"], "```", "", told]
    write(root, RECORD | {"machine": {"device": "CPU", "commit": None}})
    assert block(root, "run")[-1] == "CPU; 2026-11-15."


def test_numbers_are_written_as_the_benchmarks_print_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = block(root, "table peers")
    assert made[0] == "| model |  | ms | of the floor | ms |" and made[1] == "|---|---|---|---|---|"
    assert made[2:] == [
        "| 1.4B | floor | 300 | 1.00 | 9 |",
        "| 1.4B | zeroshard & co | 67.45 | 1.07 |  |",
        "| 7.6B | FSDP2 | 383.5 | 0.0042 | 1 |",
    ]
    table.show(**RECORD["tables"]["peers"])
    printed = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    assert printed[2:] == [[cell.strip() for cell in line.split("|")] for line in made[2:]]


def test_a_part_of_a_table(root: Path) -> None:
    options = [
        "columns: kept | ms #2 as ms, again |",
        "  #1 as who | model",
        "rows: model = 1.4B; #1 = floor",
        "group: model",
    ]
    options += ["add: kept by model: 1.4B = all of it"]
    assert block(root, "table peers", *options) == [
        "| kept | ms, again | who | model |",
        "|---|---|---|---|",
        "| all of it | 9 | floor | 1.4B |",
    ]
    assert [line.split("|")[1].strip() for line in block(root, "table peers", "group: model")[2:]] == [
        "1.4B",
        "",
        "7.6B",
    ]


def test_several_tables_as_one(root: Path) -> None:
    other = {"heads": ["", "images/s", "ms", "ms"], "rows": [["floor", 7, 5.0, 6.0], ["DDP", 8, 7.0, 8.0]]}
    write(root, RECORD | {"tables": {**RECORD["tables"], "images, small": other}})
    assert block(root, "table", "tables: images, small |", "  peers", "rows: #1 != DDP | FSDP2", "group: table") == [
        "| table |  | ms | ms |",
        "|---|---|---|---|",
        "| images, small | floor | 5.00 | 6.00 |",
        "| peers | floor | 300 | 9 |",
        "|  | zeroshard & co | 67.45 |  |",
    ]


def test_a_cell_stays_in_its_cell() -> None:
    assert table.markdown(["a|b"], [["x | y\nz"], [None]]).splitlines() == [
        "| a\\|b |",
        "|---|",
        "| x \\| y z |",
        "|  |",
    ]


def test_what_stands_between_blocks_is_kept_to_the_letter() -> None:
    text = f"a\n{MADE}run -->\n1\n2\n<!-- end -->\n\n b  \n{MADE}run -->\n<!-- end -->\nc\n"
    found = blocks_of("page", text)
    assert [part.line for part in found] == [2, 8]
    once = filled(text, found, ["x", "y\n\nz"])
    assert once == f"a\n{MADE}run -->\n\nx\n\n<!-- end -->\n\n b  \n{MADE}run -->\n\ny\n\nz\n\n<!-- end -->\nc\n"
    assert filled(once, blocks_of("page", once), ["x", "y\n\nz"]) == once


# ------------------------------------------------------------------------------------------------ pictures


def texts(picture: str) -> list[str]:
    """All that a picture says, its titles left out; it is one XML document without a script."""
    root = ElementTree.fromstring(picture)
    assert not [node for node in root.iter() if node.tag.endswith("script")]
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]


def places(picture: str, kind: str) -> list[dict[str, str]]:
    """The attributes of all elements of a class."""
    return [node.attrib for node in ElementTree.fromstring(picture).iter() if kind in node.get("class", "").split()]


def test_bars_are_as_long_as_their_values(root: Path) -> None:
    docs.main([], root)
    picture = (root / "docs/steps.svg").read_text()
    assert texts(picture)[0] == "A <step>"
    assert [words for words in texts(picture) if "ms" in words] == [
        "1.00 · 300 ms",
        "1.07 · 67.45 ms",
        "0.0042 · 383.5 ms",
    ]
    floor, ours = places(picture, "others")[0], places(picture, "ours")[0]
    assert float(ours["width"]) / float(floor["width"]) == pytest.approx(1.066, rel=0.01)
    mark = places(picture, "mark")[0]
    assert float(mark["x1"]) == pytest.approx(float(floor["x"]) + float(floor["width"]) / 2, abs=0.2)
    assert "prefers-color-scheme: dark" in picture


def test_a_long_reason_leaves_room_for_the_bars(root: Path) -> None:
    rows = [["zeroshard", 1.0, ""], ["b", None, "RuntimeError: " + 30 * "no such thing, "]]
    write(root, RECORD | {"tables": {"peers": {"heads": ["", "ms", "note"], "rows": rows}}})
    block(root, "bars peers", "file: docs/m.svg", "title: t", "name: #1", "values: ms", "words: ms | note")
    picture = docs.made(root)[0]["docs/m.svg"]
    assert float(places(picture, "ours")[0]["width"]) > 200
    assert texts(picture)[-1].startswith("RuntimeError: no such thing") and texts(picture)[-1].endswith("…")


def test_a_second_value_is_drawn_beyond_the_first(root: Path) -> None:
    write(
        root,
        {
            **RECORD,
            "tables": {"peers": {"heads": ["", "held", "reserved"], "rows": [["a", 3.0, 4.0], ["b", None, None]]}},
        },
    )
    options = ["file: docs/m.svg", "title: Memory", "name: #1", "values: held | reserved as reserved GB"]
    block(root, "bars peers", *options)
    picture = docs.made(root)[0]["docs/m.svg"]
    beyond = [float(bar["width"]) for bar in places(picture, "beyond") if bar["height"] == "14"]
    whole = [float(bar["width"]) for bar in places(picture, "others") if bar["class"] == "others"]
    assert len(beyond) == len(whole) == 1 and beyond[0] / whole[0] == pytest.approx(4 / 3, rel=0.01)
    assert {"held", "reserved GB", "3.00 · 4.00", "not measured"} <= set(texts(picture))


def test_lines_go_through_their_points(root: Path) -> None:
    docs.main([], root)
    picture = (root / "docs/ranks.svg").read_text()
    first, last, other = ((float(at["cx"]), float(at["cy"])) for at in places(picture, "point"))
    assert other[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.2)  # 32 is half way from 1 to 1024, in factors
    zero, five, *_, highest = (float(at["y1"]) for at in places(picture, "grid"))
    assert zero - highest == svg.HEIGHT
    assert [(zero - y) / (zero - five) for _, y in (first, last, other)] == pytest.approx([2, 2.5, 4], rel=0.01)
    assert {"1", "1,024", "ranks", "host ms", "zeroshard", "FSDP2"} <= set(texts(picture))
    block(
        root,
        "lines ranks",
        "file: docs/r.svg",
        "title: t",
        "across: ranks",
        "up: ms of the host",
        "values: host ms | peer's ms",
        "rows: variant = zeroshard",
    )
    wide = docs.made(root)[0]["docs/r.svg"]
    assert {"host ms", "peer's ms", "ms of the host"} <= set(texts(wide)) and len(places(wide, "point")) == 4


def test_a_record_of_ones_own_is_drawn_as_the_pages_are(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs.main([], root)
    (root / "docs/steps.svg").unlink()
    plots.main([], root)
    docs.main(["--check"], root)
    own = root / "own.json"
    tables = {"peers": RECORD["tables"]["peers"] | {"rows": [["1.4B", "mine", 5.0, 2.0, 1]]}}
    own.write_text(json.dumps(RECORD | {"tables": tables}))
    plots.main([str(own), "--into", str(root / "pictures")], root)
    assert [path.name for path in (root / "pictures").iterdir()] == ["steps.svg"]
    assert "2.00 · 5.00 ms" in texts((root / "pictures/steps.svg").read_text())
    page_of(
        root, page_of(root).replace("tables: peers", "tables: other | peers").replace("group: model", "group: table")
    )
    plots.main([str(own)], root)  # a part of the tables will do
    assert "peers" in texts((root / "steps.svg").read_text())
    own.write_text(json.dumps(RECORD | {"tables": {"other table": {}}}))
    with pytest.raises(SystemExit, match="nothing was drawn"):
        plots.main([str(own)], root)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("first", "options", "words"),
    [
        ("table speeds", [], "no table 'speeds', only 'peers', 'ranks'"),
        ("chart peers", [], "nothing is made that is called 'chart', only run, table, bars, lines"),
        ("table peers", ["columns: model | speed"], "no column 'speed', only 'model', '', 'ms', 'of the floor', 'ms'"),
        ("table peers", ["columns: ms"], "2 columns are called 'ms': say ms #1"),
        ("table peers", ["columns: ms #3"], "no ms #3: 2 columns are called 'ms'"),
        ("table peers", ["rows: model = 1.4B | 13B"], "no row has model = 13B"),
        ("table peers", ["rows: model 1.4B"], "does not read HEAD = VALUE"),
        (
            "table peers",
            ["add: kept by model: 1.4B = all"],
            r"has words for \['1.4B'\], and model is \['1.4B', '7.6B'\]",
        ),
        ("table peers", ["mark: 1"], "'mark' is no option of a table: tables, columns, rows, add, group"),
        ("run", ["rows: a = b"], "'rows' is no option of a run: none"),
        ("bars peers", ["file: a.png", "title: t", "name: #1", "values: ms #1"], "that ends in .svg, not 'a.png'"),
        ("table", [], "a table's name in its first line, or the option tables: one of the two"),
        ("table peers", ["tables: peers | ranks"], "or the option tables: one of the two"),
        ("bars peers", ["title: t"], "needs the options file, name, values"),
        (
            "bars peers",
            ["file: ../a.svg", "title: t", "name: #1", "values: ms #1"],
            "path in the repository that ends in .svg",
        ),
        (
            "bars peers",
            ["file: a.svg", "title: t", "name: #1", "values: model"],
            "'1.4B' in the column 'model' is no number",
        ),
        (
            "lines ranks",
            ["file: a.svg", "title: t", "across: ranks", "values: host ms", "scale: 2"],
            "log or linear, not '2'",
        ),
    ],
)
def test_what_cannot_be_made_is_said_with_its_place(root: Path, first: str, options: list[str], words: str) -> None:
    with pytest.raises(PageError, match=words) as refused:
        block(root, first, *options)
    assert str(refused.value).startswith("docs/benchmarks.md:1: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"\n{MADE}run -->\n", "B.md:2: the block has no <!-- end -->"),
        (
            f"{MADE}run -->\n{MADE}run -->\n<!-- end -->\n",
            "B.md:1: the block has no <!-- end --> before the next begins, in line 2",
        ),
        ("a\n<!-- end -->\n", "B.md:2: <!-- end --> without a comment that begins a block"),
        ("<!-- made from peers.json -->\n<!-- end -->\n", "B.md:1: '<!-- made from peers.json -->' does not read"),
        (
            f"{MADE}table peers\nrows\n-->\n<!-- end -->\n",
            "B.md:2: 'rows' in the comment that begins a block does not read KEY: VALUE",
        ),
        (
            f"{MADE}table peers\nrows: a\nrows: b\n-->\n<!-- end -->\n",
            "B.md:3: 'rows: b' in the comment that begins a block is there twice",
        ),
        (f"{MADE}table peers\nrows: a\n", "B.md:1: this comment has no end"),
    ],
)
def test_a_broken_comment_is_said_with_its_line(text: str, words: str) -> None:
    with pytest.raises(PageError) as refused:
        blocks_of("B.md", text)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("[]", "is no record of a benchmark (no 'command')"),
        (json.dumps(RECORD | {"tables": []}), "is no record of a benchmark (its 'tables' is no dict)"),
        (json.dumps(RECORD | {"tables": {"peers": {}}}), "'peers' has no heads and rows"),
        (
            json.dumps(RECORD | {"tables": {"peers": {"heads": ["a"], "rows": [[1, 2]]}}}),
            "row 1 of the table 'peers' has 2 cells",
        ),
        (None, "there is no benchmarks/results/peers.json; beside it there are none"),
    ],
)
def test_nothing_is_written_where_a_record_is_bad(root: Path, record: str | None, words: str) -> None:
    before = page_of(root)
    readme = f"{MADE}table peers -->\n<!-- end -->\n"
    (root / "README.md").write_text(readme)
    path = root / "benchmarks/results/peers.json"
    path.unlink()
    if record is not None:
        path.write_text(record)
    with pytest.raises(SystemExit) as refused:
        docs.main([], root)
    assert str(refused.value).startswith("README.md:1: ") and words in str(refused.value)
    assert page_of(root) == before and (root / "README.md").read_text() == readme
    assert sorted(found.name for found in root.rglob("*.*") if "json" not in found.name) == [
        "README.md",
        "benchmarks.md",
    ]


def test_two_pictures_do_not_share_a_file(root: Path) -> None:
    page_of(root, BARS + BARS)
    with pytest.raises(PageError, match=r"^docs/benchmarks.md:12: docs/steps.svg is the file of another picture"):
        docs.made(root)


@pytest.mark.parametrize("module", [selection, svg])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_a_column_is_found_by_its_head_and_number() -> None:
    chosen = Selection(["", "ms", "", "ms"], [[1, 2, 3, 4]])
    assert [chosen.column(head) for head in ("#1", "#2", "ms #1", "ms #2")] == [[1], [3], [2], [4]]
