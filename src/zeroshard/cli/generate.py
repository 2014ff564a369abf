"""The command `zeroshard generate`: generate text from a trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GenerateOptions:
    """Let a model that `zeroshard train` has trained go on with a text, in this process alone."""

    run: Annotated[Path, tyro.conf.Positional]
    """directory of a finished run, or of the model in it"""
    prompt: str
    """the text's beginning"""
    tokens: int = 200
    """how many tokens to add"""
    temperature: float = 0.8
    """how freely they are drawn; 0: always the likeliest"""
    seed: int = 0
    """of the draws"""

    def __post_init__(self) -> None:
        """Validate the options."""
        if self.tokens < 1 or self.temperature < 0 or not self.prompt:
            raise ValueError("wanted: a prompt, tokens from 1 up, a temperature from 0 up")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = tyro.cli(GenerateOptions, args=list(argv), prog="zeroshard generate")
    try:
        print(generate(options))
    except (OSError, ValueError, ImportError) as error:
        print(f"zeroshard generate: {error}", file=sys.stderr)
        return 1
    return 0


def generate(options: GenerateOptions) -> str:
    """Return the prompt followed by the generated text."""
    import torch

    from zeroshard.train.data.tokenizer import load_tokenizer
    from zeroshard.train.generation import generate_tokens

    directory = options.run / "model" if (options.run / "model").is_dir() else options.run
    logits, context = _load_model(directory)
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(options.prompt, add_special_tokens=False).ids
    tokens = generate_tokens(
        logits,
        torch.tensor([ids]),
        options.tokens,
        context=context,
        temperature=options.temperature,
        seed=options.seed,
    )
    return str(tokenizer.decode(tokens[0].tolist()))


def _load_model(directory: Path) -> tuple[Callable[[torch.Tensor], torch.Tensor], int | None]:
    """Load the model in a directory; return its logits function and its context."""
    from zeroshard.train.models.language_model import GPT_MODEL_TYPE, ReferenceGPT
    from zeroshard.utils.atomic_file import read_json

    if not (directory / "config.json").is_file() and not (directory / "adapter_config.json").is_file():
        raise FileNotFoundError(f"{directory} holds no trained model (no config.json): give a run that has finished")
    if (directory / "config.json").is_file() and read_json(directory / "config.json").get(
        "model_type"
    ) == GPT_MODEL_TYPE:
        model = ReferenceGPT.load(directory).eval()
        return model, model.config.context
    from zeroshard.train.models.huggingface import load_trained

    return load_trained(directory)
