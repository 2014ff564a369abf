"""One-line mistakes of `mutants.toml`: each is made in a copy of the library, and its test must fail.

All of them, with what they print: python -m pytest tests/test_mutants.py -m slow
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests/planner/golden_plans.json"
MUTANTS = {entry["name"]: entry for entry in tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_not_stale(name: str) -> None:
    mutant = MUTANTS[name]
    path = ROOT / "src/zeroshard" / mutant["file"]
    assert path.exists(), f"{mutant['file']} has moved: write it into tests/mutants.toml"
    assert path.read_text().count(mutant["old"]) == 1, "this text has changed: mutate what is there now"
    assert (ROOT / mutant["test"].partition("::")[0]).exists(), "the test has moved: write it into tests/mutants.toml"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    if "golden" in mutant["test"] and not torch.__version__.startswith(json.loads(GOLDENS.read_text())["torch"]):
        pytest.skip("golden plans of another version of torch are compared with a tolerance")
    shutil.copytree(ROOT / "src", tmp_path / "src")
    path = tmp_path / "src/zeroshard" / mutant["file"]
    path.write_text(path.read_text().replace(mutant["old"], mutant["new"]))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", mutant["test"]],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    # 1: a test has failed. 0: none has; anything else: it did not run
    assert result.returncode == 1, f"{mutant['test']} ended with {result.returncode}: {result.stdout[-3000:]}"
    assert "1 failed" in result.stdout, result.stdout[-3000:]
