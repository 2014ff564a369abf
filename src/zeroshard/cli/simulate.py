"""The command `zeroshard simulate`: how training scales with the number of devices, and the paper's results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zeroshard.cli.common import STDOUT, check_output_files, make_echo, positive_int
from zeroshard.cli.plan_options import (
    MACHINE_HELP,
    MODEL_HELP,
    add_memory_option,
    add_model_options,
    open_machine_and_model,
    write_json,
)

if TYPE_CHECKING:
    from zeroshard.cli.open_model import OpenedModel
    from zeroshard.planner import Machine

PAPER = "paper"
SHAPE_OPTIONS = ("layers", "heads", "width")
# any directory: only the rates and the size of the disk matter here
OFFLOADS = {"none": None, "host": "host", "disk": {"optimizer": "disk", "directory": "."}}


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 2 if it cannot be simulated."""
    parser = _parser()
    options = parser.parse_args(argv)
    echo = make_echo(sys.stderr if options.json == STDOUT else sys.stdout)
    try:
        check_output_files(json=options.json)
        if options.model == PAPER:
            _reject_ignored_flags(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(options)))))
        result = _simulate_paper(echo) if options.model == PAPER else _simulate(options, echo)
        if options.json is not None:
            write_json(result, options.json)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print(f"zeroshard simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroshard simulate",
        description="Predict how training a model scales from one device to thousands: throughput per device, parts of "
        "the step time, where each stage stops scaling, and the largest model. `zeroshard simulate paper` "
        "reproduces the tables and figures of the ZeRO paper, next to the paper's own numbers.",
    )
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; or the word paper")
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--devices",
        type=_parse_device_counts,
        metavar="N,N,… or N-N",
        help="numbers of devices; a range goes in powers of two; default: 1-16384",
    )
    group.add_argument("--machine", default="h100", metavar="NAME", help=f"{MACHINE_HELP}; default: h100")
    add_memory_option(group)
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
        "--precision", choices=("bf16", "fp16", "fp32"), help="precision of computation; default: 16 bits on a GPU"
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


def _reject_ignored_flags(given: argparse.Namespace) -> None:
    """Raise for flags that `paper` ignores; in ``given`` a flag that was not given is None, even with a default."""
    names = [name for name, value in vars(given).items() if value is not None and name not in ("model", "json")]
    if names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ValueError(f"the paper has its own models, devices and training: with {PAPER!r}, leave out {flags}")


def _parse_device_counts(text: str) -> list[int]:
    """Parse numbers, and ranges in powers of two."""
    counts: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start, end = positive_int(first), positive_int(last) if dash else positive_int(first)
        if start > end:
            raise argparse.ArgumentTypeError(f"expected a range from the fewest to the most devices, got {part!r}")
        counts.append(start)
        while dash and counts[-1] < end:
            counts.append(min(2 * counts[-1], end))
    return counts


def _simulate_paper(echo: Callable[[str], None]) -> dict[str, Any]:
    from zeroshard.cli.simulate_output import paper_table, paper_to_dict
    from zeroshard.planner.scaling import PAPER_CURVE, paper_results

    echo(
        "The ZeRO paper (arXiv 1910.02054v3) and zeroshard's predictions, on the machine dgx2 with its published rates."
        f"\nFitted, once for all figures: the efficiency curve, share {PAPER_CURVE.share:g}, half "
        f"{PAPER_CURVE.half:.3g} FLOPs."
        "\nNumbers of the paper's figures are read off their bars, to 2 %."
    )
    results = []
    for result in paper_results():
        echo(f"\n{paper_table(result)}")
        results.append(result)
    return paper_to_dict(results)


def _simulate(options: argparse.Namespace, echo: Callable[[str], None]) -> dict[str, Any]:
    from zeroshard.cli.simulate_output import simulation_table, simulation_to_dict
    from zeroshard.planner.scaling import DEVICE_COUNTS, simulate

    machine, opened = open_machine_and_model(options, **{name: getattr(options, name) for name in SHAPE_OPTIONS})
    options.precision = options.precision or machine.default_precision
    options.devices, options.stage = options.devices or list(DEVICE_COUNTS), options.stage or [0, 1, 2, 3]
    parameters = sum(parameter.numel() for parameter in opened.model.parameters())
    echo(f"{opened.description}, {parameters:,} parameters, {options.precision}, on {machine.name}")
    if options.largest:
        return _find_largest(options, opened, machine, echo)
    simulation = simulate(
        opened.model,
        opened.inputs,
        devices=options.devices,
        machine=machine,
        batch=options.batch,
        micro_batch=options.micro_batch,
        sequence=options.sequence,
        stages=options.stage,
        tensor=options.tensor,
        checkpoint=options.checkpoint,
        offload=OFFLOADS[options.offload],
        precision=options.precision,
    )
    echo(f"samples/s, TFLOPS and memory are of one device\n\n{simulation_table(simulation)}")
    return simulation_to_dict(simulation, opened.description, opened.tokens_per_sample(options.sequence))


def _find_largest(
    options: argparse.Namespace, opened: OpenedModel, machine: Machine, echo: Callable[[str], None]
) -> dict[str, Any]:
    from zeroshard.cli.simulate_output import largest_table, largest_to_dict
    from zeroshard.config.offload import Offload
    from zeroshard.planner import Strategy
    from zeroshard.planner.scaling import TracedModel, TrainingLoop, find_deepest_member, find_family

    family = find_family(opened.model)
    if family is None:
        raise ValueError(
            f"cannot change the depth of {type(opened.model).__name__}: use a preset, or call "
            "zeroshard.planner.scaling.find_largest_model with a function of the number of layers"
        )
    loop = TrainingLoop(inputs=opened.inputs, sequence=options.sequence)
    base_model = TracedModel.from_family(family, loop=loop, precision=options.precision)
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
