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
  the event index that another one announces knows that the two differ, and adds that to the fault list; so does one
  that waits for the announcing rank in a ``torch.distributed.barrier`` of the user. A rank that has not reached the
  event yet may be slow: that is not a fault.

A waiting thread polls, and between polls it checks the faults that its monitor has found. Under NCCL the host does not
wait, but the device may, forever: there the monitor aborts the communicators of the faulty rank's groups, and the next
call of zeroshard raises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

HEARTBEAT_INTERVAL_SECONDS = 1.0  # between two polls
NEIGHBORS_PER_SIDE = 4  # ranks on either side that a rank checks
COLLECTIVE_GRACE_SECONDS = 3.0  # time for collectives to complete that a rank joined before it exited
EXIT_GRACE_SECONDS = 3.0  # a process that exits by an exception waits this long for others to read why
BARRIER_STUCK_POLLS = 3  # a barrier moves no data: after this many polls it is stuck
THREAD_NAME = "zeroshard watch"

FAULT_ERROR, FAULT_DIED, FAULT_EXITED = "error", "gone", "ended"  # kinds of RankFault


class RanksDisagreeError(RuntimeError):
    """A rank waits for another that will not arrive: it has died, raised, exited or does something else."""


@dataclass(frozen=True)
class RankFault:
    """Why a rank will not join the collectives that others wait for."""

    kind: str  # FAULT_ERROR: ranks differ, the job cannot continue; FAULT_DIED; FAULT_EXITED: it ended by itself
    rank: int  # in the mesh
    text: str
    moment: int = -1  # FAULT_EXITED: the number of events it joined
    known_since: float = 0.0

    def is_blocking(self, event_index: int | None) -> bool:
        """Whether this rank cannot reach ``event_index`` (None: whether it cannot continue at all)."""
        return self.kind != FAULT_EXITED or event_index is None or event_index > self.moment

    @property
    def is_final(self) -> bool:
        """Whether collectives in flight with that rank will never complete."""
        return self.kind == FAULT_ERROR or time.monotonic() - self.known_since > COLLECTIVE_GRACE_SECONDS


class MonitoredRank(Protocol):
    """What the monitor needs of :class:`zeroshard.comm.consistency.ConsistencyChecker`."""

    def position(self) -> tuple[int, str]:
        """Return how many events this rank has reached, and a description of the last."""

    def describe_conflict(
        self,
        announced: dict[int, tuple[int, str]],
        failure_notes: dict[int, tuple[int, str]],
        barrier: BarrierWait | None,
    ) -> str:
        """Describe how this rank differs from what others have announced; "" if it does not, or not yet."""


@dataclass(frozen=True)
class BarrierWait:
    """A ``torch.distributed.barrier`` of the user in which this rank's thread waits."""

    ranks: tuple[int, ...]  # global ranks
    call_site: str  # file and line of the call
    frame_id: int  # distinguishes it from the next one


@dataclass
class _Peer:
    """Another rank: its process and its heartbeats."""

    rank: int
    machine: str
    pid: int
    start_time: str  # distinguishes the process from a later one with the same pid
    heartbeat: bytes = b""
    unchanged_polls: int = 0  # polls since its heartbeat last changed
    pidfd: int | None = None
    is_alive: bool = True


class HeartbeatMonitor:
    """The thread that monitors the other ranks of one sharded model: see [Note: heartbeats and faults]."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        global_ranks: list[int],
        monitored: MonitoredRank,
        heartbeat_timeout: float,
    ) -> None:
        self.faults: list[RankFault] = []  # never replaced: others hold a reference to the list
        # Its own connection: it works while the rank's thread waits in the store.
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._prefix, self._rank, self._global_ranks = f"{prefix}/watch", rank, global_ranks
        self._heartbeat_timeout = heartbeat_timeout
        self._monitored = weakref.ref(monitored)
        self._heartbeat_count = self._faults_read = 0
        self._comparison_requests = b"0"
        self._announcements: dict[int, tuple[int, str]] = {}
        self._failure_notes: dict[int, tuple[int, str]] = {}
        self._position = (0, "")
        self._peers: list[_Peer] | None = None
        self._has_aborted = False  # whether NCCL communicators were aborted
        self._has_group = False  # whether the rank had a process group at the last poll
        self._rank_thread_id = threading.get_ident()
        self._barrier: BarrierWait | None = None
        self._barrier_polls = 0  # polls at which the rank was found in it
        self._is_closed = self._is_model_dropped = False
        self._lock = threading.RLock()  # guards the wake pipe; reentrant: a garbage collection may call wake()
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        self._ready_fds: set[int] = set()  # file descriptors that woke the thread
        self._poller = select.poll()
        self._poller.register(self._wake_read_fd, select.POLLIN)
        for key in ("faults", "lates"):
            self._store.add(f"{self._prefix}/{key}", 0)
        self._store.set(
            f"{self._prefix}/who {rank}", json.dumps([_machine_id(), os.getpid(), _process_start_time(os.getpid())])
        )
        self._exit_finalizer = util.Finalize(None, self._at_exit, exitpriority=100)  # also in child processes
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # -- called by the rank itself --------------------------------------------------------------------------------

    def post_fault(self, kind: str, text: str, moment: int = -1, rank: int | None = None) -> None:
        """Add a fault of this rank, or of another, to the fault list in the store."""
        record = {"kind": kind, "rank": self._rank if rank is None else rank, "text": text, "moment": moment}
        with contextlib.suppress(RuntimeError):  # the store died with its rank
            index = self._store.add(f"{self._prefix}/faults", 1)
            self._store.set(f"{self._prefix}/fault {index}", json.dumps(record))

    def request_comparison(self) -> None:
        """Ask the other ranks to compare their positions with what this rank has announced."""
        with contextlib.suppress(RuntimeError):
            self._store.add(f"{self._prefix}/lates", 1)

    def announce_model_dropped(self, position: tuple[int, str] | None = None) -> None:
        """Notify the others that this rank dropped the model at ``position``, and stop the thread."""
        if not self._is_model_dropped:
            self._position = position or self._position
            self._is_model_dropped = True
            self.wake()

    def close(self) -> None:
        """Stop the thread: no rank will wait for this one any more."""
        self._exit_finalizer.cancel()
        self._stop()

    @property
    def max_detection_seconds(self) -> float:
        """Seconds after which every fault that explains a failure is known."""
        peers = self._peers or []
        are_all_local = len(peers) == len(self._global_ranks) - 1 and all(
            peer.machine == _machine_id() for peer in peers
        )
        return COLLECTIVE_GRACE_SECONDS if are_all_local else self._heartbeat_timeout + 1.5 * HEARTBEAT_INTERVAL_SECONDS

    def last_positions(self) -> dict[int, str]:
        """Return the last known positions of the other ranks, from their heartbeats."""
        positions = {}
        for rank in range(len(self._global_ranks)):
            key = f"{self._prefix}/beat {rank}"
            if rank != self._rank and self._store.check([key]):
                positions[rank] = self._store.get(key).decode().split(" ", 2)[-1]
        return positions

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not called shard() for this model."""
        return [r for r in range(len(self._global_ranks)) if not self._store.check([f"{self._prefix}/who {r}"])]

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed and not self._is_model_dropped and self._poll_once():
                self._ready_fds = {fd for fd, _ in self._poller.poll(1000 * HEARTBEAT_INTERVAL_SECONDS)}
                if self._wake_read_fd in self._ready_fds:
                    os.read(self._wake_read_fd, 64)
            if not self._is_closed and self._is_model_dropped:
                self._post_exit("has no such sharded model any more")
                self._exit_finalizer.cancel()
        finally:
            for peer in self._peers or ():
                if peer.pidfd is not None:
                    os.close(peer.pidfd)
            with self._lock:
                fds, self._wake_write_fd = (self._wake_read_fd, self._wake_write_fd), -1
                for fd_to_close in fds:
                    os.close(fd_to_close)

    def _poll_once(self) -> bool:
        """Write a heartbeat and read the store; return whether to continue."""
        monitored = self._monitored()
        if monitored is None:  # being garbage-collected
            return True
        self._position = monitored.position()
        had_group, self._has_group = self._has_group, dist.is_initialized()
        try:
            self._heartbeat_count += 1
            heartbeat = f"{self._heartbeat_count} {self._position[0]} {self._position[1]}"
            self._store.set(f"{self._prefix}/beat {self._rank}", heartbeat)
            if had_group and not self._has_group:
                self._post_exit("has destroyed its process group")
            self._check_processes()  # first: under NCCL, abort a dead rank's communicators early
            self._read_faults()
            self._check_heartbeats()
            self._abort_hung_collectives()  # this rank may have advanced since a fault was found
            conflict = monitored.describe_conflict(self._announcements, self._failure_notes, self._stuck_barrier())
            if conflict:
                self.post_fault(FAULT_ERROR, conflict)
                self._read_faults()
        except (RuntimeError, ValueError) as error:
            time.sleep(0.3)  # connections close before a process ends
            self._ready_fds = {fd for fd, _ in self._poller.poll(0)}
            self._check_processes(is_store_reachable=False)
            if not self.faults:
                lost = (
                    f"the job's store does not answer ({_first_line(error)}): rank 0, or the launcher, which holds it"
                )
                self._add_fault(RankFault(FAULT_DIED, 0, f"{lost}, is gone", known_since=time.monotonic()))
            return False
        return not any(fault.kind != FAULT_EXITED for fault in self.faults)

    def _read_faults(self) -> None:
        faults, comparison_requests = self._store.multi_get([f"{self._prefix}/faults", f"{self._prefix}/lates"])
        for index in range(self._faults_read + 1, int(faults) + 1):
            self._faults_read = index
            key = f"{self._prefix}/fault {index}"
            if not self._store.check([key]):
                time.sleep(0.1)  # it is being written
                if not self._store.check([key]):
                    continue
            record = json.loads(self._store.get(key))
            if record["rank"] != self._rank or record["kind"] != FAULT_EXITED:
                self._add_fault(RankFault(**record, known_since=time.monotonic()))
            if record["rank"] != self._rank:
                self._store.add(f"{key} read", 1)
        if comparison_requests != self._comparison_requests:
            self._comparison_requests = comparison_requests
            self._announcements = self._read_announcements("rank")
            self._failure_notes = self._read_announcements("note")

    def _stuck_barrier(self) -> BarrierWait | None:
        """Return the barrier this rank has been in for several polls, while another has announced something else."""
        barrier = _find_barrier(self._rank_thread_id) if self._announcements else None
        is_same = barrier is not None and barrier == self._barrier
        self._barrier, self._barrier_polls = barrier, self._barrier_polls + 1 if is_same else 0
        return barrier if self._barrier_polls >= BARRIER_STUCK_POLLS else None

    def _read_announcements(self, topic: str) -> dict[int, tuple[int, str]]:
        announcements = {}
        parent = self._prefix.rpartition("/")[0]
        for rank in range(len(self._global_ranks)):
            key = f"{parent}/{topic} {rank}"
            if rank != self._rank and self._store.check([key]):
                index, _, text = self._store.get(key).decode().partition(":")
                announcements[rank] = (int(index), text)
        return announcements

    def _add_fault(self, fault: RankFault) -> None:
        self.faults[:] = sorted([*self.faults, fault], key=lambda item: item.kind == FAULT_EXITED)  # the worst first
        self._abort_hung_collectives()

    def _abort_hung_collectives(self) -> None:
        """Under NCCL, make the device stop waiting for a rank that will not arrive."""
        for fault in self.faults:
            if not self._has_aborted and fault.is_blocking(self._position[0]):
                self._has_aborted = True
                _abort_nccl(
                    {self._global_ranks[fault.rank]} if fault.kind != FAULT_ERROR else set(self._global_ranks),
                    fault.text,
                )

    # -- liveness -----------------------------------------------------------------------------------------------

    def _find_peers(self) -> list[_Peer] | None:
        """Return the neighbouring ranks, once all of them have registered."""
        if self._peers is None:
            ranks = len(self._global_ranks)
            neighbors = {(self._rank + step) % ranks for step in range(-NEIGHBORS_PER_SIDE, NEIGHBORS_PER_SIDE + 1)} - {
                self._rank
            }
            keys = {rank: f"{self._prefix}/who {rank}" for rank in sorted(neighbors)}
            if self._store.check(list(keys.values())):
                texts = self._store.multi_get(list(keys.values()))
                self._peers = [_Peer(rank, *json.loads(text)) for rank, text in zip(keys, texts, strict=True)]
                for peer in self._peers:
                    self._open_pidfd(peer)
        return self._peers

    def _open_pidfd(self, peer: _Peer) -> None:
        """Wake the thread at once when a process on this machine ends, if the system supports it."""
        if peer.machine == _machine_id() and peer.pid != os.getpid() and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(peer.pid)
                if _process_start_time(peer.pid) == peer.start_time:  # else the pid was reused
                    peer.pidfd = pidfd
                    self._poller.register(pidfd, select.POLLIN)
                else:
                    os.close(pidfd)

    def _check_processes(self, is_store_reachable: bool = True) -> None:
        for peer in (self._find_peers() if is_store_reachable else self._peers) or ():
            is_local = (
                peer.machine == _machine_id() and peer.pid != os.getpid()
            )  # else ranks are threads of this process
            is_gone = (
                peer.pidfd in self._ready_fds
                if peer.pidfd is not None
                else _process_start_time(peer.pid) != peer.start_time
            )
            if not (is_local and peer.is_alive and is_gone):
                continue
            peer.is_alive = False
            if peer.pidfd is not None:
                self._poller.unregister(peer.pidfd)
            if is_store_reachable:
                with contextlib.suppress(RuntimeError):  # the process may have held the store
                    self._read_faults()  # it may have recorded a reason
            self._report_death(peer, f"its process {peer.pid} was killed, or ended without a word", is_store_reachable)

    def _check_heartbeats(self) -> None:
        remote = [peer for peer in self._find_peers() or () if peer.machine != _machine_id()]
        if not remote:
            return
        heartbeats = self._store.multi_get([f"{self._prefix}/beat {peer.rank}" for peer in remote])
        for peer, heartbeat in zip(remote, heartbeats, strict=True):
            peer.unchanged_polls = (
                peer.unchanged_polls + 1 if heartbeat == peer.heartbeat else 0
            )  # counted in polls: this process may have been stopped
            peer.heartbeat = heartbeat
            silence = peer.unchanged_polls * HEARTBEAT_INTERVAL_SECONDS
            if peer.is_alive and silence >= self._heartbeat_timeout:
                peer.is_alive = False
                self._report_death(
                    peer, f"nothing was heard of it, on machine {peer.machine.split()[0]}, for {silence:g} s"
                )

    def _report_death(self, peer: _Peer, how: str, is_store_reachable: bool = True) -> None:
        """Notify all ranks that a rank has died, unless it has recorded itself how it ended."""
        if any(fault.rank == peer.rank and fault.kind != FAULT_ERROR for fault in self.faults):
            return
        text = f"rank {peer.rank} has died: {how}"
        if is_store_reachable:
            with contextlib.suppress(RuntimeError):
                last = self._store.get(f"{self._prefix}/beat {peer.rank}").decode().split(" ", 2)[-1]
                text += f". The last it was known to come to: {last}"
                self.post_fault(FAULT_DIED, text, rank=peer.rank)
        self._add_fault(RankFault(FAULT_DIED, peer.rank, text, known_since=time.monotonic()))

    # -- shutdown -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make the thread poll now."""
        with self._lock:
            if self._wake_write_fd >= 0:
                os.write(self._wake_write_fd, b"x")

    def _stop(self) -> None:
        self._is_closed = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _at_exit(self) -> None:
        """Record how this process ends."""
        monitored = self._monitored()
        self._position = self._position if monitored is None else monitored.position()
        error = _ending_error()
        has_raised = error is not None and not isinstance(error, RanksDisagreeError)  # the others know of that one
        self._post_exit(f"raised {type(error).__name__}: {error}" if has_raised else "has ended")
        if error is not None:
            self._wait_until_read()
        self._stop()

    def _post_exit(self, how: str) -> None:
        moment, last = self._position
        self.post_fault(FAULT_EXITED, f"rank {self._rank} {how}. The last it came to: {last}", moment)

    def _wait_until_read(self) -> None:
        """Wait until the others have read why: this process may hold the store, and NCCL may end theirs with it."""
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        with contextlib.suppress(RuntimeError):
            unread = [
                f"{self._prefix}/fault {n + 1} read" for n in range(int(self._store.get(f"{self._prefix}/faults")))
            ]
            while unread and time.monotonic() < deadline:
                time.sleep(0.05)
                unread = [key for key in unread if self._store.add(key, 0) < len(self._global_ranks) - 1]


def _find_barrier(thread: int) -> BarrierWait | None:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("barrier", "monitored_barrier") and code.co_filename.endswith("distributed_c10d.py"):
            group, caller = frame.f_locals.get("group"), frame.f_back
            while caller is not None and caller.f_code.co_filename.endswith("c10d_logger.py"):  # its decorators
                caller = caller.f_back
            line = f"{caller.f_code.co_filename}, line {caller.f_lineno}" if caller is not None else "an unknown line"
            try:
                return BarrierWait(tuple(dist.get_process_group_ranks(group)), line, id(frame))
            except (KeyError, ValueError, RuntimeError):  # a group that is being destroyed
                return None
        frame = frame.f_back
    return None


def _ending_error() -> BaseException | None:
    """Return the exception that ends this process; None if there is none."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
    if isinstance(error, SystemExit):  # multiprocessing exits this way after an exception
        error = error.__context__
    return error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@cache
def _machine_id() -> str:
    """Return an id of the machine and its pid namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _process_start_time(pid: int) -> str:
    """Return the start time of a process on this machine, in system ticks; "" if it does not exist or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "running"


def _abort_nccl(ranks: set[int], why: str) -> None:
    """Abort the NCCL communicators of the ranks: work that waits on the device ends, with invalid values."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return
    world: Any = dist.distributed_c10d._world
    threads = []
    for group in list(world.pg_map):
        if not ranks & set(world.pg_group_ranks.get(group, ())):
            continue
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue
        if isinstance(backend, dist.ProcessGroupNCCL):
            # One thread each: a kernel of one communicator may wait for one of another.
            threads.append(threading.Thread(target=_abort_backend, args=(backend,), name=THREAD_NAME, daemon=True))
    if threads:
        for thread in threads:
            thread.start()
        logging.getLogger("zeroshard").error("NCCL's communicators are ended, because %s", why)
        for thread in threads:
            thread.join(5.0)


def _abort_backend(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()
