"""Collectives over the mesh, their recorded order, and the checks that all ranks do the same."""

from zeroshard.comm.collectives import (
    COMPLETED_WORK,
    CollectiveOrder,
    CollectiveWork,
    Communicator,
    all_gather_object,
    all_gather_sync,
    count_tensor_traffic,
)
from zeroshard.comm.consistency import ConsistencyChecker, RanksDisagreeError, open_consistency_checker
from zeroshard.comm.counters import Traffic, WaitTimer
from zeroshard.comm.heartbeat_monitor import describe_error
from zeroshard.comm.mesh import MeshAxis, find_or_create_group, mesh_axes, product_axis, tensor_axis_name
from zeroshard.comm.quantization import BLOCK_NUMEL, ErrorFeedback, Quantizer, exchange_numel, payload_bytes

__all__ = [
    "BLOCK_NUMEL",
    "COMPLETED_WORK",
    "CollectiveOrder",
    "CollectiveWork",
    "Communicator",
    "ConsistencyChecker",
    "ErrorFeedback",
    "MeshAxis",
    "Quantizer",
    "RanksDisagreeError",
    "Traffic",
    "WaitTimer",
    "all_gather_object",
    "all_gather_sync",
    "count_tensor_traffic",
    "describe_error",
    "exchange_numel",
    "find_or_create_group",
    "mesh_axes",
    "open_consistency_checker",
    "payload_bytes",
    "product_axis",
    "tensor_axis_name",
]
