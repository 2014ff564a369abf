"""The reference GPT in plain PyTorch, independent of zeroshard, and shapes by name (presets)."""

from typing import TYPE_CHECKING

from zeroshard.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from zeroshard.models.gpt import GPT, MAX_LAYERS, Block, GPTConfig, find_output_layers
    from zeroshard.models.presets import CONFIGURATIONS, PRESETS, GPTPreset

__all__ = ["CONFIGURATIONS", "GPT", "MAX_LAYERS", "PRESETS", "Block", "GPTConfig", "GPTPreset", "find_output_layers"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"gpt": "GPT MAX_LAYERS Block GPTConfig find_output_layers", "presets": "CONFIGURATIONS PRESETS GPTPreset"},
)
