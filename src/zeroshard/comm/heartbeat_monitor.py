"""Watch: how a rank learns within seconds that another one has died, raised, ended or left the order.

[Note: watch]
A rank that waits for another cannot tell by itself whether that one is slow or will never come. So every rank has a
small daemon thread for each sharded model, with its own connection to the job's store. Once a second it writes a
heartbeat (how many collectives this rank has come to, and the last of them), and reads three things:

- the *board*: what went wrong on any rank. A process that ends writes there at exit whether it ended by an exception
  and by which one; a rank that raises ``RanksDisagreeError`` writes what it found. All others read it.
- whether the *neighbours* live. On the same machine the operating system knows (a pidfd, or /proc): a process that
  computes without giving Python's lock free, or is stopped in a debugger, lives. On another machine heartbeats that
  stop for ``heartbeat_timeout`` seconds mean that it is dead. Each rank looks at the ``NEIGHBORS_PER_SIDE`` ranks on
  either side, so that the store's work grows with the number of ranks and not with its square.
- the *announcements* of ranks that have waited for a second (see [Note: agreement]). A rank that has gone past the
  moment which another one announces can say for certain that the two differ, and does so on the board; so can one that
  waits in a ``torch.distributed.barrier`` of the user's for the rank that announces. A rank that has not come there
  yet may be slow: that is no fault.

Waiting is done in slices, and between them the waiting thread looks at the faults that its watch has found. Under NCCL
the host does not wait, but the device may, for ever: there the watch ends the communicators of the groups that the
faulty rank is in, and the next call of zeroshard raises.
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

HEARTBEAT_INTERVAL_SECONDS = 1.0  # between two looks
NEIGHBORS_PER_SIDE = 4  # ranks on either side that a rank looks after
COLLECTIVE_GRACE_SECONDS = 3.0  # in which a collective may still end that a rank took part in before it ended
EXIT_GRACE_SECONDS = 3.0  # that a process which ends by an exception gives the others to read why
BARRIER_STUCK_POLLS = 3  # after which a barrier, which moves no data, is not about to end
THREAD_NAME = "zeroshard watch"  # of the threads

FAULT_ERROR, FAULT_DIED, FAULT_EXITED = "error", "gone", "ended"  # kinds of faults


class RanksDisagreeError(RuntimeError):
    """A rank waits for another that will not come: it has died, raised, ended or does something else."""


@dataclass(frozen=True)
class RankFault:
    """What happened to a rank that others would wait for in vain."""

    kind: str  # ERROR: ranks differ, the job cannot go on. GONE: it has died. ENDED: it ended by itself.
    rank: int  # of the mesh
    text: str
    moment: int = -1  # ENDED: how many events it took part in
    known_since: float = 0.0

    def is_blocking(self, event_index: int | None) -> bool:
        """Whether this rank cannot go on to its event number ``moment`` (None: whether it cannot go on at all)."""
        return self.kind != FAULT_EXITED or event_index is None or event_index > self.moment

    @property
    def is_final(self) -> bool:
        """Whether what is still under way with that rank will not end any more."""
        return self.kind == FAULT_ERROR or time.monotonic() - self.known_since > COLLECTIVE_GRACE_SECONDS


class MonitoredRank(Protocol):
    """What a watch looks at, as :class:`zeroshard.comm.consistency.ConsistencyChecker` has it."""

    def position(self) -> tuple[int, str]:
        """How many events this rank has come to, and the last of them in words."""

    def describe_conflict(
        self,
        announced: dict[int, tuple[int, str]],
        failure_notes: dict[int, tuple[int, str]],
        barrier: BarrierWait | None,
    ) -> str:
        """Say how this rank differs from what others have announced; "" where it does not, or not yet."""


@dataclass(frozen=True)
class BarrierWait:
    """A ``torch.distributed.barrier`` of the user's, in which this rank's thread waits."""

    ranks: tuple[int, ...]  # as the job counts them
    call_site: str  # that calls it
    frame_id: int  # tells it from the next one


@dataclass
class _Peer:
    """Another rank, as its process and its heartbeats show it."""

    rank: int
    machine: str
    pid: int
    start_time: str  # tells the process from a later one with the same number
    heartbeat: bytes = b""
    unchanged_polls: int = 0  # looks at which its heartbeat had not changed
    pidfd: int | None = None  # a pidfd
    is_alive: bool = True


class HeartbeatMonitor:
    """The thread that looks after the other ranks of one sharded model: see [Note: watch]."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        global_ranks: list[int],
        monitored: MonitoredRank,
        heartbeat_timeout: float,
    ) -> None:
        self.faults: list[RankFault] = []  # one object for as long as the watch lives: others hold it too
        # its own connection: while the rank's thread waits in the store, this one can go on
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
        self._has_aborted = False  # NCCL's communicators
        self._has_group = False  # whether the rank had a process group when this was last looked at
        self._rank_thread_id = threading.get_ident()  # the thread of the rank
        self._barrier: BarrierWait | None = None
        self._barrier_polls = 0  # at which the rank was found in it
        self._is_closed = self._is_model_dropped = False
        self._lock = threading.RLock()  # of the pipe that wakes the thread; a collector may call leave() at any time
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        self._ready_fds: set[int] = set()  # what woke the thread
        self._poller = select.poll()
        self._poller.register(self._wake_read_fd, select.POLLIN)
        for key in ("faults", "lates"):
            self._store.add(f"{self._prefix}/{key}", 0)
        self._store.set(
            f"{self._prefix}/who {rank}", json.dumps([_machine_id(), os.getpid(), _process_start_time(os.getpid())])
        )
        self._exit_finalizer = util.Finalize(
            None, self._at_exit, exitpriority=100
        )  # also in processes of multiprocessing
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # -- what the rank itself says ------------------------------------------------------------------------------

    def post_fault(self, kind: str, text: str, moment: int = -1, rank: int | None = None) -> None:
        """Write on the board what happened to this rank, or to another."""
        record = {"kind": kind, "rank": self._rank if rank is None else rank, "text": text, "moment": moment}
        with contextlib.suppress(RuntimeError):  # the store went down with its rank
            number = self._store.add(f"{self._prefix}/faults", 1)
            self._store.set(f"{self._prefix}/fault {number}", json.dumps(record))

    def request_comparison(self) -> None:
        """Have the other ranks compare where they are with what this rank has announced."""
        with contextlib.suppress(RuntimeError):
            self._store.add(f"{self._prefix}/lates", 1)

    def announce_model_dropped(self, position: tuple[int, str] | None = None) -> None:
        """Tell the others that this rank has dropped the model, after it came to ``position``, and end the thread."""
        if not self._is_model_dropped:
            self._position = position or self._position
            self._is_model_dropped = True
            self.wake()

    def close(self) -> None:
        """End the thread: nobody will wait for this rank any more."""
        self._exit_finalizer.cancel()
        self._stop()

    @property
    def max_detection_seconds(self) -> float:
        """Seconds after which every fault that explains a failure is known."""
        peers = self._peers or []
        is_all_here = len(peers) == len(self._global_ranks) - 1 and all(peer.machine == _machine_id() for peer in peers)
        return COLLECTIVE_GRACE_SECONDS if is_all_here else self._heartbeat_timeout + 1.5 * HEARTBEAT_INTERVAL_SECONDS

    def last_positions(self) -> dict[int, str]:
        """The last heartbeats of all ranks, in words, as far as there are any."""
        found = {}
        for rank in range(len(self._global_ranks)):
            key = f"{self._prefix}/beat {rank}"
            if rank != self._rank and self._store.check([key]):
                found[rank] = self._store.get(key).decode().split(" ", 2)[-1]
        return found

    def missing_ranks(self) -> list[int]:
        """The ranks that have not called shard() for this model."""
        return [r for r in range(len(self._global_ranks)) if not self._store.check([f"{self._prefix}/who {r}"])]

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed and not self._is_model_dropped and self._poll_once():
                self._ready_fds = {handle for handle, _ in self._poller.poll(1000 * HEARTBEAT_INTERVAL_SECONDS)}
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
                ends, self._wake_write_fd = (self._wake_read_fd, self._wake_write_fd), -1
                for end in ends:
                    os.close(end)

    def _poll_once(self) -> bool:
        """Write a heartbeat and read what there is; return whether to go on."""
        watched = self._monitored()
        if watched is None:  # it is just being collected
            return True
        self._position = watched.position()
        had_group, self._has_group = self._has_group, dist.is_initialized()
        try:
            self._heartbeat_count += 1
            beat = f"{self._heartbeat_count} {self._position[0]} {self._position[1]}"
            self._store.set(f"{self._prefix}/beat {self._rank}", beat)
            if had_group and not self._has_group:
                self._post_exit("has destroyed its process group")
            self._check_processes()  # first: under NCCL a dead rank's communicators are best ended at once
            self._read_faults()
            self._check_heartbeats()
            self._abort_hung_collectives()  # this rank may have gone on since a fault was found
            difference = watched.describe_conflict(self._announcements, self._failure_notes, self._stuck_barrier())
            if difference:
                self.post_fault(FAULT_ERROR, difference)
                self._read_faults()
        except (RuntimeError, ValueError) as error:
            time.sleep(0.3)  # connections end before a process does
            self._ready_fds = {handle for handle, _ in self._poller.poll(0)}
            self._check_processes(is_store_reachable=False)
            if not self.faults:
                lost = (
                    f"the job's store does not answer ({_first_line(error)}): rank 0, or the launcher, which holds it"
                )
                self._add_fault(RankFault(FAULT_DIED, 0, f"{lost}, is gone", known_since=time.monotonic()))
            return False
        return not any(fault.kind != FAULT_EXITED for fault in self.faults)

    def _read_faults(self) -> None:
        faults, lates = self._store.multi_get([f"{self._prefix}/faults", f"{self._prefix}/lates"])
        for number in range(self._faults_read + 1, int(faults) + 1):
            self._faults_read = number
            key = f"{self._prefix}/fault {number}"
            if not self._store.check([key]):
                time.sleep(0.1)  # it is just being written
                if not self._store.check([key]):
                    continue
            record = json.loads(self._store.get(key))
            if record["rank"] != self._rank or record["kind"] != FAULT_EXITED:
                self._add_fault(RankFault(**record, known_since=time.monotonic()))
            if record["rank"] != self._rank:
                self._store.add(f"{key} read", 1)
        if lates != self._comparison_requests:
            self._comparison_requests = lates
            self._announcements = self._read_announcements("rank")
            self._failure_notes = self._read_announcements("note")

    def _stuck_barrier(self) -> BarrierWait | None:
        """The barrier that this rank has been in for some looks, while another has announced something else."""
        barrier = _find_barrier(self._rank_thread_id) if self._announcements else None
        is_same = barrier is not None and barrier == self._barrier
        self._barrier, self._barrier_polls = barrier, self._barrier_polls + 1 if is_same else 0
        return barrier if self._barrier_polls >= BARRIER_STUCK_POLLS else None

    def _read_announcements(self, topic: str) -> dict[int, tuple[int, str]]:
        found = {}
        parent = self._prefix.rpartition("/")[0]
        for rank in range(len(self._global_ranks)):
            key = f"{parent}/{topic} {rank}"
            if rank != self._rank and self._store.check([key]):
                moment, _, text = self._store.get(key).decode().partition(":")
                found[rank] = (int(moment), text)
        return found

    def _add_fault(self, fault: RankFault) -> None:
        self.faults[:] = sorted(
            [*self.faults, fault], key=lambda known: known.kind == FAULT_EXITED
        )  # what is worst first
        self._abort_hung_collectives()

    def _abort_hung_collectives(self) -> None:
        """Under NCCL, have the device wait no longer for a rank that will not come."""
        for fault in self.faults:
            if not self._has_aborted and fault.is_blocking(self._position[0]):
                self._has_aborted = True
                _abort_nccl(
                    {self._global_ranks[fault.rank]} if fault.kind != FAULT_ERROR else set(self._global_ranks),
                    fault.text,
                )

    # -- who lives ----------------------------------------------------------------------------------------------

    def _find_peers(self) -> list[_Peer] | None:
        """The ranks on either side, once all of them have said who they are."""
        if self._peers is None:
            ranks = len(self._global_ranks)
            near = {(self._rank + step) % ranks for step in range(-NEIGHBORS_PER_SIDE, NEIGHBORS_PER_SIDE + 1)} - {
                self._rank
            }
            keys = {rank: f"{self._prefix}/who {rank}" for rank in sorted(near)}
            if self._store.check(list(keys.values())):
                texts = self._store.multi_get(list(keys.values()))
                self._peers = [_Peer(rank, *json.loads(text)) for rank, text in zip(keys, texts, strict=True)]
                for peer in self._peers:
                    self._open_pidfd(peer)
        return self._peers

    def _open_pidfd(self, peer: _Peer) -> None:
        """Have the thread woken at once when a process of this machine ends, where the system can do that."""
        if peer.machine == _machine_id() and peer.pid != os.getpid() and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(peer.pid)
                if _process_start_time(peer.pid) == peer.start_time:  # else it is another process by now
                    peer.pidfd = handle
                    self._poller.register(handle, select.POLLIN)
                else:
                    os.close(handle)

    def _check_processes(self, is_store_reachable: bool = True) -> None:
        for peer in (self._find_peers() if is_store_reachable else self._peers) or ():
            here = peer.machine == _machine_id() and peer.pid != os.getpid()  # ranks that are threads end with this one
            is_gone = (
                peer.pidfd in self._ready_fds
                if peer.pidfd is not None
                else _process_start_time(peer.pid) != peer.start_time
            )
            if not (here and peer.is_alive and is_gone):
                continue
            peer.is_alive = False
            if peer.pidfd is not None:
                self._poller.unregister(peer.pidfd)
            if is_store_reachable:
                with contextlib.suppress(RuntimeError):  # it may have held the store
                    self._read_faults()  # what it said before it ended
            self._report_death(peer, f"its process {peer.pid} was killed, or ended without a word", is_store_reachable)

    def _check_heartbeats(self) -> None:
        distant = [peer for peer in self._find_peers() or () if peer.machine != _machine_id()]
        if not distant:
            return
        beats = self._store.multi_get([f"{self._prefix}/beat {peer.rank}" for peer in distant])
        for peer, beat in zip(distant, beats, strict=True):
            peer.unchanged_polls = (
                peer.unchanged_polls + 1 if beat == peer.heartbeat else 0
            )  # by looks: this process may have been stopped
            peer.heartbeat = beat
            silence = peer.unchanged_polls * HEARTBEAT_INTERVAL_SECONDS
            if peer.is_alive and silence >= self._heartbeat_timeout:
                peer.is_alive = False
                self._report_death(
                    peer, f"nothing was heard of it, on machine {peer.machine.split()[0]}, for {silence:g} s"
                )

    def _report_death(self, peer: _Peer, how: str, is_store_reachable: bool = True) -> None:
        """Tell all that a rank has died, unless it has said itself how it ended."""
        if any(fault.rank == peer.rank and fault.kind != FAULT_ERROR for fault in self.faults):
            return
        text = f"rank {peer.rank} has died: {how}"
        if is_store_reachable:
            with contextlib.suppress(RuntimeError):
                last = self._store.get(f"{self._prefix}/beat {peer.rank}").decode().split(" ", 2)[-1]
                text += f". The last it was known to come to: {last}"
                self.post_fault(FAULT_DIED, text, rank=peer.rank)
        self._add_fault(RankFault(FAULT_DIED, peer.rank, text, known_since=time.monotonic()))

    # -- the end ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the thread look now."""
        with self._lock:
            if self._wake_write_fd >= 0:
                os.write(self._wake_write_fd, b"x")

    def _stop(self) -> None:
        self._is_closed = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _at_exit(self) -> None:
        """Leave word how this process ends."""
        watched = self._monitored()
        self._position = self._position if watched is None else watched.position()
        error = _ending_error()
        raised = error is not None and not isinstance(error, RanksDisagreeError)  # which others have been told of
        self._post_exit(f"raised {type(error).__name__}: {error}" if raised else "has ended")
        if error is not None:
            self._wait_until_read()
        self._stop()

    def _post_exit(self, how: str) -> None:
        moment, last = self._position
        self.post_fault(FAULT_EXITED, f"rank {self._rank} {how}. The last it came to: {last}", moment)

    def _wait_until_read(self) -> None:
        """Stay until the others have read why: this process may hold the store, and NCCL end theirs with it."""
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
            except (KeyError, ValueError, RuntimeError):  # a group that is being taken apart
                return None
        frame = frame.f_back
    return None


def _ending_error() -> BaseException | None:
    """The exception that ends this process; None where none does."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
    if isinstance(error, SystemExit):  # multiprocessing's way to end after an exception
        error = error.__context__
    return error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@cache
def _machine_id() -> str:
    """Names the machine, and the processes that have numbers of their own on it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _process_start_time(pid: int) -> str:
    """When a process of this machine started, in the system's ticks; "" where there is none, or it has ended."""
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
    """End the NCCL communicators that the ranks are in: what waits on the device ends, with values of no use."""
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
            # each in a thread of its own: one communicator's kernel may wait for that of another
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
