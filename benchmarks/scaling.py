"""How the cost of a step grows: with the number of ranks, with depth, and with the number of parameters.

    python -m benchmarks scaling                                   # on a GPU, or on a CPU with small shapes
    python -m benchmarks scaling --only parameters --variants floor "zeroshard 3"
    python -m benchmarks scaling --tiny --device cpu

A GPT that computes little, so that the host is the limit, as one rank of many; every point is a process of its own. The
group's other ranks do not exist and a collective is one operation (`echo.py`), so what grows is the library. *Ranks*: 1
to 1,024 of them. *Depth*: 12 to 192 blocks; of up to 31, each is a unit. *Parameters*: a linear layer's weight is 1 to
64 tensors, of as many elements in all; a unit has more parameters, the model has the same units. The floor, forward and
backward alone, grows too: there, for what torch does with more modules and tensors.

Slopes are those of a line through all points, by least squares: microseconds of the host, and of a step, for one more
rank, block or parameter; *above the floor* is what is left when the floor's slope is taken away. A second table has the
collectives of a step, and the megabytes at its peak: allocated, and reserved for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import echo
from benchmarks.rank import one_rank
from benchmarks.record import described, machine
from benchmarks.rows import Row
from benchmarks.steady import steady
from benchmarks.table import Result, middle, said
from benchmarks.trial import Trials, options, parsed
from benchmarks.variants import VARIANTS, Job

COMPARED = ("floor", "FSDP2", "zeroshard 3")
SIZES = {
    "ranks": (1, 4, 16, 64, 256, 1024),
    "depth": (12, 24, 48, 96, 192),
    "parameters": (1, 4, 16, 64),
}
TINY = {"ranks": (1, 4), "depth": (2, 4), "parameters": (1, 2)}
FIELDS = {"ranks": "ranks", "depth": "layers", "parameters": "pieces"}
LAYERS = 4  # linear layers of a block
TIMES = {"host_ms": "host ms", "ms": "step ms"}
MEMORY = {"collectives": "collectives", "allocated": "MB", "reserved": "reserved MB"}
MEGABYTES = ("allocated", "reserved")  # the figures that results have in bytes
SHAPES = {  # a weight's rows are cut into up to 64 tensors
    "cpu": Row(layers=12, heads=2, width=64, batch=1, sequence=8, vocabulary=64, recomputed=False, ranks=8),
    "cuda": Row(layers=12, heads=8, width=1024, batch=1, sequence=1024, vocabulary=512, recomputed=False, ranks=8),
}


def row_of(axis: str, size: int, device: str, tiny: bool = False) -> Row:
    """The work at one point of an axis."""
    shape = replace(SHAPES[device], layers=2) if tiny else SHAPES[device]
    return replace(shape, **{FIELDS[axis]: size})  # type: ignore[arg-type]


def measure(axis: str, size: int, variant: str, device: str, steps: int, tiny: bool = False) -> Result:
    """Run one point in this process."""
    if device == "cpu":
        torch.set_num_threads(1)  # the time of the process is then that of the thread that launches
    chosen = row_of(axis, size, device, tiny)
    with one_rank(device, (chosen.ranks,), backend=echo.NAME) as mesh:
        return steady(Job(chosen, device, mesh), variant, steps)


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Slope and beginning of the line nearest to points, by least squares; None where they make no line.

    >>> slope([(1, 5.0), (2, 7.0), (3, 9.0)])
    (2.0, 3.0)
    """
    if len({x for x, _ in points}) < 2:
        return None
    line = statistics.linear_regression(*zip(*points, strict=True))
    return line.slope, line.intercept


def counted(axis: str, row: Row) -> int:
    """What is counted along an axis: ranks, blocks, or the parameters of all blocks' linear layers."""
    return {"ranks": row.ranks, "depth": row.layers, "parameters": LAYERS * row.layers * row.pieces}[axis]


class Growth:
    """The points of one axis, by variant."""

    def __init__(self, axis: str, rows: dict[int, Row], found: dict[tuple[str, int], list[Result]]) -> None:
        self.axis, self.rows, self.found = axis, rows, found
        self.variants = list(dict.fromkeys(variant for variant, _ in found))

    def table(self, figures: dict[str, str]) -> tuple[list[str], list[list[Any]]]:
        """Figures of each point, by what results and columns call them."""
        heads = [self.axis, *(f"{variant}, {what}" for variant in self.variants for what in figures.values()), "note"]
        rows = []
        for size, row in self.rows.items():
            runs = [self.found[variant, size] for variant in self.variants]
            cells = [_shown(each, key) for each in runs for key in figures]
            rows.append([counted(self.axis, row), *cells, next((why for each in runs if (why := said(each[-1]))), "")])
        return heads, rows

    def slopes(self) -> list[list[Any]]:
        """What one more costs, in µs: the host's, that above the floor's, and a step's."""
        lines = {(variant, key): self._line(variant, key) for variant in self.variants for key in ("host_ms", "ms")}
        table = []
        for variant in self.variants:
            host, step, floor = lines[variant, "host_ms"], lines[variant, "ms"], lines.get(("floor", "host_ms"))
            above = 1e3 * (host[0] - floor[0]) if host and floor else None
            begin = host[1] if host else None
            cells = [1e3 * host[0] if host else None, above, 1e3 * step[0] if step else None, begin]
            table.append([f"a {self.axis.removesuffix('s')}" if self.axis != "depth" else "a block", variant, *cells])
        return table

    def _line(self, variant: str, key: str) -> tuple[float, float] | None:
        known = [(counted(self.axis, row), middle(self.found[variant, size], key)) for size, row in self.rows.items()]
        return slope([(x, y) for x, y in known if y is not None])


def _shown(results: list[Result], key: str) -> float | None:
    value = middle(results, key)
    return value / 1e6 if value is not None and key in MEGABYTES else value


def main(argv: Sequence[str] | None = None) -> None:
    """Run all points, the variants in turn, and print tables."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(COMPARED))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=1)
    chosen = parsed(parser, argv)
    trials, slopes = Trials(__name__, chosen), []
    print(described(machine(chosen.device)))
    for axis in chosen.only:
        rows = {size: row_of(axis, size, chosen.device, chosen.tiny) for size in (TINY if chosen.tiny else SIZES)[axis]}
        run = partial(trials.run, axis=axis, device=chosen.device, steps=chosen.steps, tiny=chosen.tiny)
        for _ in range(chosen.repeats):
            for size in rows:
                for variant in chosen.variants:
                    run(size=size, variant=variant)
        points = [(variant, size) for variant in chosen.variants for size in rows]
        found = {(variant, size): trials.of(axis=axis, variant=variant, size=size) for variant, size in points}
        growth = Growth(axis, rows, found)
        print(f"\n{axis}")
        trials.show(axis, *growth.table(TIMES))
        trials.show(f"{axis}, memory", *growth.table(MEMORY))
        slopes += growth.slopes()
    print("\nWhat one more costs; the last column is where the line begins")
    heads = ("one more", "variant", "host µs", "above the floor's", "step µs", "host ms at none")
    trials.show("slopes", heads, slopes)
