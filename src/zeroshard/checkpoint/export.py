"""Export: a checkpoint's weights as a directory that Hugging Face's libraries, and any reader of safetensors, take."""

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

from zeroshard.checkpoint.checkpoint_reader import CheckpointReader
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.safetensors_files import TensorInfo, write_safetensors_directory
from zeroshard.utils.atomic_file import fsync_directory, read_json

CONFIG_FILE = "config.json"
# what belongs to a model beside its config and weights, in the libraries' patterns of names
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
    """Write the weights of a checkpoint as Hugging Face does. One process does it, without ranks and without a GPU.

    ``checkpoint`` is one, a directory of some, for the latest, or a run of `zeroshard train`. ``directory`` is made, or
    is empty. Every parameter and persistent buffer stands there under its name in the model, one that is shared under
    its first name alone. No more than one tensor is in memory, and what is read is checked. A failed export leaves
    nothing behind.

    - ``dtype``: of all floating-point tensors; None leaves each as it was saved (after training in bf16, mostly fp32).
    - ``max_shard``: bytes that a file has at most, if no tensor alone has more. Several files come with an index.
    - ``like``: a model's directory, to copy its config, generation config and tokenizer. Otherwise there is a
      ``config.json`` where the checkpoint is of a Hugging Face model, which has brought its own.

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
        raise ValueError(f"max_shard is a number of bytes above 0, got {max_shard!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is a floating-point one, or None to keep each tensor's own, got {dtype}")
    target = Path(directory).absolute()
    config = None if like is None else _read_config(Path(like))
    with CheckpointReader(Path(checkpoint)) as contents, _atomic_directory(target) as partial:
        entries = _tensors_to_export(contents, dtype)
        names = [f"model/{entry.name}" for entry in entries]
        files = {stretch.file_number for name in names for stretch in contents.index.tensors[name].shards}
        contents.index.check_file_sizes(contents.path, sorted(files))  # before memory is taken for what is in them
        memory = torch.empty(max((entry.nbytes for entry in entries), default=0), dtype=torch.uint8)
        wanted = {entry.name: entry.dtype for entry in entries}

        def fetch(name: str) -> torch.Tensor:
            tensor = contents.read_tensor(f"model/{name}", wanted[name], memory)
            if wanted[name] != contents.index.tensors[f"model/{name}"].dtype:
                _warn_if_overflowed(name, tensor)
            return tensor

        write_safetensors_directory(partial, entries, fetch, {"format": "pt"}, max_shard)
        if like is None:
            config = contents.index.config
        else:
            _copy_companion_files(Path(like), partial)
        if config is not None:
            text = json.dumps(_with_dtype(config, entries), indent=2, ensure_ascii=False)
            (partial / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    return target


@contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """Give a directory to write into, which becomes ``directory`` at the end, or goes where something went wrong.

    One that is there already may be a mounted volume, and cannot be replaced: it is then written into a directory
    inside it, and moved up.
    """
    inside = directory.is_dir()
    partial = directory / ".partial" if inside else directory.with_name(f".{directory.name}.partial")
    if inside and any(child != partial for child in directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: give a directory that is, or is not there yet")
    if directory.exists() and not inside:
        raise FileExistsError(f"{directory} is a file: give a directory that is empty, or is not there yet")
    if partial.exists():
        shutil.rmtree(partial)  # of an export that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        if inside:
            for child in sorted(partial.iterdir(), key=lambda child: child.suffix == ".json"):  # an index last
                child.rename(directory / child.name)
            partial.rmdir()
        else:
            partial.rename(directory)
        fsync_directory(directory if inside else directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _tensors_to_export(reader: CheckpointReader, dtype: torch.dtype | None) -> list[TensorInfo]:
    """What is written: parameters in the model's order, then buffers."""
    found = reader.index.tensors_of_kind("model")
    if not found and reader.index.parameters:
        raise CheckpointError(
            f"{reader.path} holds no weights: it was saved with weights=False. Export one that was saved with them"
        )
    left_out = [name for name in reader.index.parameters if name not in found]
    if left_out:
        raise CheckpointError(
            f"{reader.path} was saved with frozen=False and lacks {len(left_out)} parameters that were not trained, "
            f"{left_out[0]} and so on: load it into the model and save that whole"
        )
    parameters = list(reader.index.parameters)
    names = [*parameters, *(name for name in found if name not in reader.index.parameters)]
    entries = []
    for name in names:
        own = found[name].dtype
        entries.append(
            TensorInfo(name, dtype if dtype is not None and own.is_floating_point else own, found[name].shape)
        )
    return entries


def _warn_if_overflowed(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float16 and tensor.numel() and torch.stack(tensor.aminmax()).isinf().any():
        warnings.warn(f"{name} has values beyond ±65504, which fp16 has as infinite: bf16 keeps them", stacklevel=6)


def _with_dtype(config: dict[str, Any], entries: Sequence[TensorInfo]) -> dict[str, Any]:
    """A config that names the dtype of most elements, if it names one: a model is loaded in what it names."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] += torch.Size(entry.shape).numel()
    if not sizes:
        return config
    common = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    named = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    return {**config, **dict.fromkeys(named, common)}


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no {CONFIG_FILE}: give the directory of a model that is like this one"
        )
    return read_json(path)


def _copy_companion_files(source: Path, directory: Path) -> None:
    for pattern in _COMPANION_FILE_PATTERNS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
