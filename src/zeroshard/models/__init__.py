"""Reference models in plain PyTorch, independent of zeroshard."""

from zeroshard.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
