"""Worker: the one thread that updates on the host, and which of its jobs it does next.

[Note: what the host does next]
A job can be done once its gradient is there. Of those that can, the worker takes the one that the next forward wants
first. Backward brings gradients in the reverse of that order, so what is left over when it ends belongs to the units
that forward comes to last: they are updated while forward computes the others. Were gradients taken as they come,
forward could not begin before the last of them.

[Note: behind the kernel]
What a native update takes beside its kernel (a job is chosen, its arguments are found, its result is sent and told) is
hidden behind the kernel of another. A job's work is a generator that yields once its kernel runs. The worker then
begins the next job, whose kernel waits in line ([Note: from one update to the next]), and only then ends the first:

    Python   begin 1 | begin 2 | wait | end 1 | begin 3 | wait ......... | end 2 | begin 4 | wait
    kernels          | 1 ............ | 2 ............................. | 3 ....................

No more than two are under way, since buffers are few, and the only one is ended at once where no other is ready: a
result that is there never waits for a gradient that is not. Two jobs of one granule do not overlap, as they read and
write the same; nor does a job that is to be done ``alone`` since it takes long without a kernel to hide behind: it
waits for the disk, or is torch's, or its gradient comes through a buffer that there is one of. A plain function is a
job without a kernel.

[Note: who may starve]
The thread lowers its own priority before it does anything. On Linux that is a thread's own, and threads that it starts
inherit it: the native update's and OpenMP's alike. So the thread that launches the GPU's work gets a processor as soon
as it wants one.
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

WORKER_NICENESS = 10  # how much lower the priority of updates is


@dataclass(eq=False)
class UpdateJob:
    """Something to be done when some moments of the device are over."""

    priority: tuple[int, int]  # the smallest is done first; jobs with the same first number do not overlap
    events: Sequence[torch.cuda.Event | None]  # that are not known to be over
    work: Callable[[], Any]  # a plain function, or a generator's: see [Note: behind the kernel]
    is_exclusive: bool = False  # whether nothing else may be under way meanwhile
    future: Future[Any] = field(default_factory=Future)
    _generator: Generator[None, None, Any] | None = None  # what is still to be done of it

    @property
    def is_ready(self) -> bool:
        """Whether it can be done, or the device has failed, which :meth:`wait` tells."""
        try:
            while self.events and (self.events[-1] is None or self.events[-1].query()):  # type: ignore[no-untyped-call]
                self.events = self.events[:-1]  # what is over stays over: it is not asked again
        except RuntimeError:
            return True
        return not self.events

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled; whoever waits for it is told."""
        return self.future.cancelled() and not self.future.set_running_or_notify_cancel()

    def wait_events(self) -> None:
        """Return when it can be done."""
        for moment in self.events:
            if moment is not None:
                moment.synchronize()

    def start(self) -> None:
        """Do it up to where its kernel runs; wholly, where it has none."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.wait_events()  # it is over; raises where the device has failed
            made = self.work()
        except BaseException as error:
            self.future.set_exception(error)
            return
        if isinstance(made, Generator):
            self._generator = made
            self._advance(made)
        else:
            self.future.set_result(made)

    def finish(self) -> None:
        """Do the rest of it, if there is one."""
        while self._generator is not None:
            self._advance(self._generator)

    def _advance(self, generator: Generator[None, None, Any]) -> None:
        try:
            next(generator)
        except StopIteration as over:
            self._generator = None
            self.future.set_result(over.value)
        except BaseException as error:
            self._generator = None
            self.future.set_exception(error)


class UpdateWorker:
    """Does jobs one after the other, on a thread that begins with the first of them.

    >>> worker = UpdateWorker()
    >>> worker.submit(UpdateJob((0, 0), [], lambda: 6 * 7)).result()
    42
    """

    def __init__(self) -> None:
        self._queue = _JobQueue()
        self._thread: threading.Thread | None = None
        self._finalizer: Callable[[], Any] = lambda: None

    def submit(self, job: UpdateJob) -> Future[Any]:
        """Take a job on. It may be cancelled until it is begun."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_worker_loop, args=(self._queue,), name="zeroshard update", daemon=True
            )
            self._thread.start()
            self._finalizer = weakref.finalize(
                self, _shut_down, self._queue, self._thread
            )  # also when the interpreter exits
        self._queue.add(job)
        return job.future


class _JobQueue:
    """The jobs there are. The thread knows this alone, so that it does not keep a model alive."""

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
        """The job to begin now. None: there will be no more or, where it does not ``wait``, there is none yet."""
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
                upcoming = max(self._jobs, key=lambda job: job.priority)  # backward comes to it first
            with contextlib.suppress(RuntimeError):  # of the device: it is told where the job is done
                upcoming.wait_events()


def _worker_loop(queue: _JobQueue) -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICENESS)
    begun: UpdateJob | None = None  # whose kernel may run
    while (job := queue.next(wait=begun is None)) is not None or begun is not None:
        if begun is not None and (job is None or job.is_exclusive or job.priority[0] == begun.priority[0]):
            begun.finish()
            begun = None
        if job is not None:
            job.start()
            if begun is not None:
                begun.finish()
            begun = job
        del job  # while it waits for the next, nothing of this one is kept


def _shut_down(queue: _JobQueue, thread: threading.Thread) -> None:
    queue.close()
    if thread is not threading.current_thread():
        thread.join()
