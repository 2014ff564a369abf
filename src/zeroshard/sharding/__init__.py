"""Decisions without storage: which states a stage shards, units, layouts, tiers and dtypes."""

from zeroshard.sharding.float8_layers import Float8Layers, find_float8_layers
from zeroshard.sharding.layout import ALIGN_ELEMENTS, ParamRange, Range, round_up
from zeroshard.sharding.placement import Placement
from zeroshard.sharding.precision import Precision, matches
from zeroshard.sharding.shard_plan import (
    EightBitParams,
    FlatSpec,
    ParamSpec,
    ShardPlan,
    find_eight_bit_params,
    plan_shards,
)
from zeroshard.sharding.tier_placement import PAGE_BYTES, PREFETCH_SHARDS, STAGING_SLOTS
from zeroshard.sharding.units import (
    UnitSpec,
    blocks_per_group,
    find_block_matrices,
    find_cast_blocks,
    find_repeated_blocks,
    plan_units,
)

__all__ = [
    "ALIGN_ELEMENTS",
    "PAGE_BYTES",
    "PREFETCH_SHARDS",
    "STAGING_SLOTS",
    "EightBitParams",
    "FlatSpec",
    "Float8Layers",
    "ParamRange",
    "ParamSpec",
    "Placement",
    "Precision",
    "Range",
    "ShardPlan",
    "UnitSpec",
    "blocks_per_group",
    "find_block_matrices",
    "find_cast_blocks",
    "find_eight_bit_params",
    "find_float8_layers",
    "find_repeated_blocks",
    "matches",
    "plan_shards",
    "plan_units",
    "round_up",
]
