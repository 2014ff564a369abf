"""The options of one strategy: what a user can set and a plan evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.config.config import Config
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
    gather_dtype: str | None = None
    """In which 8-bit dtype parameters are all-gathered; None: in the compute dtype."""
    reduce_wire: str | None = None
    """In which 8-bit dtype gradients are sent; None: in the reduce dtype."""
    local_steps: int = 1
    """After how many steps replicas that train alone are averaged; 1: they never train alone."""
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

        >>> list(Strategy(stage=2).shard_options)
        ['stage', 'partition', 'offload', 'gather_dtype', 'reduce_wire', 'local_steps']
        """
        names = ("stage", "partition", "offload", "gather_dtype", "reduce_wire", "local_steps")
        return {name: getattr(self, name) for name in names}

    def config(self, options: Mapping[str, Any]) -> Config:
        """Return all options of :func:`zeroshard.shard`: those of the strategy, and ``options`` that it leaves open.

        >>> Strategy(stage=2).config({"precision": "bf16", "error_feedback": True}).error_feedback
        False
        """
        found = {**options, **self.shard_options}
        if self.reduce_wire is None:
            found.pop("error_feedback", None)  # belongs to 8-bit reductions
        if self.local_steps == 1:
            found.pop("outer_optimizer", None)  # belongs to local steps
        return Config(**found)

    @property
    def key(self) -> tuple[int | str, ...]:
        """Identify the strategy without its batch sizes."""
        mesh = self.tensor, self.stage, self.replicas, self.partition, self.local_steps
        return *mesh, self.wire_summary, self.offload_summary, self.checkpoint

    @property
    def is_lossy(self) -> bool:
        """Whether collectives move 8-bit values: then the numbers are not those of other strategies."""
        return self.gather_dtype is not None or self.reduce_wire is not None

    def average_ranks(self, data_ranks: int) -> int:
        """Return how many replicas are averaged: the rows of the mesh, or without it, all data-parallel ranks.

        >>> Strategy(stage=0, local_steps=8).average_ranks(4), Strategy(replicas=2).average_ranks(4)
        (4, 1)
        """
        if self.local_steps == 1:
            return 1
        return self.replicas if self.replicas > 1 else data_ranks

    @property
    def wire_summary(self) -> str:
        """The collectives that move 8-bit values, as short text; empty if none does.

        >>> Strategy(gather_dtype="int8", reduce_wire="int8").wire_summary, Strategy(reduce_wire="fp8").wire_summary
        ('int8 gathers, int8 reductions', 'fp8 reductions')
        """
        kinds = {"gathers": self.gather_dtype, "reductions": self.reduce_wire}
        return ", ".join(f"{dtype} {kind}" for kind, dtype in kinds.items() if dtype is not None)

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
        if self.local_steps > 1:
            parts.append(f"averaged every {self.local_steps} steps")
        if self.is_lossy:
            parts.append(self.wire_summary)
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
