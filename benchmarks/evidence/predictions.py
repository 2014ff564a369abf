"""Predictions of the planner for published tables, and for this page's Llama before it ran. No GPU is needed.

The machine is the published one, from data sheets: nothing was measured on it, and nothing was fitted to these tables,
except the curve of Figure 2 that is marked so. Predicted is zeroshard's stage 3; published is FSDP2. The planner
does not know torch.compile: its prediction is the eager one. What does not agree is shown.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.evidence.titan import GiB, LlamaShape
from benchmarks.harness.record import Record, Result, describe, ratio
from benchmarks.paper.predicted import paper_flops, paper_step_time
from benchmarks.paper.printed import FIGURE_2, PaperRun
from zeroshard.planner import Machine, Strategy
from zeroshard.planner.plans import evaluate_strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop

# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, Tables 1 and 3: GPUs, technique → tokens/s a GPU, GiB
TITAN = {
    (8, "FSDP"): (5762, 82.4),
    (8, "FSDP + torch.compile"): (6667, 77.0),
    (128, "FSDP"): (5605, 67.0),
    (128, "FSDP + torch.compile"): (6514, 62.0),
}
TINY_LAYERS = 4
NO_WIRE = {"bandwidth": 1e15, "latency": 0.0}


def titan_machine() -> Machine:
    """Return the published machine: H100 with 96 GB of HBM2e at 2.4 TB/s, 8 a node, 400 Gb/s of network for each."""
    return Machine.resolve("h100", memory="96GB", bandwidth=0.85 * 2.4e12)


def predict(traced: TracedModel, shape: LlamaShape, ranks: int, machine: Machine) -> Result:
    """Plan stage 3 on so many ranks."""
    plan = evaluate_strategy(traced, Strategy(stage=3, micro_batch=shape.batch), ranks, machine)
    step = plan.step_time
    found = {"step_ms": 1e3 * step.step, "waits_ms": 1e3 * step.exposed_communication, "fits": plan.fits}
    allocated, reserved = plan.footprint.peak.total / GiB, plan.footprint.reserved / GiB
    return {**found, "tokens": shape.items / step.step, "allocated_gib": allocated, "reserved_gib": reserved}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen on the command line: nothing."""


def run(chosen: argparse.Namespace) -> None:
    """Predict all tables."""
    record = Record("evidence", "cpu", chosen.out)
    print(describe(record.machine), flush=True)
    shape = LlamaShape(layers=TINY_LAYERS) if chosen.tiny else LlamaShape()
    with torch.device("meta"):
        model = shape.build()
    loop = TrainingLoop(inputs=lambda batch: replace(shape, batch=batch).inputs("meta"))
    traced = TracedModel(model, loop, precision="bf16", reduce_dtype="fp32")
    show_titan(record, traced, shape)
    show_own(record, traced, shape)
    show_paper(record, FIGURE_2[:2] if chosen.tiny else FIGURE_2)


def show_titan(record: Record, traced: TracedModel, shape: LlamaShape) -> None:
    """Predict torchtitan's tables."""
    table = []
    for (gpus, technique), (tokens, gib) in TITAN.items():
        found = predict(traced, shape, gpus, titan_machine())
        record.add({"what": "torchtitan", "gpus": gpus, "technique": technique, **found})
        rates = [found["tokens"], tokens, ratio(found["tokens"], tokens)]
        table.append([gpus, technique, *rates, found["reserved_gib"], gib, ratio(found["reserved_gib"], gib)])
    figures = ("tokens/s predicted", "published", "ratio", "GiB predicted", "published", "ratio")
    record.show("torchtitan", ("GPUs", "published run", *figures), table)


def show_own(record: Record, traced: TracedModel, shape: LlamaShape) -> None:
    """Predict the Llama of this page: one rank of 8 on one H200, where nothing is sent."""
    found = predict(traced, shape, shape.ranks, Machine.resolve("h200", inside=NO_WIRE, outside=NO_WIRE))
    record.add({"what": "own", **found})
    row = [found["step_ms"], found["tokens"], found["allocated_gib"], found["reserved_gib"]]
    record.show("own", ("ms a step", "tokens/s", "allocated GiB", "reserved GiB"), [row])


def show_paper(record: Record, runs: tuple[PaperRun, ...]) -> None:
    """Predict Figure 2 of the ZeRO paper, from published rates alone and with the curve that is fitted to it."""
    table = []
    for each in runs:
        plain, fitted = (
            paper_flops(each) / paper_step_time(each, machine).step / 1e12
            for machine in (Machine.resolve("dgx2"), None)
        )
        row = f"{each.label} on {each.gpus} V100"
        record.add({"what": "figure 2", "run": row, "system": each.system, "plain": plain, "fitted": fitted})
        figures = [each.tflops, plain, ratio(plain, each.tflops), fitted, ratio(fitted, each.tflops)]
        table.append([row, each.system, *figures])
    figures = ("published TFLOPS", "predicted", "ratio", "predicted, curve fitted to Figures 2 to 4", "ratio")
    record.show("figure 2", ("model", "", *figures), table)
