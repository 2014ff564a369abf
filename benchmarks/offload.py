"""States on the host and on disk: time of a step beside the peers, the largest model, and what a fraction costs.

    python -m benchmarks offload                                     # everything, on a GPU; mind --budget
    python -m benchmarks offload --only largest --width 6144
    python -m benchmarks offload --tiny --device cpu --steps 2 --repeats 1

One rank alone, on NCCL: no fake backend. bf16 over fp32 master weights, fused AdamW, sequences of 1024, every block
recomputed: by `zeroshard.checkpoint_activations` under zeroshard, by torch's checkpointing elsewhere. Each run is a
process of its own; repeats are interleaved.

step: optimizer states on the host, beside FSDP2's and DeepSpeed's offload. Two floors are taken in the same run. The
device's is forward and backward alone, of the bf16 model, with nothing sharded and no optimizer. The host's is Ψ times
what the native update takes for a parameter with all data in host memory, with the threads that zeroshard takes and
with all; the smaller counts. *Of the floor* is a step over the larger of the two.
largest: the deepest GPT of a width that trains, over device and host; `disk`: over device, host and disk. `filling.py`
says what rests where. *Limit* is what all tiers' bytes would hold at 16 a parameter. FLOPS are those of forward and
backward, recomputation not counted.
fractions: a step with a part of the optimizer states on the host.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import host_adam
from benchmarks.deepest import HEADS, deepest, held_by, measure_depth, measure_space
from benchmarks.deepspeed_peer import DeepSpeedTraining
from benchmarks.rank import ROWS, Memory, Training, alone, fsdp2_gpt, shape_of, zeroshard_gpt
from benchmarks.record import described, machine
from benchmarks.table import Result, gigabytes, listed, middle, ratio, said, spread
from benchmarks.trial import Trials, options, parsed
from zeroshard.memory import available_host_memory
from zeroshard.models import GPT
from zeroshard.optim.cpu.updates import default_threads
from zeroshard.presets import GPTPreset

OURS: dict[str, tuple[Any, float | None]] = {  # name → (offload, norm that gradients are clipped to)
    "zeroshard": ("host", None),
    "zeroshard, speculate=False": ({"optimizer": "host", "speculate": False}, None),
    "zeroshard, clipped to 1.0": ("host", 1.0),
}
PEERS = ("FSDP2, CPUOffloadPolicy", "DeepSpeed ZeRO-2, CPU")
VARIANTS = ("device floor", "host floor", *OURS, *PEERS)
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
WARMUP = 4  # steps: zeroshard works ahead from the third, and takes the memory for it then


def measure(what: str, **given: Any) -> Result:
    """Take one measurement in this process."""
    torch.manual_seed(0)
    measures: dict[str, Callable[..., Result]]
    measures = {"space": measure_space, "step": measure_step, "depth": measure_depth}
    return measures[what](**given)


def measure_step(row: str, variant: str, device: str, steps: int, fraction: float | None = None) -> Result:
    """One variant's step; with a ``fraction``, zeroshard's with so much of the optimizer's states on the host."""
    preset, batch = ROWS[row]
    if variant == "host floor":
        return host_floor(preset)
    before, config = available_host_memory(), shape_of(preset, checkpoint=variant not in OURS)
    with alone(device) as mesh, Memory(device) as memory:
        training: Training
        if variant == "device floor":
            with torch.device(device):
                plain = GPT(config).bfloat16() if memory.on_gpu else GPT(config)
            training = Training((plain, None), batch, memory)
        elif variant in OURS:
            offload, clip = OURS[variant] if fraction is None else ({"optimizer": ("host", fraction)}, None)
            training = Training(zeroshard_gpt(config, mesh, {}, offload=offload), batch, memory, clip)
        elif variant.startswith("FSDP2"):
            training = Training(fsdp2_gpt(config, mesh, offload=True), batch, memory)
        else:
            training = DeepSpeedTraining(config, batch, memory)
        measured = training.steady(WARMUP, steps)
        if variant in OURS:
            measured |= held_by(training.model)
    adam = {"adam": training.adam} if isinstance(training, DeepSpeedTraining) else {}
    return {**measured, **adam, "gone": before - available_host_memory()}


def host_floor(preset: GPTPreset) -> Result:
    """Ψ updates of the native kernel, with zeroshard's threads and with all."""
    numel = min(preset.parameters, 2**27)  # 2 GB of states, far more than caches hold
    found = {
        threads: host_adam.measure("zeroshard, bf16", numel, threads, 5)["ns"]
        for threads in (default_threads(), len(os.sched_getaffinity(0)))
    }
    ms = {threads: ns * 1e-6 * preset.parameters for threads, ns in found.items()}
    return {"ms": min(ms.values()), "by_threads": ms}


def steps_of(trials: Trials, row: str, chosen: argparse.Namespace) -> None:
    """All variants in turn."""
    missing = {name: "not installed" for name in PEERS[1:] if importlib.util.find_spec("deepspeed") is None}
    run = partial(trials.run, what="step", row=row, device=chosen.device, steps=chosen.steps, fraction=None)
    for _ in range(chosen.repeats):
        for variant in chosen.variants:
            if variant not in missing:
                result = run(variant=variant)
                missing |= {variant: why} if (why := said(result)) else {}
    of = {variant: trials.of(what="step", row=row, variant=variant, fraction=None) for variant in VARIANTS}
    missing |= {variant: "not asked for" for variant in VARIANTS if variant not in chosen.variants}
    ms = {variant: middle(runs, "ms") for variant, runs in of.items()}
    floors = [ms[name] for name in ("device floor", "host floor")]
    floor = max(floors) if None not in floors else None  # type: ignore[type-var]
    peer = min((ms[name] for name in PEERS if ms[name] is not None), default=None)  # type: ignore[type-var]
    table = []
    for variant, runs in of.items():
        peaks = [gigabytes(middle(runs, key)) for key in ("allocated", "reserved", "host", "gone")]
        note = missing.get(variant) or next((run["adam"] for run in runs if "adam" in run), "")
        of_both = ratio(ms[variant], floor), ratio(ms[variant], peer)
        table.append([variant, ms[variant], spread(runs, "ms"), *of_both, *peaks, note])
    found = [run["by_threads"] for run in of["host floor"] if "by_threads" in run]
    by_threads = {count: statistics.median(ms[count] for ms in found) for count in (found or [{}])[0]}
    print(f"\nA step of GPT {row}, optimizer states on the host. Host floor by threads, ms: {listed(by_threads)}")
    print("Host GB: what zeroshard counts. Gone: by how much the machine's available memory fell.")
    heads = ("", "ms a step", "spread", "of the floor", "of the better peer", "allocated GB", "reserved GB")
    trials.show("step", (*heads, "host GB", "gone GB", ""), table)


def fractions_of(trials: Trials, row: str, chosen: argparse.Namespace) -> None:
    """A step by the fraction of optimizer states on the host."""
    run = partial(trials.run, what="step", row=row, variant="zeroshard", device=chosen.device, steps=chosen.steps)
    for _ in range(chosen.repeats):
        for fraction in FRACTIONS:
            run(fraction=fraction)
    table = []
    base = middle(trials.of(what="step", row=row, fraction=0.0), "ms")
    for fraction in FRACTIONS:
        runs = trials.of(what="step", row=row, fraction=fraction)
        ms, peaks = middle(runs, "ms"), [gigabytes(middle(runs, key)) for key in ("allocated", "reserved", "host")]
        table.append([fraction, ms, spread(runs, "ms"), ratio(ms, base), *peaks, said(runs[-1])])
    print(f"\nA step of GPT {row} by the fraction of optimizer states on the host")
    heads = ("on the host", "ms a step", "spread", "of none there", "allocated GB", "reserved GB", "host GB", "")
    trials.show("fractions", heads, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for and print tables."""
    parser = options(__doc__, timeout=300)
    sections = ("step", "fractions", "largest", "disk")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--row", choices=list(ROWS), default="1.4B, batch 16", help="of step and fractions")
    parser.add_argument("--steps", type=int, default=10, help="of step and fractions, after warm-up")
    parser.add_argument("--repeats", type=int, default=3, help="of step and fractions")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="of step")
    parser.add_argument("--width", type=int, choices=list(HEADS), default=4096, help="of the largest model")
    parser.add_argument("--batch", type=int, default=4, help="of the largest model")
    parser.add_argument("--largest-steps", type=int, default=3, help="of the largest model, after the first")
    parser.add_argument("--attempts", type=int, default=6, help="of a search; those that are not begun count too")
    parser.add_argument("--disk", type=float, help="GB of the disk that may be taken; without it, all but 4")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk that states may rest on")
    chosen = parsed(parser, argv)
    trials, row = Trials(__name__, chosen), "tiny" if chosen.tiny else chosen.row
    print(f"one rank alone, {described(machine(chosen.device))}")
    run = {
        "step": lambda: steps_of(trials, row, chosen),
        "fractions": lambda: fractions_of(trials, row, chosen),
        "largest": lambda: deepest(trials, chosen, on_disk=False),
        "disk": lambda: deepest(trials, chosen, on_disk=True),
    }
    for section in chosen.only:
        run[section]()
