"""torchtitan's Llama 3.1 8B as one rank of 8: zeroshard and FSDP2 in turns, and the figures that torchtitan published.

Sequences of 8192 tokens, 2 a rank, selective recomputation, bf16 with gradients reduced in fp32, fused AdamW, as in
torchtitan's configuration; eager, and with every block compiled. The other 7 ranks do not exist and nothing is sent:
memory, compute and the work of the host are real, the wire is not. FLOP are counted as torchtitan does: 6 for each
parameter that is not an embedding, and attention without its mask; nothing for what is recomputed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.harness.collectives import ECHO
from benchmarks.harness.record import Result, failure, median, ratio
from benchmarks.harness.training import Memory, measure_steps, one_rank
from benchmarks.harness.trials import Trials
from benchmarks.harness.variants import Job, Loop, floor, fsdp2, ours
from benchmarks.harness.workloads import Workload

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten._scaled_mm.default}  # of linear layers, in bf16 and in float8
SAVED = {  # what selective recomputation keeps; of products only every second one
    *PRODUCTS,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
GiB = 2**30
RANKS, ROPE_BASE, NORM_EPS = 8, 500_000.0, 1e-5
VARIANTS: dict[str, Callable[[Job], Loop]] = {
    "floor": floor,
    "FSDP2": partial(fsdp2, reduce_dtype=torch.float32),
    "zeroshard 3": partial(ours, reduce_dtype="fp32"),
}
PUBLISHED = {False: (5762, 82.4), True: (6667, 77.0)}  # by compiled: tokens/s, GiB; torchtitan, December 2024, Table 1
PUBLISHER = "torchtitan, 8 × H100 of 500 W, with the wire"


def selective_contexts() -> Any:
    """Return the contexts of `checkpoint` that keep attention and every second product, and recompute the rest."""
    products = {False: 0, True: 0}  # so far, in forward and when recomputing

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@dataclass(frozen=True)
class LlamaShape(Workload):
    """Llama 3.1 8B, as torchtitan trains it."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 4096
    inner: int = 14336
    vocabulary: int = 128256
    sequence: int = 8192
    batch: int = 2
    ranks: int = RANKS
    compiled: bool = False

    def build(self) -> nn.Module:
        return Llama(self)

    @property
    def flops_per_token(self) -> float:
        attended = 12 * self.layers * self.width * self.sequence
        head_width = self.width // self.heads
        attention = 2 * self.width * (self.width + self.kv_heads * head_width)
        block = attention + 3 * self.width * self.inner + 2 * self.width
        return 6 * (self.layers * block + self.width + self.vocabulary * self.width) + attended


TINY = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "inner": 48, "vocabulary": 64, "sequence": 16}


class Attention(nn.Module):
    """Causal attention with rotary positions, in which several query heads share a key and a value."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width, self.groups = shape.width // shape.heads, shape.heads // shape.kv_heads
        few = shape.kv_heads * self.head_width
        self.query, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, few, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_width)) for layer in layers)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        key, value = (tensor.repeat_interleave(self.groups, 2) for tensor in (key, value))
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
    return turned.flatten(-2).to(x.dtype)


class Block(nn.Module):
    """Attention and a gated MLP, recomputed in part."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention, self.recomputed = Attention(shape), shape.recomputed
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(shape.width, NORM_EPS) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self.recomputed:
            return self._compute(x, cos, sin)
        given = {"use_reentrant": False, "context_fn": selective_contexts, "preserve_rng_state": False}
        y: Tensor = checkpoint(self._compute, x, cos, sin, **given)
        return y

    def _compute(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        y = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return y


class Llama(nn.Module):
    """The decoder, which returns its loss."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        blocks: list[Any] = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.ModuleList(
            torch.compile(block, fullgraph=True) if shape.compiled else block for block in blocks
        )
        self.norm = nn.RMSNorm(shape.width, NORM_EPS)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._head_width = shape.width // shape.heads

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        given = {"device": tokens.device, "dtype": torch.float32}
        rates = ROPE_BASE ** -(torch.arange(0, self._head_width, 2, **given) / self._head_width)
        angles = torch.outer(torch.arange(tokens.shape[1], **given), rates).unsqueeze(1)
        x, cos, sin = self.tokens(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def choose(compiled: bool, tiny: bool) -> LlamaShape:
    """Return the shape to run."""
    return LlamaShape(compiled=compiled, **(TINY if tiny else {}))


def measure(variant: str, compiled: bool, device: str, steps: int, warmup: int, tiny: bool) -> Result:
    """Train with one variant, as the only process."""
    work = choose(compiled, tiny)
    with one_rank(device, (RANKS,), backend=ECHO) as mesh, Memory(device) as memory:
        found = measure_steps(VARIANTS[variant](Job(work, device, mesh)), memory, warmup, steps)
    if not all(map(math.isfinite, found["losses"])):
        found["error"] = f"losses are not finite, and then products are cheaper: {found['losses']}"
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen on the command line."""
    parser.add_argument("--steps", type=int, default=5, help="that are measured (default: 5)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before (default: 6)")
    parser.add_argument("--repeats", type=int, default=1, help="of every variant, in turns (default: 1)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--only", choices=("eager", "compiled"), help="(default: both)")


def run(chosen: argparse.Namespace) -> None:
    """Run all variants, eager and compiled."""
    given = {"steps": chosen.steps, "warmup": chosen.warmup, "tiny": chosen.tiny}
    trials = Trials("evidence", measure, chosen, device=chosen.device, **given)
    kinds = {"eager": (False,), "compiled": (True,)}.get(chosen.only, (False, True))
    notes = {compiled: trials.run_variants(chosen.variants, chosen.repeats, compiled=compiled) for compiled in kinds}
    show(trials, notes, chosen.tiny)


def show(trials: Trials, notes: dict[bool, dict[str, str]], tiny: bool) -> None:
    """Print a table, with what was published."""
    shape, table = choose(False, tiny), []
    for compiled, variants in notes.items():
        words = "compiled" if compiled else "eager"
        found = {name: trials.matching(variant=name, compiled=compiled) for name in variants}
        base = median(found.get("FSDP2", []), "ms")
        for name, runs in found.items():
            ms = median(runs, "ms")
            figures = _figures(ratio(1e3 * shape.items, ms), shape, [median(runs, key) for key in MEMORY])
            losses = [run["loss"] for run in runs if run.get("loss") is not None]
            note = variants[name] or next((failure(run) for run in runs if failure(run)), "")
            table.append([name, words, ms, ratio(ms, base), *figures, losses[-1] if losses else None, note])
        tokens, gib = PUBLISHED[compiled]
        figures = _figures(float(tokens), LlamaShape(), [None, gib * GiB])
        table.append(["FSDP2, published", words, None, None, *figures, None, PUBLISHER])
    heads = ("variant", "", "ms a step", "of FSDP2's", "tokens/s", "TFLOP/s", "allocated GiB", "reserved GiB", "loss")
    print("\nno wire: one rank of 8, the others do not exist")
    trials.show("llama", (*heads, "note"), table)


MEMORY = ("allocated", "reserved")


def _figures(tokens: float | None, shape: LlamaShape, nbytes: Sequence[float | None]) -> list[Any]:
    speed = None if tokens is None else tokens * shape.flops_per_token / 1e12
    return [tokens, speed, *(ratio(value, GiB) for value in nbytes)]
