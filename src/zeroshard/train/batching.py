"""Batching: how a step's batch is split over ranks and gradient accumulation steps."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BATCH_SEQUENCES = 8  # sequences per step by default


@dataclass(frozen=True)
class Batching:
    """``batch`` sequences per step = ``micro`` per rank and backward × ranks × ``accumulate`` backwards.

    The ``tensor`` tensor-parallel ranks of a group have the same sequences, and count as one.

    >>> Batching.resolve(ranks=2, batch=16, micro=4, accumulate=None)
    Batching(batch=16, micro=4, accumulate=2)
    >>> Batching.resolve(ranks=2, batch=16, micro=4, accumulate=None, tensor=2)
    Batching(batch=16, micro=4, accumulate=4)
    """

    batch: int
    micro: int
    accumulate: int

    @classmethod
    def resolve(
        cls, ranks: int, batch: int | None, micro: int | None, accumulate: int | None, tensor: int = 1
    ) -> Batching:
        """Compute the values that are None; raise if the values do not match."""
        if ranks % tensor:
            raise ValueError(f"--tensor {tensor} does not divide the {ranks} ranks: give --ranks a multiple of it")
        ranks //= tensor
        if batch is None:
            batch = (
                micro * ranks * (accumulate or 1) if micro else max(DEFAULT_BATCH_SEQUENCES, ranks * (accumulate or 1))
            )
            if not micro:
                batch -= batch % (ranks * (accumulate or 1))
        if micro is None:
            micro = max(batch // (ranks * (accumulate or 1)), 1)
        if accumulate is None:
            accumulate = max(batch // (ranks * micro), 1)
        if micro * ranks * accumulate != batch:
            ranks_text = f"{ranks} ranks" if tensor == 1 else f"{ranks} groups of {tensor} ranks"
            raise ValueError(
                f"a batch of {batch} sequences is not {micro} a rank and backward × {ranks_text} × {accumulate} "
                f"backwards, which is {micro * ranks * accumulate}: leave one of batch, micro-batch and accumulate "
                "out, or change it"
            )
        return cls(batch, micro, accumulate)
