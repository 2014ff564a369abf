"""LanguageModel: the protocol that `zeroshard train` needs from a model, and the reference GPT behind it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

import zeroshard
from zeroshard.models import GPT, Block, GPTConfig
from zeroshard.presets import PRESETS
from zeroshard.train.options import DataOptions, ModelOptions
from zeroshard.utils.atomic_file import read_json, write_json
from zeroshard.utils.safetensors_files import SafetensorsWeights, TensorInfo, write_safetensors_directory

GPT_MODEL_TYPE = "zeroshard-gpt"  # "model_type" in config.json, as in Hugging Face's models


class LanguageModel(Protocol):
    """A causal language model on the meta device, with its loss, logits and format."""

    module: nn.Module
    description: str
    """One line."""
    vocab_size: int
    context: int | None
    """Longest sequence; None if the model has no limit."""
    layers: int
    """Number of blocks."""
    width: int
    """Size of the residual stream."""
    tokenizer_path: Path | None
    """The model's own tokenizer, if any."""
    is_pretrained: bool

    @property
    def init_fn(self) -> Callable[[nn.Module], None] | None:
        """Initializes one module's own parameters, for :class:`zeroshard.Config`; None: ``reset_parameters``."""

    def checkpoint_activations(self, partition: bool | None = None, offload: bool = False) -> None:
        """Recompute the blocks' activations in backward; see :func:`zeroshard.checkpoint_activations`."""

    def loss(self, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in fp32."""

    def logits(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the (batch, sequence, vocab_size) scores of the next token."""

    def save(self, module: nn.Module, directory: Path | None) -> None:
        """Write the sharded model in its original format. All ranks call it; only one passes a directory."""


class ReferenceGPT:
    """The reference GPT as a LanguageModel."""

    init_fn = None
    tokenizer_path: Path | None = None
    is_pretrained = False

    def __init__(self, config: GPTConfig) -> None:
        with torch.device("meta"):
            self.module: nn.Module = GPT(config)
        self.config = config
        self.vocab_size, self.layers, self.width = config.vocab_size, config.layers, config.width
        self.context: int | None = config.context
        self.description = f"GPT, {config.layers} layers, {config.heads} heads, width {config.width}"

    @classmethod
    def from_options(cls, model: ModelOptions, data: DataOptions) -> ReferenceGPT:
        """Create the preset's model, with the changes in the options.

        >>> ReferenceGPT.from_options(ModelOptions(layers=2), DataOptions()).description
        'GPT, 2 layers, 4 heads, width 128'
        """
        preset = PRESETS[model.model]
        config = GPTConfig(
            vocab_size=data.vocabulary or preset.vocabulary,
            context=model.sequence or preset.context,
            layers=model.layers or preset.layers,
            heads=model.heads or preset.heads,
            width=model.width or preset.width,
        )
        language_model = cls(config)
        if model.has_activation_checkpointing:
            language_model.checkpoint_activations(**model.checkpoint_kwargs)
        return language_model

    def checkpoint_activations(self, partition: bool | None = None, offload: bool = False) -> None:
        zeroshard.checkpoint_activations(self.module, [Block], partition=partition, offload=offload)

    def loss(self, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(tokens, targets)
        return loss

    def logits(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = module(tokens)
        return logits

    def save(self, module: nn.Module, directory: Path | None) -> None:
        """Write config.json and model.safetensors."""
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        entries = [TensorInfo(name, torch.float32, shape) for name, shape in shapes.items()]
        write_safetensors_directory(
            directory, entries, lambda name: zeroshard.full_parameter(module, name), {"format": "pt"}
        )
        if directory is not None:
            write_json(directory / "config.json", {"model_type": GPT_MODEL_TYPE, **dataclasses.asdict(self.config)})

    @staticmethod
    def load(directory: Path) -> GPT:
        """Read what :meth:`save` wrote, as an unsharded model."""
        config = read_json(directory / "config.json")
        config.pop("model_type")
        model = GPT(GPTConfig(**config))
        with SafetensorsWeights(directory) as weights:
            model.load_state_dict(dict(weights))
        return model


def open_language_model(model: ModelOptions, data: DataOptions) -> LanguageModel:
    """Open the model that the options name."""
    if model.model in PRESETS:
        if model.lora:
            raise ValueError("--lora needs a Hugging Face model: pass its directory as --model")
        return ReferenceGPT.from_options(model, data)
    if data.vocabulary is not None:
        raise ValueError("--vocabulary is for presets; a Hugging Face model sets it in config.json: omit --vocabulary")
    matches = difflib.get_close_matches(model.model, PRESETS, n=1)
    if matches and not Path(model.model).exists():
        raise ValueError(f"--model {model.model!r} is neither a preset nor a local path: did you mean {matches[0]!r}?")
    from zeroshard.train.models.huggingface import open_hugging_face

    return open_hugging_face(model)


def sequence_length(options: ModelOptions, language_model: LanguageModel) -> int:
    """Return the tokens per sequence: the option, or by default the model's context, at most 1024."""
    context = language_model.context
    sequence = options.sequence or min(context or 1024, 1024)
    if context is not None and sequence > context:
        raise ValueError(f"--sequence {sequence} exceeds the model's context of {context} tokens: pass a smaller value")
    return sequence


def find_output_layers(module: nn.Module) -> tuple[str, ...]:
    """Return the name of the layer that computes the logits: it stays in bf16 with --precision fp8.

    >>> from zeroshard.models import GPT, GPTConfig
    >>> find_output_layers(GPT(GPTConfig(vocab_size=16, context=4, layers=1, heads=1, width=8)))
    ('head',)
    """
    get_output = getattr(module, "get_output_embeddings", None)
    output = get_output() if callable(get_output) else getattr(module, "head", None)
    return tuple(name for name, each in module.named_modules() if output is not None and each is output)
