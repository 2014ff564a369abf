"""The command `zeroshard generate`: generate text from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class GenerateOptions:
    """Generate text from a model that `zeroshard train` has trained, in one process."""

    run: Annotated[Path, tyro.conf.Positional]
    """directory of a finished run, or of the model in it"""
    prompt: str
    """text to continue"""
    tokens: int = 200
    """number of tokens to generate"""
    temperature: float = 0.8
    """sampling temperature; 0: always the most likely token"""
    seed: int = 0
    """seed of the sampling"""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1 (got {self.tokens})")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0 (got {self.temperature})")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = tyro.cli(GenerateOptions, args=list(argv), prog="zeroshard generate")
    from zeroshard.train import generate_text

    print(
        generate_text(options.run, options.prompt, options.tokens, temperature=options.temperature, seed=options.seed)
    )
    return 0
