"""Meeting: where the ranks of a model meet to save or load, apart from training's own collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.comm.collectives import all_gather_object, broadcast_object
from zeroshard.comm.consistency import ConsistencyChecker
from zeroshard.engine.engine import Engine
from zeroshard.memory.disk.file import DiskError

T = TypeVar("T")
# torch warns where there is one rank alone; a filter around each call would be every thread's
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
_GROUP_DESC = "zeroshard checkpoints"


class CheckpointDiskError(CheckpointError, DiskError):
    """A checkpoint that cannot be written or read because states on disk cannot be."""


class CheckpointGroup:
    """The ranks that save or load together. They talk over gloo, so that a save may run beside training."""

    def __init__(self, group: dist.ProcessGroup | None, consistency_checker: ConsistencyChecker | None = None) -> None:
        self.process_group = group  # None: this rank alone
        self._consistency_checker = consistency_checker  # of a sharded model's ranks
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def open(cls, engine: Engine | None, operation: str) -> CheckpointGroup:
        """Bring the ranks of a sharded model's mesh together, or of a plain model all of the job, to save or load.

        A rank of a sharded model that stays away is an error within the model's timeout. What comes then may take as
        long as disks do: there a rank that dies is noticed because its connections end.
        """
        if engine is not None:
            engine.order.begin_pass(f"to {operation}")
            engine.order.check(f"{operation} a checkpoint", always_confirm=True)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(None)
        if "fake" in dist.get_backend_config():
            raise CheckpointError("the fake backend has no other ranks: there is nothing whole to save or load")
        ranks = list(range(dist.get_world_size())) if engine is None else engine.comm.consistency.global_ranks
        if len(ranks) == 1:
            return cls(None)
        if engine is None:
            return cls(_get_or_create_group(ranks, None))
        control = engine.comm.consistency
        try:
            return cls(_get_or_create_group(ranks, timedelta(seconds=control.timeout)), control)
        except RuntimeError as error:  # a rank has died, or the like
            raise control.explain_failure(f"{operation} a checkpoint", error) from error

    def run_on_all(self, error_prefix: str, fn: Callable[[], T]) -> T:
        """Do something on every rank; where it fails on any, every rank raises what went wrong where."""
        value: T | None = None
        error: Exception | None = None
        try:
            value = fn()
        except Exception as raised:
            error = raised
        told = None if error is None else _error_text(error_prefix, error)
        failures = {rank: text for rank, text in enumerate(self.all_gather(told)) if text is not None}
        if self.size == 1 and isinstance(error, CheckpointError):
            raise error
        if failures:
            kind = CheckpointDiskError if isinstance(error, DiskError) else CheckpointError
            raise kind.from_rank_failures(failures, self.size) from error
        return value  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """Collect a small value of every rank."""
        return all_gather_object(value, self.process_group, "save or load a checkpoint", self._consistency_checker)

    def broadcast(self, value: T) -> T:
        """What the first rank says."""
        first: T = broadcast_object(value, self.process_group, "save or load a checkpoint", self._consistency_checker)
        return first


def _error_text(error_prefix: str, error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return (
        f"{error_prefix}: {error}"
        if isinstance(error, (OSError, DiskError))
        else f"{error_prefix}: {type(error).__name__}: {error}"
    )


def _get_or_create_group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of these ranks for checkpoints alone: made once, then found again among the job's groups."""
    for other in dist.distributed_c10d._world.pg_map:
        if other.group_desc == _GROUP_DESC and dist.get_process_group_ranks(other) == sorted(ranks):
            return other
    backend = "gloo" if dist.is_gloo_available() and "threaded" not in dist.get_backend_config() else None
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend=backend, use_local_synchronization=True, group_desc=_GROUP_DESC
    )
    if backend == "gloo":  # made in time; from here on as patient as torch is by default
        group._get_backend(torch.device("cpu"))._set_default_timeout(dist.distributed_c10d.default_pg_timeout)
    return group
