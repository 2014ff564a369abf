"""The planner beside what is measured: memory of the states, peak of memory, and time of a step.

    python -m benchmarks planner                               # on a GPU: calibrates it, then runs all cases
    python -m benchmarks planner --machine machine.json --cases "0.4B, fp32" "llama 1.1B"
    python -m benchmarks planner --tiny --device cpu

Every case is a process of its own, which first plans, from shapes and the machine's rates alone, and then trains: AdamW
(fused), sequences of 1024 or as the case says, steady steps after warm-up. *of N* is one rank of N on the fake backend:
its memory is true and its time is not, since nothing passes a wire, so only the memory is compared. *alone* is one rank
on NCCL (gloo on a CPU). No case was used to make the planner: its kernels' scratch was read off their sources, its
rates come from `zeroshard plan --calibrate`, which knows no case.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from benchmarks.models import ConvNet, ExpertsModel
from benchmarks.rank import Memory, alone, one_rank
from benchmarks.record import described, machine
from benchmarks.table import Result, gigabytes, ratio, said
from benchmarks.trial import Trials, options, parsed
from zeroshard.config.offload import Offload
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import Machine, Strategy, calibrate
from zeroshard.planner.plans import evaluate_strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop

WARMUP, STEPS = 4, 6  # steps: with states outside the device, work ahead begins with the third


@dataclass(frozen=True)
class Case:
    """What is planned and then run."""

    model: str  # "gpt", "llama", "conv" or "moe"
    layers: int = 24
    heads: int = 16
    width: int = 1024
    batch: int = 8
    sequence: int = 1024
    ranks: int = 1  # 1: alone; more: the first of so many that do not exist
    stage: int = 3
    precision: str = "bf16"
    checkpoint: str = "none"
    offload: Any = None
    clip: bool = False

    @property
    def tiny(self) -> Case:
        """The same at a size that a CPU runs at once."""
        shape = {"layers": 3, "heads": 4, "width": 32, "batch": 2, "sequence": 16}
        return replace(self, **shape, precision="fp32" if self.precision == "bf16" else self.precision)

    @property
    def choice(self) -> Strategy:
        """As the planner has it."""
        offload = Offload.from_option(self.offload)
        return Strategy(stage=self.stage, checkpoint=self.checkpoint, offload=offload, micro_batch=self.batch)  # type: ignore[arg-type]


CASES = {
    "0.4B, nothing recomputed": Case("gpt"),
    "0.4B, fp32": Case("gpt", batch=4, precision="fp32"),
    "0.4B, fp16, clipped": Case("gpt", batch=16, precision="fp16", checkpoint="recompute", clip=True),
    "1.3B, sequence 4096": Case("gpt", width=2048, batch=2, sequence=4096, checkpoint="recompute"),
    "2.7B, inputs on the host": Case("gpt", layers=32, heads=32, width=2560, checkpoint="host"),
    "1.3B, optimizer on the host": Case("gpt", width=2048, batch=12, checkpoint="recompute", offload="host"),
    "2.7B, half of it on the host": Case(
        "gpt", layers=32, heads=32, width=2560, batch=16, checkpoint="recompute", offload={"optimizer": ("host", 0.5)}
    ),
    "2.7B, parameters on the host too": Case(
        "gpt",
        layers=32,
        heads=32,
        width=2560,
        batch=8,
        checkpoint="recompute",
        offload={"optimizer": "host", "parameters": "host"},
    ),
    "llama 1.1B": Case("llama", layers=22, heads=32, width=2048, batch=4, sequence=2048),
    "llama 1.1B, recomputed, stage 2 of 8": Case(
        "llama", layers=22, heads=32, width=2048, batch=8, sequence=2048, ranks=8, stage=2, checkpoint="recompute"
    ),
    "convolutions": Case("conv", layers=24, width=256, batch=256, sequence=56),
    "experts": Case("moe", layers=12, width=1024, batch=8),
    "0.8B, nothing recomputed": Case("gpt", layers=14, width=2048, batch=6),
    "0.8B, fp32, recomputed": Case("gpt", layers=14, width=2048, batch=6, precision="fp32", checkpoint="recompute"),
    "0.8B, fp16": Case("gpt", layers=14, width=2048, batch=12, precision="fp16", checkpoint="recompute"),
    "0.2B, 48 narrow blocks": Case("gpt", layers=48, heads=8, width=512, batch=3),
    "1.8B, sequence 2048": Case("gpt", layers=26, heads=24, width=2304, batch=6, sequence=2048, checkpoint="recompute"),
    "1.8B, optimizer on the host": Case(
        "gpt", layers=26, heads=24, width=2304, batch=16, checkpoint="recompute", offload="host"
    ),
    "3.5B, inputs on the host": Case("gpt", layers=29, heads=24, width=3072, batch=10, checkpoint="host"),
    "3.5B, 0.4 of the optimizer on the host": Case(
        "gpt", layers=29, heads=24, width=3072, batch=12, checkpoint="recompute", offload={"optimizer": ("host", 0.4)}
    ),
    "llama 0.7B": Case("llama", layers=20, heads=12, width=1536, batch=8),
    "wider convolutions": Case("conv", layers=16, width=384, batch=128, sequence=40),
    "2.7B, stage 0 of 4": Case("gpt", layers=32, heads=32, width=2560, batch=4, ranks=4, stage=0),
    "2.7B, stage 1 of 16": Case("gpt", layers=32, heads=32, width=2560, batch=2, ranks=16, stage=1),
    "6.7B, stage 2 of 16": Case(
        "gpt", layers=32, heads=32, width=4096, batch=4, ranks=16, stage=2, checkpoint="recompute"
    ),
    "13B, stage 3 of 32": Case(
        "gpt", layers=40, heads=40, width=5120, batch=6, ranks=32, stage=3, checkpoint="recompute"
    ),
}


def build(case: Case) -> tuple[Callable[[], nn.Module], Callable[[int], Any]]:
    """What makes the model, and what it is called with at a batch; the latter as a tuple or a dictionary."""
    layers, width, length = case.layers, case.width, case.sequence
    if case.model == "gpt":
        config = GPTConfig(context=length, layers=layers, heads=case.heads, width=width)
        return lambda: GPT(config), lambda batch: (_tokens(batch, length), _tokens(batch, length))
    if case.model == "conv":
        shape = (3, 4 * length, 4 * length)
        return (
            lambda: ConvNet(layers, width),
            lambda batch: (torch.randn(batch, *shape), torch.zeros(batch, dtype=torch.int64)),
        )
    if case.model == "moe":
        return lambda: ExpertsModel(layers, width), lambda batch: (_tokens(batch, length),)
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads // 4,
        intermediate_size=11 * width // 4,
        max_position_embeddings=length,
    )

    def inputs(batch: int) -> dict[str, Any]:
        return {"input_ids": _tokens(batch, length), "labels": _tokens(batch, length), "use_cache": False}

    return lambda: LlamaForCausalLM(llama), inputs


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(100, (batch, length))


def predict(case: Case, machine: Machine) -> Result:
    """Plan a case."""
    make, inputs = build(case)
    with torch.device("meta"):
        model = make()
    subject = TracedModel(model, TrainingLoop(inputs=_meta(inputs), has_clipping=case.clip), precision=case.precision)
    plan = evaluate_strategy(subject, case.choice, case.ranks, machine)
    states = sum(plan.footprint.states.values()), sum(plan.footprint.offloaded.values())
    at_peak = {kind: round(nbytes / 1e9, 3) for kind, nbytes in plan.footprint.peak.by_kind.items() if nbytes}
    parts = {name: round(1e3 * value, 1) for name, value in asdict(plan.step_time).items() if isinstance(value, float)}
    return {
        "predicted_peak": plan.footprint.peak.total,
        "predicted_states": sum(states),
        "predicted_ms": 1e3 * plan.step_time.step,
        "at_peak": at_peak,
        "parts": parts,
    }


def _meta(inputs: Callable[[int], Any]) -> Callable[[int], Any]:
    def shapes(batch: int) -> Any:
        with torch.device("meta"):
            return inputs(batch)

    return shapes


def measure(case: dict[str, Any], machine: str, device: str, name: str = "") -> Result:
    """Plan and run one case, or calibrate, in this process."""
    if not case:
        return {"rates": calibrate(device=device, directory=tempfile.gettempdir()).to_json()}
    chosen = Case(**case)
    predicted = predict(chosen, Machine.resolve(Path(machine)))
    torch.manual_seed(0)
    place = alone(device) if chosen.ranks == 1 else one_rank(device, (chosen.ranks,))
    with place as mesh, Memory(device) as memory:
        make, inputs = build(chosen)
        with torch.device(device if chosen.model == "llama" else "meta"):  # its norms cannot fill themselves
            model = make()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        given = {"stage": chosen.stage, "offload": chosen.offload, "precision": chosen.precision}
        model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh, **given)
        if chosen.choice.checkpoint_options is not None:
            zeroshard.checkpoint_activations(model, **chosen.choice.checkpoint_options)
        batch = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), inputs(chosen.batch))
        return {**predicted, **_train(model, optimizer, batch, memory, chosen.clip)}


def _train(model: nn.Module, optimizer: Any, batch: Any, memory: Memory, clip: bool) -> Result:
    from time import perf_counter

    times: list[float] = []
    gradients = 0

    def step() -> None:
        nonlocal gradients
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = output if isinstance(output, Tensor) else output.loss
        del output
        optimizer.scale(loss).backward()
        del loss
        if clip:
            optimizer.clip_grad_norm_(1.0)
        held = zeroshard.report(model).memory
        gradients = sum(nbytes.now for (kind, _), nbytes in held.items() if kind == "gradients")
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP):
        step()
    memory.restart()
    step()
    memory.restart(empty=False)
    for _ in range(STEPS):
        begin = perf_counter()
        step()
        memory.wait()
        times.append(perf_counter() - begin)
    kinds = ("parameters", "master weights", "optimizer states")
    held = zeroshard.report(model).memory
    states = gradients + sum(nbytes.now for (kind, _), nbytes in held.items() if kind in kinds)
    return {"ms": 1e3 * statistics.median(times), "states": states, **memory.peak()}


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, run all cases and print a table."""
    parser = options(__doc__)
    parser.add_argument("--machine", type=Path, help="a machine's JSON, instead of calibrating")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    chosen = parsed(parser, argv)
    trials = Trials(__name__, chosen)
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.machine or Path(folder, "machine.json")
        if chosen.machine is None:
            path.write_text(_calibrated(trials, chosen))
        print(f"{described(machine(chosen.device))}\n{path.read_text()}", flush=True)
        table = [_row(name, str(path), trials, chosen) for name in chosen.cases]
    print("\npredicted and measured; GB, ms")
    heads = (
        "case",
        "ranks",
        "states",
        "measured",
        "ratio",
        "peak",
        "measured",
        "ratio",
        "reserved",
        "step",
        "measured",
    )
    trials.show("beside", (*heads, "ratio", ""), table)


def _row(name: str, path: str, trials: Trials, chosen: argparse.Namespace) -> list[Any]:
    case = CASES[name].tiny if chosen.tiny else CASES[name]
    result = trials.run(name=name, case=asdict(case), machine=path, device=chosen.device)
    return [name, f"of {case.ranks}" if case.ranks > 1 else "alone", *_cells(case, result), said(result)]


def _calibrated(trials: Trials, chosen: argparse.Namespace) -> str:
    result = trials.run(case={}, machine="", device=chosen.device)
    if "rates" not in result:
        raise SystemExit(f"this machine could not be measured: {said(result)}")
    return str(result["rates"])


def _cells(case: Case, result: Result) -> list[float | None]:
    states, peak = (
        [gigabytes(result.get(f"predicted_{kind}")), gigabytes(result.get(measured))]
        for kind, measured in (("states", "states"), ("peak", "allocated"))
    )
    step = [result.get("predicted_ms"), result.get("ms")] if case.ranks == 1 else [None, None]
    return [*states, ratio(*states), *peak, ratio(*peak), gigabytes(result.get("reserved")), *step, ratio(*step)]
