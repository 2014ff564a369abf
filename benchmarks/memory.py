"""Reserved memory beside allocated memory in steady state, for zeroshard's stage 3 and FSDP2 (the paper's M_D).

    python -m benchmarks memory                       # four rows on a GPU
    python -m benchmarks memory --stress              # 200 steps of varying length with memory filled to 95 %
    python -m benchmarks memory --tiny --stress --steps 2 --device cpu

Each run is a process of its own, as one rank of 64 on the fake backend, with the allocator's default settings. bf16
over fp32 master weights, fused AdamW, every block's activations recomputed: by `zeroshard.checkpoint_activations` under
zeroshard, by torch's checkpointing under FSDP2. The allocator's caches are emptied after warm-up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from benchmarks.rank import ROWS, Memory, Training, fsdp2_gpt, one_rank, shape_of, zeroshard_gpt
from benchmarks.record import described, machine
from benchmarks.table import Result, gigabytes, middle, ratio
from benchmarks.trial import Trials, guarded, options, parsed

VARIANTS = ("fsdp2", "zeroshard")
STRESSED = "1.4B, batch 16"  # the row with the largest activations
FILLED = 0.95  # of the limit, by what the longest sequences need
SECONDS = 100.0  # that a stress may take
WARMUP = 6  # steps: after the first few zeroshard has found the best order of segments


def measure(row: str, variant: str, device: str, steps: int, limit: float | None = None) -> Result:
    """Run one variant of one row in this process: steadily or, under a limit, on sequences of varying length."""
    torch.manual_seed(0)
    preset, batch = ROWS[row]
    with one_rank(device) as mesh, Memory(device, limit) as memory:
        if variant == "zeroshard":
            trained = zeroshard_gpt(shape_of(preset), mesh, activations={}, stage=3, defragment=True)
        else:
            trained = fsdp2_gpt(shape_of(preset, checkpoint=True), mesh)
        training = Training(trained, batch, memory)
        warmup = WARMUP if device == "cuda" else 1
        return training.steady(warmup, steps) if limit is None else _varied(training, lengths(preset.context, steps))


def lengths(context: int, steps: int) -> list[int]:
    """Lengths of sequences from a quarter of the context up, the same in every run."""
    return random.Random(0).choices(range(context // 4, context + 1, context // 16), k=steps)


def _varied(training: Training, sequence: Sequence[int]) -> Result:
    """Train on sequences of these lengths until memory, or time, runs out."""
    begin, completed = time.perf_counter(), 0

    def train() -> Result:
        nonlocal completed
        for length in sequence:
            if time.perf_counter() - begin > SECONDS:
                return {"ended_by": f"{SECONDS:.0f} s were over"}
            training.step(length)
            training.memory.wait()
            completed += 1
        return {}

    ended = guarded(train)
    how = {"ended_by": "memory", "said": ended["out_of_memory"]} if "out_of_memory" in ended else ended
    return {"completed": completed, **how, "s": time.perf_counter() - begin, **training.memory.peak()}


def steady(trials: Trials, rows: Sequence[str], device: str, steps: int, repeats: int) -> None:
    """All rows in steady state, the variants in turn."""
    table = []
    for row in rows:
        for _ in range(repeats):
            for variant in VARIANTS:
                trials.run(row=row, variant=variant, device=device, steps=steps)
        theirs = middle(trials.of(row=row, variant="fsdp2"), "reserved")
        for variant in VARIANTS:
            runs = trials.of(row=row, variant=variant)
            allocated, reserved = middle(runs, "allocated"), middle(runs, "reserved")
            shares = ratio(reserved, allocated), ratio(reserved, theirs)
            table.append([row, variant, gigabytes(allocated), gigabytes(reserved), *shares, middle(runs, "ms")])
    trials.show(
        "steady",
        ("GPT, batch", "", "allocated GB", "reserved GB", "of allocated", "of FSDP2's reserved", "ms a step"),
        table,
    )


def stress(trials: Trials, row: str, device: str, steps: int) -> None:
    """Sequences of varying length with memory filled, under each variant's own limit and FSDP2 under zeroshard's."""
    needed = {v: trials.run(row=row, variant=v, device=device, steps=2).get("allocated") for v in VARIANTS}
    limits = {variant: nbytes / FILLED for variant, nbytes in needed.items() if nbytes}
    table = []
    for variant, owner in (("fsdp2", "fsdp2"), ("zeroshard", "zeroshard"), ("fsdp2", "zeroshard")):
        if owner not in limits:
            continue
        run = trials.run(row=row, variant=variant, device=device, steps=steps, limit=limits[owner])
        end = run.get("ended_by") or run.get("error") or run.get("out_of_memory") or "all steps done"
        limit = f"{limits[owner] / 1e9:.3f} ({owner}'s)"
        peaks = gigabytes(run.get("allocated")), gigabytes(run.get("reserved"))
        table.append([variant, limit, f"{run.get('completed', 0)} of {steps}", end.splitlines()[0], *peaks])
        table[-1] += [run.get("retries"), run.get("ooms"), run.get("s")]
    print(f"\n{row}: sequences of varying length; the longest allocate {FILLED:.0%} of the limit")
    heads = ("", "limit GB", "steps", "ended by", "allocated GB", "reserved GB", "retries", "out of memory", "s")
    trials.show("stress", heads, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print tables."""
    parser = options(__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), help="without it, all but tiny")
    parser.add_argument("--steps", type=int, help="steps measured; without it 4, or 200 under --stress")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--stress", action="store_true", help=f"sequences of varying length instead, at {STRESSED}")
    chosen = parsed(parser, argv)
    trials = Trials(__name__, chosen)
    print(f"one rank of 64, {described(machine(chosen.device))}")
    if chosen.stress:
        row = "tiny" if chosen.tiny else (chosen.rows or [STRESSED])[0]
        stress(trials, row, chosen.device, chosen.steps or 200)
    else:
        rows = ["tiny"] if chosen.tiny else chosen.rows or [row for row in ROWS if row != "tiny"]
        steady(trials, rows, chosen.device, chosen.steps or 4, chosen.repeats)
