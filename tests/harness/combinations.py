"""Which features the tests run together: recorded by `make durations`, shown by docs/combinations.md.

python tests/harness/combinations.py    # rewrite the page from tests/combinations.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard
from zeroshard import api
from zeroshard.config.config import PARTITIONS, Config

TESTS = Path(__file__).parents[1]
RECORD = TESTS / "combinations.json"
PAGE = TESTS.parent / "docs" / "combinations.md"
OPTIONS: dict[str, dict[str, Any]] = {  # features that are options of shard()
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **{name: {"precision": name} for name in ("bf16", "fp16", "fp8")},
    **{f"partition {name}": {"partition": name} for name in PARTITIONS},
    "gathers in 8 bits": {"gather_dtype": "int8"},
    "reductions in 8 bits": {"reduce_wire": "int8"},
    "local steps": {"local_steps": 2},
    "states on the host": {"offload": {"optimizer": "host"}},
    "states on disk": {"offload": {"optimizer": "disk", "directory": "/tmp"}},
    "gradients on the host": {"offload": {"optimizer": "host", "gradients": "host"}},
    "gradients on disk": {"offload": {"optimizer": "disk", "gradients": "disk", "directory": "/tmp"}},
    "parameters on the host": {"offload": {"parameters": "host"}},
    "parameters on disk": {"offload": {"parameters": "disk", "directory": "/tmp"}},
}
OTHERS = (
    "tensor axis",
    "Muon",
    "several optimizers",
    "frozen parameters",
    "tied parameters",
    "meta device",
    "compiled",
)
FEATURES = (*OPTIONS, *OTHERS)


def features_of_call(model: nn.Module, optimizer: Any, config: Config, mesh: Any) -> Iterator[str]:
    """Yield the features that a call of shard() uses."""
    axes = () if mesh is None else mesh.mesh_dim_names or range(mesh.ndim)
    has_tensor_axis = "tensor" in axes or "tp" in axes
    yield f"stage {config.stage}"
    if config.precision in ("bf16", "fp16", "fp8"):
        yield config.precision
    if len(axes) - has_tensor_axis == 2:
        yield f"partition {config.partition}"
    if has_tensor_axis:
        yield "tensor axis"
    if config.gather_dtype is not None:
        yield "gathers in 8 bits"
    if config.reduce_wire is not None:
        yield "reductions in 8 bits"
    if config.local_steps > 1:
        yield "local steps"
    for kind, states in (("states", "optimizer"), ("gradients", "gradients"), ("parameters", "parameters")):
        places = str(getattr(config.offload, states, None))
        if "host" in places:
            yield f"{kind} on the host"
        elif "disk" in places:
            yield f"{kind} on disk"
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if len(optimizers) > 1:
        yield "several optimizers"
    if any("Muon" in type(each).__name__ for each in optimizers):
        yield "Muon"
    parameters = [p for module in model.modules() for p in module._parameters.values() if p is not None]
    if not all(p.requires_grad for p in parameters):
        yield "frozen parameters"
    if len(parameters) > len(set(parameters)):
        yield "tied parameters"
    if any(p.is_meta for p in parameters):
        yield "meta device"
    if any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl for m in model.modules()):
        yield "compiled"


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Count the pairs of features of all calls of shard() in this process."""
    pairs: Counter[str] = Counter()
    shard_model: Callable[..., Any] = api.shard_model

    def recording(model: nn.Module, optimizer: Any, config: Config, *, mesh: Any = None, **rest: Any) -> Any:
        used = sorted(set(features_of_call(model, optimizer, config, mesh)), key=list(FEATURES).index)
        done = shard_model(model, optimizer, config, mesh=mesh, **rest)
        pairs.update(f"{first} + {second}" for first, second in combinations(used, 2))
        return done

    entry: Any = sys.modules[zeroshard.shard.__module__]
    entry.shard_model = recording
    try:
        yield pairs
    finally:
        entry.shard_model = shard_model


def refusal(first: str, second: str) -> str | None:
    """Return why two options cannot be combined, or None."""
    one, two = OPTIONS.get(first, {}), OPTIONS.get(second, {})
    if one.keys() & two.keys() - {"offload"}:
        return "the same option"
    offload = {**one.get("offload", {}), **two.get("offload", {})}
    options = {**one, **two, **({"offload": offload} if offload else {})}
    try:
        Config(**{"stage": 3, **options})  # most options exist in stage 3
    except ValueError as error:
        return str(error)
    return None


def page() -> str:
    """Return the page of docs."""
    tested = json.loads(RECORD.read_text(encoding="utf-8"))
    short = {name: str(number) for number, name in enumerate(FEATURES, 1)}
    lines = [
        "| | |" + "".join(f" {short[name]} |" for name in FEATURES[:-1]),
        "|---|---|" + "---|" * (len(FEATURES) - 1),
    ]
    for row, second in enumerate(FEATURES):
        cells = []
        for first in FEATURES[:row]:
            if f"{first} + {second}" in tested:
                cells.append("✓")
            else:
                cells.append("–" if refusal(first, second) else "")
        lines.append(f"| {short[second]} | {second} | " + " | ".join(cells) + " |")
    return (
        "# What combines with what\n\n"
        "✓: tests run both together and pass. –: values of one option, or an error says why not. Nothing: expected to\n"
        "work, but no test has both. Made from what the tests run, with threads as ranks on a CPU (`make durations`);\n"
        "[tests on a GPU](versions.md) come beside them.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
