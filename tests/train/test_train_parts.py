"""The small parts of the main job: batches divided, rates, ranks found, failures told."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_processes, run_threads
from torch import nn

from zeroshard.models import PRESETS
from zeroshard.train.commands.train import read_options
from zeroshard.train.data.token_loader import TokenLoader
from zeroshard.train.generation import generate_tokens
from zeroshard.train.launch import check_options, describe_first_failure, launch
from zeroshard.train.metrics import StepStatsReducer
from zeroshard.train.options import (
    Batching,
    DataOptions,
    ModelOptions,
    RunOptions,
    ShardOptions,
    StepOptions,
    TrainingError,
    TrainOptions,
    describe_bug,
)
from zeroshard.train.rank import (
    ERROR_DIR_ENV,
    STOP_SIGNALS,
    RankInfo,
    first_slurm_host,
    launcher_environment,
    report_failure,
)
from zeroshard.train.run_directory import RunDirectory, create_run_directory, newest_checkpoint, newest_run
from zeroshard.train.trainer import evaluate, learning_rate

# ------------------------------------------------------------------------------------------------ batches and rates


@pytest.mark.parametrize(
    ("ranks", "given", "wanted"),
    [
        (2, (None, None, None), (8, 4, 1)),
        (3, (None, None, None), (6, 2, 1)),
        (64, (None, None, None), (64, 1, 1)),
        (4, (32, None, None), (32, 8, 1)),
        (4, (32, 2, None), (32, 2, 4)),
        (4, (32, None, 4), (32, 2, 4)),
        (4, (None, 2, 3), (24, 2, 3)),
        (4, (None, 2, None), (8, 2, 1)),
        (4, (None, None, 2), (8, 1, 2)),
    ],
)
def test_any_two_of_batch_micro_batch_and_accumulation_give_the_third(ranks, given, wanted) -> None:
    batching = Batching.resolve(ranks, *given)
    assert (batching.batch, batching.micro, batching.accumulate) == wanted


@given(st.integers(1, 64), *[st.none() | st.integers(1, 64)] * 3)
def test_a_batch_is_divided_exactly_or_refused(ranks, batch, micro, accumulate) -> None:
    try:
        batching = Batching.resolve(ranks, batch, micro, accumulate)
    except ValueError as error:
        assert "omit or change one of batch, micro-batch and accumulate" in str(error)
        assert batch is not None
        return
    assert batching.batch == batching.micro * ranks * batching.accumulate
    given = (batch, micro, accumulate)
    assert all(wanted is None or ours == wanted for ours, wanted in zip(vars(batching).values(), given, strict=True))


def test_the_rate_rises_and_falls_without_a_jump() -> None:
    options = StepOptions(steps=100, warmup=10, lr=2.0)
    rates = [learning_rate(step, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.2, rel=0.01)
    assert learning_rate(0, StepOptions(warmup=0, lr=1.0)) == 1.0


# ---------------------------------------------------------------------------------------------- options and directories


def test_options_have_one_name_each_and_come_back_flat() -> None:
    flat = TrainOptions().to_flat_dict()
    groups = [ModelOptions(), DataOptions(), StepOptions(), TrainOptions().sharding, TrainOptions().run]
    assert len(flat) == sum(len(vars(group)) for group in groups)


def test_a_resumed_run_has_its_own_options_under_those_of_file_and_command_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.write_config({"stage": 1, "steps": 7, "prompt": "-hi", "lr": 0.5, "data": ["a b", "c"], "recompute": True})
    (tmp_path / "c.toml").write_text(f'out = "{run.path}"\nlr = 0.25\nsteps = 8')
    options = read_options(["--config", str(tmp_path / "c.toml"), "--resume", "--steps", "9"])
    assert (options.sharding.stage, options.training.lr, options.training.steps) == (1, 0.25, 9)
    assert options.run.prompt == "-hi" and options.run.out == str(run.path)
    assert options.data.data == ("a b", "c") and options.model.recompute


@pytest.mark.parametrize("source", ["file", "resumed run"])
@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"optimizer": "muon"}, ["--muon-lr", "0.02"]),
        ({"muon_lr": 0.02}, ["--optimizer", "muon"]),
        ({"lr": 0.1}, ["--min-lr", "0.05"]),
        ({"local_steps": 4, "replicas": 2}, ["--outer-lr", "0.7"]),
        ({"offload": "disk"}, ["--offload-directory", "disk"]),
        ({"stage": 1, "gather_dtype": "int8"}, ["--stage", "3"]),
        ({"profile_steps": [5, 6]}, ["--profile"]),
    ],
)
def test_options_that_belong_together_may_come_from_two_sources(
    source: str, given: dict[str, Any], flags: list[str], tmp_path: Path
) -> None:
    if source == "file":
        (tmp_path / "options.json").write_text(json.dumps(given))
        sources = ["--config", str(tmp_path / "options.json")]
    else:
        RunDirectory(tmp_path).write_config(given)
        sources = ["--out", str(tmp_path), "--resume"]
    read_options([*sources, *flags])
    with pytest.raises(ValueError):  # one of the two does not fit alone
        for alone in (flags, sources):
            read_options(alone)


@pytest.mark.parametrize(
    ("flags", "and_then"),
    [
        ("--lora-rank 4", "--lora"),
        ("--lora-alpha 32", "--lora"),
        ("--lora-targets q_proj v_proj", "--lora"),
        ("--muon-lr 0.1", "--optimizer muon"),
        ("--outer-lr 0.7", "--local-steps 4 --replicas 2"),
        ("--outer-momentum 0.5", "--outer-lr 0.7 --local-steps 4 --replicas 2"),
        ("--profile-steps 5 7", "--profile"),
        ("--holdout 0.2 --validation a.txt", ""),
        ("--partition full", "--replicas 2"),
        ("--offload-fraction 0.5", "--offload host"),
        ("--offload-directory .", "--offload disk"),
        ("--offload-directory . --offload host", "--offload disk"),
        ("--no-cast-on-gather --stage 2", "--stage 3"),
        ("--prompt To --sample-tokens 0", "--sample-tokens 9"),
    ],
)
def test_options_without_effect_are_refused(flags: str, and_then: str) -> None:
    name = flags.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    with pytest.raises(ValueError, match=rf"{name} has no effect with|{name} has no effect below"):
        read_options(flags.split())
    if and_then:
        read_options([*flags.split(), *and_then.split()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 4}, "set --replicas to their number, or use stage 0"),
        ({"outer_lr": math.nan, "local_steps": 4, "replicas": 2}, r"outer_lr must be positive \(got nan\)"),
    ],
)
def test_local_steps_without_replicas_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(sharding=ShardOptions(**options)).check()


def test_the_outer_optimizer_is_sgd_with_nesterov_momentum() -> None:
    make = ShardOptions(local_steps=4, stage=0, outer_lr=0.7).outer_optimizer
    assert make is not None
    outer = make([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(outer, torch.optim.SGD)
    assert (outer.defaults["lr"], outer.defaults["momentum"], outer.defaults["nesterov"]) == (0.7, 0.9, True)
    assert ShardOptions(local_steps=4, stage=0).outer_optimizer is None


@pytest.mark.parametrize(("model", "name"), [("tiny", "tiny"), ("a/llama/", "llama"), ("a/llama/config.json", "llama")])
def test_a_run_is_named_after_its_model(model: str, name: str) -> None:
    assert TrainOptions(model=ModelOptions(model=model)).name == name


def test_presets_have_the_papers_sizes() -> None:
    for name, preset in PRESETS.items():
        if name.startswith("paper-"):
            billions = float(name.removeprefix("paper-").removesuffix("b"))
            assert preset.parameters / 1e9 == pytest.approx(billions, rel=0.1)
        assert preset.width % preset.heads == 0


def test_new_runs_get_new_directories_and_the_newest_is_found(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    for name in ("tiny", "tiny-2", "tiny-3"):
        path = create_run_directory(tmp_path, "tiny")
        assert path == tmp_path / name
        assert not RunDirectory(path).has_run()  # before it is known what to run
        RunDirectory(path).write_config({"stage": 3})
    assert newest_run(tmp_path) == tmp_path / "tiny-3"
    assert RunDirectory(tmp_path / "tiny").read_config() == {"stage": 3}


# ------------------------------------------------------------------------------------------------ ranks


def test_torchruns_words_are_taken_as_they_are() -> None:
    said = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert launcher_environment({**said, "HOME": "/root"}) == said


def test_half_of_torchruns_words_are_refused() -> None:
    with pytest.raises(TrainingError, match="not MASTER_ADDR and MASTER_PORT: set all or none"):
        launcher_environment({"RANK": "0", "WORLD_SIZE": "2"})


def test_sruns_words_are_translated_and_sbatchs_are_not_a_rank() -> None:
    batch = {"SLURM_JOB_ID": "1234567", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "gpu[03-04]"}
    assert launcher_environment(batch) is None
    task = {**batch, "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    place = launcher_environment(task)
    assert place is not None
    assert (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]) == ("9", "16", "1")
    assert place["MASTER_ADDR"] == "gpu03"
    assert 20000 <= int(place["MASTER_PORT"]) < 30000
    first = launcher_environment({**task, "SLURM_PROCID": "0"}) or {}
    assert place == {**first, "RANK": "9"}  # all ranks meet at one place
    assert launcher_environment({**task, "SLURM_STEP_NUM_TASKS": "1"}) is None  # a shell on the node
    later = launcher_environment({**task, "SLURM_STEP_ID": "1"})
    assert later is not None and later["MASTER_PORT"] != place["MASTER_PORT"]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[07,09-11]-ib,m1", "n07-ib"), ("x1,n[1-2]", "x1")],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_slurm_host(hosts) == first


@pytest.mark.parametrize(
    ("error", "missed"),
    [
        ("Connection closed by peer [127.0.0.1]:4242", True),
        ("Connection reset. This is typically caused by a remote worker hanging or bugs in the application.", True),
        ("my own mistake", False),
    ],
)
def test_what_gloo_says_of_another_rank_is_not_this_ranks_error(
    error: str, missed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_DIR_ENV, str(tmp_path))
    report_failure(RuntimeError(error), rank=0)
    told = describe_first_failure(tmp_path, {0: 1, 1: -9})
    assert told.startswith("rank 1 was killed" if missed else "rank 0 failed")


def test_the_rank_that_failed_first_is_reported(tmp_path: Path) -> None:
    def tell(rank: int, moment: float, missed: bool) -> None:
        report = {"rank": rank, "time": moment, "message": f"story of {rank}", "is_peer_lost": missed}
        (tmp_path / f"{rank}.error.json").write_text(json.dumps(report))

    assert describe_first_failure(tmp_path, {3: 7}) == "rank 3 ended with status 7"
    tell(0, 20.5, missed=True)
    tell(4, 20.6, missed=True)
    assert describe_first_failure(tmp_path, {0: 1, 4: 1, 2: -15}) == "story of 0"
    assert describe_first_failure(tmp_path, {0: 1, 2: -9}) == "rank 2 was killed by SIGKILL (out of memory?)"
    tell(1, 20.7, missed=False)  # an error of its own, though others were quicker to tell
    tell(5, 20.8, missed=False)
    assert describe_first_failure(tmp_path, {0: 1, 1: 1, 2: -9}) == "story of 1"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_forwarded_to_every_rank_and_is_the_exit_status(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = number.name.removeprefix("SIG")
    rank = tmp_path / "rank"  # stands for Python: a rank that stops when asked to
    told = f"trap 'touch {tmp_path}/told.$RANK; exit {128 + number}' {name}"
    rank.write_text(f"#!/bin/sh\n{told}\ntouch {tmp_path}/up.$RANK\nwhile :; do sleep 0.05; done\n")
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("up.*"))) < 2:
            if time.monotonic() > deadline:  # the launcher has no ranks, or has ended without them
                return
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert launch(TrainOptions(), 2) == 128 + number
    finally:
        thread.join()
    assert sorted(path.name for path in tmp_path.glob("told.*")) == ["told.0", "told.1"]


def test_a_signal_to_one_rank_alone_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = tmp_path / "rank"
    rank.write_text("#!/bin/sh\nexit $((130 + 13 * RANK))\n")  # 128 + SIGINT, and what the others end with
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    assert launch(TrainOptions(), 2) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


def test_what_a_rank_says_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"rank": 0, "time": 1.0, "message": "rank 0: a file named \x1b[2J", "is_peer_lost": False}
    (tmp_path / "report").write_text(json.dumps(report))
    rank = tmp_path / "rank"
    rank.write_text(f'#!/bin/sh\ncp {tmp_path}/report "$3/0.error.json"\nexit 1\n')
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    assert launch(TrainOptions(), 1) == 1
    report_failure(RuntimeError(), 0, str(report["message"]))  # under torchrun
    assert capsys.readouterr().err == "zeroshard train: rank 0: a file named \\x1b[2J\n" * 2


def test_texts_may_have_gone_when_a_run_is_resumed(tmp_path: Path) -> None:
    options = TrainOptions(data=DataOptions(data=("gone.txt",)), run=RunOptions(out=str(tmp_path), resume=True))
    with pytest.raises(FileNotFoundError, match=r"data file gone\.txt does not exist"):
        check_options(options, 2)
    RunDirectory(tmp_path).write_config({})
    check_options(options, 2)  # the run has its own tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number \\(got 'two'\\)"),
        ({"RANK": "-1"}, "RANK must be a number"),
        ({"RANK": "2"}, "RANK must be below WORLD_SIZE, 2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be a port"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a number"),
    ],
)
def test_a_launchers_nonsense_is_refused(changes: dict[str, str], message: str) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(TrainingError, match=message):
        launcher_environment({**given, **changes})


def test_a_master_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=r"rank 0 does not answer at 127.0.0.1:1 after 0.1 s .*check MASTER_ADDR"):
        RankInfo.init("cpu", timeout=0.1)


def test_a_run_whose_checkpoints_have_gone_is_not_started_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert newest_checkpoint(run) is None  # it was stopped before it saved one
    run.write_record({"checkpoints": ["step-000040"]})
    with pytest.raises(TrainingError, match="has no checkpoint, but this run has saved step-000040"):
        newest_checkpoint(run)
    with pytest.raises(TrainingError, match="is inside the run"):
        RunDirectory(run.checkpoints_dir).check_available(resume=True)


@pytest.mark.parametrize("text", ["", '{"stage": 1', "[1]", '{"a":' * 100_000])
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|must contain)"):
        read_options(["--out", str(tmp_path), "--resume"])


def test_a_bug_is_one_line_and_keeps_its_stack_trace(tmp_path: Path) -> None:
    line = describe_bug(KeyError("lr"), tmp_path)
    (file,) = tmp_path.iterdir()
    assert line == f"KeyError: 'lr'. The stack trace is in {file}" and "KeyError" in file.read_text()


def beat(rank: int) -> list[tuple[int, float, float, bool]]:
    pulse = StepStatsReducer(torch.device("cpu"))
    seen = []
    for step in (1, 2):
        pulse.start_reduce(step, torch.tensor(float(rank + step)), torch.tensor(2.0 * step), rank == step == 1)
        seen += [(b.step, b.loss, b.grad_norm, b.has_stop_request) for b in pulse.read_ready()]
    return seen


def test_all_ranks_know_the_mean_loss_and_that_one_has_to_stop() -> None:
    assert run_processes(2, beat) == [[(1, 1.5, 2.0, True), (2, 2.5, 4.0, False)]] * 2


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 1), (3, 1), (6, 1), (4, 2)])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_an_evaluation_has_the_same_sequences_on_any_number_of_ranks(ranks: int, tensor: int, micro: int) -> None:
    """Ranks run equally many forwards, because in stage 3 each of them gathers the parameters."""
    loader = TokenLoader(np.arange(11), sequence=2, batch=1, seed=0, vocab_size=11)  # 5 windows

    def body(rank: int, sequences: int) -> list[Any]:
        forwards = 0

        def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal forwards
            forwards += 1
            return tokens.float().square().mean()

        setup: Any = SimpleNamespace(
            rank_info=RankInfo(rank, ranks, torch.device("cpu"), "gloo", tp_size=tensor),
            options=TrainOptions(run=RunOptions(eval_sequences=sequences)),
            batching=Batching(batch=ranks * micro, micro=micro, accumulate=1),
            model=nn.Identity(),
            language_model=SimpleNamespace(loss=loss),
        )
        return [evaluate(setup, loader), forwards]

    for sequences, windows in ((1, 1), (4, 4), (5, 5), (64, 5)):
        first, *others = run_threads(ranks, body, sequences)
        assert first[0] == pytest.approx(torch.arange(2.0 * windows).square().mean().item())
        assert all(other == first for other in others)


# ------------------------------------------------------------------------------------------------ samples and traffic


def test_samples_repeat_with_their_seed_keep_to_the_context_and_leave_the_generator_alone() -> None:
    lengths = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return torch.zeros(1, tokens.shape[1], 50)

    prompt = torch.tensor([[1, 2, 3]])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (generate_tokens(logits, prompt, 12, context=4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (1, 15) and torch.equal(first[:, :3], prompt)
    assert max(lengths) == 4
    assert torch.equal(before, torch.random.get_rng_state())


def test_one_run_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.lock()
    with pytest.raises(TrainingError, match=rf"in use by process {os.getpid()} on .*pass another --out"):
        second.lock()
    first.unlock()  # as the system does when the process ends
    second.lock()
    second.unlock()

    def unable(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unable)
    with pytest.warns(UserWarning, match="cannot lock .* on this file system"):
        first.lock()
