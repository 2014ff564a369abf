"""Render a strategy as a command line or as Python calls."""

from __future__ import annotations

import shlex

from zeroshard.config.offload import Offload
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.strategy import Strategy

PLACEHOLDER_DIRECTORY = "/path/on/a/fast/disk"  # a plan does not know the path


def train_command(
    strategy: Strategy,
    model: str,
    devices: int,
    machine: Machine,
    precision: str | None = None,
    sequence: int | None = None,
) -> str:
    """Return the `zeroshard train` command for a strategy; for several nodes, the torchrun command of each node.

    >>> strategy = Strategy(stage=2, checkpoint="recompute", micro_batch=4)
    >>> print(train_command(strategy, "gpt2-xl", 8, Machine.resolve("h100")))
    zeroshard train --model gpt2-xl --ranks 8 --stage 2 --recompute --micro-batch 4
    """
    args = ["--model", model]
    nodes = -(-devices // machine.devices)
    if nodes == 1:
        args += ["--ranks", str(devices)]
    if machine.kind == "cpu":
        args += ["--device", "cpu"]
    if sequence is not None:
        args += ["--sequence", str(sequence)]
    args += ["--stage", str(strategy.stage)]
    if strategy.tensor > 1:
        args += ["--tensor", str(strategy.tensor)]
    if strategy.checkpoint != "none":
        args.append("--offload-activations" if strategy.checkpoint == "host" else "--recompute")
    args += _offload_flags(strategy.offload)
    args += ["--micro-batch", str(strategy.micro_batch)]
    if strategy.accumulate > 1:
        args += ["--accumulate", str(strategy.accumulate)]
    if precision is not None:
        args += ["--precision", precision]
    return f"{_launch_command(devices, nodes)} train {shlex.join(args)}"


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
    flags: list[str] = []
    for tier, fraction in offload.optimizer.items() if offload is not None else ():
        flags += ["--offload", tier]
        if fraction < 1:
            flags += ["--offload-fraction", f"{fraction:g}"]
    if offload is not None and offload.parameters:
        flags.append("--offload-parameters")
    if offload is not None and offload.needs_disk:
        flags += ["--offload-directory", PLACEHOLDER_DIRECTORY]
    return flags


def python_calls(strategy: Strategy, devices: int, machine: Machine, precision: str | None = None) -> str:
    """Return the Python calls for a strategy, for a user's own script.

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
    arguments = []
    for kind in ("optimizer", "gradients", "parameters"):
        fractions: dict[str, float] = getattr(offload, kind) or {}
        if not fractions:
            continue
        (tier, fraction), has_several = next(iter(fractions.items())), len(fractions) > 1
        value = str(fractions) if has_several else f'"{tier}"' if fraction == 1 else f'("{tier}", {fraction:g})'
        arguments.append(f"{kind}={value}")
    if offload.needs_disk:
        arguments.append(f'directory="{PLACEHOLDER_DIRECTORY}"')
    return f"zeroshard.Offload({', '.join(arguments)})"
