"""Communicator: asynchronous collectives over the mesh. CollectiveOrder: the recorded order in which they run.

[Note: reduce-scatter over gloo]
gloo's own reduce-scatter is an all-reduce of a copy: it moves twice the bytes, and its wait ignores timeouts. So over
gloo a reduce-scatter is an all-to-all, which sends each rank its part of the input and moves the bytes that the paper
counts, and a sum of the received parts. Sends and receives without a collective would save the copy of the own part,
but a wait for one that ends at a timeout closes the connection, so it cannot be repeated between checks for faults.

Parts are added in the order of the ranks, whatever the order in which they arrive, and in the dtype of the input: each
addition is rounded to it, as NCCL does and as all-reduces do (``Config.reduce_dtype`` chooses a wider one). So repeated
runs and stages 1, 2 and 3 give the same bits. With two ranks stage 0 does too; with more, gloo's all-reduce adds in
another order.
"""

from __future__ import annotations

import io
import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeroshard.comm.consistency import PASS_START, POLL_INTERVAL, ConsistencyChecker
from zeroshard.comm.counters import TPTrafficMode, Traffic, WaitTimer
from zeroshard.comm.mesh import MeshAxis, find_or_create_group, group_backend
from zeroshard.comm.quantization import Quantizer
from zeroshard.utils.profiling import label

MAX_PAST_PASSES = 64  # past passes whose events are still known

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveWork(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Make the result available to later work on this thread and stream."""


@dataclass
class CollectiveCounters:
    """Traffic of the current step, of the last step, and in total."""

    current_step: dict[str, Traffic] = field(default_factory=dict)
    last_step: dict[str, Traffic] = field(default_factory=dict)
    total: dict[str, Traffic] = field(default_factory=dict)

    def add(self, kind: str, nbytes: int) -> None:
        for by_kind in (self.current_step, self.total):
            traffic = by_kind.get(kind)
            if traffic is None:
                traffic = by_kind[kind] = Traffic()
            traffic.count += 1
            traffic.bytes += nbytes

    def end_step(self, continues_last: bool = False) -> None:
        """End a step. ``continues_last``: of another optimizer, and its traffic belongs to the step before."""
        ended, self.current_step = self.current_step, {}
        for kind, traffic in ended.items() if continues_last else ():
            known = self.last_step.setdefault(kind, Traffic())
            known.count, known.bytes = known.count + traffic.count, known.bytes + traffic.bytes
        self.last_step = self.last_step if continues_last else ended


class Communicator:
    """This rank's position in the mesh, and the collectives over it.

    States are sharded over ``shard_axis``. The ranks of ``replicate_axes`` hold copies; over them gradients are only
    summed. Plain data parallelism is a mesh whose shard axis has one rank. The ranks of ``tensor_axis`` compute one
    model together, each with its TP shards of the parameters, on the same data. The ranks of ``average_axis`` train
    alone between averages (``Config.local_steps``): it is none of the data axes.
    """

    def __init__(
        self,
        axes: list[MeshAxis],
        device: torch.device,
        shard_axis: MeshAxis | None,
        consistency: ConsistencyChecker,
        tensor_axis: MeshAxis | None = None,
    ) -> None:
        """``axes``: all data-parallel ones. ``shard_axis``: one of them, or their product; None: nothing is sharded."""
        self.shard_axis = shard_axis or MeshAxis(None, 1, 0)
        self.tensor_axis = tensor_axis or MeshAxis(None, 1, 0)
        backend = group_backend(axes[-1].group, device)
        self.average_axis = next((axis for axis in axes if axis.has_local_steps), MeshAxis(None, 1, 0))
        axes = [axis for axis in axes if not axis.has_local_steps]
        self.data_parallel_size = math.prod(axis.size for axis in axes)  # ranks that gradients are averaged over
        self.device = device
        self.consistency = consistency
        self.counters = CollectiveCounters()
        self._is_nccl = backend == "nccl"
        self.is_host_blocking = backend == "gloo"  # waiting for a collective blocks the host, not only a stream
        # NCCL divides each rank's gradient when it reads it, as DDP does, and no kernel has to divide the sum. That is
        # less exact in 16 bits, unless the number of ranks is a power of two; in fp16, small gradients would be lost.
        is_power_of_two = self.data_parallel_size & (self.data_parallel_size - 1) == 0
        averaged = (torch.float32, torch.bfloat16) if is_power_of_two else (torch.float32,)
        self.averaged_dtypes = averaged if self._is_nccl else ()  # gradients of the others are added up
        self.wait_timer = WaitTimer(on_stream=device.type == "cuda" and not self.is_host_blocking)
        # gradients are reduce-scattered over these, one after the other
        self._reduce_axes = [*reversed(self.shard_axis.factors or (self.shard_axis,))]
        self.replicate_axes = [axis for axis in axes if axis.size > 1 and axis not in self._reduce_axes]
        self._inner_gather_axis = self._reduce_axes[0]
        self._second_gathers: deque[_SecondHop] = deque()  # not started yet: see [Note: order of second hops]
        self._second_reductions: deque[_SecondHop] = deque()
        if backend in ("nccl", "gloo") and consistency.is_distributed:
            purpose = _purpose_of_groups(self)
            if self.is_host_blocking and self.shard_axis.factors is not None:
                self._inner_gather_axis = _with_own_group(self._inner_gather_axis, f"{purpose}, second hops")
            self._reduce_axes = [_with_own_group(axis, purpose) for axis in self._reduce_axes]
            self.replicate_axes = [_with_own_group(axis, purpose) for axis in self.replicate_axes]
            self.average_axis = _with_own_group(self.average_axis, purpose)

    @property
    def needs_receive_buffer(self) -> bool:
        """Whether :meth:`reduce_scatter` needs a buffer of its input's length: [Note: reduce-scatter over gloo]."""
        return self.is_host_blocking and self.shard_axis.size > 1

    def all_gather(
        self, output: torch.Tensor, shard: torch.Tensor, what: str, activation_axis: MeshAxis | None = None
    ) -> CollectiveWork:
        """All-gather every rank's ``shard`` into ``output``, in rank order.

        ``activation_axis``: it is an activation, replicated over this axis.
        """
        axis = activation_axis or self.shard_axis
        if axis.factors is not None:
            part = output.view(axis.factors[1].size, -1)[axis.factors[1].rank]
            return self.all_gather_inner(output, part, what, after=self.all_gather_outer(part, shard, what))
        kind = "all-gather" if activation_axis is None else "activation gather"
        start = partial(_all_gather, output, shard, group=axis.group, async_op=True)
        return _start(self, start, kind, output.nbytes, what)

    def all_gather_outer(self, part: torch.Tensor, shard: torch.Tensor, what: str) -> CollectiveWork:
        """All-gather over the outer axis: the first of two hops."""
        assert self.shard_axis.factors is not None
        start = partial(_all_gather, part, shard, group=self.shard_axis.factors[0].group, async_op=True)
        return _start(self, start, "outer all-gather", part.nbytes, what)

    def all_gather_inner(
        self, output: torch.Tensor, part: torch.Tensor, what: str, after: CollectiveWork | None = None
    ) -> CollectiveWork:
        """All-gather over the inner axis: the second of two hops, ``after`` the first."""
        start = partial(_all_gather, output, part, group=self._inner_gather_axis.group, async_op=True)
        if after is not None:
            return _start_after(self, after, self._second_gathers, start, "all-gather", output.nbytes, what)
        while self._second_gathers:
            self._second_gathers[0].start()
        return _start(self, start, "all-gather", output.nbytes, what)

    def all_gather_tp_shards(self, output: torch.Tensor, shard: torch.Tensor, what: str) -> CollectiveWork:
        """All-gather every tensor rank's ``shard`` into ``output``, in rank order."""
        start = partial(_all_gather, output, shard, group=self.tensor_axis.group, async_op=True)
        return _start(self, start, "all-gather", output.nbytes, what)

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        packed: torch.Tensor,
        what: str,
        received: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
        inner_sum: torch.Tensor | None = None,
    ) -> CollectiveWork:
        """Sum or average (``averaged_dtypes``) gradients over the ranks, and store this rank's part in ``shard``.

        ``received`` is needed if :attr:`needs_receive_buffer`. It and ``packed`` are used until the work is done; two
        hops overwrite ``packed``. ``quantizer``: send 8 bits per element, and sum in fp32; then ``received`` has
        :func:`exchange_numel` elements. ``inner_sum``: add this between the hops (see [Note: inner sums]).
        """
        if self.shard_axis.size == 1:
            if shard.data_ptr() != packed.data_ptr():
                shard.copy_(packed)
            return COMPLETED_WORK
        if self.shard_axis.factors is None:
            return self.reduce_scatter_inner(shard, packed, what, received, quantizer)
        part = self._inner_part(packed, quantizer)
        first = self.reduce_scatter_inner(part, packed, what, received, quantizer)
        if inner_sum is not None:
            first = self.finish_with(first, partial(part.add_, inner_sum))
        return self.reduce_scatter_outer(shard, part, what, received, quantizer, first)

    def reduce_scatter_inner(
        self,
        part: torch.Tensor,
        packed: torch.Tensor,
        what: str,
        received: torch.Tensor | None,
        quantizer: Quantizer | None,
        adds: bool = False,
    ) -> CollectiveWork:
        """Reduce gradients over the inner axis: the first of two hops, or the only one.

        ``adds``: add the result to ``part``, instead of storing it there.
        """
        result = self._inner_part(packed, quantizer) if adds else part
        start, nbytes, on_done = _reduction(self, self._reduce_axes[0], result, packed, received, quantizer)
        work = _start(self, start, "reduce-scatter", nbytes, what, on_done)
        return self.finish_with(work, partial(part.add_, result)) if adds else work

    def reduce_scatter_outer(
        self,
        shard: torch.Tensor,
        part: torch.Tensor,
        what: str,
        received: torch.Tensor | None,
        quantizer: Quantizer | None,
        after: CollectiveWork,
    ) -> CollectiveWork:
        """Reduce gradients over the outer axis: the second of two hops, ``after`` the first."""
        if quantizer is not None:
            quantizer = quantizer.next_hop
        elif received is not None:
            received = received[: part.numel()]
        start, nbytes, on_done = _reduction(self, self._reduce_axes[1], shard, part, received, quantizer)
        kind = "outer reduce-scatter"
        return _start_after(self, after, self._second_reductions, start, kind, nbytes, what, on_done)

    def _inner_part(self, packed: torch.Tensor, quantizer: Quantizer | None) -> torch.Tensor:
        """Return memory for the result of the first hop: inside ``packed`` if that may be overwritten."""
        axis = self._reduce_axes[0]
        part = packed.view(axis.size, -1)[axis.rank]
        # NCCL reduces in place; over gloo and in 8 bits the input is sent before the result is written
        can_overwrite = self._is_nccl or self.is_host_blocking or quantizer is not None
        return part if can_overwrite else torch.empty_like(part)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: list[int], input_sizes: list[int], what: str
    ) -> CollectiveWork:
        """Send a part of ``tensor`` to each rank of the shard axis, and receive a part of ``output`` from each.

        The sizes are those of the parts, in elements, in the order of ``shard_axis.ranks_by_group``.
        """
        start = partial(
            dist.all_to_all_single, output, tensor, output_sizes, input_sizes, self.shard_axis.group, async_op=True
        )
        return _start(self, start, "all-to-all", tensor.nbytes, what)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        axis: MeshAxis,
        what: str,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        kind: str = "all-reduce",
    ) -> CollectiveWork:
        """Reduce ``tensor`` over ``axis``, in place. ``kind``: under which it is counted."""
        start = partial(dist.all_reduce, tensor, op=op, group=axis.group, async_op=True)
        return _start(self, start, kind, 2 * tensor.nbytes, what)

    def all_reduce_gradient(self, tensor: torch.Tensor, axis: MeshAxis, what: str) -> CollectiveWork:
        """Sum or average (``averaged_dtypes``) a gradient over ``axis``, in place."""
        op = dist.ReduceOp.AVG if tensor.dtype in self.averaged_dtypes else dist.ReduceOp.SUM
        return self.all_reduce(tensor, axis, what, op)

    def all_reduce_over_mesh(
        self, tensor: torch.Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce ``tensor`` over the mesh, without the average axis, one axis after the other, in place."""
        for axis in (*self.data_axes, *([self.tensor_axis] if self.tensor_axis.size > 1 else ())):
            self.all_reduce(tensor, axis, what, op).wait()

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Copy ``tensor`` from rank ``source`` of the mesh (counted along the axes, outer first) to all ranks."""
        axes = [*([self.average_axis] if self.average_axis.size > 1 else ()), *self.data_axes]
        for position, axis in enumerate(axes):
            inner_size = math.prod(other.size for other in axes[position + 1 :])
            self.broadcast_over_axis(axis, tensor, what, source // inner_size % axis.size)

    def broadcast_over_axis(self, axis: MeshAxis, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Copy ``tensor`` from rank ``source`` of one axis to its other ranks."""
        start = partial(dist.broadcast, tensor, group=axis.group, group_src=source, async_op=True)
        _start(self, start, "broadcast", tensor.nbytes, what).wait()

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Return the small picklable values of all ranks of the shard axis, in rank order."""
        values = all_gather_object(value, self.shard_axis.group, what, self.consistency)
        return list(dict(sorted(zip(self.shard_axis.ranks_by_group, values, strict=True))).values())

    def read_to_host(self, tensor: torch.Tensor, what: str) -> list[Any]:
        """Wait for a result and return its values; raise if a fault of another rank has made them invalid."""
        values: list[Any] = tensor.reshape(-1).tolist()
        self._raise_on_fault(what)
        return values

    def check_results(self, what: str) -> None:
        """Wait for the collectives so far, before values leave the engine; raise if a fault has made them invalid.

        Over gloo the host has waited for each. Over NCCL the device waits, and a collective that a dead rank will not
        join is aborted: it ends with arbitrary values, and the fault is known by then.
        """
        if self.consistency.is_distributed and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._raise_on_fault(what)

    def _raise_on_fault(self, what: str) -> None:
        if self.consistency.faults:
            self.consistency.raise_on_fault(self.consistency.event_count, what)

    @property
    def mesh_size(self) -> int:
        """The number of ranks, of all axes."""
        return self.data_parallel_size * self.average_axis.size * self.tensor_axis.size

    @property
    def data_axes(self) -> list[MeshAxis]:
        """The data-parallel axes with more than one rank, outer first."""
        return [
            *self.replicate_axes,
            *(self.shard_axis.factors or [self.shard_axis] if self.shard_axis.size > 1 else []),
        ]

    def finish_with(self, work: CollectiveWork, finish: Callable[[], object]) -> CollectiveWork:
        """Return a collective that is done when ``finish`` has run after ``work``.

        Where waiting blocks the host, this is in its ``wait``. Otherwise only the stream on which this runs waits, now.
        """
        if self.is_host_blocking:
            return _FinishedWork(work, finish)
        (work.work if isinstance(work, _TimedWork) else work).wait()
        finish()
        return COMPLETED_WORK


def _start(
    comm: Communicator,
    start: Callable[[], Any],
    kind: str,
    nbytes: int,
    what: str,
    on_done: Callable[[], object] | None = None,
    is_counted: bool = False,
) -> CollectiveWork:
    """Start a collective and count it. If it fails, an error names the rank that caused it."""
    if not is_counted:
        comm.counters.add(kind, nbytes)
    try:
        with label("{} ({}, {:,} bytes)", kind, what, nbytes):
            work = start()
    except RuntimeError as error:
        raise comm.consistency.explain_failure(what, error) from error
    if comm.is_host_blocking:
        return _MonitoredWork(work, what, comm.consistency, comm.wait_timer, on_done)
    if on_done is not None:
        return comm.finish_with(work, on_done)
    return _TimedWork(work, comm.wait_timer) if comm.wait_timer.is_running else work


def _reduction(
    comm: Communicator,
    axis: MeshAxis,
    result: torch.Tensor,
    packed: torch.Tensor,
    received: torch.Tensor | None,
    quantizer: Quantizer | None,
) -> tuple[Callable[[], Any], int, Callable[[], object] | None]:
    """Return what starts a reduction over one axis, the bytes it sends, and what writes the result, if needed."""
    is_averaged = packed.dtype in comm.averaged_dtypes
    if quantizer is not None:
        assert received is not None
        exchange = _QuantizedExchange(quantizer, packed, received, axis)
        return exchange.start, exchange.nbytes, partial(exchange.sum, result, 1 / axis.size if is_averaged else 1.0)
    if comm.is_host_blocking:
        assert received is not None
        start = partial(dist.all_to_all_single, received, packed, group=axis.group, async_op=True)
        return start, packed.nbytes, partial(sum_in_order, result, received.view(axis.size, -1))
    op = dist.ReduceOp.AVG if is_averaged else dist.ReduceOp.SUM
    start = partial(_reduce_scatter, result, packed, op=op, group=axis.group, async_op=True)
    return start, packed.nbytes, None


def _start_after(
    comm: Communicator,
    first: CollectiveWork,
    queue: deque[_SecondHop],
    start: Callable[[], Any],
    kind: str,
    nbytes: int,
    what: str,
    on_done: Callable[[], object] | None = None,
) -> CollectiveWork:
    """Count a collective, and start it when another one is done. Where waiting blocks the host, queue it."""
    comm.counters.add(kind, nbytes)
    start_now = partial(_start, comm, start, kind, nbytes, what, on_done, is_counted=True)
    if comm.is_host_blocking:
        return _SecondHop(first, start_now, queue)
    untimed = first.work if isinstance(first, _TimedWork) else first
    untimed.wait()  # of the stream on which this runs, not of compute
    return start_now()


@contextmanager
def count_tensor_traffic(comm: Communicator) -> Iterator[tuple[Traffic, Traffic] | None]:
    """Count the traffic of tensor parallelism and of P_a inside the context; yield None without a tensor axis."""
    if comm.tensor_axis.size == 1:
        yield None
        return
    total, activations = comm.counters.total.setdefault("activation gather", Traffic()), Traffic()
    count, nbytes = total.count, total.bytes
    with TPTrafficMode(comm.tensor_axis) as mode:
        try:
            yield mode.traffic, activations
        finally:
            activations.count, activations.bytes = total.count - count, total.bytes - nbytes


# [Note: groups of reductions]
# Reductions inside backward use process groups that nothing else uses, neither the user nor another model. A rank that
# does not use a unit reduces it later than the others. In a group that others use too, ranks would start collectives in
# different orders, and data would be mixed up, without an error if the sizes are equal: with those of the user's
# modules (SyncBatchNorm, gathered embeddings), or with those of another model in the same loss (a GAN's). Also, NCCL
# serializes what runs in one group: all-gathers and reductions would not overlap. A group whose model is gone is used
# again, since groups take memory.
_models_by_number: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def _purpose_of_groups(comm: Communicator) -> str:
    """Return a description of a model's own groups, the same on all its ranks, that no living model's groups have."""
    consistency = comm.consistency
    number = next(number for number in itertools.count() if number not in _models_by_number)
    if consistency.rank == 0:  # decides, because garbage is not collected at the same time on all ranks
        _models_by_number[number] = comm
    agreed = consistency.broadcast_text("number of its process groups", str(number))
    return f"zeroshard reductions {consistency.global_ranks[0]}.{agreed}"


def _with_own_group(axis: MeshAxis, purpose: str) -> MeshAxis:
    """Return the axis with a process group of its own: see [Note: groups of reductions]."""
    if axis.group is None or axis.size == 1:
        return axis
    return MeshAxis(find_or_create_group(dist.get_process_group_ranks(axis.group), purpose), axis.size, axis.rank)


class _CompletedWork:
    """A collective of a single rank: nothing to wait for."""

    def wait(self) -> None:
        pass


COMPLETED_WORK = _CompletedWork()


class _FinishedWork:
    """A collective whose ``wait`` also runs a function."""

    def __init__(self, work: CollectiveWork, finish: Callable[[], object]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()


class _SecondHop:
    """A collective that starts when the wait for another one ends.

    [Note: order of second hops]
    Ranks that use different modules wait for their parameters in different orders, but all collectives of a group must
    start in one order. So a wait first starts the second hops that were queued earlier. Those of all-gathers have a
    process group of their own: other collectives would start before a second hop on one rank, and after it on another.
    """

    def __init__(self, first: CollectiveWork, start: Callable[[], CollectiveWork], queue: deque[_SecondHop]) -> None:
        self._first, self._start, self._queue = first, start, queue
        self._second: CollectiveWork | None = None
        queue.append(self)

    def start(self) -> None:
        """Wait for the first hop, and start the second. It is the first in the queue."""
        self._first.wait()
        self._second = self._start()
        self._queue.popleft()

    def wait(self) -> None:
        while self._second is None:
            self._queue[0].start()
        self._second.wait()


class _TimedWork:
    """A collective whose ``wait`` is timed."""

    def __init__(self, work: Any, wait_timer: WaitTimer) -> None:
        self.work, self._wait_timer = work, wait_timer

    def wait(self) -> None:
        with self._wait_timer:
            self.work.wait()


class _MonitoredWork:
    """A collective whose ``wait`` blocks the host: if it will never complete, an error names the missing rank."""

    def __init__(
        self,
        work: Any,
        description: str,
        consistency: ConsistencyChecker,
        wait_timer: WaitTimer,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._description, self._consistency = work, description, consistency
        self._wait_timer, self._on_done = wait_timer, on_done

    def wait(self) -> None:
        start = time.monotonic()
        with self._wait_timer:
            try:
                self._work.wait(POLL_INTERVAL / 100 if self._consistency.faults else POLL_INTERVAL)
            except RuntimeError:  # still running, or failed
                self._consistency.wait_for_work(self._work, self._description, start)
        if self._on_done is not None:
            self._on_done()


class _QuantizedExchange:
    """An all-to-all of 8-bit payloads that sends each rank its part of a tensor: see [Note: 8-bit payloads]."""

    def __init__(self, quantizer: Quantizer, packed: torch.Tensor, buffer: torch.Tensor, axis: MeshAxis) -> None:
        self._quantizer, self._packed, self._axis = quantizer, packed, axis
        self._sent, self._received = quantizer.exchange_buffers(buffer, packed.numel(), axis.size)
        self.nbytes = self._sent.nbytes

    def start(self) -> Any:
        self._quantizer.quantize(self._sent, self._packed)
        received, sent = self._received.view(-1), self._sent.view(-1)
        return dist.all_to_all_single(received, sent, group=self._axis.group, async_op=True)

    def sum(self, output: torch.Tensor, factor: float) -> None:
        """Write ``factor`` times the sum of what all ranks have sent to this one."""
        self._quantizer.sum(output, self._received, factor)


def sum_in_order(output: torch.Tensor, parts: torch.Tensor) -> None:
    """Sum the rows of ``parts``, the first two first, each sum rounded to their dtype.

    >>> output = torch.empty(1)
    >>> sum_in_order(output, torch.tensor([[1e8], [-1e8], [1.0]]))
    >>> output
    tensor([1.])
    """
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


def all_gather_sync(output: torch.Tensor, part: torch.Tensor, axis: MeshAxis) -> None:
    """All-gather every rank's ``part`` over an axis without a communicator, and wait for it."""
    _all_gather(output, part, group=axis.group)


def all_gather_object(
    value: Any, group: dist.ProcessGroup | None, what: str, consistency: ConsistencyChecker | None
) -> list[Any]:
    """Return the small value of every rank of a group: tensors, dtypes, numbers and strings, also in containers.

    With ``consistency``, a rank that dies, exits or deviates meanwhile causes an error that names it instead of a hang.
    Over gloo, what arrives is data: another program that reaches a rank's port can run no code in it.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    size = dist.get_world_size(group)
    with consistency.explain_errors(what) if consistency is not None else nullcontext():
        if group_backend(group, torch.device("cpu")) != "gloo":
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=group)
            return values
        file = io.BytesIO()
        torch.save(value, file)
        data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        lengths = torch.empty(size, dtype=torch.int64, device="cpu")
        length = torch.tensor([data.numel()], device="cpu")
        _wait_monitored(_all_gather(lengths, length, group=group, async_op=True), what, consistency)
        max_length = int(lengths.max())
        gathered = torch.empty(size * max_length, dtype=torch.uint8, device="cpu")
        padded = torch.zeros(max_length, dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        _wait_monitored(_all_gather(gathered, padded, group=group, async_op=True), what, consistency)
    parts = zip(gathered.view(size, max_length), lengths.tolist(), strict=True)
    return [torch.load(io.BytesIO(part[:length].numpy().tobytes()), weights_only=True) for part, length in parts]


def _wait_monitored(work: Any, what: str, consistency: ConsistencyChecker | None) -> None:
    if consistency is not None:
        work = _MonitoredWork(work, what, consistency, WaitTimer(on_stream=False))
    work.wait()


class CollectiveOrder:
    """Record each pass (a forward, a backward, a step) as a list of events, and expect the same next time.

    A pass is identified by its kind, and which kind follows which is recorded too. An expected event costs nothing; a
    change of order costs one consistency check of all ranks and a missed prefetch, never a wrong result: see [Note:
    consistency of ranks].

    >>> order = CollectiveOrder(ConsistencyChecker(None, 0, [0], timeout=1.0))
    >>> for _ in range(2):
    ...     order.begin_pass("forward")
    ...     order.check("gather unit 'a'")
    ...     print(list(order.iter_expected({"gather unit 'b'"})))
    ...     order.check("gather unit 'b'")
    []
    ["gather unit 'b'"]
    """

    def __init__(self, consistency: ConsistencyChecker) -> None:
        self._consistency = consistency
        self.event_count = 0  # events so far: equal on all ranks
        self._events_by_pass: dict[str, list[str]] = {}
        self._next_pass: dict[str, str] = {}
        self._pass_kind = ""
        self._starting_pass: str | None = None
        self._expected_events: list[str] = []
        self._position = 0  # index in ``_expected_events``
        self._done_events: list[str] = []
        # first event index, kind, events
        self._past_passes: deque[tuple[int, str, list[str]]] = deque(maxlen=MAX_PAST_PASSES)
        self._pass_start = 0  # event index at which this pass started
        consistency.track_progress(self)

    def __del__(self) -> None:
        """Notify the other ranks that this one will join no more collectives."""
        self._consistency.announce_model_dropped((self.event_count, self.describe_last_event()))

    def begin_pass(self, kind: str) -> None:
        """Announce a pass. It starts with its first event: a pass without collectives is not recorded."""
        self._starting_pass = kind

    def resume_pass(self, kind: str) -> None:
        """Go on with a pass of this kind if the last event belongs to it, else announce one."""
        self._starting_pass = None if self._pass_kind == kind else kind

    @contextmanager
    def nested_pass(self) -> Iterator[None]:
        """Announce the present pass again after the passes that begin inside the context."""
        outer = self._starting_pass or self._pass_kind or None
        yield
        self._starting_pass = outer

    def check(self, event: str, always_confirm: bool = False) -> None:
        """Record an event that is about to happen. Return once all ranks are known to do the same.

        ``always_confirm``: confirm it with all ranks even if it is expected, because what follows may take longer than
        the timeout.
        """
        if self._starting_pass is not None:
            self._switch_pass(self._starting_pass)
        if self._consistency.faults:
            self._consistency.raise_on_fault(self.event_count + 1, event)
        if self._position < len(self._expected_events) and self._expected_events[self._position] == event:
            if always_confirm:
                self._confirm(event, event)
            self._position += 1
        else:
            has_ended = self._position == len(self._expected_events)
            expected = "go on to the next pass" if has_ended else self._expected_events[self._position]
            self._confirm(event, expected)
            if event in self._expected_events[self._position :]:  # some were skipped: continue from here
                self._position = self._expected_events.index(event, self._position) + 1
        self._done_events.append(event)
        self.event_count += 1  # last: a rank past an event has confirmed it, or did not need to

    def _confirm(self, event: str, expected: str) -> None:
        try:
            self._consistency.confirm(self.event_count + 1, event, expected)
        except BaseException:
            self.event_count += 1  # do not confirm it again
            raise

    def _switch_pass(self, kind: str) -> None:
        """Record the finished pass, and expect the events of the last pass of this kind."""
        self._starting_pass = None
        is_complete = self._position == len(self._expected_events)
        if not is_complete or self._next_pass.get(self._pass_kind) != kind:
            next_pass = self._next_pass.get(self._pass_kind, "nothing yet")
            self._confirm(PASS_START + kind, next_pass if is_complete else self._expected_events[self._position])
        self._past_passes.append((self._pass_start, self._pass_kind, self._done_events))
        self._events_by_pass[self._pass_kind] = self._done_events
        self._next_pass[self._pass_kind] = kind
        self._pass_kind, self._expected_events = kind, self._events_by_pass.get(kind, [])
        self._position, self._done_events = 0, []
        self._pass_start = self.event_count + 1
        self.event_count += 1

    def event_at(self, event_index: int) -> str:
        """Return this rank's event at an index; "" if that is too long ago, or in the future."""
        for start, kind, events in ((self._pass_start, self._pass_kind, self._done_events), *tuple(self._past_passes)):
            if start <= event_index <= start + len(events):
                return events[event_index - start - 1] if event_index > start else PASS_START + kind
        return ""

    def describe_last_event(self) -> str:
        if not self._pass_kind:
            return "no collective yet"
        if not self._done_events:
            return f"the start of {self._pass_kind!r}"
        return f"{self._done_events[-1]}, in its pass {self._pass_kind!r}"

    def iter_expected(self, candidates: Container[str]) -> Iterator[str]:
        """Yield the expected events of this pass that are in ``candidates``, the next one first."""
        positions = range(self._position, len(self._expected_events))
        return (event for position in positions if (event := self._expected_events[position]) in candidates)

    def remaining_events(self) -> list[str]:
        """Return all events still expected in this pass."""
        return self._expected_events[self._position :]
