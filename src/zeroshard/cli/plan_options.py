"""What the commands `zeroshard plan` and `zeroshard simulate` share. It imports no torch: `--help` is fast."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.cli.common import STDOUT, make_echo, positive_int
from zeroshard.planner import MACHINE_PRESETS

if TYPE_CHECKING:
    from zeroshard.cli.open_model import OpenedModel
    from zeroshard.planner import Machine

MODEL_HELP = "a preset (see `zeroshard presets`), a Hugging Face model's directory or config.json, or module:callable"
MACHINE_HELP = (
    f"{', '.join(MACHINE_PRESETS)}, here (this machine, as measured by `zeroshard plan --calibrate`), or a JSON file"
)


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
    from zeroshard.cli import open_model
    from zeroshard.planner import Machine

    machine = Machine.resolve(options.machine or default_machine).with_memory(options.memory)
    opened = open_model.open_model(options.model, sequence=options.sequence, **shape)
    if options.inputs is not None:
        opened = opened._replace(inputs=open_model.open_inputs(options.inputs))
    return machine, opened


def write_json(record: dict[str, Any], target: str) -> None:
    """Write a record to a file, or to standard output."""
    text = json.dumps(record, indent=1, allow_nan=False)
    if target == STDOUT:
        make_echo(sys.stdout)(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")
