"""Usage: what to type so that a model is trained as a choice says."""

from __future__ import annotations

import shlex

from zeroshard.config.offload import Offload
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.strategy import Strategy

PLACEHOLDER_DIRECTORY = "/path/on/a/fast/disk"  # a plan does not know it


def train_command(
    strategy: Strategy,
    model: str,
    devices: int,
    machine: Machine,
    precision: str | None = None,
    sequence: int | None = None,
) -> str:
    """The call of `zeroshard train` that makes this choice; on several nodes, one that torchrun makes on each.

    >>> strategy = Strategy(stage=2, checkpoint="recompute", micro_batch=4)
    >>> print(train_command(strategy, "gpt2-xl", 8, Machine.resolve("h100")))
    zeroshard train --model gpt2-xl --ranks 8 --stage 2 --recompute --micro-batch 4
    """
    said = ["--model", model]
    nodes = -(-devices // machine.devices)
    if nodes == 1:
        said += ["--ranks", str(devices)]
    if machine.kind == "cpu":
        said += ["--device", "cpu"]
    if sequence is not None:
        said += ["--sequence", str(sequence)]
    said += ["--stage", str(strategy.stage)]
    if strategy.tensor > 1:
        said += ["--tensor", str(strategy.tensor)]
    if strategy.checkpoint != "none":
        said.append("--offload-activations" if strategy.checkpoint == "host" else "--recompute")
    said += _offload_flags(strategy.offload)
    said += ["--micro-batch", str(strategy.micro_batch)]
    if strategy.accumulate > 1:
        said += ["--accumulate", str(strategy.accumulate)]
    if precision is not None:
        said += ["--precision", precision]
    return f"{_launch_command(devices, nodes)} train {shlex.join(said)}"


def _launch_command(devices: int, nodes: int) -> str:
    if nodes == 1:
        return "zeroshard"
    if devices % nodes:
        return (
            f"# {devices} ranks do not divide evenly over {nodes} nodes: "
            "give torchrun on each node the --nproc-per-node that it has\ntorchrun … -m zeroshard"
        )
    return f"torchrun --nnodes {nodes} --nproc-per-node {devices // nodes} … -m zeroshard"


def _offload_flags(offload: Offload | None) -> list[str]:
    said: list[str] = []
    for tier, fraction in offload.optimizer.items() if offload is not None else ():
        said += ["--offload", tier]
        if fraction < 1:
            said += ["--offload-fraction", f"{fraction:g}"]
    if offload is not None and offload.parameters:
        said.append("--offload-parameters")
    if offload is not None and offload.needs_disk:
        said += ["--offload-directory", PLACEHOLDER_DIRECTORY]
    return said


def python_calls(strategy: Strategy, devices: int, machine: Machine, precision: str | None = None) -> str:
    """The same in a script of one's own.

    >>> print(python_calls(Strategy(stage=3, checkpoint="host"), 8, Machine.resolve("h100"), "bf16"))
    model, optimizer = zeroshard.shard(model, optimizer, stage=3, precision="bf16")
    zeroshard.checkpoint_activations(model, offload=True)
    """
    lines, options = [], [f"stage={strategy.stage}"]
    if strategy.tensor > 1:
        shape = f"({devices // strategy.tensor}, {strategy.tensor})"
        lines.append(f'mesh = init_device_mesh("{machine.kind}", {shape}, mesh_dim_names=("shard", "tensor"))')
        options.insert(0, "mesh=mesh")
    if precision not in (None, "fp32"):
        options.append(f'precision="{precision}"')
    if strategy.offload is not None:
        options.append(f"offload={_offload_call(strategy.offload)}")
    lines.append(f"model, optimizer = zeroshard.shard(model, optimizer, {', '.join(options)})")
    if strategy.checkpoint != "none":
        lines.append(
            f"zeroshard.checkpoint_activations(model{', offload=True' if strategy.checkpoint == 'host' else ''})"
        )
    return "\n".join(lines)


def _offload_call(offload: Offload) -> str:
    said = []
    for kind in ("optimizer", "gradients", "parameters"):
        fractions: dict[str, float] = getattr(offload, kind) or {}
        if not fractions:
            continue
        (tier, fraction), several = next(iter(fractions.items())), len(fractions) > 1
        shown = str(fractions) if several else f'"{tier}"' if fraction == 1 else f'("{tier}", {fraction:g})'
        said.append(f"{kind}={shown}")
    if offload.needs_disk:
        said.append(f'directory="{PLACEHOLDER_DIRECTORY}"')
    return f"zeroshard.Offload({', '.join(said)})"
