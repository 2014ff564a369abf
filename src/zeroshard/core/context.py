"""Context: what all parts of one sharded model share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.comm.consistency import ConsistencyChecker
from zeroshard.config.config import Config
from zeroshard.core.axis import Axis
from zeroshard.core.checks.observers import Observers
from zeroshard.memory.pool import Pool


@dataclass(frozen=True)
class Context:
    """Ranks, options and memory of one model."""

    axes: tuple[Axis, ...]  # of all ranks that train it, the outermost first
    config: Config
    device: torch.device
    checker: ConsistencyChecker
    pool: Pool  # of memory that is never freed
    observers: Observers
