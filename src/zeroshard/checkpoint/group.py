"""The process group for saving and loading, separate from the collectives of training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.comm import ConsistencyChecker, all_gather_object, broadcast_object
from zeroshard.engine import Engine
from zeroshard.memory import DiskError

T = TypeVar("T")
# DCP warns if there is only one rank; a filter around each call would affect all threads
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
_GROUP_DESC = "zeroshard checkpoints"


class CheckpointDiskError(CheckpointError, DiskError):
    """A checkpoint cannot be written or read because offloaded states on disk cannot be accessed."""


class CheckpointGroup:
    """The ranks that save or load together. They use gloo, so that a save can overlap with training."""

    def __init__(self, group: dist.ProcessGroup | None, consistency_checker: ConsistencyChecker | None = None) -> None:
        self.process_group = group  # None: a single rank
        self._consistency_checker = consistency_checker  # None for an unsharded model
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def open(cls, engine: Engine | None, operation: str) -> CheckpointGroup:
        """Return the group of a sharded model's mesh, or of all ranks for an unsharded model. A collective call.

        If a rank of a sharded model does not call it, an error is raised within the model's timeout. Later collectives
        wait for disks and have torch's default timeout; there a dead rank is detected by its closed connections.
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
        consistency = engine.comm.consistency
        try:
            return cls(_get_or_create_group(ranks, timedelta(seconds=consistency.timeout)), consistency)
        except RuntimeError as error:  # for example, a rank has died
            raise consistency.explain_failure(f"{operation} a checkpoint", error) from error

    def run_on_all(self, error_prefix: str, fn: Callable[[], T]) -> T:
        """Call ``fn`` on every rank; if it fails on any rank, raise an error that names the ranks on all of them."""
        value: T | None = None
        error: Exception | None = None
        try:
            value = fn()
        except Exception as raised:
            error = raised
        error_text = None if error is None else _error_text(error_prefix, error)
        failures = {rank: text for rank, text in enumerate(self.all_gather(error_text)) if text is not None}
        if self.size == 1 and isinstance(error, CheckpointError):
            raise error
        if failures:
            kind = CheckpointDiskError if isinstance(error, DiskError) else CheckpointError
            raise kind.from_rank_failures(failures, self.size) from error
        return value  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank; for small values."""
        return all_gather_object(value, self.process_group, "save or load a checkpoint", self._consistency_checker)

    def broadcast(self, value: T) -> T:
        """Return the first rank's value."""
        received: T = broadcast_object(
            value, self.process_group, "save or load a checkpoint", self._consistency_checker
        )
        return received


def _error_text(error_prefix: str, error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return (
        f"{error_prefix}: {error}"
        if isinstance(error, (OSError, DiskError))
        else f"{error_prefix}: {type(error).__name__}: {error}"
    )


def _get_or_create_group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return the checkpoint group of these ranks; create it on the first call."""
    for existing in dist.distributed_c10d._world.pg_map:
        if existing.group_desc == _GROUP_DESC and dist.get_process_group_ranks(existing) == sorted(ranks):
            return existing
    backend = "gloo" if dist.is_gloo_available() and "threaded" not in dist.get_backend_config() else None
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend=backend, use_local_synchronization=True, group_desc=_GROUP_DESC
    )
    if backend == "gloo":  # ``timeout`` applies to the creation only
        group._get_backend(torch.device("cpu"))._set_default_timeout(dist.distributed_c10d.default_pg_timeout)
    return group
