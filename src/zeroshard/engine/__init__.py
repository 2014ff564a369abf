"""The engine: module and autograd events (hooks) → order of collectives → the life of a unit."""

from zeroshard.engine.build import UnitBuilder, check_model, plan_model
from zeroshard.engine.context import ShardContext
from zeroshard.engine.engine import Engine, engine_of
from zeroshard.engine.flat_grad import FlatGrad, assign_segments, compute_norms
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.full_tensors import find_parameter
from zeroshard.engine.grad_scale import GradScale, on_scaled_loss
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.hooks import install_hooks
from zeroshard.engine.model_checks import check_max_norm
from zeroshard.engine.module_buffers import BufferBroadcaster
from zeroshard.engine.offload_states import OffloadedStates
from zeroshard.engine.parameter import PICKLE_ERROR, local_data, param_info, param_versions
from zeroshard.engine.rank_checks import (
    open_tiers,
    verify_same_model,
    verify_same_tensor_plan,
)
from zeroshard.engine.schedule import ForwardRecord, ModuleCall, Schedule
from zeroshard.engine.unit import Unit, unit_of
from zeroshard.engine.unit_values import assemble_full_tensor, gather_tp_shards, make_plain
from zeroshard.engine.unsupported_calls import raise_on_join

__all__ = [
    "PICKLE_ERROR",
    "BufferBroadcaster",
    "Engine",
    "FlatGrad",
    "FlatParam",
    "ForwardRecord",
    "GradScale",
    "Gradients",
    "ModuleCall",
    "OffloadedStates",
    "Schedule",
    "ShardContext",
    "Unit",
    "UnitBuilder",
    "assemble_full_tensor",
    "assign_segments",
    "check_max_norm",
    "check_model",
    "compute_norms",
    "engine_of",
    "find_parameter",
    "gather_tp_shards",
    "install_hooks",
    "local_data",
    "make_plain",
    "on_scaled_loss",
    "open_tiers",
    "param_info",
    "param_versions",
    "plan_model",
    "raise_on_join",
    "unit_of",
    "verify_same_model",
    "verify_same_tensor_plan",
]
