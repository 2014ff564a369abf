"""The optimizer's step alone, in one pass over memory and torch's way, beside a copy of memory in the same process.

    python -m benchmarks update                                       # 1.4 billion parameters in bf16, fused AdamW
    python -m benchmarks update --billions 0.5 --clip --repeats 20
    python -m benchmarks update --blocks 1024x4 2048x4 2048x8 4096x8  # elements and warps of one program
    python -m benchmarks update --tiny --device cpu

Counted are 28 bytes a parameter, which no update can do without: a gradient of 2, master, momentum and variance of 4
each, read and written, and a parameter of 2. Torch's way moves 40. The ratio is of these bytes a second to those of a
plain `copy_` of fp32. "host" is how long `step()` keeps the host; "taken" what a step takes beside all states. On a CPU
there is torch's way alone. Each run is a process of its own, and a figure the median of its repeats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import zeroshard
from benchmarks.rank import Memory
from benchmarks.record import described, machine
from benchmarks.table import Result, gigabytes, ratio
from benchmarks.trial import Trials, options, parsed
from zeroshard.optim import step

NEEDED = 28  # bytes a parameter
COPIED = 2**28  # elements of the copy, at most
UNITS = 24  # that the parameters lie in
AHEAD = 20_000_000  # cycles that the device is kept busy with nothing, for the host to run ahead as it does in training


class Heap(nn.Module):
    """Parameters and next to no computation."""

    def __init__(self, numel: int, device: str) -> None:
        super().__init__()
        each = numel // UNITS
        self.units = nn.ModuleList(nn.ParameterList([torch.zeros(each, device=device)]) for _ in range(UNITS))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """A number that depends on all parameters."""
        return torch.stack([(unit[0] * factor).sum(dtype=torch.float32) for unit in self.units]).sum()


def measure(
    way: str, numel: int, device: str, repeats: int, clip: bool, precision: str, block: int = 0, warps: int = 0
) -> Result:
    """Time the steps of one way in this process; ``block`` and ``warps`` are the kernel's own where they are 0."""
    _choose(way, device, block, warps)
    copied = _bandwidth(min(numel, COPIED), device, repeats)
    with Memory(device) as memory:
        model: Any = Heap(numel, device)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model, optimizer = zeroshard.shard(
            model, inner, precision=precision, units=[f"units.{i}" for i in range(UNITS)]
        )
        optimizer.scale(model(torch.full((), 1e-6, device=device))).backward()

        def step() -> None:
            optimizer.step()

        for _ in range(3):  # the first makes the states, and compiles
            step()
        _wait(device)
        memory.restart()
        held = memory.now
        seconds, host = [], []
        for _ in range(repeats):
            if clip:
                optimizer.clip_grad_norm_(1.0)
            lasted, kept = _timed(step, device)
            seconds.append(lasted)
            host.append(kept)
        taken = memory.peak()["allocated"] - held
    return {
        "ms": statistics.median(seconds) * 1e3,
        "host_ms": statistics.median(host) * 1e3,
        "gb_s": NEEDED * numel / statistics.median(seconds) / 1e9,
        "copy_gb_s": copied,
        "taken": taken,
    }


def _choose(way: str, device: str, block: int, warps: int) -> None:
    """Have this process update in one way."""
    if way == "torch's way":
        step.kernel_for = lambda *_: None
    elif device == "cpu":
        raise ValueError("there is no update in one pass on a CPU")
    elif block:
        from zeroshard.optim.fused_adam.triton_kernel import TritonKernel

        chosen = TritonKernel(torch.device(device, torch.cuda.current_device()), block, warps)
        step.kernel_for = lambda *_: chosen


def _bandwidth(numel: int, device: str, repeats: int) -> float:
    """GB/s of a plain copy, read and written."""
    source, target = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    for _ in range(3):
        target.copy_(source)
    found = [_timed(lambda: target.copy_(source), device)[0] for _ in range(repeats)]
    return 8 * numel / statistics.median(found) / 1e9


def _timed(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds of the device, and of the host."""
    _wait(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
    if events:
        torch.cuda._sleep(AHEAD)
    for event in events[:1]:
        event.record()
    begin = time.perf_counter()
    work()
    host = time.perf_counter() - begin
    for event in events[1:]:
        event.record()
    _wait(device)
    return (events[0].elapsed_time(events[1]) / 1e3 if events else host), host


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Run both ways and print a table."""
    parser = options(__doc__)
    parser.add_argument("--billions", type=float, default=1.4, help="parameters")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--clip", action="store_true", help="clip before each step; the norm itself is not timed")
    parser.add_argument("--blocks", nargs="*", default=[], help="ELEMENTSxWARPS of one program, to compare")
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parsed(parser, argv)
    trials = Trials(__name__, chosen)
    numel = (10_000 if chosen.tiny else int(chosen.billions * 1e9)) // (64 * UNITS) * 64 * UNITS
    given = {"numel": numel, "device": chosen.device, "clip": chosen.clip, "precision": chosen.precision}
    given["repeats"] = 2 if chosen.tiny else chosen.repeats
    print(f"{numel:,} parameters in {chosen.precision}, {described(machine(chosen.device))}")
    runs: dict[str, Result] = {}
    if chosen.device == "cuda":
        runs["one pass"] = trials.run(way="one pass", **given)
        for pair in chosen.blocks:
            block, warps = map(int, pair.split("x"))
            runs[f"one pass, {pair}"] = trials.run(way="one pass", block=block, warps=warps, **given)
    runs["torch's way"] = trials.run(way="torch's way", **given)
    heads = ("update", "ms", "host ms", "GB/s", "GB/s of a copy", "ratio", "taken, GB", "times torch's way")
    base = runs["torch's way"].get("ms")
    rows = [
        [
            name,
            *(run.get(key) for key in ("ms", "host_ms", "gb_s", "copy_gb_s")),
            ratio(run.get("gb_s"), run.get("copy_gb_s")),
            gigabytes(run.get("taken")),
            ratio(base, run.get("ms")),
        ]
        for name, run in runs.items()
    ]
    trials.show("update", heads, rows)


if __name__ == "__main__":
    main()
