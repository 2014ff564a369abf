"""from_pretrained: a transformers model whose weights stay in their files until ``zeroshard.shard()`` reads them.

[Note: transformers loads, without values]
Names, renamings, merged experts, ties, dtypes, missing and unexpected weights are transformers' own decisions: its
``from_pretrained`` runs, and only the tensors that it takes from the files are replaced, by tensors without values
(:class:`~zeroshard.utils.stored_tensor.StoredTensor`). To give it these, it is called with a stand-in for the model's
class that overrides the one method that opens the files. Weights that no file has are initialised by transformers, and
buffers are read at once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.utils.stored_tensor import StoredFile, StoredTensor
from zeroshard.utils.version import check_version

check_version("transformers")

import torch  # noqa: E402
import transformers as transformers  # noqa: E402
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled  # noqa: E402
from transformers.integrations.fsdp import is_fsdp_enabled  # noqa: E402
from transformers.models.auto.auto_factory import _BaseAutoModelClass  # noqa: E402

_REJECTED = {  # arguments of transformers' from_pretrained, and what to do instead
    "device_map": "zeroshard.shard() places the shards: omit it",
    "max_memory": "zeroshard.shard() places the shards: omit it",
    "offload_folder": 'omit it, and pass shard(offload="host") or offload={"parameters": "disk"}',
    "distributed_config": "pass a mesh with a tensor axis to zeroshard.shard()",
    "tp_plan": "pass a mesh with a tensor axis to zeroshard.shard()",
    "tp_size": "pass a mesh with a tensor axis to zeroshard.shard()",
    "gguf_file": "convert the file to safetensors with transformers' own from_pretrained() and save_pretrained()",
    "state_dict": "values that are in memory already need no from_pretrained(): load them with load_state_dict()",
    "quantization_config": "quantised weights cannot be sharded: omit it, and train 16-bit or 32-bit weights",
}


def from_pretrained(model_class: Any, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Return what ``model_class.from_pretrained(path, …)`` returns, with weights that are still in the files.

    The model takes no memory for them. :func:`zeroshard.shard` then has each rank read its own shards, and nothing
    else, so the weights are those that transformers would have loaded. Until then a computation with a weight reads
    it, and writing into one raises: see [Note: stored tensors]. ``model_class`` is a class of transformers or an auto
    class; the weights are safetensors files. All other arguments are transformers' own; those that place or quantise
    weights are rejected.

    >>> import tempfile, torch, zeroshard
    >>> from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    >>> directory = tempfile.mkdtemp()
    >>> GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(directory)
    >>> model = from_pretrained(AutoModelForCausalLM, directory)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = zeroshard.shard(model, optimizer, stage=3)
    """
    _check_arguments(model_class, path, kwargs)
    stand_in = _StandIn(model_class)
    if issubclass(model_class, _BaseAutoModelClass):
        stand_in._model_mapping = _StandInMapping(model_class._model_mapping)
    found = stand_in.from_pretrained(path, *args, **kwargs)
    model = found[0] if isinstance(found, tuple) else found
    if not any(isinstance(parameter, StoredTensor) for parameter in model.parameters()):
        raise ValueError(
            f"{path} was loaded into memory as a {type(model).__name__}, which is not one of transformers' own classes "
            "(trust_remote_code): pass that class to from_pretrained(), or call its own from_pretrained()"
        )
    return found


def causal_lm_config(path: Path) -> Any:
    """Return the config of a causal language model: a directory, or a config.json. Code that comes with it never runs.

    Nothing is downloaded.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} has no config.json: pass a preset (see `zeroshard presets`), the directory of a Hugging Face "
            "model, or its config.json (nothing is downloaded)"
        )
    try:
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many classes
        raise _unusable(file, error) from error


def meta_causal_lm(config: Any) -> Any:
    """Return the causal language model of a config, on the meta device and in fp32."""
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception as error:
        raise _unusable(config.name_or_path, error) from error


def stored_causal_lm(path: Path) -> Any:
    """Return the causal language model of a directory in fp32, with weights that are still in the files.

    Raises if weights are missing, or are not the model's.
    """
    auto_class = transformers.AutoModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    try:
        model, found = from_pretrained(
            auto_class, path.resolve(), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except Exception as error:
        raise _unusable(path, error) from error
    wrong = [f"{kind.replace('_', ' ')}: {str(sorted(names))[:500]}" for kind, names in found.items() if names]
    if wrong:
        raise ValueError(f"the weights in {path} are not those of its config: {'; '.join(wrong)}")
    return model


def _unusable(path: str | Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    return ValueError(f"transformers {transformers.__version__} cannot open {path}: {reason}")


def _check_arguments(model_class: Any, path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> None:
    """Raise on what cannot be loaded without values."""
    auto_class: Any = _BaseAutoModelClass
    base: Any = auto_class if _is_class(model_class, auto_class) else transformers.PreTrainedModel
    if not _is_class(model_class, base):
        raise TypeError(
            f"model_class is a model class of transformers, such as AutoModelForCausalLM, got {model_class!r}"
        )
    if model_class.from_pretrained.__func__.__code__ is not base.from_pretrained.__func__.__code__:
        raise ValueError(
            f"{model_class.__name__} has a from_pretrained() of its own, which reads all weights: call that, and give "
            "zeroshard.shard() the model in memory"
        )
    for name, remedy in _REJECTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"from_pretrained() of zeroshard does not take {name}: {remedy}")
    if is_deepspeed_zero3_enabled() or is_fsdp_enabled():
        raise RuntimeError(
            "transformers is set up for DeepSpeed ZeRO-3 or FSDP, under which it loads weights in its own way: remove "
            "that configuration (a DeepSpeed config, or ACCELERATE_USE_FSDP), zeroshard takes its place"
        )
    config = kwargs.get("config")
    if isinstance(config, transformers.PreTrainedConfig):
        quantization = getattr(config, "quantization_config", None)
    else:
        names = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
        where = {name: kwargs[name] for name in names if name in kwargs}
        described, _ = transformers.PreTrainedConfig.get_config_dict(path if config is None else config, **where)
        quantization = described.get("quantization_config")
    if quantization is not None:
        raise ValueError(
            f"{path} has quantised weights, which cannot be sharded: pass 16-bit or 32-bit weights, or load it with "
            "transformers' own from_pretrained()"
        )


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


class _StandIn:
    """A class of transformers that loads without values: see [Note: transformers loads, without values]."""

    def __init__(self, model_class: Any) -> None:
        self._class = model_class
        self.__name__, self.__module__ = model_class.__name__, model_class.__module__
        self._model_mapping: Any = None  # of an auto class

    def __getattr__(self, name: str) -> Any:
        return getattr(self._class, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._class(*args, **kwargs)

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' method on this object instead of the class."""
        if not issubclass(self._class, _BaseAutoModelClass):
            _check_arguments(self._class, args[0], kwargs)  # an auto class has found it
        return self._class.from_pretrained.__func__(self, *args, **kwargs)

    def _load_pretrained_model(
        self, model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *args: Any
    ) -> Any:
        """Give transformers stored tensors instead of the contents of the files."""
        others = [file for file in checkpoint_files or () if not file.endswith(".safetensors")]
        if others or not checkpoint_files:
            raise ValueError(
                f"the weights are in {', '.join(others) or 'no file'}, expected safetensors files: convert them with "
                "transformers' own from_pretrained() and save_pretrained()"
            )
        files = [StoredFile(Path(file)) for file in checkpoint_files]
        stored = {name: file.tensor(name) for file in files for name in file.entries}
        config = replace(load_config, device_map=None)
        found = self._class._load_pretrained_model(model, stored, None, config, *args)
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if isinstance(buffer, StoredTensor):
                    module._buffers[key] = buffer.read()
                    module._buffers[key]._is_hf_initialized = True  # as transformers marks it
        return found


class _StandInMapping(Mapping[Any, Any]):
    """The model classes of an auto class, each as a stand-in."""

    def __init__(self, mapping: Any) -> None:
        self._mapping = mapping

    def __getitem__(self, config_class: Any) -> Any:
        found = self._mapping[config_class]
        return [_StandIn(one) for one in found] if isinstance(found, (list, tuple)) else _StandIn(found)

    def __contains__(self, config_class: object) -> bool:
        return config_class in self._mapping

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)
