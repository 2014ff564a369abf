"""RunDirectory: the files of a run."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.train.errors import TrainingError
from zeroshard.utils.atomic_file import read_json, write_atomic

LOCK_FILE = "lock"


class RunDirectory:
    """A directory with ``config.json`` (options), ``run.json`` (results), ``metrics.jsonl``, ``report.html``,
    ``checkpoints/``, ``model/`` (the trained weights), ``data/`` (tokens) and ``lock`` (one run at a time).

    >>> RunDirectory(Path("runs/tiny")).metrics_path.as_posix()
    'runs/tiny/metrics.jsonl'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints_dir = path / "checkpoints"
        self.model_dir = path / "model"
        self.data_dir = path / "data"
        self._lock_finalizer: weakref.finalize[Any, Any] | None = None  # closes the lock's file descriptor

    def lock(self) -> None:
        """Lock the directory until this process ends, however it ends; raise if another run holds the lock.

        The file ``lock`` remains and names its last holder; only the system's lock on it (``flock``) counts.
        """
        path = self.path / LOCK_FILE
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock_finalizer = weakref.finalize(self, os.close, lock_fd)
        self._lock_finalizer.atexit = False  # at exit the system closes it
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock_fd, 200, 0).decode(errors="replace").strip() or "another process"
            self.unlock()
            raise TrainingError(
                f"{self.path} is in use by a run of {holder}: wait until it ends, or give another --out"
            ) from None
        except OSError as error:
            self.unlock()
            warnings.warn(
                f"{path} cannot be locked on this file system ({error.strerror}): start no second run in {self.path}",
                stacklevel=2,
            )
            return
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock_finalizer is not None:
            self._lock_finalizer()

    def has_run(self) -> bool:
        """Return whether a run was started here."""
        return (self.path / "config.json").is_file()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the options; from now on the directory holds a run."""
        write_json(self.path / "config.json", config)

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
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers never end")


def newest_run(parent: Path) -> Path | None:
    """Return the run under ``parent`` that was started last."""
    runs = [path for path in parent.glob("*") if RunDirectory(path).has_run()]
    return max(runs, key=lambda path: (path / "config.json").stat().st_mtime, default=None)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_atomic(path, json.dumps(value, indent=2).encode())
