"""Activation checkpointing: which blocks are recomputed, what is saved for it, and where (P_a, P_a+cpu, M_D)."""

from zeroshard.activations.checkpoint import (
    CheckpointedForward,
    checkpoint_activations,
    checkpointed_forwards,
    select_blocks,
)
from zeroshard.activations.recompute import flatten_arguments

__all__ = [
    "CheckpointedForward",
    "checkpoint_activations",
    "checkpointed_forwards",
    "flatten_arguments",
    "select_blocks",
]
