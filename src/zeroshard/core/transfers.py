"""TransferQueue: redistributions that run beside the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from zeroshard.core.axis import Steps, finish
from zeroshard.memory.streams import SideStream


class Transfer:
    """Values on their way. After :meth:`wait`, later work on this thread and stream may use them."""

    def __init__(self, queue: TransferQueue, steps: Steps, kept: object) -> None:
        self.steps: Steps | None = steps  # None: waited for
        self.kept = kept  # tensors that a side stream still uses
        self.event: torch.Event | None = None
        self._queue = queue

    def wait(self) -> None:
        """Wait until the values are there."""
        if self.steps is not None:
            self._queue.wait_for(self)


class TransferQueue:
    """Starts transfers beside the computation, and finishes them in the order of their start.

    On a GPU all collectives of a transfer are launched at once on a side stream; the compute stream waits for an event.
    All memory is allocated and freed on the compute stream: the side stream begins after what compute has done so far,
    and nothing that it uses is freed before compute has waited for it. (So nothing needs ``record_stream``.)

    On a CPU a second hop starts when somebody waits for the transfer. All ranks start the hops of one group in one
    order, because older transfers are finished first.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = SideStream(device) if device.type == "cuda" else None
        self._pending: deque[Transfer] = deque()  # on a CPU

    def start(self, steps: Steps, kept: object = None) -> Transfer:
        """Start a transfer. ``kept``: tensors that it uses, and that nobody else keeps alive until it is done."""
        transfer = Transfer(self, steps, kept)
        if self._stream is None:
            next(steps, None)
            self._pending.append(transfer)
        else:
            with self._stream:
                for _ in steps:
                    pass
                transfer.event = self._stream.record_event()
        return transfer

    def wait_for(self, transfer: Transfer) -> None:
        """Wait for a transfer."""
        if self._stream is not None:
            self._stream.compute_wait_event(transfer.event)
            transfer.steps = None
            transfer.kept = None
        while transfer.steps is not None:
            oldest = self._pending.popleft()
            assert oldest.steps is not None
            finish(oldest.steps)
            oldest.steps = None
            oldest.kept = None


def together(starts: list[Callable[[], Steps]]) -> Steps:
    """Run several transfers at the same time, as one."""
    started = [start() for start in starts]
    for steps in started:
        next(steps, None)
    yield
    for steps in started:
        for _ in steps:
            pass
