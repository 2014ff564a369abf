"""Decisions without storage: which states a stage shards, units, layouts, tiers and dtypes."""

from zeroshard.sharding.layout import ALIGN_ELEMENTS, FlatLayout, ParamRange, Range, round_to_shared_sizes, round_up
from zeroshard.sharding.placement import Placement
from zeroshard.sharding.precision import Precision, matches
from zeroshard.sharding.shard_plan import FlatSpec, ParamSpec, ShardPlan, plan_shards
from zeroshard.sharding.tier_placement import (
    MAX_CHUNK_ELEMENTS,
    MAX_TENSORS_PER_CHUNK,
    PAGE_BYTES,
    FlatSizes,
    TierPlacement,
    assign_tiers,
    split_chunks,
)
from zeroshard.sharding.units import UnitSpec, blocks_per_group, find_repeated_blocks, plan_units

__all__ = [
    "ALIGN_ELEMENTS",
    "MAX_CHUNK_ELEMENTS",
    "MAX_TENSORS_PER_CHUNK",
    "PAGE_BYTES",
    "FlatLayout",
    "FlatSizes",
    "FlatSpec",
    "ParamRange",
    "ParamSpec",
    "Placement",
    "Precision",
    "Range",
    "ShardPlan",
    "TierPlacement",
    "UnitSpec",
    "assign_tiers",
    "blocks_per_group",
    "find_repeated_blocks",
    "matches",
    "plan_shards",
    "plan_units",
    "round_to_shared_sizes",
    "round_up",
    "split_chunks",
]
