"""precision="fp8" beside "bf16": time and memory of a step, and the loss, as one rank of many on a GPU.

    python -m benchmarks fp8                                       # GPT 7.6B, torchtitan's Llama 3.1 8B, and a curve
    python -m benchmarks fp8 --rows "7.6B, batch 4" --steps 4
    python -m benchmarks fp8 --tiny --device cpu                   # emulated: only to check the suite

The output layer stays in bf16. The other ranks do not exist and nothing is sent: what float8 saves in all-gathers is
not in the times. *Curve* trains a GPT of 12 layers of width 768 on one rank, on Shakespeare's text, from the same
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

import zeroshard
from benchmarks.evidence.titan import TINY, LlamaShape
from benchmarks.harness.collectives import ECHO
from benchmarks.harness.record import Result, failure, median, ratio
from benchmarks.harness.training import Memory, alone, measure_steps, one_rank
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import Job, ours
from benchmarks.harness.workloads import WORKLOADS, Workload
from zeroshard.models import GPT, GPTConfig
from zeroshard.train.data.corpus import shakespeare

ROWS: dict[str, Workload] = {
    "7.6B, batch 4": WORKLOADS["7.6B, batch 4"],
    "7.6B, batch 16": replace(WORKLOADS["7.6B, batch 4"], batch=16),
    "Llama 3.1 8B": LlamaShape(),
    "Llama 3.1 8B, compiled": LlamaShape(compiled=True),
}
DEFAULT = ("7.6B, batch 4", "Llama 3.1 8B", "Llama 3.1 8B, compiled", "curve")
PRECISIONS = ("bf16", "fp8")
WARMUP = 6
CURVE_PARTS = 5  # of a curve, over which losses are averaged
CURVE = {"layers": 12, "heads": 12, "width": 768, "context": 256}
TINY_CURVE = {"layers": 2, "heads": 2, "width": 32, "context": 16}


def choose(row: str, tiny: bool) -> Workload:
    """Return the workload of a row."""
    work = ROWS[row]
    if not tiny:
        return work
    return replace(work, **{**TINY, "batch": 1}) if isinstance(work, LlamaShape) else work.tiny  # type: ignore[arg-type]


def measure(row: str, variant: str, device: str, steps: int, tiny: bool = False, curve_steps: int = 0) -> Result:
    """Train with one precision, as the only process."""
    if row == "curve":
        return measure_curve(variant, device, curve_steps, tiny)
    work = choose(row, tiny)
    options: dict[str, Any] = {"precision": variant, "keep_bf16": ["head"]}
    options["reduce_dtype"] = "fp32" if isinstance(work, LlamaShape) else None
    with one_rank(device, (work.ranks,), backend=ECHO) as mesh, Memory(device) as memory:
        training = ours(Job(work, device, mesh), **options)
        found = measure_steps(training, memory, 1 if tiny else WARMUP, steps)
        report = zeroshard.report(training.model)
    return {**found, "float8": str(report.float8 or ""), "communicated": report.communicated}


def measure_curve(variant: str, device: str, steps: int, tiny: bool) -> Result:
    """Train a small GPT on text, and return its losses."""
    shape = TINY_CURVE if tiny else CURVE
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, **shape)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=device == "cuda")
    text = torch.frombuffer(bytearray(shakespeare().encode()), dtype=torch.uint8).to(device)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with alone(device) as mesh:
        given = {"precision": variant, "keep_bf16": ["head"], "mesh": mesh}
        model, sharded = zeroshard.shard(model, optimizer, **given)
        for step in range(steps):
            for group in sharded.param_groups:
                group["lr"] = 6e-4 * min(1.0, (step + 1) / (0.1 * steps))
            starts = torch.randint(len(text) - shape["context"] - 1, (32 if not tiny else 2,), generator=generator)
            rows = torch.stack([text[start : start + shape["context"] + 1] for start in starts]).long()
            loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            sharded.clip_grad_norm_(1.0)
            sharded.step()
            sharded.zero_grad()
            losses.append(loss.detach())
    values = [loss.item() for loss in losses]
    return {"losses": values, "loss": fmean(values[-max(1, steps // CURVE_PARTS) :]), "steps": steps}


def main(argv: Sequence[str] | None = None) -> None:
    """Run both precisions of all rows, in turns, and print a table."""
    parser = make_parser(__doc__, steps=5, repeats=1, curve_steps=400)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, "curve"], default=DEFAULT)
    chosen = parser.parse_args(argv)
    trials = Trials("fp8", measure, chosen, device=chosen.device, steps=chosen.steps, tiny=chosen.tiny)
    table = []
    for row in chosen.rows:
        trials.run_variants(PRECISIONS, chosen.repeats, row=row, curve_steps=chosen.curve_steps)
        found = {variant: trials.matching(row=row, variant=variant) for variant in PRECISIONS}
        base = {key: median(found["bf16"], key) for key in ("ms", "allocated", "reserved")}
        for variant, runs in found.items():
            ms, host, sent = (median(runs, key) for key in ("ms", "host_ms", "communicated"))
            memory = [(median(runs, key), base[key]) for key in ("allocated", "reserved")]
            figures = [cell for value, first in memory for cell in (ratio(value, 1e9), ratio(value, first))]
            note = next((failure(run) for run in runs if failure(run)), "")
            loss = next((run["loss"] for run in runs if run.get("loss") is not None), None)
            table.append([row, variant, ms, ratio(base["ms"], ms), host, *figures, ratio(sent, 1e9), loss, note])
    heads = ("", "precision", "ms a step", "times as fast", "host ms", "allocated GB", "of bf16's", "reserved GB")
    trials.show("fp8", (*heads, "of bf16's", "sent GB", "loss", "note"), table)
    if "curve" in chosen.rows:
        show_curves(trials)


def show_curves(trials: Trials) -> None:
    """Print the mean loss of each part of a curve."""
    found = {variant: trials.matching(row="curve", variant=variant)[0] for variant in PRECISIONS}
    if any(failure(run) for run in found.values()):
        return
    steps = found["bf16"]["steps"]
    ends = [round(steps * part / CURVE_PARTS) for part in range(CURVE_PARTS + 1)]
    parts = [slice(*pair) for pair in pairwise(ends) if pair[0] < pair[1]]
    rows = [[variant, *(fmean(run["losses"][part]) for part in parts)] for variant, run in found.items()]
    trials.show("curve", ("mean loss of steps", *(f"{part.start + 1} to {part.stop}" for part in parts)), rows)
