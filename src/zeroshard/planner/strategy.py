"""The options of one strategy: what a user can set and a plan evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroshard.config.offload import Offload
from zeroshard.planner.tracing.trace_model import CheckpointMode


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to train a model: stage, tensor degree, checkpointing, offload and batch."""

    stage: int = 3
    """ZeRO stage, 0 to 3."""
    replicas: int = 1
    """Size of the outer axis of a 2-D mesh of data-parallel ranks."""
    partition: str = "hybrid"
    """How such a mesh divides the states: see :class:`zeroshard.Config`."""
    tensor: int = 1
    """Tensor-parallel degree."""
    checkpoint: CheckpointMode = "none"
    """What is kept for backward: all activations ("none"), block inputs ("recompute"), or block inputs in host memory
    ("host")."""
    offload: Offload | None = None
    """Which states are offloaded."""
    micro_batch: int = 1
    """Samples per data-parallel rank and backward."""
    accumulate: int = 1
    """Backwards per step."""

    @property
    def shard_options(self) -> dict[str, Any]:
        """The options for :func:`zeroshard.shard`; replicas and the tensor degree are part of the mesh.

        >>> Strategy(stage=2).shard_options
        {'stage': 2, 'partition': 'hybrid', 'offload': None}
        """
        return {"stage": self.stage, "partition": self.partition, "offload": self.offload}

    @property
    def key(self) -> tuple[int, int, int, str, str, str]:
        """Identify the strategy without its batch sizes."""
        return self.tensor, self.stage, self.replicas, self.partition, self.offload_summary, self.checkpoint

    @property
    def checkpoint_options(self) -> dict[str, Any] | None:
        """The options for :func:`zeroshard.checkpoint_activations`, or None if it is not called.

        >>> Strategy(checkpoint="host").checkpoint_options
        {'offload': True}
        """
        return None if self.checkpoint == "none" else {"offload": self.checkpoint == "host"}

    @property
    def offload_summary(self) -> str:
        """The offloaded states as short text.

        >>> Strategy(offload=Offload(optimizer=("host", 0.5), parameters="host")).offload_summary
        'optimizer 50% host, parameters host'
        """
        if self.offload is None:
            return "nothing"
        parts = []
        for kind in ("optimizer", "parameters"):
            for tier, fraction in getattr(self.offload, kind).items():
                parts.append(f"{kind} {tier}" if fraction > 0.999 else f"{kind} {fraction:.0%} {tier}")
        return ", ".join(parts)

    @property
    def description(self) -> str:
        """The strategy in one line.

        >>> Strategy(stage=2, micro_batch=8).description
        'stage 2, micro-batch 8'
        """
        parts = [f"stage {self.stage}"]
        if self.replicas > 1:
            parts.append(f"{self.partition} over {self.replicas} replicas")
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}")
        if self.checkpoint != "none":
            parts.append("recomputing" + (", inputs on the host" if self.checkpoint == "host" else ""))
        if self.offload is not None:
            parts.append(f"{self.offload_summary}")
        parts.append(f"micro-batch {self.micro_batch}")
        if self.accumulate > 1:
            parts.append(f"{self.accumulate} backwards a step")
        return ", ".join(parts)
