"""LoRA: low-rank adapters of PEFT around a frozen model; only they are trained and saved."""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard
from zeroshard.utils.install_hint import install_hint
from zeroshard.utils.safetensors_files import TensorInfo, write_safetensors

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_ADAPTER_NAME = "default"  # PEFT's default name


class LoRA:
    """The adapters of one model. Train ``module``: the model, modified in place, in PEFT's wrapper.

    ``targets`` are module names or their last parts; "all-linear" means all but the head, and an empty list means
    PEFT's default for the architecture. An adapter's scale is ``alpha / rank``.
    """

    def __init__(self, model: Any, rank: int, alpha: float, targets: Sequence[str] = ("all-linear",)) -> None:
        peft = _import_peft()
        base_modules = set(model.modules())
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=targets[0] if len(targets) == 1 and targets[0] == "all-linear" else list(targets) or None,
            # GPT-2's weights are transposed
            fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in base_modules),
            task_type="CAUSAL_LM",
        )
        with torch.device("meta"):
            self.module: Any = peft.get_peft_model(model, config)
        self._initializers = dict(_adapter_initializers(self.module))
        unknown = [
            name
            for name, module in self.module.named_modules()
            if module not in base_modules and module not in self._initializers and [*module.parameters(recurse=False)]
        ]
        if unknown:
            raise ValueError(f"PEFT added {', '.join(unknown[:8])}, which are not LoRA adapters")
        self.description = f"LoRA of rank {rank} on {len(self._initializers) // 2} modules"

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._initializers

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Initialize a module of an adapter. The initial product of A and B is zero."""
        for parameter in module.parameters(recurse=False):
            self._initializers[module](parameter)

    def save(self, module: nn.Module, directory: Path | None, base: Path) -> None:
        """Write the adapters for ``base`` in PEFT's format. All ranks call it; only one passes a directory."""
        names = {
            re.sub(rf"\.{_ADAPTER_NAME}(?=\.|$)", "", f"{prefix}.{key}"): f"{prefix}.{key}"
            for prefix, inner in module.named_modules()
            if inner in self._initializers
            for key, _ in inner.named_parameters(recurse=False)
        }
        parameters = dict(module.named_parameters())
        entries = [TensorInfo(name, torch.float32, tuple(parameters[fqn].shape)) for name, fqn in names.items()]
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            config = copy.deepcopy(self.module.peft_config[_ADAPTER_NAME])
            config.inference_mode = True
            config.base_model_name_or_path = str(base)
            config.save_pretrained(str(directory))
        path = directory and directory / ADAPTER_WEIGHTS_FILE
        write_safetensors(path, entries, lambda name: zeroshard.full_parameter(module, names[name]), {"format": "pt"})


def load_adapter(model: nn.Module, directory: Path) -> Any:
    """Wrap a plain model in saved adapters."""
    return _import_peft().PeftModel.from_pretrained(model, str(directory), local_files_only=True)


def _adapter_initializers(model: Any) -> Iterator[tuple[nn.Module, Callable[[torch.Tensor], Any]]]:
    """Yield the modules of the adapters and their initializers, the same as PEFT's."""
    for layer in model.modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "lora_B"):
            down, up = layer.lora_A, layer.lora_B
            if _ADAPTER_NAME in down:
                yield down[_ADAPTER_NAME], partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
                yield up[_ADAPTER_NAME], nn.init.zeros_
            else:  # adapters of an embedding
                yield layer.lora_embedding_A, nn.init.zeros_
                yield layer.lora_embedding_B, nn.init.normal_


def _import_peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(f"LoRA needs peft ({error}): {install_hint('huggingface')}") from error
