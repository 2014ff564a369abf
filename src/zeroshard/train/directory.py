"""RunDirectory: where a run keeps what it makes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.whole import read_json, write_whole


class RunDirectory:
    """A directory with ``config.json`` (options), ``run.json`` (what came of it), ``metrics.jsonl``, ``report.html``,
    ``checkpoints/``, ``model/`` (the trained weights) and ``data/`` (tokens).

    >>> RunDirectory(Path("runs/tiny")).metrics.as_posix()
    'runs/tiny/metrics.jsonl'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.data = path / "data"

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / "config.json").is_file()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the options: from then on the directory holds a run."""
        write_json(self.path / "config.json", config)

    def read_config(self) -> dict[str, Any]:
        """The options it was begun with."""
        return read_json(self.path / "config.json")

    def read_record(self) -> dict[str, Any]:
        """What ``run.json`` says; nothing before there is one."""
        path = self.path / "run.json"
        return read_json(path) if path.is_file() else {}

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write ``run.json``."""
        write_json(self.path / "run.json", record)


def new_directory(parent: Path, name: str) -> Path:
    """Make a directory for a new run: ``parent/name``, or with the first number that nobody has taken."""
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers never end")


def newest_run(parent: Path) -> Path | None:
    """The run under ``parent`` that was begun last."""
    runs = [path for path in parent.glob("*") if RunDirectory(path).exists()]
    return max(runs, key=lambda path: (path / "config.json").stat().st_mtime, default=None)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that is whole or not there."""
    write_whole(path, json.dumps(value, indent=2).encode())
