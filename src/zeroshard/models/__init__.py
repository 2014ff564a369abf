"""Reference models: plain PyTorch, knowing nothing of zeroshard."""

from zeroshard.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
