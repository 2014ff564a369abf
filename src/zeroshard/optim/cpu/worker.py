"""The worker thread for CPU updates, and the order of its jobs.

[Note: order of CPU updates]
A job is ready once its gradient is ready. Of the ready jobs, the worker takes the one that the next forward needs
first. Backward produces gradients in the reverse order, so the jobs left at its end belong to the units that forward
needs last: they are updated while forward computes the others. If the worker took gradients in the order they arrive,
forward could not start before the last update.

[Note: overlapping Python with native kernels]
The Python work of a native update (choose a job, prepare its arguments, send its result, notify waiters) overlaps with
the kernel of another update. A job's work is a generator that yields once its kernel runs. The worker then starts the
next job, whose kernel is queued ([Note: kernel threads]), and only then finishes the first:

    Python   start 1 | start 2 | wait | finish 1 | start 3 | wait ...... | finish 2 | start 4 | wait
    kernels          | 1 ............ | 2 ............................. | 3 .......................

At most two jobs are in flight, since there are few buffers. If no other job is ready, the running one is finished
immediately: a finished result never waits for a gradient. Two jobs of one chunk do not overlap, because they read and
write the same tensors. An exclusive job (``is_exclusive``) overlaps with no other: it spends much time outside a
kernel, because it waits for the disk or is a torch update, or its gradient needs the only gradient buffer. A job whose
work is a plain function has no kernel.

[Note: worker thread priority]
The thread first lowers its own priority. On Linux priority is per thread, and threads that it starts inherit it: those
of the native kernels and of OpenMP. So the thread that launches GPU work gets a CPU as soon as it needs one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroshard.utils.profiling import label

WORKER_NICENESS = 10  # added to the nice value of the worker thread


@dataclass(eq=False)
class UpdateJob:
    """Work that runs once its device events are complete."""

    priority: tuple[int, int]  # smallest first; jobs with an equal first number do not overlap
    events: Sequence[torch.cuda.Event | None]  # not known to be complete
    work: Callable[[], Any]  # a plain or generator function: see [Note: overlapping Python with native kernels]
    is_exclusive: bool = False  # whether no other job may be in flight
    unit: str = ""  # whose states it updates
    future: Future[Any] = field(default_factory=Future)
    _generator: Generator[None, None, Any] | None = None  # the started, unfinished work

    @property
    def kind(self) -> str:
        """What it does, in words."""
        return "speculative CPU update" if self.priority[1] else "CPU update"

    @property
    def is_ready(self) -> bool:
        """Whether the job can start. Also True if the device failed: then :meth:`wait_events` raises."""
        try:
            while self.events and (self.events[-1] is None or self.events[-1].query()):  # type: ignore[no-untyped-call]
                self.events = self.events[:-1]  # a complete event stays complete: do not query it again
        except RuntimeError:
            return True
        return not self.events

    @property
    def is_cancelled(self) -> bool:
        """Whether the job was cancelled; if so, notify its waiters."""
        return self.future.cancelled() and not self.future.set_running_or_notify_cancel()

    def wait_events(self) -> None:
        """Wait for the events."""
        for event in self.events:
            if event is not None:
                event.synchronize()

    def start(self) -> None:
        """Run the work until its kernel is started, or to the end if it has no kernel."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.wait_events()  # complete; raises if the device failed
            result = self.work()
        except BaseException as error:
            self.future.set_exception(error)
            return
        if isinstance(result, Generator):
            self._generator = result
            self._advance(result)
        else:
            self.future.set_result(result)

    def finish(self) -> None:
        """Run the remaining work, if any."""
        while self._generator is not None:
            with label("finish {} {!r}", self.kind, self.unit):
                self._advance(self._generator)

    def _advance(self, generator: Generator[None, None, Any]) -> None:
        try:
            next(generator)
        except StopIteration as stop:
            self._generator = None
            self.future.set_result(stop.value)
        except BaseException as error:
            self._generator = None
            self.future.set_exception(error)


class UpdateWorker:
    """Run jobs on one thread, which starts with the first job.

    >>> worker = UpdateWorker()
    >>> worker.submit(UpdateJob((0, 0), [], lambda: 6 * 7)).result()
    42
    """

    def __init__(self) -> None:
        self._queue = _JobQueue()
        self._thread: threading.Thread | None = None
        self._finalizer: Callable[[], Any] = lambda: None

    def submit(self, job: UpdateJob) -> Future[Any]:
        """Queue a job and return its future, which can be cancelled until the job starts."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_worker_loop, args=(self._queue,), name="zeroshard update", daemon=True
            )
            self._thread.start()
            # also runs at interpreter exit
            self._finalizer = weakref.finalize(self, _shut_down, self._queue, self._thread)
        self._queue.add(job)
        return job.future


class _JobQueue:
    """The queued jobs. The thread refers only to this object, so it does not keep a model alive."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._jobs: list[UpdateJob] = []
        self._is_closed = False

    def add(self, job: UpdateJob) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def next(self, wait: bool) -> UpdateJob | None:
        """Return the job to start now; None if the queue is closed or, without ``wait``, no job is ready."""
        while True:
            with self._condition:
                self._jobs = [job for job in self._jobs if not job.is_cancelled]
                if self._is_closed:
                    return None
                ready = min((job for job in self._jobs if job.is_ready), key=lambda job: job.priority, default=None)
                if ready is not None:
                    self._jobs.remove(ready)
                    return ready
                if not wait:
                    return None
                if not self._jobs:
                    self._condition.wait()
                    continue
                upcoming = max(self._jobs, key=lambda job: job.priority)  # backward completes its gradient first
            with contextlib.suppress(RuntimeError):  # a device error: raised again when the job starts
                upcoming.wait_events()


def _worker_loop(queue: _JobQueue) -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICENESS)
    started: UpdateJob | None = None  # its kernel may still run
    while (job := queue.next(wait=started is None)) is not None or started is not None:
        if started is not None and (job is None or job.is_exclusive or job.priority[0] == started.priority[0]):
            started.finish()
            started = None
        if job is not None:
            with label("start {} {!r}", job.kind, job.unit):
                job.start()
            if started is not None:
                started.finish()
            started = job
        del job  # keep no reference while waiting for the next job


def _shut_down(queue: _JobQueue, thread: threading.Thread) -> None:
    queue.close()
    if thread is not threading.current_thread():
        thread.join()
