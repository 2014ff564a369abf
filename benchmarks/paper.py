"""Figures 6 and 7 of the paper: the largest model, and the memory cached, under the configurations C1 to C5.

    python -m benchmarks paper                        # on a GPU with over 100 GB: three runs of 32 GB at a time
    python -m benchmarks paper --tiny --device cpu

One rank of 400 on the fake backend, 25 data-parallel × 16 tensor-parallel, bf16 with fp32 master weights and Adam,
sequences of 1024, every block recomputed, with 32 GB of memory: true memory and compute, no wire. Shapes and batches
are those of the paper's Tables 7 and 8. The loss is computed a sequence at a time: Megatron-LM, which the paper's
models are built with, divides the logits of a batch over the 16 GPUs, and one sequence has as many. The largest model
has the width and heads of the paper's and as many layers as fit: two depths are measured, the line through them is
followed to the limit, and its end is confirmed by a run that fits and one that does not. *Cached* is what torch's
allocator reserves at peak. A run is a process of two steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import torch

import zeroshard
from benchmarks.rank import TINY, FrugalGPT, Memory, Training, one_rank, shape_of, zeroshard_gpt
from benchmarks.record import described, machine
from benchmarks.search import Largest, largest
from benchmarks.table import Result, gigabytes, ratio
from benchmarks.trial import Trials, options, parsed
from zeroshard.presets import CONFIGURATIONS, GPTPreset

MESH = (25, 16)  # data × tensor: the paper's 400 GPUs
LIMIT = 32e9  # bytes of one
TINY_LIMIT = 6e5
FIGURE_7 = {  # model → (shape, sequences a replica, cached GB by configuration), Table 8
    "40B": (GPTPreset(50, 32, 8192), 16, {"C1": 29.7, "C2": 24.1, "C3": 25.4, "C4": 19.8, "C5": 19.8}),
    "100B": (GPTPreset(125, 64, 8192), 32, {"C4": 29.6, "C5": 26.6}),
}
FIGURE_6 = {  # configuration → (shape of the paper's largest model, its parameters in B), Table 7
    "C1": (GPTPreset(50, 32, 8192), 40),
    "C2": (GPTPreset(132, 64, 6144), 60),
    "C3": (GPTPreset(62, 32, 8192), 50),
    "C4": (GPTPreset(175, 64, 8192), 140),
    "C5": (GPTPreset(187, 64, 8192), 150),
}
BATCH_6 = 16  # sequences a replica in Figure 6


def measure(configuration: str, shape: dict[str, int], batch: int, device: str, limit: float) -> Result:
    """Train one model under one configuration in this process."""
    torch.manual_seed(0)
    chosen = CONFIGURATIONS[configuration]
    with one_rank(device, MESH, ("shard", "tensor")) as mesh, Memory(device, limit) as memory:
        trained = zeroshard_gpt(
            shape_of(GPTPreset(**shape)), mesh, chosen.checkpoint_options, FrugalGPT, **chosen.shard_options
        )
        measured = Training(trained, batch, memory).steady(warmup=0, steps=2)
        report = zeroshard.report(trained[0])
    held = {f"{kind}, {tier}": nbytes.peak for (kind, tier), nbytes in report.memory.items()}
    return {**measured, "parameters_here": report.parameters, "held": held}


def run(name: str, shape: GPTPreset, batch: int, trials: Trials, chosen: argparse.Namespace) -> Result:
    """Measure in a process of its own."""
    limit = TINY_LIMIT if chosen.tiny else LIMIT
    return trials.run(configuration=name, shape=asdict(shape), batch=batch, device=chosen.device, limit=limit)


def figure_7(trials: Trials, chosen: argparse.Namespace) -> None:
    """Memory cached."""
    cases = [(model, name) for model, (_, _, paper) in FIGURE_7.items() for name in paper]

    def measured(case: tuple[str, str]) -> Result:
        shape, batch, _ = FIGURE_7[case[0]]
        return run(case[1], _reduced(shape) if chosen.tiny else shape, 1 if chosen.tiny else batch, trials, chosen)

    with ThreadPoolExecutor(chosen.parallel) as pool:
        results = list(pool.map(measured, cases))
    table = []
    for (model, name), result in zip(cases, results, strict=True):
        _, batch, paper = FIGURE_7[model]
        ours = gigabytes(result.get("reserved"))
        failed = "out of memory" if "out_of_memory" in result else result.get("error", "").partition("\n")[0]
        cells = [paper[name], ours, ratio(ours, paper[name]), gigabytes(result.get("allocated")), failed]
        table.append([model, batch, name, CONFIGURATIONS[name].notation, *cells])
    print("\nFigure 7: memory cached at peak, GB")
    trials.show("figure 7", ("model", "batch", "", "", "paper", "zeroshard", "of the paper's", "allocated", ""), table)


def figure_6(trials: Trials, chosen: argparse.Namespace) -> None:
    """The largest model."""
    shapes = {name: _reduced(FIGURE_6[name][0]) if chosen.tiny else FIGURE_6[name][0] for name in chosen.configurations}
    limit, batch = (TINY_LIMIT, 1) if chosen.tiny else (LIMIT, BATCH_6)

    def searched(name: str) -> Largest:
        shape = shapes[name]
        first = max(2, shape.layers // 5), max(3, 2 * shape.layers // 5)
        return largest(lambda n: run(name, replace(shape, layers=n), batch, trials, chosen), first, limit, within=0.02)

    with ThreadPoolExecutor(chosen.parallel) as pool:
        found = dict(zip(shapes, pool.map(searched, shapes), strict=True))
    table = []
    for name, result in found.items():
        paper = FIGURE_6[name][1]
        fits, fails = (_billions(shapes[name], layers) for layers in (result.fits, result.fails))
        peak = gigabytes(result.tried.get(result.fits, {}).get("reserved"))
        cells = [fits, ratio(fits, paper), result.fits, peak, fails, result.fails]
        table.append([name, CONFIGURATIONS[name].notation, paper, *cells, (result.error or "").partition("\n")[0]])
    print(f"\nFigure 6: the largest model in {limit / 1e9:g} GB, B of parameters; batch {batch}")
    heads = ("", "", "paper", "zeroshard", "of the paper's", "layers", "cached GB", "does not fit", "layers", "")
    trials.show("figure 6", heads, table)


def _reduced(shape: GPTPreset) -> GPTPreset:
    return replace(TINY, layers=max(2, shape.layers // 10))


def _billions(shape: GPTPreset, layers: int | None) -> float | None:
    return replace(shape, layers=layers).parameters / 1e9 if layers else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run both figures and print tables."""
    parser = options(__doc__)
    parser.add_argument("--figures", nargs="*", type=int, choices=(6, 7), default=(7, 6))
    names = list(FIGURE_6)
    parser.add_argument("--configurations", nargs="*", choices=names, default=names, help="of Figure 6")
    parser.add_argument("--parallel", type=int, default=3, help="runs at a time")
    chosen = parsed(parser, argv)
    trials = Trials(__name__, chosen)
    print(f"one rank of {MESH[0]} × {MESH[1]}, {described(machine(chosen.device))}")
    for number in chosen.figures:
        {6: figure_6, 7: figure_7}[number](trials, chosen)
