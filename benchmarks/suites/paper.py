"""Figures 6 and 7 of the paper: the largest model, and the memory cached, under the configurations C1 to C5.

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
from zeroshard.presets import CONFIGURATIONS

MESH = (25, 16)  # data × tensor: the paper's 400 GPUs
LIMIT, TINY_LIMIT = 32e9, 6e5  # bytes of one


def _gpt(layers: int, heads: int, width: int, batch: int = 16) -> Workload:
    return Workload("frugal gpt", layers=layers, heads=heads, width=width, batch=batch)


FIGURE_7 = {  # model → (workload, cached GB by configuration), Table 8
    "40B": (_gpt(50, 32, 8192), {"C1": 29.7, "C2": 24.1, "C3": 25.4, "C4": 19.8, "C5": 19.8}),
    "100B": (_gpt(125, 64, 8192, batch=32), {"C4": 29.6, "C5": 26.6}),
}
FIGURE_6 = {  # configuration → (the paper's largest model, its parameters in B), Table 7
    "C1": (_gpt(50, 32, 8192), 40),
    "C2": (_gpt(132, 64, 6144), 60),
    "C3": (_gpt(62, 32, 8192), 50),
    "C4": (_gpt(175, 64, 8192), 140),
    "C5": (_gpt(187, 64, 8192), 150),
}


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
    cases = [(model, name) for model, (_, paper) in FIGURE_7.items() for name in paper]
    with ThreadPoolExecutor(chosen.parallel) as pool:
        shapes = {m: replace(_shrink(work), layers=2) if chosen.tiny else work for m, (work, _) in FIGURE_7.items()}
        results = list(pool.map(lambda case: trials.run(configuration=case[1], shape=asdict(shapes[case[0]])), cases))
    table = []
    for (model, name), result in zip(cases, results, strict=True):
        work, paper = FIGURE_7[model]
        cached = gigabytes(result.get("reserved"))
        failed = "out of memory" if "out_of_memory" in result else result.get("error", "").partition("\n")[0]
        cells = [paper[name], cached, ratio(cached, paper[name]), gigabytes(result.get("allocated")), failed]
        table.append([model, work.batch, name, CONFIGURATIONS[name].notation, *cells])
    print("\nFigure 7: memory cached at the peak")
    heads = ("model", "batch", "", "", "paper GB", "zeroshard GB", "of the paper's", "allocated GB", "")
    trials.show("figure 7", heads, table)


def show_figure_6(trials: Trials, chosen: argparse.Namespace) -> None:
    """Find the largest model."""
    papers = {name: FIGURE_6[name] for name in chosen.configurations}
    shapes = {name: _shrink(work) if chosen.tiny else work for name, (work, _) in papers.items()}
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
        paper = papers[name][1]
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
    names = list(FIGURE_6)
    parser.add_argument("--configurations", nargs="*", choices=names, default=names, help="of Figure 6")
    chosen = parser.parse_args(argv)
    trials = Trials("paper", measure, chosen, device=chosen.device, limit=TINY_LIMIT if chosen.tiny else LIMIT)
    print(f"one rank of {MESH[0]} × {MESH[1]}")
    for number in chosen.figures:
        {6: show_figure_6, 7: show_figure_7}[number](trials, chosen)
