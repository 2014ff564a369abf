"""The command `zeroshard train`: train a language model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext

from zeroshard.train import TrainingError, describe_bug, read_options
from zeroshard.utils.command_line import print_error
from zeroshard.utils.lazy_import import uncollected_imports


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. An error is one line, whatever was passed."""
    try:
        options = read_options(argv)
        with nullcontext() if "torch" in sys.modules else uncollected_imports():
            from zeroshard.train import run_training  # imports torch, which `--help` does not need

        return run_training(options)
    except Exception as error:
        is_explained = isinstance(error, (TrainingError, ValueError, OSError, ImportError))
        print_error("train", error if is_explained else describe_bug(error))
        return 1
