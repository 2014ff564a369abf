"""Export a checkpoint's weights as a directory for Hugging Face libraries and any other reader of safetensors."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.group import CheckpointError, absolute_path
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.replicas import warn_of_replicas
from zeroshard.utils.atomic_file import fsync_directory, read_json
from zeroshard.utils.safetensors_files import TensorInfo, write_safetensors_directory

CONFIG_FILE = "config.json"
# files of a Hugging Face model other than its config and weights, as glob patterns
_COMPANION_FILE_PATTERNS = (
    "generation_config.json tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt *.model *.tiktoken "
    "tekken.json chat_template* preprocessor_config.json processor_config.json"
).split()


def export(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard: float = 5e9,
    like: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the weights of a checkpoint in Hugging Face format. Runs in one process, without ranks or a GPU.

    ``checkpoint`` is a checkpoint, a directory of checkpoints (the latest is exported) or the output directory of
    `zeroshard train`. ``directory`` must be empty or not exist. The export contains every parameter and persistent
    buffer under its name in the model; a tied parameter only under its first name. At most one tensor is in memory at a
    time, and checksums are verified. A failed export leaves nothing behind.

    - ``dtype``: the dtype of all floating-point tensors; None keeps the saved dtypes (mostly fp32 after bf16 training).
    - ``max_shard``: the maximum file size in bytes, unless a single tensor is larger. Several files come with an index.
    - ``like``: a model directory from which the config, generation config and tokenizer are copied. Otherwise
      ``config.json`` is written only for a Hugging Face model, from the config saved in the checkpoint.

    >>> import tempfile, zeroshard
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-7", torch.nn.Linear(2, 1)).path
    >>> exported = export(path, path.parent / "exported", dtype=torch.bfloat16)
    >>> sorted(file.name for file in exported.iterdir())
    ['model.safetensors']
    >>> from safetensors.torch import load_file
    >>> load_file(exported / "model.safetensors")["weight"].dtype
    torch.bfloat16
    """
    if not max_shard > 0:
        raise ValueError(f"max_shard is {max_shard!r}, expected a number of bytes above 0")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}, expected a floating-point dtype, or None to keep the saved dtypes")
    target = absolute_path(directory)
    config = None if like is None else _read_config(Path(like))
    with CheckpointReader(Path(checkpoint)) as reader, _atomic_directory(target) as partial_directory:
        warn_of_replicas(reader.index, f"export of {str(reader.path)!r}")
        entries = _tensors_to_export(reader, dtype)
        names = [f"model/{entry.name}" for entry in entries]
        files = {shard.file_number for name in names for shard in reader.index.tensors[name].shards}
        reader.index.check_file_sizes(reader.path, sorted(files))  # before memory is allocated for their tensors
        buffer = torch.empty(max((entry.nbytes for entry in entries), default=0), dtype=torch.uint8, device="cpu")
        dtypes = {entry.name: entry.dtype for entry in entries}

        def fetch(name: str) -> torch.Tensor:
            tensor = reader.read_tensor(f"model/{name}", dtypes[name], buffer)
            if dtypes[name] != reader.index.tensors[f"model/{name}"].dtype:
                _warn_if_overflowed(name, tensor)
            return tensor

        write_safetensors_directory(partial_directory, entries, fetch, {"format": "pt"}, max_shard)
        if like is None:
            config = reader.index.huggingface_config
        else:
            copy_companion_files(Path(like), partial_directory)
        if config is not None:
            text = json.dumps(_with_dtype(config, entries), indent=2, ensure_ascii=False)
            (partial_directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    return target


@contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``directory`` on success and is deleted on failure.

    An existing ``directory`` may be a mounted volume, which cannot be replaced. The temporary directory is then inside
    it, and its files are moved up at the end.
    """
    exists = directory.is_dir()
    partial = directory / ".partial" if exists else directory.with_name(f".{directory.name}.partial")
    if exists and any(child != partial for child in directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: pass an empty directory, or one that does not exist")
    if directory.exists() and not exists:
        raise FileExistsError(f"{directory} is a file: pass an empty directory, or one that does not exist")
    if partial.exists():
        shutil.rmtree(partial)  # of an interrupted export
    partial.mkdir(parents=True)
    try:
        yield partial
        if exists:
            for child in sorted(partial.iterdir(), key=lambda child: child.suffix == ".json"):  # the index last
                child.rename(directory / child.name)
            partial.rmdir()
        else:
            partial.rename(directory)
        fsync_directory(directory if exists else directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _tensors_to_export(reader: CheckpointReader, dtype: torch.dtype | None) -> list[TensorInfo]:
    """Return the tensors to write: parameters in the model's order, then buffers."""
    tensors = reader.index.tensors_of_kind("model")
    if not tensors and reader.index.requires_grad:
        raise CheckpointError(
            f"{reader.path} contains no weights: it was saved with weights=False. Export a checkpoint that has them"
        )
    missing = [name for name in reader.index.requires_grad if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{reader.path} was saved with frozen=False and lacks {len(missing)} frozen parameters, for example "
            f"{missing[0]}: load it into the model, and save the model with frozen=True"
        )
    entries = []
    for name in dict.fromkeys([*reader.index.requires_grad, *tensors]):
        saved = tensors[name]
        export_dtype = dtype if dtype is not None and saved.dtype.is_floating_point else saved.dtype
        entries.append(TensorInfo(name, export_dtype, saved.shape))
    return entries


def _warn_if_overflowed(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float16 and tensor.numel() and torch.stack(tensor.aminmax()).isinf().any():
        warnings.warn(f"{name} has values beyond ±65504, which are infinite in fp16: export as bf16", stacklevel=6)


def _with_dtype(config: dict[str, Any], entries: Sequence[TensorInfo]) -> dict[str, Any]:
    """Return the config with its dtype, if it has one, set to that of most elements: models are loaded in it."""
    numels: Counter[torch.dtype] = Counter()
    for entry in entries:
        if entry.dtype.is_floating_point:
            numels[entry.dtype] += torch.Size(entry.shape).numel()
    if not numels:
        return config
    most_common = str(numels.most_common(1)[0][0]).removeprefix("torch.")
    dtype_keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    return {**config, **dict.fromkeys(dtype_keys, most_common)}


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no {CONFIG_FILE}: pass the directory of a model with the same architecture"
        )
    return read_json(path)


def copy_companion_files(source: Path, directory: Path) -> None:
    """Copy the files of a Hugging Face model other than its config and weights: tokenizer, generation config, …."""
    for pattern in _COMPANION_FILE_PATTERNS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
