"""TransferQueue: redistributions that run beside the computation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from zeroshard.core.axis import Steps, finish
from zeroshard.memory.streams import SideStream


@dataclass(eq=False, slots=True)
class Transfer:
    """Values on their way."""

    steps: tuple[Steps, ...]  # empty: all of it is done, or launched
    kept: object  # tensors that a side stream still uses
    event: torch.Event | None = None  # on a GPU, when it is done


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

    def start(self, *steps: Steps, kept: object = None) -> Transfer:
        """Start redistributions as one transfer.

        ``kept``: tensors that it uses, and that nobody else keeps alive until it is done.
        """
        transfer = Transfer(steps, kept)
        if self._stream is None:
            for each in steps:
                next(each, None)
            self._pending.append(transfer)
            return transfer
        with self._stream:
            for each in steps:
                next(each, None)
            for each in steps:
                finish(each)
            transfer.event = self._stream.record_event()
        transfer.steps = ()
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Wait until the values are there: later work on this thread and stream may use them."""
        if self._stream is not None:
            self._stream.compute_wait_event(transfer.event)
            transfer.kept = None
        while transfer.steps:
            oldest = self._pending.popleft()
            for each in oldest.steps:
                finish(each)
            oldest.steps = ()
            oldest.kept = None
