"""The checkpoints of a run: their paths, which are complete, and how to resume from one."""

from __future__ import annotations

import re
from pathlib import Path

from zeroshard.checkpoint import CheckpointError, CheckpointIndex, is_checkpoint, update_latest

DIVERGED_DIR = "diverged"  # subdirectory for checkpoints whose weights gave a loss that was not finite


class RunCheckpoint:
    """A checkpoint to resume from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        extra = CheckpointIndex.read(path).extra
        step, seconds = extra.get("step"), extra.get("seconds")
        if type(step) is not int or step < 0 or type(seconds) not in (int, float):
            raise CheckpointError(
                f"{path} is no checkpoint of a run: its extra has step {step!r} and seconds {seconds!r}, expected two "
                "numbers. Go on from another checkpoint"
            )
        self.step: int = step
        """Number of steps done."""
        self.seconds: float = seconds
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
    named = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and is_checkpoint(path)]
    return sorted(named, key=checkpoint_step)


def quarantine(path: Path) -> None:
    """Move a checkpoint away without deleting it, so that no run resumes from it."""
    diverged_dir = path.parent / DIVERGED_DIR
    diverged_dir.mkdir(exist_ok=True)
    target, number = diverged_dir / path.name, 1
    while target.exists():  # the same step diverged before
        target, number = diverged_dir / f"{path.name}.{number}", number + 1
    path.rename(target)
    for newest in complete_checkpoints(path.parent)[-1:]:
        update_latest(newest)
