"""Choice: what a user may set, and what a plan is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroshard.config.offload import Offload
from zeroshard.planner.tracing.trace_model import CheckpointMode


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to train a model on so many devices."""

    stage: int = 3
    """ZeRO's, 0 to 3."""
    tensor: int = 1
    """Devices that divide each layer."""
    checkpoint: CheckpointMode = "none"
    """What is kept for backward: everything ("none"), blocks' inputs ("recompute"), those in host memory ("host")."""
    offload: Offload | None = None
    """What rests outside the device."""
    micro_batch: int = 1
    """Samples a data-parallel rank and backward."""
    accumulate: int = 1
    """Backwards a step."""

    @property
    def shard_options(self) -> dict[str, Any]:
        """What :func:`zeroshard.shard` is given of it; a tensor degree is in the mesh.

        >>> Strategy(stage=2).shard_options
        {'stage': 2, 'offload': None}
        """
        return {"stage": self.stage, "offload": self.offload}

    @property
    def key(self) -> tuple[int, int, str, str]:
        """What it does, but for the numbers of samples."""
        return self.tensor, self.stage, self.offload_summary, self.checkpoint

    @property
    def checkpoint_options(self) -> dict[str, Any] | None:
        """What :func:`zeroshard.checkpoint_activations` is given of it; None: it is not called.

        >>> Strategy(checkpoint="host").checkpoint_options
        {'offload': True}
        """
        return None if self.checkpoint == "none" else {"offload": self.checkpoint == "host"}

    @property
    def offload_summary(self) -> str:
        """What rests outside the device, in a few words.

        >>> Strategy(offload=Offload(optimizer=("host", 0.5), parameters="host")).offload_summary
        'optimizer 50% host, parameters host'
        """
        if self.offload is None:
            return "nothing"
        said = []
        for kind in ("optimizer", "parameters"):
            for tier, fraction in getattr(self.offload, kind).items():
                said.append(f"{kind} {tier}" if fraction > 0.999 else f"{kind} {fraction:.0%} {tier}")
        return ", ".join(said)

    @property
    def description(self) -> str:
        """All of it in a line.

        >>> Strategy(stage=2, micro_batch=8).description
        'stage 2, micro-batch 8'
        """
        said = [f"stage {self.stage}"]
        if self.tensor > 1:
            said.append(f"tensor {self.tensor}")
        if self.checkpoint != "none":
            said.append("recomputing" + (", inputs on the host" if self.checkpoint == "host" else ""))
        if self.offload is not None:
            said.append(f"{self.offload_summary}")
        said.append(f"micro-batch {self.micro_batch}")
        if self.accumulate > 1:
            said.append(f"{self.accumulate} backwards a step")
        return ", ".join(said)
