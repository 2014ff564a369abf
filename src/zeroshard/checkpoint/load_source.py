"""What a load reads from: a checkpoint, or external weights (Hugging Face safetensors, ``torch.save`` files)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from zeroshard.checkpoint.flat_shards import ElementOrder
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.index import CheckpointIndex, ShardEntry, TensorEntry, is_checkpoint
from zeroshard.checkpoint.json_codec import decode
from zeroshard.checkpoint.reader import (
    CheckpointReader,
    SafetensorsLoadPlanner,
    SafetensorsStorageReader,
    TensorStorageReader,
)
from zeroshard.checkpoint.retention import find_checkpoint
from zeroshard.utils.safetensors_files import SAFETENSORS_FILE, SAFETENSORS_INDEX_FILE, SafetensorsWeights

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass
class LoadSource:
    """A checkpoint or external weights, open for reading."""

    path: Path
    index: CheckpointIndex  # of external weights: only tensors
    reader: TensorStorageReader

    @classmethod
    def open(cls, path: Path, rename: Callable[[str], str] | None, rank: int = 0, world_size: int = 1) -> LoadSource:
        """Open a path returned by :func:`find_source`; raise if a file is missing or has the wrong size.

        Also compare the files' headers with the index; each of the ``world_size`` ranks checks some of them.
        """
        if _is_external_weights(path):
            reader = ExternalWeightsReader(_open_external_weights(path, rename))
            return cls(path, CheckpointIndex(tensors=reader.tensors), reader)
        index = CheckpointIndex.read(path)
        index.check_file_sizes(path, range(len(index.files)))
        index.check_file_headers(path, range(rank, len(index.files), world_size))
        return cls(path, index, SafetensorsStorageReader(path, index))

    def decode(self, value: Any) -> Any:
        """Decode JSON-encoded data of a checkpoint, and read the tensors in it."""
        with CheckpointReader(self.path, self.index) as reader:
            return decode(value, lambda name: reader.read_tensor(f"other/{name}"))


def find_source(path: Path) -> Path:
    """Resolve a path to external weights, a checkpoint, or the latest checkpoint in a directory."""
    return path if _is_external_weights(path) else find_checkpoint(path)


def _is_external_weights(path: Path) -> bool:
    if is_checkpoint(path):
        return False
    if path.is_dir():
        return (path / SAFETENSORS_INDEX_FILE).is_file() or (path / SAFETENSORS_FILE).is_file()
    return path.suffix in (".safetensors", *PICKLE_SUFFIXES)


def _open_external_weights(path: Path, rename: Callable[[str], str] | None) -> dict[str, torch.Tensor]:
    """Return the weights by name. Tensors are memory-mapped: pages are read on access."""
    try:
        is_pickled = path.suffix in PICKLE_SUFFIXES and path.is_file()
        tensors = dict((_open_pickled(path) if is_pickled else SafetensorsWeights(path)).items())
    except (ValueError, FileNotFoundError) as error:
        raise CheckpointError(str(error)) from error
    if rename is None:
        return tensors
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    if len(renamed) != len(tensors):
        raise CheckpointError(f"rename maps several tensors of {path} to the same name: return a unique name for each")
    return renamed


def _open_pickled(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read, expected a file by torch.save that contains only tensors: {first_line}"
        ) from error
    if not isinstance(loaded, Mapping) or not loaded or not all(isinstance(v, torch.Tensor) for v in loaded.values()):
        kind = f"a dict of {sorted(map(str, loaded))[:8]}" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise CheckpointError(
            f"{path} contains {kind}, expected a state dict of tensors by name: save only the state dict, "
            "torch.save(model.state_dict(), path)"
        )
    for name, tensor in loaded.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{path}: {name} is {kind}, expected a dense tensor with values: save it as one")
    return loaded


class ExternalWeightsReader(TensorStorageReader):
    """Reads external weights; each rank accesses only its local elements."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        entries = {}
        for name, tensor in weights.items():  # as in a checkpoint with one row-major shard per tensor
            element_order = ElementOrder(tuple(range(tensor.dim())))
            shards = [ShardEntry(0, tensor.numel(), 0, 0)] if tensor.numel() else []
            entries[f"model/{name}"] = TensorEntry(tuple(tensor.shape), tensor.dtype, element_order, shards)
        super().__init__(entries)
        self._weights = weights

    def read_items(self, items: Sequence[ReadItem], planner: SafetensorsLoadPlanner) -> None:
        """Copy the items from the memory-mapped files."""
        for item in items:
            tensor = self._weights[self.saved_name(item).removeprefix("model/")]
            start, numel = item.storage_offsets[0], item.lengths[0]
            planner.resolve_tensor(item).copy_(tensor.reshape(-1)[start : start + numel])
            planner.commit_tensor(item, tensor)
