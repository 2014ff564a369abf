"""zeroshard: train models too large for one device with ZeRO, the Zero Redundancy Optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroshard.utils.version import __version__ as __version__

if TYPE_CHECKING:
    from zeroshard.activations.checkpoint import checkpoint_activations
    from zeroshard.api import (
        full_gradient,
        full_parameter,
        full_state,
        gathered,
        no_sync,
        offload_states,
        profile,
        reload_states,
        report,
        unshard,
    )
    from zeroshard.auto import shard
    from zeroshard.checkpoint import CheckpointError, Loaded, Save, load, save
    from zeroshard.comm.consistency import RanksDisagreeError
    from zeroshard.config.config import Config
    from zeroshard.config.offload import Offload
    from zeroshard.memory.tracker import Profile, Report
    from zeroshard.optim.sharded_optimizer import ShardedOptimizer
    from zeroshard.planner import plan

__all__ = [
    "CheckpointError",
    "Config",
    "Loaded",
    "Offload",
    "Profile",
    "RanksDisagreeError",
    "Report",
    "Save",
    "ShardedOptimizer",
    "checkpoint_activations",
    "full_gradient",
    "full_parameter",
    "full_state",
    "gathered",
    "load",
    "no_sync",
    "offload_states",
    "plan",
    "profile",
    "reload_states",
    "report",
    "save",
    "shard",
    "unshard",
    "unwrap",
]

_MODULE_OF = {
    "CheckpointError": "checkpoint",
    "Config": "config.config",
    "Loaded": "checkpoint",
    "Offload": "config.offload",
    "Profile": "memory.tracker",
    "RanksDisagreeError": "comm.consistency",
    "Report": "memory.tracker",
    "Save": "checkpoint",
    "ShardedOptimizer": "optim.sharded_optimizer",
    "checkpoint_activations": "activations.checkpoint",
    "load": "checkpoint",
    "plan": "planner",
    "save": "checkpoint",
    "shard": "auto",
}  # all others are in api


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line answers ``--help`` without waiting for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'zeroshard' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"zeroshard.{_MODULE_OF.get(name, 'api')}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
