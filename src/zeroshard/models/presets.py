"""Presets: named shapes of GPTs, with those of the ZeRO paper, and the paper's configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GPTPreset:
    """The shape of a GPT."""

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
    "tiny": GPTPreset(4, 4, 128, context=128, vocabulary=1024),
    "gpt2": GPTPreset(12, 12, 768),
    "gpt2-medium": GPTPreset(24, 16, 1024),
    "gpt2-large": GPTPreset(36, 20, 1280),
    "gpt2-xl": GPTPreset(48, 25, 1600),
    "1.4b": GPTPreset(24, 16, 2048),
    "7.6b": GPTPreset(36, 32, 4096),
    # Table 5 of the paper, rows of ZeRO
    "paper-1.5b": GPTPreset(48, 16, 1600),
    "paper-8b": GPTPreset(72, 24, 3072),
    "paper-40b": GPTPreset(88, 32, 6144),
    "paper-60b": GPTPreset(132, 32, 6144),
    "paper-80b": GPTPreset(100, 64, 8192),
    "paper-100b": GPTPreset(125, 64, 8192),
    "paper-120b": GPTPreset(150, 64, 8192),
    "paper-140b": GPTPreset(175, 64, 8192),
    "paper-170b": GPTPreset(212, 64, 8192),
    # Table 10: the largest without model parallelism
    "paper-13b": GPTPreset(62, 32, 4096),
}


@dataclass(frozen=True)
class PaperConfiguration:
    """One of the paper's configurations: a stage, and where the inputs of checkpointed blocks are kept.

    All of them have buffers of constant size (C_B) and defragmentation (M_D), as zeroshard always has. Use one as::

        chosen = CONFIGURATIONS["C4"]
        model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, **chosen.shard_options)
        zeroshard.checkpoint_activations(model, **chosen.checkpoint_options)
    """

    notation: str
    """In the paper's letters, without C_B and M_D."""
    stage: int
    partition_activations: bool = False
    """P_a: inputs are partitioned over the tensor axis instead of replicated."""
    offload_activations: bool = False
    """P_a+cpu: inputs are kept in host memory."""

    @property
    def shard_options(self) -> dict[str, Any]:
        """Options of :func:`zeroshard.shard`.

        >>> CONFIGURATIONS["C4"].shard_options
        {'stage': 2}
        """
        return {"stage": self.stage}

    @property
    def checkpoint_options(self) -> dict[str, Any]:
        """Options of :func:`zeroshard.checkpoint_activations`. ``None``: over the mesh's tensor axis, if it has one.

        >>> CONFIGURATIONS["C4"].checkpoint_options
        {'partition': None, 'offload': False}
        """
        return {"partition": None if self.partition_activations else False, "offload": self.offload_activations}


CONFIGURATIONS = {  # Table 3 of the paper
    "C1": PaperConfiguration("P_os", stage=1),
    "C2": PaperConfiguration("P_os + P_a", stage=1, partition_activations=True),
    "C3": PaperConfiguration("P_os+g", stage=2),
    "C4": PaperConfiguration("P_os+g + P_a", stage=2, partition_activations=True),
    "C5": PaperConfiguration("P_os+g + P_a+cpu", stage=2, partition_activations=True, offload_activations=True),
}
