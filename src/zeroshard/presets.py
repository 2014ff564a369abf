"""Presets: shapes of GPTs by name, the paper's among them, and the paper's configurations of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """The shape of a GPT that has a name."""

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary: int = 50304  # GPT-2's 50257, rounded up to a multiple of 128

    @property
    def parameters(self) -> int:
        """Ψ, as :class:`zeroshard.models.GPTConfig` counts it.

        >>> f"{PRESETS['paper-100b'].parameters / 1e9:.1f}B"
        '101.5B'
        """
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * self.vocabulary + self.context + 2) * self.width


PRESETS = {
    "tiny": Preset(4, 4, 128, context=128, vocabulary=1024),
    "gpt2": Preset(12, 12, 768),
    "gpt2-medium": Preset(24, 16, 1024),
    "gpt2-large": Preset(36, 20, 1280),
    "gpt2-xl": Preset(48, 25, 1600),
    "1.4b": Preset(24, 16, 2048),
    "7.6b": Preset(36, 32, 4096),
    # Table 5 of the paper, ZeRO's rows
    "paper-1.5b": Preset(48, 16, 1600),
    "paper-8b": Preset(72, 24, 3072),
    "paper-40b": Preset(88, 32, 6144),
    "paper-60b": Preset(132, 32, 6144),
    "paper-80b": Preset(100, 64, 8192),
    "paper-100b": Preset(125, 64, 8192),
    "paper-120b": Preset(150, 64, 8192),
    "paper-140b": Preset(175, 64, 8192),
    "paper-170b": Preset(212, 64, 8192),
    # Table 10, the largest without model parallelism
    "paper-13b": Preset(62, 32, 4096),
}


@dataclass(frozen=True)
class Configuration:
    """One of the paper's configurations: a stage, and what becomes of the activations that checkpointing keeps.

    Buffers of constant size (C_B) and arenas against fragmentation (M_D) belong to all of them; zeroshard always has
    both. A configuration is given to the two calls that it is about::

        chosen = CONFIGURATIONS["C4"]
        model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, **chosen.sharding)
        zeroshard.checkpoint_activations(model, **chosen.activations)
    """

    letters: str
    """What it has beside C_B and M_D, in the paper's letters."""
    stage: int
    partitioned: bool = False
    """P_a: each rank of the tensor axis keeps its part of an activation that all have alike."""
    offloaded: bool = False
    """P_a+cpu: and keeps it in host memory."""

    @property
    def sharding(self) -> dict[str, Any]:
        """Options of :func:`zeroshard.shard`.

        >>> CONFIGURATIONS["C4"].sharding
        {'stage': 2}
        """
        return {"stage": self.stage}

    @property
    def activations(self) -> dict[str, Any]:
        """Options of :func:`zeroshard.checkpoint_activations`. ``None``: over the mesh's tensor axis, if it has one.

        >>> CONFIGURATIONS["C4"].activations
        {'partition': None, 'offload': False}
        """
        return {"partition": None if self.partitioned else False, "offload": self.offloaded}


CONFIGURATIONS = {  # Table 3 of the paper
    "C1": Configuration("P_os", stage=1),
    "C2": Configuration("P_os + P_a", stage=1, partitioned=True),
    "C3": Configuration("P_os+g", stage=2),
    "C4": Configuration("P_os+g + P_a", stage=2, partitioned=True),
    "C5": Configuration("P_os+g + P_a+cpu", stage=2, partitioned=True, offloaded=True),
}
