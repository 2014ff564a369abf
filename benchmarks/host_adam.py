"""Nanoseconds a parameter of AdamW on the host: torch's, DeepSpeed's, and the native kernel of `zeroshard.optim.cpu`.

    python -m benchmarks host_adam                              # 100 million parameters; 1 thread, half the cores, all
    python -m benchmarks host_adam --threads 4 8 --numel 400000000
    python -m benchmarks host_adam --tiny

All hold parameter and moments in fp32. "bf16" reads the gradient in bf16 and leaves a copy of the parameter in bf16, as
training in bf16 needs it: torch's and DeepSpeed's updates do so by copies before and after. "beside" writes the new
values to other memory, so that the update may still be dropped. Bytes are those that must be moved at least; GB/s of a
plain copy of memory says how many can be. DeepSpeed's is left out where it is not installed. Each run is a process of
its own, and a figure the median of its repeats.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.record import described, machine
from benchmarks.table import Result, ratio
from benchmarks.trial import Trials, options, parsed
from zeroshard.optim import AdamHyperparams, load_kernels

CHOSEN = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STATES = 3 * 4 * 2  # bytes a parameter: master and two moments, read and written
# What is measured: its name, and the bytes a parameter that it cannot do without.
KINDS = {
    "copy of memory": 4 + 4,
    "torch foreach, fp32": STATES + 4,
    "torch fused, fp32": STATES + 4,
    "torch fused, bf16": STATES + 2 + 2,
    "DeepSpeedCPUAdam, fp32": STATES + 4,
    "DeepSpeedCPUAdam, bf16": STATES + 2 + 2,
    "zeroshard, bf16": STATES + 2 + 2,
    "zeroshard, bf16, beside": STATES + 2 + 2,
}


def measure(kind: str, numel: int, threads: int, repeats: int) -> Result:
    """Time one kind in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    if kind == "copy of memory":
        source, target = torch.ones(numel), torch.zeros(numel)
        return _timed(lambda: target.copy_(source), numel, repeats)
    if kind.startswith("zeroshard"):
        return _timed(_ours(numel, threads, beside=kind.endswith("beside")), numel, repeats)
    return _timed(_theirs(kind, numel), numel, repeats)


def _timed(update: Callable[[], object], numel: int, repeats: int) -> Result:
    for _ in range(2):  # states are made, pages are mapped
        update()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - begin)
    return {"ns": statistics.median(seconds) / numel * 1e9}


def _ours(numel: int, threads: int, beside: bool) -> Callable[[], None]:
    found = load_kernels()
    if found is None:
        raise RuntimeError("no native kernels: see the warning above")
    old = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    new = (torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)) if beside else old
    gradient, copy = torch.randn(numel).bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    chosen = AdamHyperparams(**CHOSEN)
    return lambda: found.adam(*old, gradient, chosen, out=new, step=10, copy=copy, threads=threads)


def _theirs(kind: str, numel: int) -> Callable[[], None]:
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = gradient = torch.randn(numel)
    if kind.startswith("DeepSpeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **CHOSEN)
    else:
        optimizer = torch.optim.AdamW([parameter], foreach="foreach" in kind, fused="fused" in kind, **CHOSEN)
    if not kind.endswith("bf16"):
        return lambda: optimizer.step()
    arrived, copy = gradient.bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)

    def update() -> None:
        gradient.copy_(arrived)
        optimizer.step()
        copy.copy_(parameter.detach())

    return update


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print a table."""
    cores = len(os.sched_getaffinity(0))
    parser = options(__doc__, timeout=240)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--threads", nargs="*", type=int, default=sorted({1, max(1, cores // 2), cores}))
    parser.add_argument("--numel", type=int, default=100_000_000, help="parameters: far more than caches hold")
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parsed(parser, argv)
    trials = Trials(__name__, chosen)
    peer = importlib.util.find_spec("deepspeed") is not None
    kinds = [kind for kind in chosen.kinds if peer or not kind.startswith("DeepSpeed")]
    numel, repeats = (10_000, 2) if chosen.tiny else (chosen.numel, chosen.repeats)
    print(
        f"{numel:,} parameters, {cores} cores, {described(machine('cpu'))}, {torch.backends.cpu.get_cpu_capability()}"
    )
    table = []
    for threads in chosen.threads:
        runs = {kind: trials.run(kind=kind, numel=numel, threads=threads, repeats=repeats).get("ns") for kind in kinds}
        for kind, ns in runs.items():
            table.append(
                [kind, threads, ns, KINDS[kind], ratio(KINDS[kind], ns), ratio(runs.get("torch fused, bf16"), ns)]
            )
    trials.show(
        "adam", ("AdamW", "threads", "ns a parameter", "bytes a parameter", "GB/s", "times torch fused, bf16"), table
    )
