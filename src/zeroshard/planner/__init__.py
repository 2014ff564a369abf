"""Predict the memory and step time of training before running it, and choose the best strategy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.planner.auto import (
        AUTO,
        JobTopology,
        NothingFitsError,
        PlanDecision,
        PlanningOptions,
        choose_plan,
        choose_plan_for_machine,
    )
    from zeroshard.planner.calibration.calibrate import calibrate
    from zeroshard.planner.free_memory import FreeMemory, machine_from_free_memory
    from zeroshard.planner.machines.cache import machine_path
    from zeroshard.planner.machines.machine import Machine
    from zeroshard.planner.machines.presets import MACHINE_PRESETS
    from zeroshard.planner.plan_json import plan_to_dict, plans_to_dict, versions
    from zeroshard.planner.plans import Plan, Plans, default_precision, plan
    from zeroshard.planner.state_sizes import PredictedMemory, predict_memory
    from zeroshard.planner.strategy import Strategy
    from zeroshard.planner.tracing.inputs import Inputs, LossFn, model_arguments
    from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, CheckpointMode, UntraceableError

__all__ = [
    "AUTO",
    "CHECKPOINT_MODES",
    "MACHINE_PRESETS",
    "CheckpointMode",
    "FreeMemory",
    "Inputs",
    "JobTopology",
    "LossFn",
    "Machine",
    "NothingFitsError",
    "Plan",
    "PlanDecision",
    "PlanningOptions",
    "Plans",
    "PredictedMemory",
    "Strategy",
    "UntraceableError",
    "calibrate",
    "choose_plan",
    "choose_plan_for_machine",
    "default_precision",
    "machine_from_free_memory",
    "machine_path",
    "model_arguments",
    "plan",
    "plan_to_dict",
    "plans_to_dict",
    "predict_memory",
    "versions",
]

_MODULE_OF = {
    "CHECKPOINT_MODES": "tracing.trace_model",
    "CheckpointMode": "tracing.trace_model",
    "FreeMemory": "free_memory",
    "Inputs": "tracing.inputs",
    "LossFn": "tracing.inputs",
    "MACHINE_PRESETS": "machines.presets",
    "Machine": "machines.machine",
    "Plan": "plans",
    "Plans": "plans",
    "PredictedMemory": "state_sizes",
    "Strategy": "strategy",
    "UntraceableError": "tracing.trace_model",
    "calibrate": "calibration.calibrate",
    "default_precision": "plans",
    "machine_from_free_memory": "free_memory",
    "machine_path": "machines.cache",
    "model_arguments": "tracing.inputs",
    "plan": "plans",
    "plan_to_dict": "plan_json",
    "plans_to_dict": "plan_json",
    "predict_memory": "state_sizes",
    "versions": "plan_json",
}  # all others are in auto


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line answers ``--help`` without waiting for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'zeroshard.planner' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"zeroshard.planner.{_MODULE_OF.get(name, 'auto')}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
