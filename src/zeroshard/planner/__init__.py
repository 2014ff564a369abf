"""Predict the memory and step time of training before running it, and choose the best strategy.

``zeroshard.planner.auto`` chooses a plan for a running job, ``zeroshard.planner.scaling`` simulates many devices.
"""

from typing import TYPE_CHECKING

from zeroshard.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from zeroshard.planner.auto import NothingFitsError, PlanningOptions
    from zeroshard.planner.calibration.calibrate import calibrate
    from zeroshard.planner.machines.machine import Machine
    from zeroshard.planner.machines.presets import MACHINE_PRESETS, gpu_peak_flops
    from zeroshard.planner.plan_json import JSON_VERSION, plan_to_dict, plans_to_dict
    from zeroshard.planner.plans import Plan, Plans, plan
    from zeroshard.planner.state_sizes import PredictedMemory, plan_sizes, predict_memory
    from zeroshard.planner.strategy import Strategy
    from zeroshard.planner.tracing.inputs import Inputs, LossFn, model_arguments
    from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, CheckpointMode, UntraceableError
    from zeroshard.planner.traffic import PredictedTraffic, predict_traffic
    from zeroshard.planner.whole_params import WholeParamSpec, find_whole_params

__all__ = [
    "CHECKPOINT_MODES",
    "JSON_VERSION",
    "MACHINE_PRESETS",
    "CheckpointMode",
    "Inputs",
    "LossFn",
    "Machine",
    "NothingFitsError",
    "Plan",
    "PlanningOptions",
    "Plans",
    "PredictedMemory",
    "PredictedTraffic",
    "Strategy",
    "UntraceableError",
    "WholeParamSpec",
    "calibrate",
    "find_whole_params",
    "gpu_peak_flops",
    "model_arguments",
    "plan",
    "plan_sizes",
    "plan_to_dict",
    "plans_to_dict",
    "predict_memory",
    "predict_traffic",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "auto": "NothingFitsError PlanningOptions",
        "calibration.calibrate": "calibrate",
        "machines.machine": "Machine",
        "machines.presets": "MACHINE_PRESETS gpu_peak_flops",
        "plan_json": "JSON_VERSION plan_to_dict plans_to_dict",
        "plans": "Plan Plans plan",
        "state_sizes": "PredictedMemory plan_sizes predict_memory",
        "strategy": "Strategy",
        "tracing.inputs": "Inputs LossFn model_arguments",
        "tracing.trace_model": "CHECKPOINT_MODES CheckpointMode UntraceableError",
        "traffic": "PredictedTraffic predict_traffic",
        "whole_params": "WholeParamSpec find_whole_params",
    },
)
