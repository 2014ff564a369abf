"""Measure what torch holds in this process, independently of zeroshard's own counters."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.engine.sharded_gradient import ShardedGradient

PROBE = 12_347  # bytes; no other allocation has this size
# wrappers around other tensors, which are counted themselves
WITHOUT_MEMORY = (DTensor, AsyncCollectiveTensor, ShardedGradient)


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage used by a Python tensor of this process or by its gradient, by address."""
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), WITHOUT_MEMORY):
                continue
            try:
                gradient = torch.Tensor.grad.__get__(thing) if torch.Tensor.is_leaf.__get__(thing) else None
            except RuntimeError:  # a view left by an earlier test, whose base was modified since
                gradient = None
            for tensor in (thing, gradient):
                if tensor is None or issubclass(type(tensor), WITHOUT_MEMORY):
                    continue
                if not torch.Tensor.is_meta.__get__(tensor):
                    storage = torch.Tensor.untyped_storage(tensor)
                    with contextlib.suppress(RuntimeError):  # of a trace that an earlier test left: it has no memory
                        if storage.nbytes():
                            found[storage.data_ptr()] = storage.nbytes()
    return found


def live_bytes() -> int:
    """Return the bytes of all storages used by Python tensors of this process."""
    return sum(live_storages().values())


def live_bytes_at_start() -> int:
    """Return the live bytes before a measurement.

    Garbage in cycles that earlier tests left in this process is collected first: freed later, it would be subtracted
    from what the test measures.
    """
    gc.collect()
    return live_bytes()


def live_beyond(limit: int) -> int:
    """Return the live bytes beyond ``limit``, at least 0.

    gloo's threads release a tensor slightly after its collective has finished, so this retries for a while.
    """
    deadline = time.monotonic() + 2
    while (beyond := max(0, live_bytes() - limit)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return beyond


def allocated_bytes(body: Callable[[], Any]) -> tuple[int, int]:
    """Run ``body``; return the peak and the final bytes of torch's CPU allocator, relative to the start.

    Only memory that is allocated inside ``body`` counts, so frees of anything older do not. Nor do workspaces, which
    one operator allocates and frees itself: oneDNN uses some for bf16 products and convolutions, and their size depends
    on CPU and version, not on zeroshard.

    Occasionally, after thousands of tests in one process, the profiler sees nothing at all: then this raises. Call it
    in a fresh process (`run_processes(..., fresh=True)`).
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.empty(PROBE, dtype=torch.uint8)
        body()
    changes = _changes_without_workspaces(profiled.profiler.kineto_results.experimental_event_tree())
    if PROBE not in changes:
        raise RuntimeError(f"torch's profiler missed an allocation of {PROBE} bytes; it saw {len(changes)} events")
    held = most = 0
    for nbytes in changes:
        if abs(nbytes) != PROBE:
            held += nbytes
            most = max(most, held)
    return most, held


def _changes_without_workspaces(events: Any) -> list[int]:
    """Return bytes allocated or freed (negative), in order, without pairs from within one operator."""
    changes: list[int] = []
    allocated: dict[int, tuple[int, Any]] = {}  # by address: index in `changes`, and the operator
    for event in sorted(_memory_events(events), key=lambda e: e.start_time_ns):
        _, memory = event.typed
        if memory.alloc_size > 0:
            allocated[memory.ptr] = len(changes), event.parent
            changes.append(memory.alloc_size)
        elif memory.ptr in allocated:
            index, operator = allocated.pop(memory.ptr)
            is_workspace = operator is not None and operator == event.parent and operator.name.startswith("aten::")
            changes.append(0 if is_workspace else -changes[index])
            if is_workspace:
                changes[index] = 0
    return changes


def _memory_events(events: Any) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _memory_events(event.children)


class Collectives(TorchDispatchMode):
    """Records each collective on this thread as (name, bytes as counted in the paper), and selected ops."""

    def __init__(self, ops: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.events: list[tuple[str, Any]] = []
        self._ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            self.events.append(_counted(name, args))
        elif name in self._ops:
            self.events.append((name, tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[Any]:
        """Return what was recorded under a name."""
        return [what for event, what in self.events if event == name]

    @property
    def communicated(self) -> int:
        """Return the bytes of all collectives."""
        return sum(what for event, what in self.events if event in _KINDS.values())


_KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "reduce-scatter",  # over gloo
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
}


def _counted(name: str, args: Any) -> tuple[str, int]:
    kind = _KINDS.get(name)
    if kind == "all-gather":
        return kind, args[0].nbytes
    if kind == "reduce-scatter":
        return kind, args[1].nbytes
    if kind is not None:
        return kind, (2 if kind == "all-reduce" else 1) * sum(tensor.nbytes for tensor in args[0])
    return name, 0


TCP_INFO_BYTES_RECEIVED = 128  # offset in Linux's struct tcp_info


def received_bytes() -> int:
    """Return the bytes that the open TCP connections of this process have received, as the kernel counts them."""
    total = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            if os.readlink(entry.path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, TCP_INFO_BYTES_RECEIVED)[0]
    return total
