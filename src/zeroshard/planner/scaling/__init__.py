"""Simulate training on any number of devices, find the largest model, and reproduce the ZeRO paper's results."""

from zeroshard.planner.scaling.largest_model import (
    LargestModel,
    find_deepest_member,
    find_family,
    find_largest_model,
    gpt_family,
)
from zeroshard.planner.scaling.paper import PAPER_CURVE, PaperResult, mean_error, paper_results
from zeroshard.planner.scaling.sweep import (
    DEVICE_COUNTS,
    WAIT_KINDS,
    ScalingPoint,
    ScalingSimulation,
    StageScaling,
    simulate,
)
from zeroshard.planner.traced_model import TracedModel, TrainingLoop

__all__ = [
    "DEVICE_COUNTS",
    "PAPER_CURVE",
    "WAIT_KINDS",
    "LargestModel",
    "PaperResult",
    "ScalingPoint",
    "ScalingSimulation",
    "StageScaling",
    "TracedModel",
    "TrainingLoop",
    "find_deepest_member",
    "find_family",
    "find_largest_model",
    "gpt_family",
    "mean_error",
    "paper_results",
    "simulate",
]
