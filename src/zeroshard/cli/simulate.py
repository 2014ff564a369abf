"""The command `zeroshard simulate`: how training scales with the number of devices, and the paper's results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeroshard.cli.common import STDOUT, check_output_files, make_echo, positive_int
from zeroshard.planner.machines.presets import PRESETS as MACHINES

PAPER = "paper"
CHECKPOINT_CHOICES = ("none", "recompute", "host")
OFFLOAD_CHOICES = ("none", "host", "disk")


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
            _write_json(result, options.json)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print(f"zeroshard simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroshard simulate",
        description="Tell how training a model scales from one device to thousands, on paper: throughput a device, "
        "what a step's time goes to, where each stage stops to scale, and the largest model. `zeroshard simulate "
        "paper` computes the tables and figures of the ZeRO paper anew, beside the paper's own numbers.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (see `zeroshard presets`), a Hugging Face model's directory or config.json, module:callable, or "
        "the word paper",
    )
    add = parser.add_argument_group("the devices").add_argument
    add(
        "--devices",
        type=_parse_device_counts,
        metavar="N,N,… or N-N",
        help="how many; a range goes in powers of two; default: 1-16384",
    )
    add("--machine", default="h100", metavar="NAME", help=f"{', '.join(MACHINES)}, here, or a JSON file; default: h100")
    add("--memory", metavar="SIZE", help="of a device, instead of the machine's, as in 80GB")
    add = parser.add_argument_group("the training").add_argument
    add(
        "--batch",
        type=positive_int,
        metavar="B",
        help="samples a step over all devices, the same for any number of them",
    )
    add("--micro-batch", type=positive_int, metavar="M", help="samples a rank and backward; default: what is fastest")
    add("--sequence", type=positive_int, metavar="S", help="tokens a sample")
    add("--stage", type=_parse_stages, metavar="0,1,2,3", help="ZeRO stages to look at; default: all")
    add("--tensor", type=positive_int, default=1, metavar="T", help="devices that divide each layer; default: 1")
    add(
        "--checkpoint",
        choices=CHECKPOINT_CHOICES,
        default="none",
        help="recompute: keep blocks' inputs alone; host: those in host memory; default: none",
    )
    add(
        "--offload",
        choices=OFFLOAD_CHOICES,
        default="none",
        help="where the optimizer's states rest; default: on the device",
    )
    add("--precision", choices=("bf16", "fp16", "fp32"), help="of computation; default: 16 bits on a GPU")
    add("--inputs", metavar="module:callable", help="what the model is called with: a function of the batch")
    add = parser.add_argument_group("the shape of a preset").add_argument
    for name in ("layers", "heads", "width"):
        add(f"--{name}", type=positive_int, metavar="N", help=f"other {name} than the preset's")
    add = parser.add_argument_group("what is told").add_argument
    add(
        "--largest",
        action="store_true",
        help="the deepest model of this width that fits, for each number of devices and stage, instead of a sweep",
    )
    add(
        "--json",
        metavar="FILE",
        help="write everything as JSON too; - for standard output, and tables on standard error",
    )
    return parser


def _reject_ignored_flags(given: argparse.Namespace) -> None:
    """Raise for flags that `paper` ignores; in ``given`` a flag that was not given is None, even with a default."""
    names = [name for name, value in vars(given).items() if value is not None and name not in ("model", "json")]
    if names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ValueError(f"the paper has its own models, devices and training: with {PAPER!r}, leave out {flags}")


def _write_json(record: dict[str, Any], target: str) -> None:
    text = json.dumps(record, indent=1, allow_nan=False)
    if target == STDOUT:
        make_echo(sys.stdout)(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


def _parse_device_counts(text: str) -> list[int]:
    """Parse numbers, and ranges in powers of two."""
    counts: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start, end = positive_int(first), positive_int(last) if dash else positive_int(first)
        if start > end:
            raise argparse.ArgumentTypeError(f"wanted is a range from the fewest to the most devices, got {part!r}")
        counts.append(start)
        while dash and counts[-1] < end:
            counts.append(min(2 * counts[-1], end))
    return counts


def _parse_stages(text: str) -> list[int]:
    if not all(part in ("0", "1", "2", "3") for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"wanted are stages such as 3 or 1,2,3, got {text!r}")
    return [int(part) for part in text.split(",")]


def _simulate_paper(echo: Callable[[str], None]) -> dict[str, Any]:
    from zeroshard.planner.scaling.paper import PAPER_CURVE, paper_results
    from zeroshard.planner.scaling.scaling_json import paper_to_dict
    from zeroshard.planner.scaling.scaling_table import paper_table

    echo(
        "The ZeRO paper (arXiv 1910.02054v3) beside zeroshard's planner, on the machine dgx2 with its published rates."
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
    from zeroshard.planner.machines.machine import Machine
    from zeroshard.planner.open_model import open_inputs, open_model, tokens_per_sample
    from zeroshard.planner.plan import default_precision
    from zeroshard.planner.scaling.scaling_json import simulation_to_dict
    from zeroshard.planner.scaling.scaling_table import simulation_table
    from zeroshard.planner.scaling.simulate import DEVICE_COUNTS, STAGES, simulate

    machine = Machine.resolve(options.machine)
    if options.memory is not None:
        machine = Machine.resolve(machine, memory=options.memory)
    shape = {name: getattr(options, name) for name in ("layers", "heads", "width", "sequence")}
    model, inputs, description = open_model(options.model, **shape)
    if options.inputs is not None:
        inputs = open_inputs(options.inputs)
    options.precision = options.precision or default_precision(machine)
    options.devices, options.stage = options.devices or list(DEVICE_COUNTS), options.stage or list(STAGES)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    echo(f"{description}, {parameters:,} parameters, {options.precision}, on {machine.name}")
    if options.largest:
        return _find_largest(options, model, inputs, machine, description, echo)
    simulation = simulate(
        model,
        inputs,
        devices=options.devices,
        machine=machine,
        batch=options.batch,
        micro_batch=options.micro_batch,
        sequence=options.sequence,
        stages=options.stage,
        tensor=options.tensor,
        checkpoint=options.checkpoint,
        offload=_make_offload(options.offload),
        precision=options.precision,
    )
    echo(f"samples/s, TFLOPS and memory are of one device\n\n{simulation_table(simulation)}")
    return simulation_to_dict(simulation, description, tokens_per_sample(model, inputs, options.sequence))


def _make_offload(name: str) -> Any:
    from zeroshard.config.offload import Offload

    if name == "disk":
        return Offload(
            optimizer="disk", directory="."
        )  # any directory: only the rates and the size of the disk matter here
    return None if name == "none" else Offload(optimizer="host")


def _find_largest(
    options: argparse.Namespace, model: Any, inputs: Any, machine: Any, description: str, echo: Callable[[str], None]
) -> dict[str, Any]:
    from zeroshard.planner.plan_json import versions
    from zeroshard.planner.scaling.largest_model import FIRST_DEPTHS, LargestModel, find_deepest_member
    from zeroshard.planner.scaling.model_family import DepthExtrapolatedModel, find_family
    from zeroshard.planner.scaling.scaling_json import largest_to_dict
    from zeroshard.planner.scaling.scaling_table import largest_table
    from zeroshard.planner.strategy import Strategy

    family = find_family(model)
    if family is None:
        raise ValueError(
            f"it is not known how to make a {type(model).__name__} deeper: give a preset, or call "
            "zeroshard.planner.scaling.largest_model.find_largest_model with a function of the number of layers"
        )
    base_model = DepthExtrapolatedModel(
        family[0], FIRST_DEPTHS[0], inputs, sequence=options.sequence, precision=options.precision
    )
    largest: dict[tuple[int, int], LargestModel] = {}
    for devices in options.devices:
        for stage in options.stage if devices % options.tensor == 0 else ():
            strategy = Strategy(
                stage=stage,
                tensor=options.tensor,
                checkpoint=options.checkpoint,
                offload=_make_offload(options.offload),
                micro_batch=options.micro_batch or 1,
            )
            largest[devices, stage] = find_deepest_member(base_model, strategy, devices, machine)
    if not largest:
        raise ValueError(f"no number of devices is a multiple of the {options.tensor} that divide each layer")
    echo(f"\nthe deepest of this width that fits, micro-batch {options.micro_batch or 1}\n{largest_table(largest)}")
    header = {"model": description, "machine": json.loads(machine.to_json()), "versions": versions()}
    return {**header, "largest": largest_to_dict(largest)}
