"""The thread of updates: which job is begun while another's kernel runs, and what it does when one fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Generator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import pytest

from zeroshard.optim.cpu.worker import UpdateJob, UpdateWorker

LIMIT = 10  # seconds that a test waits before it fails


class JobLog:
    """Submits jobs that log what they do; none starts before :meth:`open`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._open = threading.Event()
        self._worker = UpdateWorker()
        self._held = self._worker.submit(
            UpdateJob((-1, 0), [], partial(self._open.wait, LIMIT))
        )  # nothing starts before it is done

    def kernel(self, name: str, fails: str = "") -> Generator[None, None, str]:
        for part in ("begin", "end"):
            self.lines.append(f"{part} {name}")
            if part == fails:
                raise MemoryError(f"{part} {name}")
            if part == "begin":
                yield
        return name

    def plain(self, name: str) -> str:
        self.lines.append(name)
        return name

    def do(self, order: int, work: Any, *arguments: Any, **chosen: Any) -> Future[Any]:
        job = UpdateJob((order, chosen.pop("second", 0)), chosen.pop("events", []), partial(work, *arguments), **chosen)
        return self._worker.submit(job)

    def open(self, *jobs: Future[Any]) -> list[Any]:
        """Let the jobs start; return the result or the error of each."""
        self._open.set()
        return [job.exception(LIMIT) or job.result() for job in jobs]

    def close(self) -> None:
        self._worker._finalizer()


def test_the_next_job_starts_while_a_kernel_runs() -> None:
    log = JobLog()
    jobs = [log.do(number, log.kernel, str(number)) for number in range(4)]
    assert log.open(*jobs) == ["0", "1", "2", "3"]
    wanted = ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "begin 3", "end 2", "end 3"]
    assert log.lines == wanted


def test_jobs_of_one_chunk_do_not_overlap() -> None:
    log = JobLog()
    jobs = [log.do(order, log.kernel, name, second=second) for order, second, name in ((0, 0, "a"), (0, 1, "b"))]
    jobs += [log.do(1, log.kernel, "c")]
    log.open(*jobs)
    assert log.lines == ["begin a", "end a", "begin b", "begin c", "end b", "end c"]


def test_no_job_overlaps_with_an_exclusive_one() -> None:
    log = JobLog()
    jobs = [
        log.do(0, log.kernel, "a"),
        log.do(1, log.plain, "b", is_exclusive=True),
        log.do(2, log.kernel, "c"),
    ]
    jobs += [log.do(3, log.plain, "d")]
    assert log.open(*jobs) == ["a", "b", "c", "d"]
    assert log.lines == ["begin a", "end a", "b", "begin c", "d", "end c"]


class FakeEvent:
    """A device event that completes when a test sets it."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def query(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        assert self.over.wait(LIMIT)


def test_a_job_is_finished_immediately_if_no_other_is_ready() -> None:
    log, event = JobLog(), FakeEvent()
    first, second = log.do(0, log.kernel, "a"), log.do(1, log.kernel, "b", events=[event])
    assert log.open(first) == ["a"]  # although the other's event is not complete
    assert log.lines == ["begin a", "end a"]
    event.over.set()
    assert log.open(second) == ["b"]


@pytest.mark.parametrize("fails", ["begin", "end"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_job_that_fails_raises_and_harms_no_other(fails: str, which: int) -> None:
    log = JobLog()
    names = ["a", "b", "c"]
    jobs = [log.do(n, log.kernel, name, fails if n == which else "") for n, name in enumerate(names)]
    for number, found in enumerate(log.open(*jobs)):
        if number == which:
            assert isinstance(found, MemoryError) and str(found) == f"{fails} {names[which]}"
        else:
            assert found == names[number]
    ended = [f"end {name}" for n, name in enumerate(names) if (n, fails) != (which, "begin")]
    assert sorted(log.lines) == ["begin a", "begin b", "begin c", *ended]


def test_one_that_was_cancelled_is_not_begun() -> None:
    log = JobLog()
    jobs = [log.do(number, log.kernel, str(number)) for number in range(3)]
    assert jobs[1].cancel()
    assert log.open(jobs[0], jobs[2]) == ["0", "2"]
    assert log.lines == ["begin 0", "begin 2", "end 0", "end 2"]
    with pytest.raises(CancelledError):
        jobs[1].result(LIMIT)


def test_one_that_is_under_way_is_not_cancelled() -> None:
    log = JobLog()
    first = log.do(0, log.kernel, "a")

    def asks() -> bool:
        return first.cancel()

    assert log.open(log.do(1, asks), first) == [False, "a"]
    assert log.lines == ["begin a", "end a"]


def test_what_is_under_way_is_ended_when_the_worker_closes() -> None:
    log, closing = JobLog(), threading.Thread(target=lambda: None)

    def closes() -> str:
        nonlocal closing
        closing = threading.Thread(target=log.close)
        closing.start()
        while not log._worker._queue._is_closed:
            pass
        return "closes"

    jobs = [log.do(0, log.kernel, "a"), log.do(1, closes), log.do(2, log.kernel, "never")]
    assert log.open(*jobs[:2]) == ["a", "closes"]
    closing.join(LIMIT)
    assert not closing.is_alive() and not jobs[2].done()
    assert log.lines == ["begin a", "end a"]


@pytest.mark.parametrize("plain", [False, True])
def test_a_worker_that_waits_keeps_nothing_of_what_it_did(plain: bool) -> None:
    class Model:
        def kernel(self) -> Generator[None, None, None]:
            yield

        def plain(self) -> None:
            pass

    worker, models = UpdateWorker(), [Model(), Model()]
    told = [weakref.ref(model) for model in models]
    jobs = [
        worker.submit(UpdateJob((number, 0), [], model.plain if plain else model.kernel))
        for number, model in enumerate(models)
    ]
    for job in jobs:
        job.result(LIMIT)
    gc.disable()
    try:
        del models, jobs, job
        limit = time.monotonic() + LIMIT  # the result is there a moment before the thread releases it
        while any(reference() is not None for reference in told) and time.monotonic() < limit:
            time.sleep(0.001)
        assert [reference() for reference in told] == [None, None]
    finally:
        gc.enable()
