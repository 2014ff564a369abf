"""Measure how long a function takes on the host or on a device.

[Note: timing on the device]
A GPU runs kernels after the host has launched them. A kernel of a few microseconds ends before the host has launched
the next one, so a loop of such kernels would measure the host. Therefore the device is first kept busy for some
milliseconds while the host launches the runs; events around the runs then measure the device's own time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MAX_RUNS_PER_ROUND = 32  # between two events: fewer than the host can launch while the device is busy
ROUND_SECONDS = 0.05  # enough time between two events
MAX_ROUNDS = 200  # rounds, or runs on a CPU
BUSY_KERNELS = 32  # multiplications of BUSY_NUMEL elements, 0.1 ms each, that keep a device busy
BUSY_NUMEL = 2**26


def host_seconds(run: Callable[[], object], seconds: float, max_runs: int = MAX_ROUNDS) -> float:
    """Return the median time of as many runs as fit in ``seconds``, at least one after the warm-up run.

    If the warm-up run takes longer than ``seconds``, its time is returned, because there is no time for a second run.

    >>> host_seconds(lambda: None, seconds=0.001) < 1
    True
    """
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    times: list[float] = [] if first < seconds else [first]
    deadline = time.perf_counter() + seconds
    while first < seconds and len(times) < max_runs and (not times or time.perf_counter() < deadline):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def device_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median time of a run on a device: see [Note: timing on the device].

    >>> device_seconds(lambda: torch.ones(3) + 1, torch.device("cpu"), seconds=0.001) > 0
    True
    """
    if device.type != "cuda":
        return host_seconds(run, seconds)
    run()  # loads kernels and selects algorithms
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    runs = max(1, min(MAX_RUNS_PER_ROUND, int(ROUND_SECONDS / (time.perf_counter() - start))))
    busy = torch.ones(BUSY_NUMEL, device=device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < MAX_ROUNDS and (len(times) < 2 or time.perf_counter() < deadline):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(BUSY_KERNELS):
            busy.mul_(1.0)
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / runs)  # elapsed_time returns milliseconds
    return statistics.median(times)
