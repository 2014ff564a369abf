"""The planner compared with what is measured: memory of the states, peak of memory, and time of a step.

    python -m benchmarks planner                               # on a GPU: calibrates it, then runs all cases
    python -m benchmarks planner --machine machine.json --cases "0.4B, fp32" "llama 1.1B"
    python -m benchmarks planner --tiny --device cpu

Every case is a process of its own that first plans, from shapes and the machine's rates alone, and then trains: AdamW
(fused), sequences of 1024 or as the case says, steady steps after warm-up. *of N* is one rank of N on the fake backend:
its memory is real, but nothing is sent, so its time is not compared. *alone* is one rank on NCCL (gloo on a CPU). No
case was used to make the planner: the scratch memory of kernels was read in their sources, and the rates come from
`zeroshard plan --calibrate`, which knows no case.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.record import Result, failure, gigabytes, ratio
from benchmarks.harness.training import Memory, StateBytes, alone, measure_steps, one_rank
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import Job, ours
from benchmarks.harness.workloads import Workload
from zeroshard import Offload
from zeroshard.planner import Machine, Strategy, calibrate
from zeroshard.planner.plans import evaluate_strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop

WARMUP, STEPS = 4, 6  # steps: with offloaded states, speculation begins with the third


@dataclass(frozen=True)
class Case(Workload):
    """What is planned and then run."""

    width: int = 1024
    batch: int = 8
    recomputed: bool = False  # by torch; see `checkpoint`
    ranks: int = 1  # 1: alone; more: the first of several, the others of which do not exist
    stage: int = 3
    precision: str = "bf16"
    checkpoint: str = "none"
    offload: Any = None
    clip: bool = False
    gather_dtype: str | None = None
    reduce_wire: str | None = None

    @property
    def tiny(self) -> Case:
        return replace(super().tiny, precision="fp32" if self.precision == "bf16" else self.precision)

    @property
    def strategy(self) -> Strategy:
        return Strategy(
            stage=self.stage,
            checkpoint=self.checkpoint,  # type: ignore[arg-type]
            offload=Offload.from_option(self.offload),
            micro_batch=self.batch,
            gather_dtype=self.gather_dtype,
            reduce_wire=self.reduce_wire,
        )


GPT_2_7B = {"layers": 32, "heads": 32, "width": 2560}
GPT_1_8B = {"layers": 26, "heads": 24, "width": 2304}
GPT_3_5B = {"layers": 29, "heads": 24, "width": 3072}
LLAMA = {"model": "llama", "vocabulary": 32000, "place": "alone"}  # it cannot be built on the meta device
LLAMA_1_1B = {**LLAMA, "layers": 22, "heads": 32, "width": 2048, "sequence": 2048}
CASES = {
    "0.4B, nothing recomputed": Case("gpt"),
    "0.4B, fp32": Case("gpt", batch=4, precision="fp32"),
    "0.4B, fp16, clipped": Case("gpt", batch=16, precision="fp16", checkpoint="recompute", clip=True),
    "1.3B, sequence 4096": Case("gpt", width=2048, batch=2, sequence=4096, checkpoint="recompute"),
    "2.7B, inputs on the host": Case("gpt", **GPT_2_7B, checkpoint="host"),
    "1.3B, optimizer on the host": Case("gpt", width=2048, batch=12, checkpoint="recompute", offload="host"),
    "2.7B, half of it on the host": Case(
        "gpt", **GPT_2_7B, batch=16, checkpoint="recompute", offload={"optimizer": ("host", 0.5)}
    ),
    "2.7B, parameters on the host too": Case(
        "gpt", **GPT_2_7B, checkpoint="recompute", offload={"optimizer": "host", "parameters": "host"}
    ),
    "llama 1.1B": Case(**LLAMA_1_1B, batch=4),
    "llama 1.1B, recomputed, stage 2 of 8": Case(**LLAMA_1_1B, batch=8, ranks=8, stage=2, checkpoint="recompute"),
    "convolutions": Case("convolutions", layers=24, width=256, batch=256, sequence=56),
    "experts": Case("experts", layers=12, vocabulary=32000),
    "0.8B, nothing recomputed": Case("gpt", layers=14, width=2048, batch=6),
    "0.8B, fp32, recomputed": Case("gpt", layers=14, width=2048, batch=6, precision="fp32", checkpoint="recompute"),
    "0.8B, fp16": Case("gpt", layers=14, width=2048, batch=12, precision="fp16", checkpoint="recompute"),
    "0.2B, 48 narrow blocks": Case("gpt", layers=48, heads=8, width=512, batch=3),
    "1.8B, sequence 2048": Case("gpt", **GPT_1_8B, batch=6, sequence=2048, checkpoint="recompute"),
    "1.8B, optimizer on the host": Case("gpt", **GPT_1_8B, batch=16, checkpoint="recompute", offload="host"),
    "3.5B, inputs on the host": Case("gpt", **GPT_3_5B, batch=10, checkpoint="host"),
    "3.5B, 0.4 of the optimizer on the host": Case(
        "gpt", **GPT_3_5B, batch=12, checkpoint="recompute", offload={"optimizer": ("host", 0.4)}
    ),
    "llama 0.7B": Case(**LLAMA, layers=20, heads=12, width=1536, batch=8),
    "wider convolutions": Case("convolutions", layers=16, width=384, batch=128, sequence=40),
    "2.7B, stage 0 of 4": Case("gpt", **GPT_2_7B, batch=4, ranks=4, stage=0),
    "2.7B, stage 1 of 16": Case("gpt", **GPT_2_7B, batch=2, ranks=16, stage=1),
    "6.7B, stage 2 of 16": Case(
        "gpt", layers=32, heads=32, width=4096, batch=4, ranks=16, stage=2, checkpoint="recompute"
    ),
    "13B, stage 3 of 32": Case(
        "gpt", layers=40, heads=40, width=5120, batch=6, ranks=32, stage=3, checkpoint="recompute"
    ),
}


def predict(case: Case, machine: Machine) -> Result:
    """Plan a case."""
    with torch.device("meta"):
        model = case.build()
    loop = TrainingLoop(inputs=lambda batch: replace(case, batch=batch).inputs("meta"), has_clipping=case.clip)
    traced = TracedModel(model, loop, precision=case.precision)
    plan = evaluate_strategy(traced, case.strategy, case.ranks, machine)
    at_peak = {kind: round(nbytes / 1e9, 3) for kind, nbytes in plan.footprint.peak.by_kind.items() if nbytes}
    parts = {name: round(1e3 * value, 1) for name, value in asdict(plan.step_time).items() if isinstance(value, float)}
    return {
        "predicted_peak": plan.footprint.peak.total,
        "predicted_states": sum(plan.footprint.states.values()) + sum(plan.footprint.offloaded.values()),
        "predicted_ms": 1e3 * plan.step_time.step,
        "at_peak": at_peak,
        "parts": parts,
    }


def measure(case: dict[str, Any], machine: str, device: str, name: str = "") -> Result:
    """Plan and run one case, or calibrate, in this process."""
    if not case:
        return {"rates": calibrate(device=device, directory=tempfile.gettempdir()).to_json()}
    chosen = Case(**case)
    predicted = predict(chosen, Machine.resolve(Path(machine)))
    mesh_of = alone(device) if chosen.ranks == 1 else one_rank(device, (chosen.ranks,))
    with mesh_of as mesh, Memory(device) as memory:
        options = {name: getattr(chosen, name) for name in ("offload", "precision", "gather_dtype", "reduce_wire")}
        options["clip"] = 1.0 if chosen.clip else None
        job = Job(chosen, device, mesh)
        training = ours(job, chosen.stage, chosen.strategy.checkpoint_options, **options)
        states = StateBytes(training.model, training.optimizer)
        return {**predicted, **measure_steps(training, memory, WARMUP, STEPS), "states": states.total}


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, run all cases and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--machine", type=Path, help="a machine's JSON, instead of calibrating")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    chosen = parser.parse_args(argv)
    trials = Trials("planner", measure, chosen, device=chosen.device)
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.machine or Path(folder, "machine.json")
        if chosen.machine is None:
            result = trials.run(case={}, machine="")
            if "rates" not in result:
                raise SystemExit(f"this machine could not be calibrated: {failure(result)}")
            path.write_text(str(result["rates"]))
        print(f"{path.read_text()}", flush=True)
        table = [_row(name, str(path), trials, chosen.tiny) for name in chosen.cases]
    print("\npredicted and measured; GB, ms")
    compared = ("states", "measured", "ratio", "peak", "measured", "ratio", "reserved", "step", "measured", "ratio")
    trials.show("beside", ("case", "ranks", *compared, ""), table)


def _row(name: str, path: str, trials: Trials, tiny: bool) -> list[Any]:
    case = CASES[name].tiny if tiny else CASES[name]
    result = trials.run(name=name, case=asdict(case), machine=path)
    states = [gigabytes(result.get(key)) for key in ("predicted_states", "states")]
    peak = [gigabytes(result.get(key)) for key in ("predicted_peak", "allocated")]
    step = [result.get("predicted_ms"), result.get("ms")] if case.ranks == 1 else [None, None]
    figures = [*states, ratio(*states), *peak, ratio(*peak), gigabytes(result.get("reserved")), *step, ratio(*step)]
    return [name, f"of {case.ranks}" if case.ranks > 1 else "alone", *figures, failure(result)]
