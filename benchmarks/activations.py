"""What recomputation costs: torch's checkpointing, zeroshard's, and zeroshard's with the kept inputs in host memory.

    python -m benchmarks activations                  # time and memory of a step, and the largest batch, on a GPU
    python -m benchmarks activations --tiny --repeats 1 --device cpu

Stage 3 as one rank of 64 on the fake backend, bf16 over fp32 master weights, fused AdamW, sequences of 1024. Each run
is a process of its own, the modes in turn. The largest batch of a mode is searched for in one process, with a new model
for every attempt. Under `--frugal` the loss is computed a sequence at a time: logits are most of the memory otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.rank import ROWS, FrugalGPT, Memory, Trained, Training, one_rank, shape_of, zeroshard_gpt
from benchmarks.record import described, machine
from benchmarks.search import largest
from benchmarks.table import Result, gigabytes, middle, ratio, spread
from benchmarks.trial import Trials, guarded, options, parsed
from zeroshard.models import GPT

MODES: dict[str, tuple[bool, dict[str, Any] | None]] = {  # name → (torch's own, options of checkpoint_activations)
    "none": (False, None),
    "torch": (True, None),
    "zeroshard": (False, {}),
    "zeroshard+cpu": (False, {"offload": True}),
}
FIRST = {"none": (2, 4), "zeroshard+cpu": (16, 32)}  # batches that a search begins with, where they are not (8, 16)
USABLE = 0.98  # of a GPU's memory, where no limit is given: the rest is CUDA's context and its libraries'
ON_CPU = 3e6  # bytes that stand for a GPU's memory where there is none
SECONDS = 120.0  # that a search may take before its last attempt


def measure(
    row: str,
    mode: str,
    device: str,
    steps: int | None = None,
    frugal: bool = False,
    gigabytes: float | None = None,
) -> Result:
    """Take time and memory of one mode of one row in this process or, without ``steps``, find its largest batch."""
    torch.manual_seed(0)
    preset, batch = ROWS[row]
    by_torch, activations = MODES[mode]
    config, kind = shape_of(preset, checkpoint=by_torch), FrugalGPT if frugal else GPT
    limit = None if steps is not None else _limit(device, gigabytes)
    with one_rank(device) as mesh, Memory(device, limit) as memory:
        build = partial(zeroshard_gpt, config, mesh, activations, kind, stage=3)
        return Training(build(), batch, memory).steady(steps=steps) if steps else _largest_batch(build, mode, memory)


def _limit(device: str, gigabytes: float | None) -> float:
    if device != "cuda":
        return ON_CPU
    return gigabytes * 1e9 if gigabytes is not None else USABLE * torch.cuda.mem_get_info()[1]


def _largest_batch(build: Callable[[], Trained], mode: str, memory: Memory) -> Result:
    def train(batch: int) -> Result:
        return Training(build(), batch, memory).steady(warmup=1, steps=1)

    def attempt(batch: int) -> Result:
        result = guarded(train, batch=batch)
        gc.collect()
        memory.restart()
        return {**result, "left": memory.now}  # bytes; nothing, or the next attempt has so much less

    found = largest(attempt, FIRST.get(mode, (8, 16)), memory.limit or 0, seconds=SECONDS)
    return {
        "fits": found.fits,
        "fails": found.fails,
        "limit": memory.limit,
        "ended_early": found.error,
        "tried": found.tried,
    }


def steps_of(trials: Trials, rows: Sequence[str], device: str, steps: int, repeats: int) -> None:
    """Time and memory of a step, the modes in turn."""
    table = []
    modes = [mode for mode in MODES if mode != "none"]
    for row in rows:
        for _ in range(repeats):
            for mode in modes:
                trials.run(row=row, mode=mode, device=device, steps=steps)
        plain = middle(trials.of(row=row, mode="torch", steps=steps), "ms")
        for mode in modes:
            runs = trials.of(row=row, mode=mode, steps=steps)
            time, peaks = middle(runs, "ms"), [gigabytes(middle(runs, key)) for key in ("allocated", "reserved")]
            table.append([row, mode, time, spread(runs, "ms"), ratio(time, plain), *peaks])
    trials.show(
        "steps",
        ("GPT, batch", "recomputed by", "ms a step", "spread", "of torch's", "allocated GB", "reserved GB"),
        table,
    )


def largest_batches(
    trials: Trials, rows: Sequence[str], modes: Sequence[str], device: str, frugal: bool, memory: float | None
) -> None:
    """The largest batch of each mode."""
    table = []
    for row in rows:
        found = {mode: trials.run(row=row, mode=mode, device=device, frugal=frugal, gigabytes=memory) for mode in modes}
        base = found.get("zeroshard", {}).get("fits")
        for mode, run in found.items():
            ended = run.get("ended_early") or run.get("error") or run.get("out_of_memory") or ""
            left = max((attempt["left"] for attempt in run.get("tried", {}).values()), default=None)
            cells = [run.get("fits"), run.get("fails"), ratio(run.get("fits"), base), gigabytes(left)]
            table.append([row.partition(",")[0], mode, *cells, ended.partition("\n")[0]])
    loss = "a sequence at a time" if frugal else "of the whole batch at once"
    room = f"{memory:g} GB" if memory is not None else f"{USABLE:.0%} of the device's memory"
    print(f"\nThe largest batch, to 5 %, in {room}; the loss {loss}. Left: what stayed of a")
    print("model after it was deleted, so that the next attempt had so much less.")
    trials.show(
        "batches", ("GPT", "recomputed by", "fits", "does not", "of zeroshard's", "left GB", "ended early"), table
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print tables."""
    parser = options(__doc__, timeout=300)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=["1.4B, batch 16", "7.6B, batch 4"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("steps", "batches"), help="one of the two tables")
    parser.add_argument("--frugal", action="store_true", help="for the largest batch: the loss a sequence at a time")
    searched = [mode for mode in MODES if mode != "torch"]
    parser.add_argument("--modes", nargs="*", choices=searched, default=searched, help="for the largest batch")
    parser.add_argument("--memory", type=float, help="GB, for the largest batch: host memory limits it otherwise")
    chosen = parsed(parser, argv)
    trials, rows = Trials(__name__, chosen), ["tiny"] if chosen.tiny else chosen.rows
    print(f"one rank of 64, {described(machine(chosen.device))}")
    if chosen.only != "batches":
        steps_of(trials, rows, chosen.device, chosen.steps, chosen.repeats)
    if chosen.only != "steps":
        largest_batches(trials, rows, chosen.modes, chosen.device, chosen.frugal, chosen.memory)
