"""HuggingFaceModel: load a causal language model of transformers from its directory, and save it again."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from zeroshard.train.models.weights import WeightConversion, WeightInitializer, save_conversions
from zeroshard.utils.install_hint import install_hint
from zeroshard.utils.safetensors_files import (
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX_FILE,
    SafetensorsWeights,
    TensorInfo,
    write_safetensors_directory,
)

if TYPE_CHECKING:
    from zeroshard.train.models.lora import LoRA
    from zeroshard.train.options import ModelOptions

MIN_TRANSFORMERS_VERSION = (5, 22)  # as in pyproject.toml: the rules for renaming weights have moved between versions
CONFIG_FILE = "config.json"
BASE_DIR = "base"  # subdirectory, next to the adapters, of a base model that was trained from scratch
_COPIED_FILES = (  # files of a model in addition to its config and weights
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "vocab.txt merges.txt tokenizer.model spiece.model sentencepiece.bpe.model tekken.json chat_template.jinja "
    "chat_template.json"
).split()
_CONTEXT_ATTRIBUTES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
_MAX_FILE_BYTES = 5e9  # of one safetensors file


class HuggingFaceModel:
    """A causal language model of transformers, on the meta device until ``zeroshard.shard`` initializes it.

    Pass ``module`` and ``init_fn`` to :func:`zeroshard.shard`. No rank ever holds more of the model than its shards and
    one unit: rank 0 reads each tensor directly from the files, and tensors are saved one by one.
    """

    def __init__(self, path: Path) -> None:
        self.path, config_file = _locate_config(path)
        stored = None if path.is_file() else _open_weights(self.path)
        self.config = _load_config(config_file)  # never modified: a model is built from a copy
        self.base_model: Any = _build_model(self.config, config_file)  # transformers' own model, without adapters
        self.module: nn.Module = self.base_model
        self._initializer = WeightInitializer(self.base_model, stored, str(self.path))
        self._stored_dtypes = {name: tensor.dtype for name, tensor in (stored or {}).items()}
        most_common = Counter(dtype for dtype in self._stored_dtypes.values() if dtype.is_floating_point).most_common(1)
        self.dtype: torch.dtype = most_common[0][0] if most_common else self.config.dtype or torch.float32  # for saving

        text_config = self.base_model.config.get_text_config()
        embedding = self.base_model.get_input_embeddings().weight  # [vocab_size, width]
        self.vocab_size = int(embedding.shape[0])
        lengths = (getattr(text_config, name, None) for name in _CONTEXT_ATTRIBUTES)
        self.context = next((length for length in lengths if isinstance(length, int) and length > 0), None)
        self.layers = int(getattr(text_config, "num_hidden_layers", 0))
        self.width = int(getattr(text_config, "hidden_size", embedding.shape[1]))
        self.description = f"{type(self.base_model).__name__}, {self.layers} layers, width {self.width}"
        tokenizer = self.path / "tokenizer.json"
        self.tokenizer_path = tokenizer if tokenizer.is_file() else None
        self.is_pretrained = stored is not None
        self.lora: LoRA | None = None

    def add_lora(self, rank: int, alpha: float, targets: Sequence[str] = ("all-linear",)) -> None:
        """Freeze the model and train low-rank adapters instead. Call it before ``shard``."""
        from zeroshard.train.models.lora import LoRA

        self.lora = LoRA(self.base_model, rank, alpha, targets)
        self.module = self.lora.module
        self.description += f", {self.lora.description}"

    def init_fn(self, module: nn.Module) -> None:
        """Initialize one module's own parameters and buffers; the ``init_fn`` of :class:`zeroshard.Config`."""
        if self.lora is not None and module in self.lora:
            self.lora.initialize(module)
        elif module in self._initializer:
            self._initializer.initialize(module)
        else:
            raise ValueError(f"this {type(module).__name__} is not part of {self.path}: shard HuggingFaceModel.module")

    def checkpoint_activations(self, partition: bool | None = None, offload: bool = False) -> None:
        """Recompute the blocks that transformers marks for checkpointing, or all repeated blocks.

        It does not use transformers' own option: some models lack it, and it neither partitions nor offloads.
        """
        layer_class = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
        marked = [module for module in self.base_model.modules() if isinstance(module, layer_class)]
        try:
            zeroshard.checkpoint_activations(self.module, marked or None, partition=partition, offload=offload)
        except ValueError as error:
            name = type(self.base_model).__name__
            raise ValueError(f"{name} does not support --recompute: omit it ({error})") from error

    def loss(self, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in fp32; in training, plus the router loss if the config enables it."""
        return causal_lm_loss(module, tokens, targets)

    def logits(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the (batch, sequence, vocab_size) scores of the next token."""
        logits: torch.Tensor = module(input_ids=tokens, use_cache=False).logits
        return logits

    def save(self, module: nn.Module, directory: Path | None) -> None:
        """Write what was trained: the adapters, or the model with its config, tokenizer and original dtypes.

        All ranks call it together; ranks without a directory only take part in the collectives.
        """
        if self.lora is None:
            self.save_base(module, directory)
        elif self.is_pretrained:
            self.lora.save(module, directory, self.path.resolve())
        else:  # the base model is stored nowhere else
            self.lora.save(module, directory, (directory or Path()).resolve() / BASE_DIR)
            self.save_base(module, directory and directory / BASE_DIR)

    def save_base(self, module: nn.Module, directory: Path | None) -> None:
        """Write the model without adapters."""
        sharded_names = {id(parameter): name for name, parameter in module.named_parameters()}
        parameters = {name: sharded_names[id(parameter)] for name, parameter in self._initializer.named_parameters()}
        buffers = dict(self._initializer.named_persistent_buffers())
        shapes = {name: tuple(parameter.shape) for name, parameter in self._initializer.named_parameters()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}

        def read_tensor(name: str) -> torch.Tensor:
            return buffers[name] if name in buffers else zeroshard.full_parameter(module, parameters[name])

        def meta_tensor(name: str) -> torch.Tensor:
            dtype = buffers[name].dtype if name in buffers else self.dtype
            return torch.empty(shapes[name], dtype=dtype, device="meta")

        conversions: dict[str, WeightConversion] = {}  # by the name of the written tensor
        entries: list[TensorInfo] = []
        for conversion in save_conversions(self.base_model, shapes):
            for name, tensor in conversion.convert(meta_tensor, self.base_model).items():
                conversions[name] = conversion
                entries.append(TensorInfo(name, self._stored_dtypes.get(name, tensor.dtype), tuple(tensor.shape)))
        converted: dict[str, torch.Tensor] = {}  # converted, not yet written

        def fetch(name: str) -> torch.Tensor:
            if name not in converted:
                converted.update(conversions[name].convert(read_tensor, self.base_model))
            return converted.pop(name)

        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        write_safetensors_directory(directory, entries, fetch, {"format": "pt"}, _MAX_FILE_BYTES)
        if directory is not None:
            self._write_config_and_tokenizer(directory)

    def _write_config_and_tokenizer(self, directory: Path) -> None:
        """Write the config, and copy the files that do not change."""
        config = copy.deepcopy(self.config)
        config.dtype = config.dtype or self.dtype
        config.architectures = [type(self.base_model).__name__]
        config.save_pretrained(str(directory))
        for name in _COPIED_FILES:
            if (self.path / name).is_file() and directory.resolve() != self.path.resolve():
                shutil.copyfile(self.path / name, directory / name)


def open_model(path: Path) -> HuggingFaceModel:
    """Open a local directory with config.json and pretrained weights, or a config.json alone to train from scratch.

    >>> import tempfile
    >>> config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    >>> path = Path(tempfile.mkdtemp()) / "config.json"
    >>> _ = path.write_text(json.dumps(config))
    >>> model = open_model(path)
    >>> model.description
    'GPT2LMHeadModel, 2 layers, width 64'
    >>> sharded, _ = zeroshard.shard(model.module, stage=3, init_fn=model.init_fn)
    """
    return HuggingFaceModel(path)


def open_hugging_face(options: ModelOptions) -> HuggingFaceModel:
    """Open the model of the `zeroshard train` options, with their adapters and activation checkpointing."""
    for name in ("layers", "heads", "width"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for presets; a Hugging Face model sets it in {CONFIG_FILE}: omit --{name}")
    model = open_model(Path(options.model))
    if options.lora:
        model.add_lora(options.lora_rank, options.lora_alpha, options.lora_targets)
    if options.has_activation_checkpointing:
        model.checkpoint_activations(**options.checkpoint_kwargs)
    return model


def load_trained(directory: Path) -> tuple[Callable[[torch.Tensor], torch.Tensor], int | None]:
    """Load a saved model unsharded; return its logits function of (batch, sequence) tokens, and its context."""
    library = _import_transformers()
    adapter = directory / "adapter_config.json"
    base = directory
    if adapter.is_file():
        base_path = json.loads(adapter.read_text())["base_model_name_or_path"]
        base = directory / BASE_DIR if (directory / BASE_DIR).is_dir() else Path(base_path)
    context = open_model(base).context  # also raises if the directory is invalid
    model = library.AutoModelForCausalLM.from_pretrained(str(base), local_files_only=True, trust_remote_code=False)
    if adapter.is_file():
        from zeroshard.train.models.lora import load_adapter

        model = load_adapter(model, directory)
    model.eval()
    return lambda tokens: model(input_ids=tokens).logits, context


def causal_lm_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of (batch, sequence) tokens and targets, in fp32.

    With gradients enabled, it includes the load-balancing loss of the routers if the config sets output_router_logits.
    """
    return output_loss(model, model(input_ids=tokens, use_cache=False), targets)


def output_loss(model: Any, output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of a model's output; see :func:`causal_lm_loss`."""
    value: torch.Tensor = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is None or not torch.is_grad_enabled():
        return value
    configs = (model, model.config.get_text_config())
    weights = (getattr(config, name, None) for config in configs for name in ("router_aux_loss_coef", "aux_loss_coef"))
    weight: float = next(weight for weight in weights if weight is not None)
    return value.add(aux_loss.float(), alpha=weight)


# ------------------------------------------------------------------------------------------------- opening


def _import_transformers() -> Any:
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"a Hugging Face model needs transformers ({error}): {install_hint('huggingface')}"
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", library.__version__)[:2]) < MIN_TRANSFORMERS_VERSION:
        minimum = ".".join(map(str, MIN_TRANSFORMERS_VERSION))
        raise ImportError(
            f"a Hugging Face model needs transformers {minimum} or newer (got {library.__version__}): "
            f"{install_hint('huggingface')}"
        )
    return library


def _locate_config(path: Path) -> tuple[Path, Path]:
    """Return the model's directory and its config file."""
    if path.is_file():
        return path.parent, path
    if not path.is_dir():
        raise FileNotFoundError(
            f"--model {path} is neither a preset nor a local path: pass a preset, the directory of a Hugging Face "
            "model, or its config.json (nothing is downloaded)"
        )
    if not (path / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}: pass the directory of a Hugging Face model")
    return path, path / CONFIG_FILE


def _open_weights(directory: Path) -> SafetensorsWeights | None:
    """Open the directory's weights; return None if it has no weights in any format."""
    if (directory / SAFETENSORS_INDEX_FILE).is_file() or (directory / SAFETENSORS_FILE).is_file():
        return SafetensorsWeights(directory)
    others = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    )
    if others:
        raise ValueError(
            f"{directory} has weights only as {', '.join(others[:4])}, but safetensors are expected: convert them with "
            f"save_pretrained() of transformers, or pass {directory / CONFIG_FILE} to train from scratch"
        )
    return None


def _load_config(file: Path) -> Any:
    """Read a config with transformers' own class; code that comes with a model is never run."""
    library = _import_transformers()
    try:
        config_dict = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON ({error}): pass the {CONFIG_FILE} of a Hugging Face model") from error
    if not isinstance(config_dict, dict) or "model_type" not in config_dict:
        raise ValueError(f'{file} has no "model_type": pass the {CONFIG_FILE} of a Hugging Face model')
    if config_dict.get("quantization_config") is not None:
        raise ValueError(f"{file} describes a quantized model, which cannot be trained: pass 16-bit or 32-bit weights")
    model_type = config_dict["model_type"]
    try:
        config = library.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many classes
        raise ValueError(f"transformers {library.__version__} cannot read {file}: {error}") from error
    if type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{file}: transformers has no causal language model of type {model_type!r}")
    return config


def _build_model(config: Any, file: Path) -> Any:
    """Build the model on the meta device in fp32; ``shard`` sets the compute and storage dtypes."""
    library = _import_transformers()
    try:
        with torch.device("meta"):
            model = library.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:
        raise ValueError(f"transformers {library.__version__} cannot build the model of {file}: {error}") from error
    is_masked_lm = type(config) in library.MODEL_FOR_MASKED_LM_MAPPING
    if is_masked_lm and not (getattr(model.config, "is_decoder", False) or getattr(model.config, "causal", False)):
        raise ValueError(
            f"{file} describes an encoder of type {config.model_type!r}, whose attention is not causal: "
            'set "is_decoder" to true to train it as a causal language model'
        )
    return model
