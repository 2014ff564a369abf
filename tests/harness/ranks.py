# mypy: allow-untyped-calls
"""Run several ranks inside a test.

`run_threads` runs each rank in a thread of this process. A run takes a few milliseconds, collectives are real, and the
body may be any function. `run_processes` runs each rank in a process of a pool that lives as long as the test session
and uses gloo on the loopback device. A run takes some tens of milliseconds, and the body must be a function at the top
level of a module. Both call `body(rank, *args)` on every rank with an initialised default process group, return the
results in rank order, and raise `RanksFailed` if a rank raises, dies or hangs.

[Note: randomness in threads]
Threads share torch's default generator, so what a body draws from it depends on the other ranks. Build the model once
outside and `copy.deepcopy` it in every rank, or build it `with seeded(0):` in each; draw data from a `torch.Generator`
per rank. Grad mode, autocast and `with torch.device(...)` are per thread. Processes share nothing; their generator is
seeded with 0 before each body. Other changes of global state by a body stay in the worker for later runs.

[Note: NCCL ranks on one GPU]
`run_nccl` runs each rank in such a process over NCCL, on a GPU of its own if there are `MAX_NCCL_RANKS` GPUs. If not,
all ranks share the first GPU. NCCL refuses two ranks on one GPU only if they seem to be on the same host, so each rank
gets its own host id. Ranks then take turns on the GPU, and data goes through loopback sockets: a collective takes some
milliseconds with 2 ranks and some tens of milliseconds with 4. Streams, events, watchdog, sums and communicators are
NCCL's own. NCCL reads some of its settings once per process, and gives wrong sums if they differ between ranks. So a
worker gets them when it starts, before any body can use NCCL.

[Note: how a stuck run ends]
No run waits forever. At the timeout (or `GRACE` seconds after the first rank failed) the error gets the Python stacks
of the ranks that are still running. A thread that waits in a collective is woken; any other gets a SystemExit. A thread
that survives this has no process group left, so it cannot disturb a later run. A process is killed with all its
children. A worker also kills itself when the process that started it is gone.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import math
import multiprocessing
import os
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.testing._internal.distributed import multi_threaded_pg as threaded

T = TypeVar("T")

MAX_NCCL_RANKS = 4
GRACE = 2.0  # seconds for the other ranks to end by themselves after one has failed
LOOPBACK = "127.0.0.1"
# Imported once, in the server from which all processes are forked. torch._dynamo, which the first step of an optimizer
# imports, takes 1.5 seconds; the modules of many bodies import the others, and those of nearly all pytest.
PRELOADED = ["pytest", "torch", "torch.distributed", "torch._dynamo", "zeroshard.api", "zeroshard.train.trainer"]
# With the Trainer come Accelerate, PEFT and the classes that all models share. Where there is a GPU, one of them
# initializes CUDA, which a forked process cannot use then. (Asking for a GPU here would initialize it, too.)
PRELOADED += ["transformers.trainer" if torch.version.cuda is None else "transformers"]


class RanksFailed(RuntimeError):
    """Some ranks of a run raised, died or hung; `accounts` has their tracebacks or stacks, the first failure first."""

    def __init__(self, world: int, accounts: dict[int, str]) -> None:
        self.accounts = accounts
        stories = "".join(f"\n--- rank {rank} ---\n{account.rstrip()}\n" for rank, account in accounts.items())
        super().__init__(f"{len(accounts)} of {world} ranks failed\n{stories}")


_generator_lock = threading.RLock()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the shared CPU generator, one thread at a time, and restore it at the end; no collectives inside.

    >>> with seeded(0):
    ...     first = torch.rand(2)
    >>> with seeded(0):
    ...     torch.equal(first, torch.rand(2))
    True
    """
    with _generator_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# ---------------------------------------------------------------------------------------------- ranks as threads


def run_threads(world: int, body: Callable[..., T], *args: Any, timeout: float = 120) -> list[T]:
    """Call `body(rank, *args)` on `world` threads over torch's threaded backend. See the top of the file."""
    run: _ThreadRun[T] = _ThreadRun(world, body, args, timeout)
    excepthook = sys.excepthook  # every init_process_group wraps it again
    _isolate_threads(True)
    threaded._install_threaded_pg()
    try:
        run.start()
        run.wait()
    finally:
        run.end()
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        _isolate_threads(False)
        sys.excepthook = excepthook
    if run.accounts:
        raise RanksFailed(world, run.accounts)
    return [run.results[rank] for rank in range(world)]


class ThreadTeam:
    """Threads as ranks that run one call after another, for sequences that are not known in advance.

    `call(body)` runs `body(rank)` on every rank and returns the results or errors in rank order. It raises
    `RanksFailed` if a rank does not finish in time, or within `GRACE` seconds after another raised. Call `close()` at
    the end.
    """

    def __init__(self, world: int, lifetime: float = 3600) -> None:
        self._bodies: list[queue.SimpleQueue[Callable[[int], Any] | None]] = [queue.SimpleQueue() for _ in range(world)]
        self._answers: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._run: _ThreadRun[None] = _ThreadRun(world, self._serve, (), lifetime)
        self._excepthook = sys.excepthook
        _isolate_threads(True)
        threaded._install_threaded_pg()
        self._run.start()

    def _serve(self, rank: int) -> None:
        while (body := self._bodies[rank].get()) is not None:
            try:
                self._answers.put((rank, body(rank), None))
            except Exception as error:
                self._answers.put((rank, None, error))

    def call(self, body: Callable[[int], T], timeout: float = 20) -> list[tuple[T | None, BaseException | None]]:
        """Run `body` on every rank; see the class."""
        for bodies in self._bodies:
            bodies.put(body)
        answers: dict[int, tuple[T | None, BaseException | None]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._bodies):
            try:
                rank, value, error = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RanksFailed(len(self._bodies), self._stories(answers)) from None
            answers[rank] = value, error
            if error is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        return [answers[rank] for rank in range(len(self._bodies))]

    def _stories(self, answers: dict[int, tuple[Any, BaseException | None]]) -> dict[int, str]:
        told = {r: "".join(traceback.format_exception(e)) for r, (_, e) in answers.items() if e is not None}
        return told | {r: stack for r, stack in self._run.stacks("still running").items() if r not in answers}

    def close(self) -> None:
        """End the threads."""
        for bodies in self._bodies:
            bodies.put(None)
        try:
            self._run.join(GRACE)
        finally:
            self._run.end()
            threaded.ProcessLocalGroup.reset()
            threaded._uninstall_threaded_pg()
            _isolate_threads(False)
            sys.excepthook = self._excepthook


def _isolate_threads(on: bool) -> None:
    """Give every thread its own process groups."""
    c10d._set_thread_isolation_mode(on)  # type: ignore[attr-defined]  # missing from torch's stubs


def _choose_core() -> int:
    """Return the core for the ranks of a run: this test worker's own, or the present one; -1 if unknown.

    Workers of pytest-xdist that have a core each must not run their ranks on the same one.
    """
    if sys.platform != "linux":
        return -1
    cores = sorted(os.sched_getaffinity(0))
    if 1 < int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) <= len(cores):
        return cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)]
    return int(ctypes.CDLL(None).sched_getcpu())


def _stay_on(core: int) -> None:
    """Pin this thread to a core.

    Python runs one thread at a time in any case, and moving the GIL between cores makes a run a quarter slower.
    """
    if sys.platform == "linux" and core >= 0:
        with contextlib.suppress(OSError):  # a container may have lost the core since
            os.sched_setaffinity(0, {core})


class _ThreadRun(Generic[T]):
    """The threads of one run, and their results."""

    def __init__(self, world: int, body: Callable[..., T], args: tuple[Any, ...], timeout: float) -> None:
        self.world, self.body, self.args, self.timeout = world, body, args, timeout
        self.results: dict[int, T] = {}
        self.accounts: dict[int, str] = {}
        self.abandoned = False  # the caller has continued: threads must not use torch.distributed
        self._core = _choose_core()
        self._store = HashStore()
        self._states: dict[int, threaded.WorldData] = {}  # each thread's view of torch.distributed
        self._threads = [
            threading.Thread(target=self._be, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _be(self, rank: int) -> None:
        with contextlib.suppress(SystemExit):  # from end(), if the rank is already ending
            self._run_rank(rank)

    def _run_rank(self, rank: int) -> None:
        try:
            _stay_on(self._core)
            self._states[rank] = threaded.ThreadLocalWorld()._get_world()
            limit = timedelta(seconds=self.timeout + 60)  # longer than ours, so that ours is reported
            dist.init_process_group("threaded", rank=rank, world_size=self.world, store=self._store, timeout=limit)
            self.results[rank] = self.body(rank, *self.args)
        except BaseException as error:
            sent = isinstance(error, SystemExit) and threaded.ProcessLocalGroup._terminate.is_set()
            if not sent and not self.abandoned:  # a rank that we ended has not failed
                self.accounts.setdefault(rank, "".join(traceback.format_exception(error)))
                self._wake()
        if not self.abandoned:
            with contextlib.suppress(Exception):  # init_process_group may have failed
                dist.destroy_process_group()

    def wait(self) -> None:
        """Wait until all ranks have ended; record the stacks of those that did not end in time."""
        deadline = time.monotonic() + self.timeout
        why = f"stuck: still running after {self.timeout:g} s"
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            alive[0].join(0.02)
            if self.accounts:
                self._wake()  # again: a rank may have entered a collective after the failing rank's own call
                if deadline > time.monotonic() + GRACE:
                    deadline = time.monotonic() + GRACE
                    why = f"still running {GRACE:g} s after rank {next(iter(self.accounts))} failed"
            if time.monotonic() > deadline:
                for rank, stack in self.stacks(why).items():
                    self.accounts.setdefault(rank, stack)
                return

    def stacks(self, why: str) -> dict[int, str]:
        """Return the stacks of the ranks that are still running."""
        frames = sys._current_frames()
        return {
            rank: f"{why}, at (most recent call last):\n" + "".join(traceback.format_stack(frames[thread.ident]))
            for rank, thread in enumerate(self._threads)
            if thread.is_alive() and thread.ident in frames
        }

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the threads."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the remaining threads, or at least make them harmless."""
        if any(thread.is_alive() for thread in self._threads):
            self._wake()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(0.2)  # enough to leave a collective
        for thread in self._threads:
            if thread.ident is not None and thread.is_alive():
                raised = ctypes.py_object(SystemExit)  # at the thread's next bytecode
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)
                thread.join(0.5)
        self.abandoned = True
        for rank, thread in enumerate(self._threads):
            if thread.is_alive() and rank in self._states:
                self._states[rank].default_pg = None  # type: ignore[assignment]
                self._states[rank].pg_names.clear()  # a collective on its groups is a KeyError from now on

    @staticmethod
    def _wake() -> None:
        with contextlib.suppress(RuntimeError):  # torch iterates over a dict that ranks may be changing
            threaded.ProcessLocalGroup.exception_handle(None)


# -------------------------------------------------------------------------------------------- ranks as processes


def run_processes(
    world: int,
    body: Callable[..., T],
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
    fresh: bool = False,
) -> list[T]:
    """Call `body(rank, *args)` in `world` processes, over gloo or NCCL. See the top of the file.

    Arguments and results are sent with `torch.save`, so they may contain tensors. `env` applies to this run only;
    variables that are read at process start (such as glibc's) have no effect.

    Memory is measured in `fresh` processes, which no other run uses. In a worker of the pool, garbage that an earlier
    body left may be freed during the measurement, and after thousands of runs torch's profiler may see nothing.
    """
    if "<" in body.__qualname__:
        raise ValueError(f"{body.__qualname__} cannot be sent to a process: move it to the top level of its module")
    global _pool
    if _pool is None:
        _pool = _Pool()
    jobs = [_pack((rank, world, body, args, timeout, env or {}, backend)) for rank in range(world)]
    answers = _pool.run(jobs, timeout, fresh)
    return [_unpack(answer) for answer in answers]


def run_nccl(world: int, body: Callable[..., T], *args: Any, timeout: float = 300) -> list[T]:
    """Call `body(rank, *args)` in `world` processes over NCCL: see [Note: NCCL ranks on one GPU]."""
    return run_processes(world, body, *args, timeout=timeout, backend="nccl")


def device() -> torch.device:
    """Return the device of this rank: its GPU over NCCL, else the CPU."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def close_pool() -> None:
    """Kill the worker processes; the next `run_processes` starts new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


class _Worker:
    """The test's handle of a process that runs one rank at a time."""

    def __init__(self, store_port: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection: Connection[Any, Any]
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, store_port), daemon=True)
        self.process.start()
        theirs.close()  # so that the connection ends when the process dies
        # Output of its faulthandler; unnamed, so it is never left behind.
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115
        reduction.send_handle(self.connection, self._dump.fileno(), self.process.pid)

    def stacks(self) -> str:
        """Return the stacks of the process's threads, most recent call first."""
        before = len(self._dumped())
        if self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
        length, deadline = before, time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.05)
            length, last = len(self._dumped()), length
            if length == last > before:
                break
        return self._dumped()[before:]

    def _dumped(self) -> str:
        size = os.fstat(self._dump.fileno()).st_size
        return os.pread(self._dump.fileno(), size, 0).decode(errors="replace")  # does not move the shared offset

    def epitaph(self) -> str:
        """Describe how the process ended."""
        self.process.join(5)
        code = self.process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"its process died with {how}\n{self._dumped()}"

    def kill(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
                os.killpg(self.process.pid, signal.SIGKILL)  # its children
        self.process.join(5)
        self.connection.close()
        self._dump.close()


class _Pool:
    """The idle workers, and the store that the ranks of a run connect to."""

    def __init__(self) -> None:
        listener = socket.create_server((LOOPBACK, 0))  # else the store would listen on every interface
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._idle: list[_Worker] = []
        self._runs = 0

    def run(self, jobs: list[bytes], timeout: float, fresh: bool) -> list[bytes]:
        """Run each job on a worker and return the answers; workers of a failed or fresh run are not used again."""
        self._runs += 1
        workers, started = self._take(len(jobs), fresh)
        try:
            _answers(started, timeout=120)  # their first message: the timeout of a run starts when its ranks are up
            for worker, job in zip(workers, jobs, strict=True):
                with contextlib.suppress(BrokenPipeError):  # dead: _answers reports it
                    worker.connection.send((f"run {self._runs}", sys.path, job))
            answers = _answers(workers, timeout)
            for worker in workers:  # when all are done: no rank closes its sockets while another still reads from them
                worker.connection.send("leave")
            _answers(workers, timeout)
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        if fresh:
            for worker in workers:
                worker.kill()
        else:
            self._idle = workers + self._idle
        return answers

    def _take(self, number: int, fresh: bool) -> tuple[list[_Worker], list[_Worker]]:
        """Return `number` workers, and those of them that were started now."""
        taken: list[_Worker] = []
        started: list[_Worker] = []
        while len(taken) < number and self._idle and not fresh:
            worker = self._idle.pop(0)
            if worker.process.is_alive():
                taken.append(worker)
            else:
                worker.kill()
        while len(taken) + len(started) < number:
            started.append(_Worker(self._store.port))
        return taken + started, started

    def close(self) -> None:
        for worker in self._idle:
            worker.kill()
        self._idle = []


_pool: _Pool | None = None
atexit.register(close_pool)


def _answers(workers: list[_Worker], timeout: float) -> list[bytes]:
    """Wait for one message from every worker."""
    answers: dict[int, bytes] = {}
    accounts: dict[int, str] = {}
    moments: dict[int, float] = {}  # when they failed: several messages may arrive at once
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    why = f"stuck: still running after {timeout:g} s"
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for connection in waiting.copy():
            if connection not in ready:
                continue
            rank = waiting.pop(connection)
            try:
                failed, answer = connection.recv()
            except (EOFError, ConnectionResetError):
                failed, answer = 0.0, workers[rank].epitaph()  # it died, and others fail as a result
            if failed is None:
                answers[rank] = answer
            else:
                accounts[rank], moments[rank] = answer, failed
        if accounts and deadline > time.monotonic() + GRACE:
            deadline = time.monotonic() + GRACE
            why = f"still running {GRACE:g} s after rank {next(iter(accounts))} failed"
        if not ready:
            for rank in waiting.values():
                accounts[rank] = f"{why}, at (most recent call first):\n{workers[rank].stacks()}"
            break
    if accounts:
        told = sorted(accounts, key=lambda rank: moments.get(rank, math.inf))
        raise RanksFailed(len(workers), {rank: accounts[rank] for rank in told})
    return [answers[rank] for rank in range(len(workers))]


def _serve(connection: "Connection[Any, Any]", store_port: int) -> None:
    """Run as worker process: answer every job until the connection ends."""
    os.setsid()  # its own process group: children of the body are killed with it
    gc.freeze()  # do not scan (and so copy) shared objects, nor count them as live
    dump = reduction.recv_handle(connection)
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump)
    threading.Thread(target=_die_with, args=(connection,), daemon=True).start()
    torch.set_num_threads(1)
    _prepare_nccl()
    os.environ["MASTER_ADDR"] = LOOPBACK
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = TCPStore(LOOPBACK, store_port, is_master=False)
    connection.send((None, b""))
    while True:
        try:
            name, sys.path[:], job = connection.recv()
            connection.send((None, _run_rank(PrefixStore(name, store), job)))
            connection.recv()  # "leave": every rank has its result
            if dist.is_initialized():
                dist.destroy_process_group()
            if "torch.distributed.tensor" in sys.modules:
                _forget_meshes()
            connection.send((None, b""))
        except EOFError:
            return
        except BaseException as error:
            connection.send((time.monotonic(), "".join(traceback.format_exception(error))))
            sys.stdout.flush()
            os._exit(1)  # closes the sockets, so that waiting ranks fail immediately and not at their timeout


def _forget_meshes() -> None:
    """Clear DTensor's cache: it has meshes whose groups are destroyed, and would use them for equal meshes."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def settle_torch() -> None:
    """Undo what a test may have changed: the number of threads, and the library that torch uses for products.

    On a CPU without bf16, the first bf16 product fails internally, and torch then uses another library for all
    products, which sums fp32 in another order.
    """
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(True)
    if torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()  # fake tensors do this in every thread, and crash if two do it at once


def _run_rank(store: Store, job: bytes) -> bytes:
    settle_torch()
    rank, world, body, args, timeout, env, backend = _unpack(job)
    before, excepthook = os.environ.copy(), sys.excepthook
    os.environ.update(env)
    try:
        limit = timedelta(seconds=timeout + 60)  # longer than ours, so that ours is reported
        init_process_group(backend, store, rank, world, limit)
        if store.add("up", 1) == world:
            store.set("all up", "")
        store.wait(["all up"])  # else, if a rank fails early, ranks that still connect get a closed connection
        torch.manual_seed(0)
        return _pack(body(rank, *args))
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.excepthook = excepthook  # init_process_group wrapped it


def init_process_group(backend: str, store: Store, rank: int, world: int, limit: timedelta) -> None:
    """Initialise the default process group over gloo or NCCL: see [Note: NCCL ranks on one GPU]."""
    gpu = None
    if backend == "nccl" and _prepare_nccl():
        # without device_id: with it, a mesh splits NCCL's communicator, which can crash in a process that had another
        torch.cuda.set_device(0)
    elif backend == "nccl":
        gpu = torch.device("cuda", rank)
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=gpu)


def _prepare_nccl() -> bool:
    """Have NCCL accept ranks that share a GPU; return whether they do: see [Note: NCCL ranks on one GPU]."""
    shares_gpu = 0 < torch.cuda.device_count() < MAX_NCCL_RANKS
    if shares_gpu:
        from zeroshard.rehearse.rank import share_gpu

        share_gpu(f"worker-{os.getpid()}")
    return shares_gpu


def _die_with(connection: "Connection[Any, Any]") -> None:
    """Kill this process and its group when the other end of `connection` is gone."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # no events requested: only a hang-up is reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _pack(thing: object) -> bytes:
    """Serialize with tensors by value: multiprocessing would share their memory through file descriptors."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
