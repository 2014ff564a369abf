"""Trackers: what a service gets from a run, that a resume continues it, and what a missing package says."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from zeroshard.train.commands.train import main, read_options
from zeroshard.train.metrics import MetricsFile, StepMetrics, start_tracker
from zeroshard.train.options import TrainingError
from zeroshard.train.rank import RankInfo
from zeroshard.train.training_setup import prepare_training

RECORD = {"name": "tiny", "id": "0123456789abcdef", "options": {"lr": 0.1}}


def figures(step: int, loss: float, **others: float | None) -> StepMetrics:
    return StepMetrics(step=step, loss=loss, lr=1e-3, tokens=1, tokens_per_s=1.0, seconds=1.0, **others)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """Put a module in the place of a tracker's; its runs note what they get."""
    runs: list[dict[str, Any]] = []
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)

    def init(**options: Any) -> SimpleNamespace:
        run = {"options": options, "logged": [], "finished": 0}
        runs.append(run)

        def finish() -> None:
            run["finished"] += 1

        return SimpleNamespace(log=lambda metrics, *, step: run["logged"].append((step, metrics)), finish=finish)

    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
    return runs


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_every_step_and_a_resume_continues_its_run(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    runs = None if find_spec(name) is not None else stand_in(monkeypatch, name)
    for first, last in ((1, 2), (3, 4)):
        tracker = start_tracker(name, RECORD, tmp_path, first - 1)
        with MetricsFile(tmp_path / "metrics.jsonl", first - 1, [tracker]) as file:
            for step in range(first, last + 1):
                file.write(figures(step, float(step), grad_norm=None))
            file.write_evaluation(last, 9.0)
    if runs is not None:
        assert runs[0]["options"] == runs[1]["options"] and runs[0]["options"]["name"] == "tiny-01234567"
        assert [(step, metrics.get("loss")) for step, metrics in runs[1]["logged"]] == [(3, 3.0), (4, 4.0), (4, None)]
        assert "grad_norm" not in runs[0]["logged"][0][1] and [run["finished"] for run in runs] == [1, 1]


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        tracker = start_tracker("tensorboard", RECORD, tmp_path, start)
        with MetricsFile(tmp_path / "metrics.jsonl", start, [tracker]) as file:
            for step in steps:
                file.write(figures(step, 10.0 * start + step, grad_norm=0.5 if start else None))
            file.write_evaluation(steps[-1], 31.0)
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 23.0)]
    assert [e.step for e in read.Scalars("grad_norm")] == [3]  # None is no point
    assert [(e.step, e.value) for e in read.Scalars("validation_loss")] == [(3, 31.0)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_said_before_anything_is_done(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zeroshard.train.metrics.find_spec", lambda package: None)
    assert main(["--out", str(tmp_path / "run"), "--device", "cpu", "--tracker", name]) == 1
    assert f"--tracker {name}: not installed, run pip install {name}, or omit" in capsys.readouterr().err
    options = read_options(["--out", str(tmp_path / "run"), "--device", "cpu", "--tracker", name])
    with pytest.raises(TrainingError, match="not installed"):
        prepare_training(options, RankInfo(0, 1, torch.device("cpu"), "gloo"))  # as a rank that torchrun has started
    assert not (tmp_path / "run").exists()
