"""The ranks that save or load together, and the error that all of them raise if one fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeroshard.comm import ConsistencyChecker, all_gather_object, find_or_create_group
from zeroshard.engine import Engine
from zeroshard.memory import DiskError

T = TypeVar("T")

_OPERATION = "save or load a checkpoint"  # in errors


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file. Existing checkpoints are unchanged.

    >>> raise CheckpointError("checkpoints/step-100/index.json is missing")
    Traceback (most recent call last):
        ...
    zeroshard.checkpoint.group.CheckpointError: checkpoints/step-100/index.json is missing
    """

    @classmethod
    def from_rank_failures(cls, failures: Mapping[int, str], world_size: int) -> CheckpointError:
        """Return an error that lists the failures and their ranks; no ranks if all ``world_size`` failed equally.

        >>> CheckpointError.from_rank_failures({0: "no such file", 1: "no such file"}, 4)
        CheckpointError('no such file (ranks 0, 1)')
        """
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in failures.items():
            ranks_by_text.setdefault(text, []).append(rank)
        if len(ranks_by_text) == 1 and len(failures) == world_size:
            return cls(*ranks_by_text)
        messages = [
            f"{text} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
            for text, ranks in ranks_by_text.items()
        ]
        return cls("; ".join(messages))


class CheckpointDiskError(CheckpointError, DiskError):
    """A checkpoint cannot be written or read because offloaded states on disk cannot be accessed."""


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory to write; raise CheckpointError if there is none.

    >>> absolute_path("a\\0b")
    Traceback (most recent call last):
        ...
    zeroshard.checkpoint.group.CheckpointError: 'a\\x00b' contains the character NUL: pass another path
    """
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r} contains the character NUL: pass another path")
    try:
        return Path(path).absolute()
    except OSError as error:
        raise CheckpointError(
            f"{path} is relative to the working directory, which does not exist any more ({error.strerror}): pass an "
            "absolute path"
        ) from error


class CheckpointGroup:
    """The ranks that save or load together. They use gloo, so that a save can overlap with training."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        consistency_checker: ConsistencyChecker | None = None,
        has_timeout: bool = True,
    ) -> None:
        self.process_group = group  # None: a single rank
        self._consistency_checker = consistency_checker  # None for an unsharded model
        self._has_timeout = has_timeout
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def open(cls, engine: Engine | None, operation: str) -> CheckpointGroup:
        """Return the group of a sharded model's mesh, or of all ranks for an unsharded model. A collective call.

        If a rank of a sharded model does not call it, an error is raised within the model's timeout. Later collectives
        wait for disks and have torch's default timeout; there a dead rank is detected by its closed connections, and
        named.
        """
        if engine is not None:
            engine.order.begin_pass(f"to {operation}")
            engine.order.check(f"{operation} a checkpoint", always_confirm=True)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(None)
        if "fake" in dist.get_backend_config():
            raise CheckpointError(
                f"cannot {operation} with the fake backend: the other ranks and their shards do not exist"
            )
        if engine is None:
            return cls(_get_or_create_group(list(range(dist.get_world_size())), None))
        consistency = engine.comm.consistency
        if len(consistency.global_ranks) == 1:
            return cls(None)
        try:
            timeout = timedelta(seconds=consistency.timeout)
            return cls(_get_or_create_group(consistency.global_ranks, timeout), consistency)
        except RuntimeError as error:  # for example, a rank has died
            raise consistency.explain_failure(f"{operation} a checkpoint", error) from error

    def run_on_all(self, error_prefix: str, fn: Callable[[], T]) -> T:
        """Call ``fn`` on every rank; if it fails on any rank, raise an error that names the ranks on all of them."""
        value: T | None = None
        error: BaseException | None = None
        error_text: str | None = None
        try:
            value = fn()
        except BaseException as raised:  # also if this rank is interrupted: the others must not wait for it
            error, error_text = raised, str(raised)
            if not isinstance(error, CheckpointError):
                kind = "" if isinstance(error, (OSError, DiskError)) else f"{type(error).__name__}: "
                error_text = f"{error_prefix}{kind}{error}"
        failures = {rank: text for rank, text in enumerate(self.all_gather(error_text)) if text is not None}
        if self.size == 1 and isinstance(error, CheckpointError):
            raise error
        if error is not None and not isinstance(error, Exception):
            raise error
        if failures:
            error_class = CheckpointDiskError if isinstance(error, DiskError) else CheckpointError
            raise error_class.from_rank_failures(failures, self.size) from error
        return value  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank; for small values."""
        checker = self._consistency_checker if self._has_timeout else None
        with self._explain_errors():
            return all_gather_object(value, self.process_group, _OPERATION, checker)

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the JSON objects of all ranks on the first rank, and nothing on the others."""
        if self.process_group is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.all_gather(data.numel())
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 else None
        with self._explain_errors():
            dist.gather(padded, parts, group=self.process_group, group_dst=0)
        return [json.loads(bytes(part[:length].numpy())) for part, length in zip(parts or [], lengths, strict=False)]

    def broadcast(self, value: T) -> T:
        """Return the first rank's value."""
        return self.all_gather(value)[0]

    def without_timeout(self) -> CheckpointGroup:
        """Return the same ranks without the model's timeout: for calls that wait for disks, and for other threads."""
        return CheckpointGroup(self.process_group, self._consistency_checker, has_timeout=False)

    def _explain_errors(self) -> AbstractContextManager[None]:
        """Raise an error that names the rank that has died, instead of the backend's; not for an unsharded model."""
        return self._consistency_checker.explain_errors(_OPERATION) if self._consistency_checker else nullcontext()


def _get_or_create_group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return the checkpoint group of these ranks. ``timeout`` applies to its creation only."""
    backend = "gloo" if dist.is_gloo_available() and "threaded" not in dist.get_backend_config() else None
    group = find_or_create_group(ranks, "zeroshard checkpoints", backend, timeout)
    if backend == "gloo":
        group._get_backend(torch.device("cpu"))._set_default_timeout(dist.distributed_c10d.default_pg_timeout)
    return group
