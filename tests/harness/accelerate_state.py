"""Accelerate inside the harness's ranks: it reads ranks from the environment, and keeps its state in the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def forget() -> None:
    """Clear what Accelerate keeps in this process, so that another Accelerator can be made."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def as_launched(rank: int, world: int) -> Iterator[None]:
    """Set what `accelerate launch --cpu` sets for a rank; afterwards Accelerate has no state left."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in ranks.items()} if world > 1 else {})
    os.environ["ACCELERATE_USE_CPU"] = "true"
    forget()
    try:
        yield
    finally:
        forget()
        for name in (*ranks, "ACCELERATE_USE_CPU"):
            os.environ.pop(name, None)
