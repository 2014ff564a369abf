"""Planner: predict the memory and step time of training before running it."""
