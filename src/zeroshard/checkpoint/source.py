"""Source: what is loaded from: a checkpoint, or weights that others wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.contents import CheckpointReader
from zeroshard.checkpoint.foreign import (
    ExternalWeightsReader,
    is_external_weights,
    make_tensor_entries,
    open_external_weights,
)
from zeroshard.checkpoint.history import find_checkpoint
from zeroshard.checkpoint.index import CheckpointIndex, TensorEntry, is_checkpoint
from zeroshard.checkpoint.plain import decode
from zeroshard.checkpoint.reader import SafetensorsStorageReader, TensorStorageReader


@dataclass
class LoadSource:
    """What is read."""

    path: Path
    tensors: dict[str, TensorEntry]
    reader: TensorStorageReader
    index: CheckpointIndex | None  # of a checkpoint; None of weights alone

    @classmethod
    def open(cls, path: Path, rename: Callable[[str], str] | None, rank: int = 0, world_size: int = 1) -> LoadSource:
        """Open what :func:`find_source` found; refuses a checkpoint that lacks a file, or has one of another size.

        The files' own headers are compared with the index, some by each of the ``ranks`` that open it together.
        """
        if not is_checkpoint(path) and is_external_weights(path):
            foreign = open_external_weights(path, rename)
            return cls(path, make_tensor_entries(foreign), ExternalWeightsReader(foreign), None)
        index = CheckpointIndex.read(path)
        index.check_file_sizes(path, range(len(index.files)))
        index.check_file_headers(path, range(rank, len(index.files), world_size))
        return cls(path, index.tensors, SafetensorsStorageReader(path, index), index)

    def decode(self, value: Any) -> Any:
        """Plain data of a checkpoint, with the tensors in it."""
        with CheckpointReader(self.path, self.index) as contents:
            return decode(value, lambda name: contents.read_tensor(f"other/{name}"))


def find_source(path: Path) -> Path:
    """What a path means: weights, a checkpoint, or the latest of several."""
    return path if not is_checkpoint(path) and is_external_weights(path) else find_checkpoint(path)
