"""Models to train: the reference GPT, and Hugging Face's causal language models, whole or with LoRA adapters.

[Note: initializing one module at a time]
transformers initializes by ``_init_weights(module)``, children before parents, and a parent may overwrite its children
(GPT-2's attention re-initializes its projection with a smaller deviation). ``zeroshard.shard`` initializes modules one
by one in another order, and needs a module's tensors final after its turn. So every ``_init_weights`` call first runs
on the meta device, where it costs nothing but raises the version of each tensor it writes. Then, at a module's turn,
all calls that write into it run in transformers' order, while every other tensor has the mark that makes transformers
skip it. A few constructors create values on the CPU even under ``torch.device("meta")``: these are kept.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from zeroshard.checkpoint import copy_companion_files
from zeroshard.models import GPT, PRESETS, Block, GPTConfig
from zeroshard.train.options import DataOptions, ModelOptions
from zeroshard.utils.atomic_file import read_json, write_json
from zeroshard.utils.install_hint import install_hint
from zeroshard.utils.safetensors_files import (
    SAFETENSORS_INDEX_FILE,
    SafetensorsWeights,
    TensorInfo,
    write_safetensors_directory,
)
from zeroshard.utils.stored_tensor import StoredTensor

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
LanguageModel: TypeAlias = "ReferenceGPT | HuggingFaceModel"
GPT_MODEL_TYPE = "zeroshard-gpt"  # "model_type" in config.json, as in Hugging Face's models


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
        language_model = HuggingFaceModel(Path(model.model))
        if model.lora:
            language_model.add_lora(model.lora_rank, model.lora_alpha, model.lora_targets)
    if model.has_activation_checkpointing:
        zeroshard.checkpoint_activations(language_model.module, language_model.blocks, **model.checkpoint_kwargs)
    context = language_model.context
    language_model.sequence = model.sequence or min(context or 1024, 1024)
    if context is not None and language_model.sequence > context:
        raise ValueError(
            f"--sequence {model.sequence} exceeds the model's context of {context} tokens: pass a smaller value"
        )
    return language_model


class ReferenceGPT:
    """The reference GPT, without values in memory, with its loss, logits and format.

    ``context`` is the longest sequence, ``width`` the size of the residual stream. ``init_fn`` initializes one module's
    own parameters, for :class:`zeroshard.Config`; None means ``reset_parameters``. Activation checkpointing
    recomputes ``blocks``.

    >>> ReferenceGPT(ModelOptions(layers=2), DataOptions()).description
    'GPT, 2 layers, 4 heads, width 128'
    """

    sequence: int
    """Tokens per sequence in training; :func:`open_language_model` sets it."""

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
        entries = [TensorInfo(name, torch.float32, tuple(p.shape)) for name, p in module.named_parameters()]
        write_safetensors_directory(directory, entries, partial(zeroshard.full_parameter, module), {"format": "pt"})
        if directory is not None:
            write_json(directory / "config.json", {"model_type": GPT_MODEL_TYPE, **dataclasses.asdict(self.config)})


def load_reference_gpt(directory: Path) -> GPT:
    """Read what :meth:`ReferenceGPT.save` wrote, as an unsharded model."""
    config = read_json(directory / "config.json")
    config.pop("model_type")
    model = GPT(GPTConfig(**config))
    model.load_state_dict(dict(SafetensorsWeights(directory)))
    return model.eval()


class HuggingFaceModel:
    """A causal language model of transformers: a directory with weights, or a config.json to train from scratch.

    Its weights stay in their files, or on the meta device, until ``zeroshard.shard(module, init_fn=init_fn)``. No rank
    ever holds more than its shards and one unit: a model is also saved block by block.

    >>> import json, tempfile
    >>> config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    >>> path = Path(tempfile.mkdtemp()) / "config.json"
    >>> _ = path.write_text(json.dumps(config))
    >>> model = HuggingFaceModel(path)
    >>> model.description
    'GPT2LMHeadModel, 2 layers, width 64'
    >>> sharded, _ = zeroshard.shard(model.module, stage=3, init_fn=model.init_fn)
    """

    sequence: int
    """Tokens per sequence in training; :func:`~zeroshard.train.models.open_language_model` sets it."""

    def __init__(self, path: Path) -> None:
        # after integrations, which checks the version
        from transformers import MODEL_FOR_MASKED_LM_MAPPING
        from transformers.modeling_layers import GradientCheckpointingLayer

        from zeroshard.integrations.pretrained import causal_lm_config, meta_causal_lm, stored_causal_lm

        self._config = causal_lm_config(path)
        if not getattr(self._config, "is_decoder", False) and type(self._config) in MODEL_FOR_MASKED_LM_MAPPING:
            raise ValueError(
                f"{path} describes an encoder of type {self._config.model_type!r}, whose attention is not causal: "
                'set "is_decoder" to true to train it as a causal language model'
            )
        self.is_pretrained = path.is_dir()
        self.path = path if self.is_pretrained else path.parent
        self.init_fn: Callable[[nn.Module], None] | None = None
        self.base_model: Any  # transformers' own model, without adapters
        if self.is_pretrained:
            self.base_model = stored_causal_lm(path)
        else:
            self.base_model = meta_causal_lm(self._config)
            self.init_fn = module_initializer(self.base_model)
        self.module: nn.Module = self.base_model
        self.blocks = [GradientCheckpointingLayer]
        default = self._config.dtype or torch.float32
        self._dtypes: dict[str, torch.dtype] = {}  # for saving
        for name, tensor in self.base_model.state_dict(keep_vars=True).items():
            if isinstance(tensor, StoredTensor):
                self._dtypes[name] = tensor.pieces[0].dtypes[0]
            else:
                self._dtypes[name] = default if isinstance(tensor, nn.Parameter) else tensor.dtype
        text_config = self._config.get_text_config()
        embedding = self.base_model.get_input_embeddings().weight  # [vocab_size, width]
        self.vocab_size = int(embedding.shape[0])
        self.context: int | None = getattr(text_config, "max_position_embeddings", None)
        self.layers = int(getattr(text_config, "num_hidden_layers", 0))
        self.width = int(getattr(text_config, "hidden_size", embedding.shape[1]))
        self.description = f"{type(self.base_model).__name__}, {self.layers} layers, width {self.width}"
        tokenizer = self.path / "tokenizer.json"
        self.tokenizer_path = tokenizer if tokenizer.is_file() else None

    def add_lora(self, rank: int, alpha: float, targets: Sequence[str] = ("all-linear",)) -> None:
        """Freeze the model and train low-rank adapters of PEFT instead. Call it before ``shard``.

        ``targets`` are module names or their last parts; "all-linear" means all but the head, and an empty list means
        PEFT's default for the architecture. An adapter's scale is ``alpha / rank``.
        """
        if not self.is_pretrained:
            raise ValueError("--lora needs pretrained weights: pass the directory of a model as --model")
        try:
            import peft
        except ImportError as error:
            raise ImportError(f"LoRA needs peft ({error}): {install_hint('huggingface')}") from error
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # any number
            target_modules="all-linear" if tuple(targets) == ("all-linear",) else list(targets) or None,
            task_type="CAUSAL_LM",
        )
        adapted: Any = peft.get_peft_model(self.base_model, config)
        self.module = adapted
        self.description += f", LoRA of rank {rank} on {len(adapted.targeted_module_names)} modules"

    def loss(self, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in fp32; in training, plus the router loss if the config enables it."""
        return output_loss(module, module(input_ids=tokens, use_cache=False), targets)

    def logits(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the (batch, sequence, vocab_size) scores of the next token."""
        logits: torch.Tensor = module(input_ids=tokens, use_cache=False).logits
        return logits

    def save(self, module: nn.Module, directory: Path | None) -> None:
        """Write what was trained: the adapters, or the model with its config, tokenizer and original dtypes.

        All ranks call it together; ranks without a directory only take part in the collectives.
        """
        if self.module is self.base_model:
            self._save_model(module, directory)
            return
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        adapters = {name: zeroshard.full_parameter(module, name).cpu() for name in names}
        if directory is not None:
            adapted: Any = module
            adapted.save_pretrained(str(directory), state_dict=adapters, save_embedding_layers=False)

    def _save_model(self, module: nn.Module, directory: Path | None) -> None:
        """Write the model in the names and shapes it was loaded from: a file a block, gathered one after the other."""
        from safetensors.torch import save_file
        from transformers.core_model_loading import revert_weight_conversion

        tensors = dict((*module.named_parameters(), *module.named_buffers()))
        blocks: dict[str, list[str]] = {}  # by "model.layers.0."; all else is one
        for name in filter(self._dtypes.__contains__, tensors):  # all but temporary buffers
            block = re.match(r".*?\.\d+\.", name)
            blocks.setdefault(block[0] if block else "", []).append(name)
        weight_map: dict[str, str] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        for number, names in enumerate(blocks.values(), 1):
            values: dict[str, torch.Tensor] = {}
            for name in names:
                value = tensors[name]
                if isinstance(value, nn.Parameter):
                    value = zeroshard.full_parameter(module, name)
                values[name] = value.to(device="cpu", dtype=self._dtypes[name])
            if directory is not None:
                file = f"model-{number:05d}-of-{len(blocks):05d}.safetensors"
                written = revert_weight_conversion(self.base_model, values)
                copies = {name: tensor.contiguous().clone() for name, tensor in written.items()}  # no shared memory
                save_file(copies, directory / file, {"format": "pt"})
                weight_map |= dict.fromkeys(written, file)
        if directory is not None:
            write_json(directory / SAFETENSORS_INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
            self._config.dtype = Counter(self._dtypes.values()).most_common(1)[0][0]
            self._config.architectures = [type(self.base_model).__name__]
            self._config.save_pretrained(str(directory))
            copy_companion_files(self.path, directory)


def load_trained(directory: Path) -> tuple[Callable[[torch.Tensor], torch.Tensor], int | None]:
    """Load a saved model unsharded; return its logits function of (batch, sequence) tokens, and its context."""
    from zeroshard.integrations.pretrained import transformers  # which checks that it is installed

    if not (directory / "config.json").is_file() and not (directory / ADAPTER_WEIGHTS_FILE).is_file():
        raise FileNotFoundError(  # before transformers looks for other formats, which may execute code
            f"{directory} has neither a model (config.json) nor adapters ({ADAPTER_WEIGHTS_FILE}): pass a finished run"
        )
    # with adapters, it reads their base too
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(directory), local_files_only=True, use_safetensors=True
    )
    model.eval()
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return lambda tokens: model(input_ids=tokens).logits, context


def output_loss(model: Any, output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a model's output and (batch, sequence) targets, in fp32.

    With gradients enabled, it includes the load-balancing loss of the routers if the config sets output_router_logits.
    """
    value: torch.Tensor = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is None or not torch.is_grad_enabled():
        return value
    config = model.config.get_text_config()
    weight = config.router_aux_loss_coef if hasattr(config, "router_aux_loss_coef") else config.aux_loss_coef
    return value.add(aux_loss.float(), alpha=weight)


def module_initializer(model: Any) -> Callable[[nn.Module], None]:
    """Return an ``init_fn`` for :func:`zeroshard.shard`: see [Note: initializing one module at a time]."""
    from transformers import PreTrainedModel

    before = [(name, t, t._version) for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    calls: dict[nn.Module, list[tuple[Any, nn.Module]]] = {}  # by the module they write: owner of the method, argument

    def dry_run(module: nn.Module, owner: Any) -> None:
        if isinstance(module, PreTrainedModel):
            owner = module
        for child in module.children():
            dry_run(child, owner)
        versions = {id(tensor): tensor._version for tensor in _tensors(module)}
        owner._init_weights(module)
        for inner in module.modules():
            if any(tensor._version != versions[id(tensor)] for tensor in _tensors(inner, recurse=False)):
                calls.setdefault(inner, []).append((owner, module))

    dry_run(model, model)
    missing = [name for name, tensor, version in before if tensor._version == version]
    if missing:
        raise ValueError(
            f"transformers cannot initialize {', '.join(missing[:8])} of {type(model).__name__}: pass a directory with "
            "weights"
        )

    @torch.no_grad()
    def init_fn(module: nn.Module) -> None:
        own = {id(tensor) for tensor in _tensors(module, recurse=False)}
        for owner, argument in calls.get(module, ()):
            others: list[Any] = [tensor for tensor in _tensors(argument) if id(tensor) not in own]
            for tensor in others:
                tensor._is_hf_initialized = True
            owner._init_weights(argument)
            for tensor in others:
                del tensor._is_hf_initialized

    return init_fn


def _tensors(module: nn.Module, recurse: bool = True) -> list[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]
