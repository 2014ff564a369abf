"""Stages 0 and 1 beside DDP and torch's ZeroRedundancyOptimizer, on real ranks that share a GPU.

    python -m benchmarks sockets                  # 2 NCCL ranks on one GPU: GPT of 162M in fp32
    python -m benchmarks sockets --tiny --device cpu
    python -m benchmarks sockets --wire           # instead: stages 1 to 3 in bf16, and 8-bit collectives (`wire.py`)

Data goes through loopback sockets, so a step is mostly communication: what is not overlapped with backward shows. All
variants live in the same processes and take turns, a few steps at a time; a step's time is that of the slowest rank.
*In step* is `Config(backwards=0)`: gradients are reduced by `step()`. The other rows learn when to reduce in backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from benchmarks.harness.ranks import default_backend, run_ranks
from benchmarks.harness.record import Result, failure, ratio
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.suites import wire
from zeroshard.models import GPT, GPTConfig

SHAPE = {"vocab_size": 50304, "context": 256, "layers": 12, "heads": 12, "width": 768}
TINY = {"vocab_size": 256, "context": 16, "layers": 2, "heads": 2, "width": 16}
ROWS, WARMUP, TURN = 4, 4, 3  # sequences of a rank; steps that do not count; steps of a turn
COMPARED = {"zeroshard 0": "DDP", "zeroshard 1": "DDP + ZeroRedundancyOptimizer"}  # by the beginning of the name


def _ddp(model: nn.Module, make: Callable[..., Any]) -> tuple[Any, Any]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, make(wrapped.parameters())


def _sharded(stage: int, model: nn.Module, make: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    return zeroshard.shard(model, make(model.parameters()), stage=stage, **options)


def _redundancy(model: nn.Module, make: partial[Any]) -> tuple[Any, Any]:
    return _ddp(model, partial(ZeroRedundancyOptimizer, optimizer_class=make.func, **make.keywords))


VARIANTS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "DDP": _ddp,
    "zeroshard 0": partial(_sharded, 0),
    "zeroshard 0, in step": partial(_sharded, 0, backwards=0),
    "DDP + ZeroRedundancyOptimizer": _redundancy,
    "zeroshard 1": partial(_sharded, 1),
    "zeroshard 1, in step": partial(_sharded, 1, backwards=0),
}


def train(shape: dict[str, int], device: str, turns: int) -> Result:
    """Train all variants in turns, as one of several ranks; return their times and losses."""
    config = GPTConfig(**shape)  # type: ignore[arg-type]
    make = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    made = {}
    for name, wrap in VARIANTS.items():
        torch.manual_seed(0)
        with torch.device(device):
            made[name] = wrap(GPT(config), make)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(config.vocab_size, (ROWS, config.context), generator=generator).to(device)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(turns + 1):
        for name, (model, optimizer) in made.items():
            for _ in range(TURN if turn else WARMUP):
                seconds, loss = _time_step(model, optimizer, tokens)
                losses[name].append(loss)
                if turn:
                    times[name].append(seconds)
    return {"times": times, "losses": losses, "parameters": config.parameters}


def _time_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a step on the slowest rank, and this rank's loss."""
    dist.barrier()
    _synchronize(tokens.device)
    begin = time.perf_counter()
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    _synchronize(tokens.device)
    seconds = torch.tensor([time.perf_counter() - begin], device=tokens.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), loss.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(ranks: int, device: str, is_wire: bool = False, **given: Any) -> Result:
    """Train in processes of their own."""
    function = wire.train if is_wire else train
    return run_ranks(function, ranks, default_backend(device), device=device, **given)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all variants and print a table."""
    parser = make_parser(__doc__, timeout=600.0)
    parser.add_argument("--ranks", type=int, nargs="+", help="(default: 2; with --wire 2 and 4)")
    parser.add_argument("--wire", action="store_true", help="stages 1 to 3 in bf16, and collectives in 8 bits")
    parser.add_argument("--size", nargs="+", choices=list(wire.SHAPES), default=["150m"], help="with --wire")
    parser.add_argument("--turns", type=int, help=f"of {TURN} steps each (default: 12)")
    chosen = parser.parse_args(argv)
    if chosen.wire:
        wire.main(chosen, measure)
        return
    trials = Trials("sockets", measure, chosen, device=chosen.device)
    turns = chosen.turns or (2 if chosen.tiny else 12)
    for ranks in chosen.ranks or (2,):
        show(trials.run(ranks=ranks, shape=TINY if chosen.tiny else SHAPE, turns=turns), trials)


def show(result: Result, trials: Trials) -> None:
    """Print a row for each variant."""
    medians = {name: 1e3 * statistics.median(times) for name, times in result.get("times", {}).items()}
    table = []
    for name, median in medians.items():
        base = medians[COMPARED.get(name.partition(",")[0], name)]
        losses = result["losses"][name]
        table.append([name, median, 1e3 * min(result["times"][name]), ratio(median, base), losses[0], losses[-1]])
    heads = ("variant", "ms a step", "least", "of torch's", "first loss", "last loss")
    trials.show("sockets", heads, table or [[failure(result), *5 * [None]]])
