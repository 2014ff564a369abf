"""Step time and memory of stage 3 as one rank of many, beside FSDP2 and the bare forward and backward.

    python -m benchmarks stage3                       # the four rows on a GPU, three repeats, interleaved
    python -m benchmarks stage3 --tiny --device cpu --steps 3 --repeats 1

Each run is a process of its own on the fake backend: true memory, compute and host overhead of one rank of `--world`,
no data on a wire. bf16 parameters with fp32 master weights, fused AdamW, torch's checkpointing of every block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.rank import ROWS, Memory, Training, fsdp2_gpt, one_rank, shape_of, zeroshard_gpt
from benchmarks.record import described, machine
from benchmarks.table import Result, gigabytes, middle, ratio, spread
from benchmarks.trial import Trials, options, parsed
from zeroshard.models import GPT

VARIANTS = ("floor", "fsdp2", "zeroshard")


def measure(row: str, variant: str, device: str, world: int, steps: int) -> Result:
    """Run one variant of one row in this process. The floor is the unsharded bf16 model, without optimizer."""
    torch.manual_seed(0)
    preset, batch = ROWS[row]
    config = shape_of(preset, checkpoint=True)
    with one_rank(device, (world,)) as mesh, Memory(device) as memory:
        if variant == "floor":
            with torch.device(device):
                plain = GPT(config).bfloat16() if memory.on_gpu else GPT(config)
            return Training((plain, None), batch, memory).steady(steps=steps)
        trained = fsdp2_gpt(config, mesh) if variant == "fsdp2" else zeroshard_gpt(config, mesh, stage=3)
        return Training(trained, batch, memory).steady(steps=steps)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all variants of all rows, interleaved, and print a table."""
    parser = options(__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=[row for row in ROWS if row != "tiny"])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parsed(parser, argv)
    trials, table = Trials(__name__, chosen), []
    for row in ["tiny"] if chosen.tiny else chosen.rows:
        for _ in range(chosen.repeats):
            for variant in chosen.variants:
                trials.run(row=row, variant=variant, device=chosen.device, world=chosen.world, steps=chosen.steps)
        floor, theirs = (middle(trials.of(row=row, variant=variant), "ms") for variant in ("floor", "fsdp2"))
        for variant in chosen.variants:
            runs = trials.of(row=row, variant=variant)
            ms, host = middle(runs, "ms"), middle(runs, "host_ms")
            peaks = [gigabytes(middle(runs, key)) for key in ("allocated", "reserved")]
            table.append([row, variant, ms, spread(runs, "ms"), ratio(ms, floor), ratio(ms, theirs), host, *peaks])
    print(f"one rank of {chosen.world}, {described(machine(chosen.device))}")
    heads = ("GPT, batch", "", "ms a step", "spread", "of the floor", "of FSDP2", "host ms", "peak GB", "reserved GB")
    trials.show("stage 3", heads, table)
