"""Step time and memory of stage 3 as one rank of many, beside FSDP2 and the bare forward and backward.

    python benchmarks/stage3.py                       # the four rows on a GPU, three repeats, interleaved
    python benchmarks/stage3.py --rows tiny --device cpu --steps 3 --repeats 1

Each run is a process of its own on the fake backend: true memory, compute and host overhead of one rank of `--world`,
no data on a wire. bf16 parameters with fp32 master weights, fused AdamW, activation checkpointing of every block.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.models.gpt import GPT, GPTConfig

ROWS: dict[str, tuple[dict[str, int], int]] = {  # name → (sizes, batch)
    "1.4B, batch 16": ({"layers": 24, "width": 2048, "heads": 16}, 16),
    "1.4B, batch 2": ({"layers": 24, "width": 2048, "heads": 16}, 2),
    "0.2B (48×512), batch 2": ({"layers": 48, "width": 512, "heads": 8}, 2),
    "7.6B, batch 4": ({"layers": 36, "width": 4096, "heads": 32}, 4),
    "tiny": ({"layers": 4, "width": 64, "heads": 4, "vocab_size": 512, "context": 64}, 2),
}
VARIANTS = ("floor", "fsdp2", "zeroshard")


def build_floor(config: GPTConfig, device: torch.device, world: int) -> tuple[nn.Module, None]:
    """The unsharded bf16 model, without optimizer: what forward and backward alone take."""
    with device:
        return GPT(config).bfloat16(), None


def build_fsdp2(config: GPTConfig, device: torch.device, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2 as its documentation applies it: every block, then the root, bf16 compute and reduction."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with torch.device("meta"):
        model = GPT(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.02)  # type: ignore[attr-defined]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def build_zeroshard(config: GPTConfig, device: torch.device, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Stage 3 as a user applies it."""
    from torch.distributed.device_mesh import init_device_mesh

    import zeroshard

    with torch.device("meta"):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mesh = init_device_mesh(device.type, (world,))
    return zeroshard.shard(model, optimizer, stage=3, precision="bf16", mesh=mesh)


def measure(row: str, variant: str, device: torch.device, world: int, steps: int) -> dict[str, Any]:
    """Run one variant of one row in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    sizes, batch = ROWS[row]
    config = GPTConfig(**{"vocab_size": 50304, "context": 1024, "checkpoint": True, **sizes})  # type: ignore[arg-type]
    torch.manual_seed(0)
    model, optimizer = globals()[f"build_{variant}"](config, device, world)
    tokens = torch.randint(config.vocab_size, (batch, config.context), device=device)
    on_gpu = device.type == "cuda"
    synchronise = torch.cuda.synchronize if on_gpu else partial(int)

    def step() -> None:
        model(tokens, tokens).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.zero_grad()

    for _ in range(3):
        step()
    synchronise()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, host = [], []
    for _ in range(steps):
        start, busy = time.perf_counter(), time.process_time()
        step()
        host.append(time.process_time() - busy)
        synchronise()
        seconds.append(time.perf_counter() - start)
    result = {
        "row": row,
        "variant": variant,
        "ms": 1e3 * statistics.median(seconds),
        "host_ms": 1e3 * statistics.median(host),
    }
    if on_gpu:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    dist.destroy_process_group()
    return result


def main() -> None:
    """Run all variants of all rows, interleaved, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[row for row in ROWS if row != "tiny"], choices=list(ROWS))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write all results as JSON lines")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, torch.device(options.device), options.world, options.steps)))
        return
    results = []
    for row in options.rows:
        for _ in range(options.repeats):
            for variant in options.variants:
                command = [sys.executable, __file__, "--one", row, variant, "--device", options.device]
                command += ["--world", str(options.world), "--steps", str(options.steps)]
                run = subprocess.run(command, capture_output=True, text=True, env=os.environ)
                if run.returncode:
                    print(f"{row}, {variant} failed:\n{run.stderr[-3000:]}", file=sys.stderr)
                    continue
                results.append(json.loads(run.stdout.splitlines()[-1]))
    if options.output:
        options.output.write_text("".join(json.dumps(result) + "\n" for result in results))
    print(f"one rank of {options.world}, {torch.__version__}, {_machine(options.device)}")
    heads = "".join(f"{head:>9}" for head in ("ms/step", "spread", "× floor", "host ms", "peak GB", "reserved"))
    print(f"{'row':<26}{'variant':<12}{heads}")
    for row in options.rows:
        floor = _median(results, row, "floor", "ms")
        for variant in options.variants:
            times = [r["ms"] for r in results if r["row"] == row and r["variant"] == variant]
            if times:
                ms = statistics.median(times)
                cells = [_median(results, row, variant, key) for key in ("host_ms", "peak_gb", "reserved_gb")]
                print(
                    f"{row:<26}{variant:<12}{ms:>9.1f}{max(times) - min(times):>9.1f}{ms / floor:>9.3f}"
                    f"{cells[0]:>9.1f}{cells[1]:>9.2f}{cells[2]:>9.2f}"
                )


def _median(results: list[dict[str, Any]], row: str, variant: str, key: str) -> float:
    values = [r[key] for r in results if r["row"] == row and r["variant"] == variant and key in r]
    return statistics.median(values) if values else float("nan")


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


if __name__ == "__main__":
    main()
