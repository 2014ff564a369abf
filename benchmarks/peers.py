"""zeroshard beside its peers and the floor: rows of work, each by every library that can do it.

    python -m benchmarks peers                                                     # all rows, on a GPU; mind --budget
    python -m benchmarks peers --rows "1.4B, batch 2" --variants FSDP2 "zeroshard 3" --repeats 5
    python -m benchmarks peers --device cpu --ranks 2                              # real ranks over gloo
    python -m benchmarks peers --tiny --device cpu --repeats 1

Every trial is a process of its own; repeats are interleaved. `variants.py` says what each library is asked to do,
`rows.py` what the rows are. One rank of many: the others do not exist, nothing passes a wire; memory, computation and
the work of the host are true. A collective is one operation (`echo.py`). With `--backend fake` it is torch's own, whose
all-gather is a copy for each rank: with 64 of them about a millisecond of the host's time, which no real one takes.

*Floor* is forward and backward alone, of the unsharded bf16 model, recomputed by torch or, where that is compared too,
by zeroshard. Every figure is also given as a ratio to the floor's, the less of the two, and to the best peer's, the
least among plain PyTorch, DDP, FSDP2 and DeepSpeed in the row. Tokens and TFLOPS are one rank's, the latter the
model's, without recomputation; MFU is their share of what the device's data sheet promises. *Host* is the processor
time that this process spent until a step returned, *returned* the time until then, the device not waited for. *Sent*
counts an all-gather by its output, a reduce-scatter by its input and an all-reduce twice, in elements as a multiple of
all parameters, and in GB.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import echo, ranks
from benchmarks.rank import alone, one_rank, precision
from benchmarks.record import described, machine
from benchmarks.rows import FLOORS, ON_CPU, ON_GPU, ROWS, Row
from benchmarks.steady import steady, steady_rank
from benchmarks.table import Result, gigabytes, middle, ratio, said, spread
from benchmarks.trial import Trials, options, parsed
from benchmarks.variants import PEERS, VARIANTS, Job
from zeroshard.train.metrics import peak_flops

NOT_NCCL = """\
Real ranks, over gloo, on one machine: times here are not NCCL's. What carries over is memory, what is communicated, and
the work of the host. The first two are counted as one of as many ranks that do not exist: gloo's threads free memory
unseen, and zeroshard makes a reduce-scatter over gloo of an all-reduce, as gloo itself does inside."""


def chosen_row(name: str, tiny: bool, over: int) -> Row:
    """A row as it is to run: small, or by real ranks."""
    row = ROWS[name].tiny if tiny else ROWS[name]
    return row.over(over) if over > 1 else row


def measure(
    row: str, variant: str, device: str, steps: int, tiny: bool = False, over: int = 0, backend: str = echo.NAME
) -> Result:
    """Run one variant of one row, in this process or, ``over`` several ranks, in theirs."""
    _settle(device)
    chosen = chosen_row(row, tiny, over)
    if chosen.place == "ranks":
        found = ranks.run(__name__, "measure_rank", over, row=row, variant=variant, steps=steps, tiny=tiny)
        return {**_counted(chosen, variant, device), **found}
    with _place(chosen, device, backend) as mesh:
        return steady(Job(chosen, device, mesh), variant, steps)


def measure_rank(row: str, variant: str, steps: int, tiny: bool) -> Result:
    """Run one variant of one row as one of the real ranks that there are."""
    _settle("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    chosen = chosen_row(row, tiny, mesh.size())
    return steady_rank(Job(chosen, "cpu", mesh), variant, steps)


def _settle(device: str) -> None:
    if device == "cpu":  # the host's work is measured there, and threads that wait for each other would count as work
        torch.set_num_threads(1)


def _counted(row: Row, variant: str, device: str) -> Result:
    with one_rank(device, (row.ranks,), backend=echo.NAME) as mesh:
        return steady(Job(replace(row, place="one of many"), device, mesh), variant, steps=1)


def _place(row: Row, device: str, backend: str) -> AbstractContextManager[DeviceMesh]:
    return alone(device) if row.place == "alone" else one_rank(device, (row.ranks,), backend=backend)


FIGURES = {  # what a result calls it → the head of its column, which ends in its unit, and that unit
    "ms": ("ms a step", 1.0),
    "host_ms": ("host ms", 1.0),
    "returned_ms": ("returned ms", 1.0),
    "allocated": ("allocated GB", 1e9),
    "reserved": ("reserved GB", 1e9),
    "bytes": ("sent GB", 1e9),
}


class Compared:
    """A row's results, by variant."""

    def __init__(self, name: str, row: Row, found: dict[str, list[Result]], absent: dict[str, str], peak: float | None):
        self.name, self.row, self.found, self.absent = name, row, found, absent
        self._peak = peak  # FLOP/s of the device
        floor = found.get(FLOORS[0], [])
        self.flops, self.parameters = (middle(floor, key) for key in ("flops", "parameters"))
        self.of = {key: {variant: middle(runs, key) for variant, runs in found.items()} for key in FIGURES}

    def floor(self, key: str) -> float | None:
        """The least that forward and backward alone take."""
        return min((value for name in FLOORS if (value := self.of[key].get(name)) is not None), default=None)

    def best(self, key: str) -> tuple[str, float | None]:
        """The peer with the least, and how much that is."""
        known = {name: value for name in PEERS if (value := self.of[key].get(name)) is not None}
        return min(known.items(), key=lambda item: item[1], default=("", None))

    @property
    def heads(self) -> tuple[str, ...]:
        """Of the table."""
        (step, _), *others = FIGURES.values()
        rates = ("spread", f"{self.row.item}/s", "TFLOPS", "MFU")
        figures = ((head, f"{head[:-3]} of the floor", f"{head[:-3]} of the best peer") for head, _ in others)
        ends = ("of allocated", "sent Ψ", "collectives", "note")
        return ("variant", step, "of the floor", "of the best peer", *rates, *chain(*figures), *ends)

    def cells(self, variant: str) -> list[Any]:
        """A row of the table."""
        runs, ms = self.found[variant], self.of["ms"][variant]
        step, *others = (self._beside(key, variant) for key in FIGURES)
        flops = ratio(self.flops and 1e3 * self.flops, ms)
        rates = [spread(runs, "ms"), ratio(1e3 * self.row.items, ms), ratio(flops, 1e12), ratio(flops, self._peak)]
        elements, collectives = (middle(runs, key) for key in ("elements", "collectives"))
        crowded = ratio(self.of["reserved"][variant], self.of["allocated"][variant])
        ends = [crowded, ratio(elements, self.parameters), collectives and int(collectives)]
        note = self.absent.get(variant) or next((why for run in runs if (why := said(run))), "")
        return [variant, *step, *rates, *chain(*others), *ends, note]

    def _beside(self, key: str, variant: str) -> list[float | None]:
        """A figure, and what it is of the floor's and of the best peer's."""
        value = self.of[key][variant]
        return [ratio(value, FIGURES[key][1]), ratio(value, self.floor(key)), ratio(value, self.best(key)[1])]

    def summary(self) -> list[Any]:
        """The floor, the best peer, and the fastest of zeroshard, beside one another."""
        ms, allocated = self.of["ms"], self.of["allocated"]
        mine = {name: value for name, value in ms.items() if name.startswith("zeroshard") and value is not None}
        ours = min(mine, key=mine.__getitem__, default="")
        peer, theirs = self.best("ms")
        least, held = self.best("allocated")
        times = [ms.get(ours), ratio(ms.get(ours), self.floor("ms")), ratio(ms.get(ours), theirs)]
        memory = [gigabytes(allocated.get(ours)), least, ratio(allocated.get(ours), held)]
        crowded = ratio(self.of["reserved"].get(ours), allocated.get(ours))
        return [self.name, self.floor("ms"), peer, theirs, ours, *times, *memory, crowded]


SUMMARY = (
    "row",
    "floor ms",
    "best peer",
    "its ms",
    "zeroshard",
    "ms a step",
    "of the floor",
    "of the best peer",
    "allocated GB",
    "least peer",
    "of the least peer",
    "reserved of allocated",
)


def run_row(name: str, trials: Trials, chosen: argparse.Namespace) -> Compared:
    """All variants of a row in turn, as often as is wanted. What has failed is not tried again."""
    row = chosen_row(name, chosen.tiny, chosen.ranks)
    wanted = [variant for variant in row.variants if variant in chosen.variants or variant == FLOORS[0]]
    absent = {}
    if importlib.util.find_spec("deepspeed") is None:
        absent = {variant: "not installed" for variant in wanted if variant.startswith("DeepSpeed")}
    fixed = {"device": chosen.device, "steps": chosen.steps, "tiny": chosen.tiny, "over": chosen.ranks}
    fixed["backend"] = chosen.backend
    for _ in range(chosen.repeats):
        for variant in wanted:
            if variant not in absent and (why := said(trials.run(row=name, variant=variant, **fixed))):
                absent[variant] = why
    found = {variant: trials.of(row=name, variant=variant) for variant in wanted}
    return Compared(name, row, found, absent, peak_flops(machine(chosen.device)["device"], precision(chosen.device)))


def show(compared: Compared, trials: Trials) -> None:
    """A row's table."""
    size = f"{compared.parameters:,.0f} parameters" if compared.parameters else "size unknown"
    print(f"\n{compared.name}: {size}, {compared.row}")
    trials.show(compared.name, compared.heads, [compared.cells(variant) for variant in compared.found])


def main(argv: Sequence[str] | None = None) -> None:
    """Run all variants of all rows, interleaved, and print tables."""
    parser = options(__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="without it, those for the device")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="and the floor")
    parser.add_argument("--steps", type=int, default=10, help="timed in a trial, after warm-up")
    parser.add_argument("--repeats", type=int, default=3, help="of every trial, interleaved")
    parser.add_argument("--ranks", type=int, default=0, help="real processes over gloo, on a CPU")
    parser.add_argument("--backend", choices=(echo.NAME, "fake"), default=echo.NAME, help="of one rank of many")
    chosen = parsed(parser, argv)
    if chosen.ranks > 1 and chosen.device != "cpu":
        parser.error(f"--ranks {chosen.ranks} run over gloo on a CPU: give --device cpu")
    trials = Trials(__name__, chosen)
    rows = chosen.rows or (["tiny"] if chosen.tiny else ON_GPU if chosen.device == "cuda" else ON_CPU)
    print(described(machine(chosen.device)))
    if chosen.ranks > 1:
        print(NOT_NCCL)
    summary = []
    for name in rows:
        compared = run_row(name, trials, chosen)
        show(compared, trials)
        summary.append(compared.summary())
    print("\nThe fastest of zeroshard beside the floor, the fastest peer and the one that takes least memory")
    trials.show("summary", SUMMARY, summary)
