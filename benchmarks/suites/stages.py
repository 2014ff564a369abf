"""What each stage holds and sends, and what a step takes by `bucket_size` (the paper's C_B), as one rank of many.

    python -m benchmarks stages                       # GPT 1.4B on a GPU as 1 of 64
    python -m benchmarks stages --tiny --device cpu --batch 1
    python -m benchmarks buckets                      # 1.4B and 7.6B, stages 2 and 3, 2^20 to 2^28 elements, on a GPU
    python -m benchmarks buckets --tiny --powers 10 12 --device cpu

Each run is a process of its own on the fake backend: memory and compute of one rank are real, and nothing is sent. bf16
over fp32 master weights, fused AdamW, every block recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

import zeroshard
from benchmarks.harness.record import Result, gigabytes, ratio
from benchmarks.harness.training import Memory, StateBytes, measure_steps, one_rank
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import Job, ours, precision
from benchmarks.harness.workloads import GPTS, WORKLOADS, Workload
from zeroshard.models import PRESETS
from zeroshard.planner import predict_memory

STAGES = (0, 1, 2, 3)
POWERS = (20, 22, 24, 25, 26, 27, 28)
SECONDS = 8.0  # of steps, after which no other starts: small buckets are slow
BUFFERS = ("buckets", "gathered", "autograd", "step")  # kinds of a report that are held only for a while
NO_NETWORK = """\
The fake backend sends nothing, so the latency of a network is not in these figures; what a collective costs host and
device is. Its all-gather makes 64 copies, so small buckets look worse than over NCCL."""


def measure(
    shape: dict[str, Any], stage: int, device: str, steps: int, activations: Any = None, **options: Any
) -> Result:
    """Train in this process; ``options`` go to `zeroshard.shard`, ``activations`` to `checkpoint_activations`."""
    work = Workload(**shape)
    with torch.device("meta"):
        sizes = predict_memory(work.build(), ranks=work.ranks, stage=stage, precision=precision(device))
    with one_rank(device, (work.ranks,)) as mesh, Memory(device) as memory:
        training = ours(Job(work, device, mesh), stage, activations, defragment=False, **options)
        states = StateBytes(training.model, training.optimizer)
        measured = measure_steps(training, memory, warmup=2, steps=steps, seconds=SECONDS)
        report = zeroshard.report(training.model)
    held = {kind: nbytes.peak for (kind, tier), nbytes in report.memory.items() if tier == "device"}
    counts = {"communicated": report.communicated, "collectives": sum(k.count for k in report.collectives.values())}
    return {**measured, "states": states.total, "predicted": sizes.state_bytes, "held": held, **counts}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages and print a table."""
    parser = make_parser(__doc__, world=64, batch=2)
    parser.add_argument("--model", default="1.4b", choices=list(PRESETS))
    chosen = parser.parse_args(argv)
    shape = WORKLOADS["tiny"] if chosen.tiny else Workload.gpt(PRESETS[chosen.model], 0)
    work = replace(shape, batch=chosen.batch, ranks=chosen.world)
    trials = Trials("stages", measure, chosen, shape=asdict(work), device=chosen.device, steps=4)
    runs = [trials.run(stage=stage) for stage in STAGES]
    rows = [run for run in runs if "states" in run]
    psi, element = work.config.parameters, 2 if precision(chosen.device) == "bf16" else 4
    print(f"{psi:,} parameters, 1 of {chosen.world} ranks, batch {chosen.batch}")
    table = []
    for row in rows:
        share = f"1/{rows[0]['states'] / row['states']:.1f}"
        states, predicted, peak = (gigabytes(row[key]) for key in ("states", "predicted", "allocated"))
        traffic = f"{row['communicated'] / element / psi:.3f}Ψ"
        table.append([row["stage"], states, share, predicted, peak, traffic, row["ms"]])
    heads = ("stage", "model states GB", "of stage 0", "predicted GB", "allocated at peak GB", "traffic a step")
    trials.show("stages", (*heads, "ms a step"), table)


def buckets(argv: Sequence[str] | None = None) -> None:
    """Run all bucket sizes and print a table."""
    parser = make_parser(__doc__, timeout=90, steps=5)
    parser.add_argument("--rows", nargs="*", choices=GPTS, default=["1.4B, batch 16", "7.6B, batch 4"])
    parser.add_argument("--stages", nargs="*", type=int, choices=STAGES, default=STAGES[2:])
    parser.add_argument("--powers", nargs="*", type=int, default=POWERS, help="of two, in elements")
    chosen = parser.parse_args(argv)
    trials, table = Trials("buckets", measure, chosen), []
    print(f"one rank of 64\n{NO_NETWORK}")
    for row in ["tiny"] if chosen.tiny else chosen.rows:
        given = {"shape": asdict(WORKLOADS[row]), "device": chosen.device, "steps": chosen.steps, "activations": {}}
        for stage in chosen.stages:
            powers = sorted(chosen.powers, reverse=True)  # the slowest last, if the budget does not suffice
            runs = {power: trials.run(stage=stage, bucket_size=2**power, **given) for power in powers}
            fastest = min((run["ms"] for run in runs.values() if "ms" in run), default=None)
            for power, run in sorted(runs.items()):
                times = run.get("ms"), ratio(run.get("ms"), fastest), run.get("host_ms"), run.get("collectives")
                peaks = gigabytes(run.get("allocated")), gigabytes(run.get("reserved"))
                held = [gigabytes(run.get("held", {}).get(kind)) for kind in BUFFERS]
                table.append([row, stage, f"2^{power}", *times, *peaks, *held])
    heads = ("GPT, batch", "stage", "bucket_size", "ms a step", "of the least", "host ms", "collectives")
    trials.show("buckets", (*heads, "allocated GB", "reserved GB", *(f"{kind} GB" for kind in BUFFERS)), table)
