"""Generate text, token by token, from a model in training or from a trained one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from zeroshard.train.data.corpus import encode_prompt, load_tokenizer
from zeroshard.train.models import GPT_MODEL_TYPE, load_reference_gpt, load_trained
from zeroshard.train.training_setup import TrainingSetup
from zeroshard.utils.atomic_file import read_json

PROMPT_TOKENS = 24  # tokens of validation text used as the default prompt of a sample


@torch.no_grad()
def generate_tokens(
    logits: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    count: int,
    *,
    context: int | None,
    temperature: float = 0.8,
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


def generate_sample(setup: TrainingSetup) -> dict[str, str] | None:
    """Generate a text after the run's prompt; return None if it is disabled. All ranks call it together."""
    run_options, tokenizer = setup.options.run, setup.corpus.tokenizer
    if not run_options.sample_tokens or tokenizer is None:
        return None
    if run_options.prompt is not None:
        ids = encode_prompt(tokenizer, run_options.prompt)
    else:
        loader = setup.validation_loader or setup.train_loader
        ids = loader.read_windows([0])[0][0, : min(PROMPT_TOKENS, max(loader.sequence // 2, 1))].tolist()
    setup.model.eval()
    tokens = generate_tokens(
        lambda tokens: setup.language_model.logits(setup.model, tokens),
        torch.tensor([ids], device=setup.rank_info.device),
        run_options.sample_tokens,
        context=setup.language_model.context,
        seed=setup.options.training.seed,
    )
    setup.model.train()
    prompt = tokenizer.decode(ids)
    return {"prompt": prompt, "text": tokenizer.decode(tokens[0].tolist()).removeprefix(prompt)}


def generate_text(directory: Path, prompt: str, count: int, *, temperature: float, seed: int) -> str:
    """Return the prompt followed by text from a trained model. ``directory`` is a run, or the model in it."""
    directory = directory / "model" if (directory / "model").is_dir() else directory
    tokenizer = load_tokenizer(directory)
    ids = encode_prompt(tokenizer, prompt)
    logits: Callable[[torch.Tensor], torch.Tensor]
    try:
        config = directory / "config.json"
        if config.is_file() and read_json(config).get("model_type") == GPT_MODEL_TYPE:
            model = load_reference_gpt(directory)
            logits = model
            context: int | None = model.config.context
        else:
            logits, context = load_trained(directory)
    except Exception as error:  # transformers, peft and torch raise many classes
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"cannot load the model in {directory} ({type(error).__name__}: {reason})") from error
    tokens = generate_tokens(
        logits, torch.tensor([ids], device="cpu"), count, context=context, temperature=temperature, seed=seed
    )
    return str(tokenizer.decode(tokens[0].tolist()))
