"""The pages show what the records say: a changed number is noticed, and what cannot be built is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.harness.record import ROOT, Record, encode, markdown
from benchmarks.report import Chart, Table
from benchmarks.suites import checkpoint

RECORD: dict[str, Any] = {
    "command": "python -m benchmarks peers --steps 8",
    "date": "2026-11-15",
    "machine": {"device": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "python": "3.12.3", "commit": "87b3d04-dirty"},
    "tables": {
        "1.4B": {"heads": ["variant", "ms", "ms"], "rows": [["floor", 299.71, 9], ["zeroshard 3", 67.449, None]]},
        "7.6B": {"heads": ["variant", "ms", "ms"], "rows": [["floor", "383.5", 0.0042]]},
    },
}


def copy_pages(root: Path) -> Path:
    """Copy the pages, their charts and the records to a folder."""
    shutil.copytree(ROOT / "docs/evidence", root / "docs/evidence")
    shutil.copytree(ROOT / "benchmarks/results", root / "benchmarks/results")
    for path in report.PAGES:
        shutil.copy(ROOT / path, root / path)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copy_pages(tmp_path)


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
    assert all("| 0.457 |" in (root / page).read_text() for page in ("README.md", "docs/benchmarks.md"))
    assert [report.BLOCK.sub("", (root / page).read_text()) for page in report.PAGES] == prose


def test_every_table_of_the_page_and_every_record_is_used() -> None:
    text = "".join((ROOT / page).read_text() for page in report.PAGES[1:3])
    assert not [line for line in report.BLOCK.sub("", text).splitlines() if line.startswith("|")]
    runs = {
        f"{path.stem}/{run}"
        for path in (ROOT / "benchmarks/results").glob("*.json")
        for run in json.loads(path.read_text())
    }
    text += (ROOT / "docs/simulation.md").read_text()
    assert {block["name"] for block in report.BLOCK.finditer(text)} == runs


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
    joined = Table(["1.4B", "7.6B"], (("table", "GPT"), "variant", (2, "host ms"), "ms"))
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
    lines = markdown(["a|b"], [["x | y\nz"], [None]]).splitlines()
    assert lines == ["| a\\|b |", "|---|", "| x \\| y z |", "|  |"]


def test_bars_are_as_long_as_their_values() -> None:
    tables = {name: {"heads": ["variant", "ms"], "rows": [["FSDP2", 20.0], ["zeroshard 3", 5.0]]} for name in "ab"}
    lines = Chart(Table(["a", "b"]), "ms", "{ms} ms").build(tables).splitlines()
    assert lines[0] == lines[-1] == "```" and lines[2:4] == lines[5:7]
    assert [line.count("█") for line in lines[1:-1]] == [0, 40, 10, 0, 40, 10]
    assert lines[1] == "a" and lines[3].startswith("  zeroshard 3 ") and lines[3].endswith(" 5.00 ms")


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
    refused(
        r"peers.json has no run 'unknown': expected one of \['large', .*\]. Add it with docs --add FILE peers/unknown"
    )
    page.write_text(text + "\n<!-- end -->\n")
    refused("docs/benchmarks.md: each block begins with <!-- SUITE/RUN --> and ends with <!-- end -->")
    page.write_text(text)
    change(root, "stages", lambda runs: runs["1.4b"]["tables"].pop("stages"))
    refused("the record of stages/1.4b has no table or column 'stages', which readme/stages shows")
    shutil.copy(ROOT / "benchmarks/results/stages.json", root / "benchmarks/results")
    change(root, "train", lambda runs: runs.pop("gpu"))
    refused(r"train.json has no run 'gpu': expected one of \[\]. Add it with docs --add FILE train/gpu")
