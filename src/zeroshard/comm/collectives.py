"""The mesh and its collectives: asynchronous, counted, and with an error instead of a hang."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.consistency import POLL_INTERVAL, ConsistencyChecker, RanksDisagreeError
from zeroshard.comm.wait_timer import WaitTimer

# torch 2.13 renamed these two and warns for the old names; 2.11 has only the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TENSOR_AXIS_NAMES = ("tensor", "tp")  # what the mesh's axis of tensor parallelism may be called


class CollectiveWork(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Make the result usable by what comes next on this thread and stream."""


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh: the ranks that this rank partitions with, or replicates with."""

    group: dist.ProcessGroup | None  # None: this rank alone
    size: int
    rank: int

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None) -> MeshAxis:
        """Describe ``group`` as this rank sees it."""
        if group is None:
            return cls(None, 1, 0)
        return cls(group, dist.get_world_size(group), dist.get_rank(group))


@dataclass
class Traffic:
    """Collectives of one kind. Bytes as the paper counts them: an all-gather by its output, a reduce-scatter by its
    input, an all-reduce by twice its length."""

    count: int = 0
    bytes: int = 0


@dataclass
class CollectiveCounters:
    """What was communicated since the last step ended, in the step before, and in all."""

    current_step: dict[str, Traffic] = field(default_factory=dict)
    last_step: dict[str, Traffic] = field(default_factory=dict)
    total: dict[str, Traffic] = field(default_factory=dict)

    def add(self, kind: str, nbytes: int) -> None:
        """Count one collective."""
        for counted in (self.current_step, self.total):
            traffic = counted.get(kind)
            if traffic is None:
                traffic = counted[kind] = Traffic()
            traffic.count += 1
            traffic.bytes += nbytes

    def end_step(self) -> None:
        """End the step."""
        self.last_step, self.current_step = self.current_step, {}


class Communicator:
    """This rank's place in the mesh and the collectives over it.

    ``shard`` is the axis states are partitioned over; ``replicas`` are the axes that hold copies, over which gradients
    are only summed. Plain data parallelism is a mesh whose shard axis has one rank. Along ``tensor`` the ranks compute
    one model together, each with its share of the parameters, on the same data.
    """

    def __init__(
        self,
        axes: list[MeshAxis],
        device: torch.device,
        partitioned: bool,
        consistency: ConsistencyChecker,
        tensor_axis: MeshAxis | None = None,
    ) -> None:
        inner = axes[-1]
        self.shard_axis = inner if partitioned else MeshAxis(None, 1, 0)
        self.replicate_axes = [axis for axis in (axes[:-1] if partitioned else axes) if axis.size > 1]
        self.tensor_axis = tensor_axis or MeshAxis(None, 1, 0)
        self.data_parallel_size = 1  # that gradients are averaged over
        for axis in axes:
            self.data_parallel_size *= axis.size
        self.device = device
        self.consistency = consistency
        self.counters = CollectiveCounters()
        backend = group_backend(inner.group, device)
        self._is_host_blocking = backend == "gloo"
        self.wait_timer = WaitTimer(on_stream=device.type == "cuda" and not self._is_host_blocking)
        # NCCL orders what is launched on one communicator: gathers and reductions would take turns on the wire.
        self._reduce_group = _second_group(self.shard_axis.group) if backend == "nccl" else self.shard_axis.group

    @property
    def reduce_scatter_overwrites_input(self) -> bool:
        """Whether :meth:`reduce_scatter` writes into what it is given."""
        return self._is_host_blocking and self.shard_axis.size > 1

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, what: str) -> CollectiveWork:
        """Collect every rank's ``shard`` into ``output``, in rank order."""
        self.counters.add("all-gather", output.nbytes)
        try:
            return self._wrap_work(_all_gather(output, shard, group=self.shard_axis.group, async_op=True), what)
        except RuntimeError as error:
            raise self.consistency.explain_failure(what, error) from error

    def all_gather_activation(
        self, output: torch.Tensor, part: torch.Tensor, axis: MeshAxis, what: str
    ) -> CollectiveWork:
        """Collect every rank's ``part`` of an activation, which is the same on all ranks of ``axis``."""
        self.counters.add("activation gather", output.nbytes)
        try:
            return self._wrap_work(_all_gather(output, part, group=axis.group, async_op=True), what)
        except RuntimeError as error:
            raise self.consistency.explain_failure(what, error) from error

    def reduce_scatter(self, shard: torch.Tensor, packed: torch.Tensor, what: str) -> CollectiveWork:
        """Sum ``packed`` over the ranks, and leave this rank's part in ``shard``; see also ``overwrites``."""
        if self.shard_axis.size == 1:
            if shard.data_ptr() != packed.data_ptr():
                shard.copy_(packed)
            return _CompletedWork()
        self.counters.add("reduce-scatter", packed.nbytes)
        try:
            if self._is_host_blocking:  # gloo's own is an all-reduce of a copy inside, and heeds no timeout
                work = dist.all_reduce(packed, group=self._reduce_group, async_op=True)
                mine = packed.view(self.shard_axis.size, -1)[self.shard_axis.rank]
                return _MonitoredWork(work, what, self.consistency, self.wait_timer, partial(shard.copy_, mine))
            return self._wrap_work(_reduce_scatter(shard, packed, group=self._reduce_group, async_op=True), what)
        except RuntimeError as error:
            raise self.consistency.explain_failure(what, error) from error

    def all_reduce(
        self, tensor: torch.Tensor, axis: MeshAxis, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> CollectiveWork:
        """Reduce ``tensor`` over ``axis``, in place."""
        self.counters.add("all-reduce", 2 * tensor.nbytes)
        try:
            return self._wrap_work(dist.all_reduce(tensor, op=op, group=axis.group, async_op=True), what)
        except RuntimeError as error:
            raise self.consistency.explain_failure(what, error) from error

    def all_reduce_over_mesh(
        self, tensor: torch.Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce ``tensor`` over the whole mesh, one axis after the other, in place."""
        for axis in (*self.data_axes, *([self.tensor_axis] if self.tensor_axis.size > 1 else ())):
            self.all_reduce(tensor, axis, what, op).wait()

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Copy ``tensor`` of the mesh's rank ``source`` (counted along the axes, outer first) to all."""
        for position, axis in enumerate(self.data_axes):
            inner = 1
            for other in self.data_axes[position + 1 :]:
                inner *= other.size
            self.broadcast_over_axis(axis, tensor, what, source // inner % axis.size)

    def broadcast_over_axis(self, axis: MeshAxis, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Copy the first rank's ``tensor``, or another one's, to the others of one axis."""
        self.counters.add("broadcast", tensor.nbytes)
        try:
            work = dist.broadcast(tensor, group=axis.group, group_src=source, async_op=True)
            self._wrap_work(work, what).wait()
        except RanksDisagreeError:
            raise
        except RuntimeError as error:
            raise self.consistency.explain_failure(what, error) from error

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Collect small plain values of all ranks on the shard axis."""
        return all_gather_object(value, self.shard_axis.group, what, self.consistency)

    def read_to_host(self, tensor: torch.Tensor, what: str) -> list[Any]:
        """Wait for a result and return its values; raise where a fault of another rank has made them useless."""
        values: list[Any] = tensor.reshape(-1).tolist()
        if self.consistency.faults:
            self.consistency.raise_on_fault(self.consistency.position()[0], what)
        return values

    @property
    def data_axes(self) -> list[MeshAxis]:
        """The data-parallel axes with more than one rank, outer first."""
        return [*self.replicate_axes, *([self.shard_axis] if self.shard_axis.size > 1 else [])]

    def _wrap_work(self, work: Any, what: str) -> CollectiveWork:
        if self._is_host_blocking:
            return _MonitoredWork(work, what, self.consistency, self.wait_timer)
        return _TimedWork(work, self.wait_timer) if self.wait_timer.is_running else work


class _CompletedWork:
    """A collective of one rank with itself."""

    def wait(self) -> None:
        pass


class _TimedWork:
    """A collective whose ``wait`` is timed."""

    def __init__(self, work: Any, wait_timer: WaitTimer) -> None:
        self._work, self._wait_timer = work, wait_timer

    def wait(self) -> None:
        with self._wait_timer:
            self._work.wait()


class _MonitoredWork:
    """A collective whose ``wait`` blocks the host: where it is in vain, an error names the rank that is missing."""

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
        began = time.monotonic()
        with self._wait_timer:
            try:
                self._work.wait(POLL_INTERVAL / 100 if self._consistency.faults else POLL_INTERVAL)
            except RuntimeError:  # it takes longer, or has failed
                self._consistency.wait_for_work(self._work, self._description, began)
        if self._on_done is not None:
            self._on_done()


def all_gather_sync(output: torch.Tensor, part: torch.Tensor, axis: MeshAxis) -> None:
    """Collect every rank's ``part`` over an axis, without a communicator, and wait for it."""
    _all_gather(output, part, group=axis.group)


def all_gather_object(
    value: Any, group: dist.ProcessGroup | None, what: str, consistency: ConsistencyChecker | None
) -> list[Any]:
    """Collect a small plain value of every rank of a group, as ``dist.all_gather_object``.

    With ``control``, a rank that dies, ends or differs meanwhile is an error that names it, and not a hang.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    size = dist.get_world_size(group)
    with _explain_errors(consistency, what):
        if consistency is None or group_backend(group, torch.device("cpu")) != "gloo":
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=group)
            return values
        mine, lengths = _to_byte_tensor(value), torch.empty(size, dtype=torch.int64)
        _wait_monitored(
            _all_gather(lengths, torch.tensor([mine.numel()]), group=group, async_op=True), what, consistency
        )
        longest = int(lengths.max())
        everything, padded = torch.empty(size * longest, dtype=torch.uint8), torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        _wait_monitored(_all_gather(everything, padded, group=group, async_op=True), what, consistency)
    parts = zip(everything.view(size, longest), lengths.tolist(), strict=True)
    return [pickle.loads(part[:length].numpy().tobytes()) for part, length in parts]


def broadcast_object(
    value: Any, group: dist.ProcessGroup | None, what: str, consistency: ConsistencyChecker | None
) -> Any:
    """Return the first rank's plain value on all of a group, as ``dist.broadcast_object_list``; see also above."""
    if group is None or dist.get_world_size(group) == 1:
        return value
    with _explain_errors(consistency, what):
        if consistency is None or group_backend(group, torch.device("cpu")) != "gloo":
            values = [value]
            dist.broadcast_object_list(values, group=group, group_src=0)
            return values[0]
        is_source = dist.get_rank(group) == 0
        data = _to_byte_tensor(value) if is_source else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        _wait_monitored(dist.broadcast(length, group=group, group_src=0, async_op=True), what, consistency)
        data = data if is_source else torch.empty(int(length), dtype=torch.uint8)
        _wait_monitored(dist.broadcast(data, group=group, group_src=0, async_op=True), what, consistency)
    return pickle.loads(data.numpy().tobytes())


def _to_byte_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _wait_monitored(work: Any, what: str, consistency: ConsistencyChecker) -> None:
    _MonitoredWork(work, what, consistency, WaitTimer(on_stream=False)).wait()


@contextmanager
def _explain_errors(consistency: ConsistencyChecker | None, what: str) -> Iterator[None]:
    """Have a failure name the rank that it comes from, where there are others to ask."""
    try:
        yield
    except RanksDisagreeError:
        raise
    except Exception as error:  # bytes of a collective that was ended may be read as anything
        if consistency is None or not (isinstance(error, RuntimeError) or consistency.faults):
            raise
        raise consistency.explain_failure(what, error) from error


def group_timeout_seconds(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Seconds after which a group's own collectives fail."""
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # no group, or a backend that has none
        seconds = dist.distributed_c10d.default_pg_timeout.total_seconds()
    return seconds


def group_backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that serves tensors of ``device`` in a group: "nccl", "gloo", …; "" without a group."""
    if group is None:
        return ""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((pair[-1] for pair in pairs if len(pair) == 1 or pair[0] == device.type), "")


def _second_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A second communicator over the same ranks: made once, then found again among the job's groups."""
    if group is None or dist.get_world_size(group) == 1:
        return group
    ranks, purpose = dist.get_process_group_ranks(group), "zeroshard reductions"
    for other in dist.distributed_c10d._world.pg_map:
        if other.group_desc == purpose and dist.get_process_group_ranks(other) == ranks:
            return other
    twin: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose)
    return twin


def mesh_axes(mesh: DeviceMesh | None) -> tuple[list[MeshAxis], MeshAxis]:
    """Return the data-parallel axes, outer first, (shard,) or (replicate, shard), and the tensor axis.

    No mesh: all ranks of the job share the states. A mesh without an axis named "tensor" (or "tp") divides no tensor.
    """
    alone = MeshAxis(None, 1, 0)
    if mesh is None:
        return [MeshAxis.from_group(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)], alone
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a torch DeviceMesh or None, got {type(mesh).__name__}: see init_device_mesh")
    name = tensor_axis_name(mesh)
    axes = [MeshAxis.from_group(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    data, tensor = (axes, alone) if name is None else (axes[:-1], axes[-1])
    if len(data) > 2:
        raise ValueError(
            "mesh has one axis (shard) or two (replicate, shard) for data, and perhaps a last one named 'tensor', got "
            f"{mesh}"
        )
    return data or [alone], tensor


def tensor_axis_name(mesh: DeviceMesh) -> str | None:
    """The name of the mesh's tensor axis, None where it has none."""
    names = mesh.mesh_dim_names or ()
    found = [name for name in names if name in TENSOR_AXIS_NAMES]
    if found and (len(found) > 1 or names[-1] != found[0]):
        raise ValueError(f"the tensor axis is the mesh's last, and only one has that name, got {mesh}")
    return found[0] if found else None
