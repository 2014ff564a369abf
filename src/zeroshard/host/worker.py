"""Worker: the one thread that updates on the host, and which of its jobs it does next.

[Note: what the host does next]
A job can be done once its gradient is there. Of those that can, the worker takes the one that the next forward wants
first. Backward brings gradients in the reverse of that order, so what is left over when it ends belongs to the units
that forward comes to last: they are updated while forward computes the others. Were gradients taken as they come,
forward could not begin before the last of them.

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

NICE = 10  # how much lower the priority of updates is


@dataclass(eq=False)
class Job:
    """Something to be done when some moments of the device are over."""

    order: tuple[int, int]  # the smallest is done first
    moments: Sequence[torch.cuda.Event | None]  # that are not known to be over
    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)

    @property
    def ready(self) -> bool:
        """Whether it can be done, or the device has failed, which :meth:`wait` tells."""
        try:
            while self.moments and (self.moments[-1] is None or self.moments[-1].query()):  # type: ignore[no-untyped-call]
                self.moments = self.moments[:-1]  # what is over stays over: it is not asked again
        except RuntimeError:
            return True
        return not self.moments

    def wait(self) -> None:
        """Return when it can be done."""
        for moment in self.moments:
            if moment is not None:
                moment.synchronize()


class Worker:
    """Does jobs one at a time, on a thread that begins with the first of them.

    >>> worker = Worker()
    >>> worker.do(Job((0, 0), [], lambda: 6 * 7)).result()
    42
    """

    def __init__(self) -> None:
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        self._end: Callable[[], Any] = lambda: None

    def do(self, job: Job) -> Future[Any]:
        """Take a job on. It may be cancelled until it is begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="zeroshard update", daemon=True)
            self._thread.start()
            self._end = weakref.finalize(self, _end, self._queue, self._thread)  # also when the interpreter exits
        self._queue.add(job)
        return job.done


class _Queue:
    """The jobs there are. The thread knows this alone, so that it does not keep a model alive."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._closed = False

    def add(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def next(self) -> Job | None:
        """The job to do now; waits for one. None: there will be no more."""
        while True:
            with self._changed:
                self._jobs = [job for job in self._jobs if not job.done.cancelled()]
                if self._closed:
                    return None
                ready = min((job for job in self._jobs if job.ready), key=lambda job: job.order, default=None)
                if ready is not None:
                    self._jobs.remove(ready)
                    return ready
                if not self._jobs:
                    self._changed.wait()
                    continue
                upcoming = max(self._jobs, key=lambda job: job.order)  # backward comes to it first
            with contextlib.suppress(RuntimeError):  # of the device: it is told where the job is done
                upcoming.wait()


def _serve(queue: _Queue) -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (job := queue.next()) is not None:
        if job.done.set_running_or_notify_cancel():
            try:
                job.wait()  # it is over; raises where the device has failed
                job.done.set_result(job.work())
            except BaseException as error:
                job.done.set_exception(error)
        del job  # while it waits for the next, nothing of this one is kept


def _end(queue: _Queue, thread: threading.Thread) -> None:
    queue.close()
    if thread is not threading.current_thread():
        thread.join()
