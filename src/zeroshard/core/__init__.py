"""ZeRO: every state of a flat parameter has a placement on every axis, and a time at which it changes.

Read placement, layout, flat, gradient, reduce, unit, passes, order, engine, in this order: docs/core.md.
"""

from zeroshard.core.api import (
    full_gradient,
    full_parameter,
    gathered,
    is_sharded,
    no_sync,
    shard,
    state_dict,
    unwrap,
)
from zeroshard.core.optimizer import ShardedOptimizer

__all__ = [
    "ShardedOptimizer",
    "full_gradient",
    "full_parameter",
    "gathered",
    "is_sharded",
    "no_sync",
    "shard",
    "state_dict",
    "unwrap",
]
