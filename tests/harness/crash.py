"""Ranks that are killed, or run out of disk, while they save.

One process imports torch once and forks the ranks of every run: `Forks` is its face in a test, `_worker_loop` its
inside. It computes nothing itself, so it has no threads that a fork could cut off. A rank is a normal process after
that: it ends as Python ends, with its threads waited for and its exit functions called, and what it prints is kept.

[Note: moments]
A save changes the disk by few calls: make a directory, open a file, sync, move, remove. The instants before and after
each of them are the moments of a rank, and a rank can be set to kill itself, or its whole run, at one of them. Any
two kills between neighbouring moments leave the same names on disk, so moments cover what kills by the clock may miss.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import gc
import importlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import init_process_group
from torch import nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore

import zeroshard

DISK_CALLS = ("mkdir", "fsync", "replace", "unlink", "rmdir")  # of os; and open for writing
AT_ONCE = 6  # runs: those that wait for each other leave the cores to others
NUMEL = 3000  # elements of a model
BIG = 100 * NUMEL  # whose checkpoint has 3 MB
TIMEOUT = 20.0  # seconds a rank waits for another: never in vain, but for those that are killed or stay away


# ------------------------------------------------------------------------------------------------- the model


class Table(nn.Module):
    """Weights whose gradient is the same in every step, and another for each element: exact on any number of ranks."""

    slope: torch.Tensor
    forwards: torch.Tensor

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(numel) % 1009 / 8)
        self.register_buffer("slope", torch.arange(numel) % 13 - 6.0, persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        changed: torch.Tensor = loss + (self.weight * self.slope).sum()
        return changed


def tables(numel: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of about `numel` elements and its optimizer; the states depend only on the number of steps."""
    model = nn.Sequential(Table(numel // 2), Table(numel // 3), Table(7))
    return model, torch.optim.AdamW(model.parameters(), lr=0.125)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.zeros(())).backward()
    optimizer.step()
    optimizer.zero_grad()


# --------------------------------------------------------------------------------------------- bodies of ranks


def train(
    rank: int,
    directory: str,
    numel: int,
    stage: int,
    wait: bool,
    same: bool = False,
    saves: int = 3,
    timeout: float = TIMEOUT,
    die_at: int | None = None,
    dies: str = "",
) -> dict[str, Any]:
    """Save after each step, and die at a moment where told: as "0" or "1" alone or as "both".

    Returns how many moments there were and how long all saves took. The last step whose save is known to be done is
    written next to the directory.
    """
    model, optimizer = zeroshard.shard(*tables(numel), stage=stage, timeout=timeout)
    known = Path(f"{directory}.known")
    moments = itertools.count(1)  # of all threads

    def pass_moment() -> None:
        if next(moments) != die_at:
            return
        if dies == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if dies == "both" and rank == 0:
            os.killpg(0, signal.SIGKILL)

    advance(model, optimizer)
    announce()
    began = time.perf_counter()
    with disk_calls(lambda name, path: pass_moment(), lambda name, path: pass_moment()):
        for step in range(1, saves + 1):
            pass_moment()
            path = Path(directory) / ("same" if same else f"step-{step}")
            handle = zeroshard.save(path, model, optimizer, extra={"step": step}, keep=2, wait=wait)
            if rank == 0 and (wait or step > 1):
                known.write_text(str(step if wait else step - 1))
            pass_moment()
            advance(model, optimizer)
        handle.wait()
    return {"moments": next(moments) - 1, "seconds": time.perf_counter() - began}


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `nbytes`, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))  # Python ignores the signal: writes fail
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be nobody for a while, where this process is root, whom no permission stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def fill_disk(rank: int, directory: str, full: list[int], nbytes: int, text: int, how: str) -> dict[str, Any]:
    """Save; save again while there is no room on some ranks; save again. Returns the error, and what there was then.

    The second save's error comes at once ("sync"), from its handle ("wait") or from another save ("next").
    """
    model, optimizer = zeroshard.shard(*tables(BIG), stage=3, timeout=TIMEOUT)
    advance(model, optimizer)
    zeroshard.save(Path(directory) / "step-1", model, optimizer, extra={"step": 1})
    advance(model, optimizer)
    extra = {"step": 2, "text": "x" * text}  # goes into the index
    error = ""
    with room(nbytes) if rank in full else nullcontext():
        try:
            handle = zeroshard.save(Path(directory) / "step-2", model, optimizer, extra=extra, wait=how == "sync")
            if how == "wait":
                handle.wait()
            zeroshard.save(Path(directory) / "step-3", model, optimizer)
        except zeroshard.CheckpointError as raised:
            error = str(raised)
    dist.barrier()  # all ranks have cleaned up
    there = sorted(path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file())
    latest = (Path(directory) / "latest").read_text().strip()
    dist.barrier()
    zeroshard.save(Path(directory) / "after", model, optimizer, extra={"step": 2})
    return {"error": error, "there": there, "latest": latest}


def save_read_only(rank: int, directory: str) -> str:
    """Save into a directory that may not be written."""
    model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3, timeout=TIMEOUT)
    advance(model, optimizer)
    with unprivileged():
        try:
            zeroshard.save(Path(directory) / "step-2", model, optimizer)
        except zeroshard.CheckpointError as error:
            return str(error)
    return ""


def forget(rank: int, directory: str) -> None:
    """Start a save that has no room, and never ask what became of it."""
    model, optimizer = zeroshard.shard(*tables(BIG), stage=3, timeout=TIMEOUT)
    advance(model, optimizer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    zeroshard.save(Path(directory) / "forgotten", model, optimizer, wait=False)


def stay_away(rank: int, directory: str, call: str, rhythm: int) -> str:
    """Rank 1 stays away from a save or load, after ``rhythm`` of them that it came to; rank 0 returns its error."""
    model, optimizer = zeroshard.shard(*tables(NUMEL), stage=3, timeout=1.5)
    path, over = Path(directory) / "one", Path(f"{directory}.over")
    for _ in range(rhythm):
        advance(model, optimizer)
        zeroshard.save(path, model, optimizer)
        if call == "load":
            zeroshard.load(path, model, optimizer)
    advance(model, optimizer)
    if call == "load" and rhythm:
        zeroshard.save(path, model, optimizer)
    if rank == 1:
        while not over.exists():
            time.sleep(0.02)
        return ""
    try:
        (zeroshard.save if call == "save" else zeroshard.load)(path, model, optimizer)
        return ""
    except (zeroshard.RanksDisagreeError, zeroshard.CheckpointError) as error:
        return str(error)
    finally:
        over.touch()


# ------------------------------------------------------------------------------------------ the disk, watched


@contextmanager
def disk_calls(before: Callable[[str, Any], None], after: Callable[[str, Any], None]) -> Iterator[None]:
    """Have something done before and after every call of this process that changes names on the disk."""

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not set("wax+") & set(args[1] if len(args) > 1 else kwargs.get("mode", "r")):
                return call(*args, **kwargs)
            before(name, args[0])
            result = call(*args, **kwargs)
            after(name, args[0])
            return result

        return calling

    originals = {name: getattr(os, name) for name in DISK_CALLS}
    plain_open = builtins.open
    try:
        for name, call in originals.items():
            setattr(os, name, watched(name, call))
        builtins.open = watched("open", plain_open)
        yield
    finally:
        builtins.open = plain_open
        for name, call in originals.items():
            setattr(os, name, call)


# ------------------------------------------------------------------------------------------------- the forks


@dataclass
class Run:
    """What the ranks of one run do, and when it is ended from outside."""

    body: str  # a function of this module: body(rank, **arguments)
    arguments: dict[str, Any]
    ranks: int = 2
    kill: list[int] = field(default_factory=list)  # ranks that are killed, `after` seconds from their announcement
    after: float = 0.0
    store: str = "file"  # which outlives every rank; "tcp" dies with rank 0
    limit: float = 30.0  # seconds that it may take
    backend: str = "gloo"


@dataclass
class Outcome:
    """What came of one rank."""

    code: int  # the exit code; of a signal, negative
    answer: Any  # what the body returned
    error: str  # the last line of what it raised
    printed: str
    hung: bool  # it did not end by itself


class Forks:
    """The process that forks ranks, seen from a test."""

    def __init__(self, scratch: Path) -> None:
        paths = [str(Path(zeroshard.__file__).parent.parent), os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # no threads before a fork
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, runs: list[Run]) -> list[list[Outcome]]:
        """Have runs made, and return what came of each one's ranks. All processes have ended by then."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(run) for run in runs]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the forking process ended with {self._process.wait()}")
        return [[Outcome(**outcome) for outcome in ranks] for ranks in json.loads(answer)]

    def close(self) -> None:
        """End it. A clean process: it has waited for all that it forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()


_announcement = -1  # in a rank: where it says that saving begins


def announce() -> None:
    """In a body: saving begins. From now on the rank may be killed."""
    os.write(_announcement, b"!")


class _Fork:
    """One run under way, inside the forking process."""

    def __init__(self, run: Run, scratch: Path) -> None:
        self.run, self.scratch = run, scratch
        self.deadline = time.monotonic() + run.limit
        self.kill_at: float | None = None
        self.codes: dict[int, int] = {}  # exit codes by rank
        self.hung: set[int] = set()
        self.announced, theirs = os.pipe()
        os.set_blocking(self.announced, False)
        self.pids: list[int] = []
        listener = socket.create_server(("127.0.0.1", 0))
        for rank in range(run.ranks):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, self.pids[0] if self.pids else 0)  # a group of this run's ranks
                _be(rank, run, scratch, theirs, listener)  # does not return
            if rank == 0:
                os.setpgid(pid, pid)  # it is there before the second rank is
            self.pids.append(pid)
        os.close(theirs)
        listener.close()

    def over(self) -> bool:
        """Kill what is to be killed, reap what has ended, and tell whether all have."""
        now = time.monotonic()
        if self.run.kill and self.kill_at is None and self._heard():
            self.kill_at = now + self.run.after
        if self.kill_at is not None and now >= self.kill_at:
            for rank in self.run.kill:
                self._kill(rank)
            self.run.kill = []
            self.kill_at = None
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        if now > self.deadline:
            self._end_hung()
        return len(self.codes) == len(self.pids)

    def _heard(self) -> bool:
        try:
            return bool(os.read(self.announced, 1))
        except BlockingIOError:
            return False

    def _kill(self, rank: int) -> None:
        if rank not in self.codes:  # else its number may be another process's
            os.kill(self.pids[rank], signal.SIGKILL)

    def _end_hung(self) -> None:
        hung = [rank for rank in range(len(self.pids)) if rank not in self.codes]
        for rank in hung:
            os.kill(self.pids[rank], signal.SIGUSR1)  # its stacks go to what it prints
        time.sleep(0.5)
        for rank in hung:
            self._kill(rank)
        self.hung.update(hung)
        self.deadline += 60  # they are dead

    def outcomes(self) -> list[Outcome]:
        os.close(self.announced)
        found = []
        for rank in range(len(self.pids)):
            place = self.scratch / f"rank-{rank}"
            answer = place.with_suffix(".json")
            error = place.with_suffix(".error")
            found.append(
                Outcome(
                    code=self.codes[rank],
                    answer=json.loads(answer.read_text()) if answer.exists() else None,
                    error=error.read_text() if error.exists() else "",
                    printed=place.with_suffix(".out").read_text(),
                    hung=rank in self.hung,
                )
            )
        return found


def _be(rank: int, run: Run, scratch: Path, announcement: int, listener: socket.socket) -> None:
    """The life of a rank; it ends as a Python process ends."""
    global _announcement
    _announcement = announcement
    place = scratch / f"rank-{rank}"
    output = os.open(place.with_suffix(".out"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.alarm(int(run.limit) + 30)  # ends it where the forking process is gone
    try:
        store = _store(rank, run, scratch, listener)
        limit = timedelta(seconds=run.limit)
        init_process_group(run.backend, store, rank, run.ranks, limit)
        module, _, name = run.body.rpartition(":")
        body = getattr(importlib.import_module(module), name) if module else globals()[name]
        answer = body(rank, **run.arguments)
        place.with_suffix(".json").write_text(json.dumps(answer))
        _linger(store, run.ranks)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error  # as Python leaves it
        place.with_suffix(".error").write_text("".join(traceback.format_exception_only(error)))
    # As Python ends, less the taking apart of torch's modules, which takes two seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if place.with_suffix(".error").exists() else 0)


def _store(rank: int, run: Run, scratch: Path, listener: socket.socket) -> Store:
    if run.store == "file":
        return FileStore(str(scratch / "store"), run.ranks)
    host, port = listener.getsockname()
    if rank > 0:
        listener.close()
        return TCPStore(host, port, is_master=False)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _linger(store: Store, ranks: int) -> None:
    """Keep the sockets while others may still read from them."""
    deadline = time.monotonic() + 2  # the others may be dead
    with suppress(RuntimeError):  # and the one that holds the store
        store.add("done", 1)
        while store.add("done", 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.005)


def _serve(scratch: Path) -> None:
    """Read lists of runs, make them, a few at once, and write what came of them."""
    for module in ("torch._dynamo", "zeroshard.checkpoint.load_checkpoint"):  # so that ranks need not
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # ranks need not look through, and so copy, what they share with this process
    for number, line in enumerate(sys.stdin):
        waiting = [Run(**run) for run in json.loads(line)]
        outcomes: dict[int, list[Outcome]] = {}
        under_way: dict[int, _Fork] = {}
        order = iter(range(len(waiting)))
        while len(outcomes) < len(waiting):
            while len(under_way) < AT_ONCE and (index := next(order, None)) is not None:
                own = scratch / f"{number}-{index}"
                own.mkdir()
                tasks = Path("/proc/self/task")  # threads of libraries too, where the system tells
                if threading.active_count() > 1 or (tasks.exists() and len(list(tasks.iterdir())) > 1):
                    raise RuntimeError("a process with threads is about to fork")
                under_way[index] = _Fork(waiting[index], own)
            for index in [index for index, fork in under_way.items() if fork.over()]:
                outcomes[index] = under_way.pop(index).outcomes()
            time.sleep(0.002)
        print(json.dumps([[asdict(rank) for rank in outcomes[index]] for index in range(len(waiting))]), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
