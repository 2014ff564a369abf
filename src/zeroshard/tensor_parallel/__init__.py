"""Tensor parallelism: how parameters are sharded along the tensor axis, and the plans that define it."""

from zeroshard.tensor_parallel.parallelize import TensorParallelState, TPParam, parallelize
from zeroshard.tensor_parallel.plans import TensorPlan, local_numels, name_matches_pattern, tensor_plan_for
from zeroshard.tensor_parallel.styles import Conv1DRowwiseParallel, FusedColwiseParallel
from zeroshard.tensor_parallel.tp_shard import TPShard

__all__ = [
    "Conv1DRowwiseParallel",
    "FusedColwiseParallel",
    "TPParam",
    "TPShard",
    "TensorParallelState",
    "TensorPlan",
    "local_numels",
    "name_matches_pattern",
    "parallelize",
    "tensor_plan_for",
]
