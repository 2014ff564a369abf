"""Loss curves of DDP, FSDP2 and stages 0 to 3, from the same weights, on the same text, with the same optimizer."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from benchmarks.evidence import BASE, CONTROL, FEWER_BYTES
from benchmarks.evidence.page import differences
from benchmarks.harness.ranks import default_backend, run_ranks, use_deterministic_kernels
from benchmarks.harness.record import Result, failure
from benchmarks.harness.trials import Trials
from benchmarks.harness.variants import precision as default_precision
from zeroshard.models import GPT, GPTConfig
from zeroshard.train.data.corpus import shakespeare

VARIANTS = (BASE, "FSDP2", *(f"zeroshard {stage}" for stage in range(4)), CONTROL)
RANKS, RATE, CLIP = 2, 6e-4, 1.0
SHAPE = {"layers": 12, "heads": 12, "width": 768, "sequence": 256, "batch": 8}
TINY = {"layers": 2, "heads": 2, "width": 16, "sequence": 16, "batch": 2}
LAST = 100  # steps at the end over which losses are averaged
JOBS = 4  # curves at the same time: with ranks that share a GPU most of a step is waiting for the socket


class CastWeights(nn.Module):
    """Computes with bf16 copies of fp32 weights, as FSDP2's mixed precision does, for DDP.

    Autocast, which DDP is used with, chooses a dtype for each operation: other arithmetic, and so another curve.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        weights = {name: weight.bfloat16() for name, weight in self.model.named_parameters()}
        loss: Tensor = torch.func.functional_call(self.model, weights, inputs)
        return loss


def learning_rate(step: int, steps: int) -> float:
    """Return the factor of a step: a tenth of the run to rise, then half a cosine to a tenth."""
    begin = max(1, steps // 10)
    if step < begin:
        return (step + 1) / begin
    return 0.55 + 0.45 * math.cos(math.pi * (step - begin) / max(1, steps - begin))


def wrap(variant: str, model: GPT, precision: str) -> tuple[Any, Any, Callable[[], object]]:
    """Return the model, the optimizer, and what clips the gradients, as the variant does it."""
    is_mixed = precision == "bf16"
    rate = 1.01 * RATE if variant.endswith(CONTROL.removeprefix(BASE)) else RATE
    given: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if variant.startswith("zeroshard") or variant in FEWER_BYTES:
        options: dict[str, Any] = {"stage": 3, **FEWER_BYTES.get(variant, {})}
        if variant not in FEWER_BYTES:
            options = {"stage": int(variant[-1]), "reduce_dtype": "fp32"}
        options["precision"] = precision
        sharded, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), **given), **options)
        return sharded, optimizer, lambda: optimizer.clip_grad_norm_(CLIP)
    wrapped: nn.Module = CastWeights(model) if is_mixed else model
    if variant == "FSDP2":
        wrapped = model
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_mixed else None, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=policy)
    else:
        wrapped = DistributedDataParallel(wrapped, bucket_cap_mb=100)
    weights = list(wrapped.parameters())
    return wrapped, torch.optim.AdamW(weights, **given), lambda: nn.utils.clip_grad_norm_(weights, CLIP)


def train(variant: str, device: str, precision: str, steps: int, shape: dict[str, int]) -> Result:
    """Train as one of several ranks; return the loss of every step, the mean over the ranks."""
    use_deterministic_kernels()  # so that only the method can make a difference
    text = torch.frombuffer(bytearray(shakespeare(), "ascii"), dtype=torch.uint8).to(device)
    torch.manual_seed(0)
    given = {name: shape[name] for name in ("layers", "heads", "width")}
    with torch.device(device):
        model = GPT(GPTConfig(vocab_size=256, context=shape["sequence"], **given))
    parameters = model.config.parameters
    trained, optimizer, clip = wrap(variant, model, precision)
    draws = torch.Generator().manual_seed(1 + dist.get_rank())
    window = torch.arange(shape["sequence"] + 1, device=device)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses, begin = [], time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(text) - len(window), (shape["batch"], 1), generator=draws)
        tokens = text[starts.to(device) + window].long()
        loss = trained(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        clip()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses).float()
    dist.all_reduce(total)
    known = [float(f"{loss:.9g}") for loss in (total / dist.get_world_size()).tolist()]
    return {"losses": known, "parameters": parameters, "step_ms": 1e3 * (time.perf_counter() - begin) / steps}


def measure(variant: str, device: str, **given: Any) -> Result:
    """Train with one variant, in processes of their own."""
    return run_ranks(train, RANKS, default_backend(device), variant=variant, device=device, **given)


def add_options(parser: argparse.ArgumentParser, variants: Sequence[str] = VARIANTS) -> None:
    """Add what can be chosen on the command line."""
    parser.add_argument("--steps", type=int, help="of each curve (default: 1000)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="(default: bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument("--shape", type=int, nargs=5, metavar=tuple(SHAPE), help=f"(default: {[*SHAPE.values()]})")
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants, help="curves (default: all)")


def run(chosen: argparse.Namespace) -> None:
    """Train with each variant, several at the same time if wanted."""
    shape = dict(zip(SHAPE, chosen.shape, strict=True)) if chosen.shape else TINY if chosen.tiny else SHAPE
    steps = chosen.steps or (6 if chosen.tiny else 1000)
    precision = chosen.precision or default_precision(chosen.device)
    trials = Trials("evidence", measure, chosen, device=chosen.device, precision=precision, steps=steps, shape=shape)
    with ThreadPoolExecutor(chosen.jobs or JOBS) as pool:
        results = list(pool.map(lambda variant: trials.run(variant=variant), chosen.variants))
    show(results, trials)


def show(results: Sequence[Result], trials: Trials) -> None:
    """Print what each curve has to do with the first one's, DDP's or that of full precision."""
    name = BASE if any(result["variant"] in VARIANTS for result in results) else next(iter(FEWER_BYTES))
    base = next((result["losses"] for result in results if result["variant"] == name and "losses" in result), None)
    table = []
    for result in results:
        losses = result.get("losses", [])
        cells: list[Any] = [fmean(losses[-LAST:]) if losses else None, None, None, None]
        if losses and base and losses is not base:
            apart = differences(losses, base)
            equal = next((step for step, value in enumerate(apart) if value), len(apart))
            cells[1:] = [max(apart), fmean(losses[-LAST:]) - fmean(base[-LAST:]), equal]
        table.append([result["variant"], *cells, result.get("step_ms"), result["seconds"], failure(result)])
    heads = ("variant", f"loss, mean of the last {LAST}", f"largest difference from {name} in any step")
    more = ("difference of the means", "first steps with the same loss", "ms a step", "seconds", "")
    trials.show("curves", (*heads, *more), table)
