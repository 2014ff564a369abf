"""Batching: how a step's batch is divided over ranks and backwards."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BATCH = 8  # sequences a step where nothing is said


@dataclass(frozen=True)
class Batching:
    """``batch`` sequences a step = ``micro`` a rank and backward × ranks × ``accumulate`` backwards.

    >>> Batching.divide(ranks=2, batch=16, micro=4, accumulate=None)
    Batching(batch=16, micro=4, accumulate=2)
    """

    batch: int
    micro: int
    accumulate: int

    @classmethod
    def divide(cls, ranks: int, batch: int | None, micro: int | None, accumulate: int | None) -> Batching:
        """Find what was not given; refuse what does not fit together."""
        if batch is None:
            batch = micro * ranks * (accumulate or 1) if micro else max(DEFAULT_BATCH, ranks * (accumulate or 1))
            if not micro:
                batch -= batch % (ranks * (accumulate or 1))
        if micro is None:
            micro = max(batch // (ranks * (accumulate or 1)), 1)
        if accumulate is None:
            accumulate = max(batch // (ranks * micro), 1)
        if micro * ranks * accumulate != batch:
            raise ValueError(
                f"a batch of {batch} sequences is not {micro} a rank and backward × {ranks} ranks × {accumulate} "
                f"backwards, which is {micro * ranks * accumulate}: leave one of batch, micro-batch and accumulate "
                "out, or change it"
            )
        return cls(batch, micro, accumulate)
