"""Checkpoints survive what happens to jobs: kills at any moment, damaged files, full disks, ranks that disagree."""

from __future__ import annotations

import copy
import errno
import functools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from crash import BIG, NUMEL, Forks, Outcome, Run, advance, disk_calls, tables
from plain import Tensors, adamw, sharded
from ranks import run_processes, run_threads
from torch import nn

import zeroshard
from zeroshard import CheckpointError
from zeroshard.checkpoint import export
from zeroshard.utils.atomic_file import write_atomic

KEEP = 2  # checkpoints
INDEX = "index.json"


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


# ------------------------------------------------------------------------------------------------ what is whole


@functools.cache
def states_at(step: int, numel: int = NUMEL) -> Tensors:
    """Every state after some steps of a plain run."""
    model, optimizer = tables(numel)
    for _ in range(step):
        advance(model, optimizer)
    return states_of(model, optimizer)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        states |= {f"{index}/{key}": value.clone() for key, value in state.items()}
    return states


def assert_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, numel: int = NUMEL) -> None:
    found, wanted = states_of(model, optimizer), states_at(step, numel)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{name} is not that of step {step}"


def assert_whole(path: Path, numel: int = NUMEL) -> int:
    """Load a checkpoint into a plain model, compare all values with those of the step it says it is of; return that."""
    model, optimizer = tables(numel)
    step: int = zeroshard.load(path, model, optimizer).extra["step"]
    assert_states(model, optimizer, step, numel)
    return step


def save_plain(path: Path, step: int, numel: int = NUMEL, keep: int | None = KEEP) -> None:
    model, optimizer = tables(numel)
    for _ in range(step):
        advance(model, optimizer)
    zeroshard.save(path, model, optimizer, extra={"step": step}, keep=keep)


def whole_ones(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if (path / INDEX).exists()) if directory.exists() else []


def strangers(checkpoint: Path) -> set[str]:
    """What a checkpoint's directory holds besides what its index names."""
    index = json.loads((checkpoint / INDEX).read_text())
    return {path.name for path in checkpoint.iterdir()} - {INDEX, *(file["name"] for file in index["files"])}


def files_under(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------- kills

SETTINGS: list[dict[str, Any]] = [
    {"stage": 3, "wait": True, "same": False},
    {"stage": 3, "wait": False, "same": False},
    {"stage": 1, "wait": True, "same": False},
    {"stage": 3, "wait": True, "same": True},
    {"stage": 1, "wait": False, "same": True},
]
WHO = ["0", "1", "both", "0, by the clock", "1, by the clock", "both, by the clock"]


@dataclass
class Trial:
    """A run that is killed, and what was found after it."""

    run: Run
    who: str
    ranks: list[Outcome] = field(default_factory=list)
    broken: str = ""  # what is wrong with what was saved
    left: str = ""  # what the next save did not clean up

    @property
    def directory(self) -> Path:
        return Path(self.run.arguments["directory"])

    def judge(self) -> None:
        """Look at what is there, save once more, and look at that."""
        numel = self.run.arguments["numel"]
        known = Path(f"{self.directory}.known")
        text = known.read_text() if known.exists() else ""  # empty where the kill came between opening and writing
        done = int(text or 0)  # the last step whose save had returned
        following = self.directory / ("same" if self.run.arguments["same"] else "step-101")
        try:
            for path in whole_ones(self.directory):
                assert_whole(path, numel)
            if done:
                assert assert_whole(self.directory, numel) >= done
                assert assert_whole(self.directory / "latest", numel) >= done
            save_plain(following, 1, numel)
            assert assert_whole(following, numel) == 1
            assert zeroshard.load(self.directory, *tables(numel)).path == following
        except (AssertionError, CheckpointError) as error:
            self.broken = f"{self.run}: {error}\n"
            return
        others = {path.name for path in self.directory.iterdir()} - {"latest", following.name}
        whole = {path.name for path in whole_ones(self.directory)}
        if others - whole or len(others) > KEEP - 1 or strangers(following):
            self.left = f"{self.run}: {others - whole or others}, {strangers(following)}\n"


@pytest.fixture(scope="module")
def calm(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
    """A run of each setting that nobody kills."""
    place = tmp_path_factory.mktemp("calm")
    trials = [
        Trial(Run("train", {"directory": str(place / str(number)), "numel": NUMEL, **settings}), "nobody")
        for number, settings in enumerate(SETTINGS)
    ]
    for trial, outcomes in zip(trials, forks.run([trial.run for trial in trials]), strict=True):
        trial.ranks = outcomes
    return trials


@pytest.fixture(scope="module")
def killed(forks: Forks, calm: list[Trial], tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
    """Runs that were killed: most by themselves at moments all over the run, some from outside by the clock."""
    draw, place = random.Random(0), tmp_path_factory.mktemp("killed")
    trials: list[Trial] = []

    def add(who: str, numel: int, arguments: dict[str, Any], **run: Any) -> None:
        settings = SETTINGS[len(trials) % len(SETTINGS)]
        directory = str(place / str(len(trials)))
        arguments = {"directory": directory, "numel": numel, "timeout": 2, **settings, **arguments}
        # Gloo, whose peer dies while they connect, tries some five times as long as its timeout.
        trials.append(Trial(Run("train", arguments, store=draw.choice(["file", "tcp"]), limit=25, **run), who))

    for who, number in ("0", 22), ("1", 10), ("both", 10):
        counting = 1 if who == "1" else 0
        moments = min(trial.ranks[counting].answer["moments"] for trial in calm)
        for part in range(number):  # the first: before the first save
            moment = 1 + int((part + draw.random() * (part > 0)) / number * moments)
            add(who, NUMEL, {"dies": who, "die_at": moment})
    seconds = max(trial.ranks[0].answer["seconds"] for trial in calm)
    for number in range(9):
        ranks = [[0], [1], [0, 1]][number % 3]
        add(WHO[3 + number % 3], BIG, {"saves": 100}, kill=ranks, after=draw.uniform(0, seconds))
    for trial, outcomes in zip(trials, forks.run([trial.run for trial in trials]), strict=True):
        trial.ranks = outcomes
        trial.judge()
    return trials


def test_runs_that_nobody_kills(calm: list[Trial]) -> None:
    for trial in calm:
        assert [rank.code for rank in trial.ranks] == [0, 0], "".join(rank.printed for rank in trial.ranks)
        checkpoints = whole_ones(trial.directory)
        assert [assert_whole(path) for path in checkpoints] == ([3] if trial.run.arguments["same"] else [2, 3])
        assert assert_whole(trial.directory) == 3
        assert not any(strangers(path) for path in checkpoints)


def test_runs_are_killed_and_every_survivor_ends_by_itself(killed: list[Trial]) -> None:
    assert sum(any(rank.code == -signal.SIGKILL for rank in trial.ranks) for trial in killed) >= 42
    for trial in killed:
        for rank in trial.ranks:
            assert not rank.hung, f"{trial.run}\n{rank.printed}"
            assert rank.code in (-signal.SIGKILL, 0, 1), f"{trial.run}\n{rank.printed}"
            assert (rank.code == 1) == bool(rank.error)


@pytest.mark.guarantee("Killed saves")
@pytest.mark.parametrize("who", WHO)
def test_what_a_killed_run_leaves_is_whole(killed: list[Trial], who: str) -> None:
    assert "".join(trial.broken for trial in killed if trial.who == who) == ""


@pytest.mark.parametrize("who", WHO)
def test_the_save_after_a_kill_cleans_up(killed: list[Trial], who: str) -> None:
    assert "".join(trial.left for trial in killed if trial.who == who) == ""


@pytest.mark.parametrize("left", ["files", f".{INDEX}.partial", "nothing"])
def test_what_a_killed_save_left_is_removed_by_the_next(left: str, tmp_path: Path) -> None:
    save_plain(tmp_path / "step-1", 1)
    save_plain(tmp_path / "step-2", 2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "model.txt").write_text("not of a save")
    (tmp_path / "step-2" / INDEX).rename(tmp_path / "step-2" / f".{INDEX}.partial")
    for path in (tmp_path / "step-2").iterdir():
        if left != "files" and path.name != left:
            path.unlink()
    save_plain(tmp_path / "step-3", 3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "notes", "step-1", "step-3"]


# ------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks at step 3. Copied, never changed."""
    path = tmp_path_factory.mktemp("sound") / "step-3"

    def body(rank: int) -> None:
        model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
        for _ in range(3):
            advance(model, optimizer)
        zeroshard.save(path, model, optimizer, extra={"step": 3, "tensor": torch.arange(5)})

    run_threads(2, body)
    return path


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "step-3"))


def file_of(checkpoint: Path, kind: str) -> Path:
    return checkpoint / INDEX if kind == "index" else next(checkpoint.glob(f"{kind}-00001-*"))


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def rewrite_index(path: Path, **changes: Any) -> None:
    """Change fields of an index, or leave out those that are None; its checksum is right."""
    plain = {**json.loads(path.read_text()), **changes}
    body = json.dumps({key: value for key, value in plain.items() if value is not None and key != "crc32"})[:-1]
    path.write_text(f'{body}, "crc32": "{zlib.crc32(body.encode()):08x}"}}')


EARLY: dict[str, tuple[str, Callable[[Path], object], str]] = {  # the file, what is done to it, a word of the error
    "model truncated": ("model", truncate, "truncated"),
    "optimizer emptied": ("optimizer", lambda path: os.truncate(path, 0), "truncated"),
    "model missing": ("model", Path.unlink, "missing"),
    "other missing": ("other", Path.unlink, "missing"),
    "index missing": ("index", Path.unlink, "neither a checkpoint"),
    "index empty": ("index", lambda path: path.write_text(""), INDEX),
    "index cut": ("index", lambda path: os.truncate(path, 200), "damaged"),
    "index of others": ("index", lambda path: path.write_text('{"metadata": {}, "weight_map": {}}'), INDEX),
    "index no object": ("index", lambda path: path.write_text("[1, 2]"), INDEX),
    "index newer": ("index", lambda path: rewrite_index(path, version=2), "version 2, expected 1"),
    "index without files": ("index", lambda path: rewrite_index(path, files=None), "files"),
    "index of a terabyte": ("index", lambda path: os.truncate(path, 2**40), "damaged or not an index"),
    "index flipped": ("index", lambda path: flip(path, random.Random(1)), "damaged"),
}


def refused_early(rank: int, path: Path) -> str:
    """Load what is wrong before it is read: the error, and nothing has changed."""
    model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
    advance(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        zeroshard.load(path, model, optimizer)
    advance(model, optimizer)  # nothing stands in its way
    model, plain = zeroshard.unwrap(model, optimizer)
    assert_states(model, plain, 2)
    return str(caught.value)


@pytest.mark.parametrize("what", EARLY)
def test_damage_that_shows_from_outside_is_found_before_anything_changes(what: str, damaged: Path) -> None:
    kind, damage, word = EARLY[what]
    file = file_of(damaged, kind)
    damage(file)
    for text in run_threads(2, refused_early, damaged) + run_threads(3, refused_early, damaged):
        assert str(damaged) in text
        assert file.name in text
        assert word in text
    plain = tables(NUMEL)
    with pytest.raises(CheckpointError, match=file.name):
        zeroshard.load(damaged, *plain)
    assert_states(*plain, 0)


def refused_late(rank: int, path: Path, sound: Path) -> str:
    """Load what is damaged inside: the error, then a refusal to go on, then a load of a sound checkpoint."""
    model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
    advance(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        zeroshard.load(path, model, optimizer)
    with pytest.raises(RuntimeError, match="load a complete checkpoint") as refusal:
        model(torch.zeros(()))
    assert str(path) in str(refusal.value)
    zeroshard.load(sound, model, optimizer)
    advance(model, optimizer)
    model, plain = zeroshard.unwrap(model, optimizer)
    assert_states(model, plain, 4)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_is_an_error_on_every_rank_and_the_model_waits_for_a_good_load(
    kind: str, ranks: int, damaged: Path, sound: Path
) -> None:
    file = file_of(damaged, kind)
    flip(file, random.Random(ranks))
    for text in run_threads(ranks, refused_late, damaged, sound):
        assert str(file) in text
        assert "damaged" in text
        assert "Traceback" not in text


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_in_one_ranks_own_data_is_found_before_anything_changes(ranks: int, damaged: Path) -> None:
    file = file_of(damaged, "other")
    flip(file, random.Random(ranks))
    for text in run_threads(ranks, refused_early, damaged):
        assert str(file) in text
        assert "damaged" in text
        assert "Traceback" not in text


def test_a_flipped_bit_in_processes(damaged: Path, sound: Path) -> None:
    file = file_of(damaged, "model")
    flip(file, random.Random(0))
    for text in run_processes(2, refused_late, damaged, sound, timeout=60):
        assert str(file) in text


@pytest.mark.parametrize(
    "start", ["index", "model-00000", "model-00001", "optimizer-00000", "optimizer-00001", "other-00000"]
)  # other-00001 is another rank's
def test_any_flipped_bit_is_found(start: str, sound: Path, tmp_path: Path) -> None:
    draw = random.Random(start)
    [file] = sound.glob(f"{start}*")
    for number in range(8):
        damaged = Path(shutil.copytree(sound, tmp_path / str(number)))
        flip(damaged / file.name, draw)
        with pytest.raises(CheckpointError, match=re.escape(str(damaged))) as caught:
            zeroshard.load(damaged, *tables(NUMEL))
        assert file.name in str(caught.value)


def test_a_model_that_waits_for_a_good_load_is_not_saved(damaged: Path, tmp_path: Path) -> None:
    flip(file_of(damaged, "model"), random.Random(0))

    def body(rank: int) -> None:
        model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
        advance(model, optimizer)
        with pytest.raises(CheckpointError):
            zeroshard.load(damaged, model, optimizer)
        with pytest.raises((CheckpointError, RuntimeError), match="load a complete checkpoint"):
            zeroshard.save(tmp_path / "step-4", model, optimizer)

    run_threads(2, body)
    assert not whole_ones(tmp_path / "step-4")


def test_weights_alone_do_not_make_spoilt_optimizer_states_good(damaged: Path, sound: Path) -> None:
    flip(file_of(damaged, "optimizer"), random.Random(0))

    def body(rank: int) -> None:
        model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
        advance(model, optimizer)
        with pytest.raises(CheckpointError):
            zeroshard.load(damaged, model, optimizer)
        zeroshard.load(sound, model)
        with pytest.raises(RuntimeError, match="load a complete checkpoint"):
            model(torch.zeros(()))

    run_threads(2, body)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(*tables(NUMEL)[0].children(), nn.Linear(1, 1)), "3.weight"),
        (nn.Sequential(*list(tables(NUMEL)[0].children())[:2]), "2.weight"),
        (tables(NUMEL + 6)[0], "0.weight"),
    ],
    ids=["too many", "too few", "another shape"],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(
    ranks: int, model: nn.Module, named: str, sound: Path
) -> None:
    def body(rank: int) -> str:
        own = copy.deepcopy(model)
        sharded, optimizer = zeroshard.shard(own, torch.optim.AdamW(own.parameters()), stage=3)
        with pytest.raises(CheckpointError) as caught:
            zeroshard.load(sound, sharded, optimizer)
        plain = zeroshard.unwrap(sharded)
        for name, tensor in model.state_dict().items():
            assert torch.equal(plain.state_dict()[name], tensor)
        return str(caught.value)

    for text in run_threads(ranks, body):
        assert named in text
        assert str(sound) in text


# --------------------------------------------------------------------------------------------------------- disk


def assert_failed_safely(directory: Path, step: int = 1) -> None:
    """What was there is whole, and the next save works and cleans up."""
    for path in whole_ones(directory):
        assert_whole(path)
    assert assert_whole(directory) >= step
    assert (directory / (directory / "latest").read_text().strip() / INDEX).exists()


def calls_of_save(directory: Path, path: Path, odd: int, fails_at: int | None) -> tuple[int, list[str]]:
    """Save step 3 on two ranks with one disk call of one rank failing: the calls it made, and each rank's error."""
    calls = 0

    def before(name: str, target: Any) -> None:
        nonlocal calls
        if threading.current_thread().name == f"rank {odd}":
            calls += 1
            if calls == fails_at:
                code = errno.EIO if name in ("unlink", "rmdir") else errno.ENOSPC
                raise OSError(code, os.strerror(code), str(target))

    def body(rank: int) -> str:
        model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
        for _ in range(3):
            advance(model, optimizer)
        try:
            zeroshard.save(path, model, optimizer, extra={"step": 3}, keep=KEEP)
        except CheckpointError as error:
            return str(error)
        return ""

    with disk_calls(before, lambda name, target: None):
        errors = run_threads(2, body)
    return calls, errors


@pytest.mark.parametrize(("odd", "same"), [(0, False), (0, True), (1, False), (1, True)])
def test_any_disk_call_may_fail(odd: int, same: bool, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    for step in (1, 2):
        save_plain(prepared / f"step-{step}", step)
    name = "step-2" if same else "step-3"
    calls, errors = calls_of_save(prepared, Path(shutil.copytree(prepared, tmp_path / "all")) / name, odd, None)
    assert errors == ["", ""]
    for number in range(1, calls + 1):
        directory = Path(shutil.copytree(prepared, tmp_path / str(number)))
        _, errors = calls_of_save(directory, directory / name, odd, number)
        assert bool(errors[0]) == bool(errors[1]), f"call {number}: {errors}"
        assert all(str(directory / name) in error for error in errors if error)
        assert_failed_safely(directory, 2)
        if not same and not (directory / name / INDEX).exists():
            assert not files_under(directory / name), f"call {number}"
        save_plain(directory / name, 4)
        assert assert_whole(directory) == 4
        assert not strangers(directory / name)


FULL = {  # ranks without room, bytes that a file may have, characters of extra, what does not fit
    "both ranks": ([0, 1], 100_000, 0, "step-2/model-0000"),
    "rank 0": ([0], 100_000, 0, "step-2/model-00000"),
    "rank 1": ([1], 100_000, 0, "step-2/model-00001"),
    "the index": ([0], 1_200_000, 1_300_000, "step-2"),
}


@pytest.mark.parametrize("how", ["sync", "wait", "next"])
@pytest.mark.parametrize("what", ["both ranks", "rank 0", "rank 1", "the index"])
def test_a_full_disk_is_an_error_on_every_rank_and_nothing_is_lost(
    what: str, how: str, forks: Forks, tmp_path: Path
) -> None:
    full, nbytes, text, file = FULL[what]
    arguments = {"directory": str(tmp_path), "full": full, "nbytes": nbytes, "text": text, "how": how}
    [ranks] = forks.run([Run("fill_disk", arguments)])
    for rank in ranks:
        assert rank.code == 0, rank.printed
        assert str(tmp_path / file) in rank.answer["error"]
        assert os.strerror(errno.EFBIG) in rank.answer["error"]
        assert rank.answer["latest"] == "step-1"
        assert {name.split("/")[0] for name in rank.answer["there"]} == {"latest", "step-1"}
    assert assert_whole(tmp_path / "step-1", BIG) == 1
    assert assert_whole(tmp_path, BIG) == 2


def test_a_failed_save_that_nobody_waited_for_is_reported_at_exit(forks: Forks, tmp_path: Path) -> None:
    [ranks] = forks.run([Run("forget", {"directory": str(tmp_path)})])
    for rank in ranks:
        assert not rank.hung
        assert f"the save of {tmp_path / 'forgotten'} failed" in rank.printed
        assert os.strerror(errno.EFBIG) in rank.printed


def test_a_directory_that_may_not_be_written(forks: Forks) -> None:
    with tempfile.TemporaryDirectory() as place:  # tmp_path is in a directory of this user's alone
        directory = Path(place)
        save_plain(directory / "step-1", 1)
        before = files_under(directory)
        directory.chmod(0o555)
        [ranks] = forks.run([Run("save_read_only", {"directory": place}, store="tcp")])
        directory.chmod(0o755)
        for rank in ranks:
            assert rank.code == 0, rank.printed
            assert str(directory / "step-2") in rank.answer
            assert os.strerror(errno.EACCES) in rank.answer
        assert files_under(directory) == before


def test_a_file_system_that_becomes_read_only_does_not_hide_why_the_save_failed(tmp_path: Path) -> None:
    codes = {"open": errno.ENOSPC, "unlink": errno.EROFS}

    def before(name: str, target: Any) -> None:
        if name in codes and "-00000-" in str(target):
            raise OSError(codes[name], os.strerror(codes[name]), str(target))

    with disk_calls(before, lambda name, target: None), pytest.raises(CheckpointError, match="No space left"):
        zeroshard.save(tmp_path / "step-1", nn.Linear(2, 2))
    (tmp_path / ".index.json.partial").mkdir()  # which can be neither written nor unlinked
    with pytest.raises(OSError, match=r"cannot write .*index\.json: Is a directory"):
        write_atomic(tmp_path / INDEX, b"")


def test_a_complete_save_is_no_failure_if_latest_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "latest" / "not a file").mkdir(parents=True)
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"step-1 is complete, but .* is not up to date: .*cannot write .*latest"):
        zeroshard.save(tmp_path / "step-1", model, keep=1)
    assert zeroshard.load(tmp_path / "step-1", model).missing == []


@pytest.mark.parametrize("length", [248, 255])
def test_long_names(length: int, tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / f"{'a' * (length - 2)}-1"
    zeroshard.save(path, model)
    assert zeroshard.load(tmp_path, model).path == path
    assert not strangers(path)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENAMETOOLONG)):
        zeroshard.save(tmp_path / ("a" * 256), model)


def test_paths_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (lambda path: zeroshard.save(path, nn.Linear(2, 2)), functools.partial(export, tmp_path)):
        with pytest.raises(CheckpointError, match="contains the character NUL: pass another path"):
            call(f"{tmp_path}/a\0b")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="the working directory, which does not exist any more"):
        zeroshard.save("step-1", nn.Linear(2, 2))


def test_where_directories_cannot_be_locked_only_complete_checkpoints_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    for step in (1, 2):
        save_plain(tmp_path / f"step-{step}", step)
    (tmp_path / "step-2" / INDEX).unlink()
    os.utime(tmp_path / "step-2", (0, 0))
    with pytest.warns(UserWarning, match="step-2 .*cannot be removed: the file system cannot lock it"):
        save_plain(tmp_path / "step-3", 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2", "step-3"]


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a directory")

    def body(rank: int) -> str:
        model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
        with pytest.raises(CheckpointError) as caught:
            zeroshard.save(tmp_path / "notes.txt" / "step-1", model, optimizer)
        advance(model, optimizer)
        zeroshard.save(tmp_path / "step-1", model, optimizer, extra={"step": 1})
        return str(caught.value)

    for text in run_threads(2, body):
        assert str(tmp_path / "notes.txt") in text
        assert os.strerror(errno.ENOTDIR) in text
    assert assert_whole(tmp_path) == 1


# ------------------------------------------------------------------------------------------- ranks that disagree


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("field", ["extra", "rank_extra"])
def test_data_that_cannot_be_kept_on_one_rank_is_an_error_on_all(field: str, ranks: int, tmp_path: Path) -> None:
    odd = 0 if field == "extra" else ranks - 1  # extra is the first rank's

    def body(rank: int) -> str:
        model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
        advance(model, optimizer)
        data: Any = {"step": 1, "door": threading.Lock()} if rank == odd else {"step": 1}
        with pytest.raises(CheckpointError) as caught:
            zeroshard.save(tmp_path / "bad", model, optimizer, **{field: data})
        zeroshard.save(tmp_path / "good", model, optimizer, extra={"step": 1})
        return str(caught.value)

    for text in run_threads(ranks, body):
        assert "door" in text
        assert f"rank {odd}" in text
        assert str(tmp_path / "bad") in text
    assert not (tmp_path / "bad").exists()
    assert assert_whole(tmp_path) == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_save_in_mid_accumulation_on_one_rank_is_an_error_on_all(ranks: int, tmp_path: Path) -> None:
    def body(rank: int) -> str:
        model, optimizer = sharded(nn.Linear(3, 2), adamw, stage=1, timeout=5)
        model(torch.ones(1, 3)).sum().backward()
        if rank != 1:
            optimizer.zero_grad()
        with pytest.raises(CheckpointError) as caught:
            zeroshard.save(tmp_path / "step-1", model, optimizer)
        optimizer.zero_grad()
        zeroshard.save(tmp_path / "step-1", model, optimizer)
        return str(caught.value)

    for text in run_threads(ranks, body):
        assert "rank 1" in text
        assert "save after optimizer.step()" in text
    assert whole_ones(tmp_path)


def test_ranks_that_save_to_different_paths(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3)
        advance(model, optimizer)
        with pytest.raises(CheckpointError) as caught:
            zeroshard.save(tmp_path / f"rank-{rank}" / "step-1", model, optimizer)
        return str(caught.value)

    for text in run_threads(2, body):
        assert str(tmp_path / "rank-0" / "step-1" / "model-00001-") in text
        assert "share" in text
    assert not files_under(tmp_path)


CALLS = [(call, rhythm) for call in ("save", "load") for rhythm in (0, 3)]


@pytest.fixture(scope="module")
def absences(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[Outcome]]:
    """Runs with a rank that stays away from a call, the first or after a rhythm of several."""
    runs = []
    for call, rhythm in CALLS:
        directory = tmp_path_factory.mktemp("away")
        save_plain(directory / "one", 1)
        runs.append(Run("stay_away", {"directory": str(directory), "call": call, "rhythm": rhythm}, limit=12))
    return dict(zip(CALLS, forks.run(runs), strict=True))


@pytest.mark.parametrize(("call", "rhythm"), CALLS)
def test_a_rank_that_stays_away_is_an_error_within_the_timeout(
    call: str, rhythm: int, absences: dict[tuple[str, int], list[Outcome]]
) -> None:
    for rank in absences[call, rhythm]:
        assert not rank.hung, rank.printed
        assert rank.code == 0, rank.printed
    assert call in absences[call, rhythm][0].answer
