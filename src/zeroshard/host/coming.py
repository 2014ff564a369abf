"""Coming: new parameters that the host is making."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch


class PendingParams:
    """New parameters of one flat, on their way."""

    def __init__(
        self, futures: list[Future[torch.cuda.Event | None]], on_error: Callable[[BaseException], Exception]
    ) -> None:
        self._futures = futures
        self._on_error = weakref.WeakMethod(on_error)  # weak: its object refers to the flat

    def wait(self) -> None:
        """Block until the host has made them, and let the current stream wait for their copy."""
        for job in self._futures:
            error = job.exception()  # raises where this thread is interrupted, which is no failure of the update
            if error is not None:
                failed = self._on_error()
                raise error if failed is None else failed(error) from error
            event = job.result()
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
