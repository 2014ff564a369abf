"""Reserved and allocated memory of stage 3 and FSDP2 (the paper's M_D), and the cost of recomputing activations.

    python -m benchmarks memory                       # four rows on a GPU
    python -m benchmarks memory --stress              # 200 steps of varying length with memory filled to 95 %
    python -m benchmarks memory --tiny --stress --steps 2 --device cpu
    python -m benchmarks activations                  # time and memory of a step, and the largest batch, on a GPU
    python -m benchmarks activations --tiny --repeats 1 --device cpu

Each run is a process of its own, as one rank of 64 on the fake backend, with the allocator's default settings. bf16
over fp32 master weights, fused AdamW, sequences of 1024. For `memory` every block is recomputed, by
`zeroshard.checkpoint_activations` or, under FSDP2, by torch, and the allocator's caches are emptied after warm-up.
`activations` compares torch's checkpointing, zeroshard's, and zeroshard's with the kept inputs on the host. The largest
batch is searched for in one process, with a new model for every attempt. With `--frugal` the loss is computed one
sequence at a time: logits are most of the memory otherwise.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from benchmarks.harness.record import Result, gigabytes, median, ratio, spread
from benchmarks.harness.search import find_largest
from benchmarks.harness.training import Memory, measure_steps, one_rank
from benchmarks.harness.trials import Trials, catch_out_of_memory, make_parser
from benchmarks.harness.variants import Job, Loop, fsdp2, ours
from benchmarks.harness.workloads import GPTS, WORKLOADS

VARIANTS = ("fsdp2", "zeroshard")
STRESSED = "1.4B, batch 16"  # the row with the largest activations
FILLED = 0.95  # of the limit, by what the longest sequences allocate
STRESS_SECONDS, SEARCH_SECONDS = 100.0, 120.0
WARMUP = 6  # steps: zeroshard searches its segments in the first few
MODES: dict[str, tuple[bool, dict[str, Any] | None]] = {  # name → (by torch, options of checkpoint_activations)
    "none": (False, None),
    "torch": (True, None),
    "zeroshard": (False, {}),
    "zeroshard+cpu": (False, {"offload": True}),
}
FIRST = {"none": (2, 4), "zeroshard+cpu": (16, 32)}  # batches that a search begins with; (8, 16) for other modes
USABLE = 0.98  # of a GPU's memory, if no limit is given: CUDA's context and libraries need the rest
LIMIT_ON_CPU = 3e6  # bytes that replace the memory of a GPU


def measure(row: str, variant: str, device: str, steps: int, limit: float | None = None) -> Result:
    """Run one variant of a row in this process: steadily or, under a limit, on sequences of varying length."""
    work = WORKLOADS[row]
    with one_rank(device) as mesh, Memory(device, limit) as memory:
        job = Job(work, device, mesh)
        training = ours(job, activations={}, defragment=True) if variant == "zeroshard" else fsdp2(job)
        if limit is not None:
            return _train_lengths(training, memory, lengths(work.sequence, steps))
        return measure_steps(training, memory, WARMUP if device == "cuda" else 1, steps)


def lengths(context: int, steps: int) -> list[int]:
    """Return lengths of sequences from a quarter of the context up, the same in every run."""
    return random.Random(0).choices(range(context // 4, context + 1, context // 16), k=steps)


def _train_lengths(training: Loop, memory: Memory, sequence: Sequence[int]) -> Result:
    """Train on sequences of these lengths until memory, or time, runs out."""
    begin, completed = time.perf_counter(), 0

    def train() -> Result:
        nonlocal completed
        for length in sequence:
            if time.perf_counter() - begin > STRESS_SECONDS:
                return {"ended_by": f"{STRESS_SECONDS:.0f} s were over"}
            training.step(length)
            memory.wait()
            completed += 1
        return {}

    ended = catch_out_of_memory(train)
    how = {"ended_by": "memory", "said": ended["out_of_memory"]} if "out_of_memory" in ended else ended
    return {"completed": completed, **how, "s": time.perf_counter() - begin, **memory.peak()}


def show_steady(trials: Trials, rows: Sequence[str], steps: int, repeats: int) -> None:
    """Run all rows in steady state, the variants in turns."""
    table = []
    for row in rows:
        trials.run_variants(VARIANTS, repeats, row=row, steps=steps)
        theirs = median(trials.matching(row=row, variant="fsdp2"), "reserved")
        for variant in VARIANTS:
            runs = trials.matching(row=row, variant=variant)
            allocated, reserved = median(runs, "allocated"), median(runs, "reserved")
            shares = ratio(reserved, allocated), ratio(reserved, theirs)
            table.append([row, variant, gigabytes(allocated), gigabytes(reserved), *shares, median(runs, "ms")])
    heads = ("GPT, batch", "", "allocated GB", "reserved GB", "of allocated", "of FSDP2's reserved", "ms a step")
    trials.show("steady", heads, table)


def show_stress(trials: Trials, row: str, steps: int) -> None:
    """Train on sequences of varying length under each variant's own limit, and FSDP2 under zeroshard's."""
    needed = {v: trials.run(row=row, variant=v, steps=2).get("allocated") for v in VARIANTS}
    limits = {variant: nbytes / FILLED for variant, nbytes in needed.items() if nbytes}
    table = []
    for variant, owner in (("fsdp2", "fsdp2"), ("zeroshard", "zeroshard"), ("fsdp2", "zeroshard")):
        if owner not in limits:
            continue
        run = trials.run(row=row, variant=variant, steps=steps, limit=limits[owner])
        end = run.get("ended_by") or run.get("error") or run.get("out_of_memory") or "all steps done"
        limit = f"{limits[owner] / 1e9:.3f} ({owner}'s)"
        peaks = gigabytes(run.get("allocated")), gigabytes(run.get("reserved"))
        counts = run.get("retries"), run.get("ooms"), run.get("s")
        table.append([variant, limit, f"{run.get('completed', 0)} of {steps}", end.splitlines()[0], *peaks, *counts])
    print(f"\n{row}: sequences of varying length; the longest allocate {FILLED:.0%} of the limit")
    heads = ("", "limit GB", "steps", "ended by", "allocated GB", "reserved GB", "retries", "out of memory", "s")
    trials.show("stress", heads, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print tables."""
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--rows", nargs="*", choices=GPTS, help="(default: all but tiny)")
    parser.add_argument("--steps", type=int, help="steps measured (default: 4, or 200 with --stress)")
    parser.add_argument("--stress", action="store_true", help=f"sequences of varying length instead, at {STRESSED}")
    chosen = parser.parse_args(argv)
    trials = Trials("memory", measure, chosen, device=chosen.device)
    print("one rank of 64")
    if chosen.stress:
        row = "tiny" if chosen.tiny else (chosen.rows or [STRESSED])[0]
        show_stress(trials, row, chosen.steps or 200)
    else:
        rows = ["tiny"] if chosen.tiny else chosen.rows or GPTS[:-1]
        show_steady(trials, rows, chosen.steps or 4, chosen.repeats)


def measure_mode(
    row: str, mode: str, device: str, steps: int = 0, frugal: bool = False, gigabytes: float | None = None
) -> Result:
    """Measure a step of one mode of a row in this process or, without ``steps``, find its largest batch."""
    by_torch, options = MODES[mode]
    work = replace(WORKLOADS[row], recomputed=by_torch, model="frugal gpt" if frugal else "gpt")
    limit = None if steps else LIMIT_ON_CPU
    if device == "cuda" and not steps:
        limit = 1e9 * gigabytes if gigabytes is not None else USABLE * torch.cuda.mem_get_info()[1]
    with one_rank(device) as mesh, Memory(device, limit) as memory:

        def train(batch: int, warmup: int, steps: int) -> Result:
            job = Job(replace(work, batch=batch), device, mesh)
            return measure_steps(ours(job, activations=options, defragment=False), memory, warmup, steps)

        return train(work.batch, 3, steps) if steps else _largest_batch(train, mode, memory)


def _largest_batch(train: Callable[..., Result], mode: str, memory: Memory) -> Result:
    def attempt(batch: int) -> Result:
        result = catch_out_of_memory(train, batch=batch, warmup=1, steps=1)
        gc.collect()
        memory.restart()
        return {**result, "left": memory.now}  # bytes; 0, or the next attempt has less

    found = find_largest(attempt, FIRST.get(mode, (8, 16)), memory.limit or 0, seconds=SEARCH_SECONDS)
    ends = {"fits": found.fits, "fails": found.fails, "limit": memory.limit}
    return {**ends, "ended_early": found.error, "tried": found.tried}


def show_modes(trials: Trials, rows: Sequence[str], steps: int, repeats: int) -> None:
    """Measure a step by mode, the modes in turns."""
    table = []
    modes = [mode for mode in MODES if mode != "none"]
    for row in rows:
        for _, mode in product(range(repeats), modes):
            trials.run(row=row, mode=mode, steps=steps)
        by_torch = median(trials.matching(row=row, mode="torch", steps=steps), "ms")
        for mode in modes:
            runs = trials.matching(row=row, mode=mode, steps=steps)
            ms, peaks = median(runs, "ms"), [gigabytes(median(runs, key)) for key in ("allocated", "reserved")]
            table.append([row, mode, ms, spread(runs, "ms"), ratio(ms, by_torch), *peaks])
    heads = ("GPT, batch", "recomputed by", "ms a step", "spread", "of torch's", "allocated GB", "reserved GB")
    trials.show("steps", heads, table)


def show_batches(trials: Trials, rows: Sequence[str], frugal: bool, memory: float | None) -> None:
    """Find the largest batch by mode."""
    table, modes = [], [mode for mode in MODES if mode != "torch"]
    for row in rows:
        found = {mode: trials.run(row=row, mode=mode, frugal=frugal, gigabytes=memory) for mode in modes}
        base = found.get("zeroshard", {}).get("fits")
        for mode, run in found.items():
            ended = run.get("ended_early") or run.get("error") or run.get("out_of_memory") or ""
            left = max((attempt["left"] for attempt in run.get("tried", {}).values()), default=None)
            cells = [run.get("fits"), run.get("fails"), ratio(run.get("fits"), base), gigabytes(left)]
            table.append([row.partition(",")[0], mode, *cells, ended.partition("\n")[0]])
    loss = "one sequence at a time" if frugal else "of the whole batch at once"
    room = f"{memory:g} GB" if memory is not None else f"{USABLE:.0%} of the device's memory"
    print(f"\nThe largest batch, to 5 %, in {room}; the loss {loss}.")
    print("Left: what was still allocated after a model was deleted, so that the next attempt had less.")
    heads = ("GPT", "recomputed by", "fits", "does not", "of zeroshard's", "left GB", "ended early")
    trials.show("batches", heads, table)


def activations(argv: Sequence[str] | None = None) -> None:
    """Run everything and print tables."""
    parser = make_parser(__doc__, timeout=300, steps=6, repeats=3)
    parser.add_argument("--rows", nargs="*", choices=GPTS, default=["1.4B, batch 16", "7.6B, batch 4"])
    parser.add_argument("--only", choices=("steps", "batches"), help="one of the two tables")
    parser.add_argument("--frugal", action="store_true", help="for the largest batch: the loss one sequence at a time")
    parser.add_argument("--memory", type=float, help="GB, for the largest batch; otherwise host memory limits it")
    chosen = parser.parse_args(argv)
    trials = Trials("activations", measure_mode, chosen, device=chosen.device)
    rows = ["tiny"] if chosen.tiny else chosen.rows
    print("one rank of 64")
    if chosen.only != "batches":
        show_modes(trials, rows, chosen.steps, chosen.repeats)
    if chosen.only != "steps":
        show_batches(trials, rows, chosen.frugal, chosen.memory)
