"""Figures 6 and 7 of the paper: the largest model, and the memory cached, under the configurations C1 to C5, measured.

    python -m benchmarks paper                        # on a GPU with over 100 GB: three runs of 32 GB at a time
    python -m benchmarks paper --tiny --device cpu

One rank of 400 on the fake backend, 25 data-parallel × 16 tensor-parallel, bf16 with fp32 master weights and Adam,
sequences of 1024, every block recomputed, with 32 GB of memory. Shapes and batches are the paper's, Tables 7 and 8.
The loss is computed one sequence at a time: Megatron-LM divides the logits of a batch over the 16 GPUs, and one
sequence has as many. The largest model has the paper's width and heads and as many layers as fit. *Cached* is what
torch's allocator reserves at the peak. A run is a process of two steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import zeroshard
from benchmarks.harness.record import Result, gigabytes, ratio
from benchmarks.harness.search import Found, find_largest
from benchmarks.harness.training import Memory, measure_steps, one_rank
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import Job, ours
from benchmarks.harness.workloads import WORKLOADS, Workload
from benchmarks.paper.printed import FIGURE_6, FIGURE_7, PaperModelFit
from zeroshard.models import CONFIGURATIONS

MESH = (25, 16)  # data × tensor: the paper's 400 GPUs
LIMIT, TINY_LIMIT = 32e9, 6e5  # bytes of one


def _workload(fit: PaperModelFit) -> Workload:
    return Workload("frugal gpt", layers=fit.layers, heads=fit.heads, width=fit.width, batch=fit.batch)


def measure(configuration: str, shape: dict[str, Any], device: str, limit: float) -> Result:
    """Train one model under one configuration in this process."""
    options = CONFIGURATIONS[configuration]
    with one_rank(device, MESH, ("shard", "tensor")) as mesh, Memory(device, limit) as memory:
        job = Job(Workload(**shape), device, mesh)
        training = ours(job, activations=options.checkpoint_options, **{"defragment": False, **options.shard_options})
        measured = measure_steps(training, memory, warmup=0, steps=2)
        report = zeroshard.report(training.model)
    held = {f"{kind}, {tier}": nbytes.peak for (kind, tier), nbytes in report.memory.items()}
    return {**measured, "parameters_here": report.parameters, "held": held}


def show_figure_7(trials: Trials, chosen: argparse.Namespace) -> None:
    """Measure the memory cached."""

    def run(fit: PaperModelFit) -> Result:
        work = _workload(fit)
        shape = asdict(replace(_shrink(work), layers=2) if chosen.tiny else work)
        return trials.run(configuration=fit.configuration, shape=shape)

    with ThreadPoolExecutor(chosen.parallel) as pool:
        results = list(pool.map(run, FIGURE_7))
    table = []
    for fit, result in zip(FIGURE_7, results, strict=True):
        cached = gigabytes(result.get("reserved"))
        failed = "out of memory" if "out_of_memory" in result else result.get("error", "").partition("\n")[0]
        cells = [fit.value, cached, ratio(cached, fit.value), gigabytes(result.get("allocated")), failed]
        notation = CONFIGURATIONS[fit.configuration].notation
        table.append([fit.label, fit.batch, fit.configuration, notation, *cells])
    print("\nFigure 7: memory cached at the peak")
    heads = ("model", "batch", "", "", "paper GB", "zeroshard GB", "of the paper's", "allocated GB", "")
    trials.show("figure 7", heads, table)


def show_figure_6(trials: Trials, chosen: argparse.Namespace) -> None:
    """Find the largest model."""
    papers = {fit.configuration: fit for fit in FIGURE_6 if fit.configuration in chosen.configurations}
    works = {name: _workload(fit) for name, fit in papers.items()}
    shapes = {name: _shrink(work) if chosen.tiny else work for name, work in works.items()}
    limit = TINY_LIMIT if chosen.tiny else LIMIT

    def search(name: str) -> Found:
        work = shapes[name]
        first = max(2, work.layers // 5), max(3, 2 * work.layers // 5)

        def attempt(layers: int) -> Result:
            return trials.run(configuration=name, shape=asdict(replace(work, layers=layers)))

        return find_largest(attempt, first, limit, within=0.02)

    with ThreadPoolExecutor(chosen.parallel) as pool:
        found = dict(zip(shapes, pool.map(search, shapes), strict=True))
    table = []
    for name, result in found.items():
        paper = papers[name].value
        fits, fails = (_billions(shapes[name], layers) for layers in (result.fits, result.fails))
        cached = gigabytes(result.tried.get(result.fits, {}).get("reserved"))
        cells = [fits, ratio(fits, paper), result.fits, cached, fails, result.fails]
        table.append([name, CONFIGURATIONS[name].notation, paper, *cells, (result.error or "").partition("\n")[0]])
    print(f"\nFigure 6: the largest model in {limit / 1e9:g} GB")
    heads = ("", "", "paper, B", "zeroshard, B", "of the paper's", "layers", "cached GB", "does not fit, B")
    trials.show("figure 6", (*heads, "layers that do not fit", ""), table)


def _shrink(work: Workload) -> Workload:
    return replace(WORKLOADS["tiny"], model=work.model, layers=max(2, work.layers // 10), batch=1)


def _billions(work: Workload, layers: int | None) -> float | None:
    return replace(work, layers=layers).config.parameters / 1e9 if layers else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run both figures and print tables."""
    parser = make_parser(__doc__, parallel=3)
    parser.add_argument("--figures", nargs="*", type=int, choices=(6, 7), default=(7, 6))
    names = [fit.configuration for fit in FIGURE_6]
    parser.add_argument("--configurations", nargs="*", choices=names, default=names, help="of Figure 6")
    chosen = parser.parse_args(argv)
    trials = Trials("paper", measure, chosen, device=chosen.device, limit=TINY_LIMIT if chosen.tiny else LIMIT)
    print(f"one rank of {MESH[0]} × {MESH[1]}")
    for number in chosen.figures:
        {6: show_figure_6, 7: show_figure_7}[number](trials, chosen)
