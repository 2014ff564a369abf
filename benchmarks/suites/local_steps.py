"""Held-out loss of replicas that average their parameters now and then, beside one that sums gradients in every step.

    python -m benchmarks local_steps              # 4 ranks as 2 x 2 on a CPU, a small GPT on bytes of Shakespeare
    python -m benchmarks local_steps --tiny

All variants start with the same values and get the same batches: a rank's rows are the same in all. The loss is that of
the averaged parameters, since the steps of an evaluation are multiples of the local steps. *Between replicas*: what a
rank gives to collectives over the outer axis, as the report counts it (an all-reduce is twice its length), by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from benchmarks.harness.ranks import default_backend, run_ranks
from benchmarks.harness.record import Result, failure
from benchmarks.harness.trials import Trials, make_parser
from zeroshard.models import GPT, GPTConfig
from zeroshard.train import shakespeare

SHAPE = {"vocab_size": 256, "context": 64, "layers": 2, "heads": 4, "width": 64}
TINY = {"vocab_size": 256, "context": 16, "layers": 1, "heads": 2, "width": 16}
ROWS, HELD_OUT_ROWS = 8, 64  # sequences of a rank's batch; of an evaluation, on all ranks together
DILOCO = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "local_steps=8": {"local_steps": 8},
    "local_steps=8, outer SGD": {"local_steps": 8, "outer_optimizer": DILOCO},
    "local_steps=40": {"local_steps": 40},
    "local_steps=40, outer SGD": {"local_steps": 40, "outer_optimizer": DILOCO},
}


def train(variant: str, shape: dict[str, int], device: str, steps: int, evaluations: int) -> Result:
    """Train as one of four ranks; return the held-out losses, and the bytes between replicas by step."""
    config, rank = GPTConfig(**shape), dist.get_rank()  # type: ignore[arg-type]
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = GPT(config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, stage=3, precision="fp32", **VARIANTS[variant])
    text = torch.frombuffer(bytearray(shakespeare().encode()), dtype=torch.uint8).long()
    cut = len(text) * 9 // 10
    generator = torch.Generator().manual_seed(rank)
    losses, sent = [], 0
    for step in range(1, steps + 1):
        _loss(model, text[:cut], ROWS, generator, device).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        kinds = zeroshard.report(model).collectives
        # without the few bytes of unused parameters and norms
        found = kinds.get("replica average") if "local_steps" in VARIANTS[variant] else kinds.get("all-reduce")
        sent += found.bytes if found is not None else 0
        if step % (steps // evaluations) == 0:
            losses.append(_evaluate(model, text[cut:], device))
    return {"losses": losses, "bytes_a_step": sent / steps, "parameters": config.parameters}


def _loss(model: nn.Module, text: torch.Tensor, rows: int, generator: torch.Generator, device: str) -> torch.Tensor:
    length: int = model.config.context  # type: ignore[union-attr, assignment]
    starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
    tokens = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
    loss: torch.Tensor = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return loss


@torch.no_grad()
def _evaluate(model: nn.Module, text: torch.Tensor, device: str) -> float:
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())  # the same rows every time
    loss = _loss(model, text, HELD_OUT_ROWS // dist.get_world_size(), generator, device).float()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def measure(device: str, **given: Any) -> Result:
    """Train in four processes."""
    return run_ranks(train, 4, default_backend(device), device=device, **given)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all variants and print a table."""
    parser = make_parser(__doc__, timeout=1200.0)
    parser.set_defaults(device="cpu")
    parser.add_argument("--steps", type=int, help="a multiple of 200 (default: 400), if tiny of 16 (80)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    chosen = parser.parse_args(argv)
    trials = Trials("local_steps", measure, chosen, device=chosen.device)
    steps, evaluations = (chosen.steps or 80, 2) if chosen.tiny else (chosen.steps or 400, 5)
    table = []
    for variant in chosen.variants:
        shape = TINY if chosen.tiny else SHAPE
        found = trials.run(variant=variant, shape=shape, steps=steps, evaluations=evaluations)
        losses = found.get("losses", [failure(found)] + [None] * (evaluations - 1))
        sent = found["bytes_a_step"] / found["parameters"] if "losses" in found else None
        table.append([variant, sent, *losses])
    heads = [f"loss at {steps // evaluations * (number + 1)}" for number in range(evaluations)]
    trials.show("local steps", ["variant", "bytes between replicas, per parameter and step", *heads], table)
