"""The evidence: each section runs, on tiny shapes over gloo, and its page says what its record says."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_processes
from test_benchmark_docs import copy_pages

from benchmarks import evidence, report
from benchmarks.evidence import BASE, CONTROL, FEWER_BYTES, curves, endurance, page
from benchmarks.harness import trials

HEAD = {"command": "python -m benchmarks evidence", "date": "2026-11-17", "machine": {"device": "NVIDIA H200"}}


def call(rank: int, function: Any, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    finally:
        torch.use_deterministic_algorithms(False)  # the process is used again


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trials run in this process, and ranks in processes that have imported torch already."""

    def measured(measure: trials.Measure, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        return dict(json.loads(json.dumps(measure(**arguments))))

    def run_ranks(function: Any, ranks: int, backend: str, **arguments: Any) -> Any:
        return run_processes(ranks, call, function, arguments)[0]

    monkeypatch.setattr(trials, "run_process", measured)
    monkeypatch.setattr(curves, "run_ranks", run_ranks)
    monkeypatch.setattr(endurance, "run_ranks", run_ranks)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the pages and of the suites' records, without any of the evidence."""
    copy_pages(tmp_path)
    for folder in (evidence.RESULTS, page.FOLDER):
        shutil.rmtree(tmp_path / folder)
    return tmp_path


def run(section: str, out: Path, *arguments: str) -> dict[str, Any]:
    """Run a section on tiny shapes, and return its record."""
    path = out / f"{section}.json"
    evidence.main(["--sections", section, "--tiny", "--device", "cpu", "--out", str(path), *arguments])
    return dict(json.loads(path.read_text()))


def write(root: Path, section: str, record: dict[str, Any]) -> str:
    """Make this the record of a section, and return the page."""
    (root / "new.json").write_text(json.dumps(HEAD | record))
    report.main(["--add", str(root / "new.json"), f"evidence/{section}"], root)
    return (root / page.PAGE).read_text()


# ------------------------------------------------------------------------------------------------ the page


def test_sections_without_a_record_say_how_to_measure_them(root: Path) -> None:
    report.main([], root)
    text = (root / page.PAGE).read_text()
    assert text.count("Not measured yet.") == len(evidence.SECTIONS)
    for section in evidence.SECTIONS:
        assert f"Not measured yet. The command is\n\n```\npython -m benchmarks evidence --sections {section}\n" in text
    assert not (root / page.FOLDER).exists()


def test_the_largest_difference_of_any_curve_is_said_and_drawn(root: Path) -> None:
    losses = {BASE: [2.0, 1.5], "FSDP2": [2.0, 1.5], "zeroshard 3": [2.25, 1.5], CONTROL: [2.0, 1.0]}
    results = [{"variant": name, "losses": each, "steps": 2, "parameters": 7} for name, each in losses.items()]
    text = write(root, "curves", {"results": results, "tables": {}})
    assert "of any curve in any step, is 0.250 (zeroshard 3); with a learning rate 1 % higher" in text
    assert "DDP itself differs by 0.500" in text and "](evidence/curves.svg)" in text
    drawn = (root / page.FOLDER / "curves.svg").read_text()
    assert drawn.count('class="line"') == 2 * len(losses)
    results[1] = {"variant": "FSDP2", "error": "out of memory"}
    results[2]["losses"] = [math.nan, 1.5]
    text = write(root, "curves", {"results": results, "tables": {}})
    assert "in any step, is inf (zeroshard 3);" in text and "No curve: FSDP2." in text
    drawn = (root / page.FOLDER / "curves.svg").read_text()
    report.main(["--check"], root)
    (root / page.FOLDER / "curves.svg").write_text(drawn.replace("zeroshard 3", "zeroshard 4"))
    with pytest.raises(SystemExit, match=r"^docs/evidence/curves.svg: not what the records say"):
        report.main(["--check"], root)


def test_curves_with_fewer_bytes_are_compared_with_full_precision(root: Path) -> None:
    results = [
        {"variant": name, "losses": [2.0, 1.5 + index / 8], "steps": 2, "parameters": 7}
        for index, name in enumerate(FEWER_BYTES)
    ]
    text = write(root, "fewer_bytes", {"results": results, "tables": {}})
    assert (
        "difference from full precision's loss, of any curve in any step, is 0.500 (gathers and reductions in fp8)"
        in text
    )
    assert "full precision itself differs by 0.625. full precision's loss at the end is 1.75" in text
    drawn = (root / page.FOLDER / "fewer_bytes.svg").read_text()
    assert "Difference from full precision" in drawn and drawn.count('class="line"') == 2 * len(results)


def test_several_sections_do_not_write_one_record(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--out is the record of one section"):
        evidence.main(["--sections", "curves", "kills", "--tiny", "--out", str(tmp_path / "new.json")])


def test_kills_that_were_not_told_by_name_are_counted(root: Path) -> None:
    right = {"died_in": "step", "error": "", "seconds": 0.5, "same_bits": True, "lost_steps": 1, "backend": "gloo"}
    wrong = right | {"error": "another rank is gone", "seconds": 9.0, "same_bits": False}
    hung = right | {"error": "hung", "seconds": None, "backend": "nccl"}
    text = write(root, "kills", {"results": [right, wrong, hung, {"backend": "gloo", "jobs": 1}], "tables": {}})
    assert "3 kills. The other rank got an error in 2, after 9.00 s at the most; in 1 it was" in text
    assert "2 times the next start found a checkpoint and went on with the same bits" in text


def test_growth_is_said(root: Path) -> None:
    steady = {"step": 1, "allocated": 1.0, "reserved": 2.0, "resident": 3.0, "threads": 4, "files": 5}
    samples = [[steady, steady], [steady, steady | {"step": 2, "files": 7}]]
    table = {"heads": ["training", "rank", "", "first", "half way", "last", "most"], "rows": []}
    table["heads"].append("growth in 1,000 steps, second half")
    kinds = [{"kind": "stage 3", "steps": 2, "samples": samples}]
    text = write(root, "endurance", {"results": kinds, "tables": {"endurance": table}})
    assert "device MB ±0" in text and "open files ±0" in text  # half way is the second of two samples
    samples[1] = [*samples[1], steady | {"step": 3, "files": 9}]
    text = write(root, "endurance", {"results": kinds, "tables": {"endurance": table}})
    assert "threads ±0, open files +2." in text


# ------------------------------------------------------------------------------------------------ the sections


def test_curves_are_the_same_but_for_the_control(inline: None, tmp_path: Path) -> None:
    record = run("curves", tmp_path, "--jobs", "1", "--steps", "5", "--variants", BASE, "FSDP2", "zeroshard 3", CONTROL)
    apart = {row[0]: row[2] for row in record["tables"]["curves"]["rows"]}
    assert apart.pop(BASE) is None
    assert apart.pop(CONTROL) > 1e-5 > max(apart.values())
    assert [len(result["losses"]) for result in record["results"]] == 4 * [5]


def test_kills(tmp_path: Path) -> None:
    record = run("kills", tmp_path, "--kills", "4", "--jobs", "1")
    kills = [each for each in record["results"] if "died_in" in each]
    assert [each["phase"] for each in kills] == ["forward", "backward", "step", "save"]
    assert all(each["same_bits"] and each["names"] and not each["error"] for each in kills), kills
    assert not [each for each in record["results"] if "last_run" in each]


def test_endurance(inline: None, tmp_path: Path) -> None:
    record = run("endurance", tmp_path, "--steps", "12", "--kinds", "stage 3")
    (result,) = record["results"]
    assert [len(samples) for samples in result["samples"]] == [12, 12]
    assert all(sample["resident"] > 10 and sample["files"] > 2 for sample in result["samples"][1])
    assert len(record["tables"]["endurance"]["rows"]) == 2 * len(evidence.COUNTED)


def test_the_llama(inline: None, tmp_path: Path) -> None:
    record = run("titan", tmp_path, "--steps", "1", "--warmup", "1", "--only", "eager")
    rows = {row[0]: row for row in record["tables"]["llama"]["rows"]}
    assert set(rows) == {"floor", "FSDP2", "zeroshard 3", "FSDP2, published"}
    losses = {row[8] for name, row in rows.items() if "published" not in name}
    assert all(4 < loss < 4.3 for loss in losses), losses  # the logarithm of 64
    assert rows["FSDP2, published"][5] == pytest.approx(333.7, abs=0.1)  # 34 % of 989, as torchtitan says


def test_predictions(tmp_path: Path) -> None:
    record = run("predictions", tmp_path)
    assert [row[0] for row in record["tables"]["torchtitan"]["rows"]] == [8, 8, 128, 128]
    assert len(record["tables"]["figure 2"]["rows"]) == 2
