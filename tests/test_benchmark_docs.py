"""The pages show what the records say: a changed number is noticed, and what cannot be built is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, report, table
from benchmarks.charts import Bar, draw_bars
from benchmarks.record import ROOT, Record, encode
from benchmarks.report import Table

RECORD: dict[str, Any] = {
    "command": "python -m benchmarks peers --steps 8",
    "date": "2026-11-15",
    "machine": {"device": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "python": "3.12.3", "commit": "87b3d04-dirty"},
    "tables": {
        "1.4B": {"heads": ["variant", "ms", "ms"], "rows": [["floor", 299.71, 9], ["zeroshard 3", 67.449, None]]},
        "7.6B": {"heads": ["variant", "ms", "ms"], "rows": [["floor", "383.5", 0.0042]]},
    },
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the pages and the records."""
    (tmp_path / "docs").mkdir()
    for path in (*report.PAGES, *(f"docs/{chart.name}" for chart in (ROOT / "docs").glob("*.svg"))):
        shutil.copy(ROOT / path, tmp_path / path)
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    return tmp_path


def change(root: Path, suite: str, act: Any) -> None:
    path = root / f"benchmarks/results/{suite}.json"
    runs = json.loads(path.read_text())
    act(runs)
    path.write_text(encode(runs))


# ------------------------------------------------------------------------------------------------ this repository


def test_pages_and_records_agree() -> None:
    report.main(["--check"])


def test_a_changed_number_is_noticed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["--check"], root)
    prose = [report.BLOCK.sub("", (root / page).read_text()) for page in report.PAGES]
    change(root, "stages", lambda runs: runs["1.4b"]["tables"]["stages"]["rows"][3].__setitem__(1, 0.4567))
    with pytest.raises(SystemExit, match=r"^README.md, docs/benchmarks.md: not what the records say"):
        report.main(["--check"], root)
    report.main([], root)
    assert capsys.readouterr().out.split() == ["wrote", "README.md", "wrote", "docs/benchmarks.md"]
    report.main(["--check"], root)
    assert all("| 0.457 |" in (root / page).read_text() for page in report.PAGES)
    assert [report.BLOCK.sub("", (root / page).read_text()) for page in report.PAGES] == prose
    (root / "docs/peers-host.svg").write_text("<svg/>")
    with pytest.raises(SystemExit, match=r"docs/peers-host.svg: not what the records say"):
        report.main(["--check"], root)


def test_every_table_of_the_page_and_every_record_is_used() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert not [line for line in report.BLOCK.sub("", text).splitlines() if line.startswith("|")]
    runs = {
        f"{path.stem}/{run}" for path in (ROOT / "benchmarks/results").iterdir() for run in json.loads(path.read_text())
    }
    assert set(re.findall(r"^<!-- (.+/.+) -->$", text, re.MULTILINE)) == set(report.SECTIONS) == runs


def test_a_new_record_of_checkpoints_fits_the_page(tmp_path: Path) -> None:
    kinds = ("save", "load", "pause", "step", "step beside")
    times = {f"{name} {kind}": [4.0, 1.0, 2.0] for name in checkpoint.VARIANTS for kind in kinds}
    record = Record("checkpoint", "cpu", tmp_path / "out.json")
    checkpoint.show(8 * 10**9, {**times, "raw save": [1.0], "host copy": [0.5]}, record)
    new = json.loads((tmp_path / "out.json").read_text())["tables"]
    kept = report.read_record(ROOT, "checkpoint/gpu")["tables"]
    assert {name: found["heads"] for name, found in new.items()} == {name: kept[name]["heads"] for name in kept}
    assert new["saving"]["rows"][1] == ["zeroshard", 2.0, 3.0, 4.0, 2.0, 2.0, 3.0, 4.0, 1.0]
    assert new["beside"]["rows"][1] == ["zeroshard", 2000.0, 3000.0, 4.0, 4000.0, 2000.0, 2000.0]


def test_a_record_is_added_under_its_name(root: Path) -> None:
    before = report.read_record(root, "stages/1.4b")
    (root / "mine.json").write_text(json.dumps(before | {"date": "2030-01-01"}))
    report.main(["--add", str(root / "mine.json"), "stages/1.4b"], root)
    assert report.read_record(root, "stages/1.4b") == before | {"date": "2030-01-01"}
    assert "; 2030-01-01, commit" in (root / "docs/benchmarks.md").read_text()
    report.main(["--check"], root)


# ------------------------------------------------------------------------------------------------ what is built


def test_a_run_is_described() -> None:
    line = "NVIDIA H200, 16 cores, torch 2.11.0, Python 3.12.3; 2026-11-15, commit 87b3d04 with changes."
    assert report.describe_run(RECORD).splitlines() == ["```", RECORD["command"], "```", "", line]
    assert report.describe_run(RECORD | {"machine": {"device": "CPU", "commit": None}}).endswith("\nCPU; 2026-11-15.")


def test_a_table_shows_some_rows_and_columns() -> None:
    every = Table(["1.4B"]).build(RECORD["tables"])
    assert every.splitlines() == [
        "| variant | ms | ms |",
        "|---|---|---|",
        "| floor | 300 | 9 |",
        "| zeroshard 3 | 67.45 |  |",
    ]
    joined = Table(["1.4B", "7.6B"], (("table", "GPT"), "variant", (2, "host ms"), "ms"), grouped=True)
    assert joined.build(RECORD["tables"]).splitlines() == [
        "| GPT | variant | host ms | ms |",
        "|---|---|---|---|",
        "| 1.4B | floor | 9 | 300 |",
        "|  | zeroshard 3 |  | 67.45 |",
        "| 7.6B | floor | 0.0042 | 383.5 |",
    ]
    some = Table(["1.4B"], ("variant", "kept"), rows=["zeroshard 3"], words={"kept": ["all"]})
    assert some.build(RECORD["tables"]).splitlines()[2:] == ["| zeroshard 3 | all |"]


def test_a_cell_stays_in_its_cell() -> None:
    lines = table.markdown(["a|b"], [["x | y\nz"], [None]]).splitlines()
    assert lines == ["| a\\|b |", "|---|", "| x \\| y z |", "|  |"]


def test_bars_are_as_long_as_their_values() -> None:
    bars = [Bar("7.6B", "FSDP2", [2.0, 4.0], "2 · 4 <GB>"), Bar("7.6B", "zeroshard 3", [1.0, 1.5], "1")]
    chart = ElementTree.fromstring(draw_bars("A & B", bars, ["held", "reserved"], mark="floor"))
    widths = {node.get("class"): float(node.attrib["width"]) for node in chart.iter() if node.get("height") == "14.0"}
    longest = widths["others second"]
    assert {name: width / longest for name, width in widths.items()} == pytest.approx(
        {"others second": 1, "others": 0.5, "ours second": 0.375, "ours": 0.25}, abs=0.001
    )
    texts = ["".join(node.itertext()) for node in chart.iter() if node.tag.endswith("}text")]
    assert texts[:3] == ["A & B", "held", "reserved"] and {"2 · 4 <GB>", "7.6B", "floor"} <= set(texts)
    (mark,) = (node for node in chart.iter() if node.get("class") == "mark")
    left = min(float(node.attrib["x"]) for node in chart.iter() if node.get("height") == "14.0")
    assert float(mark.attrib["x1"]) == pytest.approx(left + longest / 4, abs=0.2)


def test_json_has_a_line_for_each_row_and_result() -> None:
    value = {"a": {"rows": [[1, "é"], []], "none": {}, "flat": [1, 2]}, "results": [{"x": {"y": 1}}]}
    assert json.loads(encode(value)) == value
    assert encode(value).splitlines() == [
        "{",
        ' "a": {',
        '  "rows": [',
        '   [1, "é"],',
        "   []",
        "  ],",
        '  "none": {},',
        '  "flat": [1, 2]',
        " },",
        ' "results": [',
        '  {"x": {"y": 1}}',
        " ]",
        "}",
    ]


# ------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_built_is_said_and_nothing_is_written(root: Path) -> None:
    page = root / "docs/benchmarks.md"
    text = page.read_text()

    def refused(words: str) -> None:
        with pytest.raises(SystemExit, match=words):
            report.main([], root)
        assert (root / "README.md").read_text() == (ROOT / "README.md").read_text()

    page.write_text(text + "\n<!-- peers/unknown -->\n<!-- end -->\n")
    refused("no section 'peers/unknown' in benchmarks/report.py: expected one of stages/1.4b, ")
    page.write_text(text + "\n<!-- end -->\n")
    refused("docs/benchmarks.md: each block begins with <!-- SUITE/RUN --> and ends with <!-- end -->")
    page.write_text(text)
    change(root, "train", lambda runs: runs["gpu"]["tables"].pop("training"))
    refused("the record of train/gpu has no table or column 'training', which train/gpu shows")
    change(root, "train", lambda runs: runs.pop("gpu"))
    refused(r"train.json has no run 'gpu': expected one of \[\]. Add it with docs --add FILE train/gpu")
