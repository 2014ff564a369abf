"""The benchmark of the update alone, on a CPU: that it runs, and what its figures are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import trial
from benchmarks import update as benchmark
from zeroshard.optim import step


def test_the_update_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(step, "kernel_for", step.kernel_for)  # put back after
    monkeypatch.setattr(trial, "_measured", lambda _, given, __: benchmark.measure(**given))
    out = tmp_path / "out.json"
    benchmark.main(["--tiny", "--device", "cpu", "--clip", "--precision", "fp16", "--out", str(out)])
    (result,) = json.loads(out.read_text())["results"]
    assert result["way"] == "torch's way" and result["numel"] == 9216
    assert result["gb_s"] == pytest.approx(28 * 9216 / result["ms"] / 1e6)
    assert result["taken"] >= 4 * 9216  # gradients in fp32
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| torch's way") and row.split("|")[-2].strip() == "1.00"


def test_there_is_no_one_pass_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="no update in one pass on a CPU"):
        benchmark.measure("one pass", 9216, "cpu", 1, False, "bf16")
