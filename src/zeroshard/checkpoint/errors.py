"""CheckpointError, which every rank raises if a checkpoint cannot be written or read."""

from __future__ import annotations

from collections.abc import Mapping


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file. Existing checkpoints are unchanged.

    >>> raise CheckpointError("checkpoints/step-100/index.json is missing")
    Traceback (most recent call last):
        ...
    zeroshard.checkpoint.errors.CheckpointError: checkpoints/step-100/index.json is missing
    """

    @classmethod
    def from_rank_failures(cls, failures: Mapping[int, str], world_size: int) -> CheckpointError:
        """Return an error that lists the failures and their ranks; no ranks if all ``world_size`` failed equally.

        >>> CheckpointError.from_rank_failures({0: "no such file", 1: "no such file"}, 4)
        CheckpointError('no such file (ranks 0, 1)')
        """
        if set(failures.values()) == {failures[min(failures)]} and len(failures) == world_size:
            return cls(failures[min(failures)])
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in failures.items():
            ranks_by_text.setdefault(text, []).append(rank)
        messages = [
            f"{text} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
            for text, ranks in ranks_by_text.items()
        ]
        return cls("; ".join(messages))
