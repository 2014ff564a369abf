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

from zeroshard.agreement import SLICE, Agreement, RanksDisagreeError
from zeroshard.stopwatch import Stopwatch

# torch 2.13 renamed these two and warns for the old names; 2.11 has only the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TENSOR_NAMES = ("tensor", "tp")  # what the mesh's axis of tensor parallelism may be called


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Make the result usable by what comes next on this thread and stream."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: the ranks that this rank partitions with, or replicates with."""

    group: dist.ProcessGroup | None  # None: this rank alone
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Axis:
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
class Counters:
    """What was communicated since the last step ended, in the step before, and in all."""

    now: dict[str, Traffic] = field(default_factory=dict)
    last_step: dict[str, Traffic] = field(default_factory=dict)
    ever: dict[str, Traffic] = field(default_factory=dict)

    def add(self, kind: str, nbytes: int) -> None:
        """Count one collective."""
        for counted in (self.now, self.ever):
            traffic = counted.get(kind)
            if traffic is None:
                traffic = counted[kind] = Traffic()
            traffic.count += 1
            traffic.bytes += nbytes

    def roll(self) -> None:
        """End the step."""
        self.last_step, self.now = self.now, {}


class Communicator:
    """This rank's place in the mesh and the collectives over it.

    ``shard`` is the axis states are partitioned over; ``replicas`` are the axes that hold copies, over which gradients
    are only summed. Plain data parallelism is a mesh whose shard axis has one rank. Along ``tensor`` the ranks compute
    one model together, each with its share of the parameters, on the same data.
    """

    def __init__(
        self,
        axes: list[Axis],
        device: torch.device,
        partitioned: bool,
        control: Agreement,
        tensor: Axis | None = None,
    ) -> None:
        inner = axes[-1]
        self.shard = inner if partitioned else Axis(None, 1, 0)
        self.replicas = [axis for axis in (axes[:-1] if partitioned else axes) if axis.size > 1]
        self.tensor = tensor or Axis(None, 1, 0)
        self.ranks = 1  # that gradients are averaged over
        for axis in axes:
            self.ranks *= axis.size
        self.device = device
        self.control = control
        self.counters = Counters()
        backend = backend_of(inner.group, device)
        self._blocks_host = backend == "gloo"
        self.stopwatch = Stopwatch(on_stream=device.type == "cuda" and not self._blocks_host)
        # NCCL orders what is launched on one communicator: gathers and reductions would take turns on the wire.
        self._reduce_group = _twin(self.shard.group) if backend == "nccl" else self.shard.group

    @property
    def overwrites(self) -> bool:
        """Whether :meth:`reduce_scatter` writes into what it is given."""
        return self._blocks_host and self.shard.size > 1

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, what: str) -> Pending:
        """Collect every rank's ``shard`` into ``output``, in rank order."""
        self.counters.add("all-gather", output.nbytes)
        try:
            return self._pending(_all_gather(output, shard, group=self.shard.group, async_op=True), what)
        except RuntimeError as error:
            raise self.control.stuck(what, error) from error

    def gather_activation(self, output: torch.Tensor, part: torch.Tensor, axis: Axis, what: str) -> Pending:
        """Collect every rank's ``part`` of an activation, which is the same on all ranks of ``axis``."""
        self.counters.add("activation gather", output.nbytes)
        try:
            return self._pending(_all_gather(output, part, group=axis.group, async_op=True), what)
        except RuntimeError as error:
            raise self.control.stuck(what, error) from error

    def reduce_scatter(self, shard: torch.Tensor, packed: torch.Tensor, what: str) -> Pending:
        """Sum ``packed`` over the ranks, and leave this rank's part in ``shard``; see also ``overwrites``."""
        if self.shard.size == 1:
            if shard.data_ptr() != packed.data_ptr():
                shard.copy_(packed)
            return _Done()
        self.counters.add("reduce-scatter", packed.nbytes)
        try:
            if self._blocks_host:  # gloo's own is an all-reduce of a copy inside, and heeds no timeout
                work = dist.all_reduce(packed, group=self._reduce_group, async_op=True)
                mine = packed.view(self.shard.size, -1)[self.shard.rank]
                return _Watched(work, what, self.control, self.stopwatch, partial(shard.copy_, mine))
            return self._pending(_reduce_scatter(shard, packed, group=self._reduce_group, async_op=True), what)
        except RuntimeError as error:
            raise self.control.stuck(what, error) from error

    def all_reduce(
        self, tensor: torch.Tensor, axis: Axis, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        """Reduce ``tensor`` over ``axis``, in place."""
        self.counters.add("all-reduce", 2 * tensor.nbytes)
        try:
            return self._pending(dist.all_reduce(tensor, op=op, group=axis.group, async_op=True), what)
        except RuntimeError as error:
            raise self.control.stuck(what, error) from error

    def all_reduce_everywhere(
        self, tensor: torch.Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce ``tensor`` over the whole mesh, one axis after the other, in place."""
        for axis in (*self.axes, *([self.tensor] if self.tensor.size > 1 else ())):
            self.all_reduce(tensor, axis, what, op).wait()

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Copy ``tensor`` of the mesh's rank ``source`` (counted along the axes, outer first) to all."""
        for position, axis in enumerate(self.axes):
            inner = 1
            for other in self.axes[position + 1 :]:
                inner *= other.size
            self.broadcast_over(axis, tensor, what, source // inner % axis.size)

    def broadcast_over(self, axis: Axis, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Copy the first rank's ``tensor``, or another one's, to the others of one axis."""
        self.counters.add("broadcast", tensor.nbytes)
        try:
            work = dist.broadcast(tensor, group=axis.group, group_src=source, async_op=True)
            self._pending(work, what).wait()
        except RanksDisagreeError:
            raise
        except RuntimeError as error:
            raise self.control.stuck(what, error) from error

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Collect small plain values of all ranks on the shard axis."""
        return gather_object(value, self.shard.group, what, self.control)

    def on_host(self, tensor: torch.Tensor, what: str) -> list[Any]:
        """Wait for a result and return its values; raise where a fault of another rank has made them useless."""
        values: list[Any] = tensor.reshape(-1).tolist()
        if self.control.faults:
            self.control.refuse(self.control.position()[0], what)
        return values

    @property
    def axes(self) -> list[Axis]:
        """The data-parallel axes with more than one rank, outer first."""
        return [*self.replicas, *([self.shard] if self.shard.size > 1 else [])]

    def _pending(self, work: Any, what: str) -> Pending:
        if self._blocks_host:
            return _Watched(work, what, self.control, self.stopwatch)
        return _Timed(work, self.stopwatch) if self.stopwatch.running else work


class _Done:
    """A collective of one rank with itself."""

    def wait(self) -> None:
        pass


class _Timed:
    """A collective whose ``wait`` is timed."""

    def __init__(self, work: Any, stopwatch: Stopwatch) -> None:
        self._work, self._stopwatch = work, stopwatch

    def wait(self) -> None:
        with self._stopwatch:
            self._work.wait()


class _Watched:
    """A collective whose ``wait`` blocks the host: where it is in vain, an error names the rank that is missing."""

    def __init__(
        self,
        work: Any,
        what: str,
        control: Agreement,
        stopwatch: Stopwatch,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._what, self._control = work, what, control
        self._stopwatch, self._then = stopwatch, then

    def wait(self) -> None:
        began = time.monotonic()
        with self._stopwatch:
            try:
                self._work.wait(SLICE / 100 if self._control.faults else SLICE)
            except RuntimeError:  # it takes longer, or has failed
                self._control.finish(self._work, self._what, began)
        if self._then is not None:
            self._then()


def gather(output: torch.Tensor, part: torch.Tensor, axis: Axis) -> None:
    """Collect every rank's ``part`` over an axis, without a communicator, and wait for it."""
    _all_gather(output, part, group=axis.group)


def gather_object(value: Any, group: dist.ProcessGroup | None, what: str, control: Agreement | None) -> list[Any]:
    """Collect a small plain value of every rank of a group, as ``dist.all_gather_object``.

    With ``control``, a rank that dies, ends or differs meanwhile is an error that names it, and not a hang.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    size = dist.get_world_size(group)
    with _explained(control, what):
        if control is None or backend_of(group, torch.device("cpu")) != "gloo":
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=group)
            return values
        mine, lengths = _pickled(value), torch.empty(size, dtype=torch.int64)
        _wait(_all_gather(lengths, torch.tensor([mine.numel()]), group=group, async_op=True), what, control)
        longest = int(lengths.max())
        everything, padded = torch.empty(size * longest, dtype=torch.uint8), torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        _wait(_all_gather(everything, padded, group=group, async_op=True), what, control)
    parts = zip(everything.view(size, longest), lengths.tolist(), strict=True)
    return [pickle.loads(part[:length].numpy().tobytes()) for part, length in parts]


def broadcast_object(value: Any, group: dist.ProcessGroup | None, what: str, control: Agreement | None) -> Any:
    """Return the first rank's plain value on all of a group, as ``dist.broadcast_object_list``; see also above."""
    if group is None or dist.get_world_size(group) == 1:
        return value
    with _explained(control, what):
        if control is None or backend_of(group, torch.device("cpu")) != "gloo":
            values = [value]
            dist.broadcast_object_list(values, group=group, group_src=0)
            return values[0]
        is_source = dist.get_rank(group) == 0
        data = _pickled(value) if is_source else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        _wait(dist.broadcast(length, group=group, group_src=0, async_op=True), what, control)
        data = data if is_source else torch.empty(int(length), dtype=torch.uint8)
        _wait(dist.broadcast(data, group=group, group_src=0, async_op=True), what, control)
    return pickle.loads(data.numpy().tobytes())


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _wait(work: Any, what: str, control: Agreement) -> None:
    _Watched(work, what, control, Stopwatch(on_stream=False)).wait()


@contextmanager
def _explained(control: Agreement | None, what: str) -> Iterator[None]:
    """Have a failure name the rank that it comes from, where there are others to ask."""
    try:
        yield
    except RanksDisagreeError:
        raise
    except Exception as error:  # bytes of a collective that was ended may be read as anything
        if control is None or not (isinstance(error, RuntimeError) or control.faults):
            raise
        raise control.stuck(what, error) from error


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Seconds after which a group's own collectives fail."""
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # no group, or a backend that has none
        seconds = dist.distributed_c10d.default_pg_timeout.total_seconds()
    return seconds


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that serves tensors of ``device`` in a group: "nccl", "gloo", …; "" without a group."""
    if group is None:
        return ""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((pair[-1] for pair in pairs if len(pair) == 1 or pair[0] == device.type), "")


def _twin(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A second communicator over the same ranks: made once, then found again among the job's groups."""
    if group is None or dist.get_world_size(group) == 1:
        return group
    ranks, purpose = dist.get_process_group_ranks(group), "zeroshard reductions"
    for other in dist.distributed_c10d._world.pg_map:
        if other.group_desc == purpose and dist.get_process_group_ranks(other) == ranks:
            return other
    twin: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose)
    return twin


def axes_of(mesh: DeviceMesh | None) -> tuple[list[Axis], Axis]:
    """Return the data-parallel axes, outer first, (shard,) or (replicate, shard), and the tensor axis.

    No mesh: all ranks of the job share the states. A mesh without an axis named "tensor" (or "tp") divides no tensor.
    """
    alone = Axis(None, 1, 0)
    if mesh is None:
        return [Axis.of(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)], alone
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a torch DeviceMesh or None, got {type(mesh).__name__}: see init_device_mesh")
    name = tensor_axis_name(mesh)
    axes = [Axis.of(mesh.get_group(axis)) for axis in range(mesh.ndim)]
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
    found = [name for name in names if name in TENSOR_NAMES]
    if found and (len(found) > 1 or names[-1] != found[0]):
        raise ValueError(f"the tensor axis is the mesh's last, and only one has that name, got {mesh}")
    return found[0] if found else None
