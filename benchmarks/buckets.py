"""Time, memory and buffers of a step against `bucket_size`, from which its default was chosen (the paper's C_B).

    python -m benchmarks buckets                      # 1.4B and 7.6B, stages 2 and 3, 2^20 to 2^28 elements, on a GPU
    python -m benchmarks buckets --tiny --powers 10 12 --device cpu

One rank of 64 on the fake backend, bf16 over fp32 master weights, fused AdamW, every block recomputed. Each run is a
process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import zeroshard
from benchmarks.rank import ROWS, Memory, Training, one_rank, shape_of, zeroshard_gpt
from benchmarks.record import described, machine
from benchmarks.table import Result, gigabytes, ratio
from benchmarks.trial import Trials, options, parsed

STAGES = (2, 3)
POWERS = (20, 22, 24, 25, 26, 27, 28)
SECONDS = 8.0  # of steps, after which no further one begins: small buckets are slow
BUFFERS = ("buckets", "gathered", "autograd", "step")  # kinds of the report that are held only for a while
NO_WIRE = """\
The fake backend moves nothing over a wire, and one GPU has no other to send to: how much a smaller collective loses to
latency on a network is not in these figures. In them is what each collective costs the host and the device here: the
fake all-gather makes 64 small copies, so many small buckets look worse than over NCCL."""


def measure(row: str, stage: int, bucket_size: int, device: str, steps: int) -> Result:
    """Run one bucket size in this process."""
    torch.manual_seed(0)
    preset, batch = ROWS[row]
    with one_rank(device) as mesh, Memory(device) as memory:
        trained = zeroshard_gpt(shape_of(preset), mesh, activations={}, stage=stage, bucket_size=bucket_size)
        measured = Training(trained, batch, memory).steady(warmup=2, steps=steps, seconds=SECONDS)
        report = zeroshard.report(trained[0])
    held = {kind: nbytes.peak for (kind, tier), nbytes in report.memory.items() if tier == "device"}
    return {**measured, "held": held, "collectives": sum(kind.count for kind in report.collectives.values())}


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print a table."""
    parser = options(__doc__, timeout=90)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=["1.4B, batch 16", "7.6B, batch 4"])
    parser.add_argument("--stages", nargs="*", type=int, choices=(0, 1, 2, 3), default=STAGES)
    parser.add_argument("--powers", nargs="*", type=int, default=POWERS, help="of two, in elements")
    parser.add_argument("--steps", type=int, default=5)
    chosen = parsed(parser, argv)
    trials, rows = Trials(__name__, chosen), ["tiny"] if chosen.tiny else chosen.rows
    print(f"one rank of 64, {described(machine(chosen.device))}\n{NO_WIRE}")
    table = []
    for row in rows:
        for stage in chosen.stages:
            runs = {
                power: trials.run(row=row, stage=stage, bucket_size=2**power, device=chosen.device, steps=chosen.steps)
                for power in sorted(chosen.powers, reverse=True)  # the slowest last, should the budget not reach
            }
            fastest = min((run["ms"] for run in runs.values() if "ms" in run), default=None)
            for power, run in sorted(runs.items()):
                times = run.get("ms"), ratio(run.get("ms"), fastest), run.get("host_ms"), run.get("collectives")
                peaks = gigabytes(run.get("allocated")), gigabytes(run.get("reserved"))
                held = [gigabytes(run.get("held", {}).get(kind)) for kind in BUFFERS]
                table.append([row, stage, f"2^{power}", *times, *peaks, *held])
    heads = ("GPT, batch", "stage", "bucket_size", "ms a step", "of the least", "host ms", "collectives")
    trials.show("buckets", (*heads, "allocated GB", "reserved GB", *(f"{kind} GB" for kind in BUFFERS)), table)
