"""The axes of the mesh, and the process groups behind them.

[Note: two hops]
Unless ``Config.partition`` is "hybrid", the shard axis is the product of both data axes. A bucket is
split over the inner axis first, and each part over the outer one. Two nodes of two ranks::

    bucket    |   rank 0 of each node       |   rank 1 of each node       |
    shards    | node 0       | node 1       | node 0       | node 1       |

So a rank and its counterparts on the other nodes, which communicate over slow links, have adjacent shards: together a
part of the bucket, which the ranks of one node exchange over fast links. An all-gather goes over the outer axis, then
over the inner one; a reduce-scatter goes back the same way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

TENSOR_AXIS_NAMES = ("tensor", "tp")  # accepted names of the mesh's tensor-parallel axis
DATA_AXIS_NAMES = "replicate shard data dp dp_replicate dp_shard".split()  # of its data-parallel axes
# The number of processes that a launcher started, by launcher: torchrun, srun, Open MPI, MPICH.
_RANK_COUNT_VARIABLES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh: the ranks that this rank shards or replicates with."""

    group: dist.ProcessGroup | None  # None: this rank only
    size: int
    rank: int
    factors: tuple[MeshAxis, MeshAxis] | None = None  # (outer, inner) of a product: see [Note: two hops]
    group_order: tuple[int, ...] = ()  # of a product: ranks of this axis, in the order of the group's ranks
    has_local_steps: bool = False  # its ranks are replicas that train alone between averages: Config.local_steps

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None) -> MeshAxis:
        if group is None:
            return cls(None, 1, 0)
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    @property
    def ranks_by_group(self) -> Sequence[int]:
        """The ranks of this axis in the order of its process group."""
        return self.group_order or range(self.size)


def product_axis(mesh: DeviceMesh, outer: MeshAxis, inner: MeshAxis) -> MeshAxis:
    """Return the product of the data axes of a mesh: see [Note: two hops]."""
    if inner.size == 1:
        return outer
    ranks = mesh.mesh if mesh.ndim == 2 else mesh.mesh[..., mesh.get_local_rank(mesh.ndim - 1)]
    ordered = ranks.T.flatten().tolist()  # by inner rank, then by outer rank
    group = find_or_create_group(ordered, "zeroshard data ranks")
    rank_in_axis = {global_rank: rank for rank, global_rank in enumerate(ordered)}
    order = tuple(rank_in_axis[global_rank] for global_rank in dist.get_process_group_ranks(group))
    return MeshAxis(group, len(ordered), inner.rank * outer.size + outer.rank, (outer, inner), order)


def mesh_axes(mesh: DeviceMesh | None) -> tuple[list[MeshAxis], MeshAxis]:
    """Return the data-parallel axes, outer first, (shard,) or (replicate, shard), and the tensor axis.

    Without a mesh, all ranks of the job shard the states. Without an axis named "tensor" (or "tp"), there is no tensor
    parallelism.
    """
    single = MeshAxis(None, 1, 0)
    if mesh is None:
        has_group = dist.is_available() and dist.is_initialized()
        if not has_group:
            _check_started_alone()
        return [MeshAxis.from_group(dist.group.WORLD if has_group else None)], single
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be None or a DeviceMesh, got {type(mesh).__name__}: see init_device_mesh()")
    name = tensor_axis_name(mesh)
    _check_ascending(mesh)
    axes = [MeshAxis.from_group(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    data, tensor = (axes, single) if name is None else (axes[:-1], axes[-1])
    if len(data) > 2:
        raise ValueError(
            "mesh must have one axis (shard) or two (replicate, shard) for data, and optionally a last one named "
            f"'tensor', got {mesh}"
        )
    return data or [single], tensor


def _check_ascending(mesh: DeviceMesh) -> None:
    """Raise if ranks do not ascend along an axis.

    Process groups sort their ranks. The positions of a rank in the groups of two axes would then not be its coordinates
    in the mesh, and ranks with different shards would be taken for replicas.
    """
    ranks = mesh.mesh
    if any((ranks.diff(dim=axis) < 0).any() for axis in range(ranks.ndim)):
        raise ValueError(
            f"the ranks of mesh must ascend along each of its axes, got {ranks.tolist()}: torch sorts the ranks of a "
            "process group. Use init_device_mesh(), or assign devices to ranks in another order"
        )


def _check_started_alone() -> None:
    """Raise if a launcher started several processes: without a process group, each would train a model of its own."""
    for variable in _RANK_COUNT_VARIABLES:
        ranks = os.environ.get(variable, "1")
        if ranks.isdecimal() and int(ranks) > 1:
            raise RuntimeError(
                f"this process was started as one of {ranks} ranks ({variable}), but torch.distributed is not "
                "initialized: call torch.distributed.init_process_group() before shard(). To shard on this rank alone, "
                f"unset {variable}"
            )


def tensor_axis_name(mesh: DeviceMesh) -> str | None:
    """Return the name of the mesh's tensor axis; None if it has none."""
    names = mesh.mesh_dim_names or ()
    unknown = sorted(set(names).difference(DATA_AXIS_NAMES, TENSOR_AXIS_NAMES))
    if unknown:
        raise ValueError(
            f"the axes of mesh are named {names}, and ranks along {unknown[0]!r} may have other parameters. Pass the "
            f"sub-mesh of the data-parallel axes ({', '.join(DATA_AXIS_NAMES)}) and the tensor axis: mesh['shard']"
        )
    found = [name for name in names if name in TENSOR_AXIS_NAMES]
    if found and (len(found) > 1 or names[-1] != found[0]):
        raise ValueError(f"mesh must have at most one tensor axis, as its last axis, got {mesh}")
    return found[0] if found else None


def group_backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the backend for tensors of ``device`` in a group: "nccl", "gloo", …; "" without a group."""
    if group is None:
        return ""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((pair[-1] for pair in pairs if len(pair) == 1 or pair[0] == device.type), "")


def find_or_create_group(
    ranks: list[int], purpose: str, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Return the group of these ranks for a purpose; create it on the first call, a collective call of these ranks."""
    for existing in dist.distributed_c10d._world.pg_map:
        if existing.group_desc == purpose and dist.get_process_group_ranks(existing) == sorted(ranks):
            return existing
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend=backend, use_local_synchronization=True, group_desc=purpose
    )
    return group
