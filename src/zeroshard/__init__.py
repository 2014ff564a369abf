"""zeroshard: train models too large for one device with ZeRO, the Zero Redundancy Optimizer."""

import os
from typing import TYPE_CHECKING

from zeroshard.utils.lazy_import import lazy_names
from zeroshard.utils.version import __version__ as __version__

if TYPE_CHECKING:
    from zeroshard.activations import checkpoint_activations
    from zeroshard.api import (
        average_replicas,
        full_gradient,
        full_parameter,
        full_state,
        gathered,
        is_sharded,
        no_sync,
        offload_states,
        profile,
        register_forward_method,
        reload_states,
        report,
        state_dict,
        unshard,
        unwrap,
    )
    from zeroshard.checkpoint import CheckpointError, Loaded, Save, load, save
    from zeroshard.comm import RanksDisagreeError
    from zeroshard.config.config import Config
    from zeroshard.config.offload import Offload
    from zeroshard.engine import EMA
    from zeroshard.memory import Profile, Report
    from zeroshard.optim import ShardedOptimizer
    from zeroshard.planner import plan
    from zeroshard.shard import shard

__all__ = [
    "EMA",
    "CheckpointError",
    "Config",
    "Loaded",
    "Offload",
    "Profile",
    "RanksDisagreeError",
    "Report",
    "Save",
    "ShardedOptimizer",
    "average_replicas",
    "checkpoint_activations",
    "full_gradient",
    "full_parameter",
    "full_state",
    "gathered",
    "is_sharded",
    "load",
    "no_sync",
    "offload_states",
    "plan",
    "profile",
    "register_forward_method",
    "reload_states",
    "report",
    "save",
    "shard",
    "state_dict",
    "unshard",
    "unwrap",
]

_names = {
    "activations": "checkpoint_activations",
    "api": "average_replicas full_gradient full_parameter full_state gathered is_sharded no_sync offload_states "
    "profile register_forward_method reload_states report state_dict unshard unwrap",
    "checkpoint": "CheckpointError Loaded Save load save",
    "comm": "RanksDisagreeError",
    "config.config": "Config",
    "config.offload": "Offload",
    "engine": "EMA",
    "memory": "Profile Report",
    "optim": "ShardedOptimizer",
    "planner": "plan",
    "shard": "shard",
}
if os.environ.get("ZEROSHARD_CORE") == "new":  # until it replaces the old one
    _replaced = [_names.pop(folder) for folder in ("activations", "api", "checkpoint", "engine", "optim", "shard")]
    _names["core.api"] = " ".join(_replaced)
__getattr__, __dir__ = lazy_names(__name__, _names)
