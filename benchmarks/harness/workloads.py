"""Workloads: a model with its shape and data that all libraries train, and the models that are not plain GPTs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.models import GPT, PRESETS, GPTConfig, GPTPreset

STD = 0.02  # of values that are drawn
SHARDED = ("floor", "FSDP2", "DeepSpeed 3", "zeroshard 3")
STAGES = tuple(f"zeroshard {stage}" for stage in range(4))
REPLICATED = ("floor", "DDP", "FSDP2", "DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3", *STAGES)
ACCUMULATED = ("FSDP2, reducing every time", "zeroshard 3, no_sync")
OWN = "zeroshard 3, own recomputation"
KEPT = "zeroshard 3, 16 bits kept"
FLOORS = ("floor", "floor, own recomputation")


@dataclass(frozen=True)
class Workload:
    """What is trained, where it runs, and the variants that make sense there."""

    model: str = "gpt"  # or "frugal gpt", "lora", "llama", "experts", "convolutions"
    layers: int = 24
    heads: int = 16
    width: int = 2048
    batch: int = 16  # sequences or images a rank, in each forward
    sequence: int = 1024  # tokens; for images, a quarter of their side
    vocabulary: int = 50304
    accumulate: int = 1  # forwards and backwards a step
    recomputed: bool = True  # every block, in backward
    pieces: int = 1  # parameters that the weight of each linear layer of a block is split into
    place: str = "one of many"  # other ranks do not exist; "alone": NCCL, or gloo on a CPU; "ranks": gloo processes
    ranks: int = 64
    variants: tuple[str, ...] = SHARDED

    @classmethod
    def gpt(cls, shape: GPTPreset, batch: int, **changes: object) -> Workload:
        given = {"layers": shape.layers, "heads": shape.heads, "width": shape.width, "sequence": shape.context}
        return cls(**{**given, "vocabulary": shape.vocabulary, "batch": batch, **changes})  # type: ignore[arg-type]

    @property
    def tiny(self) -> Self:
        """The same at a size that a CPU trains in no time."""
        shape = {"layers": 2, "heads": 4, "width": 32, "batch": 2, "sequence": 16, "vocabulary": 64}
        return replace(self, **shape, accumulate=min(self.accumulate, 2), ranks=min(self.ranks, 8))  # type: ignore[arg-type]

    def over(self, ranks: int) -> Workload:
        """Return the same for real processes, with the variants that make sense there."""
        extra = tuple(name for name in self.variants if name in (*ACCUMULATED, FLOORS[1], OWN, KEPT))
        return replace(self, place="ranks", ranks=ranks, variants=(*REPLICATED, *extra))

    @property
    def item(self) -> str:
        return "images" if self.model == "convolutions" else "tokens"

    @property
    def items(self) -> int:
        """Tokens, or images, in a step of one rank."""
        return self.batch * self.accumulate * (1 if self.item == "images" else self.sequence)

    @property
    def config(self) -> GPTConfig:
        shape = {"layers": self.layers, "heads": self.heads, "width": self.width, "context": self.sequence}
        return GPTConfig(vocab_size=self.vocabulary, checkpoint=self.recomputed, **shape)

    def build(self) -> nn.Module:
        """Build the model on torch's current device. Its blocks are in ``blocks``, and it returns its loss."""
        if self.model == "convolutions":
            return ConvNet(self.layers, self.width)
        if self.model == "experts":
            return ExpertsModel(self.layers, self.width, self.vocabulary)
        if self.model == "frugal gpt":
            return FrugalGPT(self.config)
        if self.model == "llama":
            return build_llama(self)
        gpt = GPT(self.config)
        if self.model == "lora":
            return replace_linear(gpt.requires_grad_(False), Adapter)
        return replace_linear(gpt, lambda layer: SplitLinear(layer, self.pieces)) if self.pieces > 1 else gpt

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        if self.model == "convolutions":
            side = 4 * self.sequence
            labels = torch.randint(1000, (self.batch,), device=device)
            return torch.randn(self.batch, 3, side, side, device=device), labels
        tokens = torch.randint(self.vocabulary, (self.batch, self.sequence), device=device)
        return (tokens,) if self.model == "experts" else (tokens, tokens)


class FrugalGPT(GPT):
    """The reference GPT with its loss computed one sequence at a time, and again in backward.

    The logits of a batch are 50304 numbers a token, several times over: more than all that is kept for the blocks.
    """

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpoint else block(x)
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        losses = [checkpoint(self._loss, *pair, use_reentrant=False) for pair in zip(x, targets, strict=True)]
        return torch.stack(losses).mean()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets)


def build_llama(work: Workload) -> nn.Module:
    """Build Hugging Face's Llama so that it is called with tokens and targets, and returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = super().forward(input_ids=tokens, labels=targets, use_cache=False).loss
            return loss

    config = LlamaConfig(
        vocab_size=work.vocabulary,
        num_hidden_layers=work.layers,
        hidden_size=work.width,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads // 4,
        intermediate_size=11 * work.width // 4,
        max_position_embeddings=work.sequence,
    )
    return Llama(config)


class Residual(nn.Sequential):
    """Two convolutions with a norm, added to their input."""

    def __init__(self, width: int) -> None:
        first, second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        super().__init__(first, nn.GroupNorm(8, width), nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class ConvNet(nn.Module):
    """Residual blocks between a convolution and a linear layer."""

    def __init__(self, layers: int, width: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class Experts(nn.Module):
    """A block whose tokens go to the best two of eight experts; each expert takes an equal share of them."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(STD * torch.randn(experts, width, 4 * width))
        self.down = nn.Parameter(STD * torch.randn(experts, 4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        share = -(-2 * tokens.shape[0] // scores.shape[1])
        weights, chosen = scores.t().topk(share)  # (experts, share): the tokens with the highest scores
        taken = torch.bmm(F.gelu(torch.bmm(tokens[chosen], self.up)), self.down) * weights.unsqueeze(-1)
        return x + torch.zeros_like(tokens).index_add(0, chosen.flatten(), taken.flatten(0, 1)).view_as(x)


class ExpertsModel(nn.Module):
    """Blocks of experts between an embedding and a head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Experts(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Adapter(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(STD * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return y


class SplitLinear(nn.Module):
    """A linear layer whose weight is split by rows into several parameters."""

    def __init__(self, base: nn.Linear, pieces: int) -> None:
        super().__init__()
        self.bias = base.bias
        parts = base.weight.detach().tensor_split(pieces)
        self.weights = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat(list(self.weights)), self.bias)


def replace_linear(model: GPT, new: Callable[[nn.Linear], nn.Module]) -> GPT:
    """Replace every linear layer of a GPT's blocks."""
    for block in model.blocks:
        for module in (block.attention, block.mlp):
            for name, child in list(module.named_children()):
                setattr(module, name, new(child))
    return model


LARGE = PRESETS["1.4b"]
WITH_OWN = (*SHARDED, FLOORS[1], OWN)
WORKLOADS = {
    "1.4B, batch 16": Workload.gpt(LARGE, 16, variants=WITH_OWN),
    "1.4B, batch 2": Workload.gpt(LARGE, 2, variants=WITH_OWN),
    "0.2B (48×512), batch 2": Workload.gpt(GPTPreset(layers=48, heads=8, width=512), 2, variants=WITH_OWN),
    "7.6B, batch 4": Workload.gpt(PRESETS["7.6b"], 4, variants=WITH_OWN),
    "1.4B, batch 16, alone": Workload.gpt(
        LARGE, 16, place="alone", ranks=1, variants=("floor", "plain", *REPLICATED[1:], KEPT)
    ),
    "1.4B, sequence 4096, batch 4": Workload.gpt(LARGE, 4, sequence=4096, variants=WITH_OWN),
    "1.4B, batch 2, accumulated 8 times": Workload.gpt(LARGE, 2, accumulate=8, variants=(*SHARDED, *ACCUMULATED)),
    "experts (12×1024, 8 each), batch 8": Workload("experts", layers=12, width=1024, batch=8, recomputed=False),
    "convolutions (100×64), batch 32": Workload(
        "convolutions", layers=100, width=64, batch=32, sequence=56, recomputed=False, variants=(*SHARDED, KEPT)
    ),
    "LoRA on 1.4B, batch 8": Workload.gpt(LARGE, 8, model="lora"),
    "32×64, batch 2": Workload.gpt(GPTPreset(32, 4, 64, context=16, vocabulary=256), 2, recomputed=False),  # for a CPU
    "tiny": Workload(layers=2, heads=16, width=64, batch=2, sequence=16, vocabulary=64, ranks=8),
}
ON_CPU = ("32×64, batch 2",)
ON_GPU = tuple(name for name in WORKLOADS if name not in (*ON_CPU, "tiny"))
GPTS = (*list(WORKLOADS)[:4], "tiny")  # what suites on memory and offload choose from
