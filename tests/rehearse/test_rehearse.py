"""`zeroshard rehearse`: it passes a right script, finds planted faults, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import at_stages, every_stage
from plain import mesh_of
from processes import wait_until_gone
from ranks import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.cli.main import main
from zeroshard.models import GPT, GPTConfig
from zeroshard.rehearse import command
from zeroshard.rehearse.checks import ModelRecord, RankRecord, RehearsalCheck, run_checks
from zeroshard.rehearse.rank import RankRecorder, RehearsalSettings, checksum
from zeroshard.train.options import StepOptions
from zeroshard.train.training_setup import make_optimizer

STEPS = 3
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import zeroshard

fault, pids = sys.argv[1], Path(sys.argv[2])
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
(pids / f"rank{rank}").write_text(str(os.getpid()))
if fault == "hang":
    time.sleep(1000)
device = torch.device("cuda", local_rank)
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=device)  # as written for a cluster
device = device if torch.cuda.is_available() else torch.device("cpu")
meshes = [init_device_mesh(device.type, (1, dist.get_world_size())) for _ in range(2)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x, skipped=None):
        for index, block in enumerate(self.blocks):
            x = x if index == skipped else x + block(x)
        return x


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[4]))
model, optimizer = zeroshard.shard(model, optimizer, mesh=meshes[1], stage=3, units=[nn.Sequential])
generator = torch.Generator().manual_seed(rank)
child = subprocess.Popen(["sleep", "1000"])  # as a data loader's worker
(pids / f"child{rank}").write_text(str(child.pid))
step = 0
while True:  # it does not end by itself
    step += 1
    print("step", step, "x" * 10_000)
    x = torch.randn(4, 32, generator=generator).to(device)
    try:
        if fault == "raise" and rank == 1 and step == 2:
            raise ValueError("no more data")
        model(x, skipped=1 if fault == "skip" and rank == 1 and step == 2 else None).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    except Exception:
        if fault != "":
            raise
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for grace in ("END_GRACE_SECONDS", "FAILURE_GRACE_SECONDS"):
        monkeypatch.setattr(command, grace, 120)  # on a busy machine
    path = tmp_path / "train it.py"
    path.write_text(SCRIPT)
    return path


def started_pids(directory: Path) -> list[int]:
    return [int(path.read_text()) for path in [*directory.glob("rank*"), *directory.glob("child*")]]


def by_name(checks: list[dict[str, Any]]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in checks}


# ---------------------------------------------------------------------------------------- as a user runs it


def test_a_right_script_passes_and_ends_by_itself_after_the_steps(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--ranks", "2", "--steps", str(STEPS), "--json"]
    status = main(["rehearse", *options, str(script), "", str(tmp_path), "--lr", "1e-3"])  # it catches Exception
    output, errors = capfd.readouterr()
    found = json.loads(output)  # what the script prints is not in it
    assert status == 0 and found["passed"], found
    assert by_name(found["checks"]) == {
        **dict.fromkeys(("steps", "collectives", "memory", "finite", "data"), "passed"),
        "replicas": "not checked",  # in stage 3 no value is on two ranks
    }
    assert "step 1" in errors and f"step {STEPS + 1}" not in errors
    for record in found["records"]:
        (model,) = record["models"]
        assert model["steps"] == STEPS and record["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")
        assert model["held"]["optimizer states, device"] == pytest.approx(model["parameter_bytes"], rel=0.1)
    if not torch.cuda.is_available():
        assert found["notes"] == [
            "no GPU here: gloo in the place of nccl",
            "init_process_group() without its device_id=, which needs a GPU for each rank",
        ]
    pids = started_pids(tmp_path)
    assert len(pids) == 4
    wait_until_gone(pids)


PUBLIC_STORE = """
import os
import torch, torch.distributed as dist
import zeroshard

dist.init_process_group("gloo", init_method="env://")
dist.destroy_process_group()
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=1)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
keys = dist.TCPStore(*address, is_master=False, wait_for_workers=False).list_keys()
assert not any("default_pg" in key for key in keys), keys
while True:
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.guarantee("Local ranks")
def test_ranks_meet_where_no_other_user_gets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PUBLIC_STORE)
    assert main(["rehearse", "--ranks", "2", str(tmp_path / "train.py")]) == 0, capfd.readouterr().out


@pytest.mark.guarantee("Rehearsals")
@pytest.mark.parametrize(
    ("fault", "texts", "failed"),
    [
        (
            "raise",
            ["rank 1 failed", "ValueError: no more data", "rank 0: RanksDisagreeError: ", "rank 1 raised ValueError"],
            ["steps"],
        ),
        (
            "skip",
            ["RanksDisagreeError: ", "gather unit 'blocks.2'", "gather unit 'blocks.1'"],
            ["steps", "collectives"],
        ),
    ],
)
def test_a_rank_that_fails_is_named(
    fault: str, texts: list[str], failed: list[str], script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["rehearse", "--ranks", "2", str(script), fault, str(tmp_path), "--lr", "1e-3"])
    output, _ = capfd.readouterr()
    assert status == 1
    for text in texts:
        assert text in output, text
    assert output.count("Traceback (most recent call last)") == 1
    assert f"The rehearsal has FAILED: {', '.join(failed)}." in output
    assert "rehearse/rank.py" not in output  # frames of the script only
    wait_until_gone(started_pids(tmp_path))


@pytest.mark.guarantee("Rehearsals")
def test_a_script_that_hangs_is_ended_and_says_where(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = SCRIPT.splitlines().index("    time.sleep(1000)") + 1
    where = f'"{script}", line {line} in <module>'
    for timeout in (5, 15, 60, 200):  # on a busy machine the script has not begun after 5 s
        status = main(["rehearse", "--ranks", "1", "--timeout", str(timeout), str(script), "hang", str(tmp_path)])
        output, _ = capfd.readouterr()
        assert status == 1
        assert f"the script did not end within {timeout} s (--timeout)" in output
        if where in output:
            break
    assert where in output
    assert "the run ended before zeroshard.shard() had returned on any rank" in output
    wait_until_gone(started_pids(tmp_path))


def test_a_rank_that_still_starts_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time; time.sleep(1000)")
    command = [sys.executable, "-m", "zeroshard", "rehearse", "--ranks", "1", "sleep.py"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}) as launcher:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        while not (pids := children.read_text().split()):
            assert launcher.poll() is None
            time.sleep(0.05)
        rank = os.pidfd_open(int(pids[0]))
        launcher.kill()
    try:
        assert select.select([rank], [], [], 200)[0]
        assert not list(tmp_path.glob("zeroshard-rehearsal-*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank, signal.SIGKILL)
        os.close(rank)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "2", "missing.py"], "there is no script 'missing.py'"),
        (["--ranks", "1000000", "missing.py"], "would start as many processes on this machine: pass at most "),
        (["--ranks", "2", "."], ". is a directory: pass the script in it"),
        (["--ranks", "2", "-m", "missing_package.train"], "there is no module 'missing_package'"),
        (["--ranks", "0", "train.py"], "expected a positive integer (got '0')"),
        (["train.py"], "the following arguments are required: --ranks"),
        (["--ranks", "2", "--timeout", "soon", "train.py"], "expected a positive integer (got 'soon')"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["rehearse", *arguments])
    except SystemExit as end:  # of argparse
        status = int(end.code or 0)
    assert status == 2
    assert text in capsys.readouterr().err


def test_it_is_not_run_under_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["rehearse", "--ranks", "2", "train.py"]) == 2
    assert "it starts its own ranks" in capsys.readouterr().err


def test_options_after_the_script_are_the_scripts() -> None:
    options = command._parser().parse_args(["--ranks", "4", "train.py", "--steps", "9", "--lr=1e-3", "-m"])
    assert (options.ranks, options.steps, options.module) == (4, 5, False)
    assert (options.script, options.arguments) == ("train.py", ["--steps", "9", "--lr=1e-3", "-m"])


# ------------------------------------------------------------------------------ what is recorded and compared


class Net(nn.Module):
    """Three blocks and a parameter in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * self.scale
        return x


def recorded(
    rank: int, directory: str, fault: str, options: dict[str, Any], backwards: int, replicas: int
) -> RankRecord:
    """Train under a recorder, as the program of a rank does, and return its record."""
    settings = RehearsalSettings(STEPS, 0, dist.get_world_size(), time.time() + 60, is_quiet=False)
    recorder = RankRecorder(Path(directory), rank, settings)
    (Path(directory) / "end").touch()
    auto: Any = sys.modules[zeroshard.shard.__module__]
    original = auto.shard_model, dist.init_process_group
    with pytest.raises(SystemExit), recorder.installed():
        train(rank, fault, options, backwards, replicas)
    assert original == (auto.shard_model, dist.init_process_group)
    return recorder.record


def train(rank: int, fault: str, options: dict[str, Any], backwards: int, replicas: int) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    model.blocks[0].requires_grad_(fault != "frozen")
    optimizer: Any = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    if fault == "muon":
        optimizer = make_optimizer(model, StepOptions(optimizer="muon"))
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape) if replicas > 1 else None
    if fault != "never shards":
        model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, units=[nn.Sequential], **options)
    generator = torch.Generator().manual_seed(0 if fault == "same data" else rank)
    for step in range(100):
        for _ in range(backwards):
            loss = model(torch.randn(2, 16, generator=generator)).float().square().mean()
            (loss * float("nan") if fault == "not finite" and step == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "edit on one rank" and rank == 1 and step == 0:  # which no version counter counts
            values = model.blocks[1][0].weight.detach().numpy()
            values *= 1.5


def checks_of(world: int, directory: Path, fault: str = "", backwards: int = 1, replicas: int = 1, **options: Any):
    arguments = (str(directory), fault, {"stage": 3, **options}, backwards, replicas)
    records = run_processes(world, recorded, *arguments)
    return {check.name: check for check in run_checks(records, world, STEPS)}


@every_stage
@pytest.mark.parametrize(
    ("world", "backwards", "replicas", "options"),
    [
        (2, 1, 1, {"precision": "bf16"}),
        (2, 2, 1, {}),
        (2, 1, 1, {"offload": {"optimizer": "host"}}),
        (4, 1, 2, {"precision": "bf16"}),
    ],
)
def test_a_right_loop_passes_with_the_memory_that_is_planned(
    stage: int, world: int, backwards: int, replicas: int, options: dict[str, Any], tmp_path: Path
) -> None:
    found = checks_of(world, tmp_path, "", backwards, replicas, stage=stage, **options)
    statuses = {name: check.status for name, check in found.items()}
    has_copies = stage < 3 or replicas > 1
    assert statuses == {**dict.fromkeys(found, "passed"), "replicas": "passed" if has_copies else "not checked"}, found


@pytest.mark.parametrize(
    ("world", "replicas", "options"),
    [
        (2, 1, {"stage": 2, "reduce_wire": "int8", "error_feedback": True}),
        (2, 1, {"stage": 3, "gather_dtype": "int8", "reduce_wire": "fp8"}),
        (4, 2, {"stage": 3, "gather_dtype": "int8", "reduce_wire": "int8", "partition": "hierarchical"}),
        (4, 2, {"stage": 3, "reduce_wire": "int8", "partition": "hierarchical-gradients"}),
    ],
    ids=str,
)
def test_the_planned_memory_knows_collectives_in_8_bits(
    world: int, replicas: int, options: dict[str, Any], tmp_path: Path
) -> None:
    found = checks_of(world, tmp_path, "", 2, replicas, precision="bf16", **options)
    assert {check.status for name, check in found.items() if name != "replicas"} == {"passed"}, found


@at_stages(0, 3)
def test_owners_of_whole_parameters_hold_and_send_different_bytes(stage: int, tmp_path: Path) -> None:
    found = checks_of(3, tmp_path, "muon", stage=stage, precision="bf16")
    assert {check.status for name, check in found.items() if name != "replicas"} == {"passed"}, found
    assert ("all-to-all" in found["collectives"].text) == bool(stage)


@pytest.mark.guarantee("Rehearsals")
@pytest.mark.parametrize(
    ("fault", "stage", "name", "status", "text"),
    [
        ("same data", 2, "data", "warning", "ranks 0, 1 got the same batch in 3 of 3 forwards"),
        ("edit on one rank", 0, "replicas", "failed", "'blocks.1.0.weight' differs before step 2 on ranks 0, 1"),
        ("edit on one rank", 1, "replicas", "failed", "'blocks.1.0.weight' differs before step 2 on ranks 0, 1"),
        ("not finite", 3, "finite", "failed", "before step 3 is not finite"),
    ],
)
def test_a_planted_fault_is_found(fault: str, stage: int, name: str, status: str, text: str, tmp_path: Path) -> None:
    found = checks_of(2, tmp_path, fault, stage=stage)
    assert found[name].status == status and text in found[name].text, found
    others = {other: check for other, check in found.items() if other != name}
    assert {check.status for check in others.values()} <= {"passed", "not checked"}, found


def test_what_cannot_be_read_or_predicted_is_not_checked(tmp_path: Path) -> None:
    offload = {"optimizer": "disk", "directory": str(tmp_path)}
    found = checks_of(4, tmp_path, "frozen", replicas=2, precision="bf16", offload=offload)
    statuses = {name: check.status for name, check in found.items()}
    assert statuses == {**dict.fromkeys(found, "passed"), "finite": "not checked"}, found
    assert found["replicas"].text.endswith("; offloaded parameters are not read")  # the frozen ones are


def tensor_parallel(rank: int, directory: str, is_right: bool) -> RankRecord:
    """Train a GPT on two pairs of tensor-parallel ranks, with the data of the pair or, wrongly, of the rank."""
    settings = RehearsalSettings(STEPS, 0, dist.get_world_size(), time.time() + 60, is_quiet=False)
    recorder = RankRecorder(Path(directory), rank, settings)
    (Path(directory) / "end").touch()
    mesh = mesh_of((2, 2), "shard tensor")
    with pytest.raises(SystemExit), recorder.installed():
        model: Any = GPT(GPTConfig(vocab_size=64, context=8, layers=2, heads=2, width=32))
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, stage=2)
        generator = torch.Generator().manual_seed(rank // 2 if is_right else rank)
        while True:
            tokens = torch.randint(64, (2, 8), generator=generator)
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder.record


def test_tensor_parallel_ranks_get_the_same_data_and_hold_what_is_planned(tmp_path: Path) -> None:
    found = run_checks(run_processes(4, tensor_parallel, str(tmp_path), True), 4, STEPS)
    assert {check.status for check in found} == {"passed"}, found
    found = run_checks(run_processes(4, tensor_parallel, str(tmp_path), False), 4, STEPS)
    failed = {check.name: check.text for check in found if check.status == "failed"}
    assert failed["data"].startswith("ranks 0 and 1 compute one model together (tensor axis) and got different batches")


def test_a_script_that_never_shards_ends_after_the_steps_of_its_own_optimizer(tmp_path: Path) -> None:
    (check,) = checks_of(2, tmp_path, "never shards").values()
    assert check.status == "failed"
    assert check.text.startswith(
        "zeroshard.shard() was not called on any rank. An optimizer that is not sharded made 3 steps."
    )


def three(**fields: Any) -> list[RankRecord]:
    """Return equal records of three ranks of stage 0."""
    model = ModelRecord(
        "Net",
        steps=2,
        has_read=True,
        values={"before step 1": {"w": [1]}, "before step 2": {"w": [2]}, "after step 2": {"w": [3]}},
        events=7,
        collectives={"all-reduce": 2},
        last_step={"all-reduce": (1, 100)},
        held={"parameters, device": 10**6},
        planned={"parameters, device": 10**6},
        parameter_bytes=10**6,
        **fields,
    )
    return [
        RankRecord(
            rank,
            models=[replace(model, data_rank=rank, batches=[rank, 10 + rank])],
            is_finished=True,
        )
        for rank in range(3)
    ]


def changed(records: list[RankRecord], rank: int, **fields: Any) -> list[RankRecord]:
    records[rank].models[0] = replace(records[rank].models[0], **fields)
    return records


@pytest.mark.parametrize(
    ("change", "name", "status", "text"),
    [
        ({"steps": 1}, "steps", "failed", "rank 0: 2 of 2, rank 1: 2 of 2, rank 2: 1 of 2"),
        ({"events": 8}, "collectives", "failed", "different collectives on rank 2"),
        ({"held": {"parameters, device": 2 * 10**6}}, "memory", "failed", "rank 2 has 2.00 MB of parameters, device"),
        ({"values": {"before step 2": {"w": [0]}}}, "replicas", "failed", "'w' differs before step 2 on rank 2"),
        ({"batches": [0, 1]}, "data", "warning", "ranks 0, 2 got the same batch in 1 of 2 forwards"),
        ({"not_finite": ["'w' before step 2"]}, "finite", "failed", "rank 2: 'w' before step 2 is not finite"),
        ({"tensor_rank": 1, "data_rank": 0}, "data", "failed", "ranks 0 and 2 compute one model together"),
    ],
)
def test_a_difference_of_one_rank_is_named(change: dict[str, Any], name: str, status: str, text: str) -> None:
    found = {check.name: check for check in run_checks(changed(three(), 2, **change), 3, 2)}
    assert found[name].status == status and text in found[name].text, found[name]


def test_equal_records_pass() -> None:
    assert {check.status for check in run_checks(three(), 3, 2)} == {"passed"}


def test_checks_of_several_models_are_shown_apart() -> None:
    records = three()
    for record in records:
        record.models *= 2
    text = command.render_text(command.RehearsalOutcome("train.py", 3, 0, records, run_checks(records, 3, 2)))
    assert "passed      collectives, Net 1  the same order on all 3 ranks" in text
    assert "passed      data, Net 2         different batches" in text
    assert "held on ranks 0, 1, 2: parameters 1.00 MB, parameters 1.00 MB, peak 0 B" in text


def test_values_that_no_rank_could_read_are_not_checked() -> None:
    records = three()
    for rank in range(3):
        changed(records, rank, values={"before step 1": {}}, has_read=False, is_offloaded=True)
    found = {check.name: check.status for check in run_checks(records, 3, 2)}
    assert found["replicas"] == found["finite"] == "not checked"


def test_a_rank_without_a_record_is_named() -> None:
    check: RehearsalCheck = run_checks(three()[:2], 3, 2)[0]
    assert check.status == "failed" and "the run ended before zeroshard.shard() had returned on rank 2" in check.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.complex64])
def test_a_checksum_sees_every_element_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(23).remainder(2).to(dtype)
    for shape in (slice(None), slice(1, None)):  # also where a 16-bit tensor is not aligned to words
        part = values[shape]
        assert checksum(part) == checksum(part.clone())
        for index in range(len(part)):
            other = part.clone()
            other[index] = 1 - other[index].to(torch.int32) if dtype is not torch.complex64 else 1j
            assert checksum(other) != checksum(part)
