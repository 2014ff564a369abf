"""How the cost of a step grows: with the number of ranks, with depth, and with the number of parameters.

    python -m benchmarks scaling                                   # on a GPU, or on a CPU with small shapes
    python -m benchmarks scaling --only parameters --variants floor "zeroshard 3"
    python -m benchmarks scaling --tiny --device cpu

A GPT that computes little, so that the host is the limit, as one rank of many; every point is a process of its own. The
other ranks do not exist and a collective is one operation, so the library is what grows. Up to 31 blocks, each is a
unit. For more parameters, the weights of linear layers are split; the units stay the same. The floor, forward and
backward alone, grows too, with torch's work for modules and tensors. Slopes are those of a least-squares line:
microseconds for one more rank, block or parameter; *above the floor* is after subtracting the floor's slope.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.collectives import ECHO
from benchmarks.harness.record import Result, median
from benchmarks.harness.training import one_rank
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import VARIANTS, Job
from benchmarks.harness.workloads import Workload
from benchmarks.suites.peers import measure_variant

COMPARED = ("floor", "FSDP2", "zeroshard 3")
SIZES = {"ranks": (1, 4, 16, 64, 256, 1024), "depth": (12, 24, 48, 96, 192), "parameters": (1, 4, 16, 64)}
TINY = {"ranks": (1, 4), "depth": (2, 4), "parameters": (1, 2)}
FIELDS = {"ranks": "ranks", "depth": "layers", "parameters": "pieces"}
LAYERS = 4  # linear layers of a block
TIMES = {"host_ms": "host ms", "ms": "step ms"}
MEMORY = {"collectives": "collectives", "allocated": "MB", "reserved": "reserved MB"}
SHAPES = {  # a weight's rows are split into up to 64 tensors
    "cpu": Workload(layers=12, heads=2, width=64, batch=1, sequence=8, vocabulary=64, recomputed=False, ranks=8),
    "cuda": Workload(layers=12, heads=8, width=1024, batch=1, sequence=1024, vocabulary=512, recomputed=False, ranks=8),
}


def point(axis: str, size: int, device: str, tiny: bool = False) -> Workload:
    """Return the workload at one point of an axis."""
    shape = replace(SHAPES[device], layers=2) if tiny else SHAPES[device]
    return replace(shape, **{FIELDS[axis]: size})  # type: ignore[arg-type]


def measure(axis: str, size: int, variant: str, device: str, steps: int, tiny: bool = False) -> Result:
    """Run one point in this process."""
    work = point(axis, size, device, tiny)
    with one_rank(device, (work.ranks,), backend=ECHO) as mesh:
        return measure_variant(Job(work, device, mesh), variant, steps)


def fit_line(points: Sequence[tuple[float, float]]) -> statistics.LinearRegression | None:
    """Return the least-squares line, None if there is none.

    >>> fit_line([(1, 5.0), (2, 7.0), (3, 9.0)])
    LinearRegression(slope=2.0, intercept=3.0)
    """
    has_line = len({x for x, _ in points}) > 1
    return statistics.linear_regression(*zip(*points, strict=True)) if has_line else None


def count(axis: str, work: Workload) -> int:
    """Return what is counted along an axis: ranks, blocks, or the parameters of all linear layers of the blocks."""
    return {"ranks": work.ranks, "depth": work.layers, "parameters": LAYERS * work.layers * work.pieces}[axis]


@dataclass
class Growth:
    """The results along one axis, by variant and size."""

    axis: str
    points: dict[int, Workload]
    variants: Sequence[str]
    found: dict[tuple[str, int], list[Result]]
    notes: dict[int, dict[str, str]]  # by size and variant: why it has no figures

    def table(self, figures: dict[str, str]) -> tuple[list[str], list[list[Any]]]:
        """Return heads and rows with these figures of each point: key of a result → its name in a head."""
        heads = [self.axis, *(f"{variant}, {what}" for variant in self.variants for what in figures.values()), "note"]
        rows = []
        for size, work in self.points.items():
            runs = [self.found[variant, size] for variant in self.variants]
            values = [(key, median(each, key)) for each in runs for key in figures]
            cells = [value / 1e6 if value and key in ("allocated", "reserved") else value for key, value in values]
            note = next((why for why in self.notes[size].values() if why), "")
            rows.append([count(self.axis, work), *cells, note])
        return heads, rows

    def slopes(self) -> list[list[Any]]:
        """Return what one more costs by variant, in µs: the host's, that above the floor's, and a step's."""
        table, floor = [], self._line("floor", "host_ms") if "floor" in self.variants else None
        for variant in self.variants:
            host, step = self._line(variant, "host_ms"), self._line(variant, "ms")
            above = 1e3 * (host.slope - floor.slope) if host and floor else None
            slopes = [1e3 * line.slope if line else None for line in (host, step)]
            one = "a block" if self.axis == "depth" else f"a {self.axis.removesuffix('s')}"
            table.append([one, variant, slopes[0], above, slopes[1], host.intercept if host else None])
        return table

    def _line(self, variant: str, key: str) -> statistics.LinearRegression | None:
        known = [(count(self.axis, work), median(self.found[variant, size], key)) for size, work in self.points.items()]
        return fit_line([(x, y) for x, y in known if y is not None])


def main(argv: Sequence[str] | None = None) -> None:
    """Run all points, the variants in turns, and print tables."""
    parser = make_parser(__doc__, steps=15, repeats=1)
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(COMPARED))
    chosen = parser.parse_args(argv)
    given = {"device": chosen.device, "steps": chosen.steps, "tiny": chosen.tiny}
    trials, slopes = Trials("scaling", measure, chosen, **given), []
    for axis in chosen.only:
        sizes = (TINY if chosen.tiny else SIZES)[axis]
        notes = {size: trials.run_variants(chosen.variants, chosen.repeats, axis=axis, size=size) for size in sizes}
        pairs = [(variant, size) for size in sizes for variant in chosen.variants]
        found = {(variant, size): trials.matching(axis=axis, variant=variant, size=size) for variant, size in pairs}
        points = {size: point(axis, size, chosen.device, chosen.tiny) for size in sizes}
        growth = Growth(axis, points, chosen.variants, found, notes)
        print(f"\n{axis}")
        trials.show(axis, *growth.table(TIMES))
        trials.show(f"{axis}, memory", *growth.table(MEMORY))
        slopes += growth.slopes()
    print("\nWhat one more costs; the last column is where the line begins")
    heads = ("one more", "variant", "host µs", "above the floor's", "step µs", "host ms at none")
    trials.show("slopes", heads, slopes)
