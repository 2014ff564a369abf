"""Stages 1, 2 and 3, and stage 3 with collectives in 8 bits, on real ranks that share a GPU, and as predicted.

    python -m benchmarks sockets --wire                                  # GPT of 162M in bf16 on 2 and on 4 ranks
    python -m benchmarks sockets --wire --size 1.4b --ranks 2
    python -m benchmarks sockets --wire --tiny --device cpu

A step's time is the median, on the slowest rank. The prediction (`harness/shared_gpu.py`) is made of what is measured
without a step: the time of a forward and backward of all ranks at once without communication, and the times of
collectives of each kind, of two sizes: those of the blocks of both models.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from benchmarks.harness.record import Result, failure, ratio
from benchmarks.harness.shared_gpu import SharedDevice, trace_gpt
from benchmarks.harness.trials import Trials
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import Strategy
from zeroshard.planner.calibration.node_rates import fit_link
from zeroshard.planner.machines.machine import Link

SHAPES = {
    "150m": {"vocab_size": 50304, "context": 256, "layers": 12, "heads": 12, "width": 768},
    "1.4b": {"vocab_size": 50304, "context": 256, "layers": 24, "heads": 16, "width": 2048},
}
STEPS = {"150m": (3, 7), "1.4b": (1, 3)}  # that do not count, and that do
TINY_SHAPE, TINY_STEPS = {"vocab_size": 256, "context": 16, "layers": 2, "heads": 2, "width": 16}, (1, 1)
ROWS = 4  # sequences of a rank
REPEATS, SERIES = 5, 8  # of a series of collectives; collectives of a series
VARIANTS = {
    "stage 1": Strategy(stage=1, micro_batch=ROWS),
    "stage 2": Strategy(stage=2, micro_batch=ROWS),
    "stage 3": Strategy(stage=3, micro_batch=ROWS),
    "stage 3, int8 gathers": Strategy(stage=3, micro_batch=ROWS, gather_dtype="int8"),
    "stage 3, int8 gathers and reductions": Strategy(
        stage=3, micro_batch=ROWS, gather_dtype="int8", reduce_wire="int8"
    ),
}
# one backward a step, known from the first step on; no search for segments in the first steps
OPTIONS: dict[str, Any] = {"precision": "bf16", "backwards": 1, "defragment": False}


def train(shape: dict[str, int], steps: tuple[int, int], device: str) -> Result:
    """Measure computation, the link and all variants, one after the other, as one of several ranks."""
    config = GPTConfig(**shape)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(config.vocab_size, (ROWS, config.context), generator=generator).to(device)
    found: Result = {"parameters": config.parameters, "compute": _time_compute(config, tokens, sum(steps) + 2)}
    found["collectives"] = {nbytes: _time_collectives(nbytes, device) for nbytes in block_bytes(config)}
    found["times"], found["losses"], found["sent"] = {}, {}, {}
    for name, strategy in VARIANTS.items():
        _free_memory(tokens.device)
        times, losses, sent = _train_variant(strategy, config, tokens, steps)
        found["times"][name], found["losses"][name], found["sent"][name] = times, losses, sent
    return found


def _train_variant(
    strategy: Strategy, config: GPTConfig, tokens: torch.Tensor, steps: tuple[int, int]
) -> tuple[list[float], list[float], int]:
    """Return the seconds of steps, this rank's losses, and the bytes of a step's collectives."""
    torch.manual_seed(0)
    with tokens.device:
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sharded, stepper = zeroshard.shard(model, optimizer, **strategy.shard_options, **OPTIONS)
    losses: list[float] = []

    def step() -> None:
        loss = sharded(tokens, tokens)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss)

    warmup, counted = steps
    times = [_slowest(step, tokens.device) for _ in range(warmup + counted)][warmup:]
    sent = sum(traffic.bytes for traffic in zeroshard.report(sharded).collectives.values())
    values = [float(loss) for loss in losses]
    return times, values, sent


def _free_memory(device: torch.device) -> None:
    """Return the memory of what was measured before: ranks share the device's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def block_bytes(config: GPTConfig) -> list[int]:
    """Return the sizes of collectives that are timed: of a block of each model, in bf16."""
    widths = {shape["width"] for shape in SHAPES.values()}
    return [24 * width**2 for width in sorted(widths if config.width in widths else {config.width, 2 * config.width})]


def _time_compute(config: GPTConfig, tokens: torch.Tensor, steps: int) -> float:
    """Return the median seconds of a forward and backward without communication, of all ranks at once."""
    with tokens.device:
        model = GPT(config).to(torch.bfloat16)

    def compute() -> None:
        model(tokens, tokens).backward()
        model.zero_grad()

    return statistics.median([_slowest(compute, tokens.device) for _ in range(steps)][2:])


def _gather(sent: torch.Tensor, received: torch.Tensor) -> None:
    part = sent.numel() // dist.get_world_size()
    dist.all_gather_into_tensor(received, sent[:part])


def _reduce_scatter(sent: torch.Tensor, received: torch.Tensor) -> None:
    if not sent.is_cuda:  # gloo: as zeroshard reduces
        _all_to_all(sent, received)
        return
    part = sent.numel() // dist.get_world_size()
    dist.reduce_scatter_tensor(received[:part], sent)


def _all_to_all(sent: torch.Tensor, received: torch.Tensor) -> None:
    dist.all_to_all_single(received, sent)


COLLECTIVES = {"all-gather": _gather, "reduce-scatter": _reduce_scatter, "all-to-all": _all_to_all}


def _time_collectives(nbytes: int, device: str) -> dict[str, float]:
    """Return the seconds of a collective of ``nbytes`` in bf16, by its kind; of a series, as in a step.

    Before a single collective, ranks that share a GPU would wait for their turn.
    """
    ranks = dist.get_world_size()
    sent = torch.zeros(nbytes // 2 // ranks * ranks, dtype=torch.bfloat16, device=device)
    received = torch.empty_like(sent)

    def seconds(kind: str) -> float:
        def run() -> None:
            for _ in range(SERIES):
                COLLECTIVES[kind](sent, received)

        return statistics.median([_slowest(run, sent.device) for _ in range(REPEATS + 2)][2:]) / SERIES

    return {kind: seconds(kind) for kind in COLLECTIVES}


def fit_links(times: dict[int, dict[str, float]], ranks: int) -> dict[str, Link]:
    """Return rate and latency of the link, for each kind of collective, from the times of two sizes.

    >>> fit_links({10: {"all-gather": 5.0}, 20: {"all-gather": 7.0}}, ranks=2)
    {'all-gather': Link(bandwidth=2.5, latency=3.0)}
    """
    (small, first), (large, second) = sorted(times.items())
    return {kind: fit_link(ranks, (small, first[kind]), (large, second[kind])) for kind in first}


def _slowest(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that a function takes on the slowest rank."""
    _synchronize(device)
    dist.barrier()
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    seconds = torch.tensor([time.perf_counter() - begin], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(chosen: argparse.Namespace, measure: Callable[..., Result]) -> None:
    """Run all sizes and numbers of ranks, and print a table for each."""
    trials = Trials("sockets", measure, chosen, device=chosen.device, is_wire=True)
    for size in chosen.size:
        shape, steps = (TINY_SHAPE, TINY_STEPS) if chosen.tiny else (SHAPES[size], STEPS[size])
        for ranks in chosen.ranks or (2, 4):
            show(trials.run(ranks=ranks, shape=shape, steps=steps), trials, size)


def show(result: Result, trials: Trials, size: str) -> None:
    """Print a row for each variant: measured, predicted, and what it sends."""
    heads = ("variant", "ms a step", "least", "of stage 3", "predicted", "error, %", "GB a step", "last loss")
    name, table = f"{size} on {result['ranks']} ranks", []
    if "times" not in result:
        trials.show(name, heads, [[failure(result), *7 * [None]]])
        return
    device = "cpu" if result["device"] == "cpu" else torch.cuda.get_device_name()
    times = {int(nbytes): seconds for nbytes, seconds in result["collectives"].items()}
    shared = SharedDevice(result["ranks"], device, result["compute"], fit_links(times, result["ranks"]))
    rates = (
        f"{kind} {1e-9 * link.bandwidth:.2f} GB/s, {1e3 * link.latency:.1f} ms" for kind, link in shared.links.items()
    )
    print(f"\n{name}: forward and backward {1e3 * shared.compute_seconds:.1f} ms; {'; '.join(rates)}")
    medians = {name: 1e3 * statistics.median(times) for name, times in result["times"].items()}
    traced = trace_gpt(GPTConfig(**result["shape"]), **OPTIONS)
    for variant, median in medians.items():
        predicted = shared.predict(traced, VARIANTS[variant])
        ms = 1e3 * predicted.step
        result.setdefault("predicted", {})[variant] = asdict(predicted)
        least, sent = 1e3 * min(result["times"][variant]), result["sent"][variant] / 1e9
        gain, error = ratio(median, medians["stage 3"]), 100 * (ms / median - 1)
        table.append([variant, median, least, gain, ms, error, sent, result["losses"][variant][-1]])
    trials.show(name, heads, table)
