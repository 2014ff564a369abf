"""Decisions without storage: which states a stage shards, units, layouts, tiers and dtypes."""
