"""What each stage holds: one rank of many, the same GPT, measured.

    python benchmarks/stages.py                                        # GPT 1.4B on a GPU as 1 of 64
    python benchmarks/stages.py --model tiny --device cpu --batch 1

Each stage is a process of its own on the fake backend: true memory and compute of one rank of `--world`, no data on a
wire. bf16 with fp32 master weights, fused AdamW, activation checkpointing of every block.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.memory import predict_memory
from zeroshard.presets import PRESETS

STAGES = (0, 1, 2, 3)
STEPS = 6  # the first two make the optimizer's states and record the order; the others are timed


def measure(stage: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one stage in this process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    preset, device = PRESETS[options.model], torch.device(options.device)
    shape = {"layers": preset.layers, "heads": preset.heads, "width": preset.width}
    config = GPTConfig(vocab_size=preset.vocabulary, context=preset.context, checkpoint=True, **shape)
    with torch.device("meta"):
        gpt = GPT(config)
    predicted = predict_memory(gpt, ranks=options.world, stage=stage, precision="bf16")
    adamw = torch.optim.AdamW(gpt.parameters(), lr=1e-4, fused=True)
    mesh = init_device_mesh(device.type, (options.world,))
    model, optimizer = zeroshard.shard(gpt, adamw, stage=stage, precision="bf16", mesh=mesh)
    tokens = torch.randint(config.vocab_size, (options.batch, config.context), device=device)
    on_gpu = device.type == "cuda"
    seconds, gradients = [], 0
    for number in range(STEPS):
        if on_gpu and number == 2:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(tokens, tokens).backward()
        gradients = zeroshard.report(model).memory["gradients", "device"].now
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    report = zeroshard.report(model)
    held = {kind: nbytes.now for (kind, _), nbytes in report.memory.items()}
    kinds = ("parameters", "master weights", "optimizer states")
    states = gradients + sum(held.get(kind, 0) for kind in kinds)
    moved = sum(traffic.bytes for traffic in report.collectives.values())
    dist.destroy_process_group()
    return {
        "stage": stage,
        "parameters": config.parameters,
        "states": states,
        "predicted": predicted.at_rest,
        "held_at_peak": report.total.peak,
        "allocated_at_peak": torch.cuda.max_memory_allocated() if on_gpu else None,
        "communicated": moved,
        "ms": 1e3 * median(seconds[2:]),
    }


def main() -> None:
    """Run all stages and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.4b", choices=list(PRESETS))
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options)))
        return
    rows = []
    for stage in STAGES:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", str(stage)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"stage {stage} failed:\n{done.stderr}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    psi = rows[0]["parameters"]
    print(f"\n{psi:,} parameters, 1 of {options.world} ranks, batch {options.batch}\n")
    print("| stage | model states | of stage 0 | predicted | allocated at peak | traffic a step | ms a step |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        peak = "–" if row["allocated_at_peak"] is None else f"{row['allocated_at_peak'] / 1e9:.2f} GB"
        print(
            f"| {row['stage']} | {row['states'] / 1e9:.3f} GB | 1/{rows[0]['states'] / row['states']:.1f} "
            f"| {row['predicted'] / 1e9:.3f} GB | {peak} | {row['communicated'] / 2 / psi:.3f}Ψ | {row['ms']:.1f} |"
        )


if __name__ == "__main__":
    main()
