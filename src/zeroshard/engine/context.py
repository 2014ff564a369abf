"""ShardContext: what all parts of one sharded model share."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.comm import CollectiveOrder, Communicator
from zeroshard.config.config import Config
from zeroshard.memory import MemoryTracker, Pool, TierAllocator
from zeroshard.sharding import Placement, Precision


@dataclass(frozen=True, eq=False)
class ShardContext:
    """The options, the ranks and the memory of one sharded model; made once, by ``shard()``."""

    config: Config
    placement: Placement
    precision: Precision
    comm: Communicator
    order: CollectiveOrder
    tracker: MemoryTracker
    pool: Pool
    tiers: TierAllocator
