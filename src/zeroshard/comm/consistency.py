"""ConsistencyChecker: a slow side channel over which ranks compare their positions, used only for unexpected events.

[Note: consistency of ranks]
Collectives carry no name: two ranks that all-gather different units at the same time hang, crash, or, if the sizes are
equal, silently exchange wrong data. Naming every collective would cost a round trip each. Instead every rank predicts
the next collective from the recorded order (``CollectiveOrder`` in ``collectives.py``). Ranks with the same history
predict the same, so a rank that does what was predicted does not need to ask. A rank about to do something *else* first
announces it here and waits until all ranks have announced the same. So a mismatched collective is never launched. The
ranks get an error at once if all have announced and differ, and within seconds if one of them has passed that event
index with another event, has died, raised or exited (see [Note: heartbeats and faults]). If the others may only be
slow, the error comes at the timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.heartbeat_monitor import (
    FAULT_ERROR,
    AnnouncementReader,
    Announcements,
    HeartbeatMonitor,
    RankFault,
    RanksDisagreeError,
)
from zeroshard.comm.peers import BarrierWait

__all__ = ["PASS_START", "POLL_INTERVAL", "ConsistencyChecker", "RanksDisagreeError"]

PASS_START = "start "  # prefix of the event that starts a pass
POLL_INTERVAL = timedelta(seconds=1)  # a waiting rank checks for faults this often
NO_POSITION = (0, "shard()")  # of a rank that has not recorded an event yet
LATE_AFTER_SECONDS = 1.0  # a rank that waits longer asks the others to compare positions
_ADVICE = (
    "All ranks must run the same units in the same order: look for a branch on rank or data around that unit, or a "
    "rank that skipped a call."
)


class CollectiveProgress(Protocol):
    """This rank's position, as :class:`zeroshard.comm.collectives.CollectiveOrder` records it."""

    event_count: int

    def event_at(self, event_index: int) -> str:
        """Return this rank's event at an index."""

    def describe_last_event(self) -> str:
        """Describe the last event."""


class ConsistencyChecker:
    """Announcements of the ranks of one sharded model, in the process group's key-value store.

    >>> ConsistencyChecker(None, 0, [0], timeout=1.0).is_distributed  # one rank alone
    False
    """

    def __init__(
        self, store: Store | None, rank: int, global_ranks: Sequence[int], timeout: float, heartbeat_timeout: float = 8
    ) -> None:
        """``store`` contains only keys of this model; None: one rank, or a backend without communication.

        ``rank`` is this rank in the mesh, and ``global_ranks`` are the global ranks of the mesh's ranks.
        """
        self._store = store
        self.rank, self.global_ranks = rank, list(global_ranks)
        self.timeout = timeout
        self._last_confirmed = -1  # last event index that all ranks announced and confirmed
        self._last_announced = (-1, "")  # event index and event that this rank announced last
        self._stale_keys: list[str] = []  # of the last confirmation; deleted at the next one
        self._progress: weakref.ref[CollectiveProgress] | None = None
        self._monitor = None if store is None else HeartbeatMonitor(store, rank, global_ranks, self, heartbeat_timeout)
        self.faults: list[RankFault] = [] if self._monitor is None else self._monitor.faults.known

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks that really communicate."""
        return self._store is not None

    def track_progress(self, progress: CollectiveProgress) -> None:
        """Set the object that knows this rank's position."""
        self._progress = weakref.ref(progress)
        if self._monitor is not None:
            self._monitor.wake()  # by now all ranks have registered

    def close(self) -> None:
        """Stop monitoring the other ranks: the model is no longer sharded."""
        if self._monitor is not None:
            self._monitor.close()

    def announce_model_dropped(self, position: tuple[int, str]) -> None:
        """Announce that this rank dropped the model, at ``position``: its event count and last event."""
        if self._monitor is not None:
            self._monitor.announce_model_dropped(position)

    def __del__(self) -> None:
        """Stop the heartbeat monitor of a model whose sharding failed before its order was recorded."""
        monitor = getattr(self, "_monitor", None)
        if monitor is not None and self._progress is None:  # else the order announces it: only that has the position
            monitor.announce_model_dropped(NO_POSITION)

    # -- confirmation -------------------------------------------------------------------------------------------

    def confirm(self, event_index: int, what: str, expected: str) -> None:
        """Return when all ranks are at ``event_index`` and about to do ``what``; raise if they are not.

        ``expected`` is the event in the recorded order: what ranks that announce nothing are doing.
        """
        if self._store is None:
            return
        start, ranks = time.monotonic(), len(self.global_ranks)
        with self.explain_errors(what, start):
            self._last_announced = (event_index, what)
            self._store.set(f"rank {self.rank}", f"{event_index}:{what}")
            self._store.add(f"{event_index}/{what}", 1)
            is_last = self._store.add(f"{event_index}/all", 1) == ranks
            if is_last:
                is_equal = self._store.add(f"{event_index}/{what}", 0) == ranks
                self._store.set(f"{event_index}/result", "go" if is_equal else "differ")
            if not self._wait_for_key(f"{event_index}/result", what, event_index, start):
                raise self._disagreement_error(f"waited {_elapsed(start)} to {what}, but the order expects: {expected}")
            if self._store.get(f"{event_index}/result") != b"go":
                raise self._disagreement_error(f"is about to {what}, but the recorded order expects: {expected}")
            if is_last:  # every rank has read the previous result by now
                for stale in self._stale_keys:
                    self._store.delete_key(stale)
        self._last_confirmed = event_index
        self._stale_keys = [f"{event_index}/{key}" for key in (what, "all", "result")]

    def broadcast_text(self, topic: str, text: str) -> str | None:
        """Return rank 0's text on a topic; None if there is only one rank."""
        if self._store is None:
            return None
        if self.rank == 0:
            self._store.set(topic, text)
        return self._wait_for_text(topic, f"read rank 0's {topic}")

    def gather_text(self, topic: str, text: str) -> dict[int, str]:
        """Publish this rank's error text, "" for none, and return the non-empty error texts of all ranks by rank."""
        if self._store is None:
            return {}
        self._store.set(f"{topic} {self.rank}", text)
        self._store.add(f"{topic} errors", 1 if text else 0)
        if self._store.add(f"{topic} all", 1) == len(self.global_ranks):
            self._store.set(f"{topic} result", str(self._store.add(f"{topic} errors", 0)))
        if self._wait_for_text(f"{topic} result", f"read all ranks' {topic}") == "0":
            return {}
        texts = {rank: self._store.get(f"{topic} {rank}").decode() for rank in range(len(self.global_ranks))}
        return {rank: text for rank, text in texts.items() if text}

    def _wait_for_text(self, key: str, what: str) -> str:
        assert self._store is not None and self._monitor is not None
        start = time.monotonic()
        with self.explain_errors(what, start):
            if self._wait_for_key(key, what, None, start):
                return self._store.get(key).decode()
            missing = self._monitor.missing_ranks()
        hint = f"ranks {missing} have not called it" if missing else "one of them has not"
        text = f"rank {self.rank} waited {_elapsed(start)} to {what}: all ranks must call shard(), {hint}"
        self._monitor.faults.post(FAULT_ERROR, text)
        raise RanksDisagreeError(text)

    def _wait_for_key(self, key: str, what: str, event_index: int | None, began: float) -> bool:
        """Wait until a key is in the store. Return False at the timeout; raise if it will never be there."""
        assert self._store is not None and self._monitor is not None
        pause, is_late = 0.0002, False
        while not self._store.check([key]):  # store.wait() is not interruptible and blocks other users
            waited = time.monotonic() - began
            if self._blocking_fault(event_index) is not None and not self._store.check([key]):
                raise self._fault_error(what, began, event_index)
            if waited > self.timeout:
                return False
            if waited > LATE_AFTER_SECONDS and not is_late:
                is_late = True
                self._monitor.request_comparison()
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02 if len(self.global_ranks) <= 64 else 0.2)
        return True

    def raise_on_fault(self, event_index: int, what: str) -> None:
        """Raise if a known fault keeps this rank from reaching ``event_index``."""
        if self._blocking_fault(event_index) is not None:
            raise self._fault_error(what, None, event_index)

    def wait_for_work(self, work: Any, what: str, began: float) -> None:
        """Wait for a collective that took longer than a poll interval; raise when it will never complete."""
        self.announce("wait", what)
        while True:
            if work.is_completed():
                with self.explain_errors(what, began):
                    work.wait()
                return
            if any(fault.is_final for fault in self.faults):
                raise self._fault_error(what, began, None)
            if time.monotonic() - began > self.timeout:
                raise self._disagreement_error(f"could not {what} within {_elapsed(began)}")
            with contextlib.suppress(RuntimeError):  # not complete, or failed: is_completed() shows which
                work.wait(POLL_INTERVAL / 4)

    @contextlib.contextmanager
    def explain_errors(self, what: str, began: float | None = None) -> Iterator[None]:
        """Turn a failure of a collective or of the store into an error that names the rank that caused it."""
        try:
            yield
        except RanksDisagreeError:
            raise
        except Exception as error:
            if not (isinstance(error, RuntimeError) or self.faults):  # an aborted collective leaves arbitrary bytes
                raise
            raise self.explain_failure(what, error, began) from error

    def explain_failure(self, what: str, error: BaseException, began: float | None = None) -> RanksDisagreeError:
        """Return an error that explains a failed collective or store access: usually a rank has died."""
        first_line = str(error).partition("\n")[0]
        if self._monitor is None:
            return RanksDisagreeError(f"{what} failed: {first_line}")
        deadline = time.monotonic() + self._monitor.max_detection_seconds
        while not self.faults and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.faults:
            return self._fault_error(what, began, None, first_line)
        failed = f"could not {what}{_elapsed_clause(began)}: {first_line}"
        try:
            return self._disagreement_error(failed)
        except RuntimeError:  # the store died with its rank
            return RanksDisagreeError(f"rank {self.rank} {failed}")

    def announce(self, topic: str, text: str) -> None:
        """Tell ranks that will wait for this one what it waits in ("wait"), or why it left its pass ("note")."""
        if self._store is not None and self._monitor is not None:
            with contextlib.suppress(RuntimeError):  # the store died with its rank
                self._store.set(f"{topic} {self.rank}", f"{self.event_count}:{text}")
                self._monitor.request_comparison()

    def position(self) -> tuple[int, str] | None:
        """Return how many events this rank has reached, and a description of the last; None for a dropped model."""
        if self._progress is None:
            return NO_POSITION
        progress = self._progress()
        return None if progress is None else (progress.event_count, progress.describe_last_event())

    @property
    def event_count(self) -> int:
        """How many events this rank has reached."""
        return (self.position() or NO_POSITION)[0]

    def describe_conflict(self, announcements: AnnouncementReader, barrier: BarrierWait | None) -> str:
        """Describe how this rank differs from what others have announced; "" if it does not, or not yet.

        If others announced an event index that this rank has passed, it can no longer be confirmed: had the event been
        unexpected here, this rank would have announced it too. After an exception has ended a pass, a rank's next event
        can only be the start of another pass.
        """
        progress = self._progress() if self._progress is not None else None
        if progress is None:
            return ""
        passed = progress.event_count  # read first: an event is confirmed before it is passed
        confirmed, (asked_index, asked_event) = self._last_confirmed, self._last_announced
        announced = announcements.events

        def own_event(index: int) -> str:
            return progress.event_at(index) if index <= passed else asked_event if index == asked_index else ""

        for index in sorted({index for index, _ in announced.values() if index > confirmed}):
            theirs = {rank: what for rank, (at, what) in announced.items() if at == index}
            if index <= passed or (index == asked_index and any(what != asked_event for what in theirs.values())):
                others = "; ".join(f"rank {rank} is about to {what}" for rank, what in theirs.items())
                mine = own_event(index) or "another call"
                return f"ranks disagree: {others}, but rank {self.rank} is at: {mine}. {_ADVICE}"
        for rank, (index, what) in (*announced.items(), *announcements.waits.items()):
            if barrier is not None and index > max(confirmed, passed) and self.global_ranks[rank] in barrier.ranks:
                here = f"rank {self.rank} waits for it in torch.distributed.barrier() ({barrier.call_site})"
                return f"ranks disagree: rank {rank} is about to {what}, but {here}. {_ADVICE}"
        for rank, (index, why) in announcements.failures.items():
            mine = own_event(index + 1)
            if mine and not mine.startswith(PASS_START):
                return f"rank {rank} failed: {why}. Rank {self.rank} is at: {mine}"
        return ""

    def _blocking_fault(self, event_index: int | None) -> RankFault | None:
        return next((fault for fault in self.faults if fault.is_blocking(event_index)), None)

    def _fault_error(self, what: str, began: float | None, index: int | None, error: str = "") -> RanksDisagreeError:
        fault = self._blocking_fault(index) or self.faults[0]
        if self._monitor is not None and fault.is_blocking(self.event_count):
            self._monitor.wait_for_abort()
        error_clause = f" ({error})" if error else ""
        failures = "".join(f" {failure}." for failure in self._announced_failures() if failure not in fault.text)
        return RanksDisagreeError(
            f"rank {self.rank} cannot {what}{_elapsed_clause(began)}: {fault.text}{error_clause}{failures}"
        )

    def _announced_failures(self) -> list[str]:
        """Return the reasons other ranks recorded before they left their pass: see :meth:`announce`."""
        found: Announcements = {}
        with contextlib.suppress(RuntimeError):  # the store died with its rank
            if self._monitor is not None:
                found = self._monitor.announcements.read("note")
        return [f"rank {rank} failed: {why}" for rank, (index, why) in found.items() if index >= self._last_confirmed]

    def _disagreement_error(self, what: str) -> RanksDisagreeError:
        """Describe the positions of all ranks, in the returned error and to the other ranks."""
        assert self._monitor is not None
        events, elsewhere = self._monitor.announcements.read("rank"), []
        for rank in self._monitor.announcements.other_ranks:
            index, event = events.get(rank, (-1, ""))
            if index > self._last_confirmed:
                elsewhere.append(f"rank {rank} is about to {event}")
            else:
                last = self._monitor.last_position(rank) or "none"
                elsewhere.append(f"rank {rank} has announced nothing (its last known event: {last})")
        elsewhere += self._announced_failures()
        text = f"ranks disagree: rank {self.rank} {what}. {'; '.join(elsewhere)}. {_ADVICE}"
        self._monitor.faults.post(FAULT_ERROR, text)
        self._monitor.wait_for_abort()
        return RanksDisagreeError(text)


def _elapsed(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"


def _elapsed_clause(began: float | None) -> str:
    return "" if began is None else f", after {_elapsed(began)}"


def open_consistency_checker(
    mesh: DeviceMesh | None,
    timeout: float | None,
    heartbeat_timeout: float = 8.0,
    device: torch.device | None = None,
) -> ConsistencyChecker:
    """Create the mesh's consistency checker: see [Note: consistency of ranks]. ``timeout`` None: the group's."""
    if timeout is None:
        groups = [dist.group.WORLD] if mesh is None else mesh.get_all_groups() if dist.is_initialized() else []
        timeout = max((_group_timeout_seconds(group, device or torch.device("cpu")) for group in groups), default=1.0)
    if not (dist.is_available() and dist.is_initialized()) or "fake" in dist.get_backend_config():
        return ConsistencyChecker(None, 0, [0], timeout)
    ranks = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
    if len(ranks) == 1:
        return ConsistencyChecker(None, 0, [0], timeout)
    rank = dist.get_rank()
    if rank not in ranks:
        raise ValueError(f"rank {rank} called shard() with a mesh of ranks {ranks}, which it is not part of")
    store = dist.distributed_c10d._get_default_store()
    prefix = f"zeroshard/{hashlib.sha1(str(ranks).encode()).hexdigest()[:12]}"
    call_count = store.add(f"{prefix}/calls of {rank}", 1)  # counts the shard() calls of these ranks
    store_of_model = PrefixStore(f"{prefix}/{call_count}", store)
    return ConsistencyChecker(store_of_model, ranks.index(rank), ranks, timeout, heartbeat_timeout)


def _group_timeout_seconds(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the timeout of a group's own collectives, in seconds."""
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # no group, or a backend without a timeout
        seconds = dist.distributed_c10d.default_pg_timeout.total_seconds()
    return seconds
