"""HeartbeatMonitor: detects within seconds that another rank has died, raised, exited or left the order.

[Note: heartbeats and faults]
A rank that waits for another cannot tell whether that one is slow or will never arrive. So every rank has a small
daemon thread for each sharded model, with its own connection to the job's store. Once a second it writes a heartbeat
(how many collectives this rank has reached, and the last of them), and reads three things:

- the *fault list*: what went wrong on any rank. A process that exits records there whether an exception ended it, and
  which one; a rank that raises ``RanksDisagreeError`` records what it found. All others read it.
- whether the *neighbouring ranks* are alive. On the same machine the operating system knows (a pidfd, or /proc): a
  process that computes without releasing the GIL, or is stopped in a debugger, is alive. On another machine, a rank
  whose heartbeats stop for ``heartbeat_timeout`` seconds is dead. Each rank checks the ``NEIGHBORS_PER_SIDE`` ranks on
  either side, so that the load on the store grows with the number of ranks and not with its square.
- the *announcements* of ranks that have waited for a second (see [Note: consistency of ranks]). A rank that has passed
  the event index that another one announces knows that the two differ, and adds that to the fault list. So does one
  that waits in a ``torch.distributed.barrier`` of the user for the announcing rank, or for one that waits in an
  expected collective. A rank that has not reached the event yet may be slow: that is not a fault.

A waiting thread polls, and between polls it checks the faults that its monitor has found. Under NCCL the host does not
wait, but the device may, forever: there the monitor aborts the communicators of the faulty rank's groups, and the next
call of zeroshard raises. It raises after they are aborted: an exception frees tensors, and freeing their memory may
wait for the device while it holds the GIL, without which the monitor could not abort what the device waits for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from zeroshard.comm.peers import HEARTBEAT_INTERVAL_SECONDS, BarrierDetector, BarrierWait, Peer, PeerWatch

COLLECTIVE_GRACE_SECONDS = 3.0  # time for collectives to complete that a rank joined before it exited
STORE_GRACE_SECONDS = 3.0  # a process whose store does not answer any more may end this much later
EXIT_GRACE_SECONDS = 3.0  # a process that exits by an exception waits this long for others to read why
MAX_ABORT_SECONDS = 5.0  # that the abort of a communicator is waited for
MAX_ERROR_CHARS = 10_000  # of an exception's text: the store drops a connection that sends more than 8 MB
THREAD_NAME = "zeroshard heartbeats"

FAULT_ERROR, FAULT_DIED, FAULT_EXITED = "error", "died", "exited"  # kinds of RankFault

Announcements = dict[int, tuple[int, str]]  # by rank: the index of an event, and the event


class RanksDisagreeError(RuntimeError):
    """A rank waits for another that will not arrive: it has died, raised, exited or does something else."""


@dataclass(frozen=True)
class RankFault:
    """Why a rank will not join the collectives that others wait for."""

    kind: str  # FAULT_ERROR: ranks differ, the job cannot continue; FAULT_DIED; FAULT_EXITED: it ended by itself
    rank: int  # in the mesh
    text: str
    event_count: int = -1  # FAULT_EXITED: the number of events it joined
    known_since: float = 0.0

    def is_blocking(self, event_index: int | None) -> bool:
        """Whether this rank cannot reach ``event_index`` (None: whether it cannot continue at all)."""
        return self.kind != FAULT_EXITED or event_index is None or event_index > self.event_count

    @property
    def is_final(self) -> bool:
        """Whether collectives in flight with that rank will never complete."""
        return self.kind == FAULT_ERROR or time.monotonic() - self.known_since > COLLECTIVE_GRACE_SECONDS


class MonitoredRank(Protocol):
    """What the monitor needs of :class:`zeroshard.comm.consistency.ConsistencyChecker`."""

    def position(self) -> tuple[int, str] | None:
        """Return how many events this rank has reached, and a description of the last; None for a dropped model."""

    def describe_conflict(self, announcements: AnnouncementReader, barrier: BarrierWait | None) -> str:
        """Describe how this rank differs from what others have announced; "" if it does not, or not yet."""


class FaultList:
    """The faults of all ranks: each rank appends to a list in the store, and reads what others appended."""

    def __init__(self, store: Store, rank: int) -> None:
        self.known: list[RankFault] = []  # the worst first; never replaced, because others hold a reference to it
        self._store, self._rank = store, rank
        self._read_count = 0
        store.add("faults", 0)

    def post(self, kind: str, text: str, event_count: int = -1, rank: int | None = None) -> None:
        """Add a fault of this rank, or of another, to the list in the store."""
        record = {"kind": kind, "rank": self._rank if rank is None else rank, "text": text, "event_count": event_count}
        with contextlib.suppress(RuntimeError):  # the store died with its rank
            self._store.set(f"fault {self._store.add('faults', 1)}", json.dumps(record))

    def add(self, kind: str, rank: int, text: str, event_count: int = -1) -> None:
        fault = RankFault(kind, rank, text, event_count, time.monotonic())
        # In one assignment: other threads read the list, and list.sort() would empty it meanwhile.
        self.known[:] = sorted([*self.known, fault], key=lambda known: known.kind == FAULT_EXITED)

    @property
    def has_failure(self) -> bool:
        """Whether a rank has failed; one that ended by itself has not."""
        return any(fault.kind != FAULT_EXITED for fault in self.known)

    def read_new(self) -> None:
        """Read the faults that were posted since the last call."""
        for index in range(self._read_count + 1, int(self._store.get("faults")) + 1):
            self._read_count = index
            key = f"fault {index}"
            if not self._store.check([key]):
                time.sleep(0.1)  # it is being written
                if not self._store.check([key]):
                    continue
            record = json.loads(self._store.get(key))
            if record["rank"] != self._rank or record["kind"] != FAULT_EXITED:
                self.add(**record)
            if record["rank"] != self._rank:
                self._store.add(f"{key} read", 1)

    def wait_until_read(self, readers: int) -> None:
        """Wait until the others have read all faults: this process may hold the store, and NCCL may end theirs too."""
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        with contextlib.suppress(RuntimeError):
            unread = [f"fault {n + 1} read" for n in range(int(self._store.get("faults")))]
            while unread and time.monotonic() < deadline:
                time.sleep(0.05)
                unread = [key for key in unread if self._store.add(key, 0) < readers]


class AnnouncementReader:
    """Reads what the other ranks have announced, again whenever a rank requests a comparison."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.events: Announcements = {}  # what they are about to do
        self.failures: Announcements = {}  # why they left a pass
        self.waits: Announcements = {}  # what they wait in, as they expected
        self._store, self.other_ranks = store, [other for other in range(ranks) if other != rank]
        self._requests = b"0"
        store.add("late", 0)

    def read_new(self) -> None:
        """Read the announcements if a rank has requested a comparison since the last call."""
        requests = self._store.get("late")
        if requests != self._requests:
            self._requests = requests
            self.events, self.failures, self.waits = self.read("rank"), self.read("note"), self.read("wait")

    def read(self, topic: str) -> Announcements:
        """Read what the other ranks have announced on a topic."""
        announcements = {}
        for rank in self.other_ranks:
            key = f"{topic} {rank}"
            if self._store.check([key]):
                index, _, text = self._store.get(key).decode().partition(":")
                announcements[rank] = (int(index), text)
        return announcements


class HeartbeatMonitor:
    """The thread that monitors the other ranks of one sharded model: see [Note: heartbeats and faults]."""

    def __init__(
        self, store: Store, rank: int, global_ranks: Sequence[int], monitored: MonitoredRank, heartbeat_timeout: float
    ) -> None:
        # Its own connection: it works while the rank's thread waits in the store.
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._rank, self._global_ranks = rank, global_ranks
        self._heartbeat_timeout = heartbeat_timeout
        self._monitored = weakref.ref(monitored)
        self.faults = FaultList(self._store, rank)
        self._peers = PeerWatch(self._store, rank, len(global_ranks))
        self._barriers = BarrierDetector()
        self.announcements = AnnouncementReader(self._store, rank, len(global_ranks))
        self._position = (0, "")
        self._has_aborted = threading.Event()  # whether NCCL communicators were aborted
        self._has_group = False  # whether the rank had a process group at the last poll
        self._is_closed = False
        self._dropped_at: tuple[int, str] | None = None  # the position at which the rank dropped the model
        self._exit_finalizer = util.Finalize(None, self._at_exit, exitpriority=100)  # also in child processes
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # -- called by the rank itself --------------------------------------------------------------------------------

    def request_comparison(self) -> None:
        """Ask the other ranks to compare their positions with what this rank has announced."""
        with contextlib.suppress(RuntimeError):
            self._store.add("late", 1)

    def announce_model_dropped(self, position: tuple[int, str]) -> None:
        """Let the thread notify the others that this rank dropped the model at ``position``, and stop.

        Finalizers call this, so it only sets a field, which the thread reads within a second. A garbage collection may
        run inside torch code that holds a lock: code that released the GIL there, such as a write to the wake pipe,
        would deadlock with a thread that waits for that lock and holds the GIL.
        """
        self._dropped_at = position

    def wake(self) -> None:
        self._peers.wake()

    def close(self) -> None:
        """Stop the thread: no rank will wait for this one any more."""
        self._exit_finalizer.cancel()
        self._stop()

    def wait_for_abort(self) -> None:
        """Wait until NCCL communicators are aborted, before an error is raised for a fault that blocks this rank."""
        is_monitoring = self._thread.is_alive() and threading.current_thread() is not self._thread
        if is_monitoring and _nccl_backends(set(self._global_ranks)):
            self.wake()
            self._has_aborted.wait(2 * MAX_ABORT_SECONDS)

    @property
    def max_detection_seconds(self) -> float:
        """Seconds after which every fault that explains a failure is known."""
        if self._peers.are_all_ranks_local:
            return STORE_GRACE_SECONDS + 1.5 * HEARTBEAT_INTERVAL_SECONDS
        return self._heartbeat_timeout + 1.5 * HEARTBEAT_INTERVAL_SECONDS

    def last_position(self, rank: int) -> str:
        """Return the last known position of another rank, from its heartbeat; "" without one."""
        key = f"beat {rank}"
        return self._store.get(key).decode().split(" ", 2)[-1] if self._store.check([key]) else ""

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not called shard() for this model."""
        return [rank for rank in range(len(self._global_ranks)) if not self._store.check([f"who {rank}"])]

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed and self._dropped_at is None and self._poll_once():
                self._peers.wait(HEARTBEAT_INTERVAL_SECONDS)
            if not self._is_closed and self._dropped_at is not None:
                self._position = self._dropped_at
                self._post_exit("has dropped its sharded model")
                self._exit_finalizer.cancel()
        finally:
            self._peers.close()

    def _poll_once(self) -> bool:
        """Write a heartbeat and read the store; return whether to continue."""
        monitored = self._monitored()
        position = None if monitored is None else monitored.position()
        if monitored is None or position is None:  # being garbage-collected
            return True
        self._position = position
        had_group, self._has_group = self._has_group, dist.is_initialized()
        try:
            self._store.set(f"beat {self._rank}", f"{time.time_ns()} {self._position[0]} {self._position[1]}")
            if had_group and not self._has_group:
                self._post_exit("has destroyed its process group")
            self._peers.find_peers()
            self._report_ended()  # first: under NCCL, abort a dead rank's communicators early
            self._read_store()
            for peer in self._peers.pop_silent(self._heartbeat_timeout):
                machine = peer.machine.split()[0]
                self._report_death(peer, f"no heartbeat from machine {machine} for {self._heartbeat_timeout:g} s")
            conflict = monitored.describe_conflict(self.announcements, self._barriers.poll())
            if conflict:
                self.faults.post(FAULT_ERROR, conflict)
                self._read_store()
        except (RuntimeError, ValueError) as error:
            self._await_end_of_peer()
            if not self.faults.known:
                reason = str(error).partition("\n")[0]
                why = f"the job's store does not answer ({reason}): rank 0, or the launcher, which holds it, is gone"
                self.faults.add(FAULT_DIED, 0, why)
            self._abort_hung_collectives()
            return False
        return not self.faults.has_failure

    def _read_store(self) -> None:
        self.faults.read_new()
        self._abort_hung_collectives()  # also for known faults: this rank may have advanced since
        self.announcements.read_new()

    def _await_end_of_peer(self) -> None:
        """Report the rank that held the store, if it was one: its connections closed before its process has ended.

        A process that was killed first frees what it has on a GPU, which can take a second.
        """
        deadline = time.monotonic() + STORE_GRACE_SECONDS
        while not (self._is_closed or self._dropped_at or self.faults.has_failure) and time.monotonic() < deadline:
            self._peers.wait(0.1)
            self._report_ended(is_store_reachable=False)

    def _report_ended(self, is_store_reachable: bool = True) -> None:
        """Report the ranks on this machine whose process has ended."""
        for peer in self._peers.pop_ended():
            if is_store_reachable:
                with contextlib.suppress(RuntimeError):  # the process may have held the store
                    self.faults.read_new()  # it may have recorded a reason
            self._report_death(peer, f"its process {peer.pid} was killed, or exited silently", is_store_reachable)

    def _report_death(self, peer: Peer, how: str, is_store_reachable: bool = True) -> None:
        """Notify all ranks that a rank has died, unless it has recorded itself how it ended."""
        if any(fault.rank == peer.rank and fault.kind != FAULT_ERROR for fault in self.faults.known):
            return
        text = f"rank {peer.rank} has died: {how}"
        if is_store_reachable:
            with contextlib.suppress(RuntimeError):
                text += f". Its last known event: {self.last_position(peer.rank)}"
                self.faults.post(FAULT_DIED, text, rank=peer.rank)
        self.faults.add(FAULT_DIED, peer.rank, text)
        self._abort_hung_collectives()

    def _abort_hung_collectives(self) -> None:
        """Under NCCL, make the device stop waiting for a rank that will not arrive."""
        for fault in self.faults.known:
            if not self._has_aborted.is_set() and fault.is_blocking(self._position[0]):
                is_for_all = fault.kind == FAULT_ERROR
                _abort_nccl(set(self._global_ranks) if is_for_all else {self._global_ranks[fault.rank]}, fault.text)
                self._has_aborted.set()

    # -- shutdown -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._is_closed = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _at_exit(self) -> None:
        """Record how this process ends."""
        monitored = self._monitored()
        position = None if monitored is None else monitored.position()
        self._position = self._dropped_at or position or self._position
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
        if isinstance(error, SystemExit):  # multiprocessing exits this way after an exception
            error = error.__context__
        how = "has exited"
        if error is not None and not isinstance(error, RanksDisagreeError):  # the others know of that one
            how = f"raised {describe_error(error)}"
        self._post_exit(how)
        if error is not None:
            self.faults.wait_until_read(len(self._global_ranks) - 1)
        self._stop()

    def _post_exit(self, how: str) -> None:
        event_count, last = self._position
        self.faults.post(FAULT_EXITED, f"rank {self._rank} {how}. Its last event: {last}", event_count)


def describe_error(error: BaseException) -> str:
    """Return the class and text of an exception for the other ranks, whatever its ``str()`` does.

    >>> describe_error(ValueError("no " * 10_000))[:20]
    'ValueError: no no no'
    """
    text = "its str() raises an exception itself"
    with contextlib.suppress(Exception):
        text = str(error)
    return f"{type(error).__name__}: {text[:MAX_ERROR_CHARS]}"


def _abort_nccl(ranks: set[int], why: str) -> None:
    """Abort the NCCL communicators of the ranks: work that waits on the device ends, with invalid values."""
    # One thread each: a kernel of one communicator may wait for one of another.
    threads = [
        threading.Thread(target=_abort_backend, args=(backend,), name=THREAD_NAME, daemon=True)
        for backend in _nccl_backends(ranks)
    ]
    if threads:
        for thread in threads:
            thread.start()
        logging.getLogger("zeroshard").error("aborted the NCCL communicators: %s", why)
        for thread in threads:
            thread.join(MAX_ABORT_SECONDS)


def _nccl_backends(ranks: set[int]) -> list[Any]:
    """Return the NCCL backends of the groups that one of the ranks is in."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return []
    world: Any = dist.distributed_c10d._world
    backends = []
    for group in list(world.pg_map):
        if ranks & set(world.pg_group_ranks.get(group, ())):
            with contextlib.suppress(RuntimeError):  # it has none for this device
                backends.append(group._get_backend(torch.device("cuda")))
    return [backend for backend in backends if isinstance(backend, dist.ProcessGroupNCCL)]


def _abort_backend(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()
