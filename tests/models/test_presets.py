"""The paper's configurations, by name: what they mean to the calls they are given to, and how they are listed."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import zeroshard
from zeroshard.cli.main import main
from zeroshard.models import CONFIGURATIONS, PRESETS
from zeroshard.sharding.placement import Placement

# Table 3 of the paper: gradients partitioned, activation checkpoints partitioned, in host memory
TABLE_3 = {
    "C1": (False, False, False),
    "C2": (False, True, False),
    "C3": (True, False, False),
    "C4": (True, True, False),
    "C5": (True, True, True),
}


def test_the_configurations_are_table_3() -> None:
    assert list(CONFIGURATIONS) == list(TABLE_3)
    for name, (gradients, partitioned, offloaded) in TABLE_3.items():
        chosen = CONFIGURATIONS[name]
        placement = Placement.from_stage(zeroshard.Config(**chosen.shard_options).stage, ranks=2)
        assert placement == Placement(parameters=False, gradients=gradients, optimizer=True), name
        assert chosen.checkpoint_options == {"partition": None if partitioned else False, "offload": offloaded}, name


def test_their_options_are_options_of_the_calls() -> None:
    known = inspect.signature(zeroshard.checkpoint_activations).parameters
    for chosen in CONFIGURATIONS.values():
        assert set(chosen.checkpoint_options) <= set(known)


def test_the_command_lists_models_and_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {*PRESETS, *CONFIGURATIONS} <= set(lines)
    assert "replicated" in lines["C1"]
    assert "partitioned over tensor-parallel ranks, in host memory" in lines["C5"]


def test_presets_are_known_without_torch() -> None:
    check = "import sys, zeroshard.models.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
