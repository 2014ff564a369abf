"""CheckpointError: what every rank raises when a checkpoint cannot be written or read."""

from __future__ import annotations

from collections.abc import Mapping


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The message names the file; what was there before is still there.

    >>> raise CheckpointError("checkpoints/step-100/index.json is missing")
    Traceback (most recent call last):
        ...
    zeroshard.checkpoint.errors.CheckpointError: checkpoints/step-100/index.json is missing
    """

    @classmethod
    def from_rank_failures(cls, failures: Mapping[int, str], world_size: int) -> CheckpointError:
        """Tell what went wrong on which of so many ranks.

        >>> CheckpointError.from_rank_failures({0: "no such file", 1: "no such file"}, 4)
        CheckpointError('no such file (ranks 0, 1)')
        """
        if set(failures.values()) == {failures[min(failures)]} and len(failures) == world_size:
            return cls(failures[min(failures)])
        ranks_of: dict[str, list[int]] = {}
        for rank, text in failures.items():
            ranks_of.setdefault(text, []).append(rank)
        told = [
            f"{text} (rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))})"
            for text, those in ranks_of.items()
        ]
        return cls("; ".join(told))
