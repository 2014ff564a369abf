"""Collectives over the mesh, their recorded order, and the checks that all ranks do the same."""

from zeroshard.comm.collective_order import CollectiveOrder
from zeroshard.comm.collectives import (
    CollectiveWork,
    Communicator,
    all_gather_object,
    all_gather_sync,
    broadcast_object,
)
from zeroshard.comm.consistency import ConsistencyChecker, RanksDisagreeError
from zeroshard.comm.counters import Traffic, WaitTimer
from zeroshard.comm.mesh import MeshAxis, group_timeout_seconds, mesh_axes, tensor_axis_name

__all__ = [
    "CollectiveOrder",
    "CollectiveWork",
    "Communicator",
    "ConsistencyChecker",
    "MeshAxis",
    "RanksDisagreeError",
    "Traffic",
    "WaitTimer",
    "all_gather_object",
    "all_gather_sync",
    "broadcast_object",
    "group_timeout_seconds",
    "mesh_axes",
    "tensor_axis_name",
]
