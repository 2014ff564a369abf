"""External weights: Hugging Face safetensors directories and ``torch.save`` files, read directly into shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from zeroshard.checkpoint.element_order import ElementOrder
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.index import ShardEntry, TensorEntry
from zeroshard.checkpoint.reader import SafetensorsLoadPlanner, TensorStorageReader
from zeroshard.checkpoint.safetensors_files import SAFETENSORS_FILE, SAFETENSORS_INDEX_FILE, SafetensorsWeights

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def is_external_weights(path: Path) -> bool:
    """Return whether a path looks like external weights."""
    if path.is_dir():
        return (path / SAFETENSORS_INDEX_FILE).is_file() or (path / SAFETENSORS_FILE).is_file()
    return path.suffix in (".safetensors", *PICKLE_SUFFIXES)


def open_external_weights(path: Path, rename: Callable[[str], str] | None) -> Mapping[str, torch.Tensor]:
    """Return the weights by name. Tensors are memory-mapped: pages are read on access."""
    try:
        tensors = _open_pickled(path) if path.suffix in PICKLE_SUFFIXES and path.is_file() else SafetensorsWeights(path)
    except (ValueError, FileNotFoundError) as error:
        raise CheckpointError(str(error)) from error
    if rename is None:
        return tensors
    names = {rename(name): name for name in tensors}
    if len(names) != len(tensors):
        raise CheckpointError(f"rename gives several tensors of {path} the same name")
    return _RenamedTensors(tensors, names)


def _open_pickled(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as a torch.save of tensors alone: {first_line}") from error
    if isinstance(loaded, Mapping) and loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        for name, tensor in loaded.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
                kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
                raise CheckpointError(f"{path}: {name} is {kind}, expected a dense tensor with values: save it as one")
        return loaded
    kind = f"a dict of {sorted(map(str, loaded))[:8]}" if isinstance(loaded, Mapping) else type(loaded).__name__
    raise CheckpointError(
        f"{path} holds {kind}, not a state dict of tensors by name: save the state dict alone, "
        "torch.save(model.state_dict(), path)"
    )


class _RenamedTensors(Mapping[str, torch.Tensor]):
    """Weights with their names mapped to others."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: dict[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def make_tensor_entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Describe external weights like those of a checkpoint: one row-major shard per tensor."""
    entries = {}
    for name, tensor in tensors.items():
        element_order = ElementOrder(tuple(range(tensor.dim())))
        shards = [ShardEntry(0, tensor.numel(), 0, 0)] if tensor.numel() else []
        entries[f"model/{name}"] = TensorEntry(tuple(tensor.shape), tensor.dtype, element_order, shards)
    return entries


class ExternalWeightsReader(TensorStorageReader):
    """Reads external weights; each rank accesses only its local elements."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(make_tensor_entries(tensors))
        self._weights = tensors

    def read_items(self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner) -> None:
        """Copy the items from the memory-mapped files."""
        for item in items:
            tensor = self._weights[self.saved_name(item).removeprefix("model/")]
            start, numel = item.storage_offsets[0], item.lengths[0]
            planner.resolve_tensor(item).copy_(tensor.reshape(-1)[start : start + numel])
            planner.commit_tensor(item, tensor)
