"""What the commands `zeroshard plan` and `zeroshard simulate` share. It imports no torch: `--help` is fast."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.planner import MACHINE_PRESETS
from zeroshard.utils.command_line import STDOUT, make_echo, positive_int

if TYPE_CHECKING:
    from torch import nn

    from zeroshard.planner import Machine
    from zeroshard.planner.commands.open_model import OpenedModel

MAX_DEVICES = 2**20
MODEL_HELP = "a preset (see `zeroshard presets`), a Hugging Face model's directory or config.json, or module:callable"
MACHINE_HELP = (
    f"{', '.join(MACHINE_PRESETS)}, here (this machine, as measured by `zeroshard plan --calibrate`), or a JSON file"
)


def device_count(text: str) -> int:
    """Parse a number of devices.

    >>> device_count("64")
    64
    """
    count = positive_int(text)
    if count > MAX_DEVICES:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_DEVICES:,} devices (got {count:,})")
    return count


def add_memory_option(group: argparse._ArgumentGroup) -> None:
    """Add the option that overrides the memory of a machine."""
    group.add_argument("--memory", metavar="SIZE", help="memory of a device, such as 80GB; default: the machine's")


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """Add the options that describe what a model is called with, and the stages."""
    group.add_argument(
        "--sequence",
        type=positive_int,
        metavar="S",
        help="tokens per sample; default: the model's context, at most 1024 for Hugging Face models",
    )
    group.add_argument(
        "--inputs", metavar="module:callable", help="a function of the batch size that returns the model's arguments"
    )
    group.add_argument("--stage", type=parse_stages, metavar="0,1,2,3", help="ZeRO stages to evaluate; default: all")


def add_mesh_options(group: argparse._ArgumentGroup, **replicas: Any) -> None:
    """Add the options of a 2-D mesh; ``replicas`` are the arguments of its first option."""
    group.add_argument("--replicas", **replicas)
    group.add_argument(
        "--partition",
        type=lambda text: text.split(","),
        metavar="WAY[,WAY…]",
        help="how such a mesh divides the states: hybrid, hierarchical, full, hierarchical-gradients, inner-gradients; "
        "default: all that may help",
    )


def check_partition(options: argparse.Namespace, machine: Machine, devices: int) -> None:
    """Raise if a partition of a 2-D mesh is given, and no mesh of the search has several rows."""
    nodes = machine.nodes(devices)
    rows = [nodes if given == "nodes" else given for given in options.replicas or ["nodes"]]
    if options.partition is not None and max(rows) == 1:
        raise ValueError(
            "--partition has no effect without the rows of a mesh: give --replicas above 1, or more --devices than the "
            f"{machine.devices} of a node"
        )


def add_wire_options(group: argparse._ArgumentGroup, default: str) -> None:
    """Add the options for collectives in 8 bits."""
    for flag, what in (
        ("gather-dtype", "parameters are all-gathered in stage 3"),
        ("reduce-wire", "gradients are sent"),
    ):
        group.add_argument(
            f"--{flag}",
            type=lambda text: text.split(","),
            metavar="DTYPE[,DTYPE…]",
            help=f"8-bit dtypes in which {what}: int8, fp8, or none for their own; {default}",
        )


def add_local_steps_options(group: argparse._ArgumentGroup, **local_steps: Any) -> None:
    """Add the options of replicas that train alone; ``local_steps`` are the arguments of the first one."""
    group.add_argument("--local-steps", **local_steps)
    group.add_argument(
        "--outer-lr",
        type=float,
        metavar="LR",
        help="with --local-steps: an outer SGD with Nesterov momentum updates the averages, as in `zeroshard train`",
    )
    group.add_argument(
        "--outer-momentum", type=float, metavar="M", help="with --outer-lr: its momentum; 0: none; default: 0.9"
    )


def outer_optimizer(options: argparse.Namespace) -> dict[str, Any]:
    """Return the hyper-parameters of the outer SGD that the options name; empty if they name none."""
    if options.outer_lr is None:
        if options.outer_momentum is not None:
            raise ValueError("--outer-momentum is that of --outer-lr: give both, or neither")
        return {}
    steps = options.local_steps if isinstance(options.local_steps, list) else [options.local_steps or 1]
    if max(steps) == 1:
        raise ValueError("--outer-lr updates the averages of replicas: give --local-steps above 1 too")
    momentum = 0.9 if options.outer_momentum is None else options.outer_momentum
    if not 0 < options.outer_lr < math.inf or not 0 <= momentum < math.inf:
        raise ValueError(
            f"--outer-lr must be above 0, its momentum 0 or more, got {options.outer_lr:g} and {momentum:g}"
        )
    return {"lr": options.outer_lr, "momentum": momentum, "nesterov": momentum > 0}


def parse_stages(text: str) -> list[int]:
    """Parse ZeRO stages.

    >>> parse_stages("1,3")
    [1, 3]
    """
    if not all(part in ("0", "1", "2", "3") for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected stages from 0 to 3 such as 3 or 1,2,3, got {text!r}")
    return [int(part) for part in text.split(",")]


def open_machine_and_model(
    options: argparse.Namespace, default_machine: str = "h100", **shape: int | None
) -> tuple[Machine, OpenedModel]:
    """Return the machine and the model that the options name; ``shape`` overrides a preset's."""
    from zeroshard.planner import Machine
    from zeroshard.planner.commands import open_model

    machine = Machine.resolve(options.machine or default_machine).with_memory(options.memory)
    opened = open_model.open_model(options.model, sequence=options.sequence, **shape)
    if options.inputs is not None:
        opened = opened._replace(inputs=open_model.open_inputs(options.inputs))
    return machine, opened


def float8_options(options: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """Return which layers `zeroshard train --precision fp8` keeps in bf16; none of a model that it cannot train."""
    if options.precision != "fp8" or ":" in options.model:
        return {}
    from zeroshard.models import find_output_layers

    return {"keep_bf16": find_output_layers(model)}


def one_line(error: Exception) -> str:
    """Return an error's message in one line, without the frames of C++ code that torch adds.

    >>> one_line(ValueError("no model\\nException raised from f\\nframe #0"))
    'no model'
    """
    lines = str(error).partition("\nException raised from")[0].splitlines()
    return " ".join(line.strip() for line in lines) or type(error).__name__


def write_json(record: dict[str, Any], target: str) -> None:
    """Write a record to a file, or to standard output."""
    text = json.dumps(record, indent=1, allow_nan=False)
    if target == STDOUT:
        make_echo(sys.stdout)(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")
