"""Tensor parallelism: how parameters are divided along the tensor axis, and the plans that say so."""
