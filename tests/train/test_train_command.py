"""`zeroshard train` as a user runs it: whole processes, their output, their files, and how they end."""

from __future__ import annotations

import contextlib
import gzip
import io
import ipaddress
import json
import os
import pickle
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import RanksFailed, run_processes
from safetensors.torch import load_file
from test_train_page import CHARTS, Dom

from zeroshard.checkpoint import CheckpointReader
from zeroshard.cli.main import main
from zeroshard.train.commands.train import read_options
from zeroshard.train.data.corpus import shakespeare, train_tokenizer
from zeroshard.train.rank import STOP_SIGNALS, RankInfo, StopRequest
from zeroshard.train.run_directory import checkpoint_step, complete_checkpoints
from zeroshard.train.summary import dry_run
from zeroshard.train.trainer import Trainer
from zeroshard.train.training_setup import prepare_training

STEPS = 40
SMALL = (
    "--plain --layers 2 --width 32 --sequence 16 --batch 12 --warmup 5 --eval-sequences 6 --log-every 10 "
    "--sample-tokens 8 --device cpu"
).split()
SHORT_TEXT = ["--data", str(Path(__file__).parents[2] / "LICENSE")]  # soon encoded
LIMIT = 120  # seconds a command may take: a hang is a failure, not a wait


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zeroshard", *map(str, arguments)]


def environment(**extra: str) -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **extra}


def run(*arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=LIMIT, env=environment(**extra), check=False
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command without ranks, called here: a program would import torch."""
    exit_message = ""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as end:  # the interpreter prints what is not a number, and ends with 1
        status, exit_message = (end.code, "") if isinstance(end.code, int) else (1, str(end.code))
    output, errors = capsys.readouterr()
    return status, output, errors + exit_message


def train(out: Path, *arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    return run("train", *SMALL, "--out", out, *arguments, **extra)


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def held_out(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


class Running:
    """A run that is meant to be disturbed."""

    def __init__(self, out: Path, *arguments: object) -> None:
        self.out = out
        self.process = subprocess.Popen(
            command("train", *SMALL, "--out", out, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )

    def reach(self, step: int) -> None:
        """Wait until a step is done."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self.process.poll() is None:
            if (self.out / "metrics.jsonl").exists() and f'"step": {step},' in (self.out / "metrics.jsonl").read_text():
                return
            time.sleep(0.01)
        self.process.kill()
        raise AssertionError(f"step {step} was not reached: {self.process.communicate()[0]}")

    def workers(self) -> dict[int, int]:
        """Process ids of the ranks."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"PPid:\t{self.process.pid}\n" in (path / "status").read_text():
                    variables = (path / "environ").read_bytes().split(b"\0")
                    ranks = [v.partition(b"=")[2] for v in variables if v.startswith(b"RANK=")]
                    found.update({int(rank): int(path.name) for rank in ranks})
            except OSError:  # it ended meanwhile
                continue
        return found

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, output


def trained(rank: int, arguments: list[str]) -> None:
    """Be one rank of a job, in a process that has everything imported already."""
    world = RankInfo(rank, dist.get_world_size(), torch.device("cpu"), "gloo")
    never = SimpleNamespace(signal=None)  # handlers of signals would outlive the test
    Trainer(prepare_training(read_options(["--plain", *arguments]), world), never).run()


def kept_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint."""
    with CheckpointReader(checkpoint) as contents:
        return {name: contents.read_tensor(f"model/{name}") for name in contents.index.tensors_of_kind("model")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that nothing disturbs, with evaluations and checkpoints on its way."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, train(out, *SHORT_TEXT, "--steps", STEPS, "--eval-every", 20, "--checkpoint-every", 30)


class StopAfter:
    """A stop request that arrives during one of the steps, counted from 1."""

    def __init__(self, step: int) -> None:
        self._steps_left = step

    @property
    def signal(self) -> int | None:
        """The signal; read once per step."""
        self._steps_left -= 1
        return signal.SIGTERM if self._steps_left <= 0 else None


def shown(rank: int, arguments: list[str], stop_after: int) -> str:
    """Be one rank of a job that is stopped after some steps; return its output."""
    world = RankInfo(rank, dist.get_world_size(), torch.device("cpu"), "gloo")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        options = read_options(["--plain", *arguments])
        Trainer(prepare_training(options, world), cast("StopRequest", StopAfter(stop_after))).run()
    return output.getvalue()


# ------------------------------------------------------------------------------------------------ what a run leaves


def test_a_run_learns_and_says_so_in_plain_lines(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = whole
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    assert "GPT, 2 layers, 4 heads, width 32" in done.stdout
    assert "2 on cpu over gloo" in done.stdout and "stage 3, fp32" in done.stdout
    shown = [int(step) for step in re.findall(r"^step +(\d+)/40  loss", done.stdout, re.M)]
    assert shown == [1, 10, 20, 30, 40]  # one rank's lines: the other is quiet
    assert "sample after" in done.stdout
    assert held_out(out)[40] < held_out(out)[0] - 0.5


def test_a_run_leaves_everything_there_is_to_use(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = whole
    assert sorted(losses(out)) == list(range(1, STEPS + 1))
    assert sorted(held_out(out)) == [0, 20, 40]
    found = record(out)
    assert found["outcome"] == "finished"
    assert [set(rank) >= {"parameters", "optimizer states", "total"} for rank in found["memory_by_rank"]] == [
        True,
        True,
    ]
    over_step = found["memory_over_step"]
    assert any(moment["bytes_by_kind"].get("gathered") for moment in over_step["moments"])
    assert [phase["name"] for phase in over_step["phases"]] == ["forward", "backward", "step"]
    assert found["samples"][0]["text"]
    assert [path.name for path in complete_checkpoints(out / "checkpoints")] == ["step-000030", "step-000040"]
    assert 50_000 < (out / "report.html").stat().st_size < 400_000


def test_memory_and_traffic_are_as_promised(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = whole
    found = record(out)
    for kind, plain in found["ddp_state_bytes"].items():
        for rank in found["memory_by_rank"]:
            held = rank[kind]["peak_bytes"] if kind == "gradients" else rank[kind]["now_bytes"] if plain else 0
            assert held == pytest.approx(plain / 2, rel=0.02)  # alignment of a model this small
    moved = sum(traffic["bytes"] for traffic in found["collectives_per_step"].values())
    assert moved == pytest.approx(3 * 4 * found["model"]["parameters"], rel=0.02)  # the ZeRO paper's 3Ψ
    assert moved == pytest.approx(sum(found["needed_bytes_per_step"].values()), rel=0.002)  # with the alignment


def test_the_report_of_the_run_is_whole(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = whole
    assert "Not recorded" not in Dom((out / "report.html").read_text(encoding="utf-8")).text()
    assert {path.stem for path in (out / "charts").iterdir()} == CHARTS


def test_the_trained_model_is_used_without_ranks(
    whole: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = whole
    status, said, errors = call(capsys, "generate", out, "--prompt", "ROMEO:", "--tokens", 8)
    assert status == 0, errors
    assert said.startswith("ROMEO:") and len(said) > len("ROMEO:\n")
    exported = load_file(out / "model" / "model.safetensors")
    kept = kept_weights(out / "checkpoints" / "step-000040")
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


# ------------------------------------------------------------------------------------------------ ending and going on


def profiled(out: Path) -> dict[str, tuple[list[str], int]]:
    """The steps and the number of forwards of the model that each trace of a run shows, by its name."""
    found = {}
    for path in sorted(out.glob("traces/*")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
        steps = [name.partition("#")[2] for name in names if name.startswith("ProfilerStep#")]
        found[path.name] = steps, names.count("zeroshard: forward")
    return found


def test_profile_writes_traces_of_the_chosen_steps_and_says_which(tmp_path: Path) -> None:
    out, never = tmp_path / "run", 1000
    small = [*SMALL, *SHORT_TEXT, "--eval-every", "0", "--sample-tokens", "0", "--out", str(out)]
    first = run_processes(2, shown, [*small, "--profile", "--steps", "5", "--accumulate", "2"], never)
    assert re.search(r"^profile +steps 4 to 5$", first[0], re.M)
    assert f"profile of steps 4 to 5: open {out}/traces/step-000004-rank*.json.gz in" in first[0]
    assert profiled(out) == {f"step-000004-rank{rank}.json.gz": (["4", "5"], 4) for rank in range(2)}
    assert record(out)["memory_over_step"]["phases"]  # the memory of the third step, as without --profile

    resumed = ["--out", str(out), "--resume", "--steps"]
    assert "\nprofile" not in run_processes(2, shown, [*resumed, "6"], never)[0]  # it is no option of the run
    options = ["--profile", "--profile-steps", "4", "4", "--log-every", "1"]
    assert "profile of steps 10 to 10" in run_processes(2, shown, [*resumed, "12", *options], never)[0]
    assert profiled(out)["step-000010-rank1.json.gz"] == (["10"], 2)
    assert "no step: the run ends before step 16" in run_processes(2, shown, [*resumed, "14", "--profile"], never)[0]
    assert len(profiled(out)) == 4


@pytest.mark.parametrize(
    ("stop_after", "told"), [(2, "no step was profiled: the run stopped before step 4"), (4, "profile of steps 4 to 4")]
)
def test_a_run_that_is_stopped_writes_what_it_has_profiled(stop_after: int, told: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [*SMALL, *SHORT_TEXT, "--eval-every", "0", "--out", str(out), "--profile", "--steps", "9"]
    assert told in run_processes(2, shown, arguments, stop_after)[0]
    assert list(profiled(out).values()) == ([(["4"], 1)] * 2 if stop_after == 4 else [])


def listeners(pids: Iterable[int]) -> dict[str, str]:
    """The addresses, as the kernel writes them, on which processes listen, by their sockets' inodes."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:  # it was closed meanwhile
                continue
    found = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found[fields[9]] = fields[1].partition(":")[0]
    return found


def is_loopback(address: str) -> bool:
    """Whether the kernel's form of an address, words of four bytes turned round, is in 127.0.0.0/8 or is ::1."""
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    parsed = ipaddress.ip_address(b"".join(words))
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run whose second rank was killed: its directory and ranks, where they listened, how it ended, what it said."""
    out = tmp_path_factory.mktemp("killed") / "run"
    running = Running(out, *SHORT_TEXT, "--ranks", 2, "--steps", STEPS, "--eval-every", 0, "--checkpoint-every", 10)
    running.reach(14)
    ranks = running.workers()
    addresses = {pid: list(listeners([pid]).values()) for pid in (running.process.pid, *ranks.values())}
    arguments = Path(f"/proc/{ranks[0]}/cmdline").read_text().split("\0")
    variables = Path(f"/proc/{ranks[0]}/environ").read_text()
    directory = Path(arguments[-2]).stat()
    os.kill(ranks[1], signal.SIGKILL)
    status, output = running.end()
    left = running.workers()
    return SimpleNamespace(**{name: value for name, value in locals().items() if name != "tmp_path_factory"})


@pytest.mark.guarantee("Local ranks")
def test_ranks_of_one_machine_meet_where_no_other_user_gets(killed: SimpleNamespace) -> None:
    assert len(killed.ranks) == 2 and all(killed.addresses[pid] for pid in killed.ranks.values())  # gloo's
    assert all(is_loopback(address) for addresses in killed.addresses.values() for address in addresses)
    assert not killed.addresses[killed.running.process.pid]  # no store that another program could register in
    assert "MASTER_PORT=" not in killed.variables
    assert killed.directory.st_mode & 0o777 == 0o700 and killed.directory.st_uid == os.getuid()


def trained_on_data(rank: int, arguments: list[str]) -> None:
    """Be one rank; nothing that another one sends is unpickled."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank unpickles what it gets: that may be code of whoever reaches its port")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "loads", refuse)
        patch.setattr(dist.distributed_c10d, "_unpickler", refuse)
        trained(rank, arguments)


@pytest.mark.guarantee("Local ranks")
def test_ranks_send_each_other_data_and_no_code(tmp_path: Path) -> None:
    options = [*SMALL[1:], *SHORT_TEXT, "--out", str(tmp_path), "--eval-every", "0", "--optimizer", "muon"]
    run_processes(2, trained_on_data, [*options, "--steps", "5"])
    run_processes(2, trained_on_data, ["--out", str(tmp_path), "--resume", "--steps", "6"])
    assert len(losses(tmp_path)) == 6


def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    running = Running(tmp_path, *SHORT_TEXT, "--ranks", 1, "--steps", 100_000, "--eval-every", 0)
    running.reach(2)
    (rank,) = running.workers().values()
    pidfd = os.pidfd_open(rank)
    running.process.kill()
    try:
        assert select.select([pidfd], [], [], LIMIT)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        running.end()
    assert run("train", "--resume", "--out", tmp_path, "--steps", 1).returncode == 0  # nothing holds its lock


def test_a_killed_rank_ends_the_run_and_resuming_repeats_the_rest_bit_for_bit(
    whole: tuple[Path, subprocess.CompletedProcess[str]], killed: SimpleNamespace
) -> None:
    reference, _ = whole
    assert killed.status == 1
    assert "rank 1 was killed by SIGKILL" in killed.output
    assert "Traceback" not in killed.output  # the other rank's complaint is no news
    assert not killed.left

    last = complete_checkpoints(killed.out / "checkpoints")[-1]
    assert 10 <= checkpoint_step(last) < STEPS
    run_processes(2, trained, ["--out", str(killed.out), "--resume"])  # all options are the run's own
    assert losses(killed.out) == losses(reference)  # one with evaluations, one without: they disturb nothing
    assert held_out(killed.out)[STEPS] == held_out(reference)[STEPS]


def test_ctrl_c_ends_with_a_checkpoint_that_goes_on_with_other_ranks_and_stage(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    reference, _ = whole
    running = Running(tmp_path / "run", *SHORT_TEXT, "--steps", STEPS, "--eval-every", 0)
    running.reach(7)
    running.process.send_signal(signal.SIGINT)
    status, output = running.end()
    assert status == 128 + signal.SIGINT
    assert "Traceback" not in output and "interrupted after step" in output
    assert record(tmp_path / "run")["outcome"] == "interrupted"
    assert (tmp_path / "run" / "report.html").exists()
    (last,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert int(last.name.removeprefix("step-")) == max(losses(tmp_path / "run"))

    run_processes(3, trained, ["--out", str(tmp_path / "run"), "--resume", "--stage", "1"])
    assert record(tmp_path / "run")["ranks"] == 3 and record(tmp_path / "run")["stage"] == 1
    expected = losses(reference)
    for step, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(expected[step], rel=1e-3), step  # sums over other ranks round otherwise


def test_muon_is_saved_and_goes_on_with_other_ranks_and_stage(tmp_path: Path) -> None:
    options = [*SMALL[1:], *SHORT_TEXT, "--optimizer", "muon", "--muon-lr", "0.01", "--steps", "8", "--keep", "3"]
    options += ["--eval-every", "0", "--checkpoint-every", "4", "--sample-tokens", "0"]
    whole, same, other = (tmp_path / name for name in ("whole", "same", "other"))
    (output, _) = run_processes(2, shown, [*options, "--out", str(whole)], 100)
    assert re.search(r"\nmuon +flat slices: 21 parameters, ", output)
    assert "orthogonalized each by one of 2 ranks: 8 parameters, 24,576 elements: the fullest has 1.00 ×" in output
    for out in (same, other):
        shutil.copytree(whole, out)
        shutil.rmtree(out / "checkpoints/step-000008")
    run_processes(2, trained, ["--out", str(same), "--resume"])
    run_processes(3, trained, ["--out", str(other), "--resume", "--stage", "1"])
    expected, again, elsewhere = (kept_weights(out / "checkpoints/step-000008") for out in (whole, same, other))
    assert all(torch.equal(value, again[name]) for name, value in expected.items())
    assert losses(same) == losses(whole)
    assert losses(other)[8] == pytest.approx(losses(whole)[8], rel=1e-2)  # Muon orthogonalizes in bf16
    for name, value in expected.items():
        assert torch.linalg.vector_norm(elsewhere[name] - value) < 0.03 * torch.linalg.vector_norm(value), name
    with pytest.raises(RanksFailed, match="was saved with the optimizer MuonWithAdamW, expected AdamW"):
        run_processes(1, trained, ["--out", str(same), "--resume", "--optimizer", "adamw", "--muon-lr", "None"])


def test_a_loss_that_is_not_a_number_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = [*SMALL, *SHORT_TEXT, "--steps", "3", "--checkpoint-every", "1", "--keep", "2"]
    run_processes(2, trained, [*options, "--out", str(out)])
    with pytest.raises(RanksFailed) as stopped:
        run_processes(2, trained, f"--out {out} --resume --steps 20 --lr 1e30 --warmup 0".split())
    last = complete_checkpoints(out / "checkpoints")[-1]
    assert last.name == "step-000003" and len(stopped.value.accounts) == 2
    for message in stopped.value.accounts.values():
        assert "\nzeroshard.train.options.AllRanksError: the loss is nan at step 5" in message, message
        assert "--lr" in message and str(last) in message
    assert (out / "checkpoints" / "diverged" / "step-000004").exists()  # whose weights gave the NaN
    assert (out / "checkpoints" / "latest").read_text().strip() == "step-000003"
    assert record(out)["outcome"] == "stopped" and "nan at step 5" in record(out)["message"]
    assert "nan at step 5" in (out / "report.html").read_text()
    run_processes(2, trained, ["--out", str(out), "--resume", "--steps", "5", "--lr", "1e-3"])
    assert sorted(losses(out)) == [1, 2, 3, 4, 5]


def test_a_rank_that_fails_alone_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    ids = np.zeros(12 * 16 + 1, dtype=np.uint16)  # twelve windows, all in every batch: one rank meets the bad one
    ids[100] = 5000
    np.save(tmp_path / "tokens.npy", ids)
    np.save(tmp_path / "good.npy", np.zeros_like(ids))
    done = train(tmp_path / "run", "--data", tmp_path / "tokens.npy", "--validation", tmp_path / "good.npy")
    assert done.returncode == 1
    assert "5000" in done.stderr and "tokens.npy" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------ ways to start it


def test_under_torchrun_it_joins_and_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_processes(1, trained, [*SMALL, *SHORT_TEXT, "--steps", "2", "--eval-every", "0", "--out", str(out)])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*launcher, "zeroshard", "train", "--out", str(out), "--resume", "--steps", "5"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "2 on cpu over gloo" in done.stdout
    assert "from step 2" in done.stdout and sorted(losses(out)) == list(range(1, 6))


def be_task(rank: int, port: str, arguments: list[str]) -> str:
    """Be one task of srun, in a process that has everything imported already; return its output."""
    dist.destroy_process_group()  # the harness's
    del os.environ["MASTER_ADDR"]
    os.environ |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7"}
    os.environ |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": port}
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as end:
            main(["train", *arguments])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert end.value.code == 0
    return output.getvalue()


def test_under_srun_it_joins(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = [*SMALL, *SHORT_TEXT, "--out", str(tmp_path / "run"), "--steps", "3", "--eval-every", "0"]
    first, second = run_processes(2, be_task, port, arguments)
    assert "2 on cpu over gloo" in first
    assert second == ""  # ranks above 0 are quiet


def test_on_a_terminal_there_is_a_live_view(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    arguments = [argument for argument in [*SMALL, *SHORT_TEXT] if argument != "--plain"]
    process = subprocess.Popen(
        command("train", *arguments, "--ranks", 1, "--steps", 5, "--eval-every", 0, "--out", tmp_path / "run"),
        stdout=follower,
        stderr=follower,
        env=environment(TERM="xterm-256color"),
    )
    os.close(follower)
    seen = b""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                seen += os.read(leader, 65536)
            except OSError:  # the terminal's other end is closed
                break
    assert process.wait(timeout=LIMIT) == 0
    text = seen.decode()
    assert "\x1b[" in text and "5/5" in text and "tokens/s" in text and "optimizer states" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is back


# ------------------------------------------------------------------------------------------------ Hugging Face models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    train_tokenizer([shakespeare()[:20_000]], 300).save(str(directory / "tokenizer.json"))
    return directory


BRIEF = [*SHORT_TEXT, *"--batch 4 --eval-sequences 4 --sample-tokens 2 --warmup 0".split()]


def test_a_hugging_face_model_is_trained_from_its_directory_and_saved_as_it_came(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    pytest.importorskip("tensorboard")
    run_processes(
        2, trained, [*BRIEF, "--model", str(llama), "--out", str(out), "--steps", "4", "--tracker", "tensorboard"]
    )
    assert len(list((out / "tensorboard").glob("events*"))) == 1  # of rank 0
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out / "model", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    kept, before = kept_weights(out / "checkpoints/step-000004"), load_file(llama / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, kept[name])
        assert not torch.equal(parameter, before[name])


def test_lora_trains_adapters_that_peft_loads_and_that_resume_bit_for_bit(llama: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*BRIEF, "--model", str(llama), "--lora", "--checkpoint-every", "3", "--steps", "6"]
    run_processes(2, trained, [*options, "--out", str(whole)])
    run_processes(2, trained, [*options, "--out", str(parts)])
    shutil.rmtree(parts / "checkpoints/step-000006")
    run_processes(2, trained, ["--out", str(parts), "--resume"])
    assert losses(parts) == losses(whole)
    adapted = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(llama), parts / "model")
    assert all(p.abs().sum() > 0 for name, p in adapted.named_parameters() if "lora_B" in name)
    kept = kept_weights(parts / "checkpoints/step-000006")
    base = load_file(llama / "model.safetensors")
    assert kept and all("lora" in name for name in kept)  # the base is where it was
    for name, parameter in adapted.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(parameter, kept[name] if name in kept else base[plain])


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stagee", "2"], ["--stagee", "--stage"]),
        (["--stage", "4"], ["invalid choice '4'", "'0', '1', '2'"]),
        (["--lr", "-1"], ["lr must be positive (got -1"]),
        (["--precision", "int8"], ["invalid choice 'int8'", "bf16"]),
        (["--betas", "0.9"], ["--betas"]),
        (["--profile", "--profile-steps", "1", "3"], ["at least 4 because earlier ones warm up", "(got 1 and 3)"]),
        (["--profile", "--profile-steps", "4", "99"], ["at most 9 later (got 4 and 99)"]),
        (["--profile-steps", "5", "7"], ["profile_steps has no effect without profile"]),
        (["--config", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["--timeout", "1e30"], ["timeout must be at most 1e+09 (got 1e+30)"]),
        (["--seed", str(2**70)], ["seed must be at most 9.22337e+18"]),
        (["--lr", "inf"], ["lr must be finite (got inf)"]),
        (["--model", ""], ["model is empty: pass a value, or omit the option"]),
        (["--out", ""], ["out is empty"]),
        (["--offload", "disk"], ["--offload-directory"]),
        (["--auto", "--memory", "1kB", "--dry-run"], ["memory must be more than the", "got 1000 bytes"]),
        (["--width", "1000000000", "--dry-run"], ["a GPT has at most 4,096 layers and 100,000,000,000,000 parameters"]),
        (["--vocabulary", "1000000000000", "--dry-run"], ["parameters, got 4 and 256,"]),
        (["--ranks", "100000"], ["--ranks 100000 would start as many processes on this machine: pass at most "]),
        (["--resume"], ["no run under runs/", "--out"]),
    ],
)
def test_wrong_options_are_refused_with_what_was_meant(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status, said, errors = call(capsys, "train", *arguments)
    assert status in (1, 2)
    told = re.sub(r"[│\s]+", " ", said + errors)
    assert all(word in told for word in words), told
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "stagee = 2", ["a.toml", "--stagee", "--stage"]),
        ("a.toml", "stage = 'three'", ["a.toml", "invalid choice 'three'"]),
        ("a.toml", "stage == 2", ["a.toml is not TOML"]),
        ("a.json", "[1]", ["a.json must be a flat table"]),
        ("a.json", "[" * 100_000, ["a.json is not JSON"]),
        ("a.toml", "stage = " + "[" * 100_000, ["a.toml is not TOML"]),
        ("a.toml", "[training]\nlr = 1", ["a.toml must be a flat table"]),
    ],
)
def test_wrong_files_of_options_are_refused(
    name: str, text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    status, said, errors = call(capsys, "train", "--config", tmp_path / name)
    assert status in (1, 2)
    told = re.sub(r"[│\s]+", " ", said + errors)
    assert all(word in told for word in words), told


def test_the_command_line_counts_more_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('stage = 2\nmicro_batch = 4\nrecompute = true\nmodel = "gpt2"\n')
    told = dry_run(read_options(["--config", str(tmp_path / "a.toml"), "--stage", "1"]), ranks=8)
    assert "stage 1 ←" in told
    assert "32 sequences × 1024 tokens: 4 per rank and backward, 1 backward per step" in told
    assert "GPT, 12 layers" in told


def test_a_batch_that_cannot_be_divided_and_missing_data_are_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed, match="a batch of 7 sequences is not 2 per rank and backward × 2 ranks"):
        run_processes(2, trained, [*SMALL, "--out", str(tmp_path / "odd"), "--batch", "7", "--micro-batch", "2"])
    assert not (tmp_path / "odd").exists()
    missing = ["--out", tmp_path / "missing", "--data", tmp_path / "nowhere.txt"]
    status, _, errors = call(capsys, "train", *SMALL, *missing)
    assert status == 1
    assert "nowhere.txt" in errors and "Traceback" not in errors and not (tmp_path / "missing").exists()


def test_a_directory_that_holds_a_run_is_not_written_over(
    whole: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = whole
    before = (out / "metrics.jsonl").read_bytes()
    status, _, errors = call(capsys, "train", *SMALL, "--out", out, "--steps", 3)
    assert status == 1
    assert "already has a run: add --resume" in errors
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = whole
    before = (out / "config.json").read_bytes()
    with pytest.raises(RanksFailed) as refused:
        run_processes(2, trained, ["--out", str(out), "--resume", "--width", "64"])
    for told in refused.value.accounts.values():
        assert re.search(r"^zeroshard\.train\.options\.TrainingError: .* does not match the model", told, re.M), told
        assert "down.weight has shape [32, 128], expected [64, 256]" in told
    assert len(refused.value.accounts) == 2
    assert (out / "config.json").read_bytes() == before


def test_help_is_quick_because_torch_is_not_imported() -> None:
    code = "import sys; from zeroshard.cli.main import main\nfor command in ('train', 'rehearse'):\n"
    code += "    try: main([command, '--help'])\n    except SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert "--micro-batch" in done.stdout and "bandwidth, step time or overlap" in done.stdout


def test_an_unknown_command_is_refused_with_the_nearest() -> None:
    done = run("trian")
    assert done.returncode == 2
    assert "did you mean 'train'?" in done.stderr


def test_a_dry_run_refuses_a_mesh_that_the_run_would_refuse() -> None:
    options = "--replicas 4 --partition hierarchical --device cpu --stage"
    with pytest.raises(ValueError, match="over the inner axis of the mesh, which has one rank: use stage=2"):
        dry_run(read_options([*options.split(), "3"]), ranks=4)
    assert "stage 2 ←" in dry_run(read_options([*options.split(), "2"]), ranks=4)
    assert "stage 3 ←" in dry_run(read_options([*options.split(), "3"]), ranks=8)


def test_dry_run_prints_the_memory_of_the_papers_models() -> None:
    told = dry_run(read_options("--model paper-100b --precision bf16 --batch 800".split()), ranks=400)
    assert "101,509,193,728 parameters" in told
    assert re.search(r"^states +1\.62 TB +409\.\d+ GB +206\.\d+ GB +3\.55 GB$", told, re.M)
