"""Timing: how long something takes, on the device that does it.

[Note: timing on the device]
A GPU does what the host has launched some time before. A kernel of a few microseconds is over before the host has
launched the next, and a loop of them would time the host. So the host gets ahead first: the device is kept busy for
some milliseconds, the runs are launched meanwhile, and events between them take the device's own time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MAX_RUNS_PER_ROUND = 32  # the most runs between two events: fewer than the host launches while the device is kept busy
ROUND_SECONDS = 0.05  # seconds that are enough between two events
MAX_ROUNDS = 200  # rounds, or runs on a CPU
BUSY_KERNELS = 32  # multiplications of BUSY elements, 0.1 ms each, that keep a device busy
BUSY_NUMEL = 2**26


def host_seconds(run: Callable[[], object], seconds: float, max_runs: int = MAX_ROUNDS) -> float:
    """The median time of a run, of as many as fit in ``seconds``, and at least one after the first.

    A first run that takes longer than that counts itself: there is no time for a second.

    >>> host_seconds(lambda: None, seconds=0.001) < 1
    True
    """
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    taken: list[float] = [] if first < seconds else [first]
    deadline = time.perf_counter() + seconds
    while first < seconds and len(taken) < max_runs and (not taken or time.perf_counter() < deadline):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def device_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The same on a device: [Note: timing on the device].

    >>> device_seconds(lambda: torch.ones(3) + 1, torch.device("cpu"), seconds=0.001) > 0
    True
    """
    if device.type != "cuda":
        return host_seconds(run, seconds)
    run()  # loads kernels, chooses algorithms
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    runs = max(1, min(MAX_RUNS_PER_ROUND, int(ROUND_SECONDS / (time.perf_counter() - start))))
    busy = torch.ones(BUSY_NUMEL, device=device)
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < MAX_ROUNDS and (len(taken) < 2 or time.perf_counter() < deadline):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(BUSY_KERNELS):
            busy.mul_(1.0)
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / runs)  # of milliseconds
    return statistics.median(taken)
