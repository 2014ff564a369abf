"""The planner against real runs: one rank of several, on the fake backend, counted by torch's own allocator events.

The cases are those of `python -m benchmarks planner`, which prints the same comparison as a table; here they are tiny.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suites import planner as suite
from zeroshard.comm.collectives import Communicator

GPT = {"layers": 4, "heads": 4, "width": 64, "batch": 3, "sequence": 32}
CASES = {
    "stage 0 of 4": {"ranks": 4, "stage": 0},
    "stage 1 of 3": {"ranks": 3, "stage": 1, "checkpoint": "recompute"},
    "stage 2 of 3": {"ranks": 3, "stage": 2, "checkpoint": "recompute"},
    "stage 3 of 8, recomputed": {"ranks": 8, "stage": 3, "checkpoint": "recompute"},
    "inputs on the host": {"checkpoint": "host"},
    "optimizer on the host": {"ranks": 2, "offload": "host"},
    "half of the optimizer on the host": {"offload": {"optimizer": ("host", 0.5)}},
    "parameters on the host": {"offload": {"optimizer": "host", "parameters": "host"}, "checkpoint": "recompute"},
    "fp32, alone": {"clip": True},
    "gathered in 8 bits": {"ranks": 4, "gather_dtype": "int8"},
    "reduced in 8 bits": {"ranks": 2, "stage": 2, "reduce_wire": "int8"},
    "summed locally, reduced in 8 bits": {"ranks": 2, "stage": 1, "reduce_wire": "int8"},
    "both in 8 bits": {"ranks": 4, "gather_dtype": "int8", "reduce_wire": "int8", "checkpoint": "recompute"},
}
OTHERS = {
    "llama, recomputed": {"model": "llama", "place": "alone", **GPT, "ranks": 2, "stage": 2, "checkpoint": "recompute"},
    "experts": {"model": "experts", **GPT, "ranks": 2},
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's description, and few steps. The fake backend gets the buffers of gloo, which a CPU's ranks use."""
    monkeypatch.setattr(Communicator, "needs_receive_buffer", property(lambda comm: comm.shard_axis.size > 1))
    monkeypatch.setattr(suite, "WARMUP", 2)
    monkeypatch.setattr(suite, "STEPS", 1)
    path = tmp_path / "machine.json"
    path.write_text('{"like": "cpu"}')
    return path


def compared(case: dict[str, Any], machine: Path) -> dict[str, Any]:
    chosen = suite.Case(**{"model": "gpt", **GPT, "precision": "fp32", **case})
    result: dict[str, Any] = suite.measure(asdict(chosen), str(machine), "cpu")
    return result


@pytest.mark.parametrize("name", CASES)
def test_a_gpts_states_and_peak_are_predicted(name: str, machine: Path) -> None:
    result = compared(CASES[name], machine)
    assert result["predicted_states"] == pytest.approx(result["states"], rel=0.001)
    # On a CPU what the host's updates and conversions to 8 bits take for themselves comes from the same allocator as
    # the device's memory.
    temporary = 7.5e6 if "offload" in CASES[name] else 3.2e6 if "8 bits" in name else 0
    assert result["predicted_peak"] == pytest.approx(result["allocated"], rel=0.005, abs=temporary)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_predicted_too(name: str, machine: Path) -> None:
    if "llama" in name:
        pytest.importorskip("transformers")
    result = compared(OTHERS[name], machine)
    assert result["predicted_states"] == pytest.approx(result["states"], rel=0.02)
    assert result["predicted_peak"] == pytest.approx(result["allocated"], rel=0.05)


def test_a_case_is_planned_before_it_runs(machine: Path) -> None:
    """Nothing of a run reaches its plan: the plan alone gives the same figures."""
    case = suite.Case(model="gpt", **GPT, precision="fp32", ranks=4, stage=2)
    alone = suite.predict(case, suite.Machine.resolve(machine))
    assert alone["predicted_peak"] == compared({"ranks": 4, "stage": 2}, machine)["predicted_peak"]
    assert not torch.distributed.is_initialized()
