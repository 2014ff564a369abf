"""The command `zeroshard plan`: predict memory and time of training a model, and choose options that fit.

It needs only torch, except for the HTML page.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.cli.common import STDOUT, check_output_files, make_echo, positive_int
from zeroshard.planner.machines.presets import PRESETS as MACHINES

if TYPE_CHECKING:
    from torch import nn

    from zeroshard.planner.machines.machine import Machine
    from zeroshard.planner.plan import Plans
    from zeroshard.planner.tracing.inputs import Inputs

OFFLOAD_CHOICES = ("none", "host", "disk", "every")
PRECISION_CHOICES = ("auto", "bf16", "fp16", "fp32")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 0 if a plan fits, 1 if none does, 2 if planning is not possible."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.model is None and not options.calibrate:
        parser.error("wanted is a MODEL: a preset, a Hugging Face model's directory or config.json, or module:callable")
    if options.model is not None and options.devices is None:
        parser.error("wanted is --devices N, how many devices train it together")
    echo = make_echo(sys.stderr if options.json == STDOUT else sys.stdout)
    try:
        check_output_files(json=options.json, html=options.html)
        if options.calibrate:
            _calibrate(echo)
            options.machine = options.machine or "here"
        return _plan(options, echo) if options.model is not None else 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"zeroshard plan: {error}", file=sys.stderr)
        return 2


# ---------------------------------------------------------------------------------------------- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroshard plan",
        description="Tell what training a model takes on so many devices: memory by kind, traffic and time, for every "
        "stage, tensor degree, offload and checkpointing; what fits; and what to choose. Nothing is trained: the model "
        "runs on tensors without memory. Exit status: 0 where something fits, 1 where nothing does, 2 for what cannot "
        "be planned.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a preset (see `zeroshard presets`), a Hugging Face model's directory or config.json, or module:callable: "
        "a function of yours that returns a model, or a model and its inputs",
    )
    add = parser.add_argument_group("the devices").add_argument
    add("--devices", type=positive_int, metavar="N", help="how many train it together")
    add(
        "--machine",
        metavar="NAME",
        help=f"{', '.join(MACHINES)}, here (this machine, as --calibrate has measured it), or a JSON file; "
        "default: h100, or here with --calibrate",
    )
    add("--memory", metavar="SIZE", help="of a device, instead of the machine's, as in 80GB")
    add(
        "--calibrate",
        action="store_true",
        help="measure this machine first, in under a minute, and keep the result for --machine here",
    )
    add = parser.add_argument_group("the training").add_argument
    add("--batch", type=positive_int, metavar="B", help="samples a step over all devices; without it, what is fastest")
    add("--micro-batch", type=_positive_ints, metavar="M[,M…]", help="samples a data-parallel rank and backward")
    add(
        "--sequence", type=positive_int, metavar="S", help="tokens a sample; default: the model's context, at most 1024"
    )
    add("--stage", type=_parse_stages, metavar="0,1,2,3", help="ZeRO stages to look at; default: all")
    add(
        "--tensor",
        type=_positive_ints,
        metavar="T[,T…]",
        help="devices that divide each layer; default: all that may help",
    )
    add(
        "--checkpoint",
        type=_split_commas,
        metavar="WHAT[,WHAT…]",
        help="none, recompute (keep blocks' inputs alone), host (and those in host memory); default: all",
    )
    add(
        "--offload",
        choices=OFFLOAD_CHOICES,
        default="every",
        help="where states may rest outside the device; default: every",
    )
    add(
        "--precision",
        choices=PRECISION_CHOICES,
        default="auto",
        help="of computation; auto: 16 bits on a GPU, 32 on a CPU",
    )
    add("--inputs", metavar="module:callable", help="what the model is called with: a function of the batch")
    add = parser.add_argument_group("what is told").add_argument
    add("--all", action="store_true", help="all rows, instead of those worth a look")
    add("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    add("--html", metavar="FILE", help="write a page with pictures, one file that opens offline")
    return parser


def _positive_ints(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def _parse_stages(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"wanted stages such as 3 or 1,2,3, got {text!r}")
    return [int(part) for part in text.split(",")]


def _split_commas(text: str) -> list[str]:
    return text.split(",")


# ---------------------------------------------------------------------------------------------- planning


def _plan(options: argparse.Namespace, echo: Callable[[str], None]) -> int:
    from zeroshard.config.offload import parse_bytes
    from zeroshard.planner.machines.machine import Machine
    from zeroshard.planner.open_model import open_inputs, open_model, tokens_per_sample
    from zeroshard.planner.tracing.inputs import model_arguments

    machine = Machine.resolve(options.machine or "h100")
    if options.memory is not None:
        machine = Machine.resolve(machine, memory=parse_bytes("--memory", options.memory))
    model, inputs, description = open_model(options.model, sequence=options.sequence)
    if options.inputs is not None:
        inputs = open_inputs(options.inputs)
    model_arguments(model, inputs, 1, options.sequence)  # raises for invalid inputs before anything is printed
    tokens = tokens_per_sample(model, inputs, options.sequence)
    for line in _heading(description, model, machine, options.devices, tokens):
        echo(line)
    plans = _plans_for_options(options, model, inputs, machine)
    _print_plans(plans, options, description, tokens, echo)
    if options.html is not None:
        from zeroshard.planner.page.plan_page import write_page

        usage = _usage_lines(plans, options)
        echo(f"\npage: {write_page(Path(options.html), plans, model=description, tokens=tokens, usage=usage)}")
    return 0 if plans.best is not None else 1


def _heading(description: str, model: nn.Module, machine: Machine, devices: int, tokens: int | None) -> list[str]:
    from zeroshard.utils.format import format_bytes

    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    trained_note = "" if trained == parameters else f", {trained:,} of them trained"
    nodes = -(-devices // machine.devices)
    nodes_text = f"{nodes} nodes of {machine.devices}" if nodes > 1 else "one node"
    samples = "" if tokens is None else f", {tokens:,} tokens a sample"
    return [
        f"model     {description}, {parameters:,} parameters{trained_note}{samples}",
        f"machine   {devices} × {machine.name}, {nodes_text}: {format_bytes(machine.memory)} a device, "
        f"{format_bytes(machine.host_memory)} of host memory a node",
    ]


def _plans_for_options(options: argparse.Namespace, model: nn.Module, inputs: Inputs, machine: Machine) -> Plans:
    """Return all plans that the options allow."""
    from zeroshard.planner.plan import plan
    from zeroshard.planner.tracing.trace_model import UntraceableError

    constraints: dict[str, Any] = {
        name: value
        for name in ("batch", "micro_batch", "sequence", "stage", "tensor", "checkpoint")
        if (value := getattr(options, name)) is not None
    }
    if options.precision != "auto":
        constraints["precision"] = options.precision
    offload = options.offload
    if offload in ("host", "disk") and machine.kind == "cpu":
        raise ValueError(f"there is no --offload {offload} on a CPU, whose memory is the host's already: leave it out")
    constraints["offload"] = None if offload == "none" else "every"
    try:
        plans = plan(model, inputs, devices=options.devices, machine=machine, **constraints)
    except UntraceableError as error:
        raise ValueError(str(error)) from error
    if offload in ("host", "disk"):
        plans = replace(
            plans,
            candidates=tuple(
                candidate for candidate in plans.candidates if _is_offloaded_to(candidate.strategy.offload, offload)
            ),
        )
        if not plans.candidates:
            raise ValueError(f"no plan has --offload {offload} here: take --stage 3, or leave it out")
    return plans


def _is_offloaded_to(offload: Any, tier: str) -> bool:
    """Return whether ``tier`` is the slowest tier that states are placed in."""
    return offload is not None and offload.needs_disk == (tier == "disk")


def _print_plans(
    plans: Plans, options: argparse.Namespace, description: str, tokens: int | None, echo: Callable[[str], None]
) -> None:
    from zeroshard.planner.plan_json import plans_to_dict
    from zeroshard.planner.plan_table import format_table

    if options.json is not None:
        text = json.dumps(plans_to_dict(plans, model=description, tokens=tokens), indent=1, allow_nan=False)
        if options.json == STDOUT:
            make_echo(sys.stdout)(text)
            return
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    echo(f"precision {plans.precision}\n\n{format_table(plans, show_all=options.all, tokens=tokens)}\n\n{plans.reason}")
    for label, text in _usage_lines(plans, options):
        echo(f"\n{label}:\n" + "\n".join(f"  {line}" for line in text.splitlines()))


def _usage_lines(plans: Plans, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the command and the Python calls for the chosen plan."""
    from zeroshard.planner.render_flags import python_calls, train_command

    best = plans.best
    if best is None:
        return []
    lines = []
    if ":" not in options.model:
        command = train_command(
            best.strategy, options.model, plans.devices, plans.machine, plans.precision, options.sequence
        )
        lines.append(("to train it so", command))
    return [*lines, ("in your own script", python_calls(best.strategy, plans.devices, plans.machine, plans.precision))]


def _calibrate(echo: Callable[[str], None]) -> None:
    from zeroshard.planner.calibration.calibrate import calibrate
    from zeroshard.planner.machines import cache

    echo("measuring this machine, which takes up to a minute …")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        machine = calibrate()
    for warning in caught:
        print(f"zeroshard plan: {warning.message}", file=sys.stderr)
    for label, text in describe_machine(machine):
        echo(f"  {label:<16}{text}")
    path = cache.machine_path(machine.name)
    echo(f"kept in {path}, for --machine here\n" if path.is_file() else "")


def describe_machine(machine: Machine) -> list[tuple[str, str]]:
    """Return the properties of a machine as pairs of label and text.

    >>> from zeroshard.planner.machines.machine import Machine
    >>> dict(describe_machine(Machine.resolve("h100")))["computing"]
    'fp32 67 TFLOPS, bf16 989 TFLOPS, fp16 989 TFLOPS; products reach 70% of it, attention 20%'
    """
    from zeroshard.utils.format import format_bytes

    flops = ", ".join(f"{name} {peak / 1e12:.3g} TFLOPS" for name, peak in machine.flops.items())
    links = ", ".join(
        f"{format_bytes(link.bandwidth)}/s {name} ({link.latency * 1e6:.3g} µs)"
        for name, link in (("in a node", machine.inside), ("between nodes", machine.outside))
    )
    return [
        ("machine", f"{machine.name}: {machine.devices} × {machine.kind}, {format_bytes(machine.memory)} each"),
        (
            "computing",
            f"{flops}; products reach {machine.efficiency.share:.0%} of it, attention {machine.attention:.0%}",
        ),
        ("device memory", f"{format_bytes(machine.bandwidth)}/s; {machine.gap * 1e6:.3g} µs lost with each kernel"),
        (
            "host",
            f"{format_bytes(machine.host_memory)}, {machine.host_update / 1e9:.3g} G parameters/s updated with Adam, "
            f"{machine.op * 1e6:.3g} µs an operation",
        ),
        ("to the device", f"{format_bytes(machine.pcie)}/s each way"),
        (
            "disk",
            f"{format_bytes(machine.disk)}, {format_bytes(machine.disk_read)}/s read, "
            f"{format_bytes(machine.disk_write)}/s written",
        ),
        ("links", links),
    ]
