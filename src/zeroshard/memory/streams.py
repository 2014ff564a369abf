"""Lane: a side stream on a GPU; on the CPU nothing, since there asynchronous work has threads of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from zeroshard.comm.wait_timer import WaitTimer


def record_blocking_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Note a stream's present end. A thread that waits for it sleeps; for other events it keeps a processor busy."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class SideStream:
    """Work issued inside ``with lane:`` runs beside the compute stream.

    [Note: streams without record_stream]
    All memory is allocated and freed on the compute stream. The lane first waits for compute, so it sees finished
    inputs. What it reads is kept alive by reference until compute has waited for the lane, so the allocator never
    hands memory out under a lane that still reads it, and what is in flight is bounded by who waits, not by luck.

    A unit changes lanes a few times a step. ``torch.Event`` and ``with stream:`` do that in C++; their namesakes in
    ``torch.cuda`` ask for the current stream in Python: ``torch.cuda.stream`` took 15 µs, ``with stream:`` 1 (H200).
    """

    def __init__(self, device: torch.device, wait_timer: WaitTimer) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._compute_event: Any = (
            torch.Event(device) if self._stream is not None else None
        )  # where compute was, last time
        self._device_index = -1 if self._stream is None else self._stream.device_index
        self._wait_timer = wait_timer
        self._has_pending_work = False  # whether compute has not waited for all of it

    def __enter__(self) -> SideStream:
        if self._stream is not None:
            self._has_pending_work = True
            self._compute_event.record(*self._compute_stream_args())
            self._compute_event.wait(self._stream)
            self._stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, trace)

    def record_event(self) -> torch.Event | None:
        """Note the lane's present end, to be awaited later."""
        if self._stream is None:
            return None
        event = torch.Event(self._device)
        event.record(self._stream)
        return event

    def record_blocking_event(self) -> torch.cuda.Event | None:
        """The same, for a thread of the host to wait for."""
        return record_blocking_event(self._stream) if self._stream is not None else None

    def compute_wait_event(self, event: torch.Event | None) -> None:
        """Make the compute stream wait for a mark."""
        if event is not None:
            with self._wait_timer:
                event.wait(*self._compute_stream_args())

    def compute_wait_all(self) -> None:
        """Make it wait for all that was issued here."""
        if self._has_pending_work:
            self.compute_wait_event(self.record_event())
            self._has_pending_work = False

    def _compute_stream_args(self) -> tuple[torch.cuda.Stream, ...]:
        """The compute stream, where torch would take another device's: a thread may be at work for several."""
        if torch.cuda.current_device() == self._device_index:
            return ()
        return (torch.cuda.current_stream(self._device),)
