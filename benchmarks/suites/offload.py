"""States on the host and on disk: a step compared with the peers, the largest model, and what a fraction costs.

    python -m benchmarks offload                                     # everything, on a GPU; see --budget
    python -m benchmarks offload --only largest --width 6144
    python -m benchmarks offload --tiny --device cpu --steps 2 --repeats 1

One rank alone, on NCCL. bf16 over fp32 master weights, fused AdamW, sequences of 1024, every block recomputed: by
`zeroshard.checkpoint_activations` under zeroshard, by torch otherwise. Each run is a process; repeats are interleaved.

step: optimizer states on the host, compared with FSDP2's and DeepSpeed's offload and with the larger of two floors. The
device's is forward and backward alone; the host's is the native update of all parameters with all data in host memory.
fractions: a step with a part of the optimizer states on the host.
largest: the deepest GPT of a width that trains, over device and host; disk: over device, host and disk.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zeroshard
from benchmarks.harness.record import Result, failure, gigabytes, median, ratio, spread
from benchmarks.harness.training import Memory, Trainer, alone, measure_steps
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import DeepSpeedLoop, Job, deepspeed, floor, fsdp2, ours
from benchmarks.harness.workloads import GPTS, WORKLOADS, Workload
from benchmarks.suites.optimizer import measure_host_adam
from zeroshard.memory import available_host_memory
from zeroshard.optim.cpu.apply import default_threads
from zeroshard.train.metrics import flops_per_token

recomputed = partial(ours, activations={}, defragment=False)
OURS = {
    "zeroshard": partial(recomputed, offload="host"),
    "zeroshard, speculate=False": partial(recomputed, offload={"optimizer": "host", "speculate": False}),
    "zeroshard, clipped to 1.0": partial(recomputed, offload="host", clip=1.0),
}
PEERS: dict[str, Callable[[Job], Trainer]] = {
    "FSDP2, CPUOffloadPolicy": partial(fsdp2, offload=True),
    "DeepSpeed ZeRO-2, CPU": partial(deepspeed, stage=2, offload=True),
}
VARIANTS = ("device floor", "host floor", *OURS, *PEERS)
FRACTIONS = {
    f"{part:g} on the host": partial(recomputed, offload={"optimizer": ("host", part)})
    for part in (0.0, 0.25, 0.5, 0.75, 1.0)
}
WARMUP = 4  # steps: zeroshard speculates from the third, and allocates memory for it then


def measure(what: str, **given: Any) -> Result:
    """Take one measurement in this process."""
    measures: dict[str, Callable[..., Result]]
    measures = {"space": measure_space, "step": measure_step, "depth": measure_depth}
    return measures[what](**given)


def measure_step(row: str, variant: str, device: str, steps: int) -> Result:
    """Measure a step of a variant."""
    work = WORKLOADS[row]
    if variant == "host floor":
        return measure_host_floor(work.config.parameters)
    before = available_host_memory()
    with alone(device) as mesh, Memory(device) as memory:
        trainers = {"device floor": floor, **OURS, **FRACTIONS, **PEERS}
        training: Any = trainers[variant](Job(work, device, mesh))
        measured = measure_steps(training, memory, WARMUP, steps)
        if variant in OURS | FRACTIONS:
            measured |= peak_by_tier(training.model)
    adam = {"adam": training.adam} if isinstance(training, DeepSpeedLoop) else {}
    return {**measured, **adam, "gone": before - available_host_memory()}


def measure_host_floor(parameters: int) -> Result:
    """Time Ψ updates of the native kernel, with zeroshard's threads and with all."""
    numel = min(parameters, 2**27)  # 2 GB of states, far more than caches hold
    counts = (default_threads(), len(os.sched_getaffinity(0)))
    found = {threads: measure_host_adam("zeroshard, bf16", numel, threads, 5)["ns"] for threads in counts}
    ms = {threads: ns * 1e-6 * parameters for threads, ns in found.items()}
    return {"ms": min(ms.values()), "by_threads": ms}


def peak_by_tier(model: torch.nn.Module) -> Result:
    """Return the bytes on host and disk at the peak, as zeroshard counts them."""
    held = zeroshard.report(model).memory.items()
    return {tier: sum(nbytes.peak for (_, where), nbytes in held if where == tier) for tier in ("host", "disk")}


def show_steps(name: str, variants: Sequence[str], trials: Trials, chosen: argparse.Namespace) -> None:
    """Run variants in turns."""
    row = "tiny" if chosen.tiny else chosen.row
    given = {"what": "step", "row": row, "device": chosen.device, "steps": chosen.steps}
    notes = trials.run_variants(variants, chosen.repeats, **given)
    found = {variant: trials.matching(variant=variant, **given) for variant in variants}
    ms = {variant: median(runs, "ms") for variant, runs in found.items()}
    floors = [value for name in VARIANTS[:2] if (value := ms.get(name)) is not None]
    larger = max(floors) if len(floors) == 2 else None
    peer = min((value for name in PEERS if (value := ms.get(name)) is not None), default=None)
    table = []
    for variant, runs in found.items():
        peaks = [gigabytes(median(runs, key)) for key in ("allocated", "reserved", "host", "gone")]
        note = notes[variant] or next((run["adam"] for run in runs if "adam" in run), "")
        relative = ratio(ms[variant], larger), ratio(ms[variant], peer)
        table.append([variant, ms[variant], spread(runs, "ms"), *relative, *peaks, note])
    print(f"\nA step of GPT {row} with offloaded states")
    print("Host GB: what zeroshard counts. Gone: by how much the machine's available memory fell.")
    heads = ("", "ms a step", "spread", "of the floor", "of the better peer", "allocated GB", "reserved GB")
    trials.show(name, (*heads, "host GB", "gone GB", ""), table)


PARAMETER, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes a parameter, with bf16 and Adam
BYTES = PARAMETER + GRADIENT + OPTIMIZER
MAX_FILLED = {"device": 0.98, "host": 0.97, "disk": 1.0}  # of a tier; a process without memory is killed
BUCKET, RING, CHUNK, SLOTS = 2**27, 2, 2**26, 3  # zeroshard's defaults, in elements and buffers
DISK_CHUNK = 2**24  # the same for states on disk
LIBRARIES = 1e9  # bytes of a GPU that NCCL and others take outside torch, without the context
PROCESS = 2e9  # bytes of the host that a process takes once it has opened a GPU; 1.7 were seen


@dataclass(frozen=True)
class Filling:
    """How full the tiers are, fractions of states by tier, and the bytes on each tier, buffers included."""

    share: float
    optimizer: dict[str, float]  # by tier, without the device
    parameters: dict[str, float]
    held: dict[str, float]

    def explain_excess(self, space: Mapping[str, float]) -> str | None:
        """Say which tier would be too full, if one would."""
        for tier, share in MAX_FILLED.items():
            limit = share * space.get(tier, 0.0)
            if self.held[tier] > limit:
                return f"{self.held[tier] / 1e9:.4g} GB are needed on {tier}, but at most {limit / 1e9:.4g} may be used"
        return None


def fill(parameters: int, space: Mapping[str, float], buffers: Mapping[str, float]) -> Filling:
    """Distribute the states so that all tiers are equally full; ``space`` and ``buffers`` are bytes by tier.

    A tier of S bytes with W bytes of buffers has room for s·S - W bytes of states if it is filled to a share s. All
    16Ψ bytes fit at s = (16Ψ + ΣW) / ΣS. The disk takes only optimizer states. The device keeps the parameters if they
    fit, then gradients with their optimizer states. The host has the rest, and the gradients of what is on disk.
    """
    share = (BYTES * parameters + sum(buffers.values())) / sum(space.values())
    room = {tier: max(0.0, share * space.get(tier, 0.0) - buffers.get(tier, 0.0)) for tier in MAX_FILLED}
    disk = min(1.0, room["disk"] / (OPTIMIZER * parameters))
    outside = max(0.0, 1 - room["device"] / (PARAMETER * parameters))  # part of the parameters
    left = room["device"] - (1 - outside) * PARAMETER * parameters
    device = min(1 - disk, max(0.0, left / ((GRADIENT + OPTIMIZER) * parameters)))
    host = max(0.0, 1 - disk - device)
    each = {  # bytes a parameter
        "device": (1 - outside) * PARAMETER + device * (GRADIENT + OPTIMIZER),
        "host": outside * PARAMETER + (1 - device) * GRADIENT + host * OPTIMIZER,
        "disk": disk * OPTIMIZER,
    }
    held = {tier: parameters * each[tier] + buffers.get(tier, 0.0) for tier in MAX_FILLED}
    optimizer = {tier: part for tier, part in (("host", host), ("disk", disk)) if part > 1e-9}
    return Filling(share, optimizer, {"host": outside} if outside > 1e-9 else {}, held)


def buffers_of(work: Workload, on_gpu: bool) -> dict[str, float]:
    """Return the bytes by tier that computing a GPT needs in addition to its states.

    On the device: every block's input; one block's recomputed activations and their gradients, 64 bytes for each
    element of the stream; the logits of one sequence, 16 bytes each; of the largest unit two as parameters and two as
    gradients; the ring, and one batch of gradients in fp32. On the host: what states are copied through.
    """
    unit = max(12 * work.width**2 + 13 * work.width, (work.vocabulary + work.sequence) * work.width)
    bucket = min(BUCKET, unit)
    stream = work.batch * work.sequence * work.width
    device = (2 * work.layers + 64) * stream + 16 * work.sequence * work.vocabulary
    device += 8 * unit + RING * bucket * 2 * GRADIENT + 4 * bucket
    host = SLOTS * (min(CHUNK, unit) * (PARAMETER + GRADIENT) + min(DISK_CHUNK, unit) * OPTIMIZER)
    return {"device": device + on_gpu * LIBRARIES, "host": host + on_gpu * PROCESS}


HEADS = {4096: 32, 6144: 48}  # by width: 128 each
LEFT_ON_DISK = 4e9  # bytes
TINY_SPACE = {"device": 14e5, "host": 14e5, "disk": 6e5}  # bytes of the tiers with --tiny
TINY = Workload("frugal gpt", layers=1, heads=2, width=32, batch=1, sequence=8, vocabulary=64)  # CPUs are slow at bf16


def measure_space(device: str, directory: str | None) -> Result:
    """Return the free bytes of the tiers, in a process that uses the device."""
    found: Result = {}
    if device == "cuda":
        torch.zeros(1, device=device)
        found["device"] = torch.cuda.mem_get_info()[0]
    if directory is not None:
        disk = os.statvfs(directory)
        found["disk"] = max(0.0, disk.f_bavail * disk.f_frsize - LEFT_ON_DISK)
    return {**found, "host": available_host_memory()}


def measure_depth(
    shape: dict[str, Any], device: str, filling: dict[str, Any], host_bytes: int, directory: str | None, steps: int
) -> Result:
    """Train one step, then measure ``steps``. Nothing starts if the host has too little memory."""
    needed, left = filling["held"]["host"], available_host_memory()
    if left and needed > left:
        raise torch.OutOfMemoryError(f"{needed / 1e9:.4g} GB of host memory are needed, {left / 1e9:.4g} are left")
    tiers = {kind: filling[kind] for kind in ("optimizer", "parameters") if filling[kind]}
    offload = {**tiers, "host_bytes": host_bytes, "directory": directory, "speculate": False}
    work = Workload(**shape)
    with alone(device) as mesh, Memory(device) as memory:
        training = ours(Job(work, device, mesh), 3, {}, precision="bf16", offload=offload, defragment=False)
        first = measure_steps(training, memory, warmup=0, steps=1)
        then = measure_steps(training, memory, warmup=0, steps=steps)
        with zeroshard.gathered(training.model.get_submodule("norm")):  # waits for the last update, and its errors
            pass
        held = peak_by_tier(training.model)
    tables = (work.vocabulary + work.sequence) * work.width  # only looked up
    each = flops_per_token(work.config.parameters - tables, 0, work.layers, work.width, work.sequence)
    tflops = each * work.items / (then["ms"] * 1e9)
    peaks = {key: max(first[key], then[key]) for key in ("allocated", "reserved")}
    return {**then, **peaks, **held, "first_ms": first["ms"], "tflops": tflops, "left": available_host_memory()}


def show_largest(trials: Trials, chosen: argparse.Namespace, on_disk: bool) -> None:
    """Find the deepest model that trains: from the deepest that fits by arithmetic, one layer less at a time."""
    directory = str(chosen.directory) if on_disk else None
    space = trials.run(what="space", device=chosen.device, directory=directory)
    if "error" in space:
        print(f"\nThe free memory could not be measured: {space['error']}")
        return
    on_gpu = chosen.device == "cuda" and not chosen.tiny
    found = dict(space if on_gpu else TINY_SPACE)
    if on_disk and chosen.disk is not None:
        found["disk"] = min(found["disk"], chosen.disk * 1e9)
    tiers = {tier: float(found[tier]) for tier in (("device", "host", "disk") if on_disk else ("device", "host"))}
    shape = TINY if chosen.tiny else Workload(TINY.model, 1, HEADS[chosen.width], chosen.width, chosen.batch)
    limit = sum(tiers.values()) / BYTES / 1e9
    table: list[list[Any]] = []
    tried: list[tuple[Workload, Filling, str | None]] = []
    while not tried or tried[0][2] is None:  # the deepest first
        work = replace(shape, layers=len(tried) + 1)
        filling = fill(work.config.parameters, tiers, buffers_of(work, on_gpu))
        tried.insert(0, (work, filling, filling.explain_excess(tiers)))
    for work, filling, excess in tried[: chosen.attempts]:
        result: Result = {"out_of_memory": f"not started: {excess}"}
        if excess is None:
            given = {"shape": asdict(work), "filling": asdict(filling), "directory": directory}
            given |= {"host_bytes": int(tiers["host"]), "steps": chosen.largest_steps}
            result = trials.run(what="depth", device=chosen.device, **given)
        billions = work.config.parameters / 1e9
        peaks = [gigabytes(result.get(key)) for key in ("allocated", "reserved", "host", "disk")]
        parts = filling.optimizer | {f"parameters {tier}": part for tier, part in filling.parameters.items()}
        offloaded = ", ".join(f"{name} {part:.3g}" for name, part in parts.items())
        cells = [work.layers, billions, ratio(billions, limit), filling.share, offloaded, *peaks, result.get("ms")]
        table.append([*cells, result.get("tflops"), failure(result)])
        if not failure(result):
            break
    sizes = ", ".join(f"{tier} {nbytes / 1e9:.4g}" for tier, nbytes in tiers.items())
    print(f"\nThe largest GPT of width {shape.width}, batch {shape.batch}. GB: {sizes}")
    print(f"Limit: {limit:.4g} B, what the bytes of all tiers would hold at {BYTES} a parameter. FSDP2's offload keeps")
    print(f"them all on the host, where at most {tiers['host'] / BYTES / 1e9:.4g} B fit.")
    heads = ("layers", "B", "of the limit", "filled", "optimizer on", "allocated GB", "reserved GB", "host GB")
    trials.show("with disk" if on_disk else "largest", (*heads, "disk GB", "ms a step", "TFLOPS", ""), table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for and print tables."""
    parser = make_parser(__doc__, timeout=300, steps=10, repeats=3, batch=4, largest_steps=3, attempts=6)
    sections: dict[str, Callable[[], None]] = {
        "step": lambda: show_steps("step", chosen.variants, trials, chosen),
        "fractions": lambda: show_steps("fractions", list(FRACTIONS), trials, chosen),
        "largest": lambda: show_largest(trials, chosen, on_disk=False),
        "disk": lambda: show_largest(trials, chosen, on_disk=True),
    }
    parser.add_argument("--only", nargs="+", choices=list(sections), default=list(sections))
    parser.add_argument("--row", choices=GPTS, default="1.4B, batch 16", help="of step and fractions")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="of step")
    parser.add_argument("--width", type=int, choices=list(HEADS), default=4096, help="of the largest model")
    parser.add_argument("--disk", type=float, help="GB of the disk that may be used (default: all but 4)")
    parser.add_argument("--directory", type=Path, default=Path(), help="for states on disk")
    chosen = parser.parse_args(argv)
    trials = Trials("offload", measure, chosen)
    print("one rank alone")
    for section in chosen.only:
        sections[section]()
