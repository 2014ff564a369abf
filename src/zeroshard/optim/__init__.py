"""The user's optimizer on shards: slices, the step, fused and offloaded updates."""
