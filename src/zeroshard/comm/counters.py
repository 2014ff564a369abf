"""What communication costs: bytes of collectives, and the time that computation waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.comm.mesh import MeshAxis, group_backend


@dataclass
class Traffic:
    """Collectives of one kind.

    Bytes are counted as in the paper: an all-gather by its output, a reduce-scatter by its input, an all-reduce by
    twice its length; an all-to-all by its input. A rank of a group of N receives (N - 1)/N of them, of an all-to-all on
    average.
    """

    count: int = 0
    bytes: int = 0


class WaitTimer:
    """Context manager around everything that makes computation wait for a collective. Costs almost nothing when off.

    If waiting blocks the host (gloo), it measures host time; on a GPU, the time the compute stream is idle, with events
    that are read only on request, so that timing does not synchronize the host.

    >>> timer = WaitTimer(on_stream=False)
    >>> with timer:
    ...     pass
    >>> timer.seconds
    0.0
    """

    def __init__(self, on_stream: bool) -> None:
        self.is_running = False
        self._is_on_stream = on_stream
        self._compute_stream: torch.cuda.Stream | None = None  # waits between side streams are not timed
        self._wait_started = 0.0
        self._host_seconds = 0.0
        self._events: list[torch.cuda.Event] = []  # begin, end, begin, end, …

    def start(self) -> None:
        self.is_running, self._host_seconds = True, 0.0
        self._events.clear()
        self._compute_stream = torch.cuda.current_stream() if self._is_on_stream else None

    def stop(self) -> None:
        self.is_running = False

    @property
    def seconds(self) -> float:
        """Seconds waited between start and stop. On a GPU, reading it synchronizes with the device."""
        if self._events:
            self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        milliseconds = sum(float(begin.elapsed_time(end)) for begin, end in pairs)
        return self._host_seconds + milliseconds / 1e3

    def __enter__(self) -> None:
        if self.is_running:
            self._wait_started = time.perf_counter()
            self._record_event()

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            if not self._is_on_stream:
                self._host_seconds += time.perf_counter() - self._wait_started
            self._record_event()

    def _record_event(self) -> None:
        if self._is_on_stream and torch.cuda.current_stream() == self._compute_stream:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)


class TPTrafficMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that DTensors issue over one axis while it is entered."""

    def __init__(self, axis: MeshAxis) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()
        self._axis = axis
        self._group_name = axis.group.group_name if axis.group is not None else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let the DTensor go first: its collectives are dispatched here afterwards
        if func.namespace == "_c10d_functional" and len(args) > 1 and args[-1] == self._group_name:
            tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            self.traffic.count += 1
            multiplier = self._bytes_multiplier(func._schema.name, tensors[0].device)
            self.traffic.bytes += multiplier * sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def _bytes_multiplier(self, name: str, device: torch.device) -> int:
        """Return the weight of a collective's input bytes: see :class:`Traffic`.

        DTensor uses gloo's own reduce-scatter, which is an all-reduce: [Note: reduce-scatter over gloo].
        """
        if "all_reduce" in name:
            return 2
        if "reduce_scatter" in name:
            return 2 if group_backend(self._axis.group, device) == "gloo" else 1
        return self._axis.size if "all_gather" in name else 1
