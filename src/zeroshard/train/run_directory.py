"""RunDirectory: the files of a run, and its checkpoints."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.train.options import TrainingError
from zeroshard.utils.atomic_file import read_json, write_json


class RunDirectory:
    """A directory with ``config.json`` (options), ``run.json`` (results), ``metrics.jsonl``, ``report.html``,
    ``checkpoints/``, ``model/`` (the trained weights), ``data/`` (tokens), ``traces/`` (with ``--profile``) and
    ``lock`` (one run at a time).

    >>> RunDirectory(Path("runs/tiny")).metrics_path.as_posix()
    'runs/tiny/metrics.jsonl'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints_dir = path / "checkpoints"
        self.model_dir = path / "model"
        self.data_dir = path / "data"
        self.traces_dir = path / "traces"
        self.unlock: Callable[[], object] = lambda: None
        """Releases the lock, if there is one."""

    def lock(self) -> None:
        """Lock the directory until this process ends, however it ends; raise if another run holds the lock.

        The file ``lock`` remains and names its last holder; only the system's lock on it (``flock``) counts.
        """
        path = self.path / "lock"
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.unlock = weakref.finalize(self, os.close, lock_fd)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock_fd, 200, 0).decode(errors="replace").strip() or "another process"
            self.unlock()
            raise TrainingError(
                f"{self.path} is in use by {holder}: wait until that run ends, or pass another --out"
            ) from None
        except OSError as error:
            self.unlock()
            warnings.warn(
                f"cannot lock {path} on this file system ({error.strerror}): do not start another run in {self.path}",
                stacklevel=2,
            )
            return
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def has_run(self) -> bool:
        """Return whether a run was started here."""
        return (self.path / "config.json").is_file()

    def check_available(self, resume: bool) -> None:
        """Raise if the path is a file, or has a run that is not to be resumed."""
        if self.path.exists() and not self.path.is_dir():
            raise TrainingError(f"--out {self.path} is a file: pass a directory")
        enclosing = next((path for path in self.path.absolute().parents if (path / "run.json").is_file()), None)
        if enclosing is not None:
            raise TrainingError(f"--out {self.path} is inside the run {enclosing}: pass that, or another directory")
        if self.has_run() and not resume:
            raise TrainingError(f"{self.path} already has a run: add --resume to continue it, or pass another --out")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the options; from now on the directory holds a run."""
        write_json(self.path / "config.json", config)

    def trace_path(self, first_step: int, suffix: str = "") -> Path:
        """Return the path of a trace; each rank's file has an additional suffix."""
        return self.traces_dir / f"step-{first_step:06d}{suffix}.json.gz"

    def read_config(self) -> dict[str, Any]:
        """Read the options the run was started with."""
        return read_json(self.path / "config.json")

    def read_record(self) -> dict[str, Any]:
        """Read ``run.json``; return an empty dict if it does not exist."""
        path = self.path / "run.json"
        return read_json(path) if path.is_file() else {}

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write ``run.json``."""
        write_json(self.path / "run.json", record)


def create_run_directory(parent: Path, name: str) -> Path:
    """Create a directory for a new run: ``parent/name``, or with the first free number as a suffix."""
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = parent / f"{name}-{number}"
        else:
            return path


def newest_run(parent: Path) -> Path | None:
    """Return the run under ``parent`` that was started last."""
    runs = [path for path in parent.glob("*") if RunDirectory(path).has_run()]
    return max(runs, key=lambda path: (path / "config.json").stat().st_mtime, default=None)


# ------------------------------------------------------------------------------------------------ checkpoints


@dataclass
class RunCheckpoint:
    """A checkpoint to resume from."""

    path: Path
    step: int
    """Number of steps done."""
    seconds: float
    """Seconds these steps took."""


def checkpoint_path(parent: Path, step: int) -> Path:
    """Return the path of a step's checkpoint.

    >>> checkpoint_path(Path("checkpoints"), 200).as_posix()
    'checkpoints/step-000200'
    """
    return parent / f"step-{step:06d}"


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(parent: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the newest last."""
    from zeroshard.checkpoint import is_checkpoint

    named = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and is_checkpoint(path)]
    return sorted(named, key=checkpoint_step)


def newest_checkpoint(directory: RunDirectory) -> RunCheckpoint | None:
    """Return the checkpoint to resume from; None if the run has not saved one. Raise if what it saved is gone."""
    from zeroshard.checkpoint import CheckpointIndex  # late: the launcher needs none of it

    complete = complete_checkpoints(directory.checkpoints_dir)
    if not complete:
        saved = directory.read_record().get("checkpoints")
        if not saved:
            return None
        raise TrainingError(
            f"{directory.checkpoints_dir} has no checkpoint, but this run has saved {saved[-1]}: put it back, or start "
            "a new run with another --out"
        )
    path = complete[-1]
    extra = CheckpointIndex.read(path).extra
    step = extra.get("step")
    seconds = extra.get("seconds")
    if type(step) is not int or step < 0 or type(seconds) not in (int, float):
        raise TrainingError(
            f"{path} is not a checkpoint of `zeroshard train`: its extra must have the numbers step and seconds "
            f"(got {step!r} and {seconds!r}). Resume from another checkpoint"
        )
    return RunCheckpoint(path, step, seconds)


def quarantine(path: Path) -> None:
    """Move a checkpoint away without deleting it, so that no run resumes from it."""
    from zeroshard.checkpoint import update_latest

    diverged_dir = path.parent / "diverged"  # checkpoints whose weights gave a loss that was not finite
    diverged_dir.mkdir(exist_ok=True)
    target = diverged_dir / path.name
    while target.exists():  # the same step diverged before
        target = target.with_name(f"{target.name}.again")
    path.rename(target)
    for newest in complete_checkpoints(path.parent)[-1:]:
        update_latest(newest)
