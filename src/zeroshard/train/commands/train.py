"""The command `zeroshard train`: train a language model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from zeroshard.train import TrainingError, describe_bug, read_options
from zeroshard.utils.lazy_import import uncollected_imports


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. An error is one line, whatever was passed."""
    try:
        _check_working_directory()
        options = read_options(argv)
        with nullcontext() if "torch" in sys.modules else uncollected_imports():
            from zeroshard.train import run_training  # imports torch, which `--help` does not need

        return run_training(options)
    except Exception as error:
        is_explained = isinstance(error, (TrainingError, ValueError, OSError, ImportError))
        print(f"zeroshard train: {error if is_explained else describe_bug(error)}", file=sys.stderr)
        return 1


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise OSError("the working directory has been deleted: change to another one") from error
