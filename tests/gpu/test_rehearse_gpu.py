"""`zeroshard rehearse` with two real NCCL ranks, on one GPU if there are no more.

Without a GPU, ZEROSHARD_TEST_GLOO=1 runs it over gloo, to debug it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from processes import wait_until_gone
from test_rehearse import SCRIPT, by_name, started_pids

from zeroshard.cli.main import main

ON_GLOO = os.environ.get("ZEROSHARD_TEST_GLOO") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or ON_GLOO), reason="needs a GPU, which several NCCL ranks can share"
)


@pytest.mark.parametrize("fault", ["", "raise"])
def test_a_script_for_a_cluster_runs_unchanged_on_one_gpu(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    status = main(["rehearse", "--ranks", "2", "--json", str(script), fault, str(tmp_path), "--lr", "1e-3"])
    found = json.loads(capfd.readouterr().out)
    wait_until_gone(started_pids(tmp_path))
    assert {record["backend"] for record in found["records"]} == {"gloo" if ON_GLOO else "nccl"}
    if fault:
        assert status == 1 and "rank 1 failed" in found["failure"] and "ValueError: no more data" in found["failure"]
        return
    assert status == 0 and found["passed"], found
    assert set(by_name(found["checks"]).values()) == {"passed", "not checked"}
    assert not any("killed" in note for note in found["notes"]), found["notes"]  # the ranks ended by themselves
    if not ON_GLOO:
        gpus = torch.cuda.device_count()
        assert all(record["allocated"] > 0 for record in found["records"])
        assert len(found["notes"]) == (1 if gpus < 2 else 0)  # device_id= is dropped if the ranks share the GPU
