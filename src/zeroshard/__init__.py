"""zeroshard: train models too large for one device with ZeRO, the Zero Redundancy Optimizer."""

from zeroshard.agreement import RanksDisagreeError
from zeroshard.api import full_gradient, full_state, gathered, no_sync, report, shard, unshard
from zeroshard.config import Config
from zeroshard.optimizer import ShardedOptimizer
from zeroshard.report import Report

__version__ = "0.1.0"

__all__ = [
    "Config",
    "RanksDisagreeError",
    "Report",
    "ShardedOptimizer",
    "full_gradient",
    "full_state",
    "gathered",
    "no_sync",
    "report",
    "shard",
    "unshard",
]
