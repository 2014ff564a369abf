"""The command `zeroshard simulate`: how training scales with the number of devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
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

if TYPE_CHECKING:
    from zeroshard.planner import Machine
    from zeroshard.planner.commands.open_model import OpenedModel

EXACT = "none"  # instead of an 8-bit dtype
NETWORK_NODES = 4  # of the cluster whose networks are compared, unless the devices are given
SHAPE_OPTIONS = ("layers", "heads", "width")
# any directory: only the rates and the size of the disk matter here
OFFLOADS = {"none": None, "host": "host", "disk": {"optimizer": "disk", "directory": "."}}


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 2 if it cannot be simulated."""
    options = _parser().parse_args(argv)
    echo = make_echo(sys.stderr if options.json == STDOUT else sys.stdout)
    try:
        check_output_files(json=options.json)
        result = _simulate(options, echo)
        if options.json is not None:
            write_json(result, options.json)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print_error("simulate", one_line(error))
        return 2
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeroshard simulate",
        description="Predict how training a model scales from one device to thousands: throughput per device, parts of "
        "the step time, where each stage stops scaling, and the largest model.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--devices",
        type=_parse_device_counts,
        metavar="N,N,… or N-N",
        help="numbers of devices; a range goes in powers of two; default: 1-16384",
    )
    group.add_argument("--machine", default="h100", metavar="NAME", help=f"{MACHINE_HELP}; default: h100")
    add_memory_option(group)
    group.add_argument(
        "--network",
        type=_parse_rates,
        metavar="G[,G…]",
        help="published rates of the link between nodes in Gb/s, to compare all series on each; default: the machine's",
    )
    group = parser.add_argument_group("training")
    group.add_argument(
        "--batch",
        type=positive_int,
        metavar="B",
        help="samples per step over all devices, the same for every number of devices",
    )
    group.add_argument(
        "--micro-batch", type=positive_int, metavar="M", help="samples per rank and backward; default: the fastest"
    )
    add_model_options(group)
    add_mesh_options(
        group,
        type=_parse_replicas,
        metavar="R[,R…]",
        help="rows of a 2-D mesh of the data-parallel ranks; the word nodes for one per node; default: 1, or 1,nodes "
        "with --partition or --local-steps",
    )
    add_wire_options(group, "default: none")
    add_local_steps_options(
        group,
        type=lambda text: [positive_int(part) for part in text.split(",")],
        metavar="K[,K…]",
        help="replicas, or in stage 0 without --replicas all ranks, train alone and are averaged every K steps, "
        "which is another algorithm; default: 1",
    )
    group.add_argument("--tensor", type=positive_int, default=1, metavar="T", help="tensor-parallel degree; default: 1")
    group.add_argument(
        "--checkpoint",
        choices=("none", "recompute", "host"),
        default="none",
        help="recompute: keep only the inputs of blocks; host: keep those in host memory; default: none",
    )
    group.add_argument(
        "--offload", choices=OFFLOADS, default="none", help="where optimizer states are offloaded; default: none"
    )
    group.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp32", "fp8"),
        help="precision of computation; default: 16 bits on a GPU",
    )
    group = parser.add_argument_group("shape of a preset")
    for name in SHAPE_OPTIONS:
        group.add_argument(f"--{name}", type=positive_int, metavar="N", help=f"{name}; default: the preset's")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--largest",
        action="store_true",
        help="find the deepest model of this width that fits, for each number of devices and stage",
    )
    group.add_argument(
        "--json", metavar="FILE", help="also write all results as JSON; - for standard output, tables to standard error"
    )
    return parser


def _parse_device_counts(text: str) -> list[int]:
    """Parse numbers, and ranges in powers of two."""
    counts: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start, end = device_count(first), device_count(last) if dash else device_count(first)
        if start > end:
            raise argparse.ArgumentTypeError(f"expected a range from the fewest to the most devices, got {part!r}")
        counts.append(start)
        while dash and counts[-1] < end:
            counts.append(min(2 * counts[-1], end))
    return counts


def _parse_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"expected rates in Gb/s such as 100 or 10,25,100,400, got {text!r}")
    return rates


def _parse_replicas(text: str) -> list[int | str]:
    return [part if part == "nodes" else positive_int(part) for part in text.split(",")]


def _simulate(options: argparse.Namespace, echo: Callable[[str], None]) -> dict[str, Any]:
    from zeroshard.planner import JSON_VERSION
    from zeroshard.planner.commands.simulate_output import network_table, simulation_table, simulation_to_dict
    from zeroshard.planner.scaling import DEVICE_COUNTS, simulate

    machine, opened = open_machine_and_model(options, **{name: getattr(options, name) for name in SHAPE_OPTIONS})
    options.precision = options.precision or machine.default_precision
    default_counts = [NETWORK_NODES * machine.devices] if options.network else list(DEVICE_COUNTS)
    options.devices, options.stage = options.devices or default_counts, options.stage or [0, 1, 2, 3]
    if options.network and max(options.devices) <= machine.devices:
        raise ValueError(f"--network is between nodes of {machine.devices} devices: use more --devices")
    parameters = sum(parameter.numel() for parameter in opened.model.parameters())
    echo(f"{opened.description}, {parameters:,} parameters, {options.precision}, on {machine.name}")
    if options.largest:
        _reject_for_largest(options)
        return _find_largest(options, opened, machine, echo)
    check_partition(options, machine, max(options.devices))
    needs_mesh = options.partition is not None or max(options.local_steps or [1]) > 1
    more = float8_options(options, opened.model)
    if hyperparams := outer_optimizer(options):
        from torch.optim import SGD  # here: the command line starts without torch

        more["outer_optimizer"] = partial(SGD, **hyperparams)
    simulation = simulate(
        opened.model,
        opened.inputs,
        devices=options.devices,
        machine=machine if not options.network else machine.with_network(options.network[0]),
        batch=options.batch,
        micro_batch=options.micro_batch,
        sequence=options.sequence,
        stages=options.stage,
        replicas=options.replicas or ([1, "nodes"] if needs_mesh else [1]),
        partition=options.partition,
        gather_dtype=options.gather_dtype or EXACT,
        reduce_wire=options.reduce_wire or EXACT,
        local_steps=options.local_steps or 1,
        tensor=options.tensor,
        checkpoint=options.checkpoint,
        offload=OFFLOADS[options.offload],
        precision=options.precision,
        **more,
    )
    tokens = opened.tokens_per_sample(options.sequence)
    if options.network:
        found = {rate: simulation.with_network(rate) for rate in dict.fromkeys(options.network)}
        echo(f"\n{network_table(found)}")
        networks = [
            {"gigabits_per_second": rate, **simulation_to_dict(one, opened.description, tokens)}
            for rate, one in found.items()
        ]
        return {"version": JSON_VERSION, "networks": networks}
    echo(f"samples/s, TFLOPS and memory are of one device\n\n{simulation_table(simulation)}")
    return simulation_to_dict(simulation, opened.description, tokens)


def _reject_for_largest(options: argparse.Namespace) -> None:
    """Raise for options that the search for the largest model does not have."""
    mesh, local = ("replicas", "partition"), ("local_steps", "outer_lr", "outer_momentum")
    for name in ("batch", *mesh, "gather_dtype", "reduce_wire", "network", *local):
        if getattr(options, name) is not None:
            raise ValueError(
                f"--largest does not depend on --{name.replace('_', '-')}, or cannot search with it: omit it"
            )


def _find_largest(
    options: argparse.Namespace, opened: OpenedModel, machine: Machine, echo: Callable[[str], None]
) -> dict[str, Any]:
    from zeroshard.config.offload import Offload
    from zeroshard.planner import Strategy
    from zeroshard.planner.commands.simulate_output import largest_table, largest_to_dict
    from zeroshard.planner.scaling import TracedModel, TrainingLoop, find_deepest_member, find_family

    family = find_family(opened.model)
    if family is None:
        raise ValueError(
            f"cannot change the depth of {type(opened.model).__name__}: use a preset, or call "
            "zeroshard.planner.scaling.find_deepest_member with a family of your own"
        )
    loop = TrainingLoop(inputs=opened.inputs, sequence=options.sequence)
    more = float8_options(options, opened.model)
    base_model = TracedModel.from_family(family, loop=loop, precision=options.precision, **more)
    micro_batch = options.micro_batch or 1
    largest = {}
    for devices in options.devices:
        for stage in options.stage if devices % options.tensor == 0 else ():
            strategy = Strategy(
                stage=stage,
                tensor=options.tensor,
                checkpoint=options.checkpoint,
                offload=Offload.from_option(OFFLOADS[options.offload]),
                micro_batch=micro_batch,
            )
            largest[devices, stage] = find_deepest_member(base_model, strategy, devices, machine)
    if not largest:
        raise ValueError(f"no number of devices is a multiple of the tensor degree ({options.tensor})")
    echo(f"\nthe deepest model of this width that fits, micro-batch {micro_batch}\n{largest_table(largest)}")
    return largest_to_dict(largest, opened.description, machine)
