"""Collectives over the mesh, their recorded order, and the checks that all ranks do the same."""

from zeroshard.comm.collectives import (
    CollectiveOrder,
    CollectiveWork,
    Communicator,
    all_gather_object,
    all_gather_sync,
)
from zeroshard.comm.consistency import ConsistencyChecker, RanksDisagreeError, open_consistency_checker
from zeroshard.comm.counters import Traffic, WaitTimer
from zeroshard.comm.mesh import MeshAxis, find_or_create_group, mesh_axes, product_axis, tensor_axis_name

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
    "find_or_create_group",
    "mesh_axes",
    "open_consistency_checker",
    "product_axis",
    "tensor_axis_name",
]
