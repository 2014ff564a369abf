"""The command `zeroshard train`: train a language model."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.train import read_options


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = read_options(argv)
    from zeroshard.train import run_training  # imports torch, which `--help` does not need

    return run_training(options, argv)
