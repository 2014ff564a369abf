"""History: the checkpoints of one directory, which of them is the latest, and which are let go."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.index import INDEX, is_checkpoint
from zeroshard.checkpoint.whole import write_whole

LATEST = "latest"
RUN = "checkpoints"  # where a run of `zeroshard train` has them
_DATA = re.compile(r"(model|optimizer|other)-\d{5,}-[0-9a-f]{8}\.safetensors")
_PARTIAL = re.compile(rf"\.{re.escape(INDEX)}\.partial")


def checkpoints(parent: Path) -> list[Path]:
    """The whole checkpoints in a directory, the newest last."""
    found = [path for path in parent.iterdir() if is_checkpoint(path)] if parent.is_dir() else []
    return sorted(found, key=lambda path: ((path / INDEX).stat().st_mtime_ns, path.name))


def point_latest(checkpoint: Path) -> None:
    """Make ``latest``, a file beside the checkpoint, name it."""
    write_whole(checkpoint.with_name(LATEST), f"{checkpoint.name}\n".encode(), writer=_series(checkpoint))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint a path means: itself, or the latest in a directory or a run's (also as ``DIRECTORY/latest``)."""
    if (path / INDEX).is_file():
        return path
    parent = path.parent if path.name == LATEST else path
    if (parent / RUN).is_dir():
        parent = parent / RUN
    pointer = parent / LATEST
    if pointer.is_file():
        named = parent / pointer.read_text().strip()
        if (named / INDEX).is_file():  # also where it is damaged: to go back is for people to decide
            return named
    whole = checkpoints(parent)
    if whole:
        return whole[-1]
    if not path.exists() and path.name != LATEST:
        raise CheckpointError(f"{path} is not there: give a checkpoint, or a directory of checkpoints")
    raise CheckpointError(f"{path} is no checkpoint, and no directory with a whole one: it has no {INDEX}")


def prune(parent: Path, keep: int, newest: Path) -> None:
    """Remove all but the newest ``keep`` checkpoints, and what killed saves left. ``newest`` stays in any case.

    Only directories count that are called like the newest but for their last number: others are somebody else's.
    """
    alike = [path for path in parent.iterdir() if _series(path) == _series(newest) and not path.is_symlink()]
    others = [path for path in checkpoints(parent) if path in alike and path != newest]
    for path in others[: max(len(others) - (keep - 1), 0)]:
        (path / INDEX).unlink()  # from this moment on it is no checkpoint
        shutil.rmtree(path)
    for path in alike:
        if path != newest and path.is_dir() and not is_checkpoint(path) and is_leftover(path):
            shutil.rmtree(path)


def _series(path: Path) -> str:
    """A name without its last number: ``pp0-step-100`` and ``pp0-step-200`` are of one series, ``pp1-step-200`` not."""
    return re.sub(r"\d+(?=\D*$)", "", path.name)


def is_leftover(path: Path) -> bool:
    """Whether a directory holds nothing, or nothing but what a save that was cut off leaves."""
    return all(_DATA.fullmatch(child.name) or _PARTIAL.fullmatch(child.name) for child in path.iterdir())


def sweep(checkpoint: Path, current: set[str]) -> None:
    """Remove what earlier saves left in a checkpoint's directory."""
    for path in checkpoint.iterdir():
        if (_DATA.fullmatch(path.name) and path.name not in current) or _PARTIAL.fullmatch(path.name):
            path.unlink()
