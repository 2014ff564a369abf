"""Reference models in plain PyTorch, independent of zeroshard."""

from zeroshard.models.gpt import GPT, Block, GPTConfig

__all__ = ["GPT", "Block", "GPTConfig"]
