"""The optimizer's step alone: on the device, compared with a copy of memory, and on the host, compared with torch.

    python -m benchmarks update                                       # 1.4 billion parameters in bf16, fused AdamW
    python -m benchmarks update --billions 0.5 --clip --repeats 20
    python -m benchmarks host_adam                          # 100 million parameters; 1 thread, half the cores, all
    python -m benchmarks host_adam --threads 4 8 --numel 400000000
    python -m benchmarks muon                               # GPT 1.4B as 1 of 64, on a GPU
    python -m benchmarks muon --tiny --device cpu

Each run is a process of its own, and a figure is the median of its repeats.

update: in one pass and torch's way. 28 bytes a parameter are counted, which every update needs: a gradient of 2,
master, momentum and variance of 4 each, read and written, and a parameter of 2. Torch's way moves 40. The ratio is to a
plain `copy_` of fp32. "host" is how long `step()` keeps the host; "taken" is what a step allocates. On a
CPU there is only torch's way.

host_adam: all hold parameter and moments in fp32. "bf16" reads the gradient in bf16 and writes a copy of the parameter
in bf16: torch's and DeepSpeed's updates do so by copies before and after. "beside" writes the new values to other
memory, so that the update can still be dropped. Bytes are the least that must be moved.

muon: a step of `MuonWithAdamW` on the fake backend, whose exchanges cost copies and no wire. The floor is the matrix
products of Newton–Schulz alone, on the matrices that this rank, the first, owns: without the matrices that are added
to two of three products, and with them, read and added by the product's own kernel. With FSDP2 every rank gathers the
momentum of every matrix, orthogonalizes it, and updates its own shard: what people write around `full_tensor()`.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import zeroshard
from benchmarks.harness.record import Result, failure, gigabytes, ratio
from benchmarks.harness.training import Memory, one_rank
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import Job, draw, fsdp2, precision
from benchmarks.harness.workloads import WORKLOADS, Workload
from zeroshard.optim import MuonWithAdamW, step
from zeroshard.optim.cpu.kernels import load_kernels
from zeroshard.optim.hyperparams import AdamHyperparams
from zeroshard.optim.newton_schulz.orthogonalize import orthogonalize
from zeroshard.sharding import find_block_matrices

NEEDED = 28  # bytes a parameter
MAX_COPIED = 2**28  # elements of the copy
UNITS = 24  # that the parameters are in
NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5  # Muon's defaults
SLEEP_CYCLES = 20_000_000  # that the device waits, so that the host runs ahead as it does in training
KERNELS = {  # kinds of kernels → parts of their names
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "symmetric_kernel"),
    "momentum and update": ("momentum_kernel",),
    "decay and addition": ("value_kernel",),
    "AdamW": ("adam",),
    "copies": ("copy", "Copy", "Memcpy"),
    "norm and division": ("reduce", "div"),
}
CYCLES_PER_SECOND = 2_000_000_000  # of the device's clock, or a little more than that


class ManyParameters(nn.Module):
    """Parameters and almost no computation."""

    def __init__(self, numel: int, device: str) -> None:
        super().__init__()
        each = numel // UNITS
        self.units = nn.ModuleList(nn.ParameterList([torch.zeros(each, device=device)]) for _ in range(UNITS))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """Return a number that depends on all parameters."""
        return torch.stack([(unit[0] * factor).sum(dtype=torch.float32) for unit in self.units]).sum()


def measure_update(way: str, numel: int, device: str, repeats: int, clip: bool, precision: str) -> Result:
    """Time the steps of one way in this process."""
    if way == "torch's way":
        step.kernel_for = lambda *_: None
    elif device == "cpu":
        raise ValueError("a CPU has no update in one pass: give --device cuda")
    copied = _copy_bandwidth(min(numel, MAX_COPIED), device, repeats)
    with Memory(device) as memory:
        model: Any = ManyParameters(numel, device)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        units = [f"units.{index}" for index in range(UNITS)]
        model, optimizer = zeroshard.shard(model, inner, precision=precision, units=units)
        optimizer.scale(model(torch.full((), 1e-6, device=device))).backward()
        for _ in range(3):  # the first allocates the states, and compiles
            optimizer.step()
        memory.restart()
        held, times = memory.now, []
        for _ in range(repeats):
            if clip:
                optimizer.clip_grad_norm_(1.0)
            times.append(_time(optimizer.step, device))
        taken = memory.peak()["allocated"] - held
    seconds, host = (statistics.median(values) for values in zip(*times, strict=True))
    found = {"ms": seconds * 1e3, "host_ms": host * 1e3, "gb_s": NEEDED * numel / seconds / 1e9}
    return {**found, "copy_gb_s": copied, "taken": taken}


def _copy_bandwidth(numel: int, device: str, repeats: int) -> float:
    """Return GB/s of a plain copy, read and written."""
    source, target = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    for _ in range(3):
        target.copy_(source)
    found = [_time(lambda: target.copy_(source), device)[0] for _ in range(repeats)]
    return 8 * numel / statistics.median(found) / 1e9


def _time(work: Callable[[], object], device: str, sleep_cycles: int = SLEEP_CYCLES) -> tuple[float, float]:
    """Return the seconds of the device, and of the host."""
    if device != "cuda":
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin,) * 2
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(sleep_cycles)
    first.record()
    begin = time.perf_counter()
    work()
    host = time.perf_counter() - begin
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3, host


def measure_muon(way: str, shape: dict[str, Any], device: str, repeats: int) -> Result:
    """Time the steps of Muon in one way, as one rank of many, in this process."""
    work = Workload(**shape)
    with one_rank(device, (work.ranks,)) as mesh, Memory(device) as memory:
        job = Job(work, device, mesh)
        if way == "FSDP2":
            loop = fsdp2(job)
            step, loss = _gathered_muon(loop.model), loop.model(*job.inputs())
            shapes, floors = [], {}
        else:
            model = job.model(on_meta=True)
            given = {"precision": precision(device), "mesh": mesh, "init_fn": draw}
            model, optimizer = zeroshard.shard(model, _muon_with_adamw(model), stage=3, **given)
            step, loss = optimizer.step, model(*job.inputs())
            owned = zeroshard.report(model).routing.matrices
            names = [name for name, matrix in owned.items() if matrix.owner == 0]
            shapes = [model.get_parameter(name).shape for name in names]
            floors = {"products_ms": False, "adding_products_ms": True}  # whether they add
        loss.backward()
        warmup = [_time(step, device)[1] for _ in range(3)]
        sleep_cycles = int(1.5 * CYCLES_PER_SECOND * warmup[-1])  # until the host has started everything
        memory.restart()
        times = [_time(step, device, sleep_cycles) for _ in range(repeats)]
        peak = memory.peak()["allocated"]
        products = {}
        for name, adds in floors.items():
            floor = _newton_schulz(shapes, device, adds)
            products[name] = 1e3 * statistics.median(_time(floor, device)[0] for _ in range(repeats))
        kernels = _kernel_ms(step) if device == "cuda" and way != "FSDP2" else {}
    seconds, host = (statistics.median(values) for values in zip(*times, strict=True))
    return {"ms": seconds * 1e3, "host_ms": host * 1e3, "allocated": peak, "kernels": kernels, **products}


def _kernel_ms(step: Callable[[], object], steps: int = 5) -> dict[str, float]:
    """Return the milliseconds of a step's kernels, by kind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        name = next((kind for kind, words in KERNELS.items() if any(word in event.key for word in words)), "others")
        found[name] = found.get(name, 0.0) + event.self_device_time_total / 1e3 / steps

    return found


def _muon_with_adamw(model: nn.Module) -> MuonWithAdamW:
    matrices = set(find_block_matrices(model))
    named = dict(model.named_parameters())
    muon = torch.optim.Muon([p for name, p in named.items() if name in matrices], adjust_lr_fn="match_rms_adamw")
    return MuonWithAdamW(muon, torch.optim.AdamW([p for name, p in named.items() if name not in matrices], fused=True))


def _gathered_muon(model: nn.Module) -> Callable[[], None]:
    """Return a step of Muon that gathers the momentum of each matrix, and of AdamW for the other parameters."""
    matrices = set(find_block_matrices(model))
    chosen = [p for name, p in model.named_parameters() if name in matrices]
    adamw = torch.optim.AdamW([p for name, p in model.named_parameters() if name not in matrices], fused=True)
    momenta: dict[nn.Parameter, Any] = {}

    @torch.no_grad()
    def step() -> None:
        for parameter in chosen:
            gradient: Any = parameter.grad
            momentum = momenta.setdefault(parameter, torch.zeros_like(gradient))
            momentum.lerp_(gradient, 0.05)
            full = gradient.lerp(momentum, 0.95).full_tensor()
            (update,) = orthogonalize([full], NS_COEFFICIENTS, NS_STEPS, 1e-7)
            local: Any = distribute_tensor(update, gradient.device_mesh, gradient.placements, src_data_rank=None)
            parameter.mul_(1 - 1e-4).add_(local, alpha=-1e-3)
        adamw.step()

    return step


def _newton_schulz(shapes: list[torch.Size], device: str, adds: bool) -> Callable[[], None]:
    """Return a function that computes only the matrix products of Newton–Schulz iterations.

    ``adds``: two of three add to a matrix, in place, so that nothing is copied.
    """
    matrices = [torch.randn(min(shape), max(shape), device=device, dtype=torch.bfloat16) for shape in shapes]
    for matrix in matrices:
        matrix /= matrix.norm()
    results = [(torch.zeros_like(matrix @ matrix.T), torch.zeros_like(matrix)) for matrix in matrices]

    def multiply() -> None:
        for matrix, (square, result) in zip(matrices, results, strict=True):
            for _ in range(NS_STEPS):
                gram = matrix @ matrix.T
                if adds:
                    result.addmm_(square.addmm_(gram, gram, beta=0.5), matrix, beta=0.5)
                else:
                    gram @ gram @ matrix

    return multiply


def muon(argv: Sequence[str] | None = None) -> None:
    """Run both ways and print a table."""
    parser = make_parser(__doc__, repeats=15)
    chosen = parser.parse_args(argv)
    work = WORKLOADS["tiny"] if chosen.tiny else WORKLOADS["1.4B, batch 16"]
    trials = Trials("muon", measure_muon, chosen, shape=asdict(replace(work, batch=1)), device=chosen.device)
    runs = {way: trials.run(way=way, repeats=2 if chosen.tiny else chosen.repeats) for way in ("zeroshard 3", "FSDP2")}
    rows = []
    for way, run in runs.items():
        floors = [run.get("products_ms"), run.get("adding_products_ms")]
        compared = [cell for floor in floors for cell in (floor, ratio(run.get("ms"), floor))]
        rows.append([way, run.get("ms"), run.get("host_ms"), *compared, gigabytes(run.get("allocated")), failure(run)])
    products = ("its matrix products alone, ms", "ratio", "with what they add, ms", "ratio")
    heads = ("step", "ms", "host ms", *products, "allocated at peak GB", "note")
    trials.show("muon", heads, rows)
    kernels = sorted(runs["zeroshard 3"].get("kernels", {}).items(), key=lambda item: -item[1])
    if kernels:
        trials.show("kernels", ("kernels of zeroshard 3", "ms a step"), kernels)


def update(argv: Sequence[str] | None = None) -> None:
    """Run both ways and print a table."""
    parser = make_parser(__doc__, repeats=15)
    parser.add_argument("--billions", type=float, default=1.4, help="parameters")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--clip", action="store_true", help="clip before each step; the norm itself is not timed")
    chosen = parser.parse_args(argv)
    trials = Trials("update", measure_update, chosen)
    numel = (10_000 if chosen.tiny else int(chosen.billions * 1e9)) // (64 * UNITS) * 64 * UNITS
    given = {"numel": numel, "device": chosen.device, "clip": chosen.clip, "precision": chosen.precision}
    given["repeats"] = 2 if chosen.tiny else chosen.repeats
    print(f"{numel:,} parameters in {chosen.precision}")
    ways = ("one pass", "torch's way") if chosen.device == "cuda" else ("torch's way",)
    runs = {way: trials.run(way=way, **given) for way in ways}
    base, rows = runs["torch's way"].get("ms"), []
    for name, run in runs.items():
        figures = [run.get(key) for key in ("ms", "host_ms", "gb_s", "copy_gb_s")]
        relative = ratio(run.get("gb_s"), run.get("copy_gb_s"))
        rows.append([name, *figures, relative, gigabytes(run.get("taken")), ratio(base, run.get("ms"))])
    heads = ("update", "ms", "host ms", "GB/s", "GB/s of a copy", "ratio", "taken, GB", "times torch's way")
    trials.show("update", heads, rows)


OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STATES = 3 * 4 * 2  # bytes a parameter: master and two moments, read and written
KINDS = {  # what is measured → the least bytes a parameter
    "copy of memory": 4 + 4,
    "torch foreach, fp32": STATES + 4,
    "torch fused, fp32": STATES + 4,
    "torch fused, bf16": STATES + 2 + 2,
    "DeepSpeedCPUAdam, fp32": STATES + 4,
    "DeepSpeedCPUAdam, bf16": STATES + 2 + 2,
    "zeroshard, bf16": STATES + 2 + 2,
    "zeroshard, bf16, beside": STATES + 2 + 2,
}


def measure_host_adam(kind: str, numel: int, threads: int, repeats: int) -> Result:
    """Time one kind in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    if kind == "copy of memory":
        source, target = torch.ones(numel), torch.zeros(numel)
        act: Callable[[], object] = lambda: target.copy_(source)  # noqa: E731
    elif kind.startswith("zeroshard"):
        act = _native_update(numel, threads, beside=kind.endswith("beside"))
    else:
        act = _torch_update(kind, numel)
    for _ in range(2):  # states are allocated, pages are mapped
        act()
    return {"ns": statistics.median(_time(act, "cpu")[0] for _ in range(repeats)) / numel * 1e9}


def _native_update(numel: int, threads: int, beside: bool) -> Callable[[], None]:
    kernels = load_kernels()
    if kernels is None:
        raise RuntimeError("no native kernels: see the warning above")
    old = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    new = (torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)) if beside else old
    gradient, copy = torch.randn(numel).bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    options = AdamHyperparams(**OPTIONS)
    return lambda: kernels.adam(*old, gradient, options, out=new, step=10, copy=copy, threads=threads)


def _torch_update(kind: str, numel: int) -> Callable[[], object]:
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = gradient = torch.randn(numel)
    if kind.startswith("DeepSpeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **OPTIONS)
    else:
        optimizer = torch.optim.AdamW([parameter], foreach="foreach" in kind, fused="fused" in kind, **OPTIONS)
    if not kind.endswith("bf16"):
        return lambda: optimizer.step()
    arrived, copy = gradient.bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)

    def update() -> None:
        gradient.copy_(arrived)
        optimizer.step()
        copy.copy_(parameter.detach())

    return update


def host_adam(argv: Sequence[str] | None = None) -> None:
    """Run all kinds and print a table."""
    cores = len(os.sched_getaffinity(0))
    parser = make_parser(__doc__, timeout=240, numel=100_000_000, repeats=9)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--threads", nargs="*", type=int, default=sorted({1, max(1, cores // 2), cores}))
    chosen = parser.parse_args(argv)
    trials, table = Trials("host_adam", measure_host_adam, chosen), []
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    kinds = [kind for kind in chosen.kinds if has_deepspeed or not kind.startswith("DeepSpeed")]
    numel, repeats = (10_000, 2) if chosen.tiny else (chosen.numel, chosen.repeats)
    print(f"{numel:,} parameters, {cores} cores, {torch.backends.cpu.get_cpu_capability()}")
    for threads in chosen.threads:
        runs = {kind: trials.run(kind=kind, numel=numel, threads=threads, repeats=repeats).get("ns") for kind in kinds}
        base = runs.get("torch fused, bf16")
        table += [
            [kind, threads, ns, KINDS[kind], ratio(KINDS[kind], ns), ratio(base, ns)] for kind, ns in runs.items()
        ]
    heads = ("AdamW", "threads", "ns a parameter", "bytes a parameter", "GB/s", "times torch fused, bf16")
    trials.show("adam", heads, table)
