"""Stopwatch: how long computation waited for communication."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Entered around everything that makes computation wait for a collective. Off, it costs next to nothing.

    Where waiting blocks the host (gloo), host time is counted; on a GPU, the time the compute stream stood still, by
    events that are read only when asked for, so that timing makes no host sync.

    >>> stopwatch = Stopwatch(on_stream=False)
    >>> with stopwatch:
    ...     pass
    >>> stopwatch.seconds
    0.0
    """

    def __init__(self, on_stream: bool) -> None:
        self.running = False
        self._on_stream = on_stream
        self._compute: torch.cuda.Stream | None = None  # side streams may wait for each other as they like
        self._since = 0.0
        self._host_seconds = 0.0
        self._events: list[torch.cuda.Event] = []  # begin, end, begin, end, …

    def start(self) -> None:
        """Begin to count, from nothing."""
        self.running, self._host_seconds = True, 0.0
        self._events.clear()
        self._compute = torch.cuda.current_stream() if self._on_stream else None

    def stop(self) -> None:
        """Count no more."""
        self.running = False

    @property
    def seconds(self) -> float:
        """What was waited between start and stop. On a GPU, waits for the device."""
        if self._events:
            self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        milliseconds = sum(float(begin.elapsed_time(end)) for begin, end in pairs)
        return self._host_seconds + milliseconds / 1e3

    def __enter__(self) -> None:
        if self.running:
            self._since = time.perf_counter()
            self._mark()

    def __exit__(self, *_: object) -> None:
        if self.running:
            if not self._on_stream:
                self._host_seconds += time.perf_counter() - self._since
            self._mark()

    def _mark(self) -> None:
        if self._on_stream and torch.cuda.current_stream() == self._compute:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
