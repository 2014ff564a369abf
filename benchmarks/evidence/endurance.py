"""Endurance: thousands of steps of stage 3 on two ranks, saved asynchronously now and then; nothing may grow.

Counted on each rank every hundredth part of the run: what the device's allocator has allocated and reserved, this
process's resident memory, its threads and its open files. The slope is that of the second half of the run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from benchmarks.evidence import COUNTED
from benchmarks.harness.ranks import default_backend, run_ranks
from benchmarks.harness.record import Result, failure
from benchmarks.harness.trials import Trials
from benchmarks.harness.variants import precision
from benchmarks.suites.scaling import fit_line

KINDS: dict[str, dict[str, Any]] = {"stage 3": {}, "stage 3, states on the host": {"offload": "host"}}
RANKS, SAMPLES, SAVES = 2, 100, 20
UNITS, ROWS = 2, 64  # few collectives: between ranks that share a GPU each takes milliseconds
WIDTH, TINY_WIDTH = 512, 64


def sample(device: str) -> Result:
    """Count what this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    on_device = {"allocated": 0.0, "reserved": 0.0}
    if device == "cuda":
        torch.cuda.synchronize()
        on_device = {"allocated": torch.cuda.memory_allocated() / 1e6, "reserved": torch.cuda.memory_reserved() / 1e6}
    counts = {"threads": int(status["Threads"]), "files": len(os.listdir("/proc/self/fd"))}
    return {**on_device, "resident": int(status["VmRSS"].split()[0]) * 1024 / 1e6, **counts}


def train(kind: str, device: str, steps: int, width: int, folder: str) -> Result:
    """Train as one of several ranks; return what each rank held."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(device):
        wide = 4 * width
        parts = (nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)) for _ in range(UNITS))
        model = nn.Sequential(*parts)
    given = {"stage": 3, "precision": precision(device), "units": ("0", "1"), **KINDS[kind]}
    sharded, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), **given)
    draws = torch.Generator(device).manual_seed(1 + dist.get_rank())
    save, samples, begin = None, [], time.perf_counter()
    every, save_every = max(1, steps // SAMPLES), max(10, steps // SAVES)
    for step in range(1, steps + 1):
        rows = torch.randn(ROWS, width, generator=draws, device=device)
        sharded(rows).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            if save is not None:
                save.wait()
            samples.append({"step": step, **sample(device)})
        if step % save_every == 0:
            save = zeroshard.save(f"{folder}/step-{step}", sharded, optimizer, keep=2, wait=False)
    if save is not None:
        save.wait()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, samples)
    return {"samples": found, "step_ms": 1e3 * (time.perf_counter() - begin) / steps}


def measure(kind: str, device: str, steps: int, width: int) -> Result:
    """Train in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"kind": kind, "device": device, "steps": steps, "width": width, "folder": folder}
        return run_ranks(train, RANKS, default_backend(device), **given)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen on the command line."""
    parser.add_argument("--steps", type=int, help="of the first training (default: 10000); others do a quarter of it")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="(default: all)")


def run(chosen: argparse.Namespace) -> None:
    """Train, and print what grew."""
    steps = chosen.steps or (40 if chosen.tiny else 10_000)
    width = TINY_WIDTH if chosen.tiny else WIDTH
    trials = Trials("evidence", measure, chosen, device=chosen.device, width=width)
    table = []
    for kind in chosen.kinds:
        result = trials.run(kind=kind, steps=steps if kind == "stage 3" else max(1, steps // 4))
        for rank, samples in enumerate(result.get("samples", ())):
            for key, name in COUNTED.items():
                values = [each[key] for each in samples]
                half = [(each["step"], each[key]) for each in samples[len(samples) // 2 :]]
                line = fit_line(half)
                slope = 1000 * line.slope if line else None
                ends = [values[0], values[len(values) // 2], values[-1], max(values), slope]
                table.append([kind, rank, result["steps"], name, *ends, ""])
        if "samples" not in result:
            table.append([kind, None, result["steps"], *6 * [None], failure(result)])
    points = ("first", "half way", "last", "most", "growth in 1,000 steps, second half")
    trials.show("endurance", ("training", "rank", "steps", "", *points, "note"), table)
