"""The command `zeroshard plan`: predict memory and time of training a model, and choose options that fit.

It needs only torch.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.planner.commands.plan_options import (
    MACHINE_HELP,
    MODEL_HELP,
    add_local_steps_options,
    add_memory_option,
    add_mesh_options,
    add_model_options,
    add_wire_options,
    check_partition,
    device_count,
    float8_options,
    one_line,
    open_machine_and_model,
    outer_optimizer,
    write_json,
)
from zeroshard.utils.command_line import STDOUT, CommandParser, check_output_files, make_echo, positive_int, print_error
from zeroshard.utils.format import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from zeroshard.planner import Machine, Plans
    from zeroshard.planner.commands.open_model import OpenedModel


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 0 if a plan fits, 1 if none does, 2 if planning is not possible."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.model is None and not options.calibrate:
        parser.error(f"the following argument is required: MODEL, {MODEL_HELP}")
    if options.model is not None and options.devices is None:
        parser.error("the following argument is required: --devices N")
    if options.model is None:
        flags = [word for word in argv if word.startswith("-") and not "--calibrate".startswith(word)]
        if flags:
            parser.error(f"without MODEL, --calibrate only measures this machine: leave out {', '.join(flags)}")
    echo = make_echo(sys.stderr if options.json == STDOUT else sys.stdout)
    try:
        check_output_files(json=options.json, svg=options.svg)
        if options.calibrate:
            _calibrate(echo)
            options.machine = options.machine or "here"
        return _plan(options, echo) if options.model is not None else 0
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print_error("plan", one_line(error))
        return 2


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeroshard plan",
        description="Predict the memory, traffic and step time of training a model, for every stage, tensor degree, "
        "offload and checkpointing; show what fits, and choose the best. Nothing is trained: the model runs on "
        "tensors without memory. Exit status: 0 if a plan fits, 1 if none fits, 2 if planning is not possible.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL_HELP}: a function that returns a model, or a model and its inputs",
    )
    group = parser.add_argument_group("devices")
    group.add_argument("--devices", type=device_count, metavar="N", help="number of devices that train the model")
    group.add_argument("--machine", metavar="NAME", help=f"{MACHINE_HELP}; default: h100, or here with --calibrate")
    add_memory_option(group)
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine first, in under a minute, and save the result for --machine here",
    )
    group = parser.add_argument_group("training")
    group.add_argument(
        "--batch", type=positive_int, metavar="B", help="samples per step over all devices; default: the fastest"
    )
    group.add_argument(
        "--micro-batch",
        type=_positive_ints,
        metavar="M[,M…]",
        help="samples per data-parallel rank and backward; default: all that may be fastest",
    )
    add_model_options(group)
    group.add_argument(
        "--tensor", type=_positive_ints, metavar="T[,T…]", help="tensor-parallel degrees; default: all that may help"
    )
    add_mesh_options(
        group,
        type=_positive_ints,
        metavar="R[,R…]",
        help="rows of a 2-D mesh of the data-parallel ranks; default: 1, and the number of nodes",
    )
    add_wire_options(group, "default: none, and int8 with --allow-lossy")
    group.add_argument(
        "--allow-lossy",
        action="store_true",
        help="try collectives in 8 bits, which change the numbers; without it only those that are named",
    )
    add_local_steps_options(
        group,
        type=positive_int,
        metavar="K",
        help="replicas train alone and are averaged every K steps: another algorithm, so it is never chosen, only "
        "used if given; default of --replicas: the number of nodes",
    )
    group.add_argument(
        "--checkpoint",
        type=lambda text: text.split(","),
        metavar="MODE[,MODE…]",
        help="none (keep all activations), recompute (keep only the inputs of blocks), host (keep those in host "
        "memory); default: all",
    )
    group.add_argument(
        "--offload",
        choices=("none", "host", "disk", "every"),
        default="every",
        help="where states may be offloaded; default: every",
    )
    group.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32", "fp8"),
        default="auto",
        help="precision of computation; auto: 16 bits on a GPU, 32 on a CPU",
    )
    group.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="adamw, or muon: Muon for the matrices of blocks, each updated by one rank, and AdamW for the others, "
        "planned without offload; default: adamw",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--all", action="store_true", help="show all rows, not only the most informative ones")
    group.add_argument("--json", metavar="FILE", help="write all results as JSON; - for standard output")
    group.add_argument("--svg", metavar="FILE", help="draw memory by kind and time by part")
    return parser


def _positive_ints(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def _plan(options: argparse.Namespace, echo: Callable[[str], None]) -> int:
    from zeroshard.planner import model_arguments, plans_to_dict
    from zeroshard.planner.commands.plan_text import format_table

    machine, opened = open_machine_and_model(options)
    check_partition(options, machine, options.devices)
    # raises for invalid inputs before anything is printed
    model_arguments(opened.model, opened.inputs, 1, options.sequence)
    tokens = opened.tokens_per_sample(options.sequence)
    for line in _heading(opened, machine, options.devices, tokens):
        echo(line)
    plans = _plans_for_options(options, opened, machine)
    usage = _usage_lines(plans, options)
    if options.json is not None:
        write_json(plans_to_dict(plans, model=opened.description, tokens=tokens), options.json)
    if options.json != STDOUT:
        table = format_table(plans, show_all=options.all, tokens=tokens)
        echo(f"precision {plans.precision}\n\n{table}\n\n{plans.reason}")
        if (loads := plans.best_or_smallest.owner_loads) is not None and len(loads.elements) > 1:
            echo(f"\nwhole parameters, {len(loads.elements)} owners: the fullest has {loads.describe()}")
        for label, text in usage:
            echo(f"\n{label}:\n" + "\n".join(f"  {line}" for line in text.splitlines()))
    if options.svg is not None:
        from zeroshard.planner.commands.plan_charts import draw_plans

        Path(options.svg).write_text(draw_plans(plans), encoding="utf-8")
        echo(f"\npicture: {options.svg}")
    return 0 if plans.best is not None else 1


def _heading(opened: OpenedModel, machine: Machine, devices: int, tokens: int | None) -> list[str]:
    def count(parameters: list[nn.Parameter]) -> int:
        return sum(parameter.numel() for parameter in parameters)

    parameters = list(opened.model.parameters())
    total, trained = count(parameters), count([parameter for parameter in parameters if parameter.requires_grad])
    trained_note = "" if trained == total else f", {trained:,} of them trained"
    nodes = machine.nodes(devices)
    nodes_text = f"{nodes} nodes of {machine.devices}" if nodes > 1 else "one node"
    samples = "" if tokens is None else f", {tokens:,} tokens a sample"
    return [
        f"model     {opened.description}, {total:,} parameters{trained_note}{samples}",
        f"machine   {devices} × {machine.name}, {nodes_text}: {format_bytes(machine.memory)} a device, "
        f"{format_bytes(machine.host_memory)} of host memory a node",
    ]


def _plans_for_options(options: argparse.Namespace, opened: OpenedModel, machine: Machine) -> Plans:
    """Return all plans that the options allow."""
    from zeroshard.planner import plan

    tier = options.offload if options.offload in ("host", "disk") else None
    if tier is not None and machine.is_cpu:
        raise ValueError(f"--offload {tier} is not possible on a CPU, whose memory is the host's: leave it out")
    constraints: dict[str, Any] = {
        name: value
        for name in (
            *("batch", "micro_batch", "sequence", "stage", "tensor", "replicas", "partition", "checkpoint"),
            *("gather_dtype", "reduce_wire", "allow_lossy", "local_steps"),
        )
        if (value := getattr(options, name)) is not None
    }
    constraints["offload"] = None if options.offload == "none" else "every"
    constraints["optimizer"] = options.optimizer
    if tier is not None and options.optimizer == "muon":
        raise ValueError(f"--offload {tier} cannot be planned with --optimizer muon: leave one of them out")
    if outer := outer_optimizer(options):
        from torch.optim import SGD  # here: the command line starts without torch

        constraints["outer_optimizer"] = partial(SGD, **outer)
    if options.precision != "auto":
        constraints["precision"] = options.precision
    constraints |= float8_options(options, opened.model)
    plans = plan(opened.model, opened.inputs, devices=options.devices, machine=machine, **constraints)
    if tier is None:
        return plans
    # those whose slowest tier is the given one
    candidates = tuple(
        candidate
        for candidate in plans.candidates
        if (offload := candidate.strategy.offload) is not None and offload.needs_disk == (tier == "disk")
    )
    if not candidates:
        raise ValueError(f"no plan can use --offload {tier} here: use --stage 3, or leave it out")
    return replace(plans, candidates=candidates)


def _usage_lines(plans: Plans, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the command and the Python calls for the chosen plan, with labels."""
    from zeroshard.planner.commands.plan_text import python_calls, train_command

    best = plans.best
    if best is None:
        return []
    outer = outer_optimizer(options)
    kept = plans.traced_model.options.get("keep_bf16", ())
    calls = python_calls(best.strategy, plans.devices, plans.machine, plans.precision, outer, kept)
    lines = [("in your own script", calls)]
    if ":" not in options.model:
        command = train_command(
            best.strategy, options.model, plans.devices, plans.machine, plans.precision, options.sequence
        )
        command += " --optimizer muon" if options.optimizer == "muon" else ""
        command += f" --outer-lr {outer['lr']:g} --outer-momentum {outer['momentum']:g}" if outer else ""
        lines.insert(0, ("to train with this plan", command))
    return lines


def _calibrate(echo: Callable[[str], None]) -> None:
    from zeroshard.planner import calibrate

    echo("measuring this machine, which takes up to a minute …")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        machine = calibrate()
    for warning in caught:
        print_error("plan", warning.message)
    echo(machine.to_json())
    path = machine.saved_path
    echo(f"saved in {path}, for --machine here\n" if path.is_file() else "")
