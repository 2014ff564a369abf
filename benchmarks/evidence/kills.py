"""Kills: a rank gets SIGKILL, the other must be told which one died, and the job goes on with the same bits.

Several trainings of two ranks run at the same time. In each, all steps are saved. In the third step after a start one
rank is killed from outside, at a random moment of forward, backward, the optimizer's step or the save. Measured is how
long after the signal the other rank gets an error, and which one. Then both ranks start again from the last checkpoint.
After each step the weights' hash must be that of a training that nothing interrupts; also in the steps after the
last kill.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer imports it, for a second: here, once for all ranks
import torch.distributed as dist
from torch import nn

import zeroshard
import zeroshard.checkpoint.load_checkpoint
from benchmarks.harness.ranks import join_group, use_deterministic_kernels
from benchmarks.harness.record import Record, Result, describe

PHASES = ("forward", "backward", "step", "save")
RANKS, BEFORE = 2, 2  # steps before the one in which a rank is killed
LIMIT = 60.0  # seconds until a rank that nothing was heard of counts as hung
WIDTH, BLOCKS, ROWS = 256, 4, 1024  # rows: so many that a kill from outside hits forward, which on a CPU is short


@dataclass(frozen=True)
class Training:
    """What the ranks of a training do."""

    backend: str
    stage: int
    folder: str
    port: int  # of the store

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


@dataclass(frozen=True)
class Kill:
    """Which rank is killed, and when: in this phase of a step, after this share of the time it took before."""

    phase: str
    rank: int
    share: float


# ------------------------------------------------------------------------------------------------ a rank


class Phases:
    """The phases of a step on one rank: where it is, in a file that is read after its death, and their times."""

    def __init__(self, path: Path, talk: Callable[..., None], kill: Kill | None, device: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._talk, self._kill, self._device = talk, kill, device
        self._seconds: dict[str, float] = {}
        self.step, self.is_armed = 0, False
        self._write("between")

    def run(self, phase: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        self._write(phase)
        if self.is_armed and self._kill is not None and phase == self._kill.phase:
            self._talk("aim", self._kill.share * self._seconds[phase])
        result = work()
        if self._device == "cuda":
            torch.cuda.synchronize()  # else the phase ends before its work begins
        self._seconds[phase] = time.perf_counter() - begin
        self._write("between")
        return result

    def _write(self, phase: str) -> None:
        os.pwrite(self._file, f"{self.step} {phase}".ljust(24).encode(), 0)


def be_rank(training: Training, rank: int, number: int, last: int, kill: Kill | None, pipe: Connection) -> None:
    """Resume from the last checkpoint and train until the step ``last``; say what happens, also if it is an error."""
    lock = threading.Lock()

    def talk(*words: Any) -> None:
        with lock:
            pipe.send(words)

    folder = Path(training.folder)
    output = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    use_deterministic_kernels()
    store = dist.PrefixStore(
        f"{training.backend}-{folder.name}-{number}", dist.TCPStore("127.0.0.1", training.port, is_master=False)
    )
    try:
        device = join_group(training.backend, store, rank, RANKS, LIMIT)
        phases = Phases(folder / f"phase-{rank}", talk, kill if kill and kill.rank == rank else None, training.device)
        _train(training, device, last, phases, talk)
        talk("done")
    except Exception as error:
        talk("told", time.time(), type(error).__name__, str(error))
    time.sleep(0.5 if kill is None else 0.0)  # the other rank may still read from this one's sockets
    os._exit(0)


def _train(training: Training, device: torch.device, last: int, phases: Phases, talk: Callable[..., None]) -> None:
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sharded, stepping = zeroshard.shard(model, optimizer, stage=training.stage, bucket_size=2**17)
    saves, done = Path(training.folder, "saves"), 0
    if saves.exists():
        done = zeroshard.load(saves, sharded, stepping).extra["step"]
        talk("weights", done, _hash(sharded))
    first = done + 1
    for step in range(first, last + 1):
        phases.step, phases.is_armed = step, step == first + BEFORE
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        rows = torch.randn(ROWS, WIDTH, generator=generator).to(device)
        loss = phases.run("forward", lambda rows=rows: sharded(rows).square().mean())
        phases.run("backward", loss.backward)
        phases.run("step", stepping.step)
        stepping.zero_grad()
        talk("weights", step, _hash(sharded))
        path, extra = saves / f"step-{step}", {"step": step}
        phases.run("save", lambda path=path, extra=extra: zeroshard.save(path, sharded, stepping, extra=extra, keep=2))


def _hash(model: nn.Module) -> str:
    with zeroshard.gathered(model):
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ the driver


class Run:
    """Two ranks from their start to their end, watched from outside."""

    def __init__(self, context: ForkServerContext, training: Training, number: int, last: int, kill: Kill | None):
        self._kill = kill
        self.weights: dict[int, set[str]] = {}  # by step: what the ranks have
        self.told: tuple[float, str, str] | None = None  # when, and the error's class and text
        self.killed_at: float | None = None
        self.ended = ""  # how the other rank ended, if it did not say so itself
        self._folder = Path(training.folder)
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        self._processes = [
            context.Process(target=be_rank, args=(training, rank, number, last, kill, pipes[rank][1]))
            for rank in range(RANKS)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self._open = {ours: rank for rank, (ours, _) in enumerate(pipes)}
        self._finished: set[int] = set()
        try:
            self._watch()
        finally:
            for process in self._processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe, _ in pipes:
                pipe.close()

    def _watch(self) -> None:
        due, deadline = None, time.monotonic() + LIMIT
        while self._open and time.monotonic() < deadline:
            until = deadline if due is None else due
            for pipe in wait(list(self._open), max(0.0, until - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank, deadline = self._open[pipe], time.monotonic() + LIMIT
                try:
                    what, *rest = pipe.recv()
                except (EOFError, ConnectionError):
                    self._end(rank, pipe)
                    continue
                if what == "aim":
                    due = time.monotonic() + rest[0]
                elif what == "weights":
                    self.weights.setdefault(rest[0], set()).add(rest[1])
                else:
                    self._finished.add(rank)
                    if what == "told" and self._kill is not None and rank == self._kill.rank:
                        self.ended = f"rank {rank} failed before it was killed: {rest[1:]}"
                    elif what == "told":
                        self.told = (rest[0], rest[1], rest[2])
            if due is not None and time.monotonic() >= due:
                due = None
                self._shoot()
        for rank in self._open.values():
            self.ended = f"rank {rank} hung: nothing was heard for {LIMIT:.0f} s"

    def _shoot(self) -> None:
        assert self._kill is not None
        process = self._processes[self._kill.rank]
        if process.is_alive() and process.pid is not None:
            self.killed_at = time.time()
            os.kill(process.pid, signal.SIGKILL)

    def _end(self, rank: int, pipe: Connection) -> None:
        del self._open[pipe]
        was_killed = self.killed_at is not None and self._kill is not None and rank == self._kill.rank
        if rank not in self._finished and not was_killed:
            self._processes[rank].join()
            log = (self._folder / f"rank-{rank}.log").read_text(errors="replace")
            self.ended = f"rank {rank} ended with status {self._processes[rank].exitcode}: {log[-300:]}"

    def outcome(self, phase: str) -> Result:
        """Return what the survivor was told, and how long after the kill."""
        assert self._kill is not None
        error = self.ended or f"the rank was not killed: {self.told}"
        found = {"died_in": phase, "seconds": None, "error": error, "names": False}
        if self.killed_at is not None and self.told is not None:
            at, kind, words = self.told
            names = re.search(rf"\brank {self._kill.rank}\b", words) is not None
            is_right = kind == zeroshard.RanksDisagreeError.__name__ and names
            found |= {"seconds": round(at - self.killed_at, 3), "kind": kind, "names": names}
            found["error"] = "" if is_right else words[:600]
        return found


def run_chain(
    start: Callable[[Kill | None], Run], kills: Sequence[Kill], reference: dict[int, set[str]], folder: Path
) -> Iterator[Result]:
    """Train, start again after every kill, and yield what came of it: known when the ranks have started again."""
    pending: Result | None = None
    for kill in [*kills, None]:
        run = start(kill)
        resumed = min(run.weights, default=None)
        same = bool(run.weights) and all(found == reference.get(step) for step, found in run.weights.items())
        if pending is not None:
            lost = None if resumed is None else pending["step"] - resumed
            yield {**pending, "resumed": resumed, "lost_steps": lost, "same_bits": same}
        if kill is not None:
            place = folder / f"phase-{kill.rank}"
            step, phase = place.read_text().split() if place.exists() else ("0", "start")
            pending = {**asdict(kill), "step": int(step), **run.outcome(phase)}
        elif run.ended or run.told or not same:
            yield {"last_run": run.ended or str(run.told or "other weights"), "same_bits": same}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen on the command line."""
    parser.add_argument("--kills", type=int, help="of each backend (default: 250)")
    parser.add_argument("--backends", nargs="+", choices=("gloo", "nccl"), help="(default: those of the device)")


def run(chosen: argparse.Namespace) -> None:
    """Run several trainings at a time, one backend after the other."""
    backends = chosen.backends or (("gloo", "nccl") if chosen.device == "cuda" else ("gloo",))
    kills = chosen.kills or (8 if chosen.tiny else 250)
    jobs = min(kills, chosen.jobs or 8)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    record = Record("evidence", chosen.device, chosen.out)
    print(describe(record.machine), flush=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # NVML: to ask the driver for GPUs, as an import may, would spoil CUDA in all processes that are forked later
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    for backend in backends:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ, environment):
            _run_backend(backend, kills, jobs, Path(folder), (context, store.port), record)
        record.add({"backend": backend, "wall_seconds": round(time.perf_counter() - begin, 1), "jobs": jobs})
    show(record)


def _run_backend(
    backend: str, kills: int, jobs: int, parent: Path, server: tuple[ForkServerContext, int], record: Record
) -> None:
    """Train without interruption in each stage, then with kills, in as many trainings as run at the same time."""
    context, port = server
    steps = (BEFORE + 1) * (-(-kills // jobs) + 1)
    numbers = itertools.count()

    def start(stage: int, folder: Path, kill: Kill | None) -> Run:
        folder.mkdir(exist_ok=True)
        return Run(context, Training(backend, stage, str(folder), port), next(numbers), steps, kill)

    def run_job(job: int) -> None:
        stage, folder = stages[job % len(stages)], parent / f"job-{job}"
        plan = _plan(kills // jobs + (job < kills % jobs), seed=job)
        for result in run_chain(partial(start, stage, folder), plan, references[stage].weights, folder):
            with lock:
                record.add({"backend": backend, "stage": stage, **result})
                print(record.results[-1], flush=True)

    lock, stages = threading.Lock(), (3, 2, 1, 0)[:jobs]
    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(lambda stage: start(stage, parent / f"{stage}", None), stages)
        references = dict(zip(stages, runs, strict=True))
        for stage, run in references.items():
            if run.ended or run.told:
                raise SystemExit(f"stage {stage} over {backend} failed without a kill: {run.ended or run.told}")
        list(pool.map(run_job, range(jobs)))


def _plan(kills: int, seed: int) -> list[Kill]:
    """Return kills in each phase in turn, of either rank, at any time of the phase."""
    draws, phases = random.Random(seed), itertools.islice(itertools.cycle(PHASES), seed + seed // 4, None)
    return [Kill(next(phases), draws.randrange(RANKS), draws.random()) for _ in range(kills)]


def show(record: Record) -> None:
    """Print a table: by backend and the phase in which the rank died."""
    table = []
    for backend, phase in itertools.product(("gloo", "nccl"), (*PHASES, "between", "start")):
        found = [each for each in record.results if (each.get("died_in"), each["backend"]) == (phase, backend)]
        seconds = [each["seconds"] for each in found if each["seconds"] is not None]
        times = [statistics.median(seconds), max(seconds)] if seconds else [None, None]
        right = sum(not each["error"] for each in found)
        cells = [len(found), right, len(found) - right, *times, sum(each["same_bits"] for each in found)]
        if found:
            table.append([backend, phase, *cells, max(each["lost_steps"] or 0 for each in found)])
    heads = ("backend", "killed in", "kills", "other rank told, by name", "otherwise", "seconds until told, median")
    more = ("longest", "resumed with the same bits", "most steps lost")
    record.show("kills", (*heads, *more), table)
    others = Counter(
        (each["backend"], each.get("phase"), each.get("kind"), _shorten(words))
        for each in record.results
        if (words := each.get("error") or each.get("last_run"))
    )
    rows = [[*what, times] for what, times in others.most_common()]
    record.show("otherwise", ("backend", "aimed at", "error", "its words", "times"), rows or [["none"] + 4 * [None]])


def _shorten(words: str) -> str:
    """Return the beginning of an error, without what is another in every run."""
    return re.sub(r"/\S+|\[[^\]]*\]:?\d*|\d{3,}", "…", words)[:200]
