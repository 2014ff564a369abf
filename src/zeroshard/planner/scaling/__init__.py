"""Simulate training on any number of devices, and find the largest model."""

from zeroshard.planner.scaling.largest_model import (
    LargestModel,
    find_deepest_member,
    find_family,
    gpt_family,
)
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
    "WAIT_KINDS",
    "LargestModel",
    "ScalingPoint",
    "ScalingSimulation",
    "StageScaling",
    "TracedModel",
    "TrainingLoop",
    "find_deepest_member",
    "find_family",
    "gpt_family",
    "simulate",
]
