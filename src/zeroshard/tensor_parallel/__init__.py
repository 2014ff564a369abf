"""Tensor parallelism: how parameters are sharded along the tensor axis, and the plans that define it."""

from zeroshard.tensor_parallel.parallelize import TensorParallelState, TPParam, parallelize
from zeroshard.tensor_parallel.plans import TensorPlan, local_numels, tensor_plan_for
from zeroshard.tensor_parallel.styles import COLWISE_STYLES, ROWWISE_STYLES
from zeroshard.tensor_parallel.tp_shard import TPShard

__all__ = [
    "COLWISE_STYLES",
    "ROWWISE_STYLES",
    "TPParam",
    "TPShard",
    "TensorParallelState",
    "TensorPlan",
    "local_numels",
    "parallelize",
    "tensor_plan_for",
]
