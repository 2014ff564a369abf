"""LanguageModel: the protocol that `zeroshard train` needs from a model, and the reference GPT behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

import zeroshard
from zeroshard.models import GPT, PRESETS, Block, GPTConfig
from zeroshard.train.options import DataOptions, ModelOptions
from zeroshard.utils.atomic_file import read_json, write_json
from zeroshard.utils.safetensors_files import SafetensorsWeights, TensorInfo, write_safetensors_directory

if TYPE_CHECKING:
    from zeroshard.train.models.huggingface import HuggingFaceModel

LanguageModel: TypeAlias = "ReferenceGPT | HuggingFaceModel"
GPT_MODEL_TYPE = "zeroshard-gpt"  # "model_type" in config.json, as in Hugging Face's models


class ReferenceGPT:
    """The reference GPT, without values in memory, with its loss, logits and format.

    ``context`` is the longest sequence, ``width`` the size of the residual stream. ``init_fn`` initializes one module's
    own parameters, for :class:`zeroshard.Config`; None means ``reset_parameters``. Activation checkpointing
    recomputes ``blocks``.

    >>> ReferenceGPT(ModelOptions(layers=2), DataOptions()).description
    'GPT, 2 layers, 4 heads, width 128'
    """

    def __init__(self, model: ModelOptions, data: DataOptions) -> None:
        preset = PRESETS[model.model]
        self.config = GPTConfig(
            vocab_size=data.vocabulary or preset.vocabulary,
            context=model.sequence or preset.context,
            layers=model.layers or preset.layers,
            heads=model.heads or preset.heads,
            width=model.width or preset.width,
        )
        with torch.device("meta"):
            self.module: nn.Module = GPT(self.config)
        self.vocab_size = self.config.vocab_size
        self.layers = self.config.layers
        self.width = self.config.width
        self.context: int | None = self.config.context
        self.description = f"GPT, {self.layers} layers, {self.config.heads} heads, width {self.width}"
        self.tokenizer_path: Path | None = None
        self.is_pretrained = False
        self.blocks = [Block]
        self.init_fn: Callable[[nn.Module], None] | None = None

    def loss(self, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in fp32."""
        loss: torch.Tensor = module(tokens, targets)
        return loss

    def logits(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the (batch, sequence, vocab_size) scores of the next token."""
        logits: torch.Tensor = module(tokens)
        return logits

    def save(self, module: nn.Module, directory: Path | None) -> None:
        """Write config.json and model.safetensors. All ranks call it; only one passes a directory."""
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        entries = [TensorInfo(name, torch.float32, shape) for name, shape in shapes.items()]
        write_safetensors_directory(
            directory, entries, lambda name: zeroshard.full_parameter(module, name), {"format": "pt"}
        )
        if directory is not None:
            write_json(directory / "config.json", {"model_type": GPT_MODEL_TYPE, **dataclasses.asdict(self.config)})


def load_reference_gpt(directory: Path) -> GPT:
    """Read what :meth:`ReferenceGPT.save` wrote, as an unsharded model."""
    config = read_json(directory / "config.json")
    config.pop("model_type")
    model = GPT(GPTConfig(**config))
    model.load_state_dict(dict(SafetensorsWeights(directory)))
    return model.eval()


def open_language_model(model: ModelOptions, data: DataOptions) -> LanguageModel:
    """Open the model that the options name, with its adapters and activation checkpointing."""
    language_model: LanguageModel
    if model.model in PRESETS:
        if model.lora:
            raise ValueError("--lora needs a Hugging Face model: pass its directory as --model")
        language_model = ReferenceGPT(model, data)
    else:
        for options, name in ((data, "vocabulary"), (model, "layers"), (model, "heads"), (model, "width")):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} is for presets; a Hugging Face model sets it in config.json: omit --{name}")
        from zeroshard.train.models.huggingface import HuggingFaceModel

        language_model = HuggingFaceModel(Path(model.model))
        if model.lora:
            language_model.add_lora(model.lora_rank, model.lora_alpha, model.lora_targets)
    if model.has_activation_checkpointing:
        zeroshard.checkpoint_activations(language_model.module, language_model.blocks, **model.checkpoint_kwargs)
    return language_model


def sequence_length(options: ModelOptions, language_model: LanguageModel) -> int:
    """Return the tokens per sequence: the option, or by default the model's context, at most 1024."""
    context = language_model.context
    sequence = options.sequence or min(context or 1024, 1024)
    if context is not None and sequence > context:
        raise ValueError(f"--sequence {sequence} exceeds the model's context of {context} tokens: pass a smaller value")
    return sequence
