"""Lane: a side stream on a GPU; on the CPU nothing, since there asynchronous work has threads of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from zeroshard.stopwatch import Stopwatch


def moment(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Note a stream's present end. A thread that waits for it sleeps; for other events it keeps a processor busy."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Lane:
    """Work issued inside ``with lane:`` runs beside the compute stream.

    [Note: streams without record_stream]
    All memory is allocated and freed on the compute stream. The lane first waits for compute, so it sees finished
    inputs. What it reads is kept alive by reference until compute has waited for the lane, so the allocator never
    hands memory out under a lane that still reads it, and what is in flight is bounded by who waits, not by luck.
    """

    def __init__(self, device: torch.device, stopwatch: Stopwatch) -> None:
        on_gpu = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._guard: Any = None
        self._stopwatch = stopwatch

    def __enter__(self) -> Lane:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._guard = torch.cuda.stream(self._stream)
            self._guard.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard is not None:
            self._guard.__exit__(kind, error, trace)
            self._guard = None

    def mark(self) -> torch.cuda.Event | None:
        """Note the lane's present end, to be awaited later."""
        return self._stream.record_event() if self._stream is not None else None

    def moment(self) -> torch.cuda.Event | None:
        """The same, for a thread of the host to wait for."""
        return moment(self._stream) if self._stream is not None else None

    def join(self, event: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for a mark."""
        if event is not None:
            with self._stopwatch:
                torch.cuda.current_stream().wait_event(event)
