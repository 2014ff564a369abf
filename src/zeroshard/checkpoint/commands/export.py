"""The command `zeroshard export`: write a checkpoint's weights in Hugging Face's format. It needs only torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from zeroshard.utils.command_line import CommandParser, make_echo, print_error

DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CONFIG_FILE = "config.json"


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(argv)
    import torch

    from zeroshard.checkpoint import export
    from zeroshard.config.offload import parse_bytes
    from zeroshard.utils.format import format_bytes

    dtype_name = DTYPES[options.dtype]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        path = export(
            options.checkpoint,
            options.directory,
            dtype=None if dtype_name is None else getattr(torch, dtype_name),
            max_shard=parse_bytes("--max-shard", options.max_shard) or 0,
            like=options.like,
        )
    for warning in caught:
        print_error("export", warning.message)
    echo = make_echo(sys.stdout)
    files = [file.stat().st_size for file in path.glob("*.safetensors")]
    echo(f"{path}: {format_bytes(sum(files))} in {len(files)} file{'s' if len(files) > 1 else ''}")
    if not (path / CONFIG_FILE).is_file():
        echo(f"no {CONFIG_FILE} was written, because the checkpoint has none: pass --like DIR to copy one")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeroshard export",
        description="Write the weights of a checkpoint in Hugging Face format: safetensors files, and config.json if "
        "the checkpoint has one. It needs no GPU and no launcher, and only the memory of one tensor.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CKPT",
        help="a checkpoint; or a run or a directory of checkpoints, whose latest checkpoint is used",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="output directory: new or empty")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="keep",
        help="dtype of floating-point tensors (default: keep, as saved: fp32 after bf16 or fp16 training)",
    )
    parser.add_argument(
        "--max-shard",
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file; several files get an index (default: 5GB)",
    )
    parser.add_argument(
        "--like", type=Path, metavar="HF_DIR", help="copy config, generation config and tokenizer from this model"
    )
    return parser
