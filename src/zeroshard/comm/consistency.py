"""Agreement: a slow side channel over which ranks say where they are, used only when something is not as expected.

[Note: agreement]
Collectives carry no name: two ranks that gather different units at the same moment hang, crash, or, where sizes agree,
silently exchange each other's data. Naming every collective would cost a round trip each. Instead every rank predicts
the next collective from the recorded order (``comm/collective_order.py``). Ranks with one history predict the same; a
rank that does what was predicted needs to ask nobody. A rank about to do something *else* first announces it here and
waits until all have announced the same. So a mismatched collective is never launched: the ranks get an error at once
when all have announced and differ, and within seconds when one of them has gone past that moment with something else,
has died, raised or ended (see [Note: watch]). Where the others may only be slow, the error comes at the timeout.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from zeroshard.comm.heartbeat_monitor import FAULT_ERROR, BarrierWait, HeartbeatMonitor, RankFault, RanksDisagreeError

__all__ = ["PASS_START", "POLL_INTERVAL", "ConsistencyChecker", "RanksDisagreeError"]

PASS_START = "start "  # the event with which a pass begins
POLL_INTERVAL = timedelta(seconds=1)  # of a wait, after which the rank looks whether it waits in vain
LATE_AFTER_SECONDS = 1.0  # of waiting, after which the others are asked where they are
_ADVICE = (
    "All ranks must run the same units in the same order: look for a branch on rank or data around that unit, or a "
    "rank that skipped a call."
)


class CollectiveProgress(Protocol):
    """How far this rank has come, as :class:`zeroshard.comm.collective_order.CollectiveOrder` knows it."""

    event_count: int

    def event_at(self, event_index: int) -> str:
        """What this rank did at a moment."""

    def describe_last_event(self) -> str:
        """The last event, in words."""


class ConsistencyChecker:
    """The announcements of the ranks of one sharded model, in the process group's key-value store.

    >>> ConsistencyChecker(None, "", 0, 1, 1.0).is_distributed  # one rank alone
    False
    """

    def __init__(
        self,
        store: Store | None,
        prefix: str,
        rank: int,
        mesh_size: int,
        timeout: float,
        global_ranks: Sequence[int] = (),
        heartbeat_timeout: float = 8.0,
    ) -> None:
        self._store = store  # None: one rank, or a backend that communicates nothing
        self._prefix = prefix
        self.rank, self._mesh_size = rank, mesh_size
        self.global_ranks = list(global_ranks)  # the ranks of the mesh, as the job counts them
        self.timeout = timeout
        self._last_confirmed = -1  # the last moment all ranks announced and agreed at
        self._last_announced = (-1, "")  # the moment this rank announced last, and what
        self._stale_keys: list[str] = []  # its keys, deleted once every rank has come to a later one
        self._progress: weakref.ref[CollectiveProgress] | None = None
        self._max_poll_seconds = 0.02 if mesh_size <= 64 else 0.2
        self._monitor: HeartbeatMonitor | None = None
        if store is not None:
            self._monitor = HeartbeatMonitor(store, prefix, rank, self.global_ranks, self, heartbeat_timeout)
        self.faults: list[RankFault] = [] if self._monitor is None else self._monitor.faults

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks that really answer."""
        return self._store is not None

    def track_progress(self, progress: CollectiveProgress) -> None:
        """Say whose moments these are."""
        self._progress = weakref.ref(progress)
        if self._monitor is not None:
            self._monitor.wake()  # by now all ranks have said who they are

    def close(self) -> None:
        """Watch over the other ranks no longer: the model is plain again."""
        if self._monitor is not None:
            self._monitor.close()

    def announce_model_dropped(self, position: tuple[int, str]) -> None:
        """The model is dropped, after it came to this number of events, and to this one at last."""
        if self._monitor is not None:
            self._monitor.announce_model_dropped(position)

    def __del__(self) -> None:
        """End the watch of a model that was refused before it had an order."""
        watch = getattr(self, "_monitor", None)
        if watch is not None:
            watch.announce_model_dropped()

    # -- agreeing -----------------------------------------------------------------------------------------------

    def confirm(self, event_index: int, what: str, expected: str) -> None:
        """Go on when all ranks are at ``moment`` and about to do ``what``; raise when they are not.

        ``expected`` is what the recorded order has there: what ranks that announce nothing are doing.
        """
        if self._store is None:
            return
        began = time.monotonic()
        key = f"{self._prefix}/{event_index}"
        try:
            self._last_announced = (event_index, what)
            self._store.set(f"{self._prefix}/rank {self.rank}", f"{event_index}:{what}")
            self._store.add(f"{key}/{what}", 1)
            last = self._store.add(f"{key}/all", 1) == self._mesh_size
            if last:
                same = self._store.add(f"{key}/{what}", 0) == self._mesh_size
                self._store.set(f"{key}/verdict", "go" if same else "differ")
            if not self._wait_for_key(f"{key}/verdict", what, event_index, began):
                raise self._disagreement_error(
                    f"waited {_elapsed(began)} to {what}, where the recorded order has: {expected}"
                )
            if self._store.get(f"{key}/verdict") != b"go":
                raise self._disagreement_error(f"is about to {what}, where the recorded order has: {expected}")
            if last:  # every rank has read the verdict before this one
                for stale in self._stale_keys:
                    self._store.delete_key(stale)
        except RanksDisagreeError:
            raise
        except RuntimeError as error:
            raise self.explain_failure(what, error, began) from error
        self._last_confirmed = event_index
        self._stale_keys = [f"{key}/{what}", f"{key}/all", f"{key}/verdict"]

    def broadcast_text(self, topic: str, text: str) -> str | None:
        """Return what rank 0 says on a topic; None where there is nobody to ask."""
        if self._store is None:
            return None
        key = f"{self._prefix}/{topic}"
        if self.rank == 0:
            self._store.set(key, text)
        return str(self._wait_for_value(key, f"hear from rank 0 about the {topic}").decode())

    def gather_text(self, topic: str, text: str) -> dict[int, str]:
        """Tell all ranks of a complaint, or of none (""), and return all complaints by rank."""
        if self._store is None:
            return {}
        key = f"{self._prefix}/{topic}"
        self._store.set(f"{key} {self.rank}", text)
        self._store.add(f"{key} bad", 1 if text else 0)
        if self._store.add(f"{key} told", 1) == self._mesh_size:
            self._store.set(f"{key} verdict", str(self._store.add(f"{key} bad", 0)))
        bad = int(self._wait_for_value(f"{key} verdict", f"hear what all ranks say about the {topic}"))
        if not bad:
            return {}
        said = {rank: self._store.get(f"{key} {rank}").decode() for rank in range(self._mesh_size)}
        return {rank: text for rank, text in said.items() if text}

    def _wait_for_value(self, key: str, what: str) -> bytes:
        if self._store is None or self._monitor is None:
            raise ValueError("there is no store to read")
        began = time.monotonic()
        try:
            if not self._wait_for_key(key, what, None, began):
                missing = self._monitor.missing_ranks()
                told = f": ranks {missing} have not called it" if missing else ""
                text = f"rank {self.rank} waited {_elapsed(began)} to {what}: have all ranks called shard(){told}?"
                self._monitor.post_fault(FAULT_ERROR, text)
                raise RanksDisagreeError(text)
            return self._store.get(key)
        except RanksDisagreeError:
            raise
        except RuntimeError as error:
            raise self.explain_failure(what, error, began) from error

    def _wait_for_key(self, key: str, what: str, event_index: int | None, began: float) -> bool:
        """Wait until a key is in the store; return False at the timeout, and raise where it will never be."""
        if self._store is None or self._monitor is None:
            raise ValueError("there is no store to read")
        pause, late = 0.0002, False
        while not self._store.check([key]):  # a wait in the store could not be left, and blocks its other users
            waited = time.monotonic() - began
            if self._blocking_fault(event_index) is not None and not self._store.check([key]):
                raise self._fault_error(what, began, event_index)
            if waited > self.timeout:
                return False
            if waited > LATE_AFTER_SECONDS and not late:
                late = True
                self._monitor.request_comparison()
            time.sleep(pause)
            pause = min(1.5 * pause, self._max_poll_seconds)
        return True

    # -- faults -------------------------------------------------------------------------------------------------

    def raise_on_fault(self, event_index: int, what: str) -> None:
        """Raise where a fault is known that keeps this rank from its event number ``moment``."""
        if self._blocking_fault(event_index) is not None:
            raise self._fault_error(what, None, event_index)

    def wait_for_work(self, work: Any, what: str, began: float) -> None:
        """Wait on for a collective that took longer than a slice; raise when it will not end any more."""
        while True:
            if work.is_completed():
                try:
                    work.wait()
                    return
                except RuntimeError as error:
                    raise self.explain_failure(what, error, began) from error
            if any(fault.is_final for fault in self.faults):
                raise self._fault_error(what, began, None)
            if time.monotonic() - began > self.timeout:
                raise self._disagreement_error(f"could not finish to {what} within {_elapsed(began)}")
            with contextlib.suppress(RuntimeError):  # it has not ended, or has failed: is_completed() tells
                work.wait(POLL_INTERVAL / 4)

    def explain_failure(self, what: str, error: BaseException, began: float | None = None) -> RanksDisagreeError:
        """Explain a collective, or a look into the store, that failed: mostly because a rank has gone."""
        first_line = str(error).partition("\n")[0]
        if self._monitor is None:
            return RanksDisagreeError(f"{what} failed: {first_line}")
        deadline = time.monotonic() + self._monitor.max_detection_seconds
        while not self.faults and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.faults:
            return self._fault_error(what, began, None, first_line)
        try:
            return self._disagreement_error(f"could not finish to {what}{_elapsed_clause(began)} ({first_line})")
        except RuntimeError:  # the store went down with its rank
            return RanksDisagreeError(
                f"rank {self.rank} could not finish to {what}{_elapsed_clause(began)}: {first_line}"
            )

    def announce_failure(self, why: str) -> None:
        """Leave word for the ranks that will wait for this one in vain: it has left its pass by an exception."""
        if self._store is not None and self._monitor is not None:
            with contextlib.suppress(RuntimeError):  # the store went down with its rank
                self._store.set(f"{self._prefix}/note {self.rank}", f"{self.position()[0]}:{why}")
                self._monitor.request_comparison()

    def position(self) -> tuple[int, str]:
        """How many events this rank has come to, and the last of them in words."""
        progress = self._progress() if self._progress is not None else None
        return (0, "shard()") if progress is None else (progress.event_count, progress.describe_last_event())

    def describe_conflict(
        self,
        announced: dict[int, tuple[int, str]],
        failure_notes: dict[int, tuple[int, str]],
        barrier: BarrierWait | None,
    ) -> str:
        """Say how this rank differs from what others have announced; "" where it does not, or not yet.

        What others announced at a moment that this rank has passed cannot be agreed on any more: it would have
        announced it, too, had it seen the need. After an exception has ended a pass, a rank's next event can only be
        the start of another one.
        """
        progress = self._progress() if self._progress is not None else None
        if progress is None:
            return ""
        passed = progress.event_count  # first: what was agreed on is settled before it is passed
        settled, (asking, asked) = self._last_confirmed, self._last_announced
        for moment in sorted({moment for moment, _ in announced.values() if moment > settled}):
            theirs = {rank: what for rank, (at, what) in announced.items() if at == moment}
            mine = progress.event_at(moment) if moment <= passed else asked if moment == asking else ""
            if moment <= passed or (moment == asking and any(what != asked for what in theirs.values())):
                said = "; ".join(f"rank {rank} is about to {what}" for rank, what in theirs.items())
                return (
                    f"ranks disagree: {said}, where rank {self.rank} has come to: {mine or 'another call'}. {_ADVICE}"
                )
        for rank, (moment, what) in announced.items():
            if barrier is not None and moment > max(settled, passed) and self.global_ranks[rank] in barrier.ranks:
                here = f"rank {self.rank} waits for it in torch.distributed.barrier() ({barrier.call_site})"
                return f"ranks disagree: rank {rank} is about to {what}, where {here}. {_ADVICE}"
        for rank, (moment, why) in failure_notes.items():
            after = moment + 1
            mine = progress.event_at(after) if after <= passed else asked if after == asking else ""
            if mine and not mine.startswith(PASS_START):
                return f"rank {rank} failed: {why}. Rank {self.rank} has come to: {mine}"
        return ""

    def _blocking_fault(self, event_index: int | None) -> RankFault | None:
        return next((fault for fault in self.faults if fault.is_blocking(event_index)), None)

    def _fault_error(
        self, what: str, began: float | None, event_index: int | None, error: str = ""
    ) -> RanksDisagreeError:
        fault = self._blocking_fault(event_index) or self.faults[0]
        told = f" ({error})" if error else ""
        notes = "".join(f" {note}." for note in self._announced_failures() if note not in fault.text)
        return RanksDisagreeError(f"rank {self.rank} cannot {what}{_elapsed_clause(began)}: {fault.text}{told}{notes}")

    def _announced_failures(self) -> list[str]:
        """What other ranks said of themselves before they left their pass: see :meth:`announce_failure`."""
        found = []
        with contextlib.suppress(RuntimeError):  # the store went down with its rank
            for rank in range(self._mesh_size):
                moment, why = self._read_announcement("note", rank) if rank != self.rank else (-1, "")
                if why and moment >= self._last_confirmed:
                    found.append(f"rank {rank} failed: {why}")
        return found

    def _disagreement_error(self, what: str) -> RanksDisagreeError:
        """Say where all ranks are, here and to the others."""
        if self._store is None or self._monitor is None:
            raise ValueError("one rank cannot disagree with itself")
        elsewhere = []
        positions = self._monitor.last_positions()
        for rank in range(self._mesh_size):
            if rank == self.rank:
                continue
            moment, said = self._read_announcement("rank", rank)
            if moment > self._last_confirmed:
                elsewhere.append(f"rank {rank} is about to {said}")
            else:
                known = f"the last it was known to come to: {positions[rank]}" if rank in positions else "not heard of"
                elsewhere.append(f"rank {rank} has announced nothing ({known})")
        elsewhere += self._announced_failures()
        text = f"ranks disagree: rank {self.rank} {what}. {'; '.join(elsewhere)}. {_ADVICE}"
        self._monitor.post_fault(FAULT_ERROR, text)
        return RanksDisagreeError(text)

    def _read_announcement(self, topic: str, rank: int) -> tuple[int, str]:
        key = f"{self._prefix}/{topic} {rank}"
        if self._store is None or not self._store.check([key]):
            return -1, ""
        moment, _, said = self._store.get(key).decode().partition(":")
        return int(moment), said


def _elapsed(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"


def _elapsed_clause(began: float | None) -> str:
    return "" if began is None else f", after {_elapsed(began)}"
