"""Generate text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from zeroshard.train.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from zeroshard.train.training_setup import TrainingSetup

PROMPT_TOKENS = 24  # tokens of validation text used as the default prompt
DEFAULT_TEMPERATURE = 0.8  # below 1: favors likely tokens more than the model does


@torch.no_grad()
def generate_tokens(
    logits: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    count: int,
    *,
    context: int | None,
    temperature: float = DEFAULT_TEMPERATURE,
    seed: int = 0,
) -> torch.Tensor:
    """Append ``count`` tokens to (1, n) tokens, sampled from the model's scores; temperature 0 takes the likeliest.

    All ranks of a sharded model call it together. Sampling runs on the CPU with its own generator, so all ranks draw
    the same tokens, and the run's RNG state does not change.

    >>> generate_tokens(lambda t: torch.nn.functional.one_hot((t + 1) % 5, 5) * 1e3, torch.tensor([[3]]), 3, context=8)
    tensor([[3, 4, 0, 1]])
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        window = tokens if context is None else tokens[:, -context:]
        scores = logits(window)[:, -1].float().cpu()
        if temperature == 0:
            next_token = scores.argmax(-1, keepdim=True)
        else:
            next_token = torch.multinomial(torch.softmax(scores / temperature, -1), 1, generator=generator)
        tokens = torch.cat([tokens, next_token.to(tokens.device)], dim=1)
    return tokens


def encode_prompt(tokenizer: Path, prompt: str) -> list[int]:
    """Return the ids of a prompt, without special tokens."""
    ids: list[int] = load_tokenizer(tokenizer).encode(prompt, add_special_tokens=False).ids
    return ids


class GeneratedText(NamedTuple):
    """A prompt, and the text that a model generated after it."""

    prompt: str
    text: str


def generate_sample(setup: TrainingSetup) -> GeneratedText | None:
    """Generate text from the run's prompt; return None if sampling is off. All ranks call it together."""
    run, corpus = setup.options.run, setup.corpus
    if not run.sample_tokens or corpus.tokenizer_path is None:
        return None
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    if run.prompt is not None:
        ids = encode_prompt(corpus.tokenizer_path, run.prompt)
    else:
        loader = setup.validation_loader or setup.train_loader
        ids = loader.sequential_batch(0, 1)[0][0, : min(PROMPT_TOKENS, max(loader.sequence // 2, 1))].tolist()
    setup.model.eval()
    tokens = generate_tokens(
        lambda tokens: setup.language_model.logits(setup.model, tokens),
        torch.tensor([ids], device=setup.rank_info.device),
        run.sample_tokens,
        context=setup.language_model.context,
        seed=setup.options.training.seed,
    )
    setup.model.train()
    prompt = tokenizer.decode(ids)
    return GeneratedText(prompt, tokenizer.decode(tokens[0].tolist()).removeprefix(prompt))
