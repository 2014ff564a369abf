"""What each stage holds: one rank of many, the same GPT, measured.

    python -m benchmarks stages                                        # GPT 1.4B on a GPU as 1 of 64
    python -m benchmarks stages --tiny --device cpu --batch 1

Each stage is a process of its own on the fake backend: true memory and compute of one rank of `--world`, no data on a
wire. bf16 with fp32 master weights, fused AdamW, torch's checkpointing of every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

import zeroshard
from benchmarks.rank import TINY, Memory, Training, one_rank, precision, shape_of, zeroshard_gpt
from benchmarks.record import described, machine
from benchmarks.table import Result, gigabytes
from benchmarks.trial import Trials, options, parsed
from zeroshard.models import GPT
from zeroshard.planner import predict_memory
from zeroshard.presets import PRESETS, GPTPreset

STAGES = (0, 1, 2, 3)
STEPS = 4  # after two that make the optimizer's states and record the order


def measure(stage: int, shape: dict[str, int], batch: int, world: int, device: str) -> Result:
    """Run one stage in this process."""
    config = shape_of(GPTPreset(**shape), checkpoint=True)
    with torch.device("meta"):
        predicted = predict_memory(GPT(config), ranks=world, stage=stage, precision=precision(device)).state_bytes
    with one_rank(device, (world,)) as mesh, Memory(device) as memory:
        model, optimizer = zeroshard_gpt(config, mesh, stage=stage)
        gradients = []  # bytes before each step

        def note(*_: object) -> None:
            gradients.append(zeroshard.report(model).memory["gradients", "device"].now)

        optimizer.register_step_pre_hook(note)
        steady = Training((model, optimizer), batch, memory).steady(warmup=2, steps=STEPS)
        report = zeroshard.report(model)
    held = {kind: nbytes.now for (kind, _), nbytes in report.memory.items()}
    kinds = ("parameters", "master weights", "optimizer states")
    return {
        **steady,
        "parameters": config.parameters,
        "states": gradients[-1] + sum(held.get(kind, 0) for kind in kinds),
        "predicted": predicted,
        "held_at_peak": report.total.peak,
        "communicated": report.communicated,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages and print a table."""
    parser = options(__doc__)
    parser.add_argument("--model", default="1.4b", choices=list(PRESETS))
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    chosen = parsed(parser, argv)
    shape, trials = asdict(TINY if chosen.tiny else PRESETS[chosen.model]), Trials(__name__, chosen)
    fixed = {"shape": shape, "batch": chosen.batch, "world": chosen.world, "device": chosen.device}
    rows = [run for stage in STAGES if "states" in (run := trials.run(stage=stage, **fixed))]
    psi, element = GPTPreset(**shape).parameters, 2 if precision(chosen.device) == "bf16" else 4
    print(f"{psi:,} parameters, 1 of {chosen.world} ranks, batch {chosen.batch}, {described(machine(chosen.device))}")
    table = []
    for row in rows:
        share = f"1/{rows[0]['states'] / row['states']:.1f}"
        states, predicted, peak = (gigabytes(row[key]) for key in ("states", "predicted", "allocated"))
        traffic = f"{row['communicated'] / element / psi:.3f}Ψ"
        table.append([row["stage"], states, share, predicted, peak, traffic, row["ms"]])
    heads = ("stage", "model states GB", "of stage 0", "predicted GB", "allocated at peak GB", "traffic a step")
    trials.show("stages", (*heads, "ms a step"), table)
