"""The engine: module and autograd events (hooks) → order of collectives → the life of a unit."""

from zeroshard.engine.build import build_engine, plan_model
from zeroshard.engine.context import ShardContext
from zeroshard.engine.ema import EMA, exact_values
from zeroshard.engine.engine import Engine, engine_of
from zeroshard.engine.flat_grad import FlatGrad, assign_segments, compute_norms
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.forward_methods import register_forward_method
from zeroshard.engine.full_tensors import find_parameter
from zeroshard.engine.grad_scale import GradScale, on_scaled_loss
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.last_backward import StepPredictor
from zeroshard.engine.model_checks import check_max_norm, check_model, unwrap_compiled
from zeroshard.engine.offload_states import OffloadedStates
from zeroshard.engine.param_access import take_edits
from zeroshard.engine.param_data import param_versions
from zeroshard.engine.parameter import PICKLE_ERROR, param_info
from zeroshard.engine.rank_checks import (
    open_tiers,
    verify_same_model,
    verify_same_tensor_plan,
)
from zeroshard.engine.reduce import NO_HISTORY, GradHistory
from zeroshard.engine.schedule import ForwardRecord, ModuleCall, Schedule
from zeroshard.engine.unit import Unit
from zeroshard.engine.unit_values import assemble_full_tensor, make_plain
from zeroshard.engine.unsupported_calls import raise_on_join

__all__ = [
    "EMA",
    "NO_HISTORY",
    "PICKLE_ERROR",
    "Engine",
    "FlatGrad",
    "FlatParam",
    "ForwardRecord",
    "GradHistory",
    "GradScale",
    "Gradients",
    "ModuleCall",
    "OffloadedStates",
    "Schedule",
    "ShardContext",
    "StepPredictor",
    "Unit",
    "assemble_full_tensor",
    "assign_segments",
    "build_engine",
    "check_max_norm",
    "check_model",
    "compute_norms",
    "engine_of",
    "exact_values",
    "find_parameter",
    "make_plain",
    "on_scaled_loss",
    "open_tiers",
    "param_info",
    "param_versions",
    "plan_model",
    "raise_on_join",
    "register_forward_method",
    "take_edits",
    "unwrap_compiled",
    "verify_same_model",
    "verify_same_tensor_plan",
]
