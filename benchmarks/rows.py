"""Row: a piece of work that all libraries are given alike, where it runs, and which variants make sense there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.models import ConvNet, ExpertsModel, adapted, divided
from benchmarks.rank import ROWS as GPTS
from benchmarks.rank import TINY
from zeroshard.models import GPT, GPTConfig
from zeroshard.presets import PRESETS, GPTPreset

SHARDED = ("floor", "FSDP2", "DeepSpeed 3", "zeroshard 3")
STAGES = tuple(f"zeroshard {stage}" for stage in range(4))
REPLICATED = ("floor", "DDP", "FSDP2", "DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3", *STAGES)
ACCUMULATED = ("FSDP2, reducing every time", "zeroshard 3, no_sync")
OWN = "zeroshard 3, own recomputation"
KEPT = "zeroshard 3, 16 bits kept"
FLOORS = ("floor", "floor, own recomputation")


@dataclass(frozen=True)
class Row:
    """Model and shape, data, and place."""

    model: str = "gpt"  # or "lora", "experts", "convolutions"
    layers: int = 24
    heads: int = 16
    width: int = 2048
    batch: int = 16  # sequences or images a rank, each time forward runs
    sequence: int = 1024  # tokens; of images, a quarter of their side
    vocabulary: int = 50304
    accumulate: int = 1  # forwards and backwards a step
    recomputed: bool = True  # every block, in backward
    pieces: int = 1  # parameters that the weight of a linear layer in a block is cut into
    place: str = "one of many"  # others do not exist; "alone": NCCL, or gloo on a CPU; "ranks": processes over gloo
    ranks: int = 64
    variants: tuple[str, ...] = SHARDED

    @classmethod
    def of(cls, shape: GPTPreset, batch: int, **changes: object) -> Row:
        """A GPT of a preset."""
        given = {"layers": shape.layers, "heads": shape.heads, "width": shape.width, "sequence": shape.context}
        return cls(**{**given, "vocabulary": shape.vocabulary, "batch": batch, **changes})  # type: ignore[arg-type]

    @property
    def tiny(self) -> Row:
        """The same at a size that a CPU runs at once."""
        shape = {"layers": 2, "heads": 4, "width": 32, "batch": 2, "sequence": 16, "vocabulary": 64}
        return replace(self, **shape, accumulate=min(self.accumulate, 2), ranks=min(self.ranks, 8))  # type: ignore[arg-type]

    def over(self, ranks: int) -> Row:
        """The same by so many real processes, with what then makes sense."""
        extra = tuple(name for name in self.variants if name in (*ACCUMULATED, FLOORS[1], OWN, KEPT))
        return replace(self, place="ranks", ranks=ranks, variants=(*REPLICATED, *extra))

    @property
    def items(self) -> int:
        """Tokens, or images, of one step of a rank."""
        return self.batch * self.accumulate * (1 if self.model == "convolutions" else self.sequence)

    @property
    def item(self) -> str:
        """What is counted."""
        return "images" if self.model == "convolutions" else "tokens"

    def build(self, recomputed: bool | None = None) -> nn.Module:
        """The model, on torch's present device. Its blocks are in ``blocks``, and it returns its loss."""
        recomputed = self.recomputed if recomputed is None else recomputed
        if self.model == "convolutions":
            return ConvNet(self.layers, self.width)
        if self.model == "experts":
            return ExpertsModel(self.layers, self.width, self.vocabulary)
        shape = {"layers": self.layers, "heads": self.heads, "width": self.width, "context": self.sequence}
        gpt = GPT(GPTConfig(vocab_size=self.vocabulary, checkpoint=recomputed, **shape))
        if self.model == "lora":
            return adapted(gpt)
        return divided(gpt, self.pieces) if self.pieces > 1 else gpt

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        """What the model is called with."""
        if self.model == "convolutions":
            side = 4 * self.sequence
            labels = torch.randint(1000, (self.batch,), device=device)
            return torch.randn(self.batch, 3, side, side, device=device), labels
        tokens = torch.randint(self.vocabulary, (self.batch, self.sequence), device=device)
        return (tokens,) if self.model == "experts" else (tokens, tokens)

    def __str__(self) -> str:
        """What is trained, and where, in a line."""
        times = f", {self.accumulate} backwards a step" if self.accumulate > 1 else ""
        size = f"images of {4 * self.sequence}²" if self.item == "images" else f"sequences of {self.sequence}"
        recomputed = "every block recomputed" if self.recomputed else "nothing recomputed"
        where = {"alone": "one rank alone", "ranks": f"{self.ranks} gloo ranks"}.get(
            self.place, f"one rank of {self.ranks}"
        )
        return f"{self.layers}×{self.width}, batch {self.batch} of {size}{times}, {recomputed}, {where}"


LARGE = PRESETS["1.4b"]
ROWS = {
    **{
        name: Row.of(*GPTS[name], variants=(*SHARDED, FLOORS[1], OWN))
        for name in ("1.4B, batch 16", "1.4B, batch 2", "0.2B (48×512), batch 2", "7.6B, batch 4")
    },
    "1.4B, batch 16, alone": Row.of(
        LARGE, 16, place="alone", ranks=1, variants=("floor", "plain", *REPLICATED[1:], KEPT)
    ),
    "1.4B, sequence 4096, batch 4": Row.of(LARGE, 4, sequence=4096, variants=(*SHARDED, FLOORS[1], OWN)),
    "1.4B, batch 2, accumulated 8 times": Row.of(LARGE, 2, accumulate=8, variants=(*SHARDED, *ACCUMULATED)),
    "experts (12×1024, 8 each), batch 8": Row("experts", layers=12, width=1024, batch=8, recomputed=False),
    "convolutions (100×64), batch 32": Row(
        "convolutions", layers=100, width=64, batch=32, sequence=56, recomputed=False, variants=(*SHARDED, KEPT)
    ),
    "LoRA on 1.4B, batch 8": Row.of(LARGE, 8, model="lora"),
    "32×64, batch 2": Row.of(GPTPreset(32, 4, 64, context=16, vocabulary=256), 2, recomputed=False),  # for a CPU
    "tiny": Row.of(TINY, 2, ranks=8),
}
ON_CPU = ("32×64, batch 2",)
ON_GPU = tuple(name for name in ROWS if name not in (*ON_CPU, "tiny"))
