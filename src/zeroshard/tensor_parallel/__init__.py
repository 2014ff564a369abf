"""Tensor parallelism: how parameters are sharded along the tensor axis, and the plans that define it."""
