"""Golden plans: memory by kind, seconds by part and the head of the ranking, of six models on six machines.

They are in `golden_plans.json`, so that a change of the planner shows which numbers it changes. If it is meant to:

    python tests/planner/test_golden_plans.py    # write them again; the difference belongs into the commit's note

Every constant of the planner changes at least one of them. Another version of torch may run other operations: then the
numbers are compared with a tolerance of 5 %.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.config.offload import Offload
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import MACHINE_PRESETS, Machine, find_whole_params, plan, predict_memory, predict_traffic
from zeroshard.planner.commands.plan_text import format_table
from zeroshard.planner.plans import Plan, Plans, evaluate_strategy
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop

GOLDENS = Path(__file__).with_name("golden_plans.json")
DIGITS = 7


class Encoder(nn.Module):
    """Attention that is not causal, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2048, 2048).requires_grad_(False)
        self.down = nn.Linear(2048, 16, bias=False)
        self.up = nn.Linear(16, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.frozen(x) + self.up(self.down(x)))


def gpt(layers: int, width: int, vocabulary: int, context: int) -> GPT:
    return GPT(GPTConfig(vocab_size=vocabulary, context=context, layers=layers, heads=width // 64, width=width))


def convolutions() -> nn.Module:
    sizes = ((3, 64), (64, 64), (64, 64))
    blocks = (nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in sizes)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor] | None = None


def images(batch: int) -> torch.Tensor:
    return torch.empty(batch, 3, 64, 64, device="meta")


def rows(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.empty(batch, *shape, device="meta")


MODELS = {
    "deep": Model(lambda: gpt(12, 2048, 32_000, 512)),  # its trace is extrapolated
    "wide": Model(lambda: gpt(3, 4096, 50_000, 2048)),  # large parameters, in several buckets
    "convolutions": Model(convolutions, images),
    "encoder": Model(Encoder, rows(256, 512)),
    "adapted": Model(lambda: nn.Sequential(*(Adapted() for _ in range(6))), rows(2048)),
    "small": Model(  # several blocks in a unit
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(30))), rows(256)
    ),
}
MACHINES = {name: Machine.resolve(name) for name in ("h100", "h200", "a100", "a100-40gb", "dgx2", "cpu")}


def outer_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Case:
    """What is predicted: a strategy of a model on a number of devices."""

    model: str
    machine: str
    devices: int
    strategy: dict[str, Any]
    loop: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


BF16: dict[str, Any] = {"precision": "bf16"}
FP16: dict[str, Any] = {"precision": "fp16"}
HOST = Offload(optimizer=("host", 0.5))
DISK = Offload(optimizer="disk", parameters="host", directory=".")
CLIP: dict[str, Any] = {"has_clipping": True}
CASES = {
    "stage 0": Case("deep", "h100", 8, {"stage": 0, "micro_batch": 4}, CLIP, BF16),
    "stage 1": Case("deep", "h100", 16, {"stage": 1, "micro_batch": 4}, CLIP, BF16),
    "stage 2": Case("deep", "h100", 16, {"stage": 2, "micro_batch": 4, "accumulate": 2}, {}, BF16),
    "stage 3": Case("deep", "h100", 64, {"stage": 3, "micro_batch": 5}, CLIP, BF16),
    "stage 1, accumulated": Case("deep", "a100", 8, {"stage": 1, "micro_batch": 2, "accumulate": 6}, {}, BF16),
    "stage 0, at the step": Case("wide", "a100", 8, {"stage": 0, "micro_batch": 2}, CLIP, {**BF16, "backwards": 0}),
    "no prefetch": Case("deep", "a100-40gb", 8, {"micro_batch": 2}, {}, {**BF16, "prefetch": False}),
    "one rank": Case("wide", "h200", 1, {"stage": 3, "micro_batch": 3}, {"has_fused_adam": False}, BF16),
    "unfused": Case("wide", "h200", 4, {"stage": 2}, {"has_fused_adam": False, "scratch_bytes_per_element": 8.0}, FP16),
    "recomputed": Case("deep", "h200", 8, {"micro_batch": 16, "checkpoint": "recompute"}, CLIP, BF16),
    "inputs on the host": Case("deep", "h100", 8, {"micro_batch": 16, "checkpoint": "host", "stage": 2}, CLIP, BF16),
    "tensor": Case("deep", "h100", 16, {"tensor": 4, "micro_batch": 8, "checkpoint": "recompute"}, CLIP, BF16),
    "hybrid": Case("deep", "a100", 32, {"replicas": 4, "micro_batch": 2, "accumulate": 2}, CLIP, BF16),
    "hierarchical": Case(
        "deep", "a100", 32, {"replicas": 4, "partition": "hierarchical", "micro_batch": 2, "accumulate": 3}, {}, BF16
    ),
    "hierarchical-gradients": Case(
        "deep", "dgx2", 32, {"replicas": 2, "partition": "hierarchical-gradients", "accumulate": 4}, {}, FP16
    ),
    "inner-gradients": Case(
        "deep", "a100", 16, {"stage": 2, "replicas": 2, "partition": "inner-gradients", "accumulate": 2}, {}, BF16
    ),
    "full": Case("wide", "dgx2", 32, {"replicas": 2, "partition": "full"}, CLIP, FP16),
    "offload half": Case("deep", "h100", 8, {"stage": 2, "offload": HOST, "micro_batch": 4}, {}, BF16),
    "offload, clipped": Case("deep", "a100", 4, {"stage": 3, "offload": HOST, "micro_batch": 4}, CLIP, BF16),
    "offload to disk": Case("deep", "dgx2", 16, {"offload": DISK, "micro_batch": 2, "accumulate": 2}, {}, FP16),
    "int8": Case(
        "deep", "a100", 16, {"gather_dtype": "int8", "reduce_wire": "int8"}, {}, {**BF16, "error_feedback": True}
    ),
    "int8 in two hops": Case(
        "wide", "h100", 32, {"stage": 2, "replicas": 4, "partition": "full", "reduce_wire": "int8"}, CLIP, BF16
    ),
    "fp8": Case("deep", "h100", 8, {"micro_batch": 4}, CLIP, {"precision": "fp8"}),
    "muon": Case("deep", "h100", 8, {"stage": 2, "micro_batch": 4}, {"whole": "muon"}, BF16),
    "muon, tensor": Case("wide", "a100", 8, {"stage": 1, "tensor": 2}, {"whole": "muon"}, BF16),
    "whole parameters": Case("deep", "h100", 8, {"stage": 1}, {"whole": "whole"}, BF16),
    "convolutions": Case("convolutions", "a100", 8, {"stage": 2, "micro_batch": 32}, CLIP, BF16),
    "convolutions in fp32": Case("convolutions", "h100", 8, {"stage": 3, "micro_batch": 64}, CLIP, {}),
    "encoder": Case("encoder", "h100", 8, {"micro_batch": 8, "checkpoint": "recompute"}, CLIP, BF16),
    "encoder in fp32": Case("encoder", "cpu", 4, {"stage": 1, "micro_batch": 2, "accumulate": 2}, CLIP, {}),
    "adapted": Case("adapted", "a100-40gb", 8, {"stage": 3, "micro_batch": 64, "accumulate": 2}, CLIP, BF16),
    "adapted on a CPU": Case("adapted", "cpu", 8, {"stage": 3, "micro_batch": 64, "tensor": 1}, CLIP, {}),
    "small blocks": Case("small", "h100", 8, {"stage": 3, "micro_batch": 64}, CLIP, BF16),
    "small blocks on a CPU": Case("small", "cpu", 4, {"stage": 2, "micro_batch": 64}, CLIP, {}),
    "local steps": Case(
        "deep",
        "a100",
        32,
        {"stage": 1, "replicas": 4, "local_steps": 8, "micro_batch": 2},
        CLIP,
        {**FP16, "outer_optimizer": outer_optimizer},
    ),
    "momentum": Case("small", "cpu", 4, {"stage": 1, "micro_batch": 64}, {"optimizer_states": 1}, {}),
}
SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "a node": ("deep", {"devices": 8, "batch": 64, "memory": "12GB", "tensor": 1}),
    "four nodes": ("deep", {"devices": 32, "machine": "a100", "batch": 64, "checkpoint": "none", "offload": None}),
    "lossy": (
        "wide",
        {
            "devices": 32,
            "machine": MACHINES["dgx2"].with_network(10),
            "batch": 64,
            "allow_lossy": True,
            "offload": None,
            "stage": (2, 3),
            "tensor": (1, 2),
            "checkpoint": "none",
        },
    ),
    "little memory": ("wide", {"devices": 2, "memory": "10GB", "batch": 4, "stage": (1, 3)}),
    "nothing fits": ("wide", {"devices": 2, "memory": "2GB", "batch": 4, "stage": 2}),
    "a CPU": ("encoder", {"devices": 4, "machine": "cpu", "batch": 16, "precision": None}),
    "any batch": ("convolutions", {"devices": 8, "stage": (0, 3), "offload": None}),
}


@functools.cache
def model_of(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name].make()


def loss_of(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return None if MODELS[name].inputs is None else lambda output: output.float().pow(2).mean()


_TRACED: dict[Any, TracedModel] = {}


def traced(case: Case) -> TracedModel:
    """Return the traced model of a case; those that trace the same share it."""
    key = (case.model, repr(case.loop), repr(case.options))
    if key not in _TRACED:
        model, loop = model_of(case.model), dict(case.loop)
        if "whole" in loop:
            specs = find_whole_params(model, "muon")
            on_shards = loop["whole"] == "muon"
            loop["whole"] = {name: spec._replace(is_on_shards=on_shards) for name, spec in specs.items()}
        inputs = {"inputs": MODELS[case.model].inputs, "loss": loss_of(case.model)}
        _TRACED[key] = TracedModel(model, TrainingLoop(**inputs, **loop), **case.options)
    return _TRACED[key]


def rounded(value: Any) -> Any:
    """Round numbers, and leave out those that are 0."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items() if item}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def parts(found: Plan) -> dict[str, Any]:
    """Return what is pinned of a plan."""
    memory, seconds = found.footprint, dict(vars(found.step_time))
    traffic = seconds.pop("traffic")
    return {
        "bytes": {
            "states": memory.states,
            "offloaded": {" on ".join(key): nbytes for key, nbytes in memory.offloaded.items()},
            "peak": {"at": memory.peak.label, **memory.peak.by_kind},
            "between steps": memory.between_steps,
            "staging": memory.staging,
            "host": memory.host,
            "needed": found.memory,
        },
        "seconds": seconds,
        "traffic": {**traffic, "Ψ": found.data_parallel_psi},
        "usage": found.usage_fractions,
        "useful flops": found.useful_flops,
        "samples a second": found.samples_per_second,
        "score": found.score,
    }


def predicted(case: Case) -> dict[str, Any]:
    """Return what is pinned of a case: its plan, and what the same options give without a trace."""
    strategy = Strategy(**case.strategy)
    machine = MACHINES[case.machine]
    found = parts(evaluate_strategy(traced(case), strategy, case.devices, machine.shared_by(case.devices)))
    config = {**case.options, **strategy.shard_options}
    mesh = {"ranks": case.devices, "tensor": strategy.tensor, "replicas": strategy.replicas}
    mesh["on_gpu"] = not machine.is_cpu
    optimizer = "muon" if case.loop.get("whole") == "muon" else "adamw"
    sizes = predict_memory(model_of(case.model), optimizer=optimizer, **mesh, **config)
    moved = predict_traffic(model_of(case.model), optimizer=optimizer, accumulate=strategy.accumulate, **mesh, **config)
    found["without a trace"] = {"states": sizes.states, "transient": sizes.transient, "traffic": moved.step}
    return rounded(found)


def ranked(model: str, search: dict[str, Any]) -> dict[str, Any]:
    """Return what is pinned of a search: what is chosen, and the fastest plans."""
    found = plan(model_of(model), MODELS[model].inputs, loss=loss_of(model), **search)
    return rounded(
        {
            "candidates": len(found.candidates),
            "fitting": len(found.fitting),
            "reason": found.reason,
            "table": format_table(found).splitlines(),
            "best": brief(found.best_or_smallest),
            "fastest": {plan.strategy.description: brief(plan)["score"] for plan in fastest(found)},
        }
    )


def fastest(found: Plans) -> list[Plan]:
    return sorted(found.fastest_per_strategy(), key=lambda plan: (not plan.fits, -plan.score))[:6]


def brief(found: Plan) -> dict[str, Any]:
    return {"strategy": found.strategy.description, "bytes": found.memory, "score": found.score}


def machine_fields(name: str) -> dict[str, Any]:
    return rounded(json.loads(Machine.resolve(name).to_json()))


def same(path: str, found: Any, expected: Any, relative: float) -> list[str]:
    """Return the differences, a line each."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = dict.fromkeys((*expected, *found))
        return [
            line for key in keys for line in same(f"{path} / {key}", found.get(key, 0), expected.get(key, 0), relative)
        ]
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        is_same = found == pytest.approx(expected, rel=relative)
    else:
        is_same = found == expected or relative > 1e-3  # sentences have numbers in them
    return [] if is_same else [f"{path}: {found}, was {expected}"]


@functools.cache
def goldens() -> dict[str, Any]:
    return json.loads(GOLDENS.read_text())


def check(name: str, found: dict[str, Any]) -> None:
    is_same_torch = torch.__version__.startswith(goldens()["torch"])
    expected = goldens().get(name)
    assert expected is not None, f"{name} has no golden plan: python {Path(__file__).name}"
    assert not same(name, found, expected, 1e-6 if is_same_torch else 0.05), "write them again if this is meant"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_it_was(name: str) -> None:
    check(name, predicted(CASES[name]))


@pytest.mark.parametrize("name", MACHINE_PRESETS)
def test_a_machine_is_what_it_was(name: str) -> None:
    check(f"machine: {name}", machine_fields(name))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_what_it_found(name: str) -> None:
    check(f"search: {name}", ranked(*SEARCHES[name]))


def main() -> None:
    """Write all golden plans."""
    found = {"torch": ".".join(torch.__version__.split(".")[:2])}
    found |= {name: predicted(case) for name, case in CASES.items()}
    found |= {f"machine: {name}": machine_fields(name) for name in MACHINE_PRESETS}
    found |= {f"search: {name}": ranked(*search) for name, search in SEARCHES.items()}
    GOLDENS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
